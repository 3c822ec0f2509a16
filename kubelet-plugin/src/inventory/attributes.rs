//! The attributes under which a GPU is published, of the names and types that existing claims select by.

use std::collections::BTreeMap;

use kerf_api::Attribute;
use kerf_nvml::{CudaVersion, GpuFacts, PciAddress};

use super::host::Location;

/// Attributes by name.
pub(super) type Attributes = BTreeMap<String, Attribute>;

/// The longest text the DRA API takes, in bytes (`DeviceAttributeMaxValueLength`, `k8s.io/api/resource/v1`).
const TEXT_BYTES: usize = 64;

/// What all GPUs of the node have in common.
pub(super) fn common(driver_version: &str, cuda: CudaVersion) -> Attributes {
    let cuda = format!("{}.{}.0", cuda.major, cuda.minor);
    let mut attributes = Attributes::from([("cudaDriverVersion".to_owned(), Attribute::version(cuda))]);
    if let Some(version) = semantic(driver_version) {
        attributes.insert("driverVersion".to_owned(), Attribute::version(version));
    }
    attributes
}

/// Those of one GPU, with the common ones.
pub(super) fn of_gpu(facts: &GpuFacts, address: PciAddress, location: &Location, common: &Attributes) -> Attributes {
    let text = |text: &str| Attribute::string(&text[..text.floor_char_boundary(TEXT_BYTES)]);
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
