//! Who writes what kerf would refuse is told at once, with the field and a way out; who slips through is told the same by
//! the node.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use kerf_api::GpuPolicy;
use kerf_e2e::{Claim, NodeFile, Part, Request, World, eventually, scenario};
use kube::Api;
use kube::api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);
const WEBHOOK: &str = "kerf-webhook";
const UUID: &str = "1f8ab1bb-a5cd-5cb8-6a06-2a2cf9c5e1a1";

fn document(kind: &str, sharing: Value) -> Value {
    let mut document = json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind});
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

/// Every field of every kind, wrong in its own way, and what is said of it behind the path of the parameters.
fn mistakes() -> Vec<(Value, String)> {
    let mps = |settings: Value| json!({"strategy": "MPS", "mpsConfig": settings});
    let slicing = |settings: Value| json!({"strategy": "TimeSlicing", "timeSlicingConfig": settings});
    let percent = "use a whole number from 0 to 100";
    let mut mistakes = vec![
        (json!({"kind": "GpuConfig"}), "apiVersion: missing; use resource.nvidia.com/v1beta1"),
        (json!({"apiVersion": "resource.nvidia.com/v1beta1"}), "kind: missing; use GpuConfig or MigDeviceConfig"),
        (
            document("GpuConfiguration", json!(null)),
            r#"kind: "GpuConfiguration" is not known; use GpuConfig or MigDeviceConfig"#,
        ),
        (
            document("VfioDeviceConfig", json!(null)),
            r#"kind: "VfioDeviceConfig" is not served: kerf gives GPUs to containers"#,
        ),
        (
            document("ComputeDomainChannelConfig", json!(null)),
            r#"kind: "ComputeDomainChannelConfig" is not served: compute domains"#,
        ),
        (
            json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharring": {}}),
            "sharring: unknown field; did you mean sharing?",
        ),
        (gpu(json!([])), "sharing: must be an object, and is a list"),
        (gpu(json!({})), "sharing.strategy: missing; use TimeSlicing"),
        (gpu(json!({"strategy": "Foo"})), r#"sharing.strategy: "Foo" is not known; use TimeSlicing"#),
        (
            gpu(json!({"strategy": "MPS"})),
            "sharing.strategy: MPS is not in this version of kerf; use TimeSlicing, or leave sharing out",
        ),
        (
            gpu(json!({"strategy": "TimeSlicing", "mpsConfig": {}})),
            "sharing.mpsConfig: settings of MPS, and the strategy is TimeSlicing; remove either",
        ),
        (
            gpu(slicing(json!({"intervall": "Default"}))),
            "sharing.timeSlicingConfig.intervall: unknown field; did you mean interval?",
        ),
        (
            gpu(slicing(json!({"interval": "Eternal"}))),
            r#"sharing.timeSlicingConfig.interval: "Eternal" is not known; use Default"#,
        ),
        (
            gpu(slicing(json!({"interval": "Long"}))),
            "sharing.timeSlicingConfig.interval: this version of kerf leaves time slices as they are; use Default",
        ),
        (mig(slicing(json!({}))), "sharing.timeSlicingConfig: MIG devices have no time slices to set; remove it"),
        (
            mig(json!({"strategy": "MPS"})),
            "sharing.strategy: MPS is not in this version of kerf; use TimeSlicing, or leave sharing out",
        ),
        (mig(json!({"strategy": 1})), "sharing.strategy: must be a word, and is a number; use TimeSlicing"),
    ]
    .into_iter()
    .map(|(parameters, line)| (parameters, line.to_owned()))
    .collect::<Vec<_>>();
    for kind in [gpu, mig] {
        for (settings, line) in [
            (json!({"threads": 1}), "threads: unknown field; known here: defaultActiveThreadPercentage, ".to_owned()),
            (
                json!({"defaultActiveThreadPercentage": 101}),
                format!("defaultActiveThreadPercentage: 101 is no percentage; {percent}"),
            ),
            (
                json!({"defaultActiveThreadPercentage": "50"}),
                format!("defaultActiveThreadPercentage: must be a number, and is a text; {percent}"),
            ),
            (
                json!({"defaultPinnedDeviceMemoryLimit": "lots"}),
                r#"defaultPinnedDeviceMemoryLimit: "lots" is no quantity; write it as Kubernetes does, such as 4Gi"#
                    .to_owned(),
            ),
            (
                json!({"defaultPinnedDeviceMemoryLimit": "4Ki"}),
                r#"defaultPinnedDeviceMemoryLimit: "4Ki" is less than 1Mi; limits are counted in MiB"#.to_owned(),
            ),
            (
                json!({"defaultPerDevicePinnedMemoryLimit": {"first": "4Gi"}}),
                r#"defaultPerDevicePinnedMemoryLimit.first: "first" names no device; use a UUID"#.to_owned(),
            ),
            (
                json!({"defaultPerDevicePinnedMemoryLimit": {"0": "-1"}}),
                r#"defaultPerDevicePinnedMemoryLimit["0"]: "-1" is less than 1Mi"#.to_owned(),
            ),
            (json!({"multiUser": "yes"}), "multiUser: must be true or false, and is a text".to_owned()),
        ] {
            mistakes.push((kind(mps(settings)), format!("sharing.mpsConfig.{line}")));
        }
    }
    let other = json!({"defaultPerDevicePinnedMemoryLimit": {format!("MIG-{UUID}"): "4Gi"}});
    let line = format!(
        r#"sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit["MIG-{UUID}"]: "MIG-{UUID}" is none of the whole GPUs"#
    );
    mistakes.push((gpu(mps(other)), line));
    mistakes
}

fn claim_with(name: &str, parameters: &Value) -> Value {
    Claim::of(&[Request::gpu("gpu")]).config(parameters).object(name)
}

/// Every field of a GpuPolicy, wrong in its own way, and what kerf says of it.
fn policy_mistakes() -> Vec<(Value, &'static str)> {
    let selecting = |expression: Value| json!({"offer": "Nothing", "nodeSelector": {"matchExpressions": [expression]}});
    let of_gpus = |gpus: Value| json!({"offer": "Nothing", "gpus": gpus});
    let layout = |layout: Value| json!({"offer": "Layout", "layout": layout});
    vec![
        (
            selecting(json!({"key": "", "operator": "Exists"})),
            "spec.nodeSelector.matchExpressions[0].key: it is empty; give the key of a node label",
        ),
        (
            selecting(json!({"key": "a", "operator": "Exist"})),
            r#"spec.nodeSelector.matchExpressions[0].operator: "Exist" is not known; did you mean Exists?"#,
        ),
        (
            selecting(json!({"key": "a", "operator": "Exists", "values": ["b"]})),
            "spec.nodeSelector.matchExpressions[0].values: operator Exists takes no values; use In, or leave them out",
        ),
        (of_gpus(json!({"products": [""]})), r#"spec.gpus.products[0]: it is empty; "*" is every product"#),
        (
            of_gpus(json!({"uuids": ["MIG-1"]})),
            r#"spec.gpus.uuids[0]: "MIG-1" does not begin with GPU-; kubectl get gpunode NODE -o yaml shows what there is"#,
        ),
        (
            of_gpus(json!({"names": ["3b:00.0"]})),
            r#"spec.gpus.names[0]: "3b:00.0" does not begin with gpu-; kubectl get gpunode NODE -o yaml shows what there is"#,
        ),
        (
            json!({"offer": "Dynamic", "profiles": ["1g.10GB"]}),
            r#"spec.profiles[0]: "1g.10GB" is no MIG profile; a profile has a name such as 1g.10gb"#,
        ),
        (
            json!({"offer": "WholeOnly", "whole": true}),
            "spec.whole: it has a meaning with offer: Dynamic only; leave it out",
        ),
        (json!({"offer": "Layout"}), "spec.layout: offer: Layout needs one; give layout.name or layout.migDevices"),
        (layout(json!({"name": ""})), "spec.layout.name: it is empty; give a name of the layout file"),
        (
            layout(json!({"migDevices": {"1c.2g.20gb": 1}})),
            r#"spec.layout.migDevices["1c.2g.20gb"]: "1c.2g.20gb" names a compute instance"#,
        ),
    ]
}

/// Fields of a GpuPolicy whose types are in its CRD, and what the API server says of them by itself.
fn policy_types() -> Vec<(Value, &'static str)> {
    vec![
        (json!({}), "spec.offer: Required value"),
        (json!({"offer": "Half"}), r#"spec.offer: Unsupported value: "Half": supported values: "Dynamic", "Layout""#),
        (json!({"offer": "Nothing", "priority": "high"}), "spec.priority: Invalid value"),
        (
            json!({"offer": "Nothing", "foreignInstances": "Kill"}),
            r#"spec.foreignInstances: Unsupported value: "Kill""#,
        ),
        (json!({"offer": "Nothing", "gpus": {"indices": [-1]}}), "spec.gpus.indices[0]: Invalid value"),
    ]
}

/// Creates a GpuPolicy as it is written, whether it can be read or not.
async fn create_policy(world: &World, name: &str, spec: &Value) -> Result<kube::Result<DynamicObject>> {
    let kind = ApiResource::erase::<GpuPolicy>(&());
    let policy: DynamicObject = serde_json::from_value(json!({
        "apiVersion": "kerf.dev/v1alpha1", "kind": "GpuPolicy", "spec": spec,
        "metadata": {"name": name, "labels": {"kerf.dev/e2e": "true"}},
    }))?;
    Ok(Api::all_with(world.client.clone(), &kind).create(&PostParams::default(), &policy).await)
}

/// The message with which the API server refuses to create an object.
fn refusal<T: std::fmt::Debug>(outcome: kube::Result<T>) -> Result<String> {
    match outcome {
        Err(kube::Error::Api(status)) if status.code == 422 => Ok(status.message),
        other => bail!("not refused for what it says: {other:?}"),
    }
}

/// Waits until the API server asks kerf.
async fn in_force(world: &World) -> Result<()> {
    let claim: ResourceClaim = serde_json::from_value(claim_with("probe", &gpu(json!({"strategy": "Foo"}))))?;
    let api: Api<ResourceClaim> = Api::namespaced(world.client.clone(), world.namespace());
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    eventually("the webhook is asked", PATIENCE, async || Ok(Some(refusal(api.create(&dry_run, &claim).await)?)))
        .await?;
    Ok(())
}

/// The same, and no answer comes too late: by default a webhook that takes more than 5 s is passed over.
async fn in_force_without_haste(world: &World) -> Result<()> {
    world.kerf.rolled_out(Part::Controller).await?;
    world.kerf.upgrade(&["--set", "webhook.timeoutSeconds=30"])?;
    in_force(world).await
}

/// Waits until what kerf would refuse passes.
async fn out_of_force(world: &World) -> Result<()> {
    let claim: ResourceClaim = serde_json::from_value(claim_with("probe", &gpu(json!({"strategy": "Foo"}))))?;
    let api: Api<ResourceClaim> = Api::namespaced(world.client.clone(), world.namespace());
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    eventually("the webhook is not asked", PATIENCE, async || Ok(Some(api.create(&dry_run, &claim).await?))).await?;
    Ok(())
}

async fn bundle(world: &World) -> Result<String> {
    let api: Api<ValidatingWebhookConfiguration> = Api::all(world.client.clone());
    let webhooks = api.get(WEBHOOK).await?.webhooks.unwrap_or_default();
    let bundles = webhooks.into_iter().map(|webhook| webhook.client_config.ca_bundle.unwrap_or_default().0);
    let bundles: Vec<_> = bundles.map(String::from_utf8).collect::<std::result::Result<_, _>>()?;
    // In any order: the controllers fill up what was wiped as they see it.
    let certificates = |bundle: &String| {
        bundle.split_inclusive("-----END CERTIFICATE-----\n").map(str::to_owned).collect::<BTreeSet<_>>()
    };
    ensure!(
        bundles.windows(2).all(|pair| certificates(&pair[0]) == certificates(&pair[1])),
        "one for all: {bundles:?}"
    );
    bundles.into_iter().next().context("there is a webhook")
}

#[tokio::test]
async fn each_mistake_is_refused_at_its_creation() {
    scenario("refused_at_creation", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        in_force_without_haste(world).await?;
        let namespace = world.namespace();
        let claims: Api<ResourceClaim> = Api::namespaced(world.client.clone(), namespace);
        for (number, (parameters, line)) in mistakes().into_iter().enumerate() {
            let claim: ResourceClaim = serde_json::from_value(claim_with(&format!("wrong-{number}"), &parameters))?;
            let message = refusal(claims.create(&PostParams::default(), &claim).await)
                .with_context(|| format!("{parameters}: {line}"))?;
            let denied = r#"admission webhook "resourceclaims.kerf.dev" denied the request: "#;
            let line = format!("spec.devices.config[0].opaque.parameters.{line}");
            ensure!(message.starts_with(denied) && message.contains(&line), "{line}\n{message}");
        }

        // All mistakes at once, a line each.
        let many = json!({"kind": "GpuConfig", "x": 1, "sharing": {"strategy": "Foo"}});
        let claim: ResourceClaim = serde_json::from_value(claim_with("many", &many))?;
        let message = refusal(claims.create(&PostParams::default(), &claim).await)?;
        ensure!(message.lines().count() == 3, "{message}");

        // Where else a configuration can be written.
        let wrong = gpu(json!({"strategy": "Foo"}));
        let template = Claim::of(&[Request::gpu("gpu")]).config(&wrong).template("wrong");
        let error = world.create(&template).await.err().context("a template is refused")?.to_string();
        let line = r#"parameters.sharing.strategy: "Foo" is not known; use TimeSlicing"#;
        ensure!(error.contains(&format!("spec.spec.devices.config[0].opaque.{line}")), "{error}");
        let classes: Api<DeviceClass> = Api::all(world.client.clone());
        let class = |parameters: &Value| -> Result<DeviceClass> {
            Ok(serde_json::from_value(json!({
                "metadata": {"name": "e2e-webhook"},
                "spec": {"config": [{"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}]},
            }))?)
        };
        let message = refusal(classes.create(&PostParams::default(), &class(&wrong)?).await)?;
        ensure!(message.contains(&format!("spec.config[0].opaque.{line}")), "{message}");
        let right = mig(json!({"strategy": "TimeSlicing"}));
        classes.create(&PostParams::default(), &class(&right)?).await?;
        let change = json!({"spec": {"config": [{"opaque": {"driver": "gpu.nvidia.com", "parameters": wrong}}]}});
        let change = Patch::Merge(&change);
        let message = refusal(classes.patch("e2e-webhook", &PatchParams::default(), &change).await)?;
        ensure!(message.contains(line), "a class can be changed, and is checked again: {message}");
        classes.delete("e2e-webhook", &DeleteParams::default()).await?;

        // What is right, and what is another driver's.
        for (name, parameters) in
            [("plain", gpu(json!(null))), ("slicing", gpu(json!({"strategy": "TimeSlicing"}))), ("mig", right)]
        {
            world.create(&claim_with(name, &parameters)).await.with_context(|| name.to_owned())?;
        }
        let mut foreign = claim_with("foreign", &json!({"any": "thing"}));
        foreign["spec"]["devices"]["config"][0]["opaque"]["driver"] = json!("other.example.com");
        world.create(&foreign).await?;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn each_mistake_in_a_policy_is_refused_at_its_creation() {
    scenario("policy_refused", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        in_force_without_haste(world).await?;
        for (spec, line) in policy_mistakes() {
            let message = refusal(create_policy(world, "wrong", &spec).await?).with_context(|| spec.to_string())?;
            let denied = r#"admission webhook "gpupolicies.kerf.dev" denied the request: "#;
            ensure!(message.starts_with(denied) && message.contains(line), "{line}\n{message}");
        }
        for (spec, line) in policy_types() {
            let message = refusal(create_policy(world, "wrong", &spec).await?).with_context(|| spec.to_string())?;
            ensure!(message.contains(line), "{line}\n{message}");
        }
        let fine = json!({"offer": "WholeOnly", "gpus": {"indices": [7]}});
        create_policy(world, "right", &fine).await?.map(drop).context("what is right passes")
    })
    .await;
}

/// Also what is left of a time without the webhook can be changed and removed when it is back.
#[tokio::test]
async fn without_the_webhook_the_node_says_the_same() {
    scenario("webhook_off", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        in_force(world).await?;
        world.kerf.expect_end(Part::Controller).await?;
        world.kerf.upgrade(&["--set", "webhook.enabled=false"])?;
        out_of_force(world).await?;
        world.kerf.rolled_out(Part::Controller).await?;
        world.published().await?;
        // As many as the GPU has slices; none gets as far as taking one.
        let of_mig = mistakes().into_iter().filter(|(parameters, _)| parameters["kind"] == "MigDeviceConfig");
        let wrong: Vec<_> = (0..7).map(|number| format!("wrong-{number}")).zip(of_mig).collect();
        for (name, (parameters, _)) in &wrong {
            world.run(name, &Claim::of(&[Request::mig("gpu", "1g.10gb")]).config(parameters)).await?;
        }
        for (name, (_, line)) in &wrong {
            let message = world.event(name, "FailedPrepareDynamicResources").await?;
            let told = "the configuration of the claim cannot be used: spec.devices.config[0].opaque.parameters.";
            let told = format!("{told}{line}");
            ensure!(message.contains(&told), "kubectl describe pod shows the same words:\n{told}\n{message}");
        }
        for (name, _) in &wrong {
            world.delete(name).await?;
        }

        let policies: Api<GpuPolicy> = Api::all(world.client.clone());
        for (number, (spec, line)) in policy_mistakes().into_iter().enumerate() {
            let name = format!("wrong-{number}");
            create_policy(world, &name, &spec).await?.with_context(|| spec.to_string())?;
            let told = eventually("the policy's status says what is wrong", PATIENCE, async || {
                let conditions = policies.get(&name).await?.status.unwrap_or_default().conditions;
                let refused = conditions.into_iter().find(|one| one.type_ == "Accepted" && one.status == "False");
                Ok(refused.map(|refused| (refused.reason, refused.message)))
            })
            .await?;
            ensure!(told.0 == "Invalid" && told.1.contains(line), "{line}\n{told:?}");
            policies.delete(&name, &DeleteParams::default()).await?;
        }

        world.create(&claim_with("old", &gpu(json!({"strategy": "Foo"})))).await?;
        world.kerf.expect_end(Part::Controller).await?;
        world.kerf.upgrade(&[])?;
        in_force(world).await?;
        let claims: Api<ResourceClaim> = Api::namespaced(world.client.clone(), world.namespace());
        let label = Patch::Merge(json!({"metadata": {"labels": {"kept": "yes"}}}));
        claims.patch("old", &PatchParams::default(), &label).await?;
        claims.delete("old", &DeleteParams::default()).await?;
        world.kerf.rolled_out(Part::Controller).await
    })
    .await;
}

#[tokio::test]
async fn a_controller_that_is_away_keeps_nobody_from_claiming() {
    scenario("webhook_away", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        in_force(world).await?;
        world.kerf.kill(Part::Controller).await?;
        let right = mig(json!({"strategy": "TimeSlicing"}));
        world.run_ready("claims", &Claim::of(&[Request::mig("gpu", "1g.10gb")]).config(&right)).await?;
        in_force(world).await?;
        world.delete("claims").await
    })
    .await;
}

#[tokio::test]
async fn who_is_trusted_survives_what_becomes_of_the_configuration() {
    scenario("webhook_bundle", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        in_force(world).await?;
        world.kerf.rolled_out(Part::Controller).await?;
        let before = bundle(world).await?;
        ensure!(before.matches("BEGIN CERTIFICATE").count() >= 2, "each of two replicas has its own: {before}");

        // Helm changes the configuration, and not the pods.
        let change = ["--set", "webhook.timeoutSeconds=7"];
        world.kerf.upgrade(&change)?;
        ensure!(bundle(world).await? == before, "Helm leaves the certificates alone");
        in_force(world).await?;

        // Helm replaces the pods: what was trusted stays, what is new is added.
        world.kerf.expect_end(Part::Controller).await?;
        world.kerf.update("2")?;
        world.kerf.rolled_out(Part::Controller).await?;
        let after = bundle(world).await?;
        ensure!(after.starts_with(before.trim_end()) && after.len() > before.len(), "{before}\n{after}");
        in_force(world).await?;

        // Somebody wipes it.
        let api: Api<ValidatingWebhookConfiguration> = Api::all(world.client.clone());
        let webhooks = api.get(WEBHOOK).await?.webhooks.unwrap_or_default().len();
        for place in 0..webhooks {
            let path = format!("/webhooks/{place}/clientConfig/caBundle");
            let wipe = serde_json::from_value(json!([{"op": "remove", "path": path}]))?;
            api.patch(WEBHOOK, &PatchParams::default(), &Patch::<()>::Json(wipe)).await?;
        }
        eventually("it is filled again", PATIENCE, async || {
            Ok((bundle(world).await?.matches("BEGIN CERTIFICATE").count() == 2).then_some(()))
        })
        .await?;
        in_force(world).await
    })
    .await;
}
