//! Whatever restarts, pods go on and nothing is lost or carved twice.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kerf_e2e::{Claim, NodeFile, Part, RETRIED, Request, World, claim_ref, eventually, scenario};

#[tokio::test]
async fn kubelet_restart_keeps_ids_and_pods() {
    scenario("kubelet_restart", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        world.run_ready("steady", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
        let before = world.instances(1).await?.remove(0).1;
        let claim = world.pods().get("steady").await?.status.unwrap_or_default().resource_claim_statuses;
        let claim = claim.and_then(|mut claims| claims.pop()?.resource_claim_name).context("the pod has a claim")?;
        let uid = world.claim(&claim).await?.metadata.uid.context("a claim has a UID")?;
        let ask = vec![claim_ref(world.namespace(), &claim, &uid)];
        let first = world.kubelet().await?.prepare(ask.clone()).await?;
        restart_kubelet(world).await?;

        let again = world.kubelet().await?.prepare(ask).await?;
        ensure!(first == again && first[&uid].error.is_empty(), "first {first:?}, again {again:?}");
        let after = world.instances(1).await?.remove(0).1;
        ensure!(before.id == after.id, "{before:?} became {after:?}");
        ensure!(before.compute_instances[0].uuid == after.compute_instances[0].uuid, "{before:?} became {after:?}");
        world.undisturbed("steady").await?;
        world.run("next", &Claim::of(&[Request::mig("gpu", "2g.20gb")])).await?;
        // The slices may be back before the kubelet has registered the plugin anew.
        world.ready_within("next", RETRIED).await?;
        world.delete("steady").await?;
        world.instances(1).await?;
        Ok(())
    })
    .await;
}

/// Restarts the kubelet and waits until kerf's devices are published again.
pub(crate) async fn restart_kubelet(world: &World) -> Result<()> {
    world.published().await?;
    let slices = slice_uids(world).await?;
    world.cluster.tool(&["restart", "kubelet"])?;
    // A kubelet that starts deletes all slices of its node.
    eventually("the slices were wiped and are back", Duration::from_secs(90), async || {
        let now = slice_uids(world).await?;
        Ok((now.len() == slices.len() && now.is_disjoint(&slices)).then_some(()))
    })
    .await?;
    world.published().await.map(drop)
}

#[tokio::test]
async fn plugin_killed_while_pods_run_cleans_up_after_its_return() {
    scenario("plugin_killed", NodeFile::new().gpus("h100-80gb", 2), async |world| {
        world.run_ready("slice", &Claim::of(&[Request::mig("gpu", "3g.40gb")])).await?;
        world.run_ready("whole", &Claim::of(&[Request::gpu("gpu")])).await?;
        let before = world.instances(1).await?.remove(0).1;

        world.kerf.kill(Part::KubeletPlugin).await?;
        world.undisturbed("slice").await?;
        world.kerf.registered().await?;
        world.run_ready("after", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
        let after = world.instances(2).await?;
        ensure!(after.iter().any(|(_, instance)| instance.id == before.id), "{after:?}");
        world.undisturbed("slice").await?;
        world.undisturbed("whole").await?;
        for pod in ["slice", "whole", "after"] {
            world.delete(pod).await?;
        }
        world.nothing_is_left().await
    })
    .await;
}

#[tokio::test]
async fn plugin_away_for_40_seconds_takes_its_slices_along() {
    scenario("plugin_away", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        world.run_ready("steady", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
        world.kerf.kill(Part::KubeletPlugin).await?;
        world.kerf.keep_plugin_away(true).await?;
        let gone = std::time::Instant::now();
        // The kubelet wipes a driver's slices 30 s after it lost the plugin, and the lease runs out at the same time.
        eventually("the slices are gone", Duration::from_secs(60), async || {
            Ok(world.slices().await?.is_empty().then_some(()))
        })
        .await?;
        while gone.elapsed() < Duration::from_secs(40) {
            ensure!(world.slices().await?.is_empty(), "slices came back without a plugin");
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        world.undisturbed("steady").await?;
        world.kerf.keep_plugin_away(false).await?;
        world.kerf.registered().await?;
        world.published().await?;
        world.run_ready("next", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
        world.undisturbed("steady").await
    })
    .await;
}

async fn slice_uids(world: &World) -> Result<BTreeSet<String>> {
    Ok(world.slices().await?.into_iter().filter_map(|slice| slice.metadata.uid).collect())
}
