//! The ways of `docs/moving`, from NVIDIA's genuine programs to kerf and back, step by step; and the labels of GPU feature discovery
//! beside kerf's.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::jiff::Timestamp;
use kerf_api::names;
use kerf_e2e::{Claim, Neighbours, NodeFile, Part, Program, Request, World, deploy, eventually, neighbour, scenario};
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};

use crate::extended;
use crate::policy;
use crate::restarts;

const PLUGIN: &str = "device-plugin/nvidia-device-plugin";
const DISCOVERY: &str = "device-plugin/gpu-feature-discovery";
const PARTED: &str = "mig-parted/nvidia-mig-parted";
const MANAGER: &str = "mig-parted/nvidia-mig-manager";

/// The label that brings kerf's plugin to a node, and how the chart is told so.
const MOVED: &str = "example.com/kerf";
const NODES: &str = r"kubeletPlugin.nodeSelector.example\.com/kerf=yes";

/// What has become of the layout that the node's label asks for.
const STATE: &str = names::LABEL_MIG_CONFIG_STATE;

/// A resource that nobody has, for asking the kubelet something.
const SEEN: &str = "example.com/seen";

const PATIENCE: Duration = Duration::from_secs(90);

#[tokio::test]
async fn from_the_device_plugin_to_kerf_and_back() {
    scenario("from_device_plugin", NodeFile::new().gpus("h100-80gb", 1).gpus("l40s", 1), async |world| {
        // A scheduler of 1.34 takes an allocatable of 0 for a device plugin's (pkg/scheduler/framework/plugins/dynamicresources).
        if !extended::served(world).await? || world.cluster.minor()? < 35 {
            return Ok(());
        }
        let outcome = device_plugin(world).await;
        let tidied = tidy(world, &[MOVED]);
        // Who has not gone the way to its end may leave it.
        let forgotten = match &outcome {
            Ok(()) => Ok(()),
            Err(_) => remove_checkpoint(world).and(restarts::restart_kubelet(world).await),
        };
        outcome.and(tidied).and(forgotten)
    })
    .await;
}

/// Kubernetes up to 1.37 keeps on the node what the device plugin gave out last, until another of its devices is asked for. Five
/// minutes after the plugin is gone it starts no container that asks for the same resource of kerf ("endpoint not found in cache
/// for a registered resource", pkg/kubelet/cm/devicemanager). No pod has a device of it here, so the file tells of none.
///
/// A kubelet that starts without it takes what the Node's status has as capacity for what is there (pkg/kubelet/nodestatus,
/// `MachineInfo`), and pods would be bound to devices that nobody gives out.
async fn kubelet_forgets(world: &World, resources: &[&str]) -> Result<()> {
    remove_checkpoint(world)?;
    world.cluster.tool(&["restart", "kubelet"])?;
    let capacity = |values: &BTreeMap<&str, Option<&str>>| -> Result<()> {
        let patch = json!({ "status": { "capacity": values } }).to_string();
        kubectl(world, &["patch", "node", &node(world)?, "--subresource=status", "--type=merge", "-p", &patch])
            .map(drop)
    };
    // The kubelet makes of each capacity an allocatable: with a number that was never there it tells that it has read this one.
    let number = Timestamp::now().as_second().to_string();
    let mut values: BTreeMap<&str, Option<&str>> = resources.iter().map(|resource| (*resource, Some("0"))).collect();
    values.insert(SEEN, Some(&number));
    capacity(&values)?;
    let read: Vec<_> = values.iter().filter_map(|(name, value)| Some((*name, (*value)?))).collect();
    allocatable(world, &read).await?;
    capacity(&BTreeMap::from([(SEEN, None)]))
}

/// A kubelet that had no device plugin since it forgot the last one may have written none.
fn remove_checkpoint(world: &World) -> Result<()> {
    let file = world.cluster.node()?.kubelet_root.join("device-plugins/kubelet_internal_checkpoint");
    match std::fs::remove_file(&file) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", file.display()))
        }
        _ => Ok(()),
    }
}

async fn device_plugin(world: &mut World) -> Result<()> {
    world.kerf.uninstall().await?;
    let beside = Neighbours::on_node(&world.cluster, &world.simulation)?;
    let layout = "version: v1\nmig-configs:\n  static:\n    - devices: [0]\n      mig-enabled: true\n      mig-devices: {1g.10gb: 7}\n";
    parted(&beside, layout, "static")?;
    let made = slices(world)?;
    ensure!(made.len() == 7, "mig-parted has made them: {made:?}");
    let mut plugin = start_plugin(world, &beside)?;
    let (slice, gpu) = ("nvidia.com/mig-1g.10gb", "nvidia.com/gpu");
    allocatable(world, &[(slice, "7"), (gpu, "1")]).await?;
    for (name, resource) in [("slice", slice), ("whole", gpu)] {
        world.apply(&deployment(name, resource).to_string())?;
    }
    served_by_plugin(world, &made).await?;

    // 1. kerf, for no node yet.
    world.kerf.upgrade(&["--set-string", NODES])?;
    world.kerf.rolled_out(Part::Controller).await?;
    // 2. Empty the node.
    drain(world)?;
    // 3. Take the device plugin off: the kubelet reports 0, and goes on doing so when it has forgotten the plugin.
    plugin.terminate().await?;
    allocatable(world, &[(slice, "0"), (gpu, "0")]).await?;
    kubelet_forgets(world, &[slice, gpu]).await?;
    // 4. Give the node to kerf. Its slices are kept.
    policy::label(world, &format!("{MOVED}=yes"))?;
    world.kerf.registered().await?;
    world.published().await?;
    ensure!(slices(world)? == made, "they are kept");
    // 5. Let pods come back.
    uncordon(world)?;
    let uuids = served_by_kerf(world).await?;
    ensure!(uuids.is_subset(&made), "{uuids:?} is one of {made:?}, and nothing else could have been cut");

    // Back: the same in the other direction.
    leave(world).await?;
    ensure!(slices(world)? == made, "they are kept");
    let mut plugin = start_plugin(world, &beside)?;
    allocatable(world, &[(slice, "7"), (gpu, "1")]).await?;
    uncordon(world)?;
    served_by_plugin(world, &made).await?;

    // And once more to kerf, which clears the slices away.
    drain(world)?;
    plugin.terminate().await?;
    allocatable(world, &[(slice, "0"), (gpu, "0")]).await?;
    kubelet_forgets(world, &[slice, gpu]).await?;
    policy::label(world, &format!("{MOVED}=yes"))?;
    world.kerf.upgrade(&["--set-string", NODES, "--set", "foreignInstances=delete"])?;
    // The label has brought a plugin to the node that may still keep the slices.
    world.kerf.rolled_out(Part::KubeletPlugin).await?;
    world.kerf.registered().await?;
    world.instances(0).await?;
    uncordon(world)?;
    served_by_kerf(world).await?;
    world.instances(1).await?;
    kubectl(world, &["delete", "deployments", "-n", world.namespace(), "--all"])?;
    world.instances(0).await.map(drop)
}

/// The device plugin as its chart starts it with CDI, for GPUs that are cut beforehand.
fn start_plugin(world: &World, beside: &Neighbours) -> Result<Program> {
    let root = world.simulation.root().display().to_string();
    let hook = neighbour("device-plugin/nvidia-cdi-hook")?.display().to_string();
    let arguments = [
        "--mig-strategy=mixed",
        "--device-list-strategy=cdi-cri",
        &format!("--driver-root={root}"),
        &format!("--driver-root-ctr-path={root}"),
        &format!("--nvidia-cdi-hook-path={hook}"),
    ];
    beside.start(PLUGIN, &arguments)
}

/// Both deployments run on what the device plugin gives out.
async fn served_by_plugin(world: &World, made: &BTreeSet<String>) -> Result<()> {
    for name in ["slice", "whole"] {
        let pod = running(world, name).await?;
        let claim = pod.status.as_ref().and_then(|status| status.extended_resource_claim_status.as_ref());
        ensure!(claim.is_none(), "{name} is served by the device plugin: {claim:?}");
        if name == "slice" {
            let uuids = world.mig_uuids(&pod.name_any(), "main")?;
            ensure!(uuids.len() == 1 && made.contains(&uuids[0]), "{uuids:?} of {made:?}");
        } else {
            ensure!(world.gpu_uuids(&pod.name_any(), "main")?.len() == 1, "one GPU");
        }
    }
    Ok(())
}

/// Both deployments run on kerf's devices, by a claim that the scheduler has made; the UUIDs of their MIG devices.
async fn served_by_kerf(world: &World) -> Result<BTreeSet<String>> {
    let mut uuids = BTreeSet::new();
    for name in ["slice", "whole"] {
        let pod = running(world, name).await?;
        let claims = kubectl(world, &["get", "resourceclaims", "-n", world.namespace(), "-o", "name"])?;
        let wanted = format!("{}-extended-resources-", pod.name_any());
        ensure!(claims.contains(&wanted), "{wanted} is not in {claims}");
        let found = world.mig_uuids(&pod.name_any(), "main")?;
        ensure!(found.len() == usize::from(name == "slice"), "{name}: {found:?}");
        ensure!(world.gpu_uuids(&pod.name_any(), "main")?.len() == 1, "{name}");
        uuids.extend(found);
    }
    Ok(uuids)
}

#[tokio::test]
async fn from_the_mig_manager_to_kerf_and_back() {
    scenario("from_mig_manager", NodeFile::new().gpus("h100-80gb", 2), async |world| {
        ensure!(world.cluster.has_partitions()?, "foreign slices need counters");
        let outcome = mig_manager(world).await;
        let parts = ["device-plugin", "gpu-feature-discovery", "dcgm-exporter", "dcgm", "nvsm"];
        let switches = parts.map(|part| format!("nvidia.com/gpu.deploy.{part}"));
        let labels = [MOVED, names::LABEL_MIG_CONFIG, STATE].into_iter().chain(switches.iter().map(String::as_str));
        tidy(world, &labels.collect::<Vec<_>>()).and(outcome)
    })
    .await;
}

async fn mig_manager(world: &mut World) -> Result<()> {
    // The plugin reads every minute what is wanted of foreign instances.
    world.patience = Duration::from_secs(150);
    world.kerf.uninstall().await?;
    world.apply(policy::NAMESPACE)?;
    world.apply(policy::LAYOUTS)?;
    let beside = Neighbours::on_node(&world.cluster, &world.simulation)?;
    let file = beside.directory().join("config.yaml");
    let object: Value = serde_saphyr::from_str(policy::LAYOUTS)?;
    std::fs::write(&file, object["data"]["config.yaml"].as_str().context("the article's file")?)?;
    let file = file.to_str().context("the path is text")?;
    let _bus = message_bus(&beside).await?;
    policy::label(world, &format!("{}=mixed", names::LABEL_MIG_CONFIG))?;
    let mut manager = start_manager(world, &beside, file)?;
    state_is(world, "success").await?;
    beside.run(PARTED, &["assert", "-f", file, "-c", "mixed"])?;
    let made = slices(world)?;
    ensure!(made.len() == 9, "two halves and seven sevenths: {made:?}");

    // 1. See that the file is good, with kerf on no node yet.
    world.kerf.upgrade(&["--set-string", NODES, "--set", "layouts.configMap=gpu-operator/nvidia-mig-config"])?;
    world.kerf.rolled_out(Part::Controller).await?;
    for (name, layout, accepted) in [("good", "mixed", "True"), ("wrong", "mixt", "False")] {
        let nowhere = json!({ "matchLabels": { "kubernetes.io/hostname": "none" } });
        let spec = json!({ "offer": "Layout", "layout": { "name": layout }, "nodeSelector": nowhere });
        policy::make(world, name, spec).await?;
        policy::reported(world, name, "Accepted", accepted).await?;
        policy::unmake(world, name).await?;
    }
    // 2. Empty the node. 3. Take the MIG manager off.
    drain(world)?;
    manager.terminate().await?;
    // 4. Clear the slices away: a policy, and the node to kerf.
    let here = json!({ "matchLabels": { "kubernetes.io/hostname": node(world)? } });
    let clear = json!({ "priority": 100, "nodeSelector": here, "offer": "Nothing", "foreignInstances": "Delete" });
    policy::make(world, "clear-old-slices", clear).await?;
    policy::label(world, &format!("{MOVED}=yes"))?;
    world.kerf.registered().await?;
    world.instances(0).await?;
    nothing_is_blocked(world).await?;
    let gpus = policy::gpus(world).await?;
    // 5. Delete the policy, let pods come back: exactly the layout is offered.
    policy::unmake(world, "clear-old-slices").await?;
    uncordon(world)?;
    policy::offers(world, &[(&gpus[0], &policy::HALVES), (&gpus[1], &policy::SEVENTHS)]).await?;
    // The state that the manager has left is its own; once it is taken off, kerf tells it.
    policy::label(world, &format!("{STATE}-"))?;
    state_is(world, "success").await?;
    let half = Request::mig("gpu", "3g.40gb");
    world.run_ready("half", &Claim::of(&[half])).await?;
    world.delete("half").await?;

    // Back.
    leave(world).await?;
    let mut manager = start_manager(world, &beside, file)?;
    world.instances(9).await?;
    eventually("the layout is there again", PATIENCE, async || {
        beside.run(PARTED, &["assert", "-f", file, "-c", "mixed"]).map(Some)
    })
    .await?;
    manager.terminate().await?;
    uncordon(world)?;
    let off = "version: v1\nmig-configs:\n  no-mig:\n    - devices: all\n      mig-enabled: false\n";
    parted(&beside, off, "no-mig")?;
    policy::label(world, &format!("{MOVED}=yes"))?;
    world.kerf.registered().await
}

fn start_manager(world: &World, beside: &Neighbours, file: &str) -> Result<Program> {
    let host = beside.directory().join("host");
    let arguments = [
        &format!("--node-name={}", node(world)?),
        &format!("--config-file={file}"),
        &format!("--host-root-mount={}", host.display()),
        "--default-gpu-clients-namespace=gpu-operator",
    ];
    beside.start(MANAGER, &arguments)
}

/// The message bus that the manager wants to talk to systemd over. Nobody else is on it.
async fn message_bus(beside: &Neighbours) -> Result<Program> {
    let socket = beside.directory().join("host/run/dbus/system_bus_socket");
    std::fs::create_dir_all(socket.parent().context("the socket is in a folder")?)?;
    let mut command = Command::new("dbus-daemon");
    command.args(["--session", "--nofork", "--nopidfile"]).arg(format!("--address=unix:path={}", socket.display()));
    let mut bus = Program::start("dbus-daemon", command, &beside.directory().join("dbus-daemon.log"))?;
    eventually("the message bus listens", PATIENCE, async || {
        bus.check()?;
        Ok(socket.exists().then_some(()))
    })
    .await?;
    Ok(bus)
}

/// Waits until the node's GpuNode tells of no instance that belongs to nobody.
async fn nothing_is_blocked(world: &World) -> Result<()> {
    eventually("no instance is foreign", PATIENCE, async || {
        let status = world.gpu_node().await?.status.unwrap_or_default();
        let blocked: Vec<_> = status.gpus.iter().flat_map(|gpu| &gpu.blocked).collect();
        ensure!(blocked.is_empty(), "{blocked:?}");
        Ok(Some(()))
    })
    .await
}

async fn state_is(world: &World, wanted: &str) -> Result<()> {
    eventually(&format!("{STATE} is {wanted}"), PATIENCE, async || {
        let labels = labels(world).await?;
        ensure!(labels.get(STATE).is_some_and(|state| state == wanted), "{:?}", labels.get(STATE));
        Ok(Some(()))
    })
    .await
}

/// Keys that GPU feature discovery writes and kerf does not, in the page's table of those.
const LEFT_OUT: [&str; 3] = ["nvidia.com/gpu.machine", "nvidia.com/gpu.mode", "nvidia.com/vgpu.present"];

/// Keys that kerf writes in the name of others: of the gpu-operator and of the MIG manager.
const OF_OTHERS: [&str; 2] = ["nvidia.com/gpu.present", STATE];

#[tokio::test]
async fn labels_are_those_of_feature_discovery() {
    scenario("labels_h100", NodeFile::new().gpus("h100-80gb", 2), async |world| same_labels(world, "mixed").await)
        .await;
    scenario("labels_l40s", NodeFile::new().gpus("l40s", 1), async |world| same_labels(world, "none").await).await;
}

#[tokio::test]
async fn labels_of_a_layout_are_those_of_feature_discovery() {
    let on = json!({ "product": "a100-80gb", "mig": { "current": true, "pending": true } });
    scenario("labels_a100", NodeFile::new().gpu(on.clone()).gpu(on), async |world| {
        let outcome = layout_labels(world).await;
        tidy(world, &[names::LABEL_MIG_CONFIG]).and(outcome)
    })
    .await;
}

async fn layout_labels(world: &World) -> Result<()> {
    let beside = Neighbours::on_node(&world.cluster, &world.simulation)?;
    let layout = "version: v1
mig-configs:
  both:
    - devices: all
      mig-enabled: true
      mig-devices: {1g.10gb: 1, 1g.10gb+me: 1, 1g.20gb: 1, 3g.40gb: 1}
";
    let map = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "nvidia-mig-config", "namespace": "gpu-operator" },
        "data": { "config.yaml": layout },
    });
    world.apply(policy::NAMESPACE)?;
    world.apply(&serde_saphyr::to_string(&map)?)?;
    world.kerf.upgrade(&["--set", "layouts.configMap=gpu-operator/nvidia-mig-config"])?;
    world.kerf.rolled_out(Part::Controller).await?;
    policy::label(world, &format!("{}=both", names::LABEL_MIG_CONFIG))?;
    parted(&beside, layout, "both")?;
    let compared = same_labels(world, "mixed").await;
    parted(
        &beside,
        "version: v1\nmig-configs:\n  none: [{devices: all, mig-enabled: true, mig-devices: {}}]\n",
        "none",
    )?;
    compared
}

/// Waits until kerf's labels are those of GPU feature discovery, run on the same node with this MIG strategy.
async fn same_labels(world: &World, strategy: &str) -> Result<()> {
    let beside = Neighbours::on_node(&world.cluster, &world.simulation)?;
    let strategy = format!("--mig-strategy={strategy}");
    let once = ["--oneshot", "--use-node-feature-api=false", "--output-file=", &strategy, "--no-timestamp"];
    let text = beside.run(DISCOVERY, &once)?;
    let mut theirs: BTreeMap<String, String> =
        text.lines().filter_map(|line| line.split_once('=')).map(|(key, value)| (key.into(), value.into())).collect();
    let page = std::fs::read_to_string(deploy().join("../docs/labels.md"))?;
    for key in LEFT_OUT {
        ensure!(page.contains(&format!("`{key}`")), "the page says that {key} is left out");
        ensure!(theirs.remove(key).is_some(), "GPU feature discovery writes {key}: {theirs:#?}");
    }
    eventually("kerf's labels are those of GPU feature discovery", PATIENCE, async || {
        let mut ours = labels(world).await?;
        ours.retain(|key, _| !OF_OTHERS.contains(&key.as_str()) && key != names::LABEL_MIG_CONFIG);
        let differ = |key: &&String| ours.get(*key) != theirs.get(*key);
        let keys: BTreeSet<&String> = ours.keys().chain(theirs.keys()).filter(differ).collect();
        let differences: Vec<_> = keys.iter().map(|key| (key, ours.get(*key), theirs.get(*key))).collect();
        ensure!(differences.is_empty(), "key, kerf, GPU feature discovery: {differences:#?}");
        Ok(Some(()))
    })
    .await
}

/// The node's labels of NVIDIA.
async fn labels(world: &World) -> Result<BTreeMap<String, String>> {
    let node = Api::<Node>::all(world.client.clone()).get_metadata(&node(world)?).await?;
    Ok(node.labels().clone().into_iter().filter(|(key, _)| key.starts_with("nvidia.com/")).collect())
}

/// mig-parted makes a layout of a file.
fn parted(beside: &Neighbours, layouts: &str, name: &str) -> Result<()> {
    let file = beside.directory().join(format!("{name}.yaml"));
    std::fs::write(&file, layouts)?;
    beside.run(PARTED, &["apply", "-f", file.to_str().context("the path is text")?, "-c", name]).map(drop)
}

/// The UUIDs of the MIG devices that are on the node's GPUs.
fn slices(world: &World) -> Result<BTreeSet<String>> {
    let instances = world.simulation.instances()?.into_iter();
    Ok(instances.flat_map(|(_, instance)| instance.compute_instances).map(|instance| instance.uuid).collect())
}

/// Waits until the node has these numbers of these resources to give.
async fn allocatable(world: &World, wanted: &[(&str, &str)]) -> Result<()> {
    let nodes: Api<Node> = Api::all(world.client.clone());
    eventually(&format!("the node's allocatable is {wanted:?}"), PATIENCE, async || {
        let found = nodes.get(&node(world)?).await?.status.and_then(|status| status.allocatable).unwrap_or_default();
        let all = wanted.iter().all(|(name, count)| found.get(*name).is_some_and(|found| found.0 == *count));
        ensure!(all, "{found:?}");
        Ok(Some(()))
    })
    .await
}

/// Many of a pod without claims, as a workload that comes back when it was evicted.
fn deployment(name: &str, resource: &str) -> Value {
    let mut pod = extended::pod(name, &[extended::container("main", &[(resource, 1)])]);
    pod["spec"]["restartPolicy"] = json!("Always");
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": name },
        "spec": {
            "selector": { "matchLabels": { "app": name } },
            "template": { "metadata": { "labels": { "app": name } }, "spec": pod["spec"] },
        },
    })
}

/// Waits until the one pod of a deployment runs.
async fn running(world: &World, deployment: &str) -> Result<Pod> {
    let of_it = ListParams::default().labels(&format!("app={deployment}"));
    let pod = eventually(&format!("the pod of {deployment} is there"), PATIENCE, async || {
        let pods = world.pods().list(&of_it).await?.items;
        ensure!(pods.len() == 1, "{}", pods.len());
        Ok(pods.into_iter().find(|pod| pod.metadata.deletion_timestamp.is_none()))
    })
    .await?;
    world.ready(&pod.name_any()).await?;
    Ok(world.pods().get(&pod.name_any()).await?)
}

/// As the pages say it. On the one node of this cluster kerf's controllers are spared.
fn drain(world: &World) -> Result<()> {
    let spared = "--pod-selector=app.kubernetes.io/name!=kerf";
    let arguments = ["drain", &node(world)?, "--ignore-daemonsets", "--delete-emptydir-data", spared, "--timeout=60s"];
    kubectl(world, &arguments).map(drop)
}

/// The way back begins: the node is emptied, and kerf's plugin goes.
async fn leave(world: &mut World) -> Result<()> {
    drain(world)?;
    world.kerf.expect_end(Part::KubeletPlugin).await?;
    policy::label(world, &format!("{MOVED}-"))?;
    eventually("kerf offers nothing on the node", PATIENCE, async || Ok(world.slices().await?.is_empty().then_some(())))
        .await
}

fn uncordon(world: &World) -> Result<()> {
    kubectl(world, &["uncordon", &node(world)?]).map(drop)
}

/// Whatever has happened: the node takes pods again, kerf is on it and can release what they hold, it has none of these labels, and
/// no CDI spec of the device plugin.
fn tidy(world: &World, labels: &[&str]) -> Result<()> {
    uncordon(world)?;
    world.kerf.upgrade(&[])?;
    for label in labels {
        policy::label(world, &format!("{label}-"))?;
    }
    for entry in std::fs::read_dir(&world.cluster.node()?.cdi_root)? {
        let path: PathBuf = entry?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("k8s.device-plugin.nvidia.com-")) {
            std::fs::remove_file(path)?;
        }
    }
    Ok(())
}

fn node(world: &World) -> Result<String> {
    Ok(world.cluster.node()?.name.clone())
}

fn kubectl(world: &World, arguments: &[&str]) -> Result<String> {
    world.cluster.kubectl(arguments)
}
