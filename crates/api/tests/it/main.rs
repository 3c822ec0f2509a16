//! The CRD that users install is the one the types describe.

use std::path::Path;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kerf_api::opaque::{
    GpuConfig, GpuSharing, MigDeviceConfig, MigDeviceSharing, MpsConfig, SharingStrategy, TimeSlice, TimeSlicingConfig,
};
use kerf_api::{Attribute, Blocked, Gpu, GpuNode, GpuNodeSpec, GpuNodeStatus, GpuOffer, GpuPolicy};
use kube::CustomResourceExt;
use serde_json::Value;

/// The chart's CRDs are generated: `KERF_UPDATE=1 cargo test -p kerf-api` writes them, a plain run compares.
#[test]
fn crds_in_the_chart_are_current() {
    is_current("gpunodes", &GpuNode::crd());
    is_current("gpupolicies", &GpuPolicy::crd());
}

/// The API server warns who installs a CRD of formats that it does not know.
#[test]
fn schemas_have_the_formats_that_kubernetes_knows() {
    for crd in [GpuNode::crd(), GpuPolicy::crd()] {
        let text = serde_json::to_string(&crd).unwrap();
        let formats = text.split(r#""format":""#).skip(1).filter_map(|rest| rest.split('"').next());
        for format in formats {
            assert!(["int32", "int64", "date-time"].contains(&format), "{format}");
        }
        assert!(text.contains(r#""maximum":4294967295"#), "what fits into 32 bits is bounded");
    }
}

fn is_current(plural: &str, crd: &impl serde::Serialize) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/chart/files/crds");
    let path = directory.join(format!("kerf.dev_{plural}.yaml"));
    let wanted = format!(
        "# Generated from crates/api: KERF_UPDATE=1 cargo test -p kerf-api\n{}",
        serde_saphyr::to_string(crd).expect("a CRD is YAML")
    );
    if std::env::var_os("KERF_UPDATE").is_some() {
        std::fs::write(&path, &wanted).expect("the chart can be written");
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == wanted,
        "{} is not what the types describe: run KERF_UPDATE=1 cargo test -p kerf-api",
        path.display()
    );
}

/// `docs/configs.md` has a row for each field that a configuration can have.
#[test]
fn every_field_of_a_configuration_is_explained() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configs.md");
    let page = std::fs::read_to_string(path).unwrap();
    let table = page.split_once("<!-- fields:begin -->").unwrap().1.split_once("<!-- fields:end -->").unwrap().0;
    let mps = MpsConfig {
        default_active_thread_percentage: Some(50),
        default_pinned_device_memory_limit: Some(Quantity("4Gi".into())),
        default_per_device_pinned_memory_limit: [("0".into(), Quantity("4Gi".into()))].into(),
        multi_user: Some(true),
    };
    let slicing = TimeSlicingConfig { interval: Some(TimeSlice::Default) };
    let sharing = GpuSharing {
        strategy: SharingStrategy::Mps,
        time_slicing_config: Some(slicing),
        mps_config: Some(mps.clone()),
    };
    let mig = MigDeviceSharing { strategy: SharingStrategy::Mps, mps_config: Some(mps) };
    for document in [
        serde_json::to_value(GpuConfig { sharing: Some(sharing) }).unwrap(),
        serde_json::to_value(MigDeviceConfig { sharing: Some(mig) }).unwrap(),
    ] {
        for field in fields(&document, "") {
            assert!(table.contains(&format!("| `{field}` |")), "no row for {field}");
        }
    }
}

/// The paths of all fields, but not of the entries of a map.
fn fields(value: &Value, path: &str) -> Vec<String> {
    let own = |name: &String| if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
    let inside = value.as_object().filter(|_| !path.ends_with("defaultPerDevicePinnedMemoryLimit"));
    let below = inside.into_iter().flatten();
    below.flat_map(|(name, value)| [vec![own(name)], fields(value, &own(name))].concat()).collect()
}

/// An older program must read what a newer one wrote, and the other way round.
#[test]
fn status_reads_across_versions() {
    let newer = r#"{"driverName":"gpu.nvidia.com","registered":true,"invented":1,
        "gpus":[{"name":"gpu-3b-00-0","offer":"Whole","inventedToo":{"a":1}}]}"#;
    let status: GpuNodeStatus = serde_json::from_str(newer).unwrap();
    assert!(status.registered);
    assert_eq!(status.gpus[0].offer, GpuOffer::Whole);

    let older: GpuNodeStatus = serde_json::from_str("{}").unwrap();
    assert_eq!(older, GpuNodeStatus::default());
    assert_eq!(serde_json::from_str::<Gpu>("{}").unwrap().offer, GpuOffer::Nothing, "silence offers nothing");

    let unblocked = serde_json::to_value(Gpu::default()).unwrap();
    assert!(unblocked.get("blocked").is_none(), "who knows no such field sees none while nothing is blocked");
    let blocked = Gpu { blocked: vec![Blocked::default()], ..Gpu::default() };
    let blocked = serde_json::to_value(&blocked).unwrap();
    assert_eq!(blocked["blocked"], serde_json::json!([{"reason": "", "message": ""}]));
}

/// What is not wished for is not there, so that an older plugin sees the empty spec that it knows.
#[test]
fn spec_reads_across_versions() {
    let newer = r#"{"invented":1,"gpus":{"gpu-3b-00-0":{"migMode":"Enabled","inventedToo":true}}}"#;
    let spec: GpuNodeSpec = serde_json::from_str(newer).unwrap();
    assert_eq!(
        serde_json::to_value(&spec).unwrap(),
        serde_json::json!({"gpus": {"gpu-3b-00-0": {"migMode": "Enabled"}}})
    );
    assert_eq!(serde_json::from_str::<GpuNodeSpec>("{}").unwrap(), GpuNodeSpec::default());
    assert_eq!(serde_json::to_value(GpuNodeSpec::default()).unwrap(), serde_json::json!({}));
}

/// The API allows one value an attribute.
#[test]
fn attributes_hold_one_value() {
    for attribute in [Attribute::string("x"), Attribute::version("1.2.3"), Attribute::int(0)] {
        let json = serde_json::to_value(&attribute).unwrap();
        assert_eq!(json.as_object().unwrap().len(), 1, "{json}");
    }
}
