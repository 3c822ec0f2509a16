//! The attributes under which a GPU is published, of the names and types that existing claims select by.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path};

use kerf_api::{Attribute, names};
use kerf_nvml::{CudaVersion, DriverRoot, GpuFacts, PciAddress};

/// Attributes by name.
pub(crate) type Attributes = BTreeMap<String, Attribute>;

/// Where a GPU sits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Location {
    /// The PCIe root complex, `pci0000:64`.
    pub(crate) pcie_root: Option<String>,
    /// The NUMA node; none on a machine without several.
    pub(crate) numa_node: Option<i64>,
    /// The PCI ids in one word, `0x233010de`: the device's before the vendor's.
    pub(crate) pci_ids: Option<String>,
}

impl Location {
    /// What sysfs tells. Parts that the kernel does not tell are absent.
    pub(crate) fn of(root: &DriverRoot, address: PciAddress) -> Location {
        let device = root.sys_pci().join(address.to_string());
        let numa_node = fs::read_to_string(device.join("numa_node"));
        let id = |name| {
            let text = fs::read_to_string(device.join(name)).ok()?;
            u16::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
        };
        let pci_ids = || Some(format!("{:#06x}{:04x}", id("device")?, id("vendor")?));
        Location {
            pci_ids: pci_ids(),
            pcie_root: fs::canonicalize(&device).ok().as_deref().and_then(pcie_root),
            // -1 where the firmware names no node (Linux Documentation/ABI/testing/sysfs-bus-pci).
            numa_node: numa_node.ok().and_then(|text| text.trim().parse().ok()).filter(|node| *node >= 0),
        }
    }
}

/// The longest text the DRA API takes, in bytes (`DeviceAttributeMaxValueLength`, `k8s.io/api/resource/v1`).
const TEXT_BYTES: usize = 64;

/// What all GPUs of the node have in common.
pub(crate) fn common(driver_version: &str, cuda: CudaVersion) -> Attributes {
    let cuda = format!("{}.{}.0", cuda.major, cuda.minor);
    let mut attributes = Attributes::from([("cudaDriverVersion".to_owned(), Attribute::version(cuda))]);
    if let Some(version) = semantic(driver_version) {
        attributes.insert("driverVersion".to_owned(), Attribute::version(version));
    }
    attributes
}

/// Those of one GPU, with the common ones.
pub(crate) fn of_gpu(facts: &GpuFacts, address: PciAddress, location: &Location, common: &Attributes) -> Attributes {
    let (major, minor) = facts.compute_capability;
    let own = [
        ("uuid", Some(text(&facts.uuid))),
        ("productName", Some(text(&facts.name))),
        ("brand", Some(text(&facts.brand))),
        ("architecture", Some(text(&facts.architecture))),
        ("cudaComputeCapability", Some(Attribute::version(format!("{major}.{minor}.0")))),
        ("resource.kubernetes.io/pciBusID", Some(Attribute::string(address.to_string()))),
        ("resource.kubernetes.io/pcieRoot", location.pcie_root.as_deref().map(text)),
        ("resource.kubernetes.io/numaNode", location.numa_node.map(Attribute::int)),
    ];
    let own = own.into_iter().filter_map(|(name, attribute)| Some((name.to_owned(), attribute?)));
    common.clone().into_iter().chain(own).collect()
}

/// Those of a whole GPU, as a container is told them.
pub(crate) fn of_whole(mut gpu: Attributes) -> Attributes {
    gpu.insert("type".to_owned(), text(names::TYPE_GPU));
    gpu
}

/// Those of a partition that is carved, from those of its GPU. Only then has it a UUID of its own.
pub(crate) fn of_partition(mut gpu: Attributes, profile: &str, uuid: &str) -> Attributes {
    if let Some(parent) = gpu.insert("uuid".to_owned(), text(uuid)) {
        gpu.insert("parentUUID".to_owned(), parent);
    }
    gpu.insert("type".to_owned(), text(names::TYPE_MIG));
    gpu.insert("profile".to_owned(), text(profile));
    gpu
}

fn text(text: &str) -> Attribute {
    Attribute::string(&text[..text.floor_char_boundary(TEXT_BYTES)])
}

/// The root complex in a device's real path, `/sys/devices/pci0000:64/0000:64:00.0/0000:65:00.0`: the name by which
/// `k8s.io/dynamic-resource-allocation/deviceattribute` publishes it.
fn pcie_root(device: &Path) -> Option<String> {
    let is_root = |name: &str| {
        let address = name.strip_prefix("pci").and_then(|rest| rest.split_once(':'));
        let is_hex = |text: &str, length| text.len() >= length && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        address.is_some_and(|(domain, bus)| is_hex(domain, 4) && is_hex(bus, 2))
    };
    device.components().rev().find_map(|part| match part {
        Component::Normal(name) => name.to_str().filter(|name| is_root(name)).map(str::to_owned),
        _ => None,
    })
}

/// A driver version as semantic version, which knows no leading zeros and has three parts: `535.261.03` is `535.261.3`.
fn semantic(version: &str) -> Option<String> {
    let mut parts = version.split('.').map(str::parse::<u64>);
    let mut next = || parts.next().unwrap_or(Ok(0));
    let semantic = semver::Version::new(next().ok()?, next().ok()?, next().ok()?);
    Some(semantic.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_complex_is_found_in_the_real_path() {
        for (path, root) in [
            ("/sys/devices/pci0000:64/0000:64:00.0/0000:65:00.0", Some("pci0000:64")),
            ("/tmp/pci/pci10000:00/10000:00:02.0/10000:01:00.0", Some("pci10000:00")),
            ("/sys/devices/pci0000:00/0000:00:1c.0/pci0001:3a/0001:3a:00.0", Some("pci0001:3a")),
            ("/sys/devices/virtual/pci_thing/0000:65:00.0", None),
        ] {
            assert_eq!(pcie_root(Path::new(path)).as_deref(), root, "{path}");
        }
    }

    #[test]
    fn a_partition_has_a_uuid_of_its_own_and_names_its_parents() {
        let gpu = Attributes::from([("uuid".to_owned(), text("GPU-1")), ("brand".to_owned(), text("Nvidia"))]);
        let is = |attributes: &Attributes, name: &str| attributes[name].string.clone().unwrap();
        let whole = of_whole(gpu.clone());
        assert_eq!((is(&whole, "type"), is(&whole, "uuid")), ("gpu".to_owned(), "GPU-1".to_owned()));
        let part = of_partition(gpu, "1g.10gb", "MIG-1");
        let found = ["type", "uuid", "parentUUID", "profile", "brand"].map(|name| is(&part, name));
        assert_eq!(found, ["mig", "MIG-1", "GPU-1", "1g.10gb", "Nvidia"]);
    }

    #[test]
    fn driver_versions_become_semantic() {
        for (version, expected) in [
            ("535.261.03", Some("535.261.3")),
            ("570.86", Some("570.86.0")),
            ("580.65.06.01", Some("580.65.6")),
            ("unknown", None),
            ("", None),
        ] {
            assert_eq!(semantic(version).as_deref(), expected, "{version:?}");
        }
    }
}
