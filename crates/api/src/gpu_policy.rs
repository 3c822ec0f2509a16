//! `GpuPolicy`: what an admin wants GPUs to offer. Written by people, answered by the controller in the status.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::CustomResource;
use schemars::JsonSchema;
use schemars::transform::RecursiveTransform;
use serde::{Deserialize, Serialize};

use crate::ForeignInstances;
use crate::problem::{Problem, element, field, nearest};
use crate::schema::known_formats;

/// Which GPUs offer what. A GPU that no policy matches offers everything it can, as claims need it.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "kerf.dev",
    version = "v1alpha1",
    kind = "GpuPolicy",
    plural = "gpupolicies",
    shortname = "gpol",
    status = "GpuPolicyStatus",
    derive = "PartialEq",
    doc = "What the GPUs of some nodes offer.",
    printcolumn = r#"{"name":"Offer","type":"string","jsonPath":".spec.offer"}"#,
    printcolumn = r#"{"name":"Layout","type":"string","jsonPath":".spec.layout.name"}"#,
    printcolumn = r#"{"name":"Priority","type":"integer","jsonPath":".spec.priority"}"#,
    printcolumn = r#"{"name":"Nodes","type":"integer","jsonPath":".status.nodesMatched"}"#,
    printcolumn = r#"{"name":"Accepted","type":"string","jsonPath":".status.conditions[?(@.type==\"Accepted\")].status"}"#,
    printcolumn = r#"{"name":"In force","type":"string","jsonPath":".status.conditions[?(@.type==\"InForce\")].status"}"#,
    printcolumn = r#"{"name":"Message","type":"string","jsonPath":".status.conditions[?(@.type==\"InForce\")].message","priority":1}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[schemars(transform = RecursiveTransform(known_formats))]
#[serde(rename_all = "camelCase")]
pub struct GpuPolicySpec {
    /// Of several policies that match one GPU the one with the highest priority is in force; of equal ones the oldest, then the
    /// one whose name comes first. The status of the others says that they are overridden.
    #[serde(default)]
    pub priority: i32,
    /// The nodes, by their labels. Absent: every node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_selector: Option<LabelSelector>,
    /// The GPUs of these nodes. Absent: all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpus: Option<GpuSelector>,
    /// What these GPUs offer.
    pub offer: PolicyOffer,
    /// With `offer: Dynamic`: the MIG profiles that are offered, by the names that nvidia-smi gives them, such as `1g.10gb` or
    /// `1g.10gb+me`. Absent: every profile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profiles: Option<Vec<String>>,
    /// With `offer: Dynamic`: whether whole GPUs are offered beside partitions. Absent: they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<bool>,
    /// With `offer: Layout`: which one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<LayoutChoice>,
    /// What becomes of GPU instances that no claim explains. Absent: what the nodes' plugins were started with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub foreign_instances: Option<ForeignInstances>,
}

/// Selects GPUs of a node. What is given must all match, and each list matches by any of its entries.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuSelector {
    /// Product names as the GpuNode has them, such as `NVIDIA H100 80GB HBM3`; `*` stands for any characters.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub products: Vec<String>,
    /// Positions on the node, from 0, as `nvidia-smi -L` numbers them: by PCI address.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub indices: Vec<u32>,
    /// UUIDs, `GPU-...`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub uuids: Vec<String>,
    /// Names as the GpuNode has them, such as `gpu-3b-00-0`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
}

/// What GPUs offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PolicyOffer {
    /// Whatever claims ask for is carved: whole GPUs, and partitions of the allowed profiles.
    Dynamic,
    /// The partitions of a layout and nothing else.
    Layout,
    /// Whole GPUs only.
    WholeOnly,
    /// Nothing. Claims that hold something keep it.
    // Not `Off`: unquoted, kubectl reads that as YAML 1.1 has it, which is false.
    Nothing,
}

/// A layout: by its name in the cluster's layout file, or spelled out. Exactly one of the two.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct LayoutChoice {
    /// Name of a configuration in the layout file, which has the form of NVIDIA's mig-parted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Partitions of each matched GPU: how many of which profile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig_devices: Option<BTreeMap<String, u32>>,
}

/// What the controller makes of a policy. Written on change only.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = RecursiveTransform(known_formats))]
#[serde(rename_all = "camelCase", default)]
pub struct GpuPolicyStatus {
    /// The generation of the spec that this speaks of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Accepted`: whether the policy can be followed. `InForce`: whether it is, on every GPU that it decides.
    pub conditions: Vec<Condition>,
    /// How many nodes have a GPU that the policy matches.
    pub nodes_matched: u32,
    /// These nodes, those first on which something waits; a hundred at most.
    pub nodes: Vec<PolicyNode>,
}

/// What a policy comes to on one node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PolicyNode {
    /// The node's name.
    pub name: String,
    /// Its GPUs that the policy matches.
    pub gpus: PolicyGpus,
}

/// GPUs of a node, by what the policy comes to on them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PolicyGpus {
    /// On how many it is in force.
    pub in_force: u32,
    /// On which it is not yet, or cannot be; sixteen at most.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub waiting: Vec<WaitingGpu>,
    /// On which another policy is; sixteen at most.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub overridden: Vec<OverriddenGpu>,
}

/// A GPU that does not offer yet what the policy says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct WaitingGpu {
    /// Its name.
    pub gpu: String,
    /// One CamelCase word for programs: `InUse`, `ResetNeeded`, `DoesNotFit`, ...
    pub reason: String,
    /// One sentence for a person: what is waited for, and what to do.
    pub message: String,
}

/// A GPU that another policy decides.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct OverriddenGpu {
    /// Its name.
    pub gpu: String,
    /// Name of the policy that is in force there.
    pub by: String,
}

impl GpuPolicySpec {
    /// Everything that is wrong with it as it stands, whatever the cluster has; paths begin with `spec`.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = self.selector_problems();
        let dynamic = self.offer == PolicyOffer::Dynamic;
        if self.profiles.is_some() && !dynamic {
            problems.push(only_with("profiles", "Dynamic"));
        }
        if self.whole.is_some() && !dynamic {
            problems.push(only_with("whole", "Dynamic"));
        }
        if let Some(profiles) = &self.profiles {
            if profiles.is_empty() {
                let problem = Problem::new("spec.profiles", "no profile is allowed");
                problems.push(problem.hint("leave it out to allow every one, or use offer: WholeOnly"));
            }
            let named = profiles.iter().enumerate();
            problems.extend(named.filter_map(|(index, name)| profile(&element("spec.profiles", index), name)));
        }
        match (self.offer, &self.layout) {
            (PolicyOffer::Layout, None) => {
                let problem = Problem::new("spec.layout", "offer: Layout needs one");
                problems.push(problem.hint("give layout.name or layout.migDevices"));
            }
            (PolicyOffer::Layout, Some(layout)) => problems.extend(layout.problems()),
            (_, Some(_)) => problems.push(only_with("layout", "Layout")),
            (_, None) => {}
        }
        problems
    }

    /// What is wrong with what the policy matches: one with such a problem matches nothing.
    pub fn selector_problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let expressions = self.node_selector.iter().flat_map(|selector| selector.match_expressions.iter().flatten());
        for (index, expression) in expressions.enumerate() {
            let path = element("spec.nodeSelector.matchExpressions", index);
            let values = expression.values.as_ref().is_some_and(|values| !values.is_empty());
            if expression.key.is_empty() {
                problems.push(Problem::new(field(&path, "key"), "it is empty").hint("give the key of a node label"));
            }
            match expression.operator.as_str() {
                "In" | "NotIn" if !values => {
                    let message = format!("operator {} needs values", expression.operator);
                    problems.push(Problem::new(field(&path, "values"), message));
                }
                "Exists" | "DoesNotExist" if values => {
                    let message = format!("operator {} takes no values", expression.operator);
                    problems.push(Problem::new(field(&path, "values"), message).hint("use In, or leave them out"));
                }
                "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
                other => {
                    let known = ["In", "NotIn", "Exists", "DoesNotExist"];
                    let meant = nearest(other, known).map(|word| format!("did you mean {word}?"));
                    let hint = meant.unwrap_or_else(|| format!("use {}", known.join(", ")));
                    problems.push(Problem::new(field(&path, "operator"), format!("{other:?} is not known")).hint(hint));
                }
            }
        }
        for (name, list, prefix) in self.gpus.iter().flat_map(GpuSelector::texts) {
            for (index, text) in
                list.iter().enumerate().filter(|(_, text)| !text.starts_with(prefix) || text.is_empty())
            {
                let path = element(&field("spec.gpus", name), index);
                let problem = match (name, prefix) {
                    ("products", _) => Problem::new(path, "it is empty").hint("\"*\" is every product"),
                    (_, prefix) => Problem::new(path, format!("{text:?} does not begin with {prefix}"))
                        .hint("kubectl get gpunode NODE -o yaml shows what there is"),
                };
                problems.push(problem);
            }
        }
        problems
    }
}

impl GpuSelector {
    /// The lists of texts with their names, and what each text begins with.
    fn texts(&self) -> [(&'static str, &[String], &'static str); 3] {
        [("products", &self.products, ""), ("uuids", &self.uuids, "GPU-"), ("names", &self.names, "gpu-")]
    }
}

impl LayoutChoice {
    fn problems(&self) -> Vec<Problem> {
        match (&self.name, &self.mig_devices) {
            (Some(name), None) if name.is_empty() => {
                vec![Problem::new("spec.layout.name", "it is empty").hint("give a name of the layout file")]
            }
            (Some(_), None) => Vec::new(),
            (None, Some(devices)) => mig_device_problems(devices),
            (Some(_), Some(_)) => {
                vec![Problem::new("spec.layout", "it has both a name and migDevices").hint("give one of the two")]
            }
            (None, None) => {
                vec![Problem::new("spec.layout", "it has neither a name nor migDevices").hint("give one of the two")]
            }
        }
    }
}

fn mig_device_problems(devices: &BTreeMap<String, u32>) -> Vec<Problem> {
    let path = "spec.layout.migDevices";
    if devices.values().all(|count| *count == 0) {
        return vec![Problem::new(path, "it has no partition").hint("use offer: WholeOnly or offer: Nothing")];
    }
    devices.keys().filter_map(|name| profile(&field(path, name), name)).collect()
}

/// What is wrong with the name of a profile. Whether a GPU has it is another question.
fn profile(path: &str, name: &str) -> Option<Problem> {
    let like = "a profile has a name such as 1g.10gb or 1g.10gb+me, as nvidia-smi mig -lgip prints them";
    if is_profile(name) {
        return None;
    }
    let compute_instance = name.split_once("c.").is_some_and(|(slices, rest)| is_number(slices) && is_profile(rest));
    Some(if compute_instance {
        Problem::new(path, format!("{name:?} names a compute instance; kerf makes one that spans its GPU instance"))
            .hint(format!("use {:?}", name.split_once("c.").map_or(name, |(_, rest)| rest)))
    } else {
        Problem::new(path, format!("{name:?} is no MIG profile")).hint(like)
    })
}

/// `<digits>g.<digits>gb`, and perhaps attributes (`+me`, `+me.all`, `-me`, `+gfx`).
fn is_profile(name: &str) -> bool {
    let (base, attributes) = name.find(['+', '-']).map_or((name, ""), |at| name.split_at(at));
    let sizes = base.split_once("g.").and_then(|(slices, rest)| Some((slices, rest.strip_suffix("gb")?)));
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"+-.,".contains(&b);
    sizes.is_some_and(|(slices, memory)| is_number(slices) && is_number(memory))
        && attributes.len() != 1
        && attributes.bytes().all(plain)
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

fn only_with(name: &str, offer: &str) -> Problem {
    Problem::new(field("spec", name), format!("it has a meaning with offer: {offer} only")).hint("leave it out")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn problems(spec: Value) -> Vec<String> {
        let spec: GpuPolicySpec = serde_json::from_value(spec).unwrap();
        spec.problems().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_the_documentation_shows_is_fine() {
        for spec in [
            json!({"offer": "Dynamic"}),
            json!({"offer": "Dynamic", "profiles": ["1g.10gb", "1g.24gb-me", "1g.24gb+me.all"], "whole": false}),
            json!({"offer": "Layout", "layout": {"name": "mixed"}, "foreignInstances": "Adopt"}),
            json!({"offer": "Layout", "layout": {"migDevices": {"3g.40gb": 2, "1g.10gb": 0}}, "priority": -3}),
            json!({"offer": "Nothing", "gpus": {}}),
            json!({"offer": "WholeOnly", "nodeSelector": {"matchLabels": {"a": "b"}, "matchExpressions": [
                    {"key": "a", "operator": "NotIn", "values": ["c"]}, {"key": "d", "operator": "Exists"}]},
                "gpus": {"products": ["NVIDIA A100*"], "indices": [0], "uuids": ["GPU-1"], "names": ["gpu-3b-00-0"]}}),
        ] {
            assert_eq!(problems(spec.clone()), [""; 0], "{spec}");
        }
    }

    #[test]
    fn each_mistake_has_a_path_and_a_hint() {
        let expression = |expression: Value| json!({"offer": "Nothing", "nodeSelector": {"matchExpressions": [{"key": "a", "operator": "Exists"}, expression]}});
        let cases = [
            (
                json!({"offer": "Nothing", "profiles": ["1g.10gb"]}),
                "spec.profiles: it has a meaning with offer: Dynamic only; leave it out",
            ),
            (
                json!({"offer": "Layout", "layout": {"name": "x"}, "whole": true}),
                "spec.whole: it has a meaning with offer: Dynamic only; leave it out",
            ),
            (
                json!({"offer": "Dynamic", "layout": {"name": "x"}}),
                "spec.layout: it has a meaning with offer: Layout only; leave it out",
            ),
            (
                json!({"offer": "Dynamic", "profiles": []}),
                "spec.profiles: no profile is allowed; leave it out to allow every one, or use offer: WholeOnly",
            ),
            (
                json!({"offer": "Dynamic", "profiles": ["1g.10gb", "mig-1g.10gb"]}),
                "spec.profiles[1]: \"mig-1g.10gb\" is no MIG profile; a profile has a name such as 1g.10gb or 1g.10gb+me, as nvidia-smi mig -lgip prints them",
            ),
            (json!({"offer": "Layout"}), "spec.layout: offer: Layout needs one; give layout.name or layout.migDevices"),
            (
                json!({"offer": "Layout", "layout": {}}),
                "spec.layout: it has neither a name nor migDevices; give one of the two",
            ),
            (
                json!({"offer": "Layout", "layout": {"name": "x", "migDevices": {}}}),
                "spec.layout: it has both a name and migDevices; give one of the two",
            ),
            (
                json!({"offer": "Layout", "layout": {"name": ""}}),
                "spec.layout.name: it is empty; give a name of the layout file",
            ),
            (
                json!({"offer": "Layout", "layout": {"migDevices": {"1g.10gb": 0}}}),
                "spec.layout.migDevices: it has no partition; use offer: WholeOnly or offer: Nothing",
            ),
            (
                json!({"offer": "Layout", "layout": {"migDevices": {"1c.2g.20gb": 1}}}),
                "spec.layout.migDevices[\"1c.2g.20gb\"]: \"1c.2g.20gb\" names a compute instance; kerf makes one that spans its GPU instance; use \"2g.20gb\"",
            ),
            (
                json!({"offer": "Nothing", "gpus": {"products": [""]}}),
                "spec.gpus.products[0]: it is empty; \"*\" is every product",
            ),
            (
                json!({"offer": "Nothing", "gpus": {"uuids": ["GPU-1", "MIG-2"]}}),
                "spec.gpus.uuids[1]: \"MIG-2\" does not begin with GPU-; kubectl get gpunode NODE -o yaml shows what there is",
            ),
            (
                json!({"offer": "Nothing", "gpus": {"names": ["3b:00.0"]}}),
                "spec.gpus.names[0]: \"3b:00.0\" does not begin with gpu-; kubectl get gpunode NODE -o yaml shows what there is",
            ),
            (
                expression(json!({"key": "a", "operator": "Exist"})),
                "spec.nodeSelector.matchExpressions[1].operator: \"Exist\" is not known; did you mean Exists?",
            ),
            (
                expression(json!({"key": "a", "operator": ">"})),
                "spec.nodeSelector.matchExpressions[1].operator: \">\" is not known; use In, NotIn, Exists, DoesNotExist",
            ),
            (
                expression(json!({"key": "a", "operator": "In"})),
                "spec.nodeSelector.matchExpressions[1].values: operator In needs values",
            ),
            (
                expression(json!({"key": "a", "operator": "Exists", "values": ["b"]})),
                "spec.nodeSelector.matchExpressions[1].values: operator Exists takes no values; use In, or leave them out",
            ),
            (
                expression(json!({"key": "", "operator": "Exists"})),
                "spec.nodeSelector.matchExpressions[1].key: it is empty; give the key of a node label",
            ),
        ];
        for (spec, problem) in cases {
            assert_eq!(problems(spec.clone()), [problem], "{spec}");
        }
    }

    #[test]
    fn all_mistakes_are_told_at_once() {
        let spec =
            json!({"offer": "Nothing", "profiles": [], "whole": true, "layout": {}, "gpus": {"uuids": ["", "x"]}});
        assert_eq!(problems(spec).len(), 6);
    }

    #[test]
    fn names_of_profiles() {
        for good in ["1g.5gb", "7g.80gb", "1g.10gb+me", "1g.24gb+me.all", "2g.48gb-me", "1g.24gb+gfx", "1g.0gb"] {
            assert!(is_profile(good), "{good}");
        }
        for bad in ["", "1g", "1g.gb", "g.5gb", "1g.5gb+", "1g.5GB", "1c.1g.5gb", "1g.5gb+ME", "1g.5gb me"] {
            assert!(!is_profile(bad), "{bad}");
        }
    }
}
