//! GPU nodes as their plugin would describe them.

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference};
use k8s_openapi::jiff::Timestamp;
use kerf_api::{
    Attribute, Blocked, Gpu, GpuInstanceStatus, GpuNode, GpuNodeSpec, GpuNodeStatus, GpuOffer, MigPlacement,
    MigProfile, MigStatus, names,
};
use kerf_controller::held::Holding;
use kerf_controller::policy::{LayoutFile, Policy};
use kerf_mig::parted::Layouts;
use kerf_mig::product::{ModeSwitch, Product};
use kube::core::{DynamicObject, PartialObjectMeta};
use serde_json::{Value, json};

pub(crate) const DRIVER: &str = "gpu.nvidia.com";
pub(crate) const NODE_UID: &str = "00000000-0000-0000-0000-0000000000aa";

/// A GPU of a known product at PCI bus `bus`, offering what it could when MIG is off.
pub(crate) fn gpu(product: &str, bus: u8) -> Gpu {
    let product = Product::by_key(product).unwrap();
    let (major, minor) = product.compute_capability;
    let attributes = [
        ("architecture", Attribute::string(format!("{:?}", product.architecture))),
        ("brand", Attribute::string(&product.brand)),
        ("cudaComputeCapability", Attribute::version(format!("{major}.{minor}.0"))),
        ("resource.kubernetes.io/pcieRoot", Attribute::string("pci0000:00")),
    ];
    let switchable = product.mig.as_ref().is_some_and(|mig| mig.mode == ModeSwitch::Switchable);
    Gpu {
        name: format!("gpu-{bus:02x}-00-0"),
        offer: if switchable { GpuOffer::WholeOrPartitions } else { GpuOffer::Whole },
        pci_bus_id: format!("0000:{bus:02x}:00.0"),
        uuid: format!("GPU-00000000-0000-0000-0000-0000000000{bus:02x}"),
        product: product.name.clone(),
        memory_mib: product.memory_mib,
        attributes: attributes.map(|(name, value)| (name.to_owned(), value)).into(),
        mig: product.mig.as_ref().map(|mig| MigStatus {
            switchable,
            profiles: mig.profiles.iter().map(|profile| self::profile(&profile.profile)).collect(),
            ..MigStatus::default()
        }),
        ..Gpu::default()
    }
}

fn profile(profile: &kerf_mig::Profile) -> MigProfile {
    MigProfile {
        id: profile.id,
        name: profile.name.clone(),
        compute_slices: profile.compute_slices,
        memory_mib: profile.memory_mib,
        multiprocessors: profile.engines.multiprocessors,
        copy_engines: profile.engines.copy_engines,
        decoders: profile.engines.decoders,
        encoders: profile.engines.encoders,
        jpeg_engines: profile.engines.jpeg_engines,
        ofa_engines: profile.engines.ofa_engines,
        max_instances: profile.max_instances,
        placements: profile.placements.iter().map(|p| MigPlacement { start: p.start, size: p.size }).collect(),
    }
}

/// A GPU on which something is carved.
pub(crate) fn carved(mut gpu: Gpu) -> Gpu {
    gpu.mig.as_mut().unwrap().instances.push(GpuInstanceStatus {
        id: 7,
        profile_id: 19,
        ..GpuInstanceStatus::default()
    });
    gpu
}

/// Something that is there for `reason`: in `size` memory slices from `start` on, or everywhere.
pub(crate) fn blocked(reason: &str, place: Option<(u32, u32)>) -> Blocked {
    let placement = place.map(|(start, size)| MigPlacement { start, size });
    Blocked { placement, reason: reason.into(), message: "a sentence".into(), usable: None }
}

/// A node whose plugin is registered.
pub(crate) fn node(name: &str, gpus: Vec<Gpu>) -> GpuNode {
    let mut node = GpuNode::new(name, GpuNodeSpec::default());
    node.metadata.uid = Some(format!("uid-of-gpunode-{name}"));
    node.metadata.owner_references = Some(vec![OwnerReference {
        api_version: "v1".into(),
        kind: "Node".into(),
        name: name.into(),
        uid: NODE_UID.into(),
        ..OwnerReference::default()
    }]);
    node.status = Some(GpuNodeStatus {
        driver_name: DRIVER.into(),
        registered: true,
        driver_version: Some("535.261.03".into()),
        cuda_driver_version: Some("12.2".into()),
        gpus,
        ..GpuNodeStatus::default()
    });
    node
}

pub(crate) fn registered(mut node: GpuNode, registered: bool) -> GpuNode {
    node.status.as_mut().unwrap().registered = registered;
    node
}

/// The Node object, as a metadata watch shows it.
pub(crate) fn core_node(name: &str, uid: &str) -> PartialObjectMeta<Node> {
    let metadata = ObjectMeta { name: Some(name.into()), uid: Some(uid.into()), ..ObjectMeta::default() };
    PartialObjectMeta { types: None, metadata, _phantom: std::marker::PhantomData }
}

/// The same with labels.
pub(crate) fn labelled_node(name: &str, uid: &str, labels: &[(&str, &str)]) -> PartialObjectMeta<Node> {
    let mut node = core_node(name, uid);
    node.metadata.labels = Some(labels.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect());
    node
}

/// A GpuPolicy, as the watch shows it. Later ones are younger.
pub(crate) fn policy(name: &str, spec: Value) -> Policy {
    let mut object = json!({
        "apiVersion": "kerf.dev/v1alpha1", "kind": "GpuPolicy",
        "metadata": {"name": name, "uid": format!("uid-of-{name}"), "generation": 3, "creationTimestamp": "2026-01-01T00:00:00Z"},
    });
    object["spec"] = spec;
    Policy::from(serde_json::from_value::<DynamicObject>(object).unwrap())
}

/// The layout file of the article, with a layout for some models only.
pub(crate) fn layouts() -> LayoutFile {
    let text = "
version: v1
mig-configs:
  all-1g.10gb:
    - devices: all
      mig-enabled: true
      mig-devices:
        \"1g.10gb\": 7
  mixed:
    - devices: [0]
      mig-enabled: true
      mig-devices:
        \"3g.40gb\": 2
    - devices: [1]
      mig-enabled: true
      mig-devices:
        \"1g.10gb\": 7
    - devices: [2, 3]
      mig-enabled: false
  only-h100:
    - device-filter: \"0x233010DE\"
      devices: all
      mig-enabled: true
      mig-devices: {\"1g.10gb+me\": 1, \"2g.20gb\": 1}
";
    LayoutFile::Read(Layouts::parse(text).unwrap())
}

/// A claim that holds these devices of node `n`.
pub(crate) fn holding(claim: &str, devices: &[&str]) -> Holding {
    let names = devices.iter().map(|device| (*device).to_owned()).collect();
    let devices = if devices.is_empty() { [].into() } else { [("n".to_owned(), names)].into() };
    Holding { claim: claim.to_owned(), devices }
}

/// The lease of a plugin; an empty `holder` is a released one.
pub(crate) fn lease(node: &str, holder: &str, renewed: Timestamp) -> Lease {
    Lease {
        metadata: ObjectMeta { name: Some(names::plugin_lease(node)), ..ObjectMeta::default() },
        spec: Some(LeaseSpec {
            holder_identity: Some(holder.to_owned()).filter(|holder| !holder.is_empty()),
            lease_duration_seconds: Some(30),
            renew_time: Some(MicroTime(renewed)),
            ..LeaseSpec::default()
        }),
    }
}
