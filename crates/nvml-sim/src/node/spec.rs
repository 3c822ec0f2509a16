//! What is fixed about a GPU from the start of the node.

use kerf_mig::product::Product;
use serde::{Deserialize, Serialize};

use crate::view::PciAddress;

/// A GPU as the node file describes it.
#[derive(Clone, Debug)]
pub struct GpuSpec {
    /// Its place in the node file, counted from 0.
    pub place: u8,
    /// The N of `/dev/nvidiaN`.
    pub minor: u32,
    /// Where it is.
    pub pci: PciAddress,
    /// The PCI root complex above it, such as `pci0000:3a`.
    pub pcie_root: String,
    /// `GPU-...`.
    pub uuid: String,
    /// Serial number of the board.
    pub serial: String,
    /// What it is.
    pub product: &'static Product,
    /// NUMA node; `None` where the kernel knows none.
    pub numa_node: Option<u32>,
    /// Whether this is a virtual machine.
    pub virtualization: Virtualization,
    /// How MIG devices get their UUIDs.
    pub uuids: Uuids,
    /// MIG mode at the start of the node: in force, and after the next reset.
    pub mig: (bool, bool),
    /// Whether a handle cannot be had at the start of the node.
    pub broken: bool,
}

/// How the GPU got into the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Virtualization {
    /// Bare metal.
    #[default]
    None,
    /// Passed through to a virtual machine, which cannot reset it.
    Passthrough,
    /// A virtual GPU, which has no MIG of its own.
    Vgpu,
}

/// Where MIG devices get their UUIDs from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Uuids {
    /// From GPU, GPU instance id and graphics engine: what is created again gets the same UUID again. So does the open
    /// kernel module (`kmigmgrGenerateGPUInstanceUUID` and its neighbours).
    #[default]
    Deterministic,
    /// A new one each time. NVIDIA promises no more than that a UUID does not change during the life of a MIG device.
    Fresh,
}
