//! `make demo`: the story of a slice, told step by step on a real cluster with simulated GPUs.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use futures::future::try_join_all;
use kerf_e2e::{Claim, NodeFile, Request, World, eventually};

/// Shows kerf at work, or ends what an earlier show left running.
#[derive(Parser)]
struct Arguments {
    /// Where logs and the simulated driver are kept.
    #[arg(long)]
    state: PathBuf,
    #[command(subcommand)]
    act: Act,
}

#[derive(Clone, Copy, Subcommand)]
enum Act {
    /// Tells the story and leaves everything running.
    Up,
    /// Ends the simulator that `up` left running.
    Down,
}

#[tokio::main]
async fn main() -> Result<()> {
    let Arguments { state, act } = Arguments::parse();
    match act {
        Act::Up => up(&state).await,
        Act::Down => down(&state).await,
    }
}

/// Prints one step with the time since the start and what it took.
struct Story {
    start: Instant,
    last: Instant,
}

impl Story {
    fn step(&mut self, text: &str) {
        let now = Instant::now();
        println!("{:7.1} s  (+{:4.1} s)  {text}", (now - self.start).as_secs_f64(), (now - self.last).as_secs_f64());
        self.last = now;
    }
}

async fn up(state: &std::path::Path) -> Result<()> {
    std::fs::create_dir_all(state)?;
    let mut story = Story { start: Instant::now(), last: Instant::now() };
    let mut world = World::start("demo", &NodeFile::two_h100_and_l40s().latency("real".into()), state).await?;
    let outcome = tell(&mut world, &mut story).await;
    let left = world.leave().context("the simulator runs")?;
    std::fs::write(state.join("process"), left.to_string())?;
    outcome
}

async fn tell(world: &mut World, story: &mut Story) -> Result<()> {
    let slices = world.published().await?;
    let devices = world.devices().await?;
    let whole = devices.iter().filter(|name| !name.contains("-mig-")).count();
    let node = world.cluster.node()?.name.clone();
    story.step(&format!(
        "node {node} has 2 x H100 80GB and 1 x L40S: {} devices in {} slices, {whole} whole GPUs and {} ways to cut them",
        devices.len(),
        slices.len(),
        devices.len() - whole
    ));

    world.run_ready("small", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
    story.step("pod small asked for 1g.10gb and runs; its own nvidia-smi -L prints:");
    let listing = world.shell("small", "main", "nvidia-smi -L")?;
    listing.lines().for_each(|line| println!("                     | {line}"));
    ensure!(world.mig_uuids("small", "main")?.len() == 1, "the pod must see exactly one MIG device");

    world.run_ready("large", &Claim::of(&[Request::mig("gpu", "3g.40gb")])).await?;
    let instances = world.instances(2).await?;
    ensure!(instances[0].0 == instances[1].0, "the second slice must land on the same GPU: {instances:?}");
    story.step(&format!("pod large asked for 3g.40gb and runs beside it, on the same GPU {}", instances[0].0));

    let hopper = r#"device.attributes["gpu.nvidia.com"].architecture == "Hopper""#;
    world.run_ready("whole", &Claim::of(&[Request::gpu("gpu").cel(hopper)])).await?;
    let device = world.allocated("whole").await?.remove(0).device;
    story.step(&format!("pod whole asked for a whole H100 and runs on the other one, {device}"));

    world.run("waiting", &Claim::of(&[Request::mig("gpu", "7g.80gb")])).await?;
    let reason = world.waits("waiting").await?;
    story.step(&format!("pod waiting asked for 7g.80gb; no GPU is free for it, so it waits: {reason}"));

    try_join_all(["small", "large", "whole", "waiting"].map(|pod| world.delete(pod))).await?;
    let gpus = eventually("the GPUs are empty", Duration::from_secs(60), async || {
        let gpus = world.simulation.state()?;
        Ok(gpus.iter().all(|gpu| gpu.instances().is_empty()).then_some(gpus))
    })
    .await?;
    story.step(&format!("the pods are deleted; all {} GPUs hold no instance again", gpus.len()));
    Ok(())
}

async fn down(state: &std::path::Path) -> Result<()> {
    let file = state.join("process");
    let Ok(pid) = std::fs::read_to_string(&file) else { return Ok(()) };
    if is_ours(&pid) {
        std::process::Command::new("kill").arg(&pid).status().context("cannot run kill")?;
        eventually(
            &format!("process {pid} ends"),
            Duration::from_secs(30),
            async || Ok((!is_ours(&pid)).then_some(())),
        )
        .await?;
    }
    std::fs::remove_file(&file)?;
    Ok(())
}

/// Whether the process is still the simulator: the id may have been given to another since.
fn is_ours(pid: &str) -> bool {
    let name = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    name.split('\0').next().unwrap_or_default().ends_with("nvml-sim")
}
