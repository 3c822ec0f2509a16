//! The state of the node as `nvml-sim ctl state` prints it.

use kerf_mig::Placement;
use serde::{Deserialize, Serialize};

use crate::node::Gpu;

/// The whole node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeState {
    /// Driver version.
    pub driver_version: String,
    /// Every GPU, by its place in the order of PCI addresses.
    pub gpus: Vec<GpuState>,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuState {
    /// PCI address in the kernel's form.
    pub pci_bus_id: String,
    /// `GPU-...`.
    pub uuid: String,
    /// The N of `/dev/nvidiaN`.
    pub minor: u32,
    /// The product's key.
    pub product: String,
    /// Whether no handle can be had, for whatever reason.
    pub broken: bool,
    /// Whether that is because it fell off the bus.
    #[serde(default)]
    pub lost: bool,
    /// `nvmlComputeMode_t`.
    pub compute_mode: u32,
    /// Time slice: 0 default, 1 short, 2 medium, 3 long.
    pub timeslice: u32,
    /// MIG; absent on a GPU without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig: Option<MigState>,
}

/// MIG on one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigState {
    /// The mode in force.
    pub current: bool,
    /// The mode after the next reset.
    pub pending: bool,
    /// GPU instances, by id.
    pub instances: Vec<GpuInstanceState>,
}

/// A GPU instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuInstanceState {
    /// Its id.
    pub id: u32,
    /// Hardware id of its profile.
    pub profile_id: u32,
    /// Name of its profile.
    pub profile: String,
    /// Where it lies, in memory slices.
    pub placement: Placement,
    /// Compute instances in it, by id.
    pub compute_instances: Vec<ComputeInstanceState>,
}

/// A compute instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ComputeInstanceState {
    /// Its id.
    pub id: u32,
    /// Hardware id of its profile.
    pub profile_id: u32,
    /// Where it lies in its GPU instance, in compute slices.
    pub placement: Placement,
    /// `MIG-...`.
    pub uuid: String,
}

/// What is on a GPU.
pub(super) fn gpu_state(gpu: &Gpu) -> GpuState {
    let (spec, settings) = (gpu.spec(), gpu.settings());
    let cis = gpu.all_cis();
    let name = |id: u32| {
        let profiles = spec.product.mig.iter().flat_map(|mig| &mig.profiles);
        profiles.map(|profile| &profile.profile).find(|profile| profile.id == id).map(|profile| profile.name.clone())
    };
    let instances = gpu.all_gis().into_iter().map(|gi| GpuInstanceState {
        id: gi.id,
        profile_id: gi.profile,
        profile: name(gi.profile).unwrap_or_default(),
        placement: gi.placement,
        compute_instances: cis
            .iter()
            .filter(|(ci, _)| ci.gi == gi.id)
            .map(|(ci, uuid)| ComputeInstanceState {
                id: ci.id,
                profile_id: ci.profile,
                placement: ci.placement,
                uuid: uuid.clone(),
            })
            .collect(),
    });
    GpuState {
        pci_bus_id: spec.pci.to_string(),
        uuid: spec.uuid.clone(),
        minor: spec.minor,
        product: spec.product.key.clone(),
        broken: settings.broken,
        lost: settings.lost,
        compute_mode: settings.compute_mode,
        timeslice: settings.timeslice,
        mig: settings.mig.map(|(current, pending)| MigState { current, pending, instances: instances.collect() }),
    }
}
