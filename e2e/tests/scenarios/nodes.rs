//! Nodes of other shapes.

use anyhow::{Context, ensure};
use kerf_api::GpuOffer;
use kerf_e2e::{Claim, NodeFile, Request, scenario};
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
