//! The real Kubernetes that `kerf-cluster` started, as the harness sees it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Output};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Node;
use serde::Deserialize;
use serde_json::Value;

/// Where a node keeps what a plugin needs.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodePaths {
    /// The node's name.
    pub name: String,
    /// The kubelet's `--root-dir`.
    pub kubelet_root: PathBuf,
    /// The folder that containerd reads CDI specs from.
    pub cdi_root: PathBuf,
    /// Where the plugin may put a program that containers' runtimes run.
    pub hook_root: PathBuf,
}

/// What `kerf-cluster status --json` says.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    kubernetes: String,
    kubeconfig: PathBuf,
    gates: BTreeMap<String, String>,
    nodes: Vec<NodePaths>,
}

/// A running cluster.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// Absent where somebody else started the cluster.
    tool: Option<PathBuf>,
    status: Status,
}

impl Cluster {
    /// The cluster that the environment names: with `KERF_CLUSTER`, the path of `kerf-cluster`, the one it started; else
    /// that of `KUBECONFIG`, whose node is this machine, with the folders that nodes normally have.
    pub fn from_env() -> Result<Cluster> {
        let Some(tool) = std::env::var_os("KERF_CLUSTER").map(PathBuf::from) else {
            let kubeconfig = std::env::var_os("KUBECONFIG").context("neither KERF_CLUSTER nor KUBECONFIG is set")?;
            return Cluster::of_others(kubeconfig.into());
        };
        let output = Command::new(&tool).args(["status", "--json"]).output().context("cannot run kerf-cluster")?;
        let status = serde_json::from_slice(&checked(output, "kerf-cluster status")?)
            .context("cannot read the answer of kerf-cluster status --json")?;
        Ok(Cluster { tool: Some(tool), status })
    }

    fn of_others(kubeconfig: PathBuf) -> Result<Cluster> {
        let mut cluster = Cluster {
            tool: None,
            status: Status { kubernetes: String::new(), kubeconfig, gates: BTreeMap::new(), nodes: Vec::new() },
        };
        let version: Value = serde_json::from_str(&cluster.kubectl(&["version", "-o", "json"])?)?;
        let version = version["serverVersion"]["gitVersion"].as_str().context("the server tells no version")?;
        version.trim_start_matches('v').clone_into(&mut cluster.status.kubernetes);
        let mut nodes: Value = serde_json::from_str(&cluster.kubectl(&["get", "nodes", "-o", "json"])?)?;
        let nodes: Vec<Node> = serde_json::from_value(nodes["items"].take())?;
        let name = nodes.into_iter().filter(takes_pods).find_map(|node| node.metadata.name);
        cluster.status.nodes.push(NodePaths {
            name: name.context("no node of the cluster is ready and takes any pod")?,
            kubelet_root: PathBuf::from("/var/lib/kubelet"),
            cdi_root: PathBuf::from("/var/run/cdi"),
            hook_root: PathBuf::from("/var/lib/kerf"),
        });
        Ok(cluster)
    }

    /// Whether the API server has partitionable devices: by its gate, else by its version (on by default from 1.36).
    pub fn has_partitions(&self) -> Result<bool> {
        self.has("DRAPartitionableDevices")
    }

    /// Whether the API server keeps the extended resources of DeviceClasses, likewise.
    pub fn has_extended_resources(&self) -> Result<bool> {
        self.has("DRAExtendedResource")
    }

    fn has(&self, gate: &str) -> Result<bool> {
        match self.status.gates.get(gate) {
            Some(gate) => Ok(gate == "true"),
            None => Ok(self.minor()? >= 36),
        }
    }

    /// The N of Kubernetes 1.N.
    pub fn minor(&self) -> Result<u32> {
        let minor = self.status.kubernetes.split('.').nth(1).and_then(|minor| minor.parse().ok());
        minor.with_context(|| format!("{:?} is no Kubernetes version", self.status.kubernetes))
    }

    /// The first node.
    pub fn node(&self) -> Result<&NodePaths> {
        self.status.nodes.first().context("the cluster has no node")
    }

    /// The admin's kubeconfig.
    pub fn kubeconfig(&self) -> &PathBuf {
        &self.status.kubeconfig
    }

    /// Runs `kerf-cluster` with these arguments, such as `restart kubelet`.
    pub fn tool(&self, arguments: &[&str]) -> Result<()> {
        let tool =
            self.tool.as_ref().context("this needs a cluster that kerf-cluster started: KERF_CLUSTER is not set")?;
        let output = Command::new(tool).args(arguments).output().context("cannot run kerf-cluster")?;
        checked(output, &format!("kerf-cluster {}", arguments.join(" "))).map(|_| ())
    }

    /// The command that runs another one in the first node's namespaces; it becomes that command, and keeps its process id.
    pub fn inside_node(&self) -> Result<Vec<String>> {
        let tool = self.tool.as_ref().and_then(|tool| tool.to_str());
        let tool = tool.context("this needs a cluster that kerf-cluster started: KERF_CLUSTER is not set")?;
        Ok([tool, "exec", "--node", &self.node()?.name, "--"].map(str::to_owned).to_vec())
    }

    /// Runs `kubectl` as the admin and returns what it prints.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let output = Command::new("kubectl")
            .arg("--kubeconfig")
            .arg(&self.status.kubeconfig)
            .args(arguments)
            .output()
            .context("cannot run kubectl: it is on the PATH inside `kerf-cluster exec`")?;
        let text = checked(output, &format!("kubectl {}", arguments.join(" ")))?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

/// Whether a node is ready, and no taint keeps pods away.
fn takes_pods(node: &Node) -> bool {
    let spec = node.spec.clone().unwrap_or_default();
    let away = spec.taints.unwrap_or_default().iter().any(|taint| taint.effect != "PreferNoSchedule");
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True");
    ready && !away && spec.unschedulable != Some(true)
}

/// The standard output of a command that must have succeeded.
fn checked(output: Output, what: &str) -> Result<Vec<u8>> {
    if !output.status.success() {
        bail!("{what} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}
