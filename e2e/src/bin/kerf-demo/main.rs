//! `make demo`: the story of a slice, told step by step on a real cluster with simulated GPUs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use kerf_e2e::{NodeFile, World, eventually};

mod story;
mod visit;

/// Shows kerf at work, or ends what an earlier show left running.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    act: Act,
}

#[derive(Subcommand)]
enum Act {
    /// Tells the story on the cluster that kerf-cluster started, and leaves everything running.
    Up {
        /// Where logs and the simulated driver are kept.
        #[arg(long)]
        state: PathBuf,
    },
    /// Ends the simulator that `up` left running.
    Down {
        /// What `up` was told.
        #[arg(long)]
        state: PathBuf,
    },
    /// Tells the story on the cluster of KUBECONFIG, on one of its nodes, and leaves everything running.
    Visit(visit::Images),
    /// Takes from the cluster of KUBECONFIG what `visit` brought.
    Leave,
}

#[tokio::main]
async fn main() -> Result<()> {
    match Arguments::parse().act {
        Act::Up { state } => up(&state).await,
        Act::Down { state } => down(&state).await,
        Act::Visit(images) => visit::visit(&images).await,
        Act::Leave => visit::leave(),
    }
}

async fn up(state: &Path) -> Result<()> {
    std::fs::create_dir_all(state)?;
    let mut story = story::Story::begin();
    let world = World::start("demo", &NodeFile::two_h100_and_l40s().latency("real".into()), state).await?;
    let outcome = story.tell(&world).await;
    let left = world.leave().context("the simulator runs")?;
    std::fs::write(state.join("process"), left.to_string())?;
    outcome
}

async fn down(state: &Path) -> Result<()> {
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
