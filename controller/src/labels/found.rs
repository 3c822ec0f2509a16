//! What is on a Node, who put it there, and what of the wanted labels may be applied. Pure.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kerf_api::names;

use super::Labels;

/// The labels of a Node under `nvidia.com/`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Whoever put them there.
    pub labels: Labels,
    /// The keys that the controller has applied and nobody has changed since.
    pub owned: BTreeSet<String>,
    /// Those of them that somebody else holds as well, with the same value.
    pub shared: BTreeSet<String>,
}

impl Found {
    /// What the metadata of a Node says.
    pub fn of(metadata: &ObjectMeta) -> Found {
        let ours = |key: &str| key.starts_with(names::NODE_LABEL_PREFIX);
        let labels: BTreeMap<_, _> = metadata.labels.iter().flatten().filter(|(key, _)| ours(key)).collect();
        let (mut owned, mut others) = (BTreeSet::new(), BTreeSet::new());
        for entry in metadata.managed_fields.iter().flatten() {
            let is_ours =
                entry.manager.as_deref() == Some(names::NODE_LABELS) && entry.operation.as_deref() == Some("Apply");
            let fields = entry.fields_v1.as_ref().and_then(|fields| fields.0["f:metadata"]["f:labels"].as_object());
            let keys = fields.into_iter().flat_map(|fields| fields.keys()).filter_map(|field| field.strip_prefix("f:"));
            let held = if is_ours { &mut owned } else { &mut others };
            held.extend(keys.filter(|key| ours(key)).map(str::to_owned));
        }
        Found {
            shared: owned.intersection(&others).cloned().collect(),
            owned,
            labels: labels.into_iter().map(|(key, value)| (key.clone(), value.clone())).collect(),
        }
    }
}

/// What has to be applied so that a Node has the `wanted` labels, but for the keys that others hold. `None`: nothing.
///
/// What is applied replaces what was applied before: a key that is left out and that nobody else owns vanishes. One that another
/// owns as well is left to him when it has to change: the API server would refuse all labels for the sake of this one.
pub fn apply(wanted: &Labels, found: &Found) -> Option<Labels> {
    let free = |key: &String, value: &String| match found.labels.get(key) {
        None => true,
        Some(there) => found.owned.contains(key) && (there == value || !found.shared.contains(key)),
    };
    let apply = wanted.iter().filter(|(key, value)| free(key, value));
    let apply: Labels = apply.map(|(key, value)| (key.clone(), value.clone())).collect();
    let there = apply.iter().all(|(key, value)| found.labels.get(key) == Some(value));
    let settled = there && apply.keys().eq(&found.owned);
    (!settled).then_some(apply)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| (format!("nvidia.com/{key}"), value.to_string())).collect()
    }

    fn node(labels: &Value, managers: &Value) -> Found {
        Found::of(&serde_json::from_value(json!({"name": "n", "labels": labels, "managedFields": managers})).unwrap())
    }

    fn applied(manager: &str, operation: &str, keys: &[&str]) -> Value {
        let keys: serde_json::Map<_, _> = keys.iter().map(|key| (format!("f:{key}"), json!({}))).collect();
        json!({"manager": manager, "operation": operation, "fieldsV1": {"f:metadata": {"f:labels": keys}}})
    }

    #[test]
    fn what_is_found_is_ours_where_we_applied_it() {
        let found = node(
            &json!({"nvidia.com/gpu.count": "2", "nvidia.com/gpu.product": "X", "kubernetes.io/hostname": "n"}),
            &json!([
                applied(names::NODE_LABELS, "Apply", &["nvidia.com/gpu.count"]),
                applied("nfd-master", "Update", &["nvidia.com/gpu.product"]),
                {"manager": names::NODE_LABELS, "operation": "Apply", "fieldsV1": {"f:spec": {}}},
            ]),
        );
        assert_eq!(found.labels, labels(&[("gpu.count", "2"), ("gpu.product", "X")]));
        assert_eq!(found.owned, ["nvidia.com/gpu.count".to_owned()].into());
        assert_eq!(node(&json!(null), &json!(null)), Found::default());
    }

    #[test]
    fn a_key_of_another_is_left_alone() {
        let wanted = labels(&[("gpu.count", "2"), ("gpu.product", "Y")]);
        let theirs = node(&json!({"nvidia.com/gpu.product": "X"}), &json!([]));
        let first = apply(&wanted, &theirs).unwrap();
        assert_eq!(first, labels(&[("gpu.count", "2")]));
        let ours = json!([applied(names::NODE_LABELS, "Apply", &["nvidia.com/gpu.count"])]);
        let done = node(&json!({"nvidia.com/gpu.product": "X", "nvidia.com/gpu.count": "2"}), &ours);
        assert_eq!(apply(&wanted, &done), None, "and nothing is written again");
        let gone = node(&json!({"nvidia.com/gpu.count": "2"}), &ours);
        assert_eq!(apply(&wanted, &gone), Some(wanted.clone()), "theirs is gone: ours takes its place");
        // Somebody has set our key to another value, and owns it since.
        let overwritten = node(&json!({"nvidia.com/gpu.count": "9", "nvidia.com/gpu.product": "X"}), &json!([]));
        assert_eq!(apply(&wanted, &overwritten), None);
    }

    #[test]
    fn a_key_that_another_holds_as_well_does_not_stop_the_rest() {
        let keys = ["nvidia.com/gpu.count", "nvidia.com/gpu.product"];
        let both = json!([
            applied(names::NODE_LABELS, "Apply", &keys),
            applied("git-ops", "Apply", &["nvidia.com/gpu.product", "unrelated"]),
        ]);
        let found = node(&json!({"nvidia.com/gpu.product": "X", "nvidia.com/gpu.count": "2"}), &both);
        assert_eq!(apply(&labels(&[("gpu.count", "2"), ("gpu.product", "X")]), &found), None, "all agree");
        let changed = labels(&[("gpu.count", "3"), ("gpu.product", "Y")]);
        assert_eq!(apply(&changed, &found), Some(labels(&[("gpu.count", "3")])), "the other's word stays");
    }

    #[test]
    fn what_is_no_longer_wanted_is_withdrawn() {
        let ours = json!([applied(names::NODE_LABELS, "Apply", &["nvidia.com/gpu.count", "nvidia.com/mig.strategy"])]);
        let found = node(&json!({"nvidia.com/gpu.count": "2", "nvidia.com/mig.strategy": "mixed"}), &ours);
        assert_eq!(apply(&labels(&[("gpu.count", "2")]), &found), Some(labels(&[("gpu.count", "2")])));
        assert_eq!(apply(&Labels::new(), &found), Some(Labels::new()));
        assert_eq!(apply(&Labels::new(), &Found::default()), None, "a node that never had any is left alone");
        // Somebody deleted one.
        let wanted = labels(&[("gpu.count", "2"), ("mig.strategy", "mixed")]);
        let left = json!([applied(names::NODE_LABELS, "Apply", &["nvidia.com/gpu.count"])]);
        assert_eq!(apply(&wanted, &node(&json!({"nvidia.com/gpu.count": "2"}), &left)), Some(wanted));
    }
}
