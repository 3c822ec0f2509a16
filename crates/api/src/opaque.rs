//! Opaque device configurations: what a claim or a DeviceClass may say to the driver about its devices.
//!
//! Group, kinds and fields are those of the driver that kerf replaces (`resource.nvidia.com/v1beta1`), so that its
//! manifests work unchanged. Decoding is strict: a field that nobody knows is a mistake of the writer and is refused.

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::{Deserialize, Serialize};
use serde_json::Value;

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
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpuConfig {
    /// How the containers that use the GPU share it. Absent: no setting is touched.
    #[serde(default, deserialize_with = "strict::object", skip_serializing_if = "Option::is_none")]
    pub sharing: Option<GpuSharing>,
}

/// Configuration of MIG devices.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MigDeviceConfig {
    /// How the containers that use the device share it. Absent: no setting is touched.
    #[serde(default, deserialize_with = "strict::object", skip_serializing_if = "Option::is_none")]
    pub sharing: Option<MigDeviceSharing>,
}

/// How a whole GPU is shared.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpuSharing {
    /// By which means.
    #[serde(deserialize_with = "strict::word")]
    pub strategy: SharingStrategy,
    /// Settings of [`SharingStrategy::TimeSlicing`].
    #[serde(default, deserialize_with = "strict::object", skip_serializing_if = "Option::is_none")]
    pub time_slicing_config: Option<TimeSlicingConfig>,
    /// Settings of [`SharingStrategy::Mps`].
    #[serde(default, deserialize_with = "strict::object", skip_serializing_if = "Option::is_none")]
    pub mps_config: Option<MpsConfig>,
}

/// How a MIG device is shared. Time slices cannot be set for MIG devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MigDeviceSharing {
    /// By which means. Time slicing is accepted and changes nothing.
    #[serde(deserialize_with = "strict::word")]
    pub strategy: SharingStrategy,
    /// Settings of [`SharingStrategy::Mps`].
    #[serde(default, deserialize_with = "strict::object", skip_serializing_if = "Option::is_none")]
    pub mps_config: Option<MpsConfig>,
}

/// The means of sharing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SharingStrategy {
    /// The GPU runs one client at a time, in turns.
    TimeSlicing,
    /// NVIDIA's Multi-Process Service.
    #[serde(rename = "MPS")]
    Mps,
}

/// Time slicing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TimeSlicingConfig {
    /// How long a turn is. Absent: [`TimeSlice::Default`].
    #[serde(default, deserialize_with = "strict::optional_word", skip_serializing_if = "Option::is_none")]
    pub interval: Option<TimeSlice>,
}

/// The length of a turn, in the words of `nvidia-smi compute-policy --set-timeslice`. NVIDIA documents no durations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MpsConfig {
    /// Share of the multiprocessors a client may use, 0 to 100. Absent: not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_active_thread_percentage: Option<u32>,
    /// Memory a client may pin on every device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_pinned_device_memory_limit: Option<Quantity>,
    /// The same for single devices, by UUID or by index into the sorted UUIDs; wins over the former.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub default_per_device_pinned_memory_limit: BTreeMap<String, Quantity>,
    /// Whether clients of different users share one server. Absent: no.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multi_user: Option<bool>,
}

/// Why opaque parameters are no configuration.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Not a JSON object.
    #[error("it is not an object with apiVersion and kind")]
    NotAnObject,
    /// `apiVersion` is missing or another.
    #[error("its apiVersion is {found:?}, known is {API_VERSION:?}")]
    ApiVersion {
        /// What it says; empty when it says nothing.
        found: String,
    },
    /// `kind` is missing or another.
    #[error("its kind is {found:?}, known are \"GpuConfig\" and \"MigDeviceConfig\"")]
    Kind {
        /// What it says; empty when it says nothing.
        found: String,
    },
    /// A field is unknown, missing or of the wrong type.
    #[error("{kind} is malformed: {source}")]
    Field {
        /// The kind that was being read.
        kind: &'static str,
        /// Which field and why.
        source: serde_json::Error,
    },
}

/// Derived decoders also take `["TimeSlicing"]` for an object of which this is the first field, and `{"MPS": null}` for
/// the word. The driver that kerf replaces takes neither.
mod strict {
    use serde::Deserialize;
    use serde::de::{DeserializeOwned, Deserializer, Error, IntoDeserializer};
    use serde_json::{Map, Value};

    pub(super) fn object<'de, D: Deserializer<'de>, T: DeserializeOwned>(from: D) -> Result<Option<T>, D::Error> {
        let fields = Option::<Map<String, Value>>::deserialize(from)?;
        fields.map(|fields| serde_json::from_value(Value::Object(fields))).transpose().map_err(Error::custom)
    }

    pub(super) fn word<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<T, D::Error> {
        T::deserialize(String::deserialize(from)?.into_deserializer())
    }

    pub(super) fn optional_word<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
        from: D,
    ) -> Result<Option<T>, D::Error> {
        let word = Option::<String>::deserialize(from)?;
        word.map(|word| T::deserialize(word.into_deserializer())).transpose()
    }
}

impl DeviceConfig {
    /// Reads opaque parameters strictly.
    pub fn decode(parameters: &Value) -> Result<DeviceConfig, DecodeError> {
        let Value::Object(fields) = parameters else { return Err(DecodeError::NotAnObject) };
        let mut fields = fields.clone();
        let mut header = |name| match fields.remove(name) {
            Some(Value::String(text)) => text,
            Some(other) => other.to_string(),
            None => String::new(),
        };
        let (api_version, kind) = (header("apiVersion"), header("kind"));
        if api_version != API_VERSION {
            return Err(DecodeError::ApiVersion { found: api_version });
        }
        let body = Value::Object(fields);
        match kind.as_str() {
            "GpuConfig" => serde_json::from_value(body)
                .map(DeviceConfig::Gpu)
                .map_err(|source| DecodeError::Field { kind: "GpuConfig", source }),
            "MigDeviceConfig" => serde_json::from_value(body)
                .map(DeviceConfig::Mig)
                .map_err(|source| DecodeError::Field { kind: "MigDeviceConfig", source }),
            _ => Err(DecodeError::Kind { found: kind }),
        }
    }

    /// The configuration's kind.
    pub fn kind(&self) -> &'static str {
        match self {
            DeviceConfig::Gpu(_) => "GpuConfig",
            DeviceConfig::Mig(_) => "MigDeviceConfig",
        }
    }
}

impl fmt::Display for SharingStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SharingStrategy::TimeSlicing => "TimeSlicing",
            SharingStrategy::Mps => "MPS",
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_full_configuration_is_read() {
        let config = DeviceConfig::decode(&json!({
            "apiVersion": "resource.nvidia.com/v1beta1",
            "kind": "GpuConfig",
            "sharing": {
                "strategy": "MPS",
                "mpsConfig": {
                    "defaultActiveThreadPercentage": 50,
                    "defaultPinnedDeviceMemoryLimit": "10Gi",
                    "defaultPerDevicePinnedMemoryLimit": {"0": "5Gi"},
                    "multiUser": true,
                },
            },
        }));
        let Ok(DeviceConfig::Gpu(GpuConfig { sharing: Some(sharing) })) = config else { panic!("{config:?}") };
        assert_eq!(sharing.strategy, SharingStrategy::Mps);
        let mps = sharing.mps_config.unwrap();
        assert_eq!(mps.default_active_thread_percentage, Some(50));
        assert_eq!(mps.default_per_device_pinned_memory_limit["0"], Quantity("5Gi".into()));
    }

    #[test]
    fn mistakes_are_named() {
        let cases = [
            (json!("text"), "it is not an object with apiVersion and kind"),
            (json!({"kind": "GpuConfig"}), r#"its apiVersion is "", known is "resource.nvidia.com/v1beta1""#),
            (
                json!({"apiVersion": "resource.nvidia.com/v1", "kind": "GpuConfig"}),
                r#"its apiVersion is "resource.nvidia.com/v1", known is "resource.nvidia.com/v1beta1""#,
            ),
            (
                json!({"apiVersion": API_VERSION, "kind": "VfioDeviceConfig"}),
                r#"its kind is "VfioDeviceConfig", known are "GpuConfig" and "MigDeviceConfig""#,
            ),
            (
                json!({"apiVersion": API_VERSION, "kind": "GpuConfig", "sharin": {}}),
                "GpuConfig is malformed: unknown field `sharin`, expected `sharing`",
            ),
            (
                json!({"apiVersion": API_VERSION, "kind": "GpuConfig", "sharing": {}}),
                "GpuConfig is malformed: missing field `strategy`",
            ),
            (
                json!({"apiVersion": API_VERSION, "kind": "GpuConfig", "sharing": {"strategy": "Magic"}}),
                "GpuConfig is malformed: unknown variant `Magic`, expected `TimeSlicing` or `MPS`",
            ),
            (
                json!({"apiVersion": API_VERSION, "kind": "MigDeviceConfig",
                       "sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}}),
                "MigDeviceConfig is malformed: unknown field `timeSlicingConfig`, expected `strategy` or `mpsConfig`",
            ),
            (
                json!({"apiVersion": API_VERSION, "kind": "GpuConfig", "sharing": ["TimeSlicing"]}),
                "GpuConfig is malformed: invalid type: sequence, expected a map",
            ),
            (
                json!({"apiVersion": API_VERSION, "kind": "GpuConfig", "sharing": {"strategy": {"MPS": null}}}),
                "GpuConfig is malformed: invalid type: map, expected a string",
            ),
        ];
        for (parameters, message) in cases {
            let error = DeviceConfig::decode(&parameters).unwrap_err();
            assert_eq!(error.to_string(), message, "{parameters}");
        }
    }
}
