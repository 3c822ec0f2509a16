//! What admins say that GPUs shall offer: layouts by the node's label, and GpuPolicies. Pods that run notice nothing.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kerf_api::{GpuPolicy, GpuPolicyStatus, GpuSpec, MigMode, names};
use kerf_e2e::{Claim, NodeFile, Part, Request, World, eventually, scenario};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};

/// The manifest of the article that kerf is measured by, unchanged.
pub(crate) const LAYOUTS: &str = include_str!("../files/mig-config.yaml");

pub(crate) const NAMESPACE: &str = r#"{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "gpu-operator", "labels": {"kerf.dev/e2e": "true"}}}"#;

/// How long a change may take to be published, or to be reported.
const SOON: Duration = Duration::from_secs(60);

pub(crate) const HALVES: [&str; 2] = ["-mig-3g40gb-0", "-mig-3g40gb-4"];

pub(crate) const SEVENTHS: [&str; 7] = [
    "-mig-1g10gb-0",
    "-mig-1g10gb-1",
    "-mig-1g10gb-2",
    "-mig-1g10gb-3",
    "-mig-1g10gb-4",
    "-mig-1g10gb-5",
    "-mig-1g10gb-6",
];

const WHOLE: [&str; 1] = [""];

/// Works on every server, also on one that has no partitionable devices: a layout's partitions never overlap.
#[tokio::test]
async fn the_articles_mixed_layout_is_offered_and_given_out() {
    let on = json!({ "product": "a100-80gb", "mig": { "current": true, "pending": true } });
    let node = NodeFile::new().gpu(on.clone()).gpu(on).gpus("a100-80gb", 2);
    scenario("mixed_layout", node, async |world| {
        follow_layouts(world).await?;
        choose(world, "mixed")?;
        let gpus = gpus(world).await?;
        offers(world, &[(&gpus[0], &HALVES), (&gpus[1], &SEVENTHS), (&gpus[2], &WHOLE), (&gpus[3], &WHOLE)]).await?;
        eventually("the node is told which mode its GPUs shall be in", SOON, async || {
            let spec = world.gpu_node().await?.spec;
            let modes: Vec<_> = gpus.iter().map(|gpu| spec.gpus.get(gpu).and_then(|gpu| gpu.mig_mode)).collect();
            let (on, off) = (Some(MigMode::Enabled), Some(MigMode::Disabled));
            ensure!(modes == [on, on, off, off], "{modes:?}");
            Ok(Some(()))
        })
        .await?;
        ensure!(world.simulation.instances()?.is_empty(), "nothing is cut before a pod takes it");

        let asked = [("half", Request::mig("gpu", "3g.40gb"), 2), ("seventh", Request::mig("gpu", "1g.10gb"), 7)];
        for (name, request, count) in &asked {
            for pod in 0..*count {
                world.run(&format!("{name}-{pod}"), &Claim::of(std::slice::from_ref(request))).await?;
            }
        }
        world.run_ready("whole", &Claim::of(&[Request::gpu("gpu").count(2)])).await?;
        for (name, _, count) in &asked {
            for pod in 0..*count {
                world.ready(&format!("{name}-{pod}")).await?;
            }
        }
        let state = world.simulation.state()?;
        let cut: Vec<Vec<&str>> = state
            .iter()
            .map(|gpu| gpu.instances().iter().map(|instance| instance.profile.as_str()).collect())
            .collect();
        ensure!(cut == [vec!["3g.40gb"; 2], vec!["1g.10gb"; 7], vec![], vec![]], "{cut:?}");
        for profile in ["3g.40gb", "1g.10gb", "2g.20gb"] {
            let name = format!("more-{}", profile.replace('.', "-"));
            world.run(&name, &Claim::of(&[Request::mig("gpu", profile)])).await?;
            world.waits(&name).await?;
        }
        forget_label(world)
    })
    .await;
}

#[tokio::test]
async fn a_new_layout_waits_for_the_pods_of_the_old_one() {
    scenario("new_layout", NodeFile::new().gpus("h100-80gb", 2), async |world| {
        follow_layouts(world).await?;
        choose(world, "all-3g.40gb")?;
        let both = gpus(world).await?;
        offers(world, &[(&both[0], &HALVES), (&both[1], &HALVES)]).await?;
        world.run_ready("old", &Claim::of(&[Request::mig("gpu", "3g.40gb")])).await?;
        let held = world.allocated("old").await?.remove(0).device;
        let uuids = world.mig_uuids("old", "main")?;
        let busy = both.iter().find(|gpu| held.starts_with(gpu.as_str())).context("a device of the node")?;
        let idle = both.iter().find(|gpu| *gpu != busy).context("the node has two GPUs")?;

        choose(world, "all-1g.10gb")?;
        // Where the server has no counters, what overlaps the old half is not published yet. Nor is the half itself, as there are
        // no taints either to keep it from who waits for one.
        let start = held.rsplit('-').next().context("a device has a start")?;
        let beside = if start == "0" { &SEVENTHS[4..] } else { &SEVENTHS[..4] };
        let kept = format!("-mig-3g40gb-{start}");
        let now = if world.cluster.has_partitions()? { [&SEVENTHS[..], &[&kept]].concat() } else { beside.to_vec() };
        offers(world, &[(idle, &SEVENTHS), (busy, &now)]).await?;
        for pod in 0..7 + beside.len() {
            world.run(&format!("new-{pod}"), &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
        }
        for pod in 0..7 + beside.len() {
            world.ready(&format!("new-{pod}")).await?;
        }
        for (name, profile) in [("late", "3g.40gb"), ("next", "1g.10gb")] {
            world.run(name, &Claim::of(&[Request::mig("gpu", profile)])).await?;
            world.waits(name).await?;
        }
        world.undisturbed("old").await?;
        ensure!(world.mig_uuids("old", "main")? == uuids, "it has what it had");

        world.delete("old").await?;
        offers(world, &[(idle, &SEVENTHS), (busy, &SEVENTHS)]).await?;
        world.ready("next").await?;
        world.undisturbed("new-0").await?;
        forget_label(world)
    })
    .await;
}

#[tokio::test]
async fn policies_choose_gpus_and_what_they_offer() {
    scenario("policies", NodeFile::new().gpus("h100-80gb", 3), async |world| {
        let gpus = gpus(world).await?;
        ensure!(world.cluster.has_partitions()?, "a part of a GPU's profiles needs counters");
        make(world, "whole", json!({ "offer": "WholeOnly", "gpus": { "indices": [0] } })).await?;
        make(world, "off", json!({ "offer": "Nothing", "gpus": { "names": [gpus[1]] } })).await?;
        let few = json!({
            "offer": "Dynamic", "profiles": ["1g.10gb", "3g.40gb"], "whole": false,
            "gpus": { "products": ["*H100*"], "indices": [2] },
        });
        make(world, "few", few).await?;
        offers(world, &[(&gpus[0], &WHOLE), (&gpus[2], &[&HALVES[..], &SEVENTHS[..]].concat())]).await?;
        for name in ["whole", "off", "few"] {
            let status = reported(world, name, "InForce", "True").await?;
            let node = &status.nodes[0];
            ensure!(
                node.name == world.cluster.node()?.name && node.gpus.in_force == 1 && node.gpus.waiting.is_empty(),
                "{name}: {status:?}"
            );
        }

        world.run_ready("whole", &Claim::of(&[Request::gpu("gpu")])).await?;
        world.run_ready("half", &Claim::of(&[Request::mig("gpu", "3g.40gb")])).await?;
        for (name, request) in [("quarter", Request::mig("gpu", "2g.20gb")), ("more", Request::gpu("gpu"))] {
            world.run(name, &Claim::of(&[request])).await?;
            world.waits(name).await?;
        }
        world.delete("more").await?;
        unmake(world, "off").await?;
        world.ready("quarter").await?;
        let published = world.devices().await?;
        let of_the_second = published.iter().filter(|device| device.starts_with(&gpus[1])).count();
        ensure!(of_the_second == 26, "everything is offered of {} again: {published:?}", gpus[1]);
        for name in ["whole", "half"] {
            world.undisturbed(name).await?;
        }
        // With the last policy all that was asked of the node is taken back.
        let asked = async || anyhow::Ok(world.gpu_node().await?.spec.gpus);
        ensure!(asked().await?.values().any(|gpu| gpu.mig_mode.is_some()), "the policies ask for a MIG mode");
        for name in ["whole", "few"] {
            unmake(world, name).await?;
        }
        eventually("nothing is asked of the node", SOON, async || {
            let asked = asked().await?;
            let open = asked.values().all(|gpu| *gpu == GpuSpec::default());
            ensure!(open && asked.len() == gpus.len(), "{asked:?}");
            Ok(Some(()))
        })
        .await
    })
    .await;
}

#[tokio::test]
async fn of_two_policies_the_one_with_the_higher_priority_decides() {
    scenario("two_policies", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        let gpu = gpus(world).await?.remove(0);
        make(world, "general", json!({ "offer": "WholeOnly" })).await?;
        offers(world, &[(&gpu, &WHOLE)]).await?;
        let halves = json!({ "offer": "Layout", "layout": { "migDevices": { "3g.40gb": 2 } }, "priority": 10 });
        make(world, "special", halves).await?;
        offers(world, &[(&gpu, &HALVES)]).await?;
        reported(world, "special", "InForce", "True").await?;
        let general = reported(world, "general", "InForce", "False").await?;
        let overridden = &general.nodes[0].gpus.overridden;
        ensure!(overridden.len() == 1 && overridden[0].by == "special", "{general:?}");

        world.run_ready("half", &Claim::of(&[Request::mig("gpu", "3g.40gb")])).await?;
        let held = world.allocated("half").await?.remove(0).device;
        unmake(world, "special").await?;
        world.run("whole", &Claim::of(&[Request::gpu("gpu")])).await?;
        world.waits("whole").await?;
        let general = eventually("the policy waits for the pod", SOON, async || {
            let status = status(world, "general").await?;
            let waits = status.nodes.first().is_some_and(|node| !node.gpus.waiting.is_empty());
            Ok(waits.then_some(status))
        })
        .await?;
        let waiting = &general.nodes[0].gpus.waiting[0];
        ensure!(waiting.reason == "InUse" && waiting.message.contains(&held), "{waiting:?}");
        world.undisturbed("half").await?;
        world.delete("half").await?;
        world.ready("whole").await?;
        reported(world, "general", "InForce", "True").await?;

        // A policy that cannot be followed offers nothing, says why, and takes nothing from who has it.
        let missing = json!({ "offer": "Layout", "layout": { "name": "nobody-made-it" }, "priority": 20 });
        make(world, "missing", missing).await?;
        let status = reported(world, "missing", "Accepted", "False").await?;
        let accepted = status.conditions.iter().find(|condition| condition.type_ == "Accepted");
        let accepted = accepted.context("there is the condition")?;
        ensure!(accepted.reason == "NoSuchLayout" && accepted.message.contains("nobody-made-it"), "{accepted:?}");
        world.undisturbed("whole").await?;
        world.delete("whole").await?;
        offers(world, &[]).await
    })
    .await;
}

/// The article's ConfigMap is there, and kerf reads it.
async fn follow_layouts(world: &World) -> Result<()> {
    world.apply(NAMESPACE)?;
    world.apply(LAYOUTS)?;
    forget_label(world)?;
    world.kerf.upgrade(&["--set", "layouts.configMap=gpu-operator/nvidia-mig-config"])?;
    world.kerf.rolled_out(Part::Controller).await
}

/// The node's label chooses a layout.
pub(crate) fn choose(world: &World, layout: &str) -> Result<()> {
    label(world, &format!("{}={layout}", names::LABEL_MIG_CONFIG))
}

fn forget_label(world: &World) -> Result<()> {
    label(world, &format!("{}-", names::LABEL_MIG_CONFIG))
}

pub(crate) fn label(world: &World, label: &str) -> Result<()> {
    world.cluster.kubectl(&["label", "node", &world.cluster.node()?.name, "--overwrite", label]).map(drop)
}

/// The names of the node's GPUs, in the order of `nvidia-smi -L`.
pub(crate) async fn gpus(world: &World) -> Result<Vec<String>> {
    let status = world.gpu_node().await?.status.context("the node's status is written")?;
    Ok(status.gpus.into_iter().map(|gpu| gpu.name).collect())
}

/// Waits until exactly these devices are published: of each GPU those with these ends of their names.
pub(crate) async fn offers(world: &World, gpus: &[(&String, &[&str])]) -> Result<()> {
    let wanted: BTreeSet<String> =
        gpus.iter().flat_map(|(gpu, ends)| ends.iter().map(move |end| format!("{gpu}{end}"))).collect();
    eventually("exactly what is wanted is published", SOON, async || {
        let published = world.devices().await?;
        ensure!(published.len() == wanted.len(), "published: {published:?}, wanted: {wanted:?}");
        let published: BTreeSet<String> = published.into_iter().collect();
        ensure!(published == wanted, "published: {published:?}, wanted: {wanted:?}");
        Ok(Some(()))
    })
    .await
}

pub(crate) async fn make(world: &World, name: &str, spec: Value) -> Result<()> {
    let mut object = json!({
        "apiVersion": "kerf.dev/v1alpha1", "kind": "GpuPolicy",
        "metadata": { "name": name, "labels": { "kerf.dev/e2e": "true" } },
    });
    object["spec"] = spec;
    let policy: GpuPolicy = serde_json::from_value(object)?;
    Api::all(world.client.clone()).create(&PostParams::default(), &policy).await?;
    Ok(())
}

pub(crate) async fn unmake(world: &World, name: &str) -> Result<()> {
    Api::<GpuPolicy>::all(world.client.clone()).delete(name, &DeleteParams::default()).await?;
    Ok(())
}

async fn status(world: &World, name: &str) -> Result<GpuPolicyStatus> {
    Ok(Api::<GpuPolicy>::all(world.client.clone()).get(name).await?.status.unwrap_or_default())
}

/// Waits until a condition of the policy is as wanted, and returns the status.
pub(crate) async fn reported(world: &World, name: &str, condition: &str, wanted: &str) -> Result<GpuPolicyStatus> {
    eventually(&format!("{condition} of {name} is {wanted}"), SOON, async || {
        let status = status(world, name).await?;
        let found = status.conditions.iter().find(|known| known.type_ == condition);
        ensure!(found.is_some_and(|found| found.status == wanted), "{:?}", status.conditions);
        Ok(Some(status))
    })
    .await
}
