//! Specs as a GPU driver writes them: a whole GPU, and a MIG device of one.

use kerf_cdi::{ContainerEdits, Device, DeviceNode, DeviceType, Hook, HookName, Kind, Mount, Spec};

/// UID of the claim that [`gpu`] is for.
pub(crate) const GPU_CLAIM: &str = "0b6f6c5e-8a3f-4a44-9d0c-0d9f4d1c2a11";
/// UID of the claim that [`mig`] is for. Begins with a letter.
pub(crate) const MIG_CLAIM: &str = "f3c1b1de-5d07-4a3a-8f6e-5f0f7a9f7b22";

/// The kind of claims' devices.
pub(crate) fn kind() -> Kind {
    Kind::new("k8s.gpu.nvidia.com", "claim").unwrap()
}

/// A character device as the driver makes it, with its number.
pub(crate) fn node(path: &str, major: u32, minor: u32) -> DeviceNode {
    DeviceNode {
        path: path.into(),
        device_type: Some(DeviceType::Character),
        major: Some(major),
        minor: Some(minor),
        file_mode: Some(0o666),
        permissions: Some("rwm".into()),
        ..DeviceNode::default()
    }
}

/// A read-only bind mount from below the driver's root to its usual place.
fn bind(driver_root: &str, path: &str) -> Mount {
    Mount {
        host_path: format!("{driver_root}{path}"),
        container_path: path.into(),
        options: ["ro", "nosuid", "nodev", "rbind", "rprivate"].map(Into::into).into(),
        mount_type: None,
    }
}

/// What every container with any GPU needs.
fn common() -> ContainerEdits {
    ContainerEdits {
        env: vec!["NVIDIA_VISIBLE_DEVICES=void".into()],
        device_nodes: vec![node("/dev/nvidiactl", 195, 255), node("/dev/nvidia-uvm", 511, 0)],
        hooks: vec![Hook {
            hook_name: HookName::CreateContainer,
            path: "/usr/bin/nvidia-cdi-hook".into(),
            args: ["nvidia-cdi-hook", "update-ldcache", "--folder", "/usr/lib/x86_64-linux-gnu"].map(Into::into).into(),
            env: vec!["NVIDIA_CTK_DEBUG=false".into()],
            timeout: None,
        }],
        mounts: vec![
            bind("/run/nvidia/driver", "/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05"),
            bind("/run/nvidia/driver", "/usr/bin/nvidia-smi"),
        ],
        ..ContainerEdits::default()
    }
}

/// A whole GPU, with its DRM nodes, whose group is `video`.
pub(crate) fn gpu() -> Spec {
    let render = DeviceNode { gid: Some(44), file_mode: Some(0o660), ..node("/dev/dri/renderD128", 226, 128) };
    Spec {
        devices: vec![Device {
            name: format!("{GPU_CLAIM}-gpu-3b-00-0"),
            container_edits: ContainerEdits {
                device_nodes: vec![node("/dev/nvidia1", 195, 1), render],
                additional_gids: vec![44],
                ..ContainerEdits::default()
            },
            ..Device::default()
        }],
        container_edits: common(),
        ..Spec::new(kind())
    }
}

/// A MIG device: its parent's node and the two capabilities that open it, all below a driver root on the host.
pub(crate) fn mig() -> Spec {
    let host = |node: DeviceNode| DeviceNode { host_path: Some(format!("/run/nvidia/driver{}", node.path)), ..node };
    Spec {
        devices: vec![Device {
            name: format!("{MIG_CLAIM}-gpu-3b-00-0-mig-1g10gb-4"),
            container_edits: ContainerEdits {
                device_nodes: vec![
                    host(node("/dev/nvidia1", 195, 1)),
                    host(DeviceNode {
                        permissions: Some("r".into()),
                        ..node("/dev/nvidia-caps/nvidia-cap66", 508, 66)
                    }),
                    host(DeviceNode {
                        permissions: Some("r".into()),
                        ..node("/dev/nvidia-caps/nvidia-cap67", 508, 67)
                    }),
                ],
                ..ContainerEdits::default()
            },
            ..Device::default()
        }],
        container_edits: common(),
        ..Spec::new(kind())
    }
}
