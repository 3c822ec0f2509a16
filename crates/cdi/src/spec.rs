//! The contents of a CDI document as types. Names and meanings are those of the CDI specification 1.1.0.
//!
//! Architecture invariant: `intelRdt` and `netDevices` are left out; a GPU driver has no use for them, and a type that
//! cannot express them cannot ask for the newer runtimes that they need.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use crate::Kind;

/// Devices of one kind, and what a container needs to use them.
///
/// The `cdiVersion` of the document is no field: it follows from the others, see [`Spec::required_version`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spec {
    /// Vendor and class of the devices.
    pub kind: Kind,
    /// Free data with Kubernetes label keys. Runtimes ignore it.
    pub annotations: BTreeMap<String, String>,
    /// At least one device, each name once.
    pub devices: Vec<Device>,
    /// Applied once to a container that gets any of the devices.
    pub container_edits: ContainerEdits,
}

impl Spec {
    /// A spec without devices yet.
    pub fn new(kind: Kind) -> Self {
        Self { kind, annotations: BTreeMap::new(), devices: Vec::new(), container_edits: ContainerEdits::default() }
    }
}

/// One device that containers can ask for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// Name within the kind: letters, digits, `_`, `-`, `.`, `:`, with a letter or digit at both ends.
    pub name: String,
    /// Free data with Kubernetes label keys. Runtimes ignore it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Applied to a container that gets this device. Not empty.
    pub container_edits: ContainerEdits,
}

/// Changes of a container's configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerEdits {
    /// Environment variables as `NAME=value`. They replace those of the same name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes to make, and to open to the container.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Programs to run at points of the container's life.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    /// Files and directories of the host to show. They replace mounts at the same place.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Groups that the container's process joins. Runtimes skip 0.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub additional_gids: Vec<u32>,
}

impl ContainerEdits {
    /// Whether nothing is changed.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A device node inside the container.
///
/// What is left out is taken by the runtime from the node on the host when the container is created.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceNode {
    /// Absolute path in the container.
    pub path: String,
    /// Absolute path on the host, when it differs from `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// Type of the node.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub device_type: Option<DeviceType>,
    /// Major device number; given together with `minor` or not at all. Runtimes take 0 as not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub major: Option<u32>,
    /// Minor device number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// Permission bits of the node, at most `0o777`; no type bits as in `st_mode`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// What the container's device cgroup permits: some of the letters `rwm` (read, write, mknod), or `none`. Runtimes
    /// permit `rwm` when it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<String>,
    /// Owner of the node; when left out, the user of the container's process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Group of the node; when left out, the group of the container's process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

/// Type of a device node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceType {
    /// A block device.
    #[serde(rename = "b")]
    Block,
    /// A character device.
    #[serde(rename = "c")]
    Character,
    /// An unbuffered character device, as `mknod` calls it.
    #[serde(rename = "u")]
    Unbuffered,
    /// A named pipe.
    #[serde(rename = "p")]
    Fifo,
}

/// A mount.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    /// Absolute path on the host.
    pub host_path: String,
    /// Absolute path in the container.
    pub container_path: String,
    /// Mount options, as the OCI runtime specification names them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// File system type. A bind mount needs none: the option `bind` or `rbind` says it.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub mount_type: Option<String>,
}

/// A program that the runtime runs at a point of the container's life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Hook {
    /// When to run it.
    pub hook_name: HookName,
    /// Absolute path of the program on the host, or in the container for `startContainer`.
    pub path: String,
    /// Arguments, beginning with the program's own name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Environment as `NAME=value`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// After how many seconds the runtime gives up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<NonZeroU32>,
}

/// Points of a container's life, as in the OCI runtime specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum HookName {
    /// Old name of the time of [`CreateRuntime`](Self::CreateRuntime).
    Prestart,
    /// The namespaces exist, the root is not yet changed; runs in the runtime's namespaces.
    CreateRuntime,
    /// The same moment; runs in the container's namespaces with the host's root.
    CreateContainer,
    /// Just before the process starts; runs in the container.
    StartContainer,
    /// The process has started.
    Poststart,
    /// The container is deleted.
    Poststop,
}
