//! What the tests of the driver that kerf replaces ask of it, with their time limits: a pod with a whole GPU is ready within
//! 8 s, one with a partition within 10 s (kubernetes-sigs/dra-driver-nvidia-gpu, `tests/bats`, and its Go suite in `test/e2e`).
//! Left out is what asks for time slices of another length, MPS or shares, which kerf does not have yet.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_api::MigMode;
use kerf_e2e::{Claim, NodeFile, Pod, Request, World, eventually, scenario, seconds_to_ready};
use kube::Api;
use kube::api::ListParams;
use serde_json::{Value, json};

const WHOLE: Duration = Duration::from_secs(8);
const PARTITION: Duration = Duration::from_secs(10);

/// For what the limits do not speak of: a Job's pods one after the other, many pods at a time, and how things end.
const LONGER: Duration = Duration::from_secs(60);

const ARCHITECTURE: &str = r#"device.attributes["gpu.nvidia.com"].architecture"#;

/// The pod template of a workload whose pods each make a claim from a template.
fn template(labels: &Value, claim_template: &str, command: Option<&str>, restart: &str) -> Value {
    let mut pod = Pod::from_template("any", claim_template).object();
    pod["metadata"] = json!({ "labels": labels });
    pod["spec"]["restartPolicy"] = json!(restart);
    if let Some(command) = command {
        pod["spec"]["containers"][0]["command"] = json!(["sh", "-c", command]);
    }
    json!({ "metadata": pod["metadata"], "spec": pod["spec"] })
}

/// Waits until a pod is ready, and fails if it took longer than that: by its own times, which no slow test stretches.
async fn ready_in_time(world: &World, pod: &str, limit: Duration) -> Result<()> {
    world.ready(pod).await?;
    let took = seconds_to_ready(&world.pods().get(pod).await?).context("it is ready")?;
    ensure!(took <= limit.as_secs() as i64, "pod {pod} took {took} s");
    Ok(())
}

/// Waits until a pod's log lists what it should: a container that runs may not have come that far.
async fn listed(world: &World, pod: &str, wanted: impl Fn(&str) -> bool) -> Result<()> {
    eventually(&format!("pod {pod} lists its devices"), LONGER, async || {
        let log = world.logs(pod, "main")?;
        ensure!(wanted(&log), "{log}");
        Ok(Some(()))
    })
    .await
}

async fn no_claim_is_left(world: &World) -> Result<()> {
    let claims: Api<ResourceClaim> = Api::namespaced(world.client.clone(), world.namespace());
    eventually("no claim is left", LONGER, async || {
        let left = claims.list(&ListParams::default()).await?.items;
        ensure!(left.is_empty(), "{:?}", left.iter().map(|claim| &claim.metadata.name).collect::<Vec<_>>());
        Ok(Some(()))
    })
    .await
}

#[tokio::test]
async fn whole_gpus_are_ready_within_8_seconds() {
    scenario("peer_whole", NodeFile::new().gpus("h100-80gb", 2).gpus("l40s", 1), async |world| {
        let any = Claim::of(&[Request::gpu("gpu")]);
        // Two pods with a GPU each.
        world.create(&any.template("gpu")).await?;
        for pod in ["one", "two"] {
            world.create(&Pod::from_template(pod, "gpu").object()).await?;
            ready_in_time(world, pod, WHOLE).await?;
            listed(world, pod, |log| log.matches("UUID: GPU-").count() == 1).await?;
        }
        let (one, two) = (world.gpu_uuids("one", "main")?, world.gpu_uuids("two", "main")?);
        ensure!(one != two && !world.allocated("one").await?.is_empty(), "{one:?} {two:?}");
        world.delete("one").await?;
        world.delete("two").await?;
        // One pod, two containers, one GPU.
        let shared = Pod::from_template("shared", "gpu").container("left", "gpu").container("right", "gpu");
        world.create(&shared.object()).await?;
        ready_in_time(world, "shared", WHOLE).await?;
        ensure!(world.gpu_uuids("shared", "left")? == world.gpu_uuids("shared", "right")?, "the same GPU in both");
        world.delete("shared").await?;
        // Two claims in one pod.
        let mut both = Pod::from_template("both", "gpu").object();
        let claims = ["gpu", "other"].map(|name| json!({ "name": name, "resourceClaimTemplateName": "gpu" }));
        both["spec"]["resourceClaims"] = json!(claims);
        both["spec"]["containers"][0]["resources"]["claims"] = json!([{ "name": "gpu" }, { "name": "other" }]);
        world.create(&both).await?;
        ready_in_time(world, "both", WHOLE).await?;
        ensure!(world.gpu_uuids("both", "main")?.len() == 2, "two GPUs");
        world.delete("both").await?;
        no_claim_is_left(world).await?;
        let whole = world.devices().await?.into_iter().filter(|device| !device.contains("-mig-")).count();
        ensure!(whole == world.simulation.state()?.len(), "as many whole GPUs as the node has");
        chosen_by_selectors(world).await?;
        come_and_go(world).await
    })
    .await;
}

async fn chosen_by_selectors(world: &World) -> Result<()> {
    let memory = r#"device.capacity["gpu.nvidia.com"].memory"#;
    for (name, expression) in [
        ("architecture", format!(r#"{ARCHITECTURE} == "Hopper""#)),
        ("product", r#"device.attributes["gpu.nvidia.com"].productName.lowerAscii().matches("^.*h100.*$")"#.to_owned()),
        ("driver", r#"device.attributes["gpu.nvidia.com"].driverVersion.compareTo(semver("500.0.0")) >= 0"#.to_owned()),
        ("memory", format!(r#"{memory}.compareTo(quantity("60Gi")) > 0"#)),
    ] {
        world.run(name, &Claim::of(&[Request::gpu("gpu").cel(&expression)])).await?;
        ready_in_time(world, name, WHOLE).await?;
        ensure!(world.gpu_uuids(name, "main")?.len() == 1, "{name}");
        world.delete(name).await?;
    }
    world.run("nothing", &Claim::of(&[Request::gpu("gpu").cel(&format!(r#"{ARCHITECTURE} == "None""#))])).await?;
    world.waits("nothing").await?;
    world.delete("nothing").await
}

async fn come_and_go(world: &World) -> Result<()> {
    let devices = world.devices().await?;
    world.create(&Claim::of(&[Request::gpu("gpu")]).template("churn")).await?;
    for round in 0..10 {
        let name = format!("churn-{round}");
        world.create(&Pod::from_template(&name, "churn").object()).await?;
        ready_in_time(world, &name, WHOLE).await?;
        world.delete(&name).await?;
    }
    no_claim_is_left(world).await?;
    ensure!(world.devices().await? == devices, "what is offered is what it was");
    Ok(())
}

#[tokio::test]
async fn workloads_make_claims_from_templates() {
    scenario("peer_workloads", NodeFile::new().gpus("h100-80gb", 2), async |world| {
        world.create(&Claim::of(&[Request::gpu("gpu")]).template("gpu")).await?;
        let labels = json!({ "app": "job" });
        let job = json!({
            "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": "job" },
            "spec": { "completions": 2, "template": template(&labels, "gpu", Some("nvidia-smi -L"), "Never") },
        });
        world.apply(&job.to_string())?;
        let jobs: Api<Job> = Api::namespaced(world.client.clone(), world.namespace());
        let status = eventually("the Job is complete", LONGER, async || {
            Ok(jobs.get("job").await?.status.filter(|status| status.succeeded == Some(2)))
        })
        .await?;
        ensure!(status.failed.unwrap_or_default() == 0, "{status:?}");
        let namespace = world.namespace();
        let log = world.cluster.kubectl(&["logs", "-n", namespace, "-l", "app=job", "--tail=-1"])?;
        ensure!(log.matches("UUID: GPU-").count() == 2, "{log}");
        world.cluster.kubectl(&["delete", "-n", namespace, "job", "job"])?;
        no_claim_is_left(world).await?;

        let labels = json!({ "app": "server" });
        let deployment = json!({
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": "server" },
            "spec": {
                "replicas": 2, "selector": { "matchLabels": labels },
                "template": template(&labels, "gpu", None, "Always"),
            },
        });
        world.apply(&deployment.to_string())?;
        let deployments: Api<Deployment> = Api::namespaced(world.client.clone(), namespace);
        eventually("both replicas are available", LONGER, async || {
            let status = deployments.get("server").await?.status.unwrap_or_default();
            Ok((status.available_replicas == Some(2)).then_some(()))
        })
        .await?;
        let mut seen = BTreeSet::new();
        for pod in world.pods().list(&ListParams::default().labels("app=server")).await? {
            let name = pod.metadata.name.context("a pod has a name")?;
            seen.extend(world.gpu_uuids(&name, "main")?);
        }
        ensure!(seen.len() == 2, "{seen:?}");
        world.cluster.kubectl(&["delete", "-n", namespace, "deployment", "server"])?;
        no_claim_is_left(world).await
    })
    .await;
}

#[tokio::test]
async fn many_pods_share_a_claim() {
    const PODS: usize = 15;
    scenario("peer_shared", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        world.create(&Claim::of(&[Request::gpu("gpu")]).object("shared")).await?;
        for round in 0..2 {
            let names: Vec<String> = (0..PODS).map(|pod| format!("pod-{round}-{pod}")).collect();
            for name in &names {
                world.create(&Pod::with_claim(name, "shared").object()).await?;
            }
            let mut seen = BTreeSet::new();
            for name in &names {
                world.ready(name).await?;
                seen.extend(world.gpu_uuids(name, "main")?);
            }
            ensure!(seen.len() == 1, "{seen:?}");
            let all = ["delete", "pods", "-n", world.namespace(), "--all", "--timeout=240s"];
            world.cluster.kubectl(&all)?;
        }
        Ok(())
    })
    .await;
}

/// MIG mode of all GPUs of the node, as its plugin reports it.
async fn mig_is_off(world: &World) -> Result<()> {
    eventually("MIG mode is off on every GPU", LONGER, async || {
        let gpus = world.gpu_node().await?.status.unwrap_or_default().gpus;
        let mut modes = gpus.iter().filter_map(|gpu| gpu.mig.as_ref()).map(|mig| mig.current);
        Ok(modes.all(|mode| mode == MigMode::Disabled).then_some(()))
    })
    .await
}

#[tokio::test]
async fn partitions_are_ready_within_10_seconds() {
    scenario("peer_partitions", NodeFile::new().gpus("h100-80gb", 2), async |world| {
        if !world.cluster.has_partitions()? {
            return Ok(());
        }
        mig_is_off(world).await?;
        world.run("one", &Claim::of(&[Request::class("gpu", "mig.nvidia.com")])).await?;
        ready_in_time(world, "one", PARTITION).await?;
        listed(world, "one", |log| log.contains("UUID: GPU-") && log.contains("UUID: MIG-")).await?;
        world.delete("one").await?;
        mig_is_off(world).await?;

        let processors = r#"device.capacity["gpu.nvidia.com"].multiprocessors.compareTo(quantity"#;
        let small = Request::class("small", "mig.nvidia.com").cel(&format!(r#"{processors}("30")) < 0"#));
        let large = Request::class("large", "mig.nvidia.com").cel(&format!(r#"{processors}("50")) > 0"#));
        world.create(&Claim::of(&[small, large]).template("two")).await?;
        let pod = Pod::from_template("two", "two").container("small", "small").container("large", "large");
        world.create(&pod.object()).await?;
        ready_in_time(world, "two", PARTITION).await?;
        let (small, large) = (world.mig_uuids("two", "small")?, world.mig_uuids("two", "large")?);
        ensure!(small.len() == 1 && large.len() == 1 && small != large, "{small:?} {large:?}");
        world.delete("two").await?;
        mig_is_off(world).await?;

        let config = json!({
            "apiVersion": "resource.nvidia.com/v1beta1", "kind": "MigDeviceConfig",
            "sharing": { "strategy": "TimeSlicing" },
        });
        let claim = Claim::of(&[Request::mig("gpu", "1g.10gb")]).config(&config);
        world.run("slicing", &claim).await?;
        ready_in_time(world, "slicing", PARTITION).await?;
        ensure!(world.mig_uuids("slicing", "main")?.len() == 1, "one partition");
        world.delete("slicing").await?;
        mig_is_off(world).await
    })
    .await;
}
