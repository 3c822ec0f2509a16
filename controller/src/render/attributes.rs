//! Attributes of devices: the names and types of the driver that kerf replaces, within the API's limits.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::DeviceAttribute;
use kerf_api::{Attribute, Gpu, GpuNodeStatus};

/// The most attributes and capacities of one device together.
const MOST: usize = 32;

/// The most bytes of a text or version attribute.
const LONGEST_VALUE: usize = 64;

/// The longest name of an attribute without its domain, and the longest domain.
const LONGEST_IDENTIFIER: usize = 32;
const LONGEST_DOMAIN: usize = 63;

pub(super) type Attributes = BTreeMap<String, DeviceAttribute>;

/// The attributes that a GPU and its partitions share, and what had to be left out of them.
///
/// `capacities` is the number of capacities that the device with the most of them has: the API limits both together.
pub(super) fn shared(status: &GpuNodeStatus, gpu: &Gpu, capacities: usize) -> (Attributes, Vec<String>) {
    let mut attributes = Attributes::new();
    let mut left_out = Vec::new();

    // A name that is cut still says what the product is; half an address or UUID would be a wrong one.
    insert(&mut attributes, "productName", text(truncate(&gpu.product)));
    insert(&mut attributes, "resource.kubernetes.io/pciBusID", text(&gpu.pci_bus_id));
    insert(&mut attributes, "driverVersion", status.driver_version.as_deref().and_then(semver).map(version));
    insert(&mut attributes, "cudaDriverVersion", status.cuda_driver_version.as_deref().and_then(semver).map(version));

    // `type`, and one or two of `uuid`, `parentUUID` and `profile`, come on top.
    let room = MOST.saturating_sub(capacities + 3);
    for (name, value) in &gpu.attributes {
        // In the driver's own domain a name means the same with it and without.
        let own = name.strip_prefix(&status.driver_name).and_then(|name| name.strip_prefix('/'));
        let name = own.unwrap_or(name);
        if ["type", "uuid", "parentUUID", "profile"].contains(&name) || attributes.contains_key(name) {
            continue;
        }
        let problem = if !is_attribute_name(name) {
            "the name is not a C identifier of at most 32 characters, with or without a domain"
        } else if attributes.len() >= room {
            "a device has at most 32 attributes and capacities"
        } else if let Some(value) = checked(value) {
            attributes.insert(name.to_owned(), value);
            continue;
        } else {
            "the value is not one text of at most 64 bytes, semantic version, number or truth value"
        };
        left_out.push(format!("attribute {name:?}: {problem}"));
    }
    (attributes, left_out)
}

/// What only the whole GPU says.
pub(super) fn whole(gpu: &Gpu, shared: &Attributes) -> Attributes {
    let mut attributes = shared.clone();
    insert(&mut attributes, "type", text(kerf_api::names::TYPE_GPU));
    insert(&mut attributes, "uuid", text(&gpu.uuid));
    attributes
}

/// What only a partition says. It has no `uuid`: it does not exist before it is carved.
pub(super) fn partition(gpu: &Gpu, profile: &str, shared: &Attributes) -> Attributes {
    let mut attributes = shared.clone();
    insert(&mut attributes, "type", text(kerf_api::names::TYPE_MIG));
    insert(&mut attributes, "parentUUID", text(&gpu.uuid));
    insert(&mut attributes, "profile", text(profile));
    attributes
}

fn insert(attributes: &mut Attributes, name: &str, value: Option<DeviceAttribute>) {
    if let Some(value) = value {
        attributes.insert(name.to_owned(), value);
    }
}

fn text(value: &str) -> Option<DeviceAttribute> {
    let fits = !value.is_empty() && value.len() <= LONGEST_VALUE;
    fits.then(|| DeviceAttribute { string: Some(value.to_owned()), ..DeviceAttribute::default() })
}

fn version(value: String) -> DeviceAttribute {
    DeviceAttribute { version: Some(value), ..DeviceAttribute::default() }
}

/// The value in the API's type, when it is one that the API accepts.
fn checked(attribute: &Attribute) -> Option<DeviceAttribute> {
    match attribute {
        Attribute { string: Some(value), version: None, int: None, bool: None } => text(value),
        Attribute { string: None, version: Some(value), int: None, bool: None } => {
            (value.len() <= LONGEST_VALUE && semver::Version::parse(value).is_ok()).then(|| version(value.clone()))
        }
        Attribute { string: None, version: None, int: int @ Some(_), bool: None } => {
            Some(DeviceAttribute { int: *int, ..DeviceAttribute::default() })
        }
        Attribute { string: None, version: None, int: None, bool: bool @ Some(_) } => {
            Some(DeviceAttribute { bool: *bool, ..DeviceAttribute::default() })
        }
        _ => None,
    }
}

/// An NVIDIA version as a semantic one: `535.261.03` is `535.261.3`, `12.2` is `12.2.0`.
fn semver(text: &str) -> Option<String> {
    let mut numbers = text.split('.').map(|part| part.parse::<u64>().ok());
    let [major, minor, patch] = [numbers.next()?, numbers.next().unwrap_or(Some(0)), numbers.next().unwrap_or(Some(0))];
    Some(format!("{}.{}.{}", major?, minor?, patch?))
}

/// At most 64 bytes, cut between characters.
fn truncate(text: &str) -> &str {
    text[..text.floor_char_boundary(LONGEST_VALUE)].trim_end()
}

fn is_attribute_name(name: &str) -> bool {
    let (domain, identifier) = name.split_once('/').map_or((None, name), |(domain, rest)| (Some(domain), rest));
    let is_identifier = identifier.len() <= LONGEST_IDENTIFIER
        && identifier.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && identifier.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    is_identifier
        && domain
            .is_none_or(|domain| domain.len() <= LONGEST_DOMAIN && domain.split('.').all(super::name::is_dns_label))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_become_semantic() {
        for (nvidia, semantic) in [
            ("535.261.03", Some("535.261.3")),
            ("12.2", Some("12.2.0")),
            ("580.65.06.01", Some("580.65.6")),
            ("13", Some("13.0.0")),
            ("", None),
            ("r535", None),
            ("535.x", None),
        ] {
            assert_eq!(semver(nvidia).as_deref(), semantic, "{nvidia}");
        }
    }

    #[test]
    fn product_names_are_cut_between_characters() {
        assert_eq!(truncate("NVIDIA H100 80GB HBM3"), "NVIDIA H100 80GB HBM3");
        assert_eq!(truncate(&"é".repeat(40)).len(), 64);
        assert_eq!(truncate(&format!("x{}", "é".repeat(40))).len(), 63);
        assert_eq!(truncate(&format!("{} tail", "x".repeat(63))), "x".repeat(63));
    }

    #[test]
    fn bad_attributes_are_left_out_one_by_one() {
        let long = "x".repeat(65);
        let attributes = [
            ("architecture", Attribute::string("Hopper")),
            ("resource.kubernetes.io/numaNode", Attribute::int(0)),
            ("no-identifier", Attribute::string("x")),
            ("tooLong", Attribute::string(&long)),
            ("noVersion", Attribute::version("1.2")),
            ("two", Attribute { int: Some(1), ..Attribute::string("x") }),
            ("nothing", Attribute::default()),
            ("uuid", Attribute::string("not the GPU's")),
            ("productName", Attribute::string("not the GPU's")),
            ("gpu.nvidia.com/uuid", Attribute::string("not the GPU's")),
            ("gpu.nvidia.com/architecture", Attribute::string("another")),
            ("gpu.nvidia.com/minor", Attribute::int(3)),
        ];
        let gpu = Gpu {
            product: "P".into(),
            uuid: "GPU-1".into(),
            attributes: attributes.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
            ..Gpu::default()
        };
        let status = GpuNodeStatus { driver_name: "gpu.nvidia.com".into(), ..GpuNodeStatus::default() };
        let (shared, left_out) = shared(&status, &gpu, 0);
        let names: Vec<_> = shared.keys().map(String::as_str).collect();
        assert_eq!(names, ["architecture", "minor", "productName", "resource.kubernetes.io/numaNode"]);
        assert_eq!(shared["architecture"].string.as_deref(), Some("Hopper"));
        assert_eq!(left_out.len(), 5, "{left_out:?}");
        assert_eq!(whole(&gpu, &shared)["uuid"].string.as_deref(), Some("GPU-1"));
    }

    #[test]
    fn never_more_than_the_api_allows() {
        let attributes = (0..40).map(|i| (format!("a{i}"), Attribute::int(i))).collect();
        let gpu = Gpu { product: "P".into(), uuid: "GPU-1".into(), attributes, ..Gpu::default() };
        let (shared, left_out) = shared(&GpuNodeStatus::default(), &gpu, 7);
        assert!(partition(&gpu, "1g.10gb", &shared).len() + 7 <= 32);
        assert_eq!(shared.len() - 1 + left_out.len(), 40);
    }
}
