//! The plugin is updated while it serves, as a DaemonSet with maxSurge 1 does it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kerf_e2e::{Claim, NodeFile, Program, Request, World, eventually, scenario, setting};
use kube::Api;
use kube::api::{DeleteParams, ListParams};
use serde_json::json;
use tokio::time::MissedTickBehavior;

/// Pods in all, one a second; a longer run with `KERF_HANDOVER_PODS`.
const PODS: usize = 45;

/// Pods between two updates: as many seconds.
const EVERY: usize = 15;

/// Pods before the first: how long pods take here.
const BEFORE: usize = 5;

/// How much longer than that a pod may take.
const DELAY: i64 = 5;

/// A plugin that is to end when the other one serves: the former one, or the new one, where an update is taken back.
struct Update {
    other: Option<Program>,
    is_taken_back: bool,
}

#[tokio::test]
async fn pods_come_and_go_while_the_plugin_is_updated() {
    // Long enough for a claim to be in work at any moment, and short enough for one a second on one GPU.
    let latency = json!({ "nvmlDeviceCreateGpuInstanceWithPlacement": "300ms" });
    let node = NodeFile::new().gpus("h100-80gb", 2).latency(latency);
    scenario("handover", node, async |world| {
        let pods = setting("KERF_HANDOVER_PODS", PODS)?;
        let slices = versions(world.published().await?);
        let mut update: Option<Update> = None;
        let mut ending = Vec::new();
        let mut took = BTreeMap::new();
        let mut ticks = tokio::time::interval(Duration::from_secs(1));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for number in 0..pods {
            ticks.tick().await;
            world.run(&format!("pod-{number}"), &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
            end_what_runs(world, &mut took).await?;
            if number % EVERY == BEFORE {
                let uid = format!("00000000-0000-4000-8000-{number:012}");
                let is_taken_back = number / EVERY % 2 == 1;
                update = Some(Update { other: world.kerf.start_successor(&uid)?, is_taken_back });
            }
            if let Some(Update { other, is_taken_back }) = &mut update
                && let Some(new) = &world.kerf.plugin
                && world.is_spoken_for_by(new).await?
            {
                if *is_taken_back {
                    // The kubelet is calling the one that is about to end: not just now.
                    std::mem::swap(other, &mut world.kerf.plugin);
                    all_have_run(world, number + 1, &mut took).await?;
                }
                if let Some(other) = other.take() {
                    other.ask_to_end()?;
                    ending.push(other);
                }
                update = None;
            }
            ensure!(versions(world.slices().await?) == slices, "slices changed at pod {number}");
        }
        all_have_run(world, pods, &mut took).await?;
        ensure!(update.is_none() && ending.len() == pods.div_ceil(EVERY), "{} updates", ending.len());
        for mut plugin in ending {
            plugin.ended().await?;
        }

        let events: Api<Event> = Api::namespaced(world.client.clone(), world.namespace());
        let failed = events.list(&ListParams::default().fields("reason=FailedPrepareDynamicResources")).await?.items;
        ensure!(failed.is_empty(), "{:?}", failed.iter().map(|event| &event.message).collect::<Vec<_>>());
        let longest =
            |of: &mut dyn Iterator<Item = (&usize, &i64)>| of.map(|(_, took)| *took).max().unwrap_or_default();
        let before = longest(&mut took.iter().filter(|(number, _)| **number < BEFORE));
        let all = longest(&mut took.iter());
        println!("handover: {pods} pods took at most {all} s, the first {BEFORE} at most {before} s");
        ensure!(all <= before + DELAY, "{took:?}");
        ensure!(versions(world.slices().await?) == slices, "slices changed in the end");
        sockets(world)
    })
    .await;
}

async fn all_have_run(world: &World, pods: usize, took: &mut BTreeMap<usize, i64>) -> Result<()> {
    eventually("all pods have run", Duration::from_secs(60), async || {
        end_what_runs(world, took).await?;
        Ok((took.len() == pods).then_some(()))
    })
    .await
}

/// Deletes the pods that run, and notes how many seconds each took.
async fn end_what_runs(world: &World, took: &mut BTreeMap<usize, i64>) -> Result<()> {
    for pod in world.pods().list(&ListParams::default()).await?.items {
        let Some(name) = pod.metadata.name.clone().filter(|_| pod.metadata.deletion_timestamp.is_none()) else {
            continue;
        };
        let number: usize = name.trim_start_matches("pod-").parse()?;
        if let Some(seconds) = seconds_to_ready(pod) {
            took.insert(number, seconds);
            world.pods().delete(&name, &DeleteParams::default()).await?;
        }
    }
    Ok(())
}

/// How long a pod took from its creation until it was ready.
fn seconds_to_ready(pod: Pod) -> Option<i64> {
    let created = pod.metadata.creation_timestamp?.0;
    let conditions = pod.status?.conditions?;
    let ready = conditions.into_iter().find(|condition| condition.type_ == "Ready" && condition.status == "True")?;
    Some(ready.last_transition_time?.0.as_second() - created.as_second())
}

fn versions(slices: Vec<ResourceSlice>) -> BTreeSet<(Option<String>, Option<String>)> {
    slices.into_iter().map(|slice| (slice.metadata.name, slice.metadata.resource_version)).collect()
}

/// One plugin is left, with its two sockets.
fn sockets(world: &World) -> Result<()> {
    let kubelet = &world.cluster.node()?.kubelet_root;
    let mut sockets = Vec::new();
    for directory in ["plugins_registry", "plugins/gpu.nvidia.com"] {
        for entry in std::fs::read_dir(kubelet.join(directory))? {
            sockets.extend(entry?.file_name().into_string().ok().filter(|name| name.ends_with(".sock")));
        }
    }
    ensure!(sockets.len() == 2, "{sockets:?}");
    Ok(())
}
