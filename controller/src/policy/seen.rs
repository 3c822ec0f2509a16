//! A GpuPolicy as the watch shows it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kerf_api::{GpuPolicySpec, GpuPolicyStatus, Problem};
use kube::core::{DynamicObject, Selector};
use serde::Deserialize as _;

/// A GpuPolicy. Read from an object of unknown form: one that a newer version wrote, and that this one does not understand, shall
/// not hide the others.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Object name.
    pub name: String,
    /// Object UID.
    pub uid: String,
    /// Changes with the spec.
    pub generation: Option<i64>,
    /// When it was made.
    pub created: Option<Time>,
    /// What it says.
    pub spec: Result<GpuPolicySpec, String>,
    /// The nodes that it selects; `None`: what is wrong with the policy leaves that open, so it selects nothing.
    pub nodes: Option<Selector>,
    /// What was last reported of it.
    pub status: GpuPolicyStatus,
}

impl Policy {
    /// What is wrong with it, whatever the cluster has.
    pub fn problems(&self) -> Vec<Problem> {
        match &self.spec {
            Ok(spec) => spec.problems(),
            Err(why) => vec![Problem::new("spec", why.as_str())],
        }
    }

    /// Whether it says the same as `other`, whatever was reported.
    pub fn says_the_same(&self, other: &Policy) -> bool {
        (&self.uid, &self.spec, &self.created) == (&other.uid, &other.spec, &other.created)
    }
}

impl From<DynamicObject> for Policy {
    fn from(object: DynamicObject) -> Policy {
        let DynamicObject { metadata, data, .. } = object;
        let spec = GpuPolicySpec::deserialize(&data["spec"]).map_err(|error| error.to_string());
        let sound = spec.as_ref().ok().filter(|spec| spec.selector_problems().is_empty());
        Policy {
            name: metadata.name.unwrap_or_default(),
            uid: metadata.uid.unwrap_or_default(),
            generation: metadata.generation,
            created: metadata.creation_timestamp,
            nodes: sound.and_then(|spec| spec.node_selector.clone().unwrap_or_default().try_into().ok()),
            // Another version's report is replaced, whatever it is.
            status: GpuPolicyStatus::deserialize(&data["status"]).unwrap_or_default(),
            spec,
        }
    }
}
