//! What a container with these devices needs, as a CDI document. Pure.
//!
//! The document names its version by the fields used. Mounts and device nodes do without a program of ours in the container;
//! what they cannot do is left to the hook, where there is one.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::path::Path;

use kerf_cdi::{ContainerEdits, Device, DeviceNode, DeviceType, Hook, HookName, Kind, Mount, Spec};

use super::driver_files::{Common, DrmNode, Node};
use super::metadata::MetadataFile;
use super::shown::{Link, Shown};
use super::{DeviceName, Injection};
use crate::hook;

/// What the hook may take, in seconds. It takes milliseconds; what waits for ever would keep the container from starting and
/// from being deleted.
const HOOK_SECONDS: NonZeroU32 = NonZeroU32::new(60).expect("not 0");

/// A device and the nodes that a container must be able to open for it.
#[derive(Clone, Debug)]
pub(super) struct DeviceNodes {
    pub(super) device: DeviceName,
    pub(super) nodes: Vec<Node>,
    /// Those for rendering and display, of a device that may have them.
    pub(super) drm: Vec<DrmNode>,
    /// What its containers are told of it, one file for each request that it serves.
    pub(super) metadata: Vec<MetadataFile>,
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
pub(super) fn spec(
    kind: &Kind,
    claim_uid: &str,
    devices: &[DeviceNodes],
    common: &Common,
    injection: &Injection,
) -> Spec {
    let mut spec = Spec::new(kind.clone());
    spec.devices = devices.iter().map(|device| edits_of(device, claim_uid, injection)).collect();
    let shown = &common.shown;
    let sockets = shown.sockets.iter().flat_map(mounts).map(|mut socket| {
        socket.options.push("noexec".to_owned());
        socket
    });
    let mut hooks = links(injection, shown.links.iter().map(ToString::to_string));
    hooks.extend(ldcache(injection, &shown.library_folders));
    spec.container_edits = ContainerEdits {
        // Keeps NVIDIA's legacy runtime from giving the container GPUs of its own choice.
        env: vec!["NVIDIA_VISIBLE_DEVICES=void".to_owned()],
        device_nodes: common.control_nodes.iter().map(device_node).collect(),
        mounts: shown.files.iter().flat_map(mounts).chain(sockets).collect(),
        additional_gids: groups(injection, &common.control_nodes),
        hooks,
    };
    spec
}

fn edits_of(device: &DeviceNodes, claim_uid: &str, injection: &Injection) -> Device {
    let DeviceNodes { device, nodes, drm, metadata, kept, admin_access } = device;
    let all: Vec<Node> = nodes.iter().chain(drm.iter().map(|drm| &drm.node)).cloned().collect();
    let by_path = |drm: &DrmNode| {
        let name = drm.node.name.rsplit('/').next().unwrap_or_default();
        Link { target: format!("../{name}"), path: format!("/dev/dri/by-path/{}", drm.by_path) }.to_string()
    };
    let told = |file: &MetadataFile| mount(&file.host_path, file.container_path.clone());
    Device {
        name: device_name(claim_uid, &device.to_string()),
        container_edits: ContainerEdits {
            device_nodes: all.iter().map(device_node).collect(),
            mounts: metadata.iter().map(told).collect(),
            additional_gids: groups(injection, &all),
            hooks: links(injection, drm.iter().map(by_path)),
            ..ContainerEdits::default()
        },
        annotations: kept
            .iter()
            .map(|kept| (KEPT.to_owned(), kept.word().to_owned()))
            .chain(admin_access.then(|| (ADMIN_ACCESS.to_owned(), "true".to_owned())))
            .collect(),
    }
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
        file_mode: node.access.map(|access| access.mode),
        // No `m`: nothing in a container makes nodes of this driver.
        permissions: Some("rw".to_owned()),
        gid: node.access.map(|access| access.gid).filter(|gid| *gid != 0),
        ..DeviceNode::default()
    }
}

/// The groups that a container's process has to join for some nodes.
fn groups(injection: &Injection, nodes: &[Node]) -> Vec<u32> {
    let groups: BTreeSet<u32> = nodes.iter().filter_map(Node::needed_group).collect();
    if injection.additional_gids { groups.into_iter().collect() } else { Vec::new() }
}

fn mounts(shown: &Shown) -> impl Iterator<Item = Mount> + '_ {
    shown.container_paths.iter().map(|path| mount(&shown.host_path, path.clone()))
}

fn mount(host_path: &Path, container_path: String) -> Mount {
    Mount {
        host_path: text(host_path),
        container_path,
        options: ["ro", "nosuid", "nodev", "rbind", "rprivate"].map(str::to_owned).to_vec(),
        mount_type: None,
    }
}

fn links(injection: &Injection, links: impl Iterator<Item = String>) -> Vec<Hook> {
    hook_with(injection.hook.as_ref(), "create-symlinks", "--link", links)
}

fn ldcache(injection: &Injection, folders: &[String]) -> Vec<Hook> {
    let hook = injection.hook.as_ref().filter(|hook| hook.updates_ldcache);
    hook_with(hook, "update-ldcache", "--folder", folders.iter().cloned())
}

/// A call of the hook, if there is one and there is anything to do.
fn hook_with(hook: Option<&hook::Hook>, command: &str, flag: &str, values: impl Iterator<Item = String>) -> Vec<Hook> {
    let values: Vec<String> = values.flat_map(|value| [flag.to_owned(), value]).collect();
    let Some(hook) = hook.filter(|_| !values.is_empty()) else { return Vec::new() };
    let call = Hook {
        hook_name: HookName::CreateContainer,
        path: text(&hook.path),
        args: [hook::NAME.to_owned(), command.to_owned()].into_iter().chain(values).collect(),
        // Some runtimes give hooks the image's environment unless they have one of their own.
        env: vec!["LC_ALL=C".to_owned()],
        timeout: Some(HOOK_SECONDS),
    };
    vec![call]
}

/// Paths here are made of the driver root, which came as text, and of names that are UTF-8.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::super::driver_files::Access;
    use super::super::shown::ShownFiles;
    use super::*;

    const ROOT: &str = "/run/nvidia/driver";

    fn node(name: &str, (major, minor): (u32, u32), host: &str, access: Option<(u32, u32)>) -> Node {
        let access = access.map(|(mode, gid)| Access { mode, gid });
        Node { name: name.to_owned(), host_path: format!("{host}/dev/{name}").into(), major, minor, access }
    }

    fn device(name: &str, nodes: Vec<Node>) -> DeviceNodes {
        let device = name.parse().unwrap();
        DeviceNodes { device, nodes, drm: Vec::new(), metadata: Vec::new(), kept: None, admin_access: false }
    }

    fn common() -> Common {
        let shown = |host: &str, paths: &[&str]| Shown {
            host_path: format!("{ROOT}/{host}").into(),
            container_paths: paths.iter().map(ToString::to_string).collect(),
        };
        Common {
            control_nodes: vec![node("nvidiactl", (195, 255), ROOT, Some((0o666, 0)))],
            shown: ShownFiles {
                files: vec![
                    shown(
                        "usr/lib64/libcuda.so.535.261.03",
                        &["/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.535.261.03"],
                    ),
                    shown("usr/bin/nvidia-smi", &["/usr/bin/nvidia-smi"]),
                ],
                sockets: vec![shown("run/nvidia-persistenced/socket", &["/run/nvidia-persistenced/socket"])],
                library_folders: vec!["/usr/lib/x86_64-linux-gnu".to_owned()],
                links: vec![Link {
                    target: "libcuda.so.1".to_owned(),
                    path: "/usr/lib/x86_64-linux-gnu/libcuda.so".to_owned(),
                }],
            },
        }
    }

    fn json(devices: &[DeviceNodes], injection: &Injection) -> String {
        let kind = Kind::new("k8s.gpu.nvidia.com", "claim").unwrap();
        String::from_utf8(spec(&kind, "0b1c", devices, &common(), injection).to_json().unwrap()).unwrap()
    }

    #[test]
    fn a_partition_gets_its_own_nodes_and_no_others() {
        let nodes = vec![
            node("nvidia0", (195, 0), ROOT, Some((0o666, 0))),
            node("nvidia-caps/nvidia-cap48", (235, 48), "", None),
            node("nvidia-caps/nvidia-cap49", (235, 49), "", None),
        ];
        let injection = Injection { hook: None, metadata: false, additional_gids: true };
        insta::assert_snapshot!(json(&[device("gpu-3b-00-0-mig-1g10gb-4", nodes)], &injection));
    }

    /// With everything that a document can have.
    #[test]
    fn a_whole_gpu_gets_what_needs_a_hook_and_a_group() {
        let mut whole = device("gpu-3b-00-0", vec![node("nvidia0", (195, 0), ROOT, Some((0o666, 0)))]);
        whole.drm = ["card1 card", "renderD128 render"]
            .map(|pair| pair.split_once(' ').unwrap())
            .map(|(name, kind)| DrmNode {
                node: node(&format!("dri/{name}"), (226, 1), ROOT, Some((0o660, 44))),
                by_path: format!("pci-0000:3b:00.0-{kind}"),
            })
            .into();
        whole.metadata = vec![MetadataFile {
            request: "gpu".to_owned(),
            host_path: "/var/lib/kubelet/plugins/gpu.nvidia.com/metadata/0b1c/gpu.json".into(),
            container_path: "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/a/gpu/d-metadata.json"
                .to_owned(),
        }];
        let hook = hook::Hook {
            path: "/var/lib/kubelet/plugins/gpu.nvidia.com/bin/kerf-cdi-hook".into(),
            updates_ldcache: true,
        };
        let injection = Injection { hook: Some(hook), metadata: true, additional_gids: true };
        insta::assert_snapshot!(json(&[whole.clone()], &injection));

        let without = json(&[whole], &Injection { hook: None, additional_gids: false, ..injection });
        assert!(!without.contains("hook") && !without.contains("additionalGids"), "{without}");
        assert!(without.contains("\"cdiVersion\": \"0.5.0\""), "the runtime need not be new: {without}");
    }
}
