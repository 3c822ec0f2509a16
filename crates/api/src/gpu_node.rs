//! `GpuNode`: what one node's plugin knows about its GPUs, and what the controller wants of them.
//!
//! The plugin writes the status and reads the spec, the controller the other way round.

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use schemars::transform::RecursiveTransform;
use serde::{Deserialize, Serialize};

use crate::schema::known_formats;

/// What the node shall do with its GPUs beyond what claims need. Written by the controller, from the GpuPolicies and layouts that
/// are in force; an empty one leaves everything to the claims and to the plugin's command line.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kerf.dev",
    version = "v1alpha1",
    kind = "GpuNode",
    plural = "gpunodes",
    shortname = "gpn",
    status = "GpuNodeStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "The GPUs of one node, as its kubelet plugin sees them. Named like the node and owned by it.",
    printcolumn = r#"{"name":"Registered","type":"boolean","jsonPath":".status.registered"}"#,
    printcolumn = r#"{"name":"Driver","type":"string","jsonPath":".status.driverVersion"}"#,
    printcolumn = r#"{"name":"GPUs","type":"string","jsonPath":".status.gpus[*].product","priority":1}"#,
    printcolumn = r#"{"name":"Withheld","type":"string","jsonPath":".status.gpus[*].withheld.reason"}"#,
    printcolumn = r#"{"name":"Blocked","type":"string","jsonPath":".status.gpus[*].blocked[*].reason"}"#,
    printcolumn = r#"{"name":"Message","type":"string","jsonPath":".status.message"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[schemars(transform = RecursiveTransform(known_formats))]
#[serde(rename_all = "camelCase")]
pub struct GpuNodeSpec {
    /// By the GPU's [name](Gpu::name). Where there is no entry nothing is decided yet, and the node keeps all instances that it
    /// did not make; an empty one says that nothing is wanted of the GPU beyond what the plugin was started with.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gpus: BTreeMap<String, GpuSpec>,
}

/// What the node shall do with one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuSpec {
    /// The MIG mode that the GPU shall be in while it is idle. Absent: as claims need it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig_mode: Option<MigMode>,
    /// What becomes of GPU instances that no claim explains. Absent: what the plugin was started with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub foreign_instances: Option<ForeignInstances>,
}

/// What becomes of GPU instances that no claim explains: somebody made them by hand, or they are left over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ForeignInstances {
    /// They stay. A claim for exactly one of them uses it; what overlaps is not given out.
    Keep,
    /// They stay until a claim needs their place.
    Adopt,
    /// They are destroyed, unless they are in use.
    Delete,
}

/// What the node's plugin found. Written on change only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = RecursiveTransform(known_formats))]
#[serde(rename_all = "camelCase", default)]
pub struct GpuNodeStatus {
    /// The DRA driver name this plugin serves.
    pub driver_name: String,
    /// Whether the kubelet has accepted the plugin. No devices are published while it is false.
    pub registered: bool,
    /// The kernel's boot id at the time of writing: another one means the node has rebooted.
    pub boot_id: String,
    /// The NVIDIA driver's version, such as `535.261.03`. Absent while NVML cannot be loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_version: Option<String>,
    /// The CUDA version of the driver, such as `12.2`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cuda_driver_version: Option<String>,
    /// Why this node offers nothing at all, for a person to read (NVML cannot be loaded, no GPU found).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// One entry a GPU, ordered by PCI address; a GPU that cannot be read is here with its reason.
    pub gpus: Vec<Gpu>,
}

/// One GPU. Facts that could not be read are absent; then `withheld` says why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Gpu {
    /// Stable name made of the PCI address: `gpu-3b-00-0`, or `gpu-0001-3b-00-0` where the domain is not 0000. The name
    /// of the whole GPU as a device, and the prefix of its partitions.
    pub name: String,
    /// What may be published of this GPU now.
    pub offer: GpuOffer,
    /// Why nothing, or less than the hardware could do, is offered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub withheld: Option<Withheld>,
    /// PCI address in the kernel's form, `0000:3b:00.0`.
    pub pci_bus_id: String,
    /// The model as mig-parted's device filters name it: PCI device id before vendor id, `0x233010de`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pci_device_id: Option<String>,
    /// NVML UUID, `GPU-...`.
    pub uuid: String,
    /// NVML minor number: the N of `/dev/nvidiaN`.
    pub minor: u32,
    /// Product name as NVML gives it, `NVIDIA H100 80GB HBM3`.
    pub product: String,
    /// Total memory in MiB; 0 where the GPU does not report it.
    pub memory_mib: u64,
    /// Attributes of the GPU for DRA, by the name they are published under, without domain for the driver's own ones:
    /// `architecture`, `brand`, `cudaComputeCapability`, `resource.kubernetes.io/pcieRoot`, ...
    pub attributes: BTreeMap<String, Attribute>,
    /// MIG: absent on a GPU without MIG.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig: Option<MigStatus>,
    /// What stands in the way of some of the devices that `offer` names. They stay published, marked as not to be given
    /// out, because what holds them goes away and because a device that a claim holds must not vanish.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub blocked: Vec<Blocked>,
}

/// What may be published of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum GpuOffer {
    /// Nothing: see `withheld`.
    #[default]
    Nothing,
    /// The whole GPU only: no MIG, or MIG off and not switchable without a reset.
    Whole,
    /// Partitions only: MIG is on and cannot be switched off without a reset.
    Partitions,
    /// Both, excluding each other: MIG is switched as needed.
    WholeOrPartitions,
}

/// Why a GPU offers nothing or less.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Withheld {
    /// One CamelCase word for programs: `MigModePending`, `Unreadable`, ...
    pub reason: String,
    /// One sentence for a person: what was found and what to do.
    pub message: String,
}

/// Something on a GPU that keeps devices from being given out now.
///
/// It concerns every device that shares a memory slice with `placement`, hence always the whole GPU, but for `usable`.
/// Where a live instance of [`MigStatus::instances`] lies exactly there, it concerns also every device that could not be
/// cut beside that one: it may hold an engine of which the GPU has one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Blocked {
    /// The memory slices in question. Absent: the GPU with all its partitions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement: Option<MigPlacement>,
    /// One CamelCase word for programs: [`FOREIGN_INSTANCE`](crate::names::FOREIGN_INSTANCE),
    /// [`CONDEMNED`](crate::names::CONDEMNED), ... Devices carry it as a taint, see
    /// [`taint_key`](crate::names::taint_key).
    pub reason: String,
    /// One sentence for a person: what was found and what to do.
    pub message: String,
    /// Name of the one device that can be given out all the same, because it is exactly what is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usable: Option<String>,
}

/// The value of a DRA attribute. Exactly one field is set, as in the DRA API.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Attribute {
    /// A text of at most 64 bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub string: Option<String>,
    /// A semantic version 2.0.0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// A whole number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub int: Option<i64>,
    /// A truth value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bool: Option<bool>,
}

impl Attribute {
    /// A text attribute.
    pub fn string(value: impl Into<String>) -> Attribute {
        Attribute { string: Some(value.into()), ..Attribute::default() }
    }

    /// A version attribute.
    pub fn version(value: impl Into<String>) -> Attribute {
        Attribute { version: Some(value.into()), ..Attribute::default() }
    }

    /// A number attribute.
    pub fn int(value: i64) -> Attribute {
        Attribute { int: Some(value), ..Attribute::default() }
    }
}

/// MIG on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct MigStatus {
    /// The mode in force.
    pub current: MigMode,
    /// The mode after the next GPU reset. Differs from `current` on Ampere only.
    pub pending: MigMode,
    /// Whether the mode switches without a GPU reset (Hopper and later).
    pub switchable: bool,
    /// Everything the GPU can be cut into, as NVML reports it.
    pub profiles: Vec<MigProfile>,
    /// GPU instances that live on the GPU now.
    pub instances: Vec<GpuInstanceStatus>,
}

/// MIG mode of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MigMode {
    /// Off.
    #[default]
    Disabled,
    /// On.
    Enabled,
}

/// A GPU-instance profile. Units as in NVML.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct MigProfile {
    /// Hardware profile id, as `nvidia-smi mig -lgip` prints it.
    pub id: u32,
    /// Name without prefix: `1g.10gb`.
    pub name: String,
    /// Compute slices.
    pub compute_slices: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Copy engines.
    pub copy_engines: u32,
    /// Video decoders.
    pub decoders: u32,
    /// Video encoders.
    pub encoders: u32,
    /// JPEG engines.
    pub jpeg_engines: u32,
    /// Optical flow accelerators.
    pub ofa_engines: u32,
    /// How many instances of this profile the GPU can hold at once.
    pub max_instances: u32,
    /// Where the profile may be placed.
    pub placements: Vec<MigPlacement>,
}

/// A range of memory slices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct MigPlacement {
    /// First memory slice.
    pub start: u32,
    /// Number of memory slices.
    pub size: u32,
}

/// A live GPU instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuInstanceStatus {
    /// GPU instance id.
    pub id: u32,
    /// Hardware profile id.
    pub profile_id: u32,
    /// Where it lies.
    pub placement: MigPlacement,
    /// Its compute instances.
    pub compute_instances: Vec<ComputeInstanceStatus>,
    /// UID of the claim it was carved for; absent for an instance that kerf does not know.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim_uid: Option<String>,
}

/// A live compute instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ComputeInstanceStatus {
    /// Compute instance id.
    pub id: u32,
    /// MIG device UUID, `MIG-...`.
    pub uuid: String,
}
