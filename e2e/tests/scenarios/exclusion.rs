//! What stands on the same hardware excludes itself.

use std::time::Duration;

use anyhow::ensure;
use kerf_e2e::{Claim, NodeFile, RETRIED, Request, eventually, scenario};

#[tokio::test]
async fn whole_gpu_and_partition_exclude_each_other_in_both_orders() {
    scenario("whole_or_partition", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        let whole = Claim::of(&[Request::gpu("gpu")]);
        let partition = Claim::of(&[Request::mig("gpu", "2g.20gb")]);

        world.run_ready("whole-first", &whole).await?;
        ensure!(world.gpu_uuids("whole-first", "main")?.len() == 1, "one GPU in the container");
        ensure!(world.mig_uuids("whole-first", "main")?.is_empty(), "and no MIG device");
        world.run("partition-second", &partition).await?;
        world.waits("partition-second").await?;
        world.delete("whole-first").await?;
        world.ready("partition-second").await?;
        world.instances(1).await?;

        world.run("whole-again", &whole).await?;
        world.waits("whole-again").await?;
        world.delete("partition-second").await?;
        world.ready("whole-again").await?;
        world.instances(0).await?;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn two_gpus_are_carved_in_parallel() {
    let hangs = "nvmlDeviceCreateGpuInstanceWithPlacement";
    let fault = serde_json::json!({ "call": { "function": hangs, "gpu": "0", "hang": "forever" } });
    scenario("parallel", NodeFile::new().gpus("h100-80gb", 2).fault(fault), async |world| {
        let on = |gpu: &str| {
            let mine = format!(r#"device.attributes["resource.kubernetes.io"].pciBusID == "{gpu}""#);
            Claim::of(&[Request::mig("gpu", "1g.10gb").cel(&mine)])
        };
        let gpus: Vec<String> = world.simulation.state()?.into_iter().map(|gpu| gpu.pci_bus_id).collect();
        world.run("left", &on(&gpus[0])).await?;
        eventually("the first GPU is being carved", Duration::from_secs(60), async || {
            let faults: serde_json::Value = serde_json::from_slice(&world.simulation.tell(&["fault", "list"])?)?;
            Ok((faults[0]["met"] == 1).then_some(()))
        })
        .await?;
        world.run_ready("right", &on(&gpus[1])).await?;
        ensure!(world.simulation.instances()?.len() == 1, "the first GPU's carve has not ended");
        world.simulation.tell(&["fault", "clear", "all"])?;
        // Where the second pod took long, the kubelet has given up the first one's try.
        world.ready_within("left", RETRIED).await
    })
    .await;
}
