//! Every field, and every way to get it wrong.

use serde_json::json;

use super::*;

const PATH: &str = "spec.devices.config[0].opaque.parameters";

/// A document of a kind with this `sharing`.
fn document(kind: &str, sharing: Value) -> Value {
    let mut document = json!({"apiVersion": API_VERSION, "kind": kind});
    if !sharing.is_null() {
        document["sharing"] = sharing;
    }
    document
}

fn gpu(sharing: Value) -> Value {
    document("GpuConfig", sharing)
}

fn mig(sharing: Value) -> Value {
    document("MigDeviceConfig", sharing)
}

fn mps(settings: &Value) -> Value {
    json!({"strategy": "MPS", "mpsConfig": settings})
}

/// The lines that a document is refused with, relative to the parameters.
fn refused(parameters: &Value) -> Vec<String> {
    let problems = problems(parameters, PATH);
    let line = |problem: &Problem| {
        let line = problem.to_string();
        line.strip_prefix(PATH).expect("every path is that of the document").trim_start_matches('.').to_owned()
    };
    problems.iter().map(line).collect()
}

#[test]
fn a_full_configuration_is_read() {
    let settings = json!({
        "defaultActiveThreadPercentage": 50,
        "defaultPinnedDeviceMemoryLimit": "10Gi",
        "defaultPerDevicePinnedMemoryLimit": {"0": "5Gi", "GPU-1f8ab1bb-a5cd-5cb8-6a06-2a2cf9c5e1a1": 1048576},
        "multiUser": true,
    });
    let Ok(DeviceConfig::Gpu(GpuConfig { sharing: Some(sharing) })) = DeviceConfig::decode(&gpu(mps(&settings)), PATH)
    else {
        panic!("it is not read")
    };
    assert_eq!(sharing.strategy, SharingStrategy::Mps);
    let mps = sharing.mps_config.unwrap();
    assert_eq!(mps.default_active_thread_percentage, Some(50));
    assert_eq!(mps.default_pinned_device_memory_limit, Some(Quantity("10Gi".into())));
    assert_eq!(mps.default_per_device_pinned_memory_limit["0"], Quantity("5Gi".into()));
    assert_eq!(mps.default_per_device_pinned_memory_limit.len(), 2);
    assert_eq!(mps.multi_user, Some(true));
}

#[test]
fn what_changes_nothing_is_accepted() {
    for parameters in [
        gpu(json!(null)),
        mig(json!(null)),
        gpu(json!({"strategy": "TimeSlicing"})),
        gpu(json!({"strategy": "TimeSlicing", "timeSlicingConfig": {}, "mpsConfig": null})),
        gpu(json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Default"}})),
        mig(json!({"strategy": "TimeSlicing"})),
    ] {
        assert_eq!(refused(&parameters), [""; 0], "{parameters}");
    }
}

#[test]
fn each_mistake_is_told_with_its_place_and_a_way_out() {
    const STRATEGY: &str = "sharing.strategy: missing; use TimeSlicing";
    let version = json!("resource.nvidia.com/v1beta1");
    for (parameters, line) in [
        // The document.
        (json!("text"), ": must be an object, and is a text; begin with apiVersion: resource.nvidia.com/v1beta1"),
        (json!({"kind": "GpuConfig"}), "apiVersion: missing; use resource.nvidia.com/v1beta1"),
        (
            json!({"apiVersion": "resource.nvidia.com/v1", "kind": "GpuConfig"}),
            r#"apiVersion: "resource.nvidia.com/v1" is not known; use resource.nvidia.com/v1beta1"#,
        ),
        (
            json!({"apiVersion": 1, "kind": "GpuConfig"}),
            "apiVersion: must be a word, and is a number; use resource.nvidia.com/v1beta1",
        ),
        (json!({"apiVersion": version}), "kind: missing; use GpuConfig or MigDeviceConfig"),
        (document("gpuConfig", json!(null)), r#"kind: "gpuConfig" is not known; use GpuConfig or MigDeviceConfig"#),
        (
            document("VfioDeviceConfig", json!(null)),
            r#"kind: "VfioDeviceConfig" is not served: kerf gives GPUs to containers, not to virtual machines"#,
        ),
        (
            document("ComputeDomainChannelConfig", json!(null)),
            "kind: \"ComputeDomainChannelConfig\" is not served: compute domains belong to the driver \
             compute-domain.nvidia.com, not to GPUs",
        ),
        (
            json!({"apiVersion": version, "kind": "GpuConfig", "sharin": {}}),
            "sharin: unknown field; did you mean sharing?",
        ),
        (
            json!({"apiVersion": version, "kind": "GpuConfig", "replicas": 4}),
            "replicas: unknown field; known here: apiVersion, kind and sharing",
        ),
        // sharing.
        (gpu(json!(["TimeSlicing"])), "sharing: must be an object, and is a list"),
        (gpu(json!({})), STRATEGY),
        (mig(json!({})), STRATEGY),
        (gpu(json!({"strategy": null})), STRATEGY),
        (gpu(json!({"strategy": "Foo"})), r#"sharing.strategy: "Foo" is not known; use TimeSlicing"#),
        (
            gpu(json!({"strategy": {"MPS": null}})),
            "sharing.strategy: must be a word, and is an object; use TimeSlicing",
        ),
        (
            gpu(json!({"strategy": "TimeSlicing", "timeslicingConfig": {}})),
            "sharing.timeslicingConfig: unknown field; did you mean timeSlicingConfig?",
        ),
        (
            gpu(json!({"strategy": "TimeSlicing", "mpsConfig": {}})),
            "sharing.mpsConfig: settings of MPS, and the strategy is TimeSlicing; remove either",
        ),
        (
            mig(json!({"strategy": "TimeSlicing", "mpsConfig": {}})),
            "sharing.mpsConfig: settings of MPS, and the strategy is TimeSlicing; remove either",
        ),
        (
            mig(json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}})),
            "sharing.timeSlicingConfig: MIG devices have no time slices to set; remove it",
        ),
        // timeSlicingConfig.
        (
            gpu(json!({"strategy": "TimeSlicing", "timeSlicingConfig": "Default"})),
            "sharing.timeSlicingConfig: must be an object, and is a text",
        ),
        (
            gpu(json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Longer"}})),
            r#"sharing.timeSlicingConfig.interval: "Longer" is not known; use Default"#,
        ),
        (
            gpu(json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"intervall": "Default"}})),
            "sharing.timeSlicingConfig.intervall: unknown field; did you mean interval?",
        ),
        // What kerf does not do.
        (
            gpu(json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}})),
            "sharing.timeSlicingConfig.interval: this version of kerf leaves time slices as they are; use Default",
        ),
        (
            gpu(json!({"strategy": "MPS"})),
            "sharing.strategy: MPS is not in this version of kerf; use TimeSlicing, or leave sharing out",
        ),
        (
            mig(mps(&json!({}))),
            "sharing.strategy: MPS is not in this version of kerf; use TimeSlicing, or leave sharing out",
        ),
    ] {
        assert_eq!(refused(&parameters), [line], "{parameters}");
    }
}

/// They are checked although MPS is refused as a whole: who corrects one thing shall not find the next only then.
#[test]
fn settings_of_mps_are_checked() {
    const UUID: &str = "1f8ab1bb-a5cd-5cb8-6a06-2a2cf9c5e1a1";
    let keys = "use a UUID as nvidia-smi -L prints it (GPU-...), or a number from 0";
    let of_mig = "use a UUID as nvidia-smi -L prints it (MIG-...), or a number from 0";
    let limit = |key: &str, value: Value| json!({"defaultPerDevicePinnedMemoryLimit": {key: value}});
    type Case = (fn(Value) -> Value, Value, String);
    let cases: Vec<Case> = vec![
        (gpu, json!({"threads": 1}), "threads: unknown field; known here: defaultActiveThreadPercentage, \
            defaultPinnedDeviceMemoryLimit, defaultPerDevicePinnedMemoryLimit and multiUser".into()),
        (gpu, json!({"multiUsers": true}), "multiUsers: unknown field; did you mean multiUser?".into()),
        (gpu, json!({"multiUser": "yes"}), "multiUser: must be true or false, and is a text".into()),
        (gpu, json!({"defaultActiveThreadPercentage": 101}),
            "defaultActiveThreadPercentage: 101 is no percentage; use a whole number from 0 to 100".into()),
        (gpu, json!({"defaultActiveThreadPercentage": -1}),
            "defaultActiveThreadPercentage: -1 is no percentage; use a whole number from 0 to 100".into()),
        (gpu, json!({"defaultActiveThreadPercentage": 12.5}),
            "defaultActiveThreadPercentage: 12.5 is no percentage; use a whole number from 0 to 100".into()),
        (gpu, json!({"defaultActiveThreadPercentage": "50"}),
            "defaultActiveThreadPercentage: must be a number, and is a text; use a whole number from 0 to 100".into()),
        (gpu, json!({"defaultPinnedDeviceMemoryLimit": "5 gb"}),
            "defaultPinnedDeviceMemoryLimit: \"5 gb\" is no quantity; write it as Kubernetes does, such as 4Gi".into()),
        (gpu, json!({"defaultPinnedDeviceMemoryLimit": true}),
            "defaultPinnedDeviceMemoryLimit: must be a quantity, and is true or false; write it as Kubernetes does, such as \
             4Gi".into()),
        (gpu, json!({"defaultPinnedDeviceMemoryLimit": "1023Ki"}),
            "defaultPinnedDeviceMemoryLimit: \"1023Ki\" is less than 1Mi; limits are counted in MiB: use 1Mi or \
             more".into()),
        (gpu, json!({"defaultPinnedDeviceMemoryLimit": -4}),
            "defaultPinnedDeviceMemoryLimit: \"-4\" is less than 1Mi; limits are counted in MiB: use 1Mi or more".into()),
        (gpu, json!({"defaultPerDevicePinnedMemoryLimit": "4Gi"}),
            "defaultPerDevicePinnedMemoryLimit: must be an object, and is a text".into()),
        (gpu, limit("0", json!("lots")), "defaultPerDevicePinnedMemoryLimit[\"0\"]: \"lots\" is no quantity; write it \
            as Kubernetes does, such as 4Gi".into()),
        (gpu, limit("00", json!("4Gi")),
            format!("defaultPerDevicePinnedMemoryLimit[\"00\"]: \"00\" names no device; {keys}")),
        (gpu, limit("first", json!("4Gi")),
            format!("defaultPerDevicePinnedMemoryLimit.first: \"first\" names no device; {keys}")),
        (gpu, limit("GPU-1f8ab1bb", json!("4Gi")),
            format!("defaultPerDevicePinnedMemoryLimit[\"GPU-1f8ab1bb\"]: \"GPU-1f8ab1bb\" names no device; {keys}")),
        (gpu, limit(&format!("MIG-{UUID}"), json!("4Gi")),
            format!("defaultPerDevicePinnedMemoryLimit[\"MIG-{UUID}\"]: \"MIG-{UUID}\" is none of the whole GPUs that this \
                configuration is for; {keys}")),
        (mig, limit(&format!("GPU-{UUID}"), json!("4Gi")),
            format!("defaultPerDevicePinnedMemoryLimit[\"GPU-{UUID}\"]: \"GPU-{UUID}\" is none of the MIG devices that this \
                configuration is for; {of_mig}")),
    ];
    for (kind, settings, line) in cases {
        let parameters = kind(mps(&settings));
        let problems = DeviceConfig::decode(&parameters, "").unwrap_err();
        let lines: Vec<_> = problems.iter().map(ToString::to_string).collect();
        assert_eq!(lines, [format!("sharing.mpsConfig.{line}")], "{parameters}");
        assert_eq!(super::problems(&parameters, "").len(), 2, "and MPS is refused: {parameters}");
    }
}

#[test]
fn all_mistakes_are_told_at_once() {
    let parameters = json!({
        "apiVersion": "v1", "kind": "GpuConfig", "extra": 1,
        "sharing": {"strategy": "MPS", "timeSlicingConfig": {"interval": 3}, "mpsConfig": {"multiUser": 1}},
    });
    assert_eq!(
        refused(&parameters),
        [
            "apiVersion: \"v1\" is not known; use resource.nvidia.com/v1beta1",
            "extra: unknown field; known here: apiVersion, kind and sharing",
            "sharing.timeSlicingConfig: settings of TimeSlicing, and the strategy is MPS; remove either",
            "sharing.timeSlicingConfig.interval: must be a word, and is a number; use Default",
            "sharing.mpsConfig.multiUser: must be true or false, and is a number",
            "sharing.strategy: MPS is not in this version of kerf; use TimeSlicing, or leave sharing out",
        ]
    );
}

/// What is recommended is accepted.
#[test]
fn no_hint_leads_astray() {
    for (field, hint) in [("strategy", "TimeSlicing"), ("interval", "Default")] {
        let wrong = match field {
            "strategy" => gpu(json!({"strategy": "wrong"})),
            _ => gpu(json!({"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "wrong"}})),
        };
        let found = problems(&wrong, "");
        let words = found[0].hint.as_deref().unwrap().strip_prefix("use ").unwrap();
        assert_eq!(words, hint);
        for word in words.split(", ").flat_map(|words| words.split(" or ")) {
            let right: Value = serde_json::from_str(&wrong.to_string().replace("wrong", word)).unwrap();
            assert_eq!(problems(&right, ""), [], "{right}");
        }
    }
}
