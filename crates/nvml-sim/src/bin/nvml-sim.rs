//! `nvml-sim`: serves a simulated GPU node, and tells it what happens to it.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use kerf_nvml_sim::client::Client;
use kerf_nvml_sim::daemon::{NodeState, Options, serve};
use kerf_nvml_sim::node_file::{NodeSpec, parse_duration};
use kerf_nvml_sim::signals::TermSignals;
use kerf_nvml_sim::view::{Node, PciAddress};
use kerf_nvml_sim::wire::{Control, Op};

/// A simulated GPU node below NVML.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Lay out a driver root and serve it until SIGTERM. Prints `ready` when it does.
    Serve {
        /// The node file (YAML).
        #[arg(long)]
        node: PathBuf,
        /// The driver root: a directory of its own.
        #[arg(long)]
        root: PathBuf,
        /// Where NVIDIA's own programs are (DIR/usr/bin/nvidia-smi, ...), to have them in the driver root.
        #[arg(long)]
        programs: Option<PathBuf>,
    },
    /// Tell a served node what happens to it, or ask how it is.
    Ctl {
        /// The driver root.
        #[arg(long)]
        root: PathBuf,
        #[command(subcommand)]
        command: Ctl,
    },
}

#[derive(Subcommand)]
enum Ctl {
    /// Print the state of every GPU as JSON.
    State,
    /// Reset a GPU: the pending MIG mode takes effect, instances are lost.
    Reset {
        /// Number, PCI address or UUID.
        gpu: String,
    },
    /// Unload and load the driver: all instances are lost, and MIG mode where it does not survive.
    Reload,
    /// Set how long an NVML function takes.
    Latency {
        /// `<function>=<time>`, the time in milliseconds or as `1s`, `250ms`.
        latency: String,
    },
    /// Make a GPU unreadable.
    Break {
        /// Number, PCI address or UUID.
        gpu: String,
    },
    /// Make it readable again.
    Mend {
        /// Number, PCI address or UUID.
        gpu: String,
    },
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Serve { node, root, programs } => {
            // Before any thread exists, so that all of them inherit it.
            let signals = TermSignals::block()?;
            let root = std::path::absolute(root)?;
            let serving = serve(Options { node: NodeSpec::read(&node)?, root, programs })?;
            println!("ready");
            signals.wait()?;
            drop(serving);
            Ok(())
        }
        Command::Ctl { root, command } => control(&Client::new(std::path::absolute(root)?), command),
    }
}

fn control(client: &Client, command: Ctl) -> Result<()> {
    let ask = |control| client.ask::<()>("", Op::Control(control)).context("the node did not do it");
    match command {
        Ctl::State => {
            let state: NodeState = client.ask("", Op::Control(Control::State)).context("no state to be had")?;
            println!("{}", serde_json::to_string_pretty(&state)?);
            Ok(())
        }
        Ctl::Reset { gpu } => ask(Control::Reset(place(client, &gpu)?)),
        Ctl::Reload => ask(Control::Reload),
        Ctl::Latency { latency } => {
            let (function, time) = latency.split_once('=').context("expected <function>=<time>")?;
            let ms = parse_duration(time).and_then(|time| u64::try_from(time.as_millis()).ok());
            let ms = ms.with_context(|| format!("{time:?} is no time such as 1s, 250ms or 250"))?;
            ask(Control::Latency(function.to_owned(), ms))
        }
        Ctl::Break { gpu } => ask(Control::Break(place(client, &gpu)?, true)),
        Ctl::Mend { gpu } => ask(Control::Break(place(client, &gpu)?, false)),
    }
}

/// The GPU that is meant, as its number in the order of PCI addresses.
fn place(client: &Client, gpu: &str) -> Result<usize> {
    let node: Node = client.ask("", Op::Node).context("no GPUs to be had")?;
    let address = PciAddress::parse(gpu).map(|address| address.to_string());
    let number = gpu.parse::<usize>().ok().filter(|number| *number < node.gpus.len());
    let named = || node.gpus.iter().position(|one| one.uuid == gpu || Some(&one.pci) == address.as_ref());
    number.or_else(named).with_context(|| format!("the node has no GPU {gpu:?}"))
}
