//! API servers that cannot do everything.

use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Event;
use kerf_e2e::{Claim, HEARS_AGAIN, NodeFile, Request, World, eventually, scenario};
use kube::Api;
use kube::api::ListParams;

const GATE: &str = "DRAPartitionableDevices";

#[tokio::test]
async fn without_partitionable_devices_whole_gpus_work_and_nothing_overlaps() {
    scenario("no_counters", NodeFile::two_h100_and_l40s(), async |world| {
        world.cluster.tool(&["restart", "kube-apiserver", "--feature-gates", &format!("{GATE}=false")])?;
        world.patience = HEARS_AGAIN;
        let outcome = whole_gpus_only(world).await;
        world.cluster.tool(&["restart", "kube-apiserver", "--feature-gates", &format!("{GATE}=true")])?;
        outcome?;
        eventually("partitions are published again", Duration::from_secs(120), async || {
            Ok(world.devices().await?.iter().any(|device| device.contains("-mig-")).then_some(()))
        })
        .await?;
        world.run_ready("slice", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await
    })
    .await;
}

/// The one scenario for every Kubernetes version and choice of gates, defaults of 1.34 and 1.35 included.
#[tokio::test]
async fn kerf_offers_what_the_server_supports() {
    scenario("what_is_supported", NodeFile::two_h100_and_l40s(), async |world| {
        if !world.cluster.has_partitions()? {
            return whole_gpus_only(world).await;
        }
        let devices = world.devices().await?;
        ensure!(devices.len() == 2 * 26 + 1, "{devices:?}");
        world.run_ready("slice", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
        world.run_ready("whole", &Claim::of(&[Request::gpu("gpu")])).await
    })
    .await;
}

async fn whole_gpus_only(world: &World) -> Result<()> {
    eventually("no partition is published", Duration::from_secs(120), async || {
        let devices = world.devices().await?;
        Ok((devices.len() == 3 && devices.iter().all(|device| !device.contains("-mig-"))).then_some(()))
    })
    .await?;
    for slice in world.slices().await? {
        ensure!(slice.spec.shared_counters.is_none(), "{:?}", slice.metadata.name);
    }
    let events: Api<Event> = Api::all(world.client.clone());
    eventually("an Event says which gate is missing", Duration::from_secs(30), async || {
        let events = events.list(&ListParams::default()).await?.items;
        Ok(events.iter().any(|event| event.message.as_ref().is_some_and(|text| text.contains(GATE))).then_some(()))
    })
    .await?;
    world.run_ready("whole", &Claim::of(&[Request::gpu("gpu")])).await?;
    ensure!(world.gpu_uuids("whole", "main")?.len() == 1, "the container has its GPU");
    world.delete("whole").await
}
