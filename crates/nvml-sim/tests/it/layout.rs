//! The driver root as programs read it.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use kerf_nvml_sim::client::Client;
use kerf_nvml_sim::daemon::CAPS_MAJOR;
use kerf_nvml_sim::view::{Ci, Gi, Node};
use kerf_nvml_sim::wire::Op;

use crate::sim::{Sim, node};

/// Major and minor number of a character device.
fn device(path: &Path) -> (u32, u32) {
    let data = fs::metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(data.file_type().is_char_device(), "{}", path.display());
    (rustix::fs::major(data.rdev()), rustix::fs::minor(data.rdev()))
}

#[test]
fn device_nodes_have_the_drivers_numbers() {
    let sim = Sim::start(&node("gpus: [{product: l40s, count: 3}]"));
    let dev = sim.root().join("dev");
    assert_eq!(device(&dev.join("nvidia2")), (195, 2));
    assert_eq!(device(&dev.join("nvidiactl")), (195, 255));
    assert_eq!(device(&dev.join("nvidia-modeset")), (195, 254));
    let devices = fs::read_to_string(sim.root().join("proc/devices")).unwrap();
    let major = |name: &str| {
        let line = devices.lines().find(|line| line.ends_with(&format!(" {name}"))).unwrap();
        line.split(' ').next().unwrap().parse::<u32>().unwrap()
    };
    assert_eq!(device(&dev.join("nvidia-uvm")), (major("nvidia-uvm"), 0));
    assert_eq!(device(&dev.join("nvidia-uvm-tools")), (major("nvidia-uvm"), 1));
    assert_eq!(device(&dev.join("nvidia-caps/nvidia-cap1")), (major("nvidia-caps"), 1));
    assert_eq!(fs::metadata(dev.join("nvidia-caps/nvidia-cap1")).unwrap().mode() & 0o777, 0o400);
}

#[test]
fn capability_files_live_as_long_as_their_instance() {
    let sim = Sim::start(&node("gpus: [{product: l40s}, {product: h100-80gb, mig: {current: true}}]"));
    let client = Client::new(sim.root());
    let gpu = client.ask::<Node>("", Op::Node).unwrap().gpus[1].handle;
    let gi: Gi = client.ask("", Op::CreateGi(gpu, 19, None)).unwrap();
    let ci: Ci = client.ask("", Op::CreateCi(gi.handle, 0, None)).unwrap();

    let gi_directory = sim.root().join(format!("proc/driver/nvidia/capabilities/gpu1/mig/gi{}", gi.id));
    let access = [gi_directory.join("access"), gi_directory.join("ci0/access")];
    let minors = fs::read_to_string(sim.root().join("proc/driver/nvidia-caps/mig-minors")).unwrap();
    for (file, name) in access.iter().zip([format!("gpu1/gi{}/access", gi.id), format!("gpu1/gi{}/ci0/access", gi.id)])
    {
        let text = fs::read_to_string(file).unwrap();
        let minor: u32 = text.lines().next().unwrap().strip_prefix("DeviceFileMinor: ").unwrap().parse().unwrap();
        assert_eq!(text, format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"));
        assert!(minors.lines().any(|line| line == format!("{name} {minor}")), "{name}");
        let node = sim.root().join(format!("dev/nvidia-caps/nvidia-cap{minor}"));
        assert_eq!(device(&node), (CAPS_MAJOR, minor));
    }
    client.ask::<()>("", Op::DestroyCi(ci.handle)).unwrap();
    assert!(access[0].exists() && !access[1].exists());
    client.ask::<()>("", Op::DestroyGi(gi.handle)).unwrap();
    assert!(!gi_directory.exists());
    let nodes = fs::read_dir(sim.root().join("dev/nvidia-caps")).unwrap().count();
    assert_eq!(nodes, 2, "config and monitor stay");
}

#[test]
fn mig_minors_are_all_there_from_the_start() {
    let sim = Sim::start(&node("gpus: []"));
    let minors = fs::read_to_string(sim.root().join("proc/driver/nvidia-caps/mig-minors")).unwrap();
    assert_eq!(minors.lines().count(), 2 + 32 * 15 * 9);
    assert_eq!(
        minors.lines().take(4).collect::<Vec<_>>(),
        ["config 1", "monitor 2", "gpu0/gi0/access 3", "gpu0/gi0/ci0/access 4"]
    );
    assert_eq!(minors.lines().last(), Some("gpu31/gi14/ci7/access 4322"));
}

#[test]
fn sysfs_leads_to_the_root_complex() {
    let sim = Sim::start(&node(
        "gpus: [{product: h100-80gb}, {product: l40s, pciBusId: '0001:d8:00.0', pcieRoot: pci0001:d0, numaNode: -1}]",
    ));
    let devices = sim.root().join("sys/bus/pci/devices");
    let place = |address: &str| fs::canonicalize(devices.join(address)).unwrap();
    let sys = fs::canonicalize(sim.root().join("sys")).unwrap();
    assert_eq!(place("0000:3b:00.0"), sys.join("devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0"));
    assert!(place("0001:d8:00.0").starts_with(sys.join("devices/pci0001:d0")));
    let read = |address: &str, file: &str| fs::read_to_string(devices.join(address).join(file)).unwrap();
    assert_eq!(read("0000:3b:00.0", "numa_node"), "0\n");
    assert_eq!(read("0001:d8:00.0", "numa_node"), "-1\n");
    assert_eq!(read("0000:3b:00.0", "device"), "0x2330\n");
}

/// What NVIDIA's Go programs read beside NVML (nvpci of go-nvlib, and mig-parted).
#[test]
fn the_kernel_lists_modules_and_pci_devices_as_programs_read_them() {
    let sim = Sim::start(&node("gpus: [{product: h100-80gb}]"));
    let modules = fs::read_to_string(sim.root().join("proc/modules")).unwrap();
    assert!(modules.lines().any(|line| line.split(' ').next() == Some("nvidia")), "{modules}");
    let device = sim.root().join("sys/bus/pci/devices/0000:3b:00.0");
    let regions = fs::read_to_string(device.join("resource")).unwrap();
    assert_eq!(regions.lines().count(), 13);
    assert!(regions.lines().all(|line| line.split(' ').count() == 3), "{regions}");
    let config = fs::read(device.join("config")).unwrap();
    assert_eq!(config.len(), 256);
    let number = |at: usize| format!("{:#06x}\n", u16::from_le_bytes([config[at], config[at + 1]]));
    let read = |file: &str| fs::read_to_string(device.join(file)).unwrap();
    assert_eq!((number(0), number(2)), (read("vendor"), read("device")));
    let class = u32::from_le_bytes([config[9], config[10], config[11], 0]);
    assert_eq!(format!("{class:#08x}\n"), read("class"));
    assert_eq!(config[6] & 0x10, 0, "no list of capabilities to follow");
}

#[test]
fn the_library_is_installed_as_a_drivers() {
    let sim = Sim::start(&node("gpus: []"));
    let link = fs::read_link(sim.library()).unwrap();
    assert_eq!(link, Path::new("libnvidia-ml.so.535.261.03"));
    // The dynamic loader's cache goes by this name.
    let library = fs::read(sim.library()).unwrap();
    assert!(library.windows(18).any(|window| window == b"libnvidia-ml.so.1\0"));
}

/// Also when the daemon was started anew in between.
#[test]
fn no_loading_of_the_module_has_the_inode_of_an_earlier_one() {
    let mut sim = Sim::start(&node("gpus: []"));
    let mut seen = Vec::new();
    for round in 0..6 {
        let inode = fs::metadata(sim.root().join("sys/module/nvidia")).unwrap().ino();
        assert!(!seen.contains(&inode), "{inode} after {seen:?}");
        seen.push(inode);
        if round % 2 == 0 {
            sim.ctl("reload");
        } else {
            sim.stop();
            sim.start_again();
        }
    }
}
