//! The front of `nvidia-smi` in a simulated driver root.
//!
//! With NVIDIA's own program on board ([`payload`]) it answers only `compute-policy`, which the genuine program does
//! over NVML's private interface, and hands everything else to it. Without, it also answers what people and tests look
//! at most: `-L` and `mig -lgi`, in nvidia-smi's words.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use clap::{CommandFactory, Parser, Subcommand};
use kerf_nvml_sim::client::Client;
use kerf_nvml_sim::code::Code;
use kerf_nvml_sim::handle::Handle;
use kerf_nvml_sim::view::{Device, Gi, GiProfile, GiProfileKey, MigDevice, Node, NodeGpu, PciAddress};
use kerf_nvml_sim::wire::Op;
use kerf_nvml_sim::{payload, visibility};
use rustix::fs::MemfdFlags;

/// The part of nvidia-smi's arguments that is answered here.
#[derive(Parser)]
#[command(name = "nvidia-smi", about = "Simulated NVIDIA GPUs: the part of nvidia-smi that needs no NVIDIA software.")]
struct Cli {
    /// List the GPUs and MIG devices.
    #[arg(short = 'L', long)]
    list_gpus: bool,
    #[command(subcommand)]
    command: Option<Subcommands>,
}

#[derive(Subcommand)]
enum Subcommands {
    /// Show or set the compute policies of a GPU.
    ComputePolicy {
        /// Index, UUID or PCI address of a GPU; several separated by commas. Default: all.
        #[arg(short, long)]
        id: Option<String>,
        /// List the policies in force.
        #[arg(short, long)]
        list: bool,
        /// 0 default, 1 short, 2 medium, 3 long.
        #[arg(long, value_parser = clap::value_parser!(u32).range(0..=3))]
        set_timeslice: Option<u32>,
    },
    /// Show what GPUs are divided into.
    Mig {
        /// List the GPU instances.
        #[arg(long = "list-gpu-instances", visible_alias = "lgi")]
        lgi: bool,
        /// Index, UUID or PCI address of a GPU; several separated by commas. Default: all.
        #[arg(short, long)]
        id: Option<String>,
    },
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let own = std::env::current_exe().context("where this program lies is not known")?;
    let root = driver_root(&own);
    if arguments.first().is_none_or(|first| first != "compute-policy")
        && let Some(genuine) = payload::extract(&mut File::open(&own).context("this program cannot be read")?)?
    {
        return become_genuine(&genuine, &arguments, &root);
    }

    // nvidia-smi's own spelling of long options of one dash.
    let spelled = arguments.into_iter().map(|argument| if argument == "-lgi" { "--lgi".into() } else { argument });
    let cli = Cli::parse_from(std::iter::once(OsString::from("nvidia-smi")).chain(spelled));
    let gpus = Gpus::find(Client::new(root))?;
    match cli.command {
        Some(Subcommands::ComputePolicy { id, list, set_timeslice }) => {
            let chosen = gpus.chosen(id.as_deref())?;
            match set_timeslice {
                Some(timeslice) => gpus.set_timeslice(&chosen, timeslice),
                None if list => gpus.list_policies(&chosen),
                None => bail!("compute-policy: give --list or --set-timeslice=0|1|2|3"),
            }
        }
        Some(Subcommands::Mig { lgi: true, id }) => gpus.list_gpu_instances(&gpus.chosen(id.as_deref())?),
        Some(Subcommands::Mig { .. }) => bail!("mig: only -lgi works without NVIDIA's own nvidia-smi"),
        None if cli.list_gpus => gpus.list(),
        None => Ok(Cli::command().print_help()?),
    }
}

/// The driver root above `usr/bin`.
fn driver_root(own: &Path) -> PathBuf {
    own.ancestors().nth(3).unwrap_or(Path::new("/")).to_owned()
}

/// Replaces this process by NVIDIA's program. It loads `libnvidia-ml.so.1` by name, so outside a container it is told
/// where that is.
fn become_genuine(program: &[u8], arguments: &[OsString], root: &Path) -> Result<()> {
    let memory = rustix::fs::memfd_create("nvidia-smi", MemfdFlags::CLOEXEC)?;
    let mut file = File::from(memory);
    file.write_all(program)?;
    let mut command = Command::new(format!("/proc/self/fd/{}", file.as_raw_fd()));
    command.arg0("nvidia-smi").args(arguments);
    if root != Path::new("/") {
        let own = root.join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH));
        let given = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let all = std::iter::once(own).chain(std::env::split_paths(&given));
        command.env("LD_LIBRARY_PATH", std::env::join_paths(all)?);
    }
    Err(command.exec()).context("NVIDIA's nvidia-smi does not start")
}

/// The GPUs that this process sees, in the order of their indexes.
struct Gpus {
    client: Client,
    gpus: Vec<NodeGpu>,
}

impl Gpus {
    fn find(client: Client) -> Result<Gpus> {
        let node: Node = client.ask("nvmlInitWithFlags", Op::Node).context("the NVIDIA driver does not answer")?;
        let seen = |gpu: &NodeGpu| visibility::sees_gpu(client.root(), gpu.minor);
        let gpus = node.gpus.into_iter().filter(seen).collect();
        Ok(Gpus { client, gpus })
    }

    fn ask<T: serde::de::DeserializeOwned>(&self, op: Op) -> Result<T, Code> {
        self.client.ask("", op)
    }

    fn device(&self, handle: Handle) -> Result<Device, Code> {
        self.ask(Op::Device(handle))
    }

    /// The GPUs meant by an `-i` argument, with their indexes.
    fn chosen(&self, id: Option<&str>) -> Result<Vec<(usize, &NodeGpu)>> {
        let all = || self.gpus.iter().enumerate();
        let Some(ids) = id else { return Ok(all().collect()) };
        let one = |id: &str| {
            let address = PciAddress::parse(id).map(|address| address.to_string());
            all()
                .find(|(index, gpu)| id == index.to_string() || gpu.uuid == id || Some(&gpu.pci) == address.as_ref())
                .with_context(|| format!("No devices were found: {id}"))
        };
        ids.split(',').map(one).collect()
    }

    fn set_timeslice(&self, chosen: &[(usize, &NodeGpu)], timeslice: u32) -> Result<()> {
        for (_, gpu) in chosen {
            let done = self.ask::<()>(Op::SetTimeslice(gpu.handle, timeslice));
            done.with_context(|| format!("Failed to set timeslice for GPU {}", gpu.pci))?;
            println!("Successfully set timeslice for GPU {} to {}", gpu.pci, timeslice_name(timeslice));
        }
        Ok(())
    }

    fn list_policies(&self, chosen: &[(usize, &NodeGpu)]) -> Result<()> {
        for (index, gpu) in chosen {
            println!("GPU {index}: {}", gpu.pci);
            println!("    Timeslice: {}", timeslice_name(self.device(gpu.handle)?.timeslice));
        }
        Ok(())
    }

    fn list(&self) -> Result<()> {
        for (index, gpu) in self.gpus.iter().enumerate() {
            if gpu.broken {
                println!("Unable to determine the device handle for gpu {}: {}", gpu.pci, Code::GPU_IS_LOST);
                continue;
            }
            let device = self.device(gpu.handle)?;
            println!("GPU {index}: {} (UUID: {})", device.name, device.uuid);
            if device.mig.is_none_or(|(current, _)| !current) {
                continue;
            }
            let migs: Vec<MigDevice> = self.ask(Op::MigDevices(gpu.handle))?;
            let root = self.client.root();
            let seen = migs.iter().filter(|mig| visibility::sees_mig_device(root, gpu.minor, mig.gi, mig.ci));
            for (number, mig) in seen.enumerate() {
                let mig = self.device(mig.handle)?;
                let profile = mig.name.rsplit(' ').next().unwrap_or_default();
                println!("  MIG {profile:<11} Device {number:>2}: (UUID: {})", mig.uuid);
            }
        }
        Ok(())
    }

    /// In the form of nvidia-smi's table.
    fn list_gpu_instances(&self, chosen: &[(usize, &NodeGpu)]) -> Result<()> {
        const RULE: &str = "+-------------------------------------------------------+";
        let mut rows = Vec::new();
        for (index, gpu) in chosen {
            if self.device(gpu.handle)?.mig.is_none_or(|(current, _)| !current) {
                continue;
            }
            for nvml_index in 0.. {
                match self.ask::<GiProfile>(Op::GiProfile(gpu.handle, GiProfileKey::IndexMigOn(nvml_index))) {
                    Ok(GiProfile { profile, .. }) => {
                        for gi in self.ask::<Vec<Gi>>(Op::Gis(gpu.handle, profile.id))? {
                            rows.push((*index, profile.name.clone(), gi));
                        }
                    }
                    Err(Code::NOT_SUPPORTED) => {}
                    Err(Code::INVALID_ARGUMENT) => break,
                    Err(code) => return Err(code.into()),
                }
            }
        }
        if rows.is_empty() {
            println!("No GPU instances found: Not Found");
            return Ok(());
        }
        println!("{RULE}\n| GPU instances:                                        |");
        println!("| GPU   Name             Profile  Instance   Placement  |");
        println!("|                          ID       ID       Start:Size |");
        println!("|=======================================================|");
        for (index, name, gi) in rows {
            let (profile, id, place) = (gi.profile, gi.id, gi.placement);
            println!(
                "| {index:>3}  MIG {name:<13} {profile:>4}     {id:>4}{:>11}:{:<6}|\n{RULE}",
                place.start, place.size
            );
        }
        Ok(())
    }
}

fn timeslice_name(timeslice: u32) -> &'static str {
    match timeslice {
        0 => "Default",
        1 => "Short",
        2 => "Medium",
        _ => "Long",
    }
}
