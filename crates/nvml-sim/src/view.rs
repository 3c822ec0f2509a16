//! What NVML shows of a node: the plain data that the state machine answers with, that goes over the wire, and that the
//! library writes into NVML's structures.

use kerf_mig::Placement;
use serde::{Deserialize, Serialize};

use crate::handle::Handle;

/// The node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Node {
    /// Driver version.
    pub driver_version: String,
    /// CUDA version of the driver as NVML gives it: 1000 x major + 10 x minor.
    pub cuda_driver_version: i32,
    /// Every GPU, ordered by PCI address.
    pub gpus: Vec<NodeGpu>,
}

/// What must be known of a GPU before it is looked at.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeGpu {
    /// Its handle.
    pub handle: Handle,
    /// The N of `/dev/nvidiaN`.
    pub minor: u32,
    /// `GPU-...`.
    pub uuid: String,
    /// PCI address in the kernel's form.
    pub pci: String,
    /// Whether a handle can be had.
    pub broken: bool,
}

/// A GPU or a MIG device. Of the latter, what it shares with its GPU is the GPU's.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Device {
    /// The GPU's handle: of a MIG device, its parent.
    pub gpu: Handle,
    /// The N of `/dev/nvidiaN`.
    pub minor: u32,
    /// Product name; of a MIG device with its profile.
    pub name: String,
    /// `GPU-...` or `MIG-...`.
    pub uuid: String,
    /// Serial number of the board.
    pub serial: String,
    /// `nvmlBrandType_t`.
    pub brand: u32,
    /// `nvmlDeviceArchitecture_t`.
    pub architecture: u32,
    /// CUDA compute capability.
    pub compute_capability: (i32, i32),
    /// Where it is.
    pub pci: PciAddress,
    /// The PCIe root complex that it is below, as `pci0000:3a`.
    #[serde(default)]
    pub pcie_root: String,
    /// PCI device and vendor id in one word: `device << 16 | 0x10de`.
    pub pci_device_id: u32,
    /// NUMA node, if the kernel knows one.
    pub numa_node: Option<u32>,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Of that in use, in bytes.
    #[serde(default)]
    pub memory_used: u64,
    /// `nvmlGpuVirtualizationMode_t`.
    pub virtualization: u32,
    /// MIG modes, current and pending; absent on a GPU without MIG.
    pub mig: Option<(bool, bool)>,
    /// Whether MIG mode switches without a reset.
    pub mig_switchable: bool,
    /// How many MIG devices there can be at most. 0 while MIG is off.
    pub max_mig_devices: u32,
    /// `nvmlComputeMode_t`.
    pub compute_mode: u32,
    /// Persistence mode.
    pub persistence: bool,
    /// Time slice, 0 to 3.
    pub timeslice: u32,
    /// Of a MIG device, what it is made of.
    pub mig_device: Option<MigAttributes>,
}

/// A PCI address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PciAddress {
    /// Domain.
    pub domain: u32,
    /// Bus.
    pub bus: u32,
    /// Device.
    pub device: u32,
}

impl PciAddress {
    /// Reads the kernel's form and NVML's, whose domain has eight digits.
    pub fn parse(text: &str) -> Option<PciAddress> {
        let (domain, rest) = text.split_once(':')?;
        let (bus, rest) = rest.split_once(':')?;
        let device = rest.strip_suffix(".0")?;
        let hex = |text, limit| u32::from_str_radix(text, 16).ok().filter(|number| *number < limit);
        Some(PciAddress { domain: hex(domain, 1 << 16)?, bus: hex(bus, 256)?, device: hex(device, 32)? })
    }
}

impl std::fmt::Display for PciAddress {
    /// The kernel's form: `0000:3b:00.0`. A GPU is function 0.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.0", self.domain, self.bus, self.device)
    }
}

/// What a MIG device is made of (`nvmlDeviceAttributes_t`).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MigAttributes {
    /// GPU instance id.
    pub gi: u32,
    /// Compute instance id.
    pub ci: u32,
    /// Streaming multiprocessors of the compute instance.
    pub multiprocessors: u32,
    /// Copy engines, shared within the GPU instance, as all that follow.
    pub copy_engines: u32,
    /// Decoders.
    pub decoders: u32,
    /// Encoders.
    pub encoders: u32,
    /// JPEG engines.
    pub jpeg_engines: u32,
    /// Optical flow accelerators.
    pub ofa_engines: u32,
    /// Compute slices of the GPU instance.
    pub gi_slices: u32,
    /// Compute slices of the compute instance.
    pub ci_slices: u32,
}

/// A MIG device in the list of its GPU's.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct MigDevice {
    /// Its handle.
    pub handle: Handle,
    /// GPU instance id.
    pub gi: u32,
    /// Compute instance id.
    pub ci: u32,
}

/// A GPU-instance profile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GiProfile {
    /// The profile.
    #[serde(flatten)]
    pub profile: kerf_mig::Profile,
    /// Capability bits of `nvmlGpuInstanceProfileInfo_v3_t`.
    pub capabilities: u32,
}

/// A GPU instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gi {
    /// Its handle.
    pub handle: Handle,
    /// The GPU's.
    pub gpu: Handle,
    /// Its id.
    pub id: u32,
    /// Hardware id of its profile.
    pub profile: u32,
    /// Where it lies, in memory slices.
    pub placement: Placement,
}

/// A compute-instance profile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CiProfile {
    /// Hardware id.
    pub id: u32,
    /// Name without the prefix `MIG `: `1c.3g.40gb`, or the GPU instance's when it is all of it.
    pub name: String,
    /// Compute slices.
    pub slices: u32,
    /// How many of them a GPU instance holds at most.
    pub max_instances: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// The GPU instance's engines, which its compute instances share.
    pub shared: kerf_mig::Engines,
}

/// A compute instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ci {
    /// Its handle.
    pub handle: Handle,
    /// The MIG device it is.
    pub device: Handle,
    /// The GPU's handle.
    pub gpu: Handle,
    /// The GPU instance's handle.
    pub gpu_instance: Handle,
    /// The GPU instance's id.
    pub gi: u32,
    /// Its id.
    pub id: u32,
    /// Hardware id of its profile.
    pub profile: u32,
    /// Where it lies in its GPU instance, in compute slices.
    pub placement: Placement,
}

/// How a GPU-instance profile is named in a question.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum GiProfileKey {
    /// By NVML's enum index, whatever the MIG mode, where the architecture can do that.
    Index(u32),
    /// By NVML's enum index, with MIG on (the versioned call).
    IndexMigOn(u32),
    /// By hardware id, with MIG on.
    IdMigOn(u32),
}

/// A process that computes on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// GPU memory that it uses, in bytes.
    pub memory: u64,
    /// Id of the GPU instance that it is in, if it is in one.
    pub gi: Option<u32>,
    /// Id of the compute instance.
    pub ci: Option<u32>,
}

/// An instance that somebody else created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Created {
    /// Id of the GPU instance.
    pub gi: u32,
    /// Id of the compute instance, if one was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ci: Option<u32>,
}
