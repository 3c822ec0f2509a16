//! One scenario's world: a namespace, simulated GPUs, kerf installed, and words to act and look with.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures::FutureExt;
use k8s_openapi::api::core::v1::{Event, Namespace, Pod as ApiPod};
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim, ResourceSlice};
use kerf_api::{GpuNode, GpuPolicy};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::installation::Installation;
use crate::kubelet::Kubelet;
use crate::manifest::{Claim, Pod};
use crate::simulation::{InstanceState, NodeFile, Simulation};
use crate::wait::eventually;

/// How long a pod may take to start or to be gone. Far above what it takes, so that a slow machine fails nothing.
const PATIENCE: Duration = Duration::from_secs(60);

/// The driver name that the scenarios use.
const DRIVER: &str = kerf_api::names::DRIVER_NAME;

/// A scenario's world.
pub struct World {
    /// The cluster.
    pub cluster: Cluster,
    /// The admin's client.
    pub client: Client,
    /// The GPUs.
    pub simulation: Simulation,
    /// kerf.
    pub kerf: Installation,
    /// From `helm install` until the node's slices were published.
    pub installed_in: Duration,
    /// How long to wait for what must come; a scenario that breaks Kubernetes itself asks for more.
    pub patience: Duration,
    namespace: String,
}

/// Runs one scenario: builds a world, lets `body` act in it, cleans up and checks that nothing is left behind.
///
/// # Panics
///
/// When the scenario fails; what the programs said and what the cluster thinks is printed first.
pub async fn scenario(name: &str, node: NodeFile, body: impl AsyncFnOnce(&mut World) -> Result<()>) {
    let directory = scratch(name).expect("a scratch directory can be made");
    let mut world = match World::start(name, &node, &directory).await {
        Ok(world) => world,
        Err(error) => panic!("{name}: cannot start: {error:#}\n{}", logs(&directory)),
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
        panic!("{name}: {error:#}\n{report}\n{}", logs(&directory));
    }
    if let Err(error) = end {
        panic!("{name}: something is left behind: {error:#}\n{}", logs(&directory));
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
        let slices: Api<ResourceSlice> = Api::all(client.clone());
        slices.delete_collection(&DeleteParams::default(), &ours()).await?;
        let simulation = Simulation::start(node, directory, directory).await?;
        let started = Instant::now();
        kerf.install(simulation.root()).await?;
        // Pods of an earlier run can only end while a plugin is there to release their claims.
        clear(&client).await?;
        let namespace = format!("e2e-{}", name.replace('_', "-"));
        let object: Namespace = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Namespace",
            "metadata": { "name": namespace, "labels": { "kerf.dev/e2e": "true" } },
        }))?;
        Api::<Namespace>::all(client.clone()).create(&PostParams::default(), &object).await?;
        let mut world =
            World { cluster, client, simulation, kerf, installed_in: Duration::ZERO, patience: PATIENCE, namespace };
        world.kerf.registered().await?;
        world.published().await?;
        world.installed_in = started.elapsed();
        Ok(world)
    }

    /// The scenario's namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Waits until kerf has published a complete pool for the node, and returns its slices in name order.
    pub async fn published(&self) -> Result<Vec<ResourceSlice>> {
        let api: Api<ResourceSlice> = Api::all(self.client.clone());
        eventually("the node's slices are published", self.patience, async || {
            self.kerf.check().await?;
            let slices = api.list(&ours()).await?.items;
            let complete = slices.first().is_some_and(|first| {
                slices.len() as i64 == first.spec.pool.resource_slice_count
                    && slices.iter().all(|slice| slice.spec.pool.generation == first.spec.pool.generation)
            });
            Ok(complete.then_some(slices))
        })
        .await
    }

    /// The slices that exist now.
    pub async fn slices(&self) -> Result<Vec<ResourceSlice>> {
        let api: Api<ResourceSlice> = Api::all(self.client.clone());
        Ok(api.list(&ours()).await?.items)
    }

    /// The names of all devices that are published now.
    pub async fn devices(&self) -> Result<Vec<String>> {
        let slices = self.slices().await?;
        Ok(slices
            .into_iter()
            .flat_map(|slice| slice.spec.devices.unwrap_or_default())
            .map(|device| device.name)
            .collect())
    }

    /// The node's GpuNode.
    pub async fn gpu_node(&self) -> Result<GpuNode> {
        Ok(Api::<GpuNode>::all(self.client.clone()).get(&self.cluster.node()?.name).await?)
    }

    /// Creates an object in the scenario's namespace, as `kubectl create` would.
    pub async fn create(&self, object: &Value) -> Result<()> {
        let post = PostParams::default();
        let (client, namespace) = (self.client.clone(), &self.namespace);
        match object["kind"].as_str() {
            Some("Pod") => {
                Api::namespaced(client, namespace)
                    .create(&post, &serde_json::from_value::<ApiPod>(object.clone())?)
                    .await?;
            }
            Some("ResourceClaim") => {
                let claim: ResourceClaim = serde_json::from_value(object.clone())?;
                Api::namespaced(client, namespace).create(&post, &claim).await?;
            }
            Some("ResourceClaimTemplate") => {
                let template: k8s_openapi::api::resource::v1::ResourceClaimTemplate =
                    serde_json::from_value(object.clone())?;
                Api::namespaced(client, namespace).create(&post, &template).await?;
            }
            kind => bail!("a scenario does not create {kind:?}"),
        }
        Ok(())
    }

    /// `kubectl apply` of manifests as users have them: in the scenario's namespace if none of them names one.
    pub fn apply(&self, manifests: &str) -> Result<String> {
        let file = std::env::temp_dir().join(format!("kerf-{}-{}.yaml", self.namespace, std::process::id()));
        std::fs::write(&file, manifests)?;
        let path = file.to_str().context("the path is not text")?;
        // kubectl takes no manifest for another namespace than the one that it is told.
        let own = manifests.lines().any(|line| line.trim_start().starts_with("namespace:"));
        let mut arguments = vec!["apply", "-f", path];
        if !own {
            arguments.extend(["-n", &self.namespace]);
        }
        let applied = self.cluster.kubectl(&arguments);
        std::fs::remove_file(&file)?;
        applied
    }

    /// A pod with a claim of its own, from a template of the same name.
    pub async fn run(&self, name: &str, claim: &Claim) -> Result<()> {
        self.create(&claim.template(name)).await?;
        self.create(&Pod::from_template(name, name).object()).await
    }

    /// [`World::run`], then waits until the pod runs.
    pub async fn run_ready(&self, name: &str, claim: &Claim) -> Result<()> {
        self.run(name, claim).await?;
        self.ready(name).await
    }

    /// Waits until all containers of a pod run.
    pub async fn ready(&self, name: &str) -> Result<()> {
        let api = self.pods();
        eventually(&format!("pod {name} runs"), self.patience, async || {
            let pod = api.get(name).await?;
            let status = pod.status.unwrap_or_default();
            let statuses = status.container_statuses.unwrap_or_default();
            Ok((!statuses.is_empty() && statuses.iter().all(|container| container.ready)).then_some(()))
        })
        .await
    }

    /// Fails unless all containers of a pod run and none was ever restarted.
    pub async fn undisturbed(&self, name: &str) -> Result<()> {
        let status = self.pods().get(name).await?.status.unwrap_or_default();
        let statuses = status.container_statuses.unwrap_or_default();
        ensure!(
            !statuses.is_empty() && statuses.iter().all(|status| status.ready && status.restart_count == 0),
            "{statuses:?}"
        );
        Ok(())
    }

    /// Waits until the scheduler has said that it cannot place a pod, and returns its words.
    pub async fn waits(&self, name: &str) -> Result<String> {
        let api = self.pods();
        eventually(&format!("pod {name} is unschedulable"), self.patience, async || {
            let conditions = api.get(name).await?.status.unwrap_or_default().conditions.unwrap_or_default();
            Ok(conditions
                .into_iter()
                .find(|condition| {
                    condition.type_ == "PodScheduled" && condition.reason.as_deref() == Some("Unschedulable")
                })
                .and_then(|condition| condition.message))
        })
        .await
    }

    /// Waits until an Event with this reason is told about a pod, and returns its message.
    pub async fn event(&self, pod: &str, reason: &str) -> Result<String> {
        let api: Api<Event> = Api::namespaced(self.client.clone(), &self.namespace);
        let fields = format!("involvedObject.name={pod},reason={reason}");
        eventually(&format!("event {reason} of pod {pod}"), self.patience, async || {
            let events = api.list(&ListParams::default().fields(&fields)).await?;
            Ok(events.items.into_iter().find_map(|event| event.message))
        })
        .await
    }

    /// Deletes a pod and waits until it is gone; its template-made claim goes with it.
    pub async fn delete(&self, name: &str) -> Result<()> {
        let uid = self.pods().get(name).await?.metadata.uid;
        self.pods().delete(name, &DeleteParams::default()).await?;
        self.gone(name, uid.as_deref()).await
    }

    /// Waits until the pod with this UID is gone.
    pub async fn gone(&self, name: &str, uid: Option<&str>) -> Result<()> {
        let api = self.pods();
        eventually(&format!("pod {name} is gone"), self.patience, async || {
            Ok(api.get_opt(name).await?.is_none_or(|pod| pod.metadata.uid.as_deref() != uid).then_some(()))
        })
        .await
    }

    /// The log of a pod's container.
    pub fn logs(&self, pod: &str, container: &str) -> Result<String> {
        self.cluster.kubectl(&["logs", "-n", &self.namespace, pod, "-c", container])
    }

    /// Runs a shell command in a pod's container; its output and error output.
    pub fn shell(&self, pod: &str, container: &str, command: &str) -> Result<String> {
        self.cluster.kubectl(&["exec", "-n", &self.namespace, pod, "-c", container, "--", "sh", "-c", command])
    }

    /// UUIDs of the MIG devices that `nvidia-smi -L` lists in a container.
    pub fn mig_uuids(&self, pod: &str, container: &str) -> Result<Vec<String>> {
        Ok(uuids(&self.shell(pod, container, "nvidia-smi -L")?, "MIG-"))
    }

    /// UUIDs of the GPUs that `nvidia-smi -L` lists in a container.
    pub fn gpu_uuids(&self, pod: &str, container: &str) -> Result<Vec<String>> {
        Ok(uuids(&self.shell(pod, container, "nvidia-smi -L")?, "GPU-"))
    }

    /// What the scheduler allocated to a pod's claim.
    pub async fn allocated(&self, pod: &str) -> Result<Vec<DeviceRequestAllocationResult>> {
        let statuses =
            self.pods().get(pod).await?.status.unwrap_or_default().resource_claim_statuses.unwrap_or_default();
        let named = statuses.into_iter().find_map(|status| status.resource_claim_name);
        let claim = self.claim(&named.context("the pod has no claim yet")?).await?;
        let allocation = claim.status.and_then(|status| status.allocation).context("the claim is not allocated")?;
        Ok(allocation.devices.and_then(|devices| devices.results).unwrap_or_default())
    }

    /// A claim of the scenario's namespace.
    pub async fn claim(&self, name: &str) -> Result<ResourceClaim> {
        Ok(Api::namespaced(self.client.clone(), &self.namespace).get(name).await?)
    }

    /// Puts a claim into the state that the scheduler would leave it in: these devices allocated to its requests, with
    /// these configurations. For allocations that no scheduler would make.
    pub async fn allocate(&self, name: &str, devices: &[(&str, &str)], configs: &[Value]) -> Result<String> {
        let node = &self.cluster.node()?.name;
        let results: Vec<Value> = devices
            .iter()
            .map(|(request, device)| json!({ "request": request, "driver": DRIVER, "pool": node, "device": device }))
            .collect();
        let configs: Vec<Value> = configs
            .iter()
            .map(
                |parameters| json!({ "source": "FromClaim", "opaque": { "driver": DRIVER, "parameters": parameters } }),
            )
            .collect();
        let status = json!({ "status": { "allocation": { "devices": { "results": results, "config": configs } } } });
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &self.namespace);
        let claim = api.patch_status(name, &PatchParams::default(), &Patch::Merge(&status)).await?;
        claim.metadata.uid.context("a stored claim has a UID")
    }

    /// The kubelet's connection to the plugin: to the one of its sockets at which somebody listens.
    pub async fn kubelet(&self) -> Result<Kubelet> {
        let directory = self.cluster.node()?.kubelet_root.join("plugins").join(DRIVER);
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

    /// The pods of the scenario's namespace.
    pub fn pods(&self) -> Api<ApiPod> {
        Api::namespaced(self.client.clone(), &self.namespace)
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
        let own = node.kubelet_root.join("plugins").join(DRIVER);
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
            ["get", "pods,resourceclaims,events", "-n", &self.namespace, "-o", "wide"].as_slice(),
            ["get", "gpunodes,gpupolicies,resourceslices", "-o", "wide"].as_slice(),
        ] {
            let text = self.cluster.kubectl(arguments).unwrap_or_else(|error| format!("{error:#}"));
            report.push_str(&format!("--- kubectl {}\n{text}\n", arguments.join(" ")));
        }
        report + &self.kerf.logs()
    }
}

/// The slices of kerf's driver.
fn ours() -> ListParams {
    ListParams::default().fields(&format!("spec.driver={DRIVER}"))
}

/// The words between `UUID: ` and `)` that begin with `prefix`.
fn uuids(listing: &str, prefix: &str) -> Vec<String> {
    let found = listing.split("(UUID: ").skip(1).filter_map(|rest| rest.split(')').next());
    found.filter(|uuid| uuid.starts_with(prefix)).map(str::to_owned).collect()
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
    let own = node.kubelet_root.join("plugins").join(DRIVER);
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
