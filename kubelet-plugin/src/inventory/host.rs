//! What the kernel says about the node and its GPUs.

use std::fs;
use std::path::{Component, Path};

use kerf_nvml::{DriverRoot, PciAddress};

/// The node, apart from NVML.
#[derive(Clone, Debug)]
pub struct Host {
    /// The DRA driver name that is served.
    pub driver_name: String,
    /// The kernel's boot id.
    pub boot_id: String,
    /// Where the driver is; `None` while none is found.
    pub driver_root: Option<DriverRoot>,
}

/// Where a GPU sits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Location {
    /// The PCIe root complex, `pci0000:64`.
    pub(super) pcie_root: Option<String>,
    /// The NUMA node; none on a machine without several.
    pub(super) numa_node: Option<i64>,
}

/// The kernel's boot id, which is another after every boot (random(4)). Empty where the kernel does not tell it.
pub fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

impl Host {
    /// The GPUs that the kernel module drives, which leaves out those that are bound to vfio-pci. Empty where the driver
    /// does not list them (`/proc/driver/nvidia/gpus`, one directory a GPU, NVIDIA driver README).
    pub(super) fn driver_gpus(&self) -> Vec<PciAddress> {
        let Some(root) = &self.driver_root else { return Vec::new() };
        let Ok(entries) = fs::read_dir(root.proc().join("driver/nvidia/gpus")) else { return Vec::new() };
        entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    }

    /// Where a GPU sits, from sysfs. Parts that the kernel does not tell are absent.
    pub(super) fn location(&self, address: PciAddress) -> Location {
        let Some(root) = &self.driver_root else { return Location::default() };
        let device = root.sys_pci().join(address.to_string());
        let numa_node = fs::read_to_string(device.join("numa_node"));
        Location {
            pcie_root: fs::canonicalize(&device).ok().as_deref().and_then(pcie_root),
            // -1 where the firmware names no node (Linux Documentation/ABI/testing/sysfs-bus-pci).
            numa_node: numa_node.ok().and_then(|text| text.trim().parse().ok()).filter(|node| *node >= 0),
        }
    }
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
    fn the_kernel_tells_where_a_gpu_sits() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let devices = root.join("sys/bus/pci/devices");
        let real = root.join("sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0");
        fs::create_dir_all(&devices).unwrap();
        fs::create_dir_all(&real).unwrap();
        fs::write(real.join("numa_node"), "1\n").unwrap();
        std::os::unix::fs::symlink(&real, devices.join("0000:3b:00.0")).unwrap();
        fs::create_dir_all(root.join("proc/driver/nvidia/gpus/0000:3b:00.0")).unwrap();

        let host = Host { driver_name: String::new(), boot_id: String::new(), driver_root: Some(DriverRoot::at(root)) };
        let address = "0000:3b:00.0".parse().unwrap();
        assert_eq!(host.location(address), Location { pcie_root: Some("pci0000:3a".into()), numa_node: Some(1) });
        assert_eq!(host.driver_gpus(), [address]);

        fs::write(real.join("numa_node"), "-1\n").unwrap();
        assert_eq!(host.location(address).numa_node, None);
        assert_eq!(host.location("0000:3c:00.0".parse().unwrap()), Location::default());
    }
}
