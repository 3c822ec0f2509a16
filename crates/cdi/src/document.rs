//! A spec as JSON, with its version. The same spec always gives the same bytes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{ContainerEdits, Device, Invalid, Kind, Problem, Spec, Version};

/// A document that is no valid spec.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Not JSON, or other fields or values than a spec of ours has. The message names line and column.
    #[error("not a CDI spec as this program writes it: {0}")]
    Json(#[from] serde_json::Error),
    /// A spec that breaks a rule.
    #[error(transparent)]
    Invalid(#[from] Invalid),
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Encoded<'a> {
    cdi_version: Version,
    kind: &'a Kind,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: &'a BTreeMap<String, String>,
    devices: &'a [Device],
    #[serde(skip_serializing_if = "ContainerEdits::is_empty")]
    container_edits: &'a ContainerEdits,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Decoded {
    cdi_version: Version,
    kind: Kind,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    devices: Vec<Device>,
    #[serde(default)]
    container_edits: ContainerEdits,
}

impl Spec {
    /// The spec as a JSON document of the lowest version possible.
    ///
    /// # Errors
    ///
    /// When a rule is broken: an invalid spec is never written.
    pub fn to_json(&self) -> Result<Vec<u8>, Invalid> {
        self.validate()?;
        let document = Encoded {
            cdi_version: self.required_version(),
            kind: &self.kind,
            annotations: &self.annotations,
            devices: &self.devices,
            container_edits: &self.container_edits,
        };
        let mut json = serde_json::to_vec_pretty(&document).expect("strings, numbers and string keys always encode");
        json.push(b'\n');
        Ok(json)
    }

    /// Reads a spec from JSON. Unknown fields are errors, as runtimes hold it.
    ///
    /// # Errors
    ///
    /// When the document says what [`to_json`](Self::to_json) could not have said, but for a version higher than
    /// necessary. How it says it is not looked at: layout, nulls and empty lists, an array of an object's fields.
    pub fn from_json(json: &[u8]) -> Result<Self, DecodeError> {
        let Decoded { cdi_version: declared, kind, annotations, devices, container_edits } =
            serde_json::from_slice(json)?;
        let spec = Self { kind, annotations, devices, container_edits };
        spec.validate()?;
        let required = spec.required_version();
        if declared < required {
            let problem = Problem::VersionTooLow { declared, required };
            return Err(Invalid { at: "cdiVersion".to_owned(), problem }.into());
        }
        Ok(spec)
    }
}
