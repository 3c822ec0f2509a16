//! What a container with these devices needs, as a CDI document. Pure.
//!
//! The document names its version by the fields used. No hook runs, so every library is mounted under each of its names
//! in a directory that the dynamic linker searches by itself.

use std::path::{Path, PathBuf};

use kerf_cdi::{ContainerEdits, Device, DeviceNode, DeviceType, Kind, Mount, Spec};

use super::DeviceName;
use super::driver_files::{Common, Node, Shown};

/// Multiarch directory that glibc's linker searches on Debian and Ubuntu, the bases of NVIDIA's images.
const LIBRARY_DIR: &str =
    if cfg!(target_arch = "aarch64") { "/usr/lib/aarch64-linux-gnu" } else { "/usr/lib/x86_64-linux-gnu" };

const PROGRAM_DIR: &str = "/usr/bin";

const PERSISTENCED_SOCKET: &str = "/run/nvidia-persistenced/socket";

/// A device and the nodes that a container must be able to open for it.
#[derive(Clone, Debug)]
pub(super) struct DeviceNodes {
    pub(super) device: DeviceName,
    pub(super) nodes: Vec<Node>,
    /// What of the partition was there before the claim and stays after it.
    pub(super) kept: Option<Kept>,
    /// Whether the claim only looks at it.
    pub(super) admin_access: bool,
}

/// See [`KEPT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    /// The GPU instance.
    GpuInstance,
    /// The GPU instance and its compute instance.
    Both,
}

/// Annotation of a device whose instance is not the claim's to destroy, for the day on which the journal is lost.
const KEPT: &str = "kerf.dev/kept";

/// Annotation of a device that the claim only looks at, for the same day: nothing of it is the claim's.
const ADMIN_ACCESS: &str = "kerf.dev/admin-access";

/// Whether the claim that a document is of only looks at a device.
pub(super) fn is_admin_access(device: &Device) -> bool {
    device.annotations.contains_key(ADMIN_ACCESS)
}

impl Kept {
    fn word(self) -> &'static str {
        match self {
            Kept::GpuInstance => "gpu-instance",
            Kept::Both => "gpu-and-compute-instance",
        }
    }

    /// What the annotations of a device say.
    pub(super) fn of(device: &Device) -> Option<Kept> {
        let word = device.annotations.get(KEPT)?;
        // A word that this build does not know says at least that the instance is to stay.
        Some(if *word == Kept::GpuInstance.word() { Kept::GpuInstance } else { Kept::Both })
    }
}

/// The name of a claim's device in its CDI document.
pub(super) fn device_name(claim_uid: &str, device: &str) -> String {
    format!("{claim_uid}-{device}")
}

/// The document of one claim.
pub(super) fn spec(kind: &Kind, claim_uid: &str, devices: &[DeviceNodes], common: &Common) -> Spec {
    let mut spec = Spec::new(kind.clone());
    spec.devices = devices
        .iter()
        .map(|DeviceNodes { device, nodes, kept, admin_access }| Device {
            name: device_name(claim_uid, &device.to_string()),
            container_edits: ContainerEdits {
                device_nodes: nodes.iter().map(device_node).collect(),
                ..ContainerEdits::default()
            },
            annotations: kept
                .iter()
                .map(|kept| (KEPT.to_owned(), kept.word().to_owned()))
                .chain(admin_access.then(|| (ADMIN_ACCESS.to_owned(), "true".to_owned())))
                .collect(),
        })
        .collect();
    let libraries = common.libraries.iter().flat_map(|library| mounts(library, LIBRARY_DIR));
    let programs = common.programs.iter().flat_map(|program| mounts(program, PROGRAM_DIR));
    let socket = common.persistenced_socket.iter().map(|socket| {
        let mut mount = mount(socket, PERSISTENCED_SOCKET.to_owned());
        mount.options.push("noexec".to_owned());
        mount
    });
    spec.container_edits = ContainerEdits {
        // Keeps NVIDIA's legacy runtime from giving the container GPUs of its own choice.
        env: vec!["NVIDIA_VISIBLE_DEVICES=void".to_owned()],
        device_nodes: common.control_nodes.iter().map(device_node).collect(),
        mounts: libraries.chain(programs).chain(socket).collect(),
        ..ContainerEdits::default()
    };
    spec
}

fn device_node(node: &Node) -> DeviceNode {
    let path = format!("/dev/{}", node.name);
    let host_path = Some(text(&node.host_path)).filter(|host_path| *host_path != path);
    DeviceNode {
        path,
        host_path,
        device_type: Some(DeviceType::Character),
        major: Some(node.major),
        minor: Some(node.minor),
        permissions: Some("rw".to_owned()),
        ..DeviceNode::default()
    }
}

fn mounts<'a>(shown: &'a Shown, dir: &'a str) -> impl Iterator<Item = Mount> + 'a {
    shown.names.iter().map(move |name| mount(&shown.host_path, format!("{dir}/{name}")))
}

fn mount(host_path: &Path, container_path: String) -> Mount {
    Mount {
        host_path: text(host_path),
        container_path,
        options: ["ro", "nosuid", "nodev", "rbind", "rprivate"].map(str::to_owned).to_vec(),
        mount_type: None,
    }
}

/// Paths here are made of the driver root, which came as text, and of names that are UTF-8.
fn text(path: &Path) -> String {
    PathBuf::from(path).to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn node(name: &str, minor: u32, host: &str) -> Node {
        Node { name: name.to_owned(), host_path: format!("{host}/dev/{name}").into(), major: 195, minor }
    }

    #[test]
    fn a_partition_gets_its_own_nodes_and_no_others() {
        let host = "/run/nvidia/driver";
        let devices = [DeviceNodes {
            device: "gpu-3b-00-0-mig-1g10gb-4".parse().unwrap(),
            nodes: vec![
                node("nvidia0", 0, host),
                node("nvidia-caps/nvidia-cap48", 48, ""),
                node("nvidia-caps/nvidia-cap49", 49, ""),
            ],
            kept: None,
            admin_access: false,
        }];
        let common = Common {
            control_nodes: vec![node("nvidiactl", 255, host)],
            libraries: vec![Shown {
                host_path: "/run/nvidia/driver/usr/lib64/libcuda.so.535.261.03".into(),
                names: BTreeSet::from(["libcuda.so.1".to_owned(), "libcuda.so.535.261.03".to_owned()]),
            }],
            programs: vec![Shown {
                host_path: "/run/nvidia/driver/usr/bin/nvidia-smi".into(),
                names: BTreeSet::from(["nvidia-smi".to_owned()]),
            }],
            persistenced_socket: Some("/run/nvidia/driver/run/nvidia-persistenced/socket".into()),
        };
        let kind = Kind::new("k8s.gpu.nvidia.com", "claim").unwrap();
        let json = spec(&kind, "0b1c", &devices, &common).to_json().unwrap();
        insta::assert_snapshot!(String::from_utf8(json).unwrap());
    }
}
