//! What a process may see: decided by what it may open, as on a node with hardware.
//!
//! * A GPU is there for a process that may open its device node. A container's device cgroup forbids the others.
//! * A MIG device is there for a process that may open the capability nodes of its GPU instance and of its compute
//!   instance, or that may administer MIG.
//! * MIG is administered by who has `CAP_SYS_ADMIN`, or may open the capability node `mig/config`.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::thread::CapabilitySet;

use crate::node::{ci_minor, gi_minor};

/// Minor number of the capability `mig/config`, fixed in the kernel module.
pub const MIG_CONFIG_MINOR: u32 = 1;

/// Minor number of the capability `mig/monitor`.
pub const MIG_MONITOR_MINOR: u32 = 2;

/// The device node of a GPU.
pub fn gpu_node(root: &Path, minor: u32) -> PathBuf {
    root.join(format!("dev/nvidia{minor}"))
}

/// The device node of a capability.
pub fn capability_node(root: &Path, minor: u32) -> PathBuf {
    root.join(format!("dev/nvidia-caps/nvidia-cap{minor}"))
}

/// Whether this process may administer MIG and see every MIG device.
pub fn is_privileged(root: &Path) -> bool {
    let admin = rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
    admin || may_open(&capability_node(root, MIG_CONFIG_MINOR), false)
}

/// Whether this process may use a GPU.
pub fn sees_gpu(root: &Path, minor: u32) -> bool {
    may_open(&gpu_node(root, minor), true)
}

/// Whether this process may use a MIG device, on a GPU that it sees.
pub fn sees_mig_device(root: &Path, gpu_minor: u32, gi: u32, ci: u32) -> bool {
    let capability = |minor| may_open(&capability_node(root, minor), false);
    is_privileged(root) || (capability(gi_minor(gpu_minor, gi)) && capability(ci_minor(gpu_minor, gi, ci)))
}

/// Whether opening is permitted. There is no driver behind the node here: that the kernel looked for one and found none
/// means that it had nothing against the opening itself.
fn may_open(node: &Path, write: bool) -> bool {
    match OpenOptions::new().read(true).write(write).open(node) {
        Ok(_) => true,
        Err(error) => [Errno::NXIO, Errno::NODEV].map(Errno::raw_os_error).contains(&error.raw_os_error().unwrap_or(0)),
    }
}
