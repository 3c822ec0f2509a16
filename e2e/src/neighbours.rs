//! NVIDIA's own programs, which kerf replaces or lives beside: `kerf-cluster neighbours` builds them, scenarios run them.
//!
//! They run as processes on the machine, as the kubelet does here, and see the simulated GPUs where the real ones would be: in
//! a mount namespace of their own, in which what the driver root holds lies at its usual places.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::simulation::Simulation;

/// The path of one of these programs.
///
/// # Errors
///
/// When it is not built.
pub fn neighbour(name: &str) -> Result<PathBuf> {
    let folder = std::env::var_os("KERF_NEIGHBOURS").context("KERF_NEIGHBOURS is not set: `make` does so")?;
    let path = Path::new(&folder).join(name);
    ensure!(path.is_file(), "{} is not built: run `make neighbours`", path.display());
    Ok(path)
}

/// A mount namespace for a program: folders of the machine that other folders stand in for, as (what, where).
#[derive(Clone, Debug, Default)]
pub struct View {
    binds: Vec<(PathBuf, PathBuf)>,
    path: Option<PathBuf>,
    library: Option<PathBuf>,
}

impl View {
    /// The machine as it is.
    pub fn new() -> View {
        View::default()
    }

    /// With the simulated driver: its library where the loader looks first, its programs first on the PATH.
    pub fn driver(mut self, simulation: &Simulation) -> View {
        self.library = Some(simulation.root().join("usr/lib/x86_64-linux-gnu"));
        self.path = Some(simulation.root().join("usr/bin"));
        self
    }

    /// With `what` in the place of `at`, which must exist.
    pub fn bind(mut self, what: impl Into<PathBuf>, at: impl Into<PathBuf>) -> View {
        self.binds.push((what.into(), at.into()));
        self
    }

    /// A program in this view; its process id is that of the command.
    pub fn command(&self, program: &Path) -> Command {
        // What follows the binds is the program and its arguments: `exec` keeps the process.
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-ec"]);
        command.arg(r#"while [ "$1" != -- ]; do mount --bind "$1" "$2"; shift 2; done; shift; exec "$@""#).arg("sh");
        for (what, at) in &self.binds {
            command.arg(what).arg(at);
        }
        command.arg("--").arg(program);
        if let Some(library) = &self.library {
            command.env("LD_LIBRARY_PATH", library);
        }
        if let Some(path) = &self.path {
            let others = std::env::var_os("PATH").unwrap_or_default();
            let mut all = path.clone().into_os_string();
            all.push(":");
            all.push(others);
            command.env("PATH", all);
        }
        command
    }
}
