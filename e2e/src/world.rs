//! One scenario's world: a user's namespace, simulated GPUs and kerf, installed for it alone.

use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures::FutureExt;
use k8s_openapi::api::core::v1::{Namespace, Pod as ApiPod};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kerf_api::names::DRIVER_NAME;
use kerf_api::{GpuNode, GpuPolicy};
use kube::api::{DeleteParams, ListParams};
use kube::{Api, Client};

use crate::cluster::Cluster;
use crate::installation::Installation;
use crate::kubelet::Kubelet;
use crate::simulation::{InstanceState, NodeFile, Simulation};
use crate::tenant::{Tenant, ours};
use crate::wait::eventually;

/// A scenario's world: its namespace, and what is below it.
pub struct World {
    tenant: Tenant,
    /// The GPUs.
    pub simulation: Simulation,
    /// kerf.
    pub kerf: Installation,
    /// From `helm install` until the node's slices were published.
    pub installed_in: Duration,
}

impl Deref for World {
    type Target = Tenant;

    fn deref(&self) -> &Tenant {
        &self.tenant
    }
}

impl DerefMut for World {
    fn deref_mut(&mut self) -> &mut Tenant {
        &mut self.tenant
    }
}

/// Runs one scenario: builds a world, lets `body` act in it, cleans up and checks that nothing is left behind.
///
/// # Panics
///
/// When the scenario fails; what the programs said and what the cluster thinks is printed first.
pub async fn scenario(name: &str, node: NodeFile, body: impl AsyncFnOnce(&mut World) -> Result<()>) {
    let directory = scratch(name).expect("a scratch directory can be made");
    let fail = |what: &str, error: &anyhow::Error, report: &str| -> ! {
        note_failure(&directory, &format!("{name}: {what}{error:#}"));
        panic!("{name}: {what}{error:#}\n{report}\n{}", logs(&directory))
    };
    let mut world = match World::start(name, &node, &directory).await {
        Ok(world) => world,
        Err(error) => fail("cannot start: ", &error, ""),
    };
    let outcome = std::panic::AssertUnwindSafe(body(&mut world)).catch_unwind().await;
    let outcome = match outcome {
        Ok(outcome) => outcome,
        Err(panic) => Err(anyhow::anyhow!(
            "{}",
            panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("a panic without words")
        )),
    };
    let report = if outcome.is_err() { world.describe() } else { String::new() };
    let end = world.end().await;
    if let Err(error) = outcome {
        fail("", &error, &report);
    }
    if let Err(error) = end {
        fail("something is left behind: ", &error, "");
    }
}

/// What an earlier scenario's policies have asked of the node is in its GpuNode.
async fn forget_wishes(client: &Client) -> Result<()> {
    let gpu_nodes: Api<GpuNode> = Api::all(client.clone());
    match gpu_nodes.delete_collection(&DeleteParams::default(), &ListParams::default()).await {
        // The first scenario on a cluster comes before the CustomResourceDefinition.
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        outcome => Ok(outcome.map(drop)?),
    }
}

/// Adds a line to the list of failures that `make e2e` ends with: what the scenarios print themselves is long.
fn note_failure(directory: &Path, line: &str) {
    let Some(file) = directory.parent().map(|all| all.join("failures")) else { return };
    let line: String = line.chars().take(1000).collect();
    let noted =
        std::fs::OpenOptions::new().create(true).append(true).open(file).and_then(|mut file| {
            std::io::Write::write_all(&mut file, format!("{}\n", line.replace('\n', " ")).as_bytes())
        });
    if let Err(error) = noted {
        eprintln!("the failure is not in the list at the end: {error}");
    }
}

impl World {
    /// Starts the simulator and kerf, and makes a namespace of its own. `directory` takes logs and the driver root.
    pub async fn start(name: &str, node: &NodeFile, directory: &Path) -> Result<World> {
        let cluster = Cluster::from_env()?;
        let client = Client::try_default().await.context("no client: KUBECONFIG is set by `kerf-cluster exec`")?;
        let mut kerf = Installation::new(&cluster, &client, directory);
        kerf.uninstall().await?;
        forget(&cluster)?;
        forget_wishes(&client).await?;
        let slices: Api<ResourceSlice> = Api::all(client.clone());
        slices.delete_collection(&DeleteParams::default(), &ours()).await?;
        let simulation = Simulation::start(node, directory, directory).await?;
        let started = Instant::now();
        kerf.install(simulation.root()).await?;
        // Pods of an earlier run can only end while a plugin is there to release their claims.
        clear(&client).await?;
        let namespace = format!("e2e-{}", name.replace('_', "-"));
        let tenant = Tenant::new(cluster, client, &namespace).await?;
        let mut world = World { tenant, simulation, kerf, installed_in: Duration::ZERO };
        world.kerf.registered().await?;
        world.published().await?;
        world.installed_in = started.elapsed();
        Ok(world)
    }

    /// Waits until kerf has published a complete pool for the node, and returns its slices in name order.
    pub async fn published(&self) -> Result<Vec<ResourceSlice>> {
        eventually("the node's slices are published", self.patience, async || {
            self.kerf.check().await?;
            self.pool().await
        })
        .await
    }

    /// The kubelet's connection to the plugin: to the one of its sockets at which somebody listens.
    pub async fn kubelet(&self) -> Result<Kubelet> {
        let directory = self.cluster.node()?.kubelet_root.join("plugins").join(DRIVER_NAME);
        let mut last = anyhow::anyhow!("no socket in {}", directory.display());
        for socket in files(&directory)?.into_iter().filter(|path| path.extension().is_some_and(|end| end == "sock")) {
            match Kubelet::connect(&socket).await {
                Ok(kubelet) => return Ok(kubelet),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// The GPU instances that live on the node, after the given number was reached.
    pub async fn instances(&self, count: usize) -> Result<Vec<(String, InstanceState)>> {
        eventually(&format!("{count} GPU instances live on the node"), self.patience, async || {
            let instances = self.simulation.instances()?;
            if instances.len() != count {
                bail!("{} live: {instances:?}", instances.len());
            }
            Ok(Some(instances))
        })
        .await
    }

    /// Leaves everything running after the harness ends; returns the id of the process that must be ended one day.
    pub fn leave(self) -> Option<u32> {
        self.simulation.leave()
    }

    /// Deletes everything the scenario made, checks that the node holds nothing any more, and uninstalls kerf.
    pub async fn end(mut self) -> Result<()> {
        let cleared = clear(&self.client).await;
        let empty = match cleared {
            Ok(()) => self.nothing_is_left().await,
            Err(error) => Err(error),
        };
        let withdrawn = self.withdrawn().await;
        let uninstalled = self.kerf.uninstall().await;
        self.simulation.stop().await?;
        empty.and(withdrawn).and(uninstalled)
    }

    /// A plugin that ends in order takes its devices out of the API at once.
    async fn withdrawn(&mut self) -> Result<()> {
        self.kerf.keep_plugin_away(true).await?;
        eventually("the slices of the plugin that ended are withdrawn", self.patience, async || {
            Ok(self.slices().await?.is_empty().then_some(()))
        })
        .await
    }

    /// No GPU instance, no CDI spec, no journal, no device metadata.
    pub async fn nothing_is_left(&self) -> Result<()> {
        self.instances(0).await?;
        let node = self.cluster.node()?;
        let own = node.kubelet_root.join("plugins").join(DRIVER_NAME);
        for directory in [&node.cdi_root, &own.join("claims"), &own.join("metadata")] {
            eventually("the node's files are gone", self.patience, async || {
                let left = files(directory)?;
                ensure!(left.is_empty(), "{} still holds {left:?}", directory.display());
                Ok(Some(()))
            })
            .await?;
        }
        Ok(())
    }

    fn describe(&self) -> String {
        let mut report = String::new();
        for arguments in [
            ["get", "pods,resourceclaims,events", "-n", self.namespace(), "-o", "wide"].as_slice(),
            ["get", "gpunodes,gpupolicies,resourceslices", "-o", "wide"].as_slice(),
        ] {
            let text = self.cluster.kubectl(arguments).unwrap_or_else(|error| format!("{error:#}"));
            report.push_str(&format!("--- kubectl {}\n{text}\n", arguments.join(" ")));
        }
        report + &self.kerf.logs()
    }
}

/// Deletes the GpuPolicies and namespaces of all scenarios and waits until they are gone.
async fn clear(client: &Client) -> Result<()> {
    let api: Api<Namespace> = Api::all(client.clone());
    let scenarios = ListParams::default().labels("kerf.dev/e2e=true");
    match Api::<GpuPolicy>::all(client.clone()).delete_collection(&DeleteParams::default(), &scenarios).await {
        // The CustomResourceDefinition was made a moment ago: there are none.
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        outcome => drop(outcome?),
    }
    for namespace in api.list(&scenarios).await? {
        let name = namespace.metadata.name.unwrap_or_default();
        let pods: Api<ApiPod> = Api::namespaced(client.clone(), &name);
        pods.delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
        if namespace.metadata.deletion_timestamp.is_none() {
            api.delete(&name, &DeleteParams::default()).await?;
        }
    }
    eventually("the scenario's namespace is gone", Duration::from_secs(120), async || {
        let left = api.list(&scenarios).await?.items;
        ensure!(left.is_empty(), "{:?}", left.iter().map(|namespace| &namespace.status).collect::<Vec<_>>());
        Ok(Some(()))
    })
    .await
}

/// Removes what a scenario that failed may have left on the node, so that it fails alone.
fn forget(cluster: &Cluster) -> Result<()> {
    let node = cluster.node()?;
    let own = node.kubelet_root.join("plugins").join(DRIVER_NAME);
    if own.exists() {
        std::fs::remove_dir_all(&own).with_context(|| format!("cannot remove {}", own.display()))?;
    }
    for spec in files(&node.cdi_root)? {
        std::fs::remove_file(&spec).with_context(|| format!("cannot remove {}", spec.display()))?;
    }
    Ok(())
}

/// The files in a directory; none where the directory does not exist.
fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    match std::fs::read_dir(directory) {
        Ok(entries) => entries.map(|entry| Ok(entry?.path())).collect(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("cannot list {}", directory.display())),
    }
}

/// A fresh directory for a scenario's logs and driver root.
fn scratch(name: &str) -> Result<PathBuf> {
    let target = std::env::current_exe()?;
    let target = target.ancestors().find(|path| path.ends_with("target")).map(Path::to_owned);
    let directory = target.unwrap_or_else(std::env::temp_dir).join("e2e").join(name);
    if directory.exists() {
        std::fs::remove_dir_all(&directory)?;
    }
    std::fs::create_dir_all(&directory)?;
    Ok(directory)
}

/// The last lines of the simulator's log.
fn logs(directory: &Path) -> String {
    let text = std::fs::read_to_string(directory.join("nvml-sim.log")).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    format!("--- nvml-sim.log\n{}\n", lines[lines.len().saturating_sub(30)..].join("\n"))
}
