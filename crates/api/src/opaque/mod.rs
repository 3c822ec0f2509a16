//! Opaque device configurations: what a claim or a DeviceClass may say to the driver about its devices.
//!
//! Group, kinds and fields are those of the driver that kerf replaces (`resource.nvidia.com/v1beta1`), so that its
//! manifests work unchanged. Reading is strict: a field that nobody knows is a mistake of the writer and is refused.
//!
//! [`problems`] is what a configuration is refused for when it is written, [`DeviceConfig::decode`] and
//! [`DeviceConfig::unsupported`] are its two halves, for a node that has to know what it refuses and why.

mod read;
mod support;

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::Serialize;
use serde_json::Value;

use crate::problem::Problem;

/// API version of the opaque configurations.
pub const API_VERSION: &str = "resource.nvidia.com/v1beta1";

/// A configuration for some devices of a claim.
#[derive(Clone, Debug, PartialEq)]
pub enum DeviceConfig {
    /// For whole GPUs.
    Gpu(GpuConfig),
    /// For MIG devices.
    Mig(MigDeviceConfig),
}

/// Configuration of whole GPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuConfig {
    /// How the containers that use the GPU share it. Absent: no setting is touched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sharing: Option<GpuSharing>,
}

/// Configuration of MIG devices.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MigDeviceConfig {
    /// How the containers that use the device share it. Absent: no setting is touched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sharing: Option<MigDeviceSharing>,
}

/// How a whole GPU is shared.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuSharing {
    /// By which means.
    pub strategy: SharingStrategy,
    /// Settings of [`SharingStrategy::TimeSlicing`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_slicing_config: Option<TimeSlicingConfig>,
    /// Settings of [`SharingStrategy::Mps`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mps_config: Option<MpsConfig>,
}

/// How a MIG device is shared. Time slices cannot be set for MIG devices.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MigDeviceSharing {
    /// By which means. Time slicing is accepted and changes nothing.
    pub strategy: SharingStrategy,
    /// Settings of [`SharingStrategy::Mps`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mps_config: Option<MpsConfig>,
}

/// The means of sharing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum SharingStrategy {
    /// The GPU runs one client at a time, in turns.
    TimeSlicing,
    /// NVIDIA's Multi-Process Service.
    #[serde(rename = "MPS")]
    Mps,
}

/// Time slicing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TimeSlicingConfig {
    /// How long a turn is. Absent: [`TimeSlice::Default`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval: Option<TimeSlice>,
}

/// The length of a turn, in the words of `nvidia-smi compute-policy --set-timeslice`. NVIDIA documents no durations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum TimeSlice {
    /// 0.
    #[default]
    Default,
    /// 1.
    Short,
    /// 2.
    Medium,
    /// 3.
    Long,
}

/// Multi-Process Service.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MpsConfig {
    /// Share of the multiprocessors a client may use, 0 to 100 %. Absent: not set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_active_thread_percentage: Option<u32>,
    /// Memory a client may pin on every device, at least 1 MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_pinned_device_memory_limit: Option<Quantity>,
    /// The same for single devices, by UUID or by index into the sorted UUIDs; wins over the former.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub default_per_device_pinned_memory_limit: BTreeMap<String, Quantity>,
    /// Whether clients of different users share one server. Absent: no.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub multi_user: Option<bool>,
}

/// Everything that opaque parameters at `path` are refused for: what is wrong with them, and what kerf does not do.
pub fn problems(parameters: &Value, path: &str) -> Vec<Problem> {
    let read::Reading { config, mut problems } = read::read(parameters, path);
    problems.extend(config.iter().flat_map(|config| config.unsupported(path)));
    problems
}

impl DeviceConfig {
    /// Reads opaque parameters strictly. `path` is where they are written.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with them, in the order of the document.
    pub fn decode(parameters: &Value, path: &str) -> Result<DeviceConfig, Vec<Problem>> {
        match read::read(parameters, path) {
            read::Reading { config: Some(config), problems } if problems.is_empty() => Ok(config),
            read::Reading { problems, .. } => Err(problems),
        }
    }

    /// What this configuration, written at `path`, asks for and this version of kerf does not do.
    pub fn unsupported(&self, path: &str) -> Vec<Problem> {
        support::unsupported(self, path)
    }

    /// The configuration's kind.
    pub fn kind(&self) -> &'static str {
        match self {
            DeviceConfig::Gpu(_) => "GpuConfig",
            DeviceConfig::Mig(_) => "MigDeviceConfig",
        }
    }
}

impl SharingStrategy {
    const ALL: [SharingStrategy; 2] = [SharingStrategy::TimeSlicing, SharingStrategy::Mps];

    /// Its word in a configuration.
    pub fn name(self) -> &'static str {
        match self {
            SharingStrategy::TimeSlicing => "TimeSlicing",
            SharingStrategy::Mps => "MPS",
        }
    }
}

impl TimeSlice {
    const ALL: [TimeSlice; 4] = [TimeSlice::Default, TimeSlice::Short, TimeSlice::Medium, TimeSlice::Long];

    /// Its word in a configuration.
    pub fn name(self) -> &'static str {
        match self {
            TimeSlice::Default => "Default",
            TimeSlice::Short => "Short",
            TimeSlice::Medium => "Medium",
            TimeSlice::Long => "Long",
        }
    }
}

impl fmt::Display for SharingStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests;
