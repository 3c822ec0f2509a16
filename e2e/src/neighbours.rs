//! NVIDIA's own programs, which kerf replaces or lives beside: `kerf-cluster neighbours` builds them, tests run them.
//!
//! They run as processes on the machine, as the kubelet does here, and see the simulated GPUs where the real ones would be: in
//! a mount namespace of their own, whose `/sys` is the driver root's, and whose `/proc` has what the driver root has of it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::cluster::Cluster;
use crate::program::Program;
use crate::simulation::Simulation;

/// Arranges the mounts, then becomes the program: `$1` is the driver root, `$2` a folder to work in, the rest the command. The
/// manager of mig-parted looks for mig-parted beside itself, and for nvidia-smi.
const VIEW: &str = r#"
driver=$1 work=$2; shift 2
mkdir -p "$work"
mount -t tmpfs none "$work"
mkdir "$work/real" "$work/proc"
mount --rbind /proc "$work/real"
for entry in "$driver"/proc/*; do
  ln -s "$entry" "$work/proc/"
done
for entry in /proc/[a-z]*; do
  name=${entry##*/}
  [ -e "$work/proc/$name" ] || ln -s "$work/real/$name" "$work/proc/$name"
done
mount --bind "$driver/sys" /sys
mount --bind "$work/proc" /proc
export LD_LIBRARY_PATH="$driver/usr/lib/x86_64-linux-gnu"
export PATH="$driver/usr/bin:${1%/*}:$PATH"
exec "$@"
"#;

/// Where programs of others run: on a node with simulated GPUs.
#[derive(Clone, Debug)]
pub struct Neighbours {
    /// The command that leads into the node's namespaces, where there is a cluster.
    inside: Vec<String>,
    driver: PathBuf,
    work: PathBuf,
}

impl Neighbours {
    /// On this machine, beside no kubelet.
    ///
    /// # Errors
    ///
    /// Where the driver root lies nowhere.
    pub fn alone(simulation: &Simulation) -> Result<Neighbours> {
        let driver = simulation.root().to_owned();
        let work = driver.parent().context("the driver root is in a directory")?.join("neighbours");
        std::fs::create_dir_all(&work)?;
        Ok(Neighbours { inside: Vec::new(), driver, work })
    }

    /// On the cluster's node: `/var/lib/kubelet` is its kubelet's, `/var/run/cdi` is what its containerd reads, and `KUBECONFIG`
    /// the admin's.
    ///
    /// # Errors
    ///
    /// Where `kerf-cluster` has not started the cluster.
    pub fn on_node(cluster: &Cluster, simulation: &Simulation) -> Result<Neighbours> {
        let inside = cluster.inside_node()?;
        Ok(Neighbours { inside, ..Neighbours::alone(simulation)? })
    }

    /// A directory for what the programs read and write; none is removed before the next run of the test.
    pub fn directory(&self) -> &Path {
        &self.work
    }

    /// One of the programs, as `device-plugin/nvidia-device-plugin`: the folder in `e2e/neighbours`, and the program. Its process
    /// id is that of the command.
    ///
    /// # Errors
    ///
    /// When it is not built.
    pub fn command(&self, program: &str) -> Result<Command> {
        let program = neighbour(program)?;
        let mut words = self.inside.clone();
        words.extend(["unshare", "--mount", "--propagation=private", "sh", "-euc", VIEW, "sh"].map(str::to_owned));
        let mut command = Command::new(words.remove(0));
        command.args(words).arg(&self.driver).arg(self.work.join("view"));
        command.arg(&program).stdin(Stdio::null());
        Ok(command)
    }

    /// Runs a program to its end, which must be a good one, and returns what it prints.
    ///
    /// # Errors
    ///
    /// When it fails, with what it said.
    pub fn run(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let output =
            self.command(program)?.args(arguments).output().with_context(|| format!("cannot run {program}"))?;
        ensure!(
            output.status.success(),
            "{program} {} failed ({}): {}{}",
            arguments.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Starts a program that runs until it is ended, at the latest when what this returns is dropped.
    ///
    /// # Errors
    ///
    /// When it cannot be started.
    pub fn start(&self, program: &str, arguments: &[&str]) -> Result<Program> {
        let mut command = self.command(program)?;
        command.args(arguments);
        let name = program.rsplit('/').next().unwrap_or(program);
        Program::start(name, command, &self.work.join(format!("{name}.log")))
    }
}

/// The path of one of the programs, by its folder in `e2e/neighbours` and its name.
///
/// # Errors
///
/// When it is not built.
pub fn neighbour(program: &str) -> Result<PathBuf> {
    let all = std::env::var_os("KERF_NEIGHBOURS").context("KERF_NEIGHBOURS is not set: `make` does so")?;
    let path = Path::new(&all).join(program);
    ensure!(path.is_file(), "{} is not built: run `make neighbours`", path.display());
    Ok(path)
}
