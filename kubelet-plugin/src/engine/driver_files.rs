//! What of the driver is on the node: device nodes, capability numbers, and the files that containers get to see. Reads only.
//!
//! Everything is looked up where this program sees it, and named as the host does: the container runtime works on the
//! host. What does not exist is left out, and looked for again the next time.

use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

use kerf_nvml::{DriverRoot, PciAddress};

use super::capabilities;
use super::shown::ShownFiles;

/// Device nodes that every container with a GPU needs, beside that of the GPU.
const CONTROL_NODES: [&str; 4] = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"];

/// The direct rendering manager's directory below `/dev`.
const DRM: &str = "dri";

/// Permission bits of a node that everybody may open to read and write.
const ALL_READ_WRITE: u32 = 0o006;

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
    /// Who may open it; `None` where the host has no node, and the runtime makes the container's from the numbers.
    pub(super) access: Option<Access>,
}

/// Who may open a device node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Access {
    /// Permission bits.
    pub(super) mode: u32,
    /// Its group on the host.
    pub(super) gid: u32,
}

/// A GPU's node for rendering and display, and the name by which programs find it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DrmNode {
    pub(super) node: Node,
    /// Its link in `/dev/dri/by-path` as udev names it (systemd, rules.d/60-drm.rules): `pci-0000:3b:00.0-card`.
    pub(super) by_path: String,
}

/// What every container with a GPU gets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Common {
    pub(super) control_nodes: Vec<Node>,
    pub(super) shown: ShownFiles,
}

impl Node {
    /// The group that a container's process has to join to open it.
    pub(super) fn needed_group(&self) -> Option<u32> {
        let access = self.access.filter(|access| access.mode & ALL_READ_WRITE != ALL_READ_WRITE)?;
        (access.gid != 0).then_some(access.gid)
    }
}

impl Access {
    fn of(metadata: &Metadata) -> Access {
        Access { mode: metadata.mode() & 0o777, gid: metadata.gid() }
    }
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
        let path = self.root.dev().join(&name);
        let access = fs::metadata(&path).ok().as_ref().map(Access::of);
        Some(Node { host_path: self.root.host_path(&path), name, major, minor, access })
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

    /// A GPU's nodes of the direct rendering manager; none where its kernel module is not loaded.
    pub(super) fn drm_nodes(&self, address: PciAddress) -> Vec<DrmNode> {
        let directory = self.root.sys_pci().join(address.to_string()).join("drm");
        let mut names: Vec<_> = fs::read_dir(directory)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        let node = |name: &String| {
            let kind = if is_numbered(name, "card") {
                "card"
            } else if is_numbered(name, "renderD") {
                "render"
            } else {
                return None;
            };
            let node = self.node(&format!("{DRM}/{name}")).ok()?;
            Some(DrmNode { node, by_path: format!("pci-{address}-{kind}") })
        };
        names.iter().filter_map(node).collect()
    }

    /// Everything that does not depend on which GPU it is.
    pub(super) fn common(&self, driver_version: &str) -> Common {
        Common {
            control_nodes: CONTROL_NODES.iter().filter_map(|name| self.node(name).ok()).collect(),
            shown: ShownFiles::of(self.root, driver_version),
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
                    access: Some(Access::of(&metadata)),
                })
            }
            _ => Err(host_path),
        }
    }
}

/// Whether a name is a word and a number: `card0`, and neither `card0-DP-1` nor `controlD64`.
fn is_numbered(name: &str, word: &str) -> bool {
    let number = name.strip_prefix(word);
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn write(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn nodes_are_the_hosts_where_the_root_has_none() {
        let dir = tempfile::tempdir().unwrap();
        let root = DriverRoot::below(dir.path(), Path::new("/run/nvidia/driver"));
        assert_eq!(DriverFiles::new(&root).gpu_node(9999), Err(PathBuf::from("/dev/nvidia9999")));
    }

    #[test]
    fn a_group_is_needed_where_not_everybody_may_read_and_write() {
        let node = |access| Node { name: String::new(), host_path: PathBuf::new(), major: 226, minor: 0, access };
        let group = |mode, gid| node(Some(Access { mode, gid })).needed_group();
        assert_eq!((group(0o660, 44), group(0o664, 44)), (Some(44), Some(44)));
        assert_eq!((group(0o666, 44), group(0o660, 0), node(None).needed_group()), (None, None, None));
    }

    #[test]
    fn drm_nodes_are_told_from_connectors() {
        for (name, is) in
            [("card0", true), ("card12", true), ("card", false), ("card0-DP-1", false), ("renderD128", false)]
        {
            assert_eq!(is_numbered(name, "card"), is, "{name}");
        }
        assert!(is_numbered("renderD128", "renderD"));
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
            access: None,
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
