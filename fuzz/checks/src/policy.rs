//! GpuPolicies and layout files, as admins write them: whatever they say, what is published stays sound.

use std::collections::{BTreeMap, BTreeSet};

use kerf_api::{GpuNode, names};
use kerf_controller::features::{Counters, ServerFeatures};
use kerf_controller::policy::{Forms, LayoutFile, Offering, Policy, Resolution, Rules, resolve};
use kerf_controller::render::render;
use kerf_mig::parted::Layouts;
use serde_json::{Value, json};

use crate::gpu_node::check_sound;

/// Two GPUs with MIG, one of them carved.
const NODE: &str = include_str!("../../corpus/gpu_node/mixed-and-carved.json");

/// A policy that is wrong, as far as it matches, offers nothing; of one that is right nothing is offered but what the GPUs offer
/// by themselves. What is wrong is said in one line each, at a path of the spec.
pub fn gpu_policy(data: &[u8]) {
    let Ok(spec) = serde_json::from_slice::<Value>(data) else { return };
    let object = json!({"metadata": {"name": "policy", "uid": "u"}, "spec": spec});
    let policy = Policy::from(serde_json::from_value::<kube::core::DynamicObject>(object).expect("an object"));
    let problems = policy.problems();
    for problem in &problems {
        assert!(problem.path.starts_with("spec") && !problem.message.is_empty(), "{problem}");
        assert!(!problem.to_string().contains('\n'), "one line: {problem}");
    }
    let rules = Rules { policies: vec![policy], layouts: LayoutFile::Absent, follow_label: true };
    let resolution = published(&rules, &BTreeMap::new());
    if !problems.is_empty() {
        assert!(resolution.terms.values().all(|terms| terms.forms == Forms::Nothing), "{problems:?}");
    }
}

/// Every layout that is read can be chosen, and its partitions lie beside each other; what is refused says why in one line.
pub fn layout_file(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let layouts = match Layouts::parse(text) {
        Ok(layouts) => layouts,
        Err(error) => return assert!(!error.to_string().is_empty() && !error.to_string().contains('\n'), "{error}"),
    };
    let names: Vec<String> = layouts.names().take(20).map(str::to_owned).collect();
    let rules = Rules { policies: Vec::new(), layouts: LayoutFile::Read(layouts), follow_label: true };
    for name in names {
        let resolution = published(&rules, &[(names::LABEL_MIG_CONFIG.to_owned(), name)].into());
        for terms in resolution.terms.values() {
            let Forms::Fixed(cuts) = &terms.forms else { continue };
            let mut end = 0;
            for cut in cuts {
                assert!(cut.placement.start >= end, "{cuts:?}");
                end = cut.placement.start + cut.placement.size;
            }
        }
    }
}

/// Renders the node as the rules say for every kind of server, and checks what would be published.
fn published(rules: &Rules, labels: &BTreeMap<String, String>) -> Resolution {
    let node: GpuNode = serde_json::from_str(NODE).expect("the corpus is sound");
    let status = node.status.as_ref().expect("a status");
    let resolution = resolve(rules, labels, status);
    assert_eq!(resolve(rules, labels, status), resolution, "what differs at each look is written at each look");
    for counters in [Counters::None, Counters::Combined, Counters::Separate] {
        let features = ServerFeatures { counters, taints: true, extended_resources: true };
        let devices = |offering: &Offering| -> BTreeSet<String> {
            let rendering = render("gpu.nvidia.com", &node, "00000000-0000-0000-0000-0000000000aa", offering, features);
            check_sound(&rendering.slices, &status.gpus, counters);
            let devices = rendering.slices.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default());
            devices.map(|device| device.name).collect()
        };
        let offered = devices(&Offering { resolution: resolution.clone().into(), ..Offering::default() });
        if counters != Counters::None {
            let all = devices(&Offering::default());
            assert!(offered.is_subset(&all), "{offered:?}");
        }
    }
    resolution
}
