//! What users copy, from the samples and the documentation: GpuPolicies and quotas.

use kerf_api::GpuPolicySpec;
use kerf_e2e::deploy;
use kerf_mig::product::Product;
use serde_json::Value;

/// The objects of a kind in YAML that may have others between them.
fn objects(yaml: &str, kind: &str) -> Vec<Value> {
    let objects: Vec<Value> = serde_saphyr::from_multiple(yaml).unwrap_or_else(|error| panic!("{error}:\n{yaml}"));
    objects.into_iter().filter(|object| object["kind"] == kind).collect()
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
    let mut found = objects(&read("samples/policies.yaml"), "GpuPolicy");
    for page in ["../docs/policies.md", "../docs/moving/from-mig-manager.md"] {
        found.extend(fences(&read(page)).iter().flat_map(|fence| objects(fence, "GpuPolicy")));
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

/// What a quota does not name is not limited: a tenant would get the profiles that nobody thought of.
#[test]
fn quotas_name_every_profile_of_the_product() {
    let product = Product::by_key("h100-80gb").unwrap();
    let profiles: Vec<String> = product
        .mig
        .iter()
        .flat_map(|mig| &mig.profiles)
        .map(|profile| profile.profile.name.replace('+', "."))
        .collect();
    assert!(!profiles.is_empty());
    let quotas = objects(&std::fs::read_to_string(deploy().join("samples/quotas.yaml")).unwrap(), "ResourceQuota");
    assert_eq!(quotas.len(), 3, "one a tenant");
    for quota in quotas {
        let hard = quota["spec"]["hard"].as_object().unwrap();
        for profile in &profiles {
            let resource = format!("requests.nvidia.com/mig-{profile}");
            let class = format!("mig-{profile}.nvidia.com.deviceclass.resource.k8s.io/devices");
            assert!(
                hard.contains_key(&resource) || hard.contains_key(&class),
                "{}: {profile}",
                quota["metadata"]["name"]
            );
        }
    }
}
