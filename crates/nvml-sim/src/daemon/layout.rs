//! The driver root's kernel side: device nodes, `/proc` and `/sys` as the driver and the kernel would have them.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{CWD, FileType, FlockOperation, Mode, makedev};
use rustix::io::Errno;

use crate::fault::Part;
use crate::node::{GpuSpec, ci_minor, gi_minor};
use crate::node_file::NodeSpec;
use crate::visibility::{MIG_CONFIG_MINOR, MIG_MONITOR_MINOR, capability_node, gpu_node};

/// Major number of GPUs and of the driver's control nodes: assigned to NVIDIA by the kernel.
const NVIDIA_MAJOR: u32 = 195;

/// Major number of `nvidia-uvm`. Handed out by the kernel at run time, so programs must look it up in `/proc/devices`.
const UVM_MAJOR: u32 = 510;

/// Major number of `nvidia-caps`. Handed out by the kernel too, so it is listed in `/proc/devices`.
pub const CAPS_MAJOR: u32 = 509;

/// Major number of the direct rendering manager (Linux Documentation/admin-guide/devices.txt), and the first minor number
/// of its nodes without display.
const DRM_MAJOR: u32 = 226;
const DRM_RENDER: u32 = 128;

/// The group `video` of Debian, which udev gives nodes with display to.
const VIDEO: u32 = 44;

/// Marks a directory as a driver root of ours, and is locked by the daemon that serves it.
const MARKER: &str = ".nvml-sim";

/// NVIDIA's number among PCI vendors, and the class of its GPUs for data centres: a 3D controller (PCI Code and ID Assignment).
const NVIDIA_VENDOR: u16 = 0x10de;
const CONTROLLER_3D: u32 = 0x03_0200;

/// The lines of a PCI device's `resource` (Linux Documentation/PCI/sysfs-pci.rst), one a region: six of its own, the ROM, six of
/// virtual functions. Nobody can map a simulated GPU: all are empty.
const PCI_REGIONS: usize = 13;
const NO_REGION: &str = "0x0000000000000000 0x0000000000000000 0x0000000000000000";

/// The directory of the loaded kernel module. Its inode tells one loading from the next.
const MODULE: &str = "sys/module/nvidia";

/// What the kernel lists of it and of the driver's other modules (proc_modules(5)): who uses whom, as the driver loads them.
const MODULES: &str = "proc/modules";
const LOADED: &str = "\
    nvidia_uvm 4947968 0 - Live 0x0000000000000000 (POE)\n\
    nvidia_drm 118784 0 - Live 0x0000000000000000 (POE)\n\
    nvidia_modeset 1540096 1 nvidia_drm, Live 0x0000000000000000 (POE)\n\
    nvidia 62623744 2 nvidia_uvm,nvidia_modeset, Live 0x0000000000000000 (POE)\n";

/// The kernel's boot id (random(4)): the node boots when the simulator starts, and when it is told to.
const BOOT_ID: &str = "proc/sys/kernel/random/boot_id";

/// Where the directories of earlier loadings are kept, so that no inode comes again.
const UNLOADED: &str = ".nvml-sim-unloaded";

/// The kernel module's table of capability files: GPUs, GPU instances, compute instances.
const TABLE: (u32, u32, u32) = (32, 15, 8);

/// Why a driver root cannot be laid out.
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    /// The directory holds something else.
    #[error("{0} is not empty and not a driver root of nvml-sim; give another directory")]
    Foreign(PathBuf),
    /// Another daemon is there already.
    #[error("another nvml-sim serves {0}; stop it first")]
    Served(PathBuf),
    /// Device nodes would be of no use.
    #[error(
        "device nodes under {root} cannot be opened ({reason}); choose a directory on a file system mounted without nodev"
    )]
    Nodev {
        /// The driver root.
        root: PathBuf,
        /// What opening said.
        reason: io::Error,
    },
    /// Something could not be written.
    #[error("cannot lay out {root}: {reason}")]
    Write {
        /// The driver root.
        root: PathBuf,
        /// Why not.
        reason: io::Error,
    },
}

/// A laid out driver root.
#[derive(Debug)]
pub(super) struct Layout {
    root: PathBuf,
    /// The minor numbers that `mig-minors` leaves out.
    unlisted: Mutex<BTreeSet<u32>>,
    /// Held as long as the daemon serves this root.
    _lock: File,
}

/// An instance as the kernel module knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Instance {
    /// The N of the GPU's `/dev/nvidiaN`.
    pub(super) gpu: u32,
    /// GPU instance id.
    pub(super) gi: u32,
    /// Compute instance id; `None` for the GPU instance itself.
    pub(super) ci: Option<u32>,
}

impl Instance {
    fn minor(self) -> u32 {
        self.ci.map_or_else(|| gi_minor(self.gpu, self.gi), |ci| ci_minor(self.gpu, self.gi, ci))
    }

    /// Its directory, below `/proc`.
    fn directory(self) -> PathBuf {
        let Instance { gpu, gi, ci } = self;
        let own = ci.map(|ci| format!("/ci{ci}")).unwrap_or_default();
        PathBuf::from(format!("driver/nvidia/capabilities/gpu{gpu}/mig/gi{gi}{own}"))
    }
}

impl Layout {
    /// Takes a directory, which is created if need be, and lays out the kernel's side of a driver in it. What a daemon
    /// left there before is replaced.
    pub(super) fn new(root: &Path, spec: &NodeSpec) -> Result<Layout, LayoutError> {
        let write = |reason| LayoutError::Write { root: root.to_owned(), reason };
        let lock = take(root)?;
        let layout = Layout { root: root.to_owned(), unlisted: Mutex::default(), _lock: lock };
        layout.boot(spec.gpus.iter()).map_err(write)?;
        match File::open(root.join("dev/nvidiactl")).map_err(|error| (error.kind(), error)) {
            Err((io::ErrorKind::PermissionDenied, reason)) => Err(LayoutError::Nodev { root: root.to_owned(), reason }),
            _ => Ok(layout),
        }
    }

    /// Lays everything out anew, as the kernel and the driver do when the machine starts.
    pub(super) fn boot<'a>(&self, gpus: impl Iterator<Item = &'a GpuSpec>) -> io::Result<()> {
        unload_module(&self.root)?;
        ["dev", "proc", "sys"].iter().try_for_each(|part| empty(&self.root.join(part)))?;
        self.unlisted().clear();
        self.device_nodes()?;
        self.proc_files()?;
        for gpu in gpus {
            make_node(&gpu_node(&self.root, gpu.minor), NVIDIA_MAJOR, gpu.minor, 0o666)?;
            self.sysfs(gpu)?;
            self.drm(gpu)?;
        }
        put(&self.root.join(BOOT_ID), format!("{}\n", uuid::Uuid::new_v4()))?;
        self.load_module()
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The kernel module is loaded, or unloaded and loaded again.
    pub(super) fn load_module(&self) -> io::Result<()> {
        unload_module(&self.root)?;
        put(&self.root.join(MODULES), LOADED.to_owned())?;
        fs::create_dir_all(self.root.join(MODULE))
    }

    /// What the kernel shows of a new instance, but for some parts.
    pub(super) fn add(&self, instance: Instance, withheld: impl Fn(Part) -> bool) -> io::Result<()> {
        self.list(instance, !withheld(Part::Minors))?;
        if !withheld(Part::Files) {
            put(&self.directory(instance).join("access"), access(instance.minor(), 0o444))?;
        }
        if !withheld(Part::Nodes) {
            self.add_node(instance.minor(), 0o444)?;
        }
        Ok(())
    }

    /// All of an instance.
    pub(super) fn remove(&self, instance: Instance) -> io::Result<()> {
        gone(fs::remove_dir_all(self.directory(instance)))?;
        gone(fs::remove_file(capability_node(&self.root, instance.minor())))?;
        self.list(instance, true)
    }

    /// Whether `mig-minors` has an instance, which it normally has even before there is one.
    fn list(&self, instance: Instance, listed: bool) -> io::Result<()> {
        let mut unlisted = self.unlisted();
        let minor = instance.minor();
        let changed = if listed { unlisted.remove(&minor) } else { unlisted.insert(minor) };
        if changed { self.mig_minors(&unlisted) } else { Ok(()) }
    }

    fn unlisted(&self) -> std::sync::MutexGuard<'_, BTreeSet<u32>> {
        self.unlisted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mig_minors(&self, unlisted: &BTreeSet<u32>) -> io::Result<()> {
        let directory = self.root.join("proc/driver/nvidia-caps");
        let new = directory.join("mig-minors.new");
        put(&new, mig_minors(unlisted))?;
        fs::rename(new, directory.join("mig-minors")) // nobody reads half of it
    }

    /// Everything about the instances of a GPU.
    pub(super) fn remove_instances(&self, gpu: u32) -> io::Result<()> {
        let (_, gis, cis) = TABLE;
        for gi in 0..gis {
            let cis = (0..cis).map(Some);
            cis.chain([None]).try_for_each(|ci| self.remove(Instance { gpu, gi, ci }))?;
        }
        Ok(())
    }

    fn directory(&self, instance: Instance) -> PathBuf {
        self.root.join("proc").join(instance.directory())
    }

    /// The node of a capability. On hardware nvidia-modprobe makes it, when NVML first needs it.
    fn add_node(&self, minor: u32, mode: u32) -> io::Result<()> {
        make_node(&capability_node(&self.root, minor), CAPS_MAJOR, minor, mode)
    }

    fn device_nodes(&self) -> io::Result<()> {
        for (name, major, minor) in [
            ("nvidiactl", NVIDIA_MAJOR, 255),
            ("nvidia-modeset", NVIDIA_MAJOR, 254),
            ("nvidia-uvm", UVM_MAJOR, 0),
            ("nvidia-uvm-tools", UVM_MAJOR, 1),
        ] {
            make_node(&self.root.join("dev").join(name), major, minor, 0o666)?;
        }
        Ok(())
    }

    /// What nvidia-drm makes of a GPU when it is loaded, for rendering and display. Nobody can draw on it.
    fn drm(&self, gpu: &GpuSpec) -> io::Result<()> {
        let directory = self.root.join("sys/bus/pci/devices").join(gpu.pci.to_string()).join("drm");
        for (name, minor, mode, group) in [
            (format!("card{}", gpu.minor), gpu.minor, 0o660, VIDEO),
            (format!("renderD{}", DRM_RENDER + gpu.minor), DRM_RENDER + gpu.minor, 0o666, 0),
        ] {
            fs::create_dir_all(directory.join(&name))?;
            let node = self.root.join("dev/dri").join(&name);
            make_node(&node, DRM_MAJOR, minor, mode)?;
            std::os::unix::fs::chown(&node, None, Some(group))?;
        }
        Ok(())
    }

    fn proc_files(&self) -> io::Result<()> {
        let proc = self.root.join("proc");
        let devices = format!(
            "Character devices:\n{NVIDIA_MAJOR} nvidia\n{NVIDIA_MAJOR} nvidia-modeset\n{NVIDIA_MAJOR} nvidiactl\n\
             {CAPS_MAJOR} nvidia-caps\n{UVM_MAJOR} nvidia-uvm\n\nBlock devices:\n"
        );
        put(&proc.join("devices"), devices)?;
        let capabilities = proc.join("driver/nvidia/capabilities/mig");
        for (name, minor, mode) in [("config", MIG_CONFIG_MINOR, 0o400), ("monitor", MIG_MONITOR_MINOR, 0o444)] {
            put(&capabilities.join(name), access(minor, mode))?;
            self.add_node(minor, mode)?;
        }
        self.mig_minors(&self.unlisted())
    }

    /// What the kernel tells of a GPU's place: an entry among all PCI devices that leads to the one below its bridge and
    /// its root complex.
    fn sysfs(&self, gpu: &GpuSpec) -> io::Result<()> {
        let (address, root) = (gpu.pci.to_string(), &gpu.pcie_root);
        let bridge = format!("{}:{:02x}.0", root.trim_start_matches("pci"), gpu.place);
        let place = format!("devices/{root}/{bridge}/{address}");
        let directory = self.root.join("sys").join(&place);
        let device = gpu.product.pci_device_ids.first().copied().unwrap_or(0);
        for (name, content) in [
            ("vendor", format!("{NVIDIA_VENDOR:#06x}")),
            ("device", format!("{device:#06x}")),
            ("class", format!("{CONTROLLER_3D:#08x}")),
            ("numa_node", gpu.numa_node.map_or_else(|| "-1".to_owned(), |node| node.to_string())),
            ("resource", [NO_REGION; PCI_REGIONS].join("\n")),
        ] {
            put(&directory.join(name), content + "\n")?;
        }
        fs::write(directory.join("config"), pci_config(device))?;
        let all = self.root.join("sys/bus/pci/devices");
        fs::create_dir_all(&all)?;
        std::os::unix::fs::symlink(format!("../../../{place}"), all.join(address))
    }
}

/// The configuration space of a GPU (PCI Local Bus Specification 3.0, 6.1): who it is, and no list of capabilities.
fn pci_config(device: u16) -> [u8; 256] {
    let mut space = [0; 256];
    space[0..2].copy_from_slice(&NVIDIA_VENDOR.to_le_bytes());
    space[2..4].copy_from_slice(&device.to_le_bytes());
    space[9..12].copy_from_slice(&CONTROLLER_3D.to_le_bytes()[..3]);
    space
}

/// Takes a directory for this daemon.
fn take(root: &Path) -> Result<File, LayoutError> {
    let write = |reason| LayoutError::Write { root: root.to_owned(), reason };
    fs::create_dir_all(root).map_err(write)?;
    let marker = root.join(MARKER);
    if !marker.exists() && fs::read_dir(root).map_err(write)?.next().is_some() {
        return Err(LayoutError::Foreign(root.to_owned()));
    }
    let lock = File::create(&marker).map_err(write)?;
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Err(LayoutError::Served(root.to_owned())),
        other => other.map_err(|errno| write(errno.into()))?,
    }
    Ok(lock)
}

/// Moves the directory of the loaded kernel module aside, if there is one.
fn unload_module(root: &Path) -> io::Result<()> {
    let unloaded = root.join(UNLOADED);
    fs::create_dir_all(&unloaded)?;
    let number = fs::read_dir(&unloaded)?.count();
    gone(fs::rename(root.join(MODULE), unloaded.join(number.to_string())))
}

/// Empties a directory and keeps it: someone may have it mounted.
fn empty(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() { fs::remove_dir_all(entry.path())? } else { fs::remove_file(entry.path())? }
    }
    Ok(())
}

/// The file that tells the minor number of a capability, in the form of the kernel module.
fn access(minor: u32, mode: u32) -> String {
    format!("DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n")
}

/// Whether instances exist or not, the kernel module lists a minor number for each that could; these are left out.
fn mig_minors(unlisted: &BTreeSet<u32>) -> String {
    let mut text = format!("config {MIG_CONFIG_MINOR}\nmonitor {MIG_MONITOR_MINOR}\n");
    let (gpus, gis, cis) = TABLE;
    for (gpu, gi) in (0..gpus).flat_map(|gpu| (0..gis).map(move |gi| (gpu, gi))) {
        let own = [(String::new(), gi_minor(gpu, gi))].into_iter();
        let all = own.chain((0..cis).map(|ci| (format!("ci{ci}/"), ci_minor(gpu, gi, ci))));
        for (ci, minor) in all.filter(|(_, minor)| !unlisted.contains(minor)) {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "gpu{gpu}/gi{gi}/{ci}access {minor}");
        }
    }
    text
}

fn put(path: &Path, content: String) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    fs::write(path, content)
}

fn make_node(path: &Path, major: u32, minor: u32, mode: u32) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    gone(fs::remove_file(path))?;
    let mode = Mode::from_raw_mode(mode);
    rustix::fs::mknodat(CWD, path, FileType::CharacterDevice, mode, makedev(major, minor))?;
    Ok(rustix::fs::chmod(path, mode)?) // whatever the umask is
}

/// What is gone already need not be removed.
fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
