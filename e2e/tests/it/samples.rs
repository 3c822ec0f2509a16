//! The GpuPolicies that users copy, from the samples and the documentation.

use kerf_api::GpuPolicySpec;
use kerf_e2e::deploy;
use serde_json::Value;

/// The GpuPolicies in YAML that may have others between them.
fn policies(yaml: &str) -> Vec<Value> {
    let objects: Vec<Value> = serde_saphyr::from_multiple(yaml).unwrap_or_else(|error| panic!("{error}:\n{yaml}"));
    objects.into_iter().filter(|object| object["kind"] == "GpuPolicy").collect()
}

/// What the fences of a page that are YAML hold, without what they are indented by.
fn fences(page: &str) -> Vec<String> {
    let mut fences = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if let Some(indent) = line.strip_suffix("```yaml") {
            let inside = lines.by_ref().take_while(|line| line.trim() != "```");
            fences.push(inside.map(|line| format!("{}\n", line.strip_prefix(indent).unwrap_or(line))).collect());
        }
    }
    fences
}

#[test]
fn gpu_policies_are_good() {
    let deploy = deploy();
    let read = |path: &str| std::fs::read_to_string(deploy.join(path)).unwrap();
    let mut found = policies(&read("samples/policies.yaml"));
    for page in ["../docs/policies.md", "../docs/moving/from-mig-manager.md"] {
        found.extend(fences(&read(page)).iter().flat_map(|fence| policies(fence)));
    }
    assert_eq!(found.len(), 5, "three samples, and one on each page");
    for policy in found {
        let spec: GpuPolicySpec = serde_json::from_value(policy["spec"].clone()).unwrap();
        assert_eq!(spec.problems(), [], "{}", policy["metadata"]["name"]);
        // A field that no type knows is a mistyped one.
        let again = serde_json::to_value(&spec).unwrap();
        for field in policy["spec"].as_object().unwrap().keys() {
            assert!(!again[field].is_null(), "{}: {field}", policy["metadata"]["name"]);
        }
    }
}
