//! Versions of the CDI specification, and the lowest one that a spec can be written in.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Spec;

/// A released version of the CDI specification that runtimes still load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Version {
    /// The oldest in use.
    #[serde(rename = "0.3.0")]
    V0_3,
    /// Mount types.
    #[serde(rename = "0.4.0")]
    V0_4,
    /// Host paths of device nodes; device names that begin with a digit.
    #[serde(rename = "0.5.0")]
    V0_5,
    /// Annotations; dots in the class.
    #[serde(rename = "0.6.0")]
    V0_6,
    /// Additional groups.
    #[serde(rename = "0.7.0")]
    V0_7,
    /// Nothing that a spec of ours can use.
    #[serde(rename = "0.8.0")]
    V0_8,
    /// Nothing that a spec of ours can use.
    #[serde(rename = "1.0.0")]
    V1_0,
    /// Nothing that a spec of ours can use.
    #[serde(rename = "1.1.0")]
    V1_1,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V0_3 => "0.3.0",
            Self::V0_4 => "0.4.0",
            Self::V0_5 => "0.5.0",
            Self::V0_6 => "0.6.0",
            Self::V0_7 => "0.7.0",
            Self::V0_8 => "0.8.0",
            Self::V1_0 => "1.0.0",
            Self::V1_1 => "1.1.0",
        })
    }
}

impl Spec {
    /// The lowest version that knows all that this spec uses. A runtime refuses a document that declares less, and one
    /// that declares a version it does not know.
    pub fn required_version(&self) -> Version {
        let edits = || self.devices.iter().map(|device| &device.container_edits).chain([&self.container_edits]);
        let annotated = !self.annotations.is_empty() || self.devices.iter().any(|d| !d.annotations.is_empty());

        if edits().any(|e| !e.additional_gids.is_empty()) {
            Version::V0_7
        } else if annotated || self.kind.class().contains('.') {
            Version::V0_6
        } else if self.devices.iter().any(|d| d.name.starts_with(|c: char| c.is_ascii_digit()))
            || edits().flat_map(|e| &e.device_nodes).any(|node| node.host_path.is_some())
        {
            Version::V0_5
        } else if edits().flat_map(|e| &e.mounts).any(|mount| mount.mount_type.is_some()) {
            Version::V0_4
        } else {
            Version::V0_3
        }
    }
}
