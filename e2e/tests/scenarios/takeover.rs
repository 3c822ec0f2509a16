//! NVIDIA's DRA driver, the genuine one, gives a node to kerf and gets it back. Its name is the same, and so are its classes.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{ContainerStatus, Event};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kerf_api::{Blocked, names};
use kerf_e2e::{
    Claim, Neighbours, NodeFile, Part, Pod, Program, RETRIED, Request, World, eventually, neighbour, scenario,
};
use kube::Api;
use kube::api::ListParams;
use serde_json::json;

/// How long its slices may stay after it has ended: the kubelet wipes them after 30 s.
const WIPED: Duration = Duration::from_secs(60);

/// Where its programs are, with the one that its CDI files name.
const FOLDER: &str = "dra-driver";

/// What its two plugins are told of the node, as their chart does.
fn command(world: &World, program: &str) -> Result<(Command, PathBuf)> {
    let neighbours = Neighbours::on_node(&world.cluster, &world.simulation)?;
    let (node, root) = (world.cluster.node()?, world.simulation.root());
    let mut command = neighbours.command(&format!("{FOLDER}/{program}"))?;
    command.args(["--node-name", &node.name]).arg("--kubeconfig").arg(world.cluster.kubeconfig());
    command.arg("--nvidia-driver-root").arg(root).arg("--container-driver-root").arg(root);
    command.arg("--nvidia-cdi-hook-path").arg(neighbour(&format!("{FOLDER}/nvidia-cdi-hook"))?);
    command.arg("--cdi-root").arg(&node.cdi_root);
    command.arg("--kubelet-plugins-directory-path").arg(node.kubelet_root.join("plugins"));
    command.arg("--kubelet-registrar-directory-path").arg(node.kubelet_root.join("plugins_registry"));
    Ok((command, neighbours.directory().join(format!("{program}.log"))))
}

/// Starts the plugin for GPUs with dynamic MIG, and waits until its devices are published. It publishes them before the
/// kubelet has registered it (v0.5.0, `cmd/gpu-kubelet-plugin/driver.go`), so the first pods may wait for another try.
async fn start(world: &World) -> Result<Program> {
    let name = "gpu-kubelet-plugin";
    let (mut command, log) = command(world, name)?;
    command.args(["--image-name=none", "--feature-gates=DynamicMIG=true"]);
    let mut program = Program::start(name, command, &log)?;
    eventually("the former driver's devices are published", world.patience, async || {
        program.check()?;
        Ok(world.devices().await?.iter().any(|device| device == "gpu-0").then_some(()))
    })
    .await?;
    Ok(program)
}

/// Takes kerf's plugin off the node, and waits until nothing is offered.
async fn leave(world: &mut World) -> Result<()> {
    world.kerf.keep_plugin_away(true).await?;
    nothing_is_offered(world).await
}

async fn nothing_is_offered(world: &World) -> Result<()> {
    eventually("nothing is offered", WIPED, async || Ok(world.devices().await?.is_empty().then_some(()))).await
}

/// Brings kerf's plugin to the node, and waits until its devices, and no others, are published.
async fn arrive(world: &mut World) -> Result<()> {
    world.kerf.keep_plugin_away(false).await?;
    world.kerf.registered().await?;
    offers_its_own(world).await
}

async fn offers_its_own(world: &World) -> Result<()> {
    eventually("kerf's devices are published", WIPED, async || {
        world.published().await?;
        let devices = world.devices().await?;
        let is_whole = |device: &&String| device.as_str() == "gpu-3b-00-0" || device.as_str() == "gpu-0";
        Ok((devices.iter().filter(is_whole).collect::<Vec<_>>() == ["gpu-3b-00-0"]).then_some(()))
    })
    .await
}

/// What is blocked on each GPU, with the placement's start.
async fn blocked(world: &World) -> Result<Vec<Vec<Blocked>>> {
    let status = world.gpu_node().await?.status.context("the node's status is written")?;
    Ok(status.gpus.into_iter().map(|gpu| gpu.blocked).collect())
}

/// Waits until so many things are blocked on each GPU for this reason.
async fn blocked_for(world: &World, reason: &str, counts: &[usize]) -> Result<Vec<Vec<Blocked>>> {
    eventually(&format!("{counts:?} blocked as {reason}"), world.patience, async || {
        let all = blocked(world).await?;
        let found: Vec<_> = all.iter().map(|gpu| gpu.iter().filter(|one| one.reason == reason).count()).collect();
        ensure!(found == counts, "{all:?}");
        Ok(Some(all))
    })
    .await
}

/// The devices that carry the taint.
async fn tainted(world: &World) -> Result<Vec<String>> {
    let key = names::taint_key(names::FORMER_DRIVER);
    let devices = world.slices().await?.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default());
    let is_held = |device: &k8s_openapi::api::resource::v1::Device| {
        device.taints.iter().flatten().any(|taint| Some(&taint.key) == key.as_ref())
    };
    Ok(devices.filter(is_held).map(|device| device.name).collect())
}

fn checkpoint(world: &World) -> Result<PathBuf> {
    Ok(world.cluster.node()?.kubelet_root.join("plugins/gpu.nvidia.com/checkpoint.json"))
}

async fn told_at_the_node(world: &World, words: &str) -> Result<()> {
    let api: Api<Event> = Api::namespaced(world.client.clone(), "default");
    let fields = format!("involvedObject.kind=Node,reason={}", names::FORMER_DRIVER);
    eventually(&format!("an event says {words:?}"), world.patience, async || {
        let events = api.list(&ListParams::default().fields(&fields)).await?.items;
        let messages = events.iter().filter_map(|event| event.message.as_deref());
        Ok(messages.into_iter().any(|message| message.contains(words)).then_some(()))
    })
    .await
}

/// `docs/moving/from-nvidia-dra-driver.md`, for who cannot drain: pods go on, what they hold is held back, and they end as they
/// should.
#[tokio::test]
async fn pods_of_the_former_driver_run_on() {
    scenario("takeover", NodeFile::new().gpus("h100-80gb", 3), async |world| {
        leave(world).await?;
        let mut former = start(world).await?;
        world.run("whole", &Claim::of(&[Request::gpu("gpu")])).await?;
        world.ready_within("whole", RETRIED).await?;
        world.create(&Claim::of(&[Request::mig("gpu", "1g.10gb")]).template("slice")).await?;
        let mut slice = Pod::from_template("slice", "slice").object();
        slice["spec"]["restartPolicy"] = json!("Always");
        world.create(&slice).await?;
        world.ready_within("slice", RETRIED).await?;
        let (gpu, mig) = (world.gpu_uuids("whole", "main")?, world.mig_uuids("slice", "main")?);
        ensure!(gpu.len() == 1 && mig.len() == 1, "{gpu:?} {mig:?}");

        // A node belongs to one of the two.
        world.kerf.keep_plugin_away(false).await?;
        told_at_the_node(world, "NVIDIA's DRA driver runs on this node").await?;
        world.run_ready("late", &Claim::of(&[Request::gpu("gpu")])).await?;
        world.delete("late").await?;

        former.terminate().await?;
        let before = std::fs::read(checkpoint(world)?)?;
        world.kerf.registered().await?;
        offers_its_own(world).await?;
        for pod in ["whole", "slice"] {
            world.undisturbed(pod).await?;
        }
        let all = blocked_for(world, names::FORMER_DRIVER, &[1, 1, 0]).await?;
        let whole = all[0][0].placement.is_none();
        ensure!(whole && all[1][0].placement.is_some_and(|at| (at.start, at.size) == (0, 1)), "{all:?}");
        let held = tainted(world).await?;
        let of = |gpu: &str| held.iter().filter(|device| device.starts_with(gpu)).count();
        let all_of_one = world.devices().await?.len() / 3;
        ensure!(of("gpu-3b-00-0") == all_of_one && of("gpu-47-00-0") < all_of_one, "{held:?}");
        let (first, last) = ("gpu-47-00-0-mig-1g10gb-0".to_owned(), "gpu-47-00-0-mig-1g10gb-1".to_owned());
        ensure!(held.contains(&first) && held.contains(&"gpu-47-00-0".to_owned()) && !held.contains(&last), "{held:?}");

        world.run_ready("rest", &Claim::of(&[Request::gpu("gpu")])).await?;
        world.run("another", &Claim::of(&[Request::gpu("gpu")])).await?;
        world.waits("another").await?;
        world.run_ready("beside", &Claim::of(&[Request::mig("gpu", "3g.40gb")])).await?;
        world.delete("beside").await?;
        ensure!(world.mig_uuids("slice", "main")? == mig && world.gpu_uuids("whole", "main")? == gpu, "as before");

        // Its containers are started again from the CDI file that is there. The shell may end with its container.
        let _ = world.shell("slice", "main", "kill 1");
        eventually("the container is started again", world.patience, async || {
            let statuses = world.pods().get("slice").await?.status.and_then(|status| status.container_statuses);
            let is_back = |status: &ContainerStatus| status.restart_count == 1 && status.ready;
            Ok(statuses.into_iter().flatten().any(|status| is_back(&status)).then_some(()))
        })
        .await?;
        ensure!(world.mig_uuids("slice", "main")? == mig, "with the same slice");

        // The kubelet has kerf release them.
        world.delete("whole").await?;
        world.ready("another").await?;
        world.delete("another").await?;
        world.delete("rest").await?;
        world.delete("slice").await?;
        blocked_for(world, names::FORMER_DRIVER, &[0, 0, 0]).await?;
        let left = world.instances(1).await?;
        ensure!(left[0].1.compute_instances[0].uuid == mig[0], "the slice is nobody's now: {left:?}");
        world.kerf.expect_end(Part::KubeletPlugin).await?;
        world.kerf.upgrade(&["--set", "foreignInstances=adopt"])?;
        world.kerf.rolled_out(Part::KubeletPlugin).await?;
        eventually("everything is offered again", world.patience, async || {
            Ok(blocked(world).await?.iter().all(Vec::is_empty).then_some(()))
        })
        .await?;
        world.run_ready("all", &Claim::of(&[Request::gpu("gpu").count(3)])).await?;
        world.instances(0).await?;
        world.delete("all").await?;
        ensure!(std::fs::read(checkpoint(world)?)? == before, "its checkpoint is not kerf's to write");

        // And back: it is told of the claims that have ended meanwhile by the removal of its checkpoint.
        leave(world).await?;
        std::fs::remove_file(checkpoint(world)?)?;
        serves(world, "back").await
    })
    .await;
}

/// The way of the same page: drained first, there is nothing to be held back, and the way back is as smooth.
#[tokio::test]
async fn a_drained_node_changes_hands() {
    scenario("takeover_drained", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        leave(world).await?;
        serves(world, "before").await?;
        arrive(world).await?;
        ensure!(tainted(world).await?.is_empty() && blocked(world).await? == [vec![]], "nothing is held");
        world.run_ready("slice", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
        world.delete("slice").await?;
        leave(world).await?;
        serves(world, "after").await?;
        arrive(world).await
    })
    .await;
}

/// It serves the node: pods with a slice and with a whole GPU come and go. Then it ends.
async fn serves(world: &World, when: &str) -> Result<()> {
    let mut former = start(world).await?;
    for (what, request) in [("slice", Request::mig("gpu", "1g.10gb")), ("gpu", Request::gpu("gpu"))] {
        let pod = format!("{when}-{what}");
        world.run(&pod, &Claim::of(&[request])).await?;
        world.ready_within(&pod, RETRIED).await?;
        ensure!(world.allocated(&pod).await?[0].device.starts_with("gpu-0"), "a device of that driver");
        world.delete(&pod).await?;
    }
    former.terminate().await?;
    Ok(())
}

/// What its other plugin needs of the API server: the kinds, whose fields do not matter here.
const COMPUTE_DOMAINS: &str = r#"
{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {name: computedomains.resource.nvidia.com}, spec: {
  group: resource.nvidia.com, scope: Namespaced, names: {kind: ComputeDomain, plural: computedomains},
  versions: [{name: v1beta1, served: true, storage: true, subresources: {status: {}},
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}]}}
"#;

/// Its plugin for compute domains has another driver name, and stays where kerf serves the GPUs.
#[tokio::test]
async fn compute_domains_are_served_beside_kerf() {
    scenario("compute_domains", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        world.apply(COMPUTE_DOMAINS)?;
        let name = "compute-domain-kubelet-plugin";
        let (mut command, log) = command(world, name)?;
        // Channels between nodes, and these two gates, belong to drivers that are newer than the simulated one: with those the
        // kernel's list of devices has a line more.
        let devices = std::fs::read_to_string(world.simulation.root().join("proc/devices"))?;
        let with_channels = log.with_file_name("devices");
        std::fs::write(&with_channels, devices.replace("\nBlock", "235 nvidia-caps-imex-channels\n\nBlock"))?;
        command.args(["--namespace", world.namespace()]).env("ALT_PROC_DEVICES_PATH", with_channels);
        command.arg("--feature-gates=IMEXDaemonsWithDNSNames=false,ComputeDomainCliques=false");
        let mut plugin = Program::start(name, command, &log)?;
        let api: Api<ResourceSlice> = Api::all(world.client.clone());
        let theirs = ListParams::default().fields("spec.driver=compute-domain.nvidia.com");
        let offered = async || {
            let slices = api.list(&theirs).await?.items;
            Ok(slices.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default()).count())
        };
        eventually("compute domains are offered", world.patience, async || {
            plugin.check()?;
            let offered: Result<usize> = offered().await;
            Ok((offered? > 0).then_some(()))
        })
        .await?;
        world.run_ready("slice", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
        world.run_ready("other", &Claim::of(&[Request::mig("gpu", "3g.40gb")])).await?;
        ensure!(blocked(world).await? == [vec![]], "nothing is held");
        world.kerf.renew(Part::KubeletPlugin).await?;
        world.kerf.registered().await?;
        offers_its_own(world).await?;
        ensure!(offered().await? > 0, "kerf comes and goes, and they stay");
        world.delete("other").await?;
        plugin.terminate().await?;
        world.undisturbed("slice").await?;
        offers_its_own(world).await?;
        world.delete("slice").await?;
        // What it leaves is not kerf's to remove.
        let base = world.cluster.node()?.cdi_root.join("k8s.compute-domain.nvidia.com-device_base.yaml");
        Ok(std::fs::remove_file(base)?)
    })
    .await;
}
