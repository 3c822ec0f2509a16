//! Nodes of other shapes.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kerf_api::GpuOffer;
use kerf_e2e::{Claim, NodeFile, Request, World, eventually, scenario};
use serde_json::json;

#[tokio::test]
async fn a_node_with_sixteen_gpus_is_published_whole() {
    scenario("sixteen_gpus", NodeFile::new().gpus("h100-80gb", 16), async |world| {
        let slices = world.published().await?;
        let sets = slices.iter().map(|slice| slice.spec.shared_counters.as_ref().map_or(0, Vec::len));
        ensure!(sets.clone().sum::<usize>() == 16, "one counter set a GPU");
        ensure!(sets.max() <= Some(8), "at most eight counter sets in a slice");
        let devices = world.devices().await?;
        let whole = devices.iter().filter(|device| !device.contains("-mig-")).count();
        ensure!(whole == 16 && devices.len() == 16 * 26, "{} devices, {whole} of them whole", devices.len());
        world.run_ready("all-but-one", &Claim::of(&[Request::gpu("gpu").count(15)])).await?;
        ensure!(world.gpu_uuids("all-but-one", "main")?.len() == 15, "fifteen GPUs in the container");
        world.run_ready("slice", &Claim::of(&[Request::mig("gpu", "7g.80gb")])).await?;
        world.run("too-many", &Claim::of(&[Request::gpu("gpu")])).await?;
        world.waits("too-many").await?;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_mixed_node_offers_its_good_gpus_and_says_why_not_the_others() {
    let node = NodeFile::new()
        .gpu(json!({ "product": "a100-40gb", "mig": { "current": false, "pending": true } }))
        .gpus("h100-80gb", 1)
        .gpus("l40s", 1)
        .gpu(json!({ "product": "h100-80gb", "broken": true }));
    scenario("mixed_node", node, async |world| {
        world.published().await?;
        let gpus = world.gpu_node().await?.status.context("the node's status is written")?.gpus;
        let reasons: Vec<Option<&str>> =
            gpus.iter().map(|gpu| gpu.withheld.as_ref().map(|withheld| withheld.reason.as_str())).collect();
        let offers: Vec<GpuOffer> = gpus.iter().map(|gpu| gpu.offer).collect();
        ensure!(
            offers == [GpuOffer::Nothing, GpuOffer::WholeOrPartitions, GpuOffer::Whole, GpuOffer::Nothing],
            "{offers:?}, {reasons:?}"
        );
        ensure!(reasons == [Some("MigModePending"), None, None, Some("Unreadable")], "{reasons:?}");
        let withheld = gpus[0].withheld.as_ref().context("withheld")?;
        ensure!(withheld.message.contains("reset"), "the message says what to do: {}", withheld.message);

        world.run_ready("slice", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
        world.run_ready("whole", &Claim::of(&[Request::gpu("gpu")])).await?;
        let listing = world.shell("whole", "main", "nvidia-smi -L")?;
        ensure!(listing.contains("L40S"), "{listing}");
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_strangers_instance_blocks_only_what_overlaps_it() {
    let stranger = json!({ "create": { "gpu": "0", "profile": "3g.40gb", "start": 0, "compute": true } });
    let node = NodeFile::new().gpu(json!({ "product": "h100-80gb", "mig": { "current": true } })).fault(stranger);
    scenario("foreign_instance", node, async |world| {
        let id = world.instances(1).await?[0].1.id;
        blocked(world, &["-mig-4g40gb-0", "-mig-7g80gb-0", "-mig-1g10gb-0", "-mig-1g10gb-3"]).await?;
        let blocked_entries =
            world.gpu_node().await?.status.context("the node's status is written")?.gpus.remove(0).blocked;
        ensure!(blocked_entries.len() == 1 && blocked_entries[0].reason == "ForeignInstance", "{blocked_entries:?}");

        world.run("needs-its-place", &Claim::of(&[Request::mig("gpu", "4g.40gb")])).await?;
        world.waits("needs-its-place").await?;
        for name in ["one", "two"] {
            world.run_ready(name, &Claim::of(&[Request::mig("gpu", "3g.40gb")])).await?;
            ensure!(world.mig_uuids(name, "main")?.len() == 1, "{name} sees one slice");
        }
        let instances = world.instances(2).await?;
        ensure!(instances.iter().any(|(_, instance)| instance.id == id), "one has the stranger's: {instances:?}");
        for name in ["one", "two"] {
            world.delete(name).await?;
        }
        let left = world.instances(1).await?;
        ensure!(left[0].1.id == id && left[0].1.compute_instances.len() == 1, "it is as it was: {left:?}");

        world.simulation.tell(&["destroy", "0", &id.to_string()])?;
        blocked(world, &[]).await?;
        world.ready("needs-its-place").await
    })
    .await;
}

/// Waits until devices with these ends of their names are tainted, or none is where none is given.
async fn blocked(world: &World, ends: &[&str]) -> Result<()> {
    eventually("the taints are as they should be", Duration::from_secs(120), async || {
        let slices = world.slices().await?;
        let devices = slices.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default());
        let tainted: Vec<String> = devices
            .filter(|device| {
                let taints = device.taints.as_deref().unwrap_or_default();
                taints.iter().any(|taint| taint.key == "kerf.dev/foreign-instance" && taint.effect == "NoSchedule")
            })
            .map(|device| device.name)
            .collect();
        let is = |end: &&str| tainted.iter().any(|name| name.ends_with(end));
        ensure!(ends.iter().all(is) && (tainted.is_empty() == ends.is_empty()), "tainted: {tainted:?}");
        Ok(Some(()))
    })
    .await
}
