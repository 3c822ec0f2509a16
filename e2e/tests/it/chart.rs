//! The chart in every situation that it is made for, and with values that it is not.

use std::collections::BTreeSet;

use kerf_e2e::{deploy, helm, manifests, render, situations};
use serde_json::Value;

/// The Kubernetes versions that kerf is tested on, oldest first.
const KUBERNETES: [&str; 4] = ["1.34.4", "1.35.4", "1.36.3", "1.37.2"];

/// The namespace of the plain manifests.
const NAMESPACE: &str = kerf_api::names::NAMESPACE;

#[test]
fn every_situation_passes_the_strict_lint() {
    let chart = deploy().join("chart");
    for situation in situations().unwrap() {
        let mut arguments = vec!["lint", "--strict", chart.to_str().unwrap()];
        arguments.extend(situation.iter().map(String::as_str));
        helm(&arguments).unwrap_or_else(|error| panic!("{situation:?}: {error}"));
    }
}

#[test]
fn every_situation_renders_on_every_kubernetes() {
    for situation in situations().unwrap() {
        for version in KUBERNETES {
            let mut arguments = vec!["--kube-version", version];
            arguments.extend(situation.iter().map(String::as_str));
            let objects = render("kerf", NAMESPACE, &arguments).unwrap_or_else(|e| panic!("{situation:?}: {e}"));
            let kinds: BTreeSet<&str> = objects.iter().filter_map(|object| object["kind"].as_str()).collect();
            assert!(kinds.contains("DaemonSet") && kinds.contains("Deployment"), "{situation:?}: {kinds:?}");
        }
    }
    let too_old = render("kerf", NAMESPACE, &["--kube-version", "1.33.9"]).unwrap_err().to_string();
    assert!(too_old.contains("1.34"), "{too_old}");
    render("kerf", NAMESPACE, &["--kube-version", "v1.34.4-gke.1"]).expect("a distribution's version is one");
}

/// The simulator's chart is made for the node file that the simulator reads, and refuses what it would not.
#[test]
fn the_simulators_chart_is_sound() {
    let chart = deploy().join("sim-chart");
    let chart = chart.to_str().unwrap();
    helm(&["lint", "--strict", chart]).unwrap();
    for version in KUBERNETES {
        let rendered = helm(&["template", "sim", chart, "--kube-version", version]).unwrap();
        assert!(rendered.contains("product: h100-80gb") && rendered.contains("kind: DaemonSet"), "{rendered}");
    }
    for (value, words) in [
        ("node.gpus=[]", "gpus"),
        (r#"node.gpu=["h100-80gb"]"#, "gpu"),
        (r#"driverRoot="/run""#, "driverRoot"),
        (r#"driverRoot="driver""#, "driverRoot"),
        (r#"image.pullPolicy="Sometimes""#, "pullPolicy"),
    ] {
        let refused = helm(&["template", "sim", chart, "--set-json", value]).unwrap_err().to_string();
        assert!(refused.contains(words), "{value}: {refused}");
    }
}

/// What a user gets wrong, and the words that must be in the answer.
const REFUSED: &[(&[&str], &[&str])] = &[
    // What the schema refuses.
    (&["driverroot=/"], &["driverroot", "not allowed"]),
    (&["kubeletPlugin.imgae.tag=1"], &["kubeletPlugin", "imgae", "not allowed"]),
    (&["driverName=null"], &["missing", "driverName"]),
    (&["foreignInstances=destroy"], &["foreignInstances", "keep", "adopt", "delete"]),
    (&["cdiWithout={everything}"], &["cdiWithout/0", "hooks", "metadata", "additional-gids"]),
    (&["kubeletPlugin.atExit=never"], &["atExit", "withdraw", "keep"]),
    (&["nodes.discovery=Labels"], &["discovery", "All", "NodeFeatureDiscovery"]),
    (&["logFormat=yaml"], &["logFormat", "json", "text"]),
    (&["listenAddress=localhost"], &["listenAddress", "0.0.0.0", "[::]"]),
    (&["test.device=Tpu"], &["test/device", "Any", "Mig", "Gpu"]),
    (&["controller.image.pullPolicy=Sometimes"], &["pullPolicy", "IfNotPresent"]),
    (&["webhook.failurePolicy=Open"], &["failurePolicy", "Ignore", "Fail"]),
    (&["webhook.timeoutSeconds=60"], &["timeoutSeconds", "maximum", "30"]),
    (&["webhook.port=443"], &["webhook/port", "minimum", "1,024"]),
    (&["controller.replicas=0"], &["controller/replicas", "minimum", "1"]),
    (&["controller.replicas=two"], &["controller/replicas", "got string, want integer"]),
    (&["kubeletPlugin.tolerations=all"], &["tolerations", "want array"]),
    (&["crds.create=perhaps"], &["crds/create", "want boolean"]),
    (&["networkPolicy.apiServerPorts={70000}"], &["apiServerPorts/0", "maximum", "65,535"]),
    (&["kubeletPlugin.nodeSelector.gpu=true"], &["nodeSelector/gpu", "got boolean, want string"]),
    // What the templates refuse.
    (&["driverName=Gpu.nvidia.com"], &["driverName", "\"Gpu.nvidia.com\"", "not a DNS name", "such as gpu.nvidia.com"]),
    (&["driverName=gpu/nvidia"], &["driverName", "not a DNS name"]),
    (&["driverName="], &["driverName", "not a DNS name"]),
    (
        &["driverName=a123456789.b123456789.c123456789.d123456789.e123456789.f12345678"],
        &["driverName", "has 64 characters", "allows 63"],
    ),
    (&["deviceClasses.mig=gpu.nvidia.com"], &["deviceClasses.gpu and deviceClasses.mig are both"]),
    (&["deviceClasses.gpuResource=gpu"], &["deviceClasses.gpuResource", "\"gpu\"", "such as nvidia.com/gpu"]),
    (&["nodeLabels.enabled=yes"], &["nodeLabels/enabled", "want boolean"]),
    (&["driverRoot=run/nvidia/driver"], &["driverRoot", "not an absolute path", "empty to find it"]),
    (&["kubeletRoot=/var/lib/kubelet/"], &["kubeletRoot", "without a slash at its end"]),
    (&["kubeletRoot=/"], &["kubeletRoot", "not an absolute path"]),
    (&["cdiRoot=/var/run/../cdi"], &["cdiRoot", "not an absolute path"]),
    (&["logLevel=verbose"], &["logLevel", "\"verbose\"", "error, warn, info, debug, trace"]),
    (&["hookRoot=kerf"], &["hookRoot", "not an absolute path", "/var/lib/kerf"]),
    (&["hookRoot=/var/lib/kubelet/plugins"], &["hookRoot", "/var/lib/kubelet/plugins/gpu.nvidia.com", "/var/lib/kerf"]),
    (&["webhook.port=8080"], &["webhook.port", "8080", "8443"]),
    (&["controller.replicas=5"], &["controller.replicas", "5", "webhook.enabled", "allows 4"]),
    (&["controller.image.repository=ghcr.io/x/y:1.0"], &["controller.image.repository", "has a tag"]),
    (&["controller.image.repository=Some Image"], &["controller.image.repository", "no name of an image"]),
    (&["kubeletPlugin.image.digest=sha256:12"], &["kubeletPlugin.image.digest", "64 hexadecimal digits"]),
    (&["layouts.configMap=nvidia-mig-config"], &["layouts.configMap", "not of the form namespace/name"]),
    (&["layouts.configMap=gpu-operator/a/b"], &["layouts.configMap", "not of the form namespace/name"]),
    (&["layouts.nodeLabel=sometimes"], &["layouts/nodeLabel", "want boolean"]),
    (&["kubeletPlugin.maxSurge=many"], &["kubeletPlugin.maxSurge", "many", "percentage such as 10%"]),
    (&["kubeletPlugin.maxSurge=0"], &["kubeletPlugin/maxSurge", "minimum"]),
    (
        &["driverName=gpu.a-department-with-a-rather-long-name.subsidiary.example.com"],
        &["kubeletRoot", "too long together", "115 bytes", "shorter driverName"],
    ),
    (
        &["nodes.discovery=NodeFeatureDiscovery", "kubeletPlugin.affinity.nodeAffinity.x=1"],
        &["nodeAffinity would replace", "kubeletPlugin.nodeSelector"],
    ),
];

#[test]
fn bad_values_are_refused_in_words() {
    for (values, words) in REFUSED {
        let arguments: Vec<&str> = values.iter().flat_map(|value| ["--set", value]).collect();
        let Err(error) = render("kerf", NAMESPACE, &arguments) else { panic!("{values:?} is not refused") };
        let error = error.to_string();
        for word in *words {
            assert!(error.contains(word), "{values:?}: no {word:?} in\n{error}");
        }
    }
}

/// Values, their comments and the schema are three lists of the same.
#[test]
fn every_value_is_explained() {
    let chart = deploy().join("chart");
    let text = std::fs::read_to_string(chart.join("values.yaml")).unwrap();
    let values: Value = serde_saphyr::from_str(&text).unwrap();
    let schema = std::fs::read_to_string(chart.join("values.schema.json")).unwrap();
    let schema: Value = serde_json::from_str(&schema).unwrap();
    same_names("values", &values, &schema);
    let lines: Vec<&str> = text.lines().collect();
    for (above, line) in lines.iter().zip(&lines[1..]) {
        let is_value = line.contains(": ") && !line.trim_start().starts_with(['#', '-']);
        let inside = ["requests", "limits", "cpu", "memory"].iter().any(|name| line.trim_start().starts_with(name));
        assert!(!is_value || inside || above.trim_start().starts_with('#'), "no comment above {line:?}");
    }
}

/// Closed objects of the schema have the names of the values and no more.
fn same_names(at: &str, value: &Value, schema: &Value) {
    if schema["additionalProperties"] != false {
        return;
    }
    let properties = schema["properties"].as_object().expect("a closed object has properties");
    let not_ours = ["global", "enabled"];
    let known: BTreeSet<_> =
        properties.keys().filter(|name| at != "values" || !not_ours.contains(&name.as_str())).collect();
    assert_eq!(
        value.as_object().expect("an object in the schema is one in the values").keys().collect::<BTreeSet<_>>(),
        known,
        "{at}"
    );
    let required: BTreeSet<_> = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    assert_eq!(required, known.iter().map(|name| name.as_str()).collect(), "{at}");
    for (name, property) in properties {
        assert!(property["description"].as_str().is_some_and(|text| text.ends_with('.')), "{at}.{name}");
        same_names(&format!("{at}.{name}"), &value[name], property);
    }
}

#[test]
fn the_chart_has_the_version_of_the_programs() {
    let chart: Value =
        serde_saphyr::from_str(&std::fs::read_to_string(deploy().join("chart/Chart.yaml")).unwrap()).unwrap();
    assert_eq!(chart["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
}

/// Kind, namespace and name.
fn identity(object: &Value) -> (String, String, String) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let metadata = &object["metadata"];
    (text(&object["kind"]), text(&metadata["namespace"]), text(&metadata["name"]))
}

const CLUSTER_WIDE: [&str; 7] = [
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "DeviceClass",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
    "ValidatingWebhookConfiguration",
];

#[test]
fn every_object_is_where_its_release_is() {
    for object in render("blue", "gpus", &[]).unwrap() {
        let (kind, namespace, name) = identity(&object);
        if CLUSTER_WIDE.contains(&kind.as_str()) {
            assert_eq!(namespace, "", "{kind} {name}");
        } else {
            let of_events = name == "blue-kerf-controller-events";
            assert_eq!(namespace, if of_events { "default" } else { "gpus" }, "{kind} {name}");
        }
        assert_eq!(object["metadata"]["labels"]["app.kubernetes.io/instance"], "blue", "{kind} {name}");
    }
}

/// The one ConfigMap that the controller is told of is the one that it may read.
#[test]
fn the_layouts_may_be_anywhere() {
    let elsewhere = ["--set", "layouts.configMap=gpu-operator/nvidia-mig-config"];
    let objects = render("kerf", NAMESPACE, &elsewhere).unwrap();
    let role =
        objects.iter().find(|object| identity(object).2 == "kerf-controller-layouts" && object["kind"] == "Role");
    let role = role.unwrap();
    assert_eq!(role["metadata"]["namespace"], "gpu-operator");
    assert_eq!(role["rules"][0]["resourceNames"], serde_json::json!(["nvidia-mig-config"]));
    let deployment = objects.iter().find(|object| object["kind"] == "Deployment").unwrap();
    let arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"].as_array().unwrap();
    assert!(arguments.contains(&"--layouts-config-map=gpu-operator/nvidia-mig-config".into()), "{arguments:?}");
}

/// Two releases, each in a namespace of its own, have no object in common. In one namespace they would: their leases have
/// fixed names, and Helm shall refuse the second.
#[test]
fn two_releases_live_side_by_side() {
    let second = deploy().join("values/second-driver.yaml");
    let second = ["--values", second.to_str().unwrap()];
    let names = |release, namespace, arguments: &[&str]| {
        let objects = render(release, namespace, arguments).unwrap();
        let names: BTreeSet<_> = objects.iter().map(identity).collect();
        assert_eq!(names.len(), objects.len(), "nothing is there twice");
        names
    };
    let first = names("kerf", NAMESPACE, &[]);
    let apart = names("kerf-test", "kerf-test", &second);
    assert!(first.is_disjoint(&apart), "{:?}", first.intersection(&apart).collect::<Vec<_>>());
    let together = names("kerf-test", NAMESPACE, &second);
    let common: BTreeSet<&str> = first.intersection(&together).map(|(_, _, name)| name.as_str()).collect();
    assert_eq!(common, ["kerf-controller-leases", "kerf-kubelet-plugin-leases"].into());
}

/// What is asked about while no controller answers passes, or is refused where it is not the cluster's own.
#[test]
fn the_webhook_fails_as_it_is_told_to() {
    let webhooks = |arguments: &[&str]| {
        let objects = render("kerf", NAMESPACE, arguments).unwrap();
        let found = objects.into_iter().find(|object| object["kind"] == "ValidatingWebhookConfiguration");
        found.map(|configuration| configuration["webhooks"].as_array().unwrap().clone())
    };
    for webhook in webhooks(&[]).unwrap() {
        assert_eq!((&webhook["failurePolicy"], &webhook["namespaceSelector"]), (&"Ignore".into(), &Value::Null));
    }
    for webhook in webhooks(&["--set", "webhook.failurePolicy=Fail"]).unwrap() {
        let exempt = &webhook["namespaceSelector"]["matchExpressions"][0];
        assert_eq!((&webhook["failurePolicy"], &exempt["operator"]), (&"Fail".into(), &"NotIn".into()));
        assert_eq!(exempt["values"], serde_json::json!(["kube-system", NAMESPACE]));
    }
    assert_eq!(webhooks(&["--set", "webhook.enabled=false"]), None);
    let off = manifests("kerf", NAMESPACE, &["--set", "webhook.enabled=false"]).unwrap();
    assert!(!off.contains("webhook"), "nothing of it is left:\n{off}");
}

#[test]
fn classes_select_the_devices_of_the_driver() {
    let objects = render("kerf", NAMESPACE, &["--set", "driverName=gpu.example.com"]).unwrap();
    let classes = objects.iter().filter(|object| object["kind"] == "DeviceClass");
    let selectors: Vec<_> = classes
        .map(|class| (&class["metadata"]["name"], &class["spec"]["selectors"][0]["cel"]["expression"]))
        .map(|(name, expression)| (name.as_str().unwrap(), expression.as_str().unwrap()))
        .collect();
    assert_eq!(
        selectors,
        [
            (
                "gpu.nvidia.com",
                r#"device.driver == "gpu.example.com" && device.attributes["gpu.example.com"].type == "gpu""#
            ),
            (
                "mig.nvidia.com",
                r#"device.driver == "gpu.example.com" && device.attributes["gpu.example.com"].type == "mig""#
            ),
        ]
    );
}

/// What runs before a release goes must not run when the plain manifests are applied, and Helm leaves nothing of it.
#[test]
fn removal_is_a_hook_of_helm_alone() {
    let install = std::fs::read_to_string(deploy().join("install.yaml")).unwrap();
    assert!(!install.contains("kind: Job"), "it would remove at once what was just made");
    let objects = render("kerf", NAMESPACE, &[]).unwrap();
    let job = objects.iter().find(|object| object["kind"] == "Job").unwrap();
    let annotations = &job["metadata"]["annotations"];
    assert_eq!(annotations["helm.sh/hook"], "pre-delete");
    assert!(annotations["helm.sh/hook-delete-policy"].as_str().unwrap().contains("hook-succeeded"));
    let pod = &job["spec"]["template"]["spec"];
    assert_eq!(pod["serviceAccountName"], "kerf-controller");
    assert_eq!(pod["containers"][0]["args"].as_array().unwrap().last().unwrap(), "remove");
}

/// Plain pods ask for a whole GPU through the class, unless that is another's business.
#[test]
fn whole_gpus_are_an_extended_resource() {
    let resource = |arguments: &[&str]| -> Vec<Value> {
        let objects = render("kerf", NAMESPACE, arguments).unwrap();
        let classes = objects.into_iter().filter(|object| object["kind"] == "DeviceClass");
        classes.map(|class| class["spec"]["extendedResourceName"].clone()).collect()
    };
    assert_eq!(resource(&[]), [Value::from("nvidia.com/gpu"), Value::Null]);
    assert_eq!(resource(&["--set", "deviceClasses.gpuResource="]), [Value::Null, Value::Null]);
}

/// Removing a release removes no GpuNode and no GpuPolicy, and upgrading it upgrades the CRDs: those that the types describe.
#[test]
fn the_crds_are_upgraded_and_never_removed() {
    let objects = render("kerf", NAMESPACE, &[]).unwrap();
    let crds: Vec<Value> = objects.into_iter().filter(|object| object["kind"] == "CustomResourceDefinition").collect();
    let names: Vec<&str> = crds.iter().filter_map(|crd| crd["spec"]["names"]["plural"].as_str()).collect();
    assert_eq!(names, ["gpunodes", "gpupolicies"]);
    for mut crd in crds.clone() {
        assert_eq!(crd["metadata"]["annotations"]["helm.sh/resource-policy"], "keep");
        let file = format!("chart/files/crds/kerf.dev_{}.yaml", crd["spec"]["names"]["plural"].as_str().unwrap());
        let source = std::fs::read_to_string(deploy().join(file)).unwrap();
        let source: Value = serde_saphyr::from_str(&source).unwrap();
        crd["metadata"] = source["metadata"].clone();
        assert_eq!(plain(crd), plain(source));
    }
}

/// With whole numbers as integers: Helm writes 0.0 as 0.
fn plain(value: Value) -> Value {
    match value {
        Value::Array(values) => values.into_iter().map(plain).collect(),
        Value::Object(fields) => fields.into_iter().map(|(name, value)| (name, plain(value))).collect(),
        Value::Number(number) => match number.as_f64() {
            Some(float) if float.fract() == 0.0 => Value::from(float as i64),
            _ => Value::Number(number),
        },
        other => other,
    }
}

/// `deploy/install.yaml` is generated: `make install-yaml` writes it, a plain run compares.
#[test]
fn install_yaml_is_current() {
    let namespace = std::fs::read_to_string(deploy().join("namespace.yaml")).unwrap();
    let chart = manifests("kerf", NAMESPACE, &["--no-hooks", "--kube-version", KUBERNETES[0]]).unwrap();
    let wanted = format!("# Generated from deploy/chart: make install-yaml\n{namespace}{chart}");
    let path = deploy().join("install.yaml");
    if std::env::var_os("KERF_UPDATE").is_some() {
        std::fs::write(&path, &wanted).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == wanted, "{} is not what the chart renders: run make install-yaml", path.display());
}
