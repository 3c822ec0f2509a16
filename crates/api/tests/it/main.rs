//! The CRD that users install is the one the types describe.

use std::path::Path;

use kerf_api::{Attribute, Blocked, Gpu, GpuNode, GpuNodeStatus, GpuOffer};
use kube::CustomResourceExt;

/// The chart's CRD is generated: `KERF_UPDATE=1 cargo test -p kerf-api` writes it, a plain run compares.
#[test]
fn crd_in_the_chart_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/chart/files/crds/kerf.dev_gpunodes.yaml");
    let wanted = format!(
        "# Generated from crates/api: KERF_UPDATE=1 cargo test -p kerf-api\n{}",
        serde_saphyr::to_string(&GpuNode::crd()).unwrap()
    );
    if std::env::var_os("KERF_UPDATE").is_some() {
        std::fs::write(&path, &wanted).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == wanted,
        "{} is not what the types describe: run KERF_UPDATE=1 cargo test -p kerf-api",
        path.display()
    );
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

/// The API allows one value an attribute.
#[test]
fn attributes_hold_one_value() {
    for attribute in [Attribute::string("x"), Attribute::version("1.2.3"), Attribute::int(0)] {
        let json = serde_json::to_value(&attribute).unwrap();
        assert_eq!(json.as_object().unwrap().len(), 1, "{json}");
    }
}
