//! What of the driver's files is on the node: device nodes, libraries, programs, capability numbers. Reads only.
//!
//! Everything is looked up where this program sees it, and named as the host does: the container runtime works on the
//! host. What does not exist is left out, and looked for again the next time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

use kerf_nvml::DriverRoot;

use super::capabilities;

/// Device nodes that every container with a GPU needs, beside that of the GPU.
const CONTROL_NODES: [&str; 4] = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"];

/// Programs of the driver that work in a container.
const PROGRAMS: [&str; 5] =
    ["nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"];

/// NVML's SONAME.
const NVML: &str = "libnvidia-ml.so.1";

/// Where to look.
pub(super) struct DriverFiles<'a> {
    root: &'a DriverRoot,
}

/// A character device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    /// Its name below `/dev`, which is where a container has it.
    pub(super) name: String,
    /// Its path on the host.
    pub(super) host_path: PathBuf,
    pub(super) major: u32,
    pub(super) minor: u32,
}

/// A file that containers get to see under one or more names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shown {
    /// Its path on the host.
    pub(super) host_path: PathBuf,
    /// The names it goes by.
    pub(super) names: BTreeSet<String>,
}

/// What every container with a GPU gets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Common {
    pub(super) control_nodes: Vec<Node>,
    pub(super) libraries: Vec<Shown>,
    pub(super) programs: Vec<Shown>,
    /// The persistence daemon's socket, as the host sees it.
    pub(super) persistenced_socket: Option<PathBuf>,
}

impl<'a> DriverFiles<'a> {
    pub(super) fn new(root: &'a DriverRoot) -> Self {
        DriverFiles { root }
    }

    /// The node of a GPU; `Err` with the path that should be there.
    pub(super) fn gpu_node(&self, minor: u32) -> Result<Node, PathBuf> {
        self.node(&format!("nvidia{minor}"))
    }

    /// The capability device of a GPU instance, or of a compute instance in it. Its node need not exist on the host:
    /// the runtime makes the container's from the numbers.
    pub(super) fn capability_node(
        &self,
        gpu_minor: u32,
        gpu_instance: u32,
        compute_instance: Option<u32>,
    ) -> Option<Node> {
        let proc = self.root.proc();
        let read = |path: PathBuf| fs::read_to_string(path).ok();
        let access = capabilities::access_path(gpu_minor, gpu_instance, compute_instance);
        let minor = read(proc.join("driver/nvidia/capabilities").join(access))
            .and_then(|text| capabilities::minor_of_access(&text))
            .or_else(|| {
                let name = capabilities::name(gpu_minor, gpu_instance, compute_instance);
                capabilities::minor_of_name(&self.mig_minors()?, &name)
            })?;
        let major = capabilities::major(&read(proc.join("devices"))?)?;
        let name = format!("{}{minor}", capabilities::NODE_PREFIX);
        Some(Node { host_path: self.root.host_path(&self.root.dev().join(&name)), name, major, minor })
    }

    /// The kernel module's table of all capability devices.
    fn mig_minors(&self) -> Option<String> {
        fs::read_to_string(self.root.proc().join("driver/nvidia-caps/mig-minors")).ok()
    }

    /// The other way round: the GPU instance that one of these capability devices opens. From the table, else from the files
    /// of the instances that there are.
    pub(super) fn gpu_instance_of_nodes(&self, gpu_minor: u32, minors: &[u32]) -> Option<u32> {
        let by_table = self
            .mig_minors()
            .and_then(|table| minors.iter().find_map(|minor| capabilities::gpu_instance_of_minor(&table, *minor)));
        by_table.or_else(|| {
            let directory =
                self.root.proc().join("driver/nvidia/capabilities").join(capabilities::directory(gpu_minor));
            fs::read_dir(directory).ok()?.flatten().find_map(|entry| {
                let id = capabilities::gpu_instance_of_directory(entry.file_name().to_str()?)?;
                let access = fs::read_to_string(entry.path().join("access")).ok()?;
                minors.contains(&capabilities::minor_of_access(&access)?).then_some(id)
            })
        })
    }

    /// Everything that does not depend on which GPU it is.
    pub(super) fn common(&self, driver_version: &str) -> Common {
        Common {
            control_nodes: CONTROL_NODES.iter().filter_map(|name| self.node(name).ok()).collect(),
            libraries: self.libraries(driver_version),
            programs: PROGRAMS.iter().filter_map(|name| self.program(name)).collect(),
            persistenced_socket: self.root.persistenced_socket().map(|socket| self.root.host_path(&socket)),
        }
    }

    fn node(&self, name: &str) -> Result<Node, PathBuf> {
        let path = self.root.dev().join(name);
        let host_path = self.root.host_path(&path);
        match fs::metadata(&path) {
            Ok(metadata) if metadata.file_type().is_char_device() => {
                let device = metadata.rdev();
                Ok(Node {
                    name: name.to_owned(),
                    host_path,
                    major: rustix::fs::major(device),
                    minor: rustix::fs::minor(device),
                })
            }
            _ => Err(host_path),
        }
    }

    fn program(&self, name: &str) -> Option<Shown> {
        let host_path = self.root.host_path(&self.root.program(name).ok()?);
        Some(Shown { host_path, names: BTreeSet::from([name.to_owned()]) })
    }

    /// The libraries that belong to this driver version, with the names by which programs load them. They lie where
    /// NVML lies.
    fn libraries(&self, driver_version: &str) -> Vec<Shown> {
        let Ok(nvml) = self.root.nvml_library() else { return Vec::new() };
        let Some(dir) = nvml.parent() else { return Vec::new() };
        let host_dir = self.root.host_path(dir);
        let mut files = BTreeSet::new();
        let mut links = BTreeMap::new();
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            match entry.file_type() {
                Ok(kind) if kind.is_symlink() => {
                    let target = fs::read_link(entry.path()).ok();
                    if let Some(target) = target.and_then(|target| target.to_str().map(str::to_owned)) {
                        links.insert(name, target);
                    }
                }
                Ok(kind) if kind.is_file() => _ = files.insert(name),
                _ => {}
            }
        }
        let mut shown = names_of_libraries(&files, &links, driver_version);
        if let Some(nvml) = nvml.file_name().and_then(|name| name.to_str()) {
            shown.entry(nvml.to_owned()).or_default().extend([nvml.to_owned(), NVML.to_owned()]);
        }
        shown.into_iter().map(|(file, names)| Shown { host_path: host_dir.join(file), names }).collect()
    }
}

/// The files `*.so.<driver version>`, each with its own name and that of every link to it in the same directory, among
/// them its SONAME: no hook runs the linker's cache in the container, so a library has to be where it is looked for.
fn names_of_libraries(
    files: &BTreeSet<String>,
    links: &BTreeMap<String, String>,
    driver_version: &str,
) -> BTreeMap<String, BTreeSet<String>> {
    let suffix = format!(".so.{driver_version}");
    let mut shown: BTreeMap<_, _> = files
        .iter()
        .filter(|file| file.ends_with(&suffix))
        .map(|file| (file.clone(), BTreeSet::from([file.clone()])))
        .collect();
    for link in links.keys() {
        let mut name = link;
        // Links lead to links; as many steps as there are links end every chain, also one that goes in circles.
        for _ in 0..links.len() {
            match links.get(name) {
                Some(target) => name = target,
                None => break,
            }
        }
        if let Some(names) = shown.get_mut(name) {
            names.insert(link.clone());
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::*;

    const VERSION: &str = "535.261.03";

    fn write(path: &Path, content: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    #[test]
    fn libraries_come_with_every_name_they_are_loaded_by() {
        let files =
            ["libcuda.so.535.261.03", "libnvidia-ptxjitcompiler.so.535.261.03", "libcuda.so.470.1", "libc.so.6"];
        let links = [
            ("libcuda.so", "libcuda.so.1"),
            ("libcuda.so.1", "libcuda.so.535.261.03"),
            ("libm.so", "libm.so.6"),
            ("libloop.so", "libloop.so.1"),
            ("libloop.so.1", "libloop.so"),
            ("libdangling.so.1", "libdangling.so.535.261.03"),
        ];
        let shown = names_of_libraries(
            &files.iter().map(ToString::to_string).collect(),
            &links.iter().map(|(link, target)| (link.to_string(), target.to_string())).collect(),
            VERSION,
        );
        let names = |file: &str| shown[file].iter().map(String::as_str).collect::<Vec<_>>();
        assert_eq!(shown.len(), 2, "other versions and libraries of others stay out");
        assert_eq!(names("libcuda.so.535.261.03"), ["libcuda.so", "libcuda.so.1", "libcuda.so.535.261.03"]);
        assert_eq!(names("libnvidia-ptxjitcompiler.so.535.261.03"), ["libnvidia-ptxjitcompiler.so.535.261.03"]);
    }

    /// Files are found below the plugin's driver root and named as the host names them.
    #[test]
    fn paths_are_the_hosts() {
        let host = tempfile::tempdir().unwrap();
        let root = DriverRoot::below(host.path(), Path::new("/run/nvidia/driver"));
        let lib = root.path().join("usr/lib/x86_64-linux-gnu");
        write(&lib.join("libnvidia-ml.so.535.261.03"), "");
        symlink("libnvidia-ml.so.535.261.03", lib.join("libnvidia-ml.so.1")).unwrap();
        write(&root.path().join("usr/bin/nvidia-smi"), "");
        write(&root.path().join("run/nvidia-persistenced/socket"), "");
        let files = DriverFiles::new(&root);

        let common = files.common(VERSION);
        let [nvml] = &common.libraries[..] else { panic!("{common:?}") };
        assert_eq!(nvml.host_path, Path::new("/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.535.261.03"));
        assert!(nvml.names.contains("libnvidia-ml.so.1"));
        let [smi] = &common.programs[..] else { panic!("{common:?}") };
        assert_eq!(smi.host_path, Path::new("/run/nvidia/driver/usr/bin/nvidia-smi"));
        let socket = Path::new("/run/nvidia/driver/run/nvidia-persistenced/socket");
        assert_eq!(common.persistenced_socket.as_deref(), Some(socket));
        // This driver root has no device nodes of its own, so they are the host's.
        assert_eq!(files.gpu_node(9999), Err(PathBuf::from("/dev/nvidia9999")));
    }

    /// A library that is installed under its SONAME alone is shown under it.
    #[test]
    fn nvml_needs_no_versioned_name() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir.path().join("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"), "");
        let root = DriverRoot::below(dir.path(), Path::new("/"));
        let libraries = DriverFiles::new(&root).common(VERSION).libraries;
        let [nvml] = &libraries[..] else { panic!("{libraries:?}") };
        assert_eq!(nvml.host_path, Path::new("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"));
        assert_eq!(nvml.names, BTreeSet::from(["libnvidia-ml.so.1".to_owned()]));
    }

    #[test]
    fn capability_numbers_come_from_the_instance_else_from_the_table() {
        let dir = tempfile::tempdir().unwrap();
        let proc = dir.path().join("proc");
        write(&proc.join("devices"), "Character devices:\n235 nvidia-caps\n");
        write(&proc.join("driver/nvidia/capabilities/gpu0/mig/gi5/access"), "DeviceFileMinor: 48\n");
        write(&proc.join("driver/nvidia-caps/mig-minors"), "gpu0/gi5/access 99\ngpu0/gi5/ci0/access 49\n");
        let root = DriverRoot::below(dir.path(), Path::new("/"));
        let files = DriverFiles::new(&root);
        let node = |compute_instance| files.capability_node(0, 5, compute_instance);
        let expected = |minor| Node {
            name: format!("nvidia-caps/nvidia-cap{minor}"),
            host_path: PathBuf::from(format!("/dev/nvidia-caps/nvidia-cap{minor}")),
            major: 235,
            minor,
        };
        assert_eq!(node(None), Some(expected(48)));
        assert_eq!(node(Some(0)), Some(expected(49)));
        assert_eq!(node(Some(1)), None);

        // The table has the last word on what a node opens, as it stays when the instance goes.
        let instance = |gpu, minors: &[u32]| files.gpu_instance_of_nodes(gpu, minors);
        assert_eq!((instance(0, &[99]), instance(0, &[49, 99])), (Some(5), Some(5)));
        assert_eq!((instance(0, &[49, 48]), instance(1, &[48]), instance(0, &[])), (Some(5), None, None));
        fs::remove_file(proc.join("driver/nvidia-caps/mig-minors")).unwrap();
        assert_eq!((instance(0, &[99]), instance(0, &[49, 48])), (None, Some(5)));
    }
}
