//! Pods without claims, as they are written for NVIDIA's device plugin, get slices that are cut for them.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use kerf_api::{GpuNode, names};
use kerf_e2e::{Claim, NodeFile, Request, World, deploy, eventually, scenario};
use kube::api::{DeleteParams, ListParams};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

/// The image that stands in for those of the manifests.
const IMAGE: &str = "localhost/kerf-e2e:1";

const PATIENCE: Duration = Duration::from_secs(60);

/// A class is kept for half a minute after its profile has gone.
const LONG: Duration = Duration::from_secs(90);

/// A container that asks for extended resources and does what its image does.
pub(crate) fn container(name: &str, resources: &[(&str, u32)]) -> Value {
    let limits: serde_json::Map<_, _> =
        resources.iter().map(|(resource, count)| ((*resource).to_owned(), json!(count.to_string()))).collect();
    json!({ "name": name, "image": IMAGE, "imagePullPolicy": "Never", "resources": { "limits": limits } })
}

/// A pod without claims.
pub(crate) fn pod(name: &str, containers: &[Value]) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
        "spec": { "terminationGracePeriodSeconds": 1, "restartPolicy": "Never", "containers": containers },
    })
}

/// The generated class of a profile, once it is there.
async fn class(world: &World, name: &str) -> Result<DeviceClass> {
    let api: Api<DeviceClass> = Api::all(world.client.clone());
    eventually(&format!("class {name} is made"), PATIENCE, async || Ok(api.get_opt(name).await?)).await
}

fn resource(class: &DeviceClass) -> Option<&str> {
    class.spec.as_ref()?.extended_resource_name.as_deref()
}

/// Whether plain pods are served; where the API server drops the name of a class, an Event on the class says so.
pub(crate) async fn served(world: &World) -> Result<bool> {
    let class = class(world, "mig-1g.10gb.nvidia.com").await?;
    if world.cluster.has_extended_resources()? {
        ensure!(resource(&class) == Some("nvidia.com/mig-1g.10gb"), "{class:?}");
        return Ok(true);
    }
    ensure!(resource(&class).is_none(), "{class:?}");
    let events: Api<Event> = Api::namespaced(world.client.clone(), "default");
    let fields =
        ListParams::default().fields("reason=ExtendedResourceDropped,involvedObject.name=mig-1g.10gb.nvidia.com");
    eventually("an Event says which gate is missing", PATIENCE, async || {
        let said = events.list(&fields).await?.items.into_iter().filter_map(|event| event.message);
        Ok(said.into_iter().any(|text| text.contains("DRAExtendedResource")).then_some(()))
    })
    .await?;
    // The class serves claims all the same.
    world.run_ready("by-claim", &Claim::of(&[Request::class("gpu", "mig-1g.10gb.nvidia.com")])).await?;
    Ok(false)
}

#[tokio::test]
async fn the_pods_of_the_device_plugins_world_run_on_slices_cut_for_them() {
    scenario("plain_pods", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        if !served(world).await? {
            return Ok(());
        }
        world.instances(0).await?;
        let sample = std::fs::read_to_string(deploy().join("samples/plain-pods.yaml"))?;
        let lines = sample.lines().map(|line| match line.find("image: ") {
            Some(at) => format!("{}image: {IMAGE}\n", &line[..at]),
            None => format!("{line}\n"),
        });
        let manifests: String = lines.collect();
        let namespace = "ai-inference";
        world.cluster.kubectl(&["create", "namespace", namespace])?;
        world.cluster.kubectl(&["label", "namespace", namespace, "kerf.dev/e2e=true"])?;
        let account = ["wait", "-n", namespace, "--for=create", "serviceaccount/default", "--timeout=120s"];
        world.cluster.kubectl(&account)?;
        let file = std::env::temp_dir().join(format!("kerf-plain-pods-{}.yaml", std::process::id()));
        std::fs::write(&file, manifests)?;
        world.cluster.kubectl(&["apply", "-f", file.to_str().context("the path is text")?])?;
        std::fs::remove_file(&file)?;
        for (pod, profile) in [("llm-inference-70b", "3g.40gb"), ("embedding-service", "1g.10gb")] {
            let wait = ["wait", "-n", namespace, "--for=condition=Ready", "--timeout=60s", &format!("pod/{pod}")];
            world.cluster.kubectl(&wait)?;
            let instances = world.simulation.instances()?;
            let live = instances.iter().find(|(_, instance)| instance.profile == profile).context("it is cut")?;
            let listing = world.cluster.kubectl(&["exec", "-n", namespace, pod, "--", "nvidia-smi", "-L"])?;
            ensure!(listing.matches("UUID: MIG-").count() == 1, "{pod}: {listing}");
            ensure!(listing.contains(&live.1.compute_instances[0].uuid), "{pod}: {listing}");
        }
        world.instances(2).await?;
        world.cluster.kubectl(&["delete", "pods", "-n", namespace, "--all", "--grace-period=1"])?;
        world.instances(0).await.map(drop)
    })
    .await;
}

#[tokio::test]
async fn whole_gpus_and_several_slices_go_to_the_containers_that_ask() {
    scenario("plain_shapes", NodeFile::two_h100_and_l40s(), async |world| {
        if !served(world).await? {
            return Ok(());
        }
        world.create(&pod("whole", &[container("main", &[("nvidia.com/gpu", 1)])])).await?;
        world.ready("whole").await?;
        ensure!(
            world.gpu_uuids("whole", "main")?.len() == 1 && world.mig_uuids("whole", "main")?.is_empty(),
            "one GPU"
        );
        let claims: Api<ResourceClaim> = Api::namespaced(world.client.clone(), world.namespace());
        let made = claims.list(&ListParams::default()).await?.items;
        let annotated = made
            .iter()
            .filter(|claim| claim.annotations().contains_key("resource.kubernetes.io/extended-resource-claim"));
        ensure!(annotated.count() == 1, "the scheduler has made the claim: {made:?}");
        world.delete("whole").await?;

        let two = [
            container("trainer", &[("nvidia.com/mig-2g.20gb", 1), ("nvidia.com/mig-1g.10gb", 2)]),
            container("server", &[("nvidia.com/mig-1g.10gb", 1)]),
        ];
        let mut both = pod("several", &two);
        let mut init = container("prepare", &[("nvidia.com/mig-1g.10gb.me", 1)]);
        init["command"] = json!(["nvidia-smi", "-L"]);
        both["spec"]["initContainers"] = json!([init]);
        world.create(&both).await?;
        world.ready("several").await?;
        let instances = world.instances(5).await?;
        let mut profiles: Vec<&str> = instances.iter().map(|(_, instance)| instance.profile.as_str()).collect();
        profiles.sort_unstable();
        ensure!(profiles == ["1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb+me", "2g.20gb"], "{profiles:?}");
        let log = world.logs("several", "prepare")?;
        ensure!(log.matches("MIG 1g.10gb").count() == 1, "the init container had a slice: {log}");
        let (trainer, server) = (world.mig_uuids("several", "trainer")?, world.mig_uuids("several", "server")?);
        let all: BTreeSet<&String> = trainer.iter().chain(&server).collect();
        ensure!((trainer.len(), server.len(), all.len()) == (3, 1, 4), "{trainer:?} {server:?}");
        world.delete("several").await?;
        world.instances(0).await.map(drop)
    })
    .await;
}

#[tokio::test]
async fn classes_come_and_go_with_profiles_and_an_admins_stays() {
    let mine = "mig-2g.20gb.nvidia.com";
    scenario("classes", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        let api: Api<DeviceClass> = Api::all(world.client.clone());
        let generated = ListParams::default().labels(&format!("{}=true", names::LABEL_GENERATED));
        class(world, mine).await?;
        // The name becomes an admin's: the controller's class goes, and is not made again over it.
        let admins = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": { "name": mine },
            "spec": { "selectors": [{ "cel": { "expression": "false" } }] },
        });
        world.cluster.kubectl(&["label", "deviceclass", mine, &format!("{}-", names::LABEL_GENERATED)])?;
        world.apply(&admins.to_string())?;
        let outcome = while_the_name_is_taken(world, &api, &generated, mine).await;
        api.delete(mine, &DeleteParams::default()).await?;
        outcome?;

        // Back with the plugin, and gone with kerf.
        world.kerf.keep_plugin_away(false).await?;
        world.kerf.registered().await?;
        for profile in ["mig-1g.10gb.nvidia.com", mine] {
            class(world, profile).await?;
        }
        world.published().await?;
        world.kerf.uninstall().await?;
        let left = api.list(&generated).await?.items;
        ensure!(left.is_empty(), "{left:?}");
        world.kerf.install(world.simulation.root()).await?;
        world.kerf.registered().await?;
        world.published().await.map(drop)
    })
    .await;
}

async fn while_the_name_is_taken(
    world: &mut World,
    api: &Api<DeviceClass>,
    generated: &ListParams,
    mine: &str,
) -> Result<()> {
    world.kerf.keep_plugin_away(true).await?;
    let gpu_nodes: Api<GpuNode> = Api::all(world.client.clone());
    let node = world.cluster.node()?.name.clone();
    eventually("the classes are gone with the last GpuNode", LONG, async || {
        // A plugin that is on its way out may write its GpuNode once more.
        drop(gpu_nodes.delete(&node, &DeleteParams::default()).await);
        Ok(api.list(generated).await?.items.is_empty().then_some(()))
    })
    .await?;
    let selectors = api.get(mine).await?.spec.and_then(|spec| spec.selectors).unwrap_or_default();
    let expression = selectors.first().and_then(|selector| selector.cel.as_ref()).map(|cel| cel.expression.as_str());
    ensure!(expression == Some("false"), "the admin's class is as it was: {selectors:?}");
    Ok(())
}
