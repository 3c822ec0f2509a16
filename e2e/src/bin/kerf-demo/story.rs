//! The story itself, told by what the API shows: the same on every cluster.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use kerf_e2e::{Claim, Request, Tenant, eventually};

/// How long kerf may take to publish what a node has.
const SOON: Duration = Duration::from_secs(120);

/// Prints one step with the time since the start and what it took.
pub(crate) struct Story {
    start: Instant,
    last: Instant,
}

impl Story {
    /// The clock starts.
    pub(crate) fn begin() -> Story {
        let now = Instant::now();
        Story { start: now, last: now }
    }

    /// One line.
    pub(crate) fn step(&mut self, text: &str) {
        let now = Instant::now();
        println!("{:7.1} s  (+{:4.1} s)  {text}", (now - self.start).as_secs_f64(), (now - self.last).as_secs_f64());
        self.last = now;
    }

    /// Slices come, are used and go; the node has two H100 and an L40S.
    pub(crate) async fn tell(&mut self, user: &Tenant) -> Result<()> {
        let slices = eventually("kerf publishes the node's devices", SOON, async || user.pool().await).await?;
        let devices = user.devices().await?;
        let whole = devices.iter().filter(|name| !name.contains("-mig-")).count();
        let partitions = devices.len() - whole;
        let node = &user.cluster.node()?.name;
        ensure!(partitions > 0, "kerf offers whole GPUs only: the API server's gate DRAPartitionableDevices is off");
        self.step(&format!(
            "node {node} has 2 x H100 80GB and 1 x L40S: {} devices in {} slices, {whole} whole GPUs and {partitions} ways to cut them",
            devices.len(),
            slices.len(),
        ));

        user.run_ready("small", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
        self.step("pod small asked for 1g.10gb and runs; its own nvidia-smi -L prints:");
        let listing = user.shell("small", "main", "nvidia-smi -L")?;
        listing.lines().for_each(|line| println!("                     | {line}"));
        ensure!(user.mig_uuids("small", "main")?.len() == 1, "the pod must see exactly one MIG device");

        user.run_ready("large", &Claim::of(&[Request::mig("gpu", "3g.40gb")])).await?;
        let gpus = carved(user, 2).await?;
        ensure!(gpus[0] == gpus[1], "the second slice must land on the same GPU: {gpus:?}");
        self.step(&format!("pod large asked for 3g.40gb and runs beside it, on the same GPU {}", gpus[0]));

        let hopper = r#"device.attributes["gpu.nvidia.com"].architecture == "Hopper""#;
        user.run_ready("whole", &Claim::of(&[Request::gpu("gpu").cel(hopper)])).await?;
        let device = user.allocated("whole").await?.remove(0).device;
        self.step(&format!("pod whole asked for a whole H100 and runs on the other one, {device}"));

        user.run("waiting", &Claim::of(&[Request::mig("gpu", "7g.80gb")])).await?;
        let reason = user.waits("waiting").await?;
        self.step(&format!("pod waiting asked for 7g.80gb; no GPU is free for it, so it waits: {reason}"));

        try_join_all(["small", "large", "whole", "waiting"].map(|pod| user.delete(pod))).await?;
        carved(user, 0).await?;
        self.step(&format!("the pods are deleted; all {whole} GPUs hold no instance again"));
        Ok(())
    }
}

/// Waits until so many GPU instances live on the node, and returns the name of the GPU of each.
async fn carved(user: &Tenant, count: usize) -> Result<Vec<String>> {
    eventually(&format!("{count} GPU instances live on the node"), SOON, async || {
        let status = user.gpu_node().await?.status.context("the node's status is written")?;
        let instances = status.gpus.iter().flat_map(|gpu| {
            let live = gpu.mig.iter().flat_map(|mig| &mig.instances);
            live.map(|_| gpu.name.clone())
        });
        let instances: Vec<String> = instances.collect();
        ensure!(instances.len() == count, "{} live: {instances:?}", instances.len());
        Ok(Some(instances))
    })
    .await
}
