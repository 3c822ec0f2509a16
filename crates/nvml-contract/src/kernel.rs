//! What the kernel's side of the driver says: capability files, device nodes, the GPU's place on the PCI bus.
//!
//! Not NVML, but kerf puts the two together: NVML names an instance by ids, and a container gets it by the device nodes
//! that the kernel module gives to these ids (NVIDIA MIG user guide, "Device Nodes and Capabilities").

use std::fmt;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use kerf_nvml::{DriverRoot, PciAddress};

/// What is at the path of a device node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceFile {
    /// Nothing.
    Missing,
    /// A character device.
    Device {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// Something that is no character device.
    Other,
}

/// What the kernel says of the capability of one GPU instance, or of one compute instance in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capability {
    /// Minor number in the instance's own `access` file below `/proc/driver/nvidia/capabilities`.
    pub access: Option<u32>,
    /// Minor number in `/proc/driver/nvidia-caps/mig-minors`, which lists every instance that could be.
    pub listed: Option<u32>,
    /// Major number of `nvidia-caps` in `/proc/devices`.
    pub major: Option<u32>,
    /// The node `/dev/nvidia-caps/nvidia-cap<minor>`.
    pub node: DeviceFile,
}

impl fmt::Display for DeviceFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceFile::Missing => f.write_str("no node"),
            DeviceFile::Device { major, minor } => write!(f, "a node {major}:{minor}"),
            DeviceFile::Other => f.write_str("something that is no character device"),
        }
    }
}

/// Where the kernel's side is read from.
pub trait Kernel: Sync {
    /// `/dev/nvidia<minor>`.
    fn gpu_node(&self, minor: u32) -> DeviceFile;

    /// The capability of a GPU instance, or of a compute instance in it.
    fn capability(&self, gpu_minor: u32, gpu_instance: u32, compute_instance: Option<u32>) -> Capability;

    /// Whether the kernel has a PCI device at this address.
    fn has_pci_device(&self, address: PciAddress) -> bool;
}

impl Kernel for DriverRoot {
    fn gpu_node(&self, minor: u32) -> DeviceFile {
        device_file(&self.dev().join(format!("nvidia{minor}")))
    }

    fn capability(&self, gpu_minor: u32, gpu_instance: u32, compute_instance: Option<u32>) -> Capability {
        let proc = self.proc();
        let read = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
        let instance = match compute_instance {
            None => format!("gi{gpu_instance}/access"),
            Some(compute_instance) => format!("gi{gpu_instance}/ci{compute_instance}/access"),
        };
        let access = read(proc.join(format!("driver/nvidia/capabilities/gpu{gpu_minor}/mig/{instance}")));
        let access = value(&access, "DeviceFileMinor:");
        let listed = value(&read(proc.join("driver/nvidia-caps/mig-minors")), &format!("gpu{gpu_minor}/{instance} "));
        let node = access.or(listed).map_or(DeviceFile::Missing, |minor| {
            device_file(&self.dev().join(format!("nvidia-caps/nvidia-cap{minor}")))
        });
        Capability { access, listed, major: major(&read(proc.join("devices"))), node }
    }

    fn has_pci_device(&self, address: PciAddress) -> bool {
        self.sys_pci().join(address.to_string()).exists()
    }
}

/// The number after `name` at the head of a line.
fn value(text: &str, name: &str) -> Option<u32> {
    text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

/// The major number of `nvidia-caps`: a line `<number> nvidia-caps`.
fn major(devices: &str) -> Option<u32> {
    devices.lines().find_map(|line| line.trim().strip_suffix(" nvidia-caps")?.trim().parse().ok())
}

fn device_file(path: &Path) -> DeviceFile {
    match fs::metadata(path) {
        Ok(metadata) if metadata.file_type().is_char_device() => {
            let device = metadata.rdev();
            DeviceFile::Device { major: rustix::fs::major(device), minor: rustix::fs::minor(device) }
        }
        Ok(_) => DeviceFile::Other,
        Err(_) => DeviceFile::Missing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, content: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    #[test]
    fn the_kernels_files_are_read_below_the_driver_root() {
        let dir = tempfile::tempdir().unwrap();
        let proc = dir.path().join("proc");
        write(&proc.join("devices"), "Character devices:\n509 nvidia-caps\n510 nvidia-caps-imex-channels\n");
        write(&proc.join("driver/nvidia-caps/mig-minors"), "config 1\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\n");
        let access = proc.join("driver/nvidia/capabilities/gpu0/mig/gi1/access");
        write(&access, "DeviceFileMinor: 12\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
        write(&dir.path().join("dev/nvidiactl"), "");
        write(&dir.path().join("dev/nvidia-caps/nvidia-cap13"), "not a device");
        fs::create_dir_all(dir.path().join("sys/bus/pci/devices/0000:3b:00.0")).unwrap();

        let root = DriverRoot::at(dir.path());
        let expected = Capability { access: Some(12), listed: Some(12), major: Some(509), node: DeviceFile::Missing };
        assert_eq!(root.capability(0, 1, None), expected);
        let expected = Capability { access: None, listed: Some(13), major: Some(509), node: DeviceFile::Other };
        assert_eq!(root.capability(0, 1, Some(0)), expected);
        assert_eq!(root.capability(1, 1, None).listed, None);
        assert!(root.has_pci_device("0000:3b:00.0".parse().unwrap()));
        assert!(!root.has_pci_device("0000:3c:00.0".parse().unwrap()));
        assert_eq!(root.gpu_node(0), DeviceFile::Missing);
        assert!(matches!(device_file(Path::new("/dev/null")), DeviceFile::Device { major: 1, minor: 3 }));
    }
}
