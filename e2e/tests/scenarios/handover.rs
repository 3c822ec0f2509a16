//! kerf is updated by Helm, and taken back, while pods come and go.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kerf_e2e::{Claim, NodeFile, Part, RETRIED, Request, World, eventually, scenario, seconds_to_ready, setting};
use kube::Api;
use kube::api::{DeleteParams, ListParams};
use serde_json::json;
use tokio::time::MissedTickBehavior;

/// Pods in all, one a second; a longer run with `KERF_HANDOVER_PODS`.
const PODS: usize = 45;

/// Pods between an update and its being taken back: as many seconds.
const EVERY: usize = 20;

/// Pods before the first: how long pods take here.
const BEFORE: usize = 5;

/// How much longer than that a pod may take.
const DELAY: i64 = 5;

/// How many pods may be on their way at a time. On a machine that starts fewer than one a second they would queue, and wait
/// for each other instead of for kerf.
const AT_ONCE: usize = 3;

#[tokio::test]
async fn pods_come_and_go_while_kerf_is_updated_and_taken_back() {
    // Long enough for a claim to be in work at any moment, and short enough for one a second on one GPU.
    let latency = json!({ "nvmlDeviceCreateGpuInstanceWithPlacement": "300ms" });
    let node = NodeFile::new().gpus("h100-80gb", 2).latency(latency);
    scenario("handover", node, async |world| {
        let pods = setting("KERF_HANDOVER_PODS", PODS)?;
        world.kerf.rolled_out(Part::Controller).await?;
        let slices = versions(world.published().await?);
        let mut took = BTreeMap::new();
        let mut ticks = tokio::time::interval(Duration::from_secs(1));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for number in 0..pods {
            ticks.tick().await;
            eventually("the pods before have run", Duration::from_secs(60), async || {
                end_what_runs(world, &mut took).await?;
                Ok((took.len() + AT_ONCE > number).then_some(()))
            })
            .await?;
            world.run(&format!("pod-{number}"), &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
            if number % EVERY == BEFORE {
                for part in [Part::KubeletPlugin, Part::Controller] {
                    world.kerf.expect_end(part).await?;
                }
                if (number / EVERY).is_multiple_of(2) {
                    world.kerf.update(&number.to_string())?;
                } else {
                    world.kerf.roll_back()?;
                }
            }
            ensure!(versions(world.slices().await?) == slices, "slices changed at pod {number}");
        }
        all_have_run(world, pods, &mut took).await?;
        for part in [Part::KubeletPlugin, Part::Controller] {
            world.kerf.rolled_out(part).await?;
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

/// The kubelet finds one plugin or two when it is back, and asks both until one says that it has taken over.
#[tokio::test]
async fn a_kubelet_that_restarts_in_the_middle_of_an_update_finds_its_plugin() {
    scenario("handover_kubelet", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        world.kerf.rolled_out(Part::Controller).await?;
        let slice = Claim::of(&[Request::mig("gpu", "1g.10gb")]);
        world.run_ready("before", &slice).await?;
        for round in ["1", "2"] {
            for part in [Part::KubeletPlugin, Part::Controller] {
                world.kerf.expect_end(part).await?;
            }
            world.kerf.update(round)?;
            eventually("two plugins are on the node", Duration::from_secs(60), async || {
                Ok((world.kerf.pods(Part::KubeletPlugin).await?.len() == 2).then_some(()))
            })
            .await?;
            world.cluster.tool(&["restart", "kubelet"])?;
            for number in 0..AT_ONCE {
                world.run(&format!("during-{round}-{number}"), &slice).await?;
            }
            for number in 0..AT_ONCE {
                // The first may come before the kubelet has registered the plugin anew.
                world.ready_within(&format!("during-{round}-{number}"), RETRIED).await?;
            }
            for part in [Part::KubeletPlugin, Part::Controller] {
                world.kerf.rolled_out(part).await?;
            }
            world.undisturbed("before").await?;
            for number in 0..AT_ONCE {
                world.delete(&format!("during-{round}-{number}")).await?;
            }
            world.instances(1).await?;
            sockets(world)?;
        }
        world.delete("before").await
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
        if let Some(seconds) = seconds_to_ready(&pod) {
            took.insert(number, seconds);
            world.pods().delete(&name, &DeleteParams::default()).await?;
        }
    }
    Ok(())
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
