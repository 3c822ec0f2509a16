//! Where the driver's files are.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::lookup::{Lookup, Walk};

/// NVML's file name on Linux (NVML API reference: link against `libnvidia-ml.so.1`).
const NVML: &str = "libnvidia-ml.so.1";

/// Where the driver's installers put libraries, below the driver root: NVIDIA's own installer and RPMs, Debian's
/// multiarch directories (with NVIDIA's libraries behind alternatives in `nvidia/current`), Container-Optimized OS.
pub(crate) const LIBRARY_DIRS: [&str; 12] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "lib/x86_64-linux-gnu/nvidia/current",
    "lib/aarch64-linux-gnu/nvidia/current",
    "lib",
];

/// Where the driver's programs are, below the driver root.
pub(crate) const PROGRAM_DIRS: [&str; 5] = ["opt/bin", "usr/bin", "usr/sbin", "bin", "sbin"];

/// The directory of the loaded kernel module (Linux Documentation/ABI/stable/sysfs-module).
const MODULE: &str = "sys/module/nvidia";

/// Where the kernel tells its boot id (random(4)).
const BOOT_ID: &str = "proc/sys/kernel/random/boot_id";

/// A directory that holds an NVIDIA driver: libraries, programs and, for a containerised driver, device nodes.
///
/// Files are looked up when asked for, not kept: a driver container may come and go.
///
/// A program in a container sees the host's root directory somewhere below its own. All paths here are the program's own,
/// and [`DriverRoot::host_path`] tells what the host calls them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverRoot {
    /// Where the host's root directory is.
    host_root: PathBuf,
    /// The driver root, below `host_root`.
    root: PathBuf,
}

/// Why a driver root is of no use.
#[derive(Debug, thiserror::Error)]
pub enum DriverRootError {
    /// No candidate holds NVML.
    #[error(
        "no NVIDIA driver found: {NVML} is in none of the usual library directories below {}; install the driver, or \
         set --driver-root to the directory that holds it",
        list(.0)
    )]
    NotFound(Vec<PathBuf>),
    /// The driver root lacks a file.
    #[error("{name} not found in any of {}; does --driver-root name the directory that holds the driver?", list(.looked))]
    Missing {
        /// The file's name.
        name: String,
        /// Every directory looked in.
        looked: Vec<PathBuf>,
    },
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

impl DriverRoot {
    /// Where drivers are usually found: the GPU operator's driver container, Container-Optimized OS, the host itself.
    pub const CANDIDATES: [&str; 3] = ["/run/nvidia/driver", "/home/kubernetes/bin/nvidia", "/"];

    /// The driver root at `path`, whatever is there, for a program on the host itself.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        DriverRoot { host_root: PathBuf::from("/"), root: path.into() }
    }

    /// The driver root that the host calls `path`, for a program that sees the host's root directory at `host_root`. Links
    /// on the way to it lead where they lead on the host.
    pub fn below(host_root: impl Into<PathBuf>, path: &Path) -> Self {
        let host_root = host_root.into();
        let as_named = || host_root.join(path.strip_prefix("/").unwrap_or(path));
        let root = Walk::below(&host_root).to(path).map_or_else(as_named, |(root, _)| root);
        DriverRoot { host_root, root }
    }

    /// The first candidate that holds NVML; usually of [`DriverRoot::CANDIDATES`]. They are the host's names.
    ///
    /// # Errors
    /// [`DriverRootError::NotFound`] names all candidates when none does.
    pub fn detect(
        host_root: &Path,
        candidates: impl IntoIterator<Item = impl AsRef<Path>>,
    ) -> Result<Self, DriverRootError> {
        let mut looked = Vec::new();
        for candidate in candidates {
            let root = DriverRoot::below(host_root, candidate.as_ref());
            if root.nvml_library().is_ok() {
                return Ok(root);
            }
            looked.push(root.root);
        }
        Err(DriverRootError::NotFound(looked))
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// What the host, and its container runtime, call a path that this gave out.
    pub fn host_path(&self, path: &Path) -> PathBuf {
        match path.strip_prefix(&self.host_root) {
            Ok(below) => Path::new("/").join(below),
            Err(_) => path.to_owned(),
        }
    }

    /// The NVML library.
    ///
    /// # Errors
    /// [`DriverRootError::Missing`] when no library directory has it.
    pub fn nvml_library(&self) -> Result<PathBuf, DriverRootError> {
        self.library(NVML)
    }

    /// A library of the driver, such as `libcuda.so.1`: the regular file behind the links, below the root.
    ///
    /// # Errors
    /// [`DriverRootError::Missing`] when no library directory has it.
    pub fn library(&self, name: &str) -> Result<PathBuf, DriverRootError> {
        self.lookup().library(name)
    }

    /// A program of the driver, such as `nvidia-smi`: the regular file behind the links, below the root.
    ///
    /// # Errors
    /// [`DriverRootError::Missing`] when no program directory has it.
    pub fn program(&self, name: &str) -> Result<PathBuf, DriverRootError> {
        self.lookup().program(name)
    }

    /// For looking for many files at once.
    pub fn lookup(&self) -> Lookup<'_> {
        Lookup::new(self)
    }

    /// Where the device nodes are: the driver root's own `dev` if it has the driver's control node, else the host's.
    pub fn dev(&self) -> PathBuf {
        self.own_or_host("dev", "dev/nvidiactl")
    }

    /// Where the driver's kernel files are: the driver root's own `proc` if it has `driver/nvidia`, else the host's.
    pub fn proc(&self) -> PathBuf {
        self.own_or_host("proc", "proc/driver/nvidia")
    }

    /// Where the PCI devices are: the driver root's own `sys/bus/pci/devices` if there is one, else the host's.
    pub fn sys_pci(&self) -> PathBuf {
        self.own_or_host("sys/bus/pci/devices", "sys/bus/pci/devices")
    }

    /// Which loading of the kernel module this is: a number that another loading does not have. `None` where the kernel
    /// does not tell, such as without sysfs.
    ///
    /// It is the inode number of the module's directory in sysfs, the driver root's own if it has one, else the host's.
    /// On 64-bit kernels that is the id of the directory's kernfs node, and ids are given out in a circle, not again at
    /// once (Linux 4.14 and later, fs/kernfs/dir.c: `idr_alloc_cyclic` in `__kernfs_new_node`). Times of sysfs files would
    /// tell nothing: they are those of the first look. Not verified on a machine with a GPU.
    pub fn driver_load(&self) -> Option<u64> {
        let directory = self.own_or_host(MODULE, MODULE);
        fs::metadata(directory).ok().map(|metadata| metadata.ino()).filter(|inode| *inode != 0)
    }

    /// The kernel's boot id, which is another after every boot (random(4)): the driver root's own if it tells one, else the
    /// host's. Empty where the kernel does not tell it.
    pub fn boot_id(&self) -> String {
        let file = self.own_or_host(BOOT_ID, BOOT_ID);
        fs::read_to_string(file).unwrap_or_default().trim().to_owned()
    }

    fn own_or_host(&self, dir: &str, evidence: &str) -> PathBuf {
        let root = if self.root.join(evidence).exists() { &self.root } else { &self.host_root };
        root.join(dir)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn touch(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }

    fn link(target: impl AsRef<Path>, path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    #[test]
    fn the_first_candidate_with_nvml_is_the_driver_root() {
        let dir = tempfile::tempdir().unwrap();
        let host = dir.path();
        let candidate = |name: &str| host.join(name);
        touch(&candidate("driver").join("usr/bin/nvidia-smi")); // an unpacked driver without its libraries
        touch(&candidate("cos").join("lib64/libnvidia-ml.so.1"));
        touch(&candidate("cos").join("bin/nvidia-smi"));
        touch(&candidate("host").join("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"));

        let root = DriverRoot::detect(host, ["/absent", "/driver", "/cos", "/host"]).unwrap();
        assert_eq!(root.path(), candidate("cos"));
        assert_eq!(root.nvml_library().unwrap(), candidate("cos").join("lib64/libnvidia-ml.so.1"));
        assert_eq!(root.program("nvidia-smi").unwrap(), candidate("cos").join("bin/nvidia-smi"));
        assert_eq!(root.host_path(&root.nvml_library().unwrap()), Path::new("/cos/lib64/libnvidia-ml.so.1"));
    }

    #[test]
    fn what_is_missing_is_named_with_every_place_and_the_flag() {
        let dir = tempfile::tempdir().unwrap();
        let error = DriverRoot::detect(dir.path(), ["/a", "/b"]).unwrap_err().to_string();
        for part in ["libnvidia-ml.so.1", "/a, ", "/b;", "--driver-root"] {
            assert!(error.contains(part), "{error}");
        }

        let error = DriverRoot::at(dir.path()).program("nvidia-smi").unwrap_err().to_string();
        for part in ["nvidia-smi", "/opt/bin, ", "/usr/bin, ", "/sbin;", "--driver-root"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn kernel_files_come_from_the_root_only_if_it_has_the_drivers_own() {
        let dir = tempfile::tempdir().unwrap();
        let root = DriverRoot::at(dir.path());
        for empty in ["dev", "proc", "sys"] {
            fs::create_dir_all(dir.path().join(empty)).unwrap(); // a plain root file system has these, empty
        }
        assert_eq!(root.dev(), Path::new("/dev"));
        assert_eq!(root.proc(), Path::new("/proc"));
        assert_eq!(root.sys_pci(), Path::new("/sys/bus/pci/devices"));

        touch(&dir.path().join("dev/nvidiactl"));
        touch(&dir.path().join("proc/driver/nvidia/version"));
        fs::create_dir_all(dir.path().join("sys/bus/pci/devices")).unwrap();
        assert_eq!(root.dev(), dir.path().join("dev"));
        assert_eq!(root.proc(), dir.path().join("proc"));
        assert_eq!(root.sys_pci(), dir.path().join("sys/bus/pci/devices"));
    }

    /// `/var/run` is a link to `/run` on every host, and often an absolute one.
    #[test]
    fn a_host_below_the_root_is_looked_at_as_it_sees_itself() {
        let dir = tempfile::tempdir().unwrap();
        let host = dir.path();
        touch(&host.join("run/nvidia/driver/usr/lib64/libnvidia-ml.so.1"));
        touch(&host.join("dev/nvidiactl"));
        link("/run", &host.join("var/run"));

        let root = DriverRoot::below(host, Path::new("/var/run/nvidia/driver"));
        assert_eq!(root.path(), host.join("run/nvidia/driver"));
        assert_eq!(root.host_path(root.path()), Path::new("/run/nvidia/driver"));
        assert!(root.nvml_library().is_ok());
        for (here, there) in [(root.dev(), "/dev"), (root.proc(), "/proc"), (root.sys_pci(), "/sys/bus/pci/devices")] {
            assert_eq!((here.strip_prefix(host).is_ok(), root.host_path(&here)), (true, PathBuf::from(there)));
        }

        touch(&host.join("run/nvidia/driver/dev/nvidiactl"));
        assert_eq!(root.host_path(&root.dev()), Path::new("/run/nvidia/driver/dev"), "its own nodes come first");
        let absent = DriverRoot::below(host, Path::new("/nowhere"));
        assert_eq!((absent.path(), absent.host_path(absent.path())), (&*host.join("nowhere"), "/nowhere".into()));
    }

    #[test]
    fn a_module_that_is_loaded_again_is_another() {
        let dir = tempfile::tempdir().unwrap();
        let root = DriverRoot::at(dir.path());
        let module = dir.path().join(MODULE);
        fs::create_dir_all(&module).unwrap();
        let first = root.driver_load();
        assert!(first.is_some());
        assert_eq!(root.driver_load(), first);
        fs::rename(&module, dir.path().join("unloaded")).unwrap();
        fs::create_dir(&module).unwrap();
        assert!(root.driver_load().is_some_and(|second| Some(second) != first));
    }
}
