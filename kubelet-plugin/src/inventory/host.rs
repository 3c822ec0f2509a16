//! What the kernel says about the node and its GPUs.

use std::fs;
use std::path::{Component, Path};

use kerf_nvml::{DriverRoot, PciAddress};

use crate::engine::Wishes;

/// PCI vendor (pci-ids).
const NVIDIA: &str = "0x10de";

/// The PCI classes of GPUs: VGA controllers and 3D controllers (PCI Code and ID Assignment Specification).
const DISPLAY_CONTROLLERS: [&str; 2] = ["0x0300", "0x0302"];

/// The node, apart from NVML.
#[derive(Clone, Debug)]
pub struct Host {
    /// The DRA driver name that is served.
    pub driver_name: String,
    /// The kernel's boot id.
    pub boot_id: String,
    /// What is wanted of the GPUs; here, what is done about instances that no claim explains.
    pub wishes: Wishes,
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
    /// The PCI ids in one word, `0x233010de`: the device's before the vendor's.
    pub(super) pci_ids: Option<String>,
}

impl Host {
    /// The GPUs that should be NVML's: NVIDIA's display controllers on the PCI bus, but for those that were given to
    /// another driver, such as vfio-pci for a virtual machine.
    pub(super) fn pci_gpus(&self) -> Vec<PciAddress> {
        let Some(root) = &self.driver_root else { return Vec::new() };
        let Ok(devices) = fs::read_dir(root.sys_pci()) else { return Vec::new() };
        let is_ours = |device: &Path| {
            let number = |name| fs::read_to_string(device.join(name)).unwrap_or_default();
            let driver = fs::read_link(device.join("driver")).ok();
            number("vendor").trim() == NVIDIA
                && DISPLAY_CONTROLLERS.iter().any(|class| number("class").starts_with(class))
                && driver.is_none_or(|driver| driver.ends_with("nvidia"))
        };
        let devices = devices.flatten().filter(|device| is_ours(&device.path()));
        devices.filter_map(|device| device.file_name().to_str()?.parse().ok()).collect()
    }

    /// Where a GPU sits, from sysfs. Parts that the kernel does not tell are absent.
    pub(super) fn location(&self, address: PciAddress) -> Location {
        let Some(root) = &self.driver_root else { return Location::default() };
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
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::engine::ForeignPolicy;

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

    /// A driver root with a PCI bus.
    struct Bus(tempfile::TempDir);

    impl Bus {
        fn new() -> Bus {
            Bus(tempfile::tempdir().unwrap())
        }

        fn device(&self, address: &str, files: &[(&str, &str)], driver: Option<&str>) {
            let root = self.0.path();
            let real = root.join("sys/devices/pci0000:3a/0000:3a:00.0").join(address);
            fs::create_dir_all(&real).unwrap();
            files.iter().for_each(|(name, text)| fs::write(real.join(name), text).unwrap());
            if let Some(driver) = driver {
                symlink(Path::new("../../../bus/pci/drivers").join(driver), real.join("driver")).unwrap();
            }
            let devices = root.join("sys/bus/pci/devices");
            fs::create_dir_all(&devices).unwrap();
            symlink(&real, devices.join(address)).unwrap();
        }

        fn host(&self) -> Host {
            let driver_root = Some(DriverRoot::at(self.0.path()));
            Host {
                driver_name: String::new(),
                boot_id: String::new(),
                wishes: Wishes::new(ForeignPolicy::Keep),
                driver_root,
            }
        }
    }

    #[test]
    fn the_kernel_tells_where_a_gpu_sits() {
        let bus = Bus::new();
        bus.device("0000:3b:00.0", &[("numa_node", "1\n"), ("device", "0x00b2\n"), ("vendor", "0x10de\n")], None);
        bus.device("0000:3c:00.0", &[("numa_node", "-1\n")], None);
        let location = |address: &str| bus.host().location(address.parse().unwrap());
        let root = || Some("pci0000:3a".to_owned());
        assert_eq!(
            location("0000:3b:00.0"),
            Location { pcie_root: root(), numa_node: Some(1), pci_ids: Some("0x00b210de".into()) }
        );
        assert_eq!(location("0000:3c:00.0"), Location { pcie_root: root(), numa_node: None, pci_ids: None });
        assert_eq!(location("0000:3d:00.0"), Location::default());
    }

    #[test]
    fn gpus_are_nvidias_display_controllers_that_no_other_driver_has() {
        let bus = Bus::new();
        let (gpu, vga) =
            ([("vendor", "0x10de\n"), ("class", "0x030200\n")], [("vendor", "0x10de"), ("class", "0x030000")]);
        bus.device("0000:3b:00.0", &gpu, Some("nvidia"));
        bus.device("0000:3c:00.0", &vga, None);
        bus.device("0000:3d:00.0", &gpu, Some("vfio-pci"));
        bus.device("0000:3e:00.0", &[("vendor", "0x10de"), ("class", "0x068000")], Some("nvidia-nvswitch"));
        bus.device("0000:3f:00.0", &[("vendor", "0x1002"), ("class", "0x030000")], None);
        let mut found = bus.host().pci_gpus();
        found.sort_unstable();
        assert_eq!(found, ["0000:3b:00.0", "0000:3c:00.0"].map(|address| address.parse().unwrap()));
    }
}
