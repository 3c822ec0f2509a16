//! A namespace with simulated GPUs in reach, and words to act and look in it, as a user of the cluster has them.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{Event, Namespace, Pod as ApiPod, ServiceAccount};
use k8s_openapi::api::resource::v1::{
    DeviceRequestAllocationResult, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use kerf_api::GpuNode;
use kerf_api::names::DRIVER_NAME;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::manifest::{Claim, Pod};
use crate::wait::eventually;

/// How long a pod may take to start or to be gone. Far above what it takes, so that a slow machine fails nothing.
const PATIENCE: Duration = Duration::from_secs(60);

/// A namespace of its own on a cluster.
pub struct Tenant {
    /// The cluster.
    pub cluster: Cluster,
    /// The admin's client.
    pub client: Client,
    /// How long to wait for what must come; a scenario that breaks Kubernetes itself asks for more.
    pub patience: Duration,
    namespace: String,
    image: Option<String>,
}

impl Tenant {
    /// Makes the namespace, and waits until there can be pods in it. It carries the label of the scenarios, `kerf.dev/e2e`.
    ///
    /// # Errors
    ///
    /// What the API server says.
    pub async fn new(cluster: Cluster, client: Client, namespace: &str) -> Result<Tenant> {
        let object: Namespace = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Namespace",
            "metadata": { "name": namespace, "labels": { "kerf.dev/e2e": "true" } },
        }))?;
        Api::<Namespace>::all(client.clone()).create(&PostParams::default(), &object).await?;
        // A pod is refused without it, and the controller manager makes it in its time.
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
        eventually("the namespace has its ServiceAccount", PATIENCE, async || Ok(accounts.get_opt("default").await?))
            .await?;
        Ok(Tenant { cluster, client, patience: PATIENCE, namespace: namespace.to_owned(), image: None })
    }

    /// Pods are made of this image rather than of the one that `kerf-cluster` loads.
    #[must_use]
    pub fn with_image(self, image: &str) -> Tenant {
        Tenant { image: Some(image.to_owned()), ..self }
    }

    /// The slices of the node if kerf has published its pool completely, in name order.
    ///
    /// # Errors
    ///
    /// What the API server says.
    pub async fn pool(&self) -> Result<Option<Vec<ResourceSlice>>> {
        let slices = self.slices().await?;
        let complete = slices.first().is_some_and(|first| {
            slices.len() as i64 == first.spec.pool.resource_slice_count
                && slices.iter().all(|slice| slice.spec.pool.generation == first.spec.pool.generation)
        });
        Ok(complete.then_some(slices))
    }

    /// The name of the namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
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
                let template: ResourceClaimTemplate = serde_json::from_value(object.clone())?;
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
        let pod = Pod::from_template(name, name);
        let pod = self.image.iter().fold(pod, |pod, image| pod.image(image));
        self.create(&pod.object()).await
    }

    /// [`Tenant::run`], then waits until the pod runs.
    pub async fn run_ready(&self, name: &str, claim: &Claim) -> Result<()> {
        self.run(name, claim).await?;
        self.ready(name).await
    }

    /// Waits until all containers of a pod run.
    pub async fn ready(&self, name: &str) -> Result<()> {
        self.ready_within(name, self.patience).await
    }

    /// The same, with another patience.
    pub async fn ready_within(&self, name: &str, patience: Duration) -> Result<()> {
        let api = self.pods();
        eventually(&format!("pod {name} runs"), patience, async || {
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
            .map(|(request, device)| json!({ "request": request, "driver": DRIVER_NAME, "pool": node, "device": device }))
            .collect();
        let configs: Vec<Value> = configs
            .iter()
            .map(
                |parameters| json!({ "source": "FromClaim", "opaque": { "driver": DRIVER_NAME, "parameters": parameters } }),
            )
            .collect();
        let status = json!({ "status": { "allocation": { "devices": { "results": results, "config": configs } } } });
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &self.namespace);
        let claim = api.patch_status(name, &PatchParams::default(), &Patch::Merge(&status)).await?;
        claim.metadata.uid.context("a stored claim has a UID")
    }

    /// The pods of the scenario's namespace.
    pub fn pods(&self) -> Api<ApiPod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }
}

/// The slices of kerf's driver.
pub(crate) fn ours() -> ListParams {
    ListParams::default().fields(&format!("spec.driver={DRIVER_NAME}"))
}

/// How long a pod took from its creation until it was ready, in whole seconds; `None` while it is not.
pub fn seconds_to_ready(pod: &ApiPod) -> Option<i64> {
    let created = pod.metadata.creation_timestamp.as_ref()?;
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let ready = conditions.iter().find(|condition| condition.type_ == "Ready" && condition.status == "True")?;
    Some(ready.last_transition_time.as_ref()?.0.as_second() - created.0.as_second())
}

/// The words between `UUID: ` and `)` that begin with `prefix`.
fn uuids(listing: &str, prefix: &str) -> Vec<String> {
    let found = listing.split("(UUID: ").skip(1).filter_map(|rest| rest.split(')').next());
    found.filter(|uuid| uuid.starts_with(prefix)).map(str::to_owned).collect()
}
