//! The simulated GPUs of a node: `nvml-sim` with a node file, and what it says lives on them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::program::{Program, built};
use crate::wait::eventually;

/// A node's GPUs, as `nvml-sim serve --node` reads them.
#[derive(Clone, Debug)]
pub struct NodeFile {
    body: Value,
}

impl NodeFile {
    /// A node without GPUs yet, on the driver version whose genuine programs the tests use.
    pub fn new() -> NodeFile {
        NodeFile { body: json!({ "driverVersion": "535.261.03", "cudaDriverVersion": "12.2", "gpus": [] }) }
    }

    /// The node of the demo: two H100 and an L40S.
    pub fn two_h100_and_l40s() -> NodeFile {
        NodeFile::new().gpus("h100-80gb", 2).gpus("l40s", 1)
    }

    /// Adds GPUs of a product (a key of `crates/mig/products`).
    pub fn gpus(self, product: &str, count: u32) -> NodeFile {
        self.gpu(json!({ "product": product, "count": count }))
    }

    /// Adds a GPU with settings of its own.
    pub fn gpu(mut self, gpu: Value) -> NodeFile {
        if let Some(gpus) = self.body["gpus"].as_array_mut() {
            gpus.push(gpu);
        }
        self
    }

    /// Adds something that is wrong from the start, as in the `faults` of a node file.
    pub fn fault(mut self, fault: Value) -> NodeFile {
        match &mut self.body["faults"] {
            Value::Array(faults) => faults.push(fault),
            none => *none = json!([fault]),
        }
        self
    }

    /// Sets how long NVML calls take: a named set, or milliseconds by call.
    pub fn latency(mut self, latency: Value) -> NodeFile {
        self.body["latency"] = latency;
        self
    }
}

impl Default for NodeFile {
    fn default() -> NodeFile {
        NodeFile::new()
    }
}

/// What lives on one GPU.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuState {
    /// PCI address.
    pub pci_bus_id: String,
    /// GPU UUID.
    pub uuid: String,
    /// The N of `/dev/nvidiaN`.
    pub minor: u32,
    mig: Option<MigState>,
}

impl GpuState {
    /// Its GPU instances.
    pub fn instances(&self) -> &[InstanceState] {
        self.mig.as_ref().map_or(&[], |mig| &mig.instances)
    }
}

#[derive(Clone, Debug, Deserialize)]
struct MigState {
    instances: Vec<InstanceState>,
}

/// A GPU instance.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InstanceState {
    /// GPU instance id.
    pub id: u32,
    /// Profile name, `1g.10gb`.
    pub profile: String,
    /// Where it lies.
    pub placement: PlacementState,
    /// Its compute instances, by UUID.
    pub compute_instances: Vec<ComputeInstanceState>,
}

/// A range of memory slices.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct PlacementState {
    /// The first.
    pub start: u32,
}

/// A compute instance.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ComputeInstanceState {
    /// MIG device UUID.
    pub uuid: String,
}

#[derive(Deserialize)]
struct NodeState {
    gpus: Vec<GpuState>,
}

/// A running simulation of one node's GPUs.
#[derive(Debug)]
pub struct Simulation {
    program: Program,
    tool: PathBuf,
    root: PathBuf,
}

impl Simulation {
    /// Starts the simulator with its driver root under `directory`.
    pub async fn start(node: &NodeFile, directory: &Path, logs: &Path) -> Result<Simulation> {
        let tool = built("nvml-sim")?;
        let root = directory.join("driver");
        let file = directory.join("node.yaml");
        std::fs::create_dir_all(&root)?;
        std::fs::write(&file, serde_saphyr::to_string(&node.body)?)?;
        let log = logs.join("nvml-sim.log");
        // A log of an earlier run must not say `ready` for this one.
        std::fs::write(&log, "")?;
        let mut command = Command::new(&tool);
        command.arg("serve").arg("--node").arg(&file).arg("--root").arg(&root);
        if let Some(programs) = std::env::var_os("KERF_NVIDIA_PROGRAMS") {
            command.arg("--programs").arg(programs);
        }
        let mut program = Program::start("nvml-sim", command, &log)?;
        eventually("the simulator is ready", Duration::from_secs(60), async || {
            program.check()?;
            Ok(std::fs::read_to_string(&log)?.lines().any(|line| line.trim() == "ready").then_some(()))
        })
        .await?;
        Ok(Simulation { program, tool, root })
    }

    /// The driver root: what `--driver-root` of the plugin names.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// What lives on each GPU now.
    pub fn state(&self) -> Result<Vec<GpuState>> {
        let state: NodeState =
            serde_json::from_slice(&self.tell(&["state"])?).context("cannot read the simulator's state")?;
        Ok(state.gpus)
    }

    /// Tells the simulator what happens to the node, as `nvml-sim ctl` does, and gives what it answers.
    pub fn tell(&self, what: &[&str]) -> Result<Vec<u8>> {
        let output = Command::new(&self.tool).args(["ctl", "--root"]).arg(&self.root).args(what).output()?;
        if !output.status.success() {
            bail!("nvml-sim ctl {} failed: {}", what.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(output.stdout)
    }

    /// All GPU instances of the node as (PCI address, instance).
    pub fn instances(&self) -> Result<Vec<(String, InstanceState)>> {
        let instances = self.state()?.into_iter().flat_map(|gpu| {
            gpu.mig.into_iter().flat_map(|mig| mig.instances).map(move |instance| (gpu.pci_bus_id.clone(), instance))
        });
        Ok(instances.collect())
    }

    /// Lets the simulator run on after the harness ends; returns its process id.
    pub fn leave(self) -> Option<u32> {
        self.program.leave()
    }

    /// Ends the simulator.
    pub async fn stop(mut self) -> Result<()> {
        self.program.terminate().await
    }
}
