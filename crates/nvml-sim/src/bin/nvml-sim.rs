//! `nvml-sim`: serves a simulated GPU node, and tells it what happens to it.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use kerf_nvml_sim::client::Client;
use kerf_nvml_sim::code::Code;
use kerf_nvml_sim::daemon::{Options, serve};
use kerf_nvml_sim::fault::{Fault, ForeignInstance, GpuName};
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
    /// Tell a served node what happens to it, or ask how it is. A GPU is named by its number in the order of PCI
    /// addresses, by its PCI address or by its UUID.
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
        gpu: GpuName,
    },
    /// Unload and load the driver: all instances are lost, and MIG mode where it does not survive.
    Reload,
    /// Boot the node: as reload, and lost GPUs are back, and device nodes and kernel files are made anew. Call faults stay
    /// armed; processes and other users are gone.
    Reboot,
    /// Make something go wrong: prints the id of the fault. Or list what is armed, or clear it.
    #[command(subcommand)]
    Fault(FaultCommand),
    /// Create a GPU instance as another administrator would: prints its ids as JSON. No fault of a call is met.
    Create(ForeignInstance),
    /// Destroy a GPU instance and the compute instances in it as another administrator would.
    Destroy {
        /// Number, PCI address or UUID.
        gpu: GpuName,
        /// Its id.
        gi: u32,
    },
    /// Set how long an NVML function takes.
    Latency {
        /// `<function>=<time>`, the time in milliseconds or as `1s`, `250ms`.
        latency: String,
    },
    /// Make a GPU unreadable.
    Break {
        /// Number, PCI address or UUID.
        gpu: GpuName,
    },
    /// Make it readable again.
    Mend {
        /// Number, PCI address or UUID.
        gpu: GpuName,
    },
}

#[derive(Subcommand)]
enum FaultCommand {
    #[command(flatten)]
    Arm(Fault),
    /// Print the faults as JSON, with how often each was met; also those that are over, until they are cleared.
    List,
    /// Clear a fault: calls that hang go on, users are gone, a lost GPU is back without its instances, what is missing
    /// appears.
    Clear {
        /// Its id, or `all`.
        id: Which,
    },
}

/// Which faults are meant.
#[derive(Clone, Copy)]
enum Which {
    All,
    One(u64),
}

impl std::str::FromStr for Which {
    type Err = String;

    fn from_str(text: &str) -> Result<Which, String> {
        match text {
            "all" => Ok(Which::All),
            id => id.parse().map(Which::One).map_err(|_| format!("{text:?} is neither the id of a fault nor all")),
        }
    }
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
        Ctl::State => print(&client.state().context("no state to be had")?),
        Ctl::Reset { gpu } => ask(Control::Reset(place(client, &gpu)?)),
        Ctl::Reload => ask(Control::Reload),
        Ctl::Reboot => ask(Control::Reboot),
        Ctl::Fault(FaultCommand::Arm(fault)) => {
            fault.check()?;
            fault.gpu().map(|gpu| place(client, gpu)).transpose()?;
            println!("{}", client.arm(fault).context("the node did not do it")?);
            Ok(())
        }
        Ctl::Fault(FaultCommand::List) => print(&client.faults().context("no faults to be had")?),
        Ctl::Fault(FaultCommand::Clear { id: Which::All }) => ask(Control::ClearAll),
        Ctl::Fault(FaultCommand::Clear { id: Which::One(id) }) => match client.clear(id) {
            Err(Code::NOT_FOUND) => bail!("no fault {id} is armed"),
            done => done.context("the node did not do it"),
        },
        Ctl::Create(instance) => {
            place(client, &instance.gpu)?;
            print(&client.create(instance).context("the instance was not created")?)
        }
        Ctl::Destroy { gpu, gi } => {
            place(client, &gpu)?;
            client.destroy(gpu, gi).context("the instance was not destroyed")
        }
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

fn print(found: &impl serde::Serialize) -> Result<()> {
    println!("{}", serde_json::to_string_pretty(found)?);
    Ok(())
}

/// The GPU that is meant, as its number in the order of PCI addresses.
fn place(client: &Client, gpu: &GpuName) -> Result<usize> {
    let node: Node = client.ask("", Op::Node).context("no GPUs to be had")?;
    let addresses: Option<Vec<PciAddress>> = node.gpus.iter().map(|one| PciAddress::parse(&one.pci)).collect();
    let addresses = addresses.context("the node names a GPU by what is no PCI address")?;
    let names: Vec<_> = node.gpus.iter().map(|one| one.uuid.as_str()).zip(addresses).collect();
    gpu.place(&names).with_context(|| format!("the node has no GPU {gpu}"))
}
