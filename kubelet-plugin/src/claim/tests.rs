//! What can be wrong with a claim, case by case.

use serde_json::{Value, json};

use super::*;

const DRIVER: &str = "gpu.nvidia.com";

fn asked() -> ClaimRef {
    ClaimRef { uid: "u1".into(), namespace: "default".into(), name: "slice".into() }
}

fn claim(results: Value, configs: Value) -> ResourceClaim {
    let mut claim = json!({
        "metadata": {"name": "slice", "namespace": "default", "uid": "u1"},
        "spec": {},
    });
    let devices = &mut claim["status"]["allocation"]["devices"];
    devices["results"] = results;
    devices["config"] = configs;
    serde_json::from_value(claim).unwrap()
}

fn result(request: &str, device: &str) -> Value {
    json!({"request": request, "driver": DRIVER, "pool": "node-1", "device": device})
}

fn config(source: &str, requests: Value, kind: &str, sharing: Value) -> Value {
    let mut parameters = json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind});
    if !sharing.is_null() {
        parameters["sharing"] = sharing;
    }
    let mut config = json!({"source": source, "opaque": {"driver": DRIVER, "parameters": parameters}});
    config["requests"] = requests;
    config
}

fn check_claim(claim: &ResourceClaim) -> Result<Claim, ClaimError> {
    check(&asked(), Some(claim), DRIVER, "node-1")
}

#[test]
fn our_part_of_a_good_claim() {
    let mut shared = result("gpus/large", "gpu-3b-00-0-mig-3g40gb-4");
    shared["shareID"] = json!("a671734a-e8e5-11e4-8fde-42010af09327");
    let mut admin = result("look", "gpu-5e-00-0");
    admin["adminAccess"] = json!(true);
    let foreign = json!({"request": "nic", "driver": "nic.example.com", "pool": "elsewhere", "device": "eth0"});

    let mut claim = claim(json!([foreign, shared, admin]), json!([]));
    assert_eq!(check_claim(&claim).unwrap().pod_claim_name, None);
    let of_template = ("resource.kubernetes.io/pod-claim-name".to_owned(), "gpu".to_owned());
    claim.metadata.annotations = Some([of_template].into());
    let claim = check_claim(&claim).unwrap();

    assert_eq!(claim.pod_claim_name.as_deref(), Some("gpu"));
    assert_eq!((claim.uid.as_str(), claim.namespace.as_str(), claim.name.as_str()), ("u1", "default", "slice"));
    let device = |request: &str, device: &str, share_id: Option<&str>, admin_access| AllocatedDevice {
        request: request.into(),
        subrequest: (request == "gpus").then(|| "large".into()),
        pool: "node-1".into(),
        device: device.into(),
        share_id: share_id.map(Into::into),
        admin_access,
    };
    assert_eq!(
        claim.devices,
        [
            device("gpus", "gpu-3b-00-0-mig-3g40gb-4", Some("a671734a-e8e5-11e4-8fde-42010af09327"), false),
            device("look", "gpu-5e-00-0", None, true),
        ]
    );
}

#[test]
fn each_mistake_is_named() {
    let good = claim(json!([result("gpu", "gpu-3b-00-0")]), json!([]));
    let message = |claim: Option<&ResourceClaim>| check(&asked(), claim, DRIVER, "node-1").unwrap_err().to_string();

    assert_eq!(message(None), "the claim does not exist any more: delete the pod, it cannot start");

    let mut replaced = good.clone();
    replaced.metadata.uid = Some("u2".into());
    assert_eq!(
        message(Some(&replaced)),
        "the claim was replaced by another of the same name (UID u2): delete the pod, it cannot start"
    );

    let mut pending = good.clone();
    pending.status = None;
    assert_eq!(message(Some(&pending)), "the claim is not allocated: the kubelet will retry when it is");

    let foreign = claim(json!([{"request": "x", "driver": "other", "pool": "node-1", "device": "d"}]), json!([]));
    assert!(message(Some(&foreign)).starts_with("the claim is allocated no device of gpu.nvidia.com"));

    let mut elsewhere = result("gpu", "gpu-3b-00-0");
    elsewhere["pool"] = json!("node-2");
    assert_eq!(
        message(Some(&claim(json!([elsewhere]), json!([])))),
        "the claim is allocated device gpu-3b-00-0 of node node-2, and this is node node-1: delete the pod"
    );

    let unknown = message(Some(&claim(json!([result("gpu", "gpu-x")]), json!([]))));
    assert!(unknown.starts_with("the claim is allocated a device that kerf does not know: \"gpu-x\""), "{unknown}");

    for device in ["gpu-0", "gpu-0-mig-1g10gb-19-3"] {
        let former = message(Some(&claim(json!([result("gpu", device)]), json!([]))));
        let says = format!("the claim is allocated {device}, which NVIDIA's DRA driver has published");
        assert!(former.starts_with(&says) && former.contains("delete the pod"), "{former}");
    }
}

#[test]
fn configurations_that_change_nothing_are_accepted() {
    for (kind, sharing) in [
        ("GpuConfig", json!(null)),
        ("GpuConfig", json!({"strategy": "TimeSlicing"})),
        ("GpuConfig", json!({"strategy": "TimeSlicing", "timeSlicingConfig": {}})),
        ("GpuConfig", json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Default"}})),
        ("MigDeviceConfig", json!({"strategy": "TimeSlicing"})),
        // Not for this device, so never looked at.
        ("MigDeviceConfig", json!({"strategy": "MPS"})),
    ] {
        let claim =
            claim(json!([result("gpu", "gpu-3b-00-0")]), json!([config("FromClaim", json!([]), kind, sharing)]));
        check_claim(&claim).unwrap();
    }
    let others = json!([{"source": "FromClaim", "opaque": {"driver": "other", "parameters": {"any": "thing"}}}]);
    check_claim(&claim(json!([result("gpu", "gpu-3b-00-0")]), others)).unwrap();
}

#[test]
fn configurations_that_cannot_be_met_are_refused() {
    let whole = "gpu-3b-00-0";
    let slice = "gpu-3b-00-0-mig-1g10gb-4";
    let long = json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}});
    let mps = json!({"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 50}});
    for (device, config, message) in [
        (
            whole,
            config("FromClaim", json!([]), "GpuConfig", long.clone()),
            "the configuration of the claim cannot be used: opaque.parameters.sharing.timeSlicingConfig.interval: this \
             version of kerf leaves time slices as they are; use Default",
        ),
        (
            whole,
            config("FromClass", json!(["gpu"]), "GpuConfig", mps.clone()),
            "the configuration of the DeviceClass cannot be used: opaque.parameters.sharing.strategy: MPS is not in this \
             version of kerf; use TimeSlicing, or leave sharing out",
        ),
        (
            slice,
            config("FromClaim", json!([]), "MigDeviceConfig", mps),
            "the configuration of the claim cannot be used: opaque.parameters.sharing.strategy: MPS is not in this \
             version of kerf; use TimeSlicing, or leave sharing out",
        ),
        (
            whole,
            config("FromClaim", json!([]), "GpuConfig", json!({"strategy": "TimeSlicing", "mpsConfig": {}})),
            "the configuration of the claim cannot be used: opaque.parameters.sharing.mpsConfig: settings of MPS, and the \
             strategy is TimeSlicing; remove either",
        ),
        (
            slice,
            config("FromClaim", json!(["gpu"]), "GpuConfig", json!(null)),
            "the configuration of the claim gives a GpuConfig to request gpu, whose device gpu-3b-00-0-mig-1g10gb-4 \
             takes a MigDeviceConfig",
        ),
        (
            whole,
            config("FromClaim", json!([]), "GpuConfig", json!({"strategy": "Foo", "mps": 1})),
            "the configuration of the claim cannot be used: opaque.parameters.sharing.mps: unknown field; known here: \
             strategy, timeSlicingConfig and mpsConfig; also opaque.parameters.sharing.strategy: \"Foo\" is not known; use \
             TimeSlicing",
        ),
        (
            // Read strictly even where it would not apply: it is a mistake anyhow.
            whole,
            config("FromClaim", json!(["other"]), "VfioDeviceConfig", json!(null)),
            "the configuration of the claim cannot be used: opaque.parameters.kind: \"VfioDeviceConfig\" is not served: kerf \
             gives GPUs to containers, not to virtual machines",
        ),
        (
            whole,
            json!({"source": "FromClaim"}),
            "the claim has a configuration that is not opaque, which this version of kerf cannot read",
        ),
    ] {
        let error = check_claim(&claim(json!([result("gpu", device)]), json!([config]))).unwrap_err();
        assert_eq!(error.to_string(), message);
        assert!(error.needs_a_person(), "{error}");
    }
}

/// As at its creation: where the claim has the same configuration, the place in it is told.
#[test]
fn the_place_in_the_claim_is_told() {
    let wrong = config("FromClaim", json!(["gpu"]), "GpuConfig", json!({"strategy": "Foo"}));
    let mut claim = claim(json!([result("gpu", "gpu-3b-00-0")]), json!([wrong]));
    let written = |requests: Value| json!({"requests": requests, "opaque": wrong["opaque"]});
    let devices = json!({"config": [written(json!([])), written(json!(["gpu"]))]});
    claim.spec.get_or_insert_default().devices = Some(serde_json::from_value(devices).unwrap());
    assert_eq!(
        check_claim(&claim).unwrap_err().to_string(),
        "the configuration of the claim cannot be used: spec.devices.config[1].opaque.parameters.sharing.strategy: \"Foo\" \
         is not known; use TimeSlicing"
    );
}

/// Which of several configurations applies shows in whether the claim is refused.
#[test]
fn the_last_configuration_that_applies_wins() {
    let long = json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}});
    let default = json!({"strategy": "TimeSlicing"});
    let gpu = |source: &str, requests: Value, sharing: &Value| config(source, requests, "GpuConfig", sharing.clone());
    for (why, request, configs, refused) in [
        (
            "the claim overrides the class",
            "gpu",
            json!([gpu("FromClass", json!([]), &long), gpu("FromClaim", json!([]), &default)]),
            false,
        ),
        (
            "the claim overrides the class in whatever order they are written",
            "gpu",
            json!([gpu("FromClaim", json!([]), &default), gpu("FromClass", json!([]), &long)]),
            false,
        ),
        (
            "a later one overrides, also one for all requests",
            "gpu",
            json!([gpu("FromClaim", json!(["gpu"]), &default), gpu("FromClaim", json!([]), &long)]),
            true,
        ),
        ("one for another request does not apply", "gpu", json!([gpu("FromClaim", json!(["gpu2"]), &long)]), false),
        ("the parent's name covers its alternatives", "gpu/a", json!([gpu("FromClaim", json!(["gpu"]), &long)]), true),
        ("an alternative can be named alone", "gpu/a", json!([gpu("FromClaim", json!(["gpu/a"]), &long)]), true),
        ("another alternative is not meant", "gpu/a", json!([gpu("FromClaim", json!(["gpu/b"]), &long)]), false),
    ] {
        let claim = claim(json!([result(request, "gpu-3b-00-0")]), configs);
        assert_eq!(check_claim(&claim).is_err(), refused, "{why}");
    }
}
