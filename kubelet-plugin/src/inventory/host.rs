//! What the kernel says about the node and its GPUs.

use std::fs;
use std::path::Path;

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
    /// Why nobody can tell what the claims of the [former driver](crate::engine::FormerDriver) hold, if that is so.
    pub former_doubt: Option<String>,
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
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::attributes::Location;
    use crate::engine::ForeignPolicy;

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
                former_doubt: None,
            }
        }
    }

    #[test]
    fn the_kernel_tells_where_a_gpu_sits() {
        let bus = Bus::new();
        bus.device("0000:3b:00.0", &[("numa_node", "1\n"), ("device", "0x00b2\n"), ("vendor", "0x10de\n")], None);
        bus.device("0000:3c:00.0", &[("numa_node", "-1\n")], None);
        let location = |address: &str| Location::of(&DriverRoot::at(bus.0.path()), address.parse().unwrap());
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
