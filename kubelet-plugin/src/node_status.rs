//! Keeps the GpuNode of this node as the plugin knows it.
//!
//! Architecture invariant: nothing waits for this. Prepare works while the API server does not take a status.
//!
//! Architecture invariant: one writer at a time. Of two plugins on one node it is the one that holds the lease, or is about
//! to take it. That is asked before each write, after the object was read, and a write after another's fails.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kerf_api::{ForeignInstances, GpuNode, GpuNodeSpec, GpuNodeStatus, GpuSpec, names};
use kerf_nvml::{MigMode, PciAddress};
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource as _, ResourceExt as _};
use serde_json::json;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::backoff::Backoff;
use crate::engine::{DeviceName, ForeignPolicy, Wish, Wishes};
use crate::inventory::Inventory;
use crate::lease::NodeLease;
use crate::metrics::{Metrics, Report};
use crate::node::{self, NodeError};
use crate::registration::KubeletVerdict;

/// How often the object is compared with what it should be, in case somebody changed or deleted it. Reading costs the
/// API server little; nothing is written when it is as it should be.
const COMPARE: Duration = Duration::from_secs(60);

/// How often a plugin that may not write looks whether it may.
const STAND_BY: Duration = Duration::from_secs(10);

/// How long a starting plugin waits for the kubelet before it writes that it is not registered. A plugin that restarts
/// is registered again within seconds, and the status that its predecessor left is right until then.
const GRACE: Duration = Duration::from_secs(10);

/// The first wait after a failure, and the longest.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// What the status is made of.
pub struct Sources {
    /// What the node has.
    pub inventory: watch::Receiver<Option<Inventory>>,
    /// What the kubelet thinks of the plugin.
    pub verdict: watch::Receiver<KubeletVerdict>,
    /// Whether this process holds the node's lease: what another has written meanwhile is put right when it does again.
    pub held: watch::Receiver<bool>,
    /// Told what the controller wants of the GPUs, each time the object is read.
    pub wishes: Wishes,
    /// Told when these are others than before.
    pub changed: Arc<Notify>,
    /// Where it is counted what could not be written.
    pub metrics: Metrics,
}

/// How a comparison has ended.
enum Compared {
    /// The object says what it should.
    Equal,
    /// It is another plugin's to write.
    NotOurs,
}

/// Writes until `shutdown`, as far as `lease` lets it. `stands` becomes true when the API server first holds what this
/// process found, registration included: from then on the object may be vouched for.
pub async fn publish(
    client: Client,
    node_name: &str,
    sources: Sources,
    lease: &NodeLease,
    stands: watch::Sender<bool>,
    shutdown: CancellationToken,
) {
    let Sources { mut inventory, mut verdict, mut held, wishes, changed, metrics } = sources;
    let wanted = |spec: &GpuNodeSpec| {
        if wishes.tell(wishes_of(spec)) {
            changed.notify_one();
        }
    };
    let work = async {
        if inventory.wait_for(Option::is_some).await.is_err() {
            return;
        }
        let heard = verdict.wait_for(|verdict| *verdict != KubeletVerdict::Unknown);
        // Either way the verdict is read below.
        let _ = tokio::time::timeout(GRACE, heard).await;
        let mut backoff = Backoff::new(RETRY.0, RETRY.1);
        loop {
            let status = match inventory.borrow_and_update().as_ref() {
                Some(inventory) => status(inventory, &verdict.borrow_and_update()),
                None => return,
            };
            let wait = match write(&client, node_name, lease, &wanted, &status).await {
                Ok(Compared::NotOurs) => {
                    backoff.succeeded();
                    STAND_BY
                }
                Ok(Compared::Equal) => {
                    backoff.succeeded();
                    if status.registered {
                        stands.send_replace(true);
                    }
                    COMPARE
                }
                Err(error) => {
                    let wait = backoff.failed();
                    metrics.unwritten(Report::GpuNode);
                    tracing::warn!(error = &error as &dyn std::error::Error, ?wait, "GpuNode not written");
                    wait
                }
            };
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                Ok(()) = inventory.changed() => {}
                Ok(()) = verdict.changed() => {}
                Ok(()) = held.changed() => {}
            }
        }
    };
    tokio::select! {
        () = work => {}
        () = shutdown.cancelled() => {}
    }
}

/// What the GpuNode should say.
fn status(inventory: &Inventory, verdict: &KubeletVerdict) -> GpuNodeStatus {
    let mut status = inventory.status.clone();
    status.registered = *verdict == KubeletVerdict::Registered;
    if let KubeletVerdict::Refused(why) = verdict {
        let refused = format!("the kubelet refuses the plugin: {why}");
        status.message = Some(status.message.map_or(refused.clone(), |message| format!("{refused}; {message}")));
    }
    status
}

/// Creates the GpuNode where there is none, tells its spec, and writes its status where it differs.
async fn write(
    client: &Client,
    node_name: &str,
    lease: &NodeLease,
    wanted: &(impl Fn(&GpuNodeSpec) + Sync),
    status: &GpuNodeStatus,
) -> Result<Compared, NodeError> {
    let api: Api<GpuNode> = Api::all(client.clone());
    let found = match node::within(api.get_opt(node_name), "the GpuNode cannot be read").await? {
        Some(found) => found,
        None => {
            let metadata = ObjectMeta {
                name: Some(node_name.to_owned()),
                owner_references: Some(vec![node::owner(client, node_name).await?]),
                ..ObjectMeta::default()
            };
            let gpu_node = GpuNode { metadata, spec: GpuNodeSpec::default(), status: None };
            let params = PostParams::default();
            node::within(api.create(&params, &gpu_node), "the GpuNode cannot be created, are kerf's CRDs installed?")
                .await?
        }
    };
    wanted(&found.spec);
    if found.status.as_ref() == Some(status) {
        return Ok(Compared::Equal);
    }
    if !lease.lets_report(status.registered).await? {
        return Ok(Compared::NotOurs);
    }
    let patch = Patch::Apply(json!({
        "apiVersion": GpuNode::api_version(&()),
        "kind": GpuNode::kind(&()),
        // Not the object of a node that was deleted and came back meanwhile, nor one that another plugin has written.
        "metadata": {"name": node_name, "uid": found.uid(), "resourceVersion": found.resource_version()},
        "status": status,
    }));
    let params = PatchParams::apply(names::KUBELET_PLUGIN).force();
    node::within(api.patch_status(node_name, &params, &patch), "the status of the GpuNode cannot be written").await?;
    tracing::info!(gpus = status.gpus.len(), registered = status.registered, "GpuNode written");
    Ok(Compared::Equal)
}

/// What the controller wants, by GPU. What is said of a GPU by a name that is none is of no GPU here.
fn wishes_of(spec: &GpuNodeSpec) -> BTreeMap<PciAddress, Wish> {
    let by_address = |(name, spec): (&String, &GpuSpec)| {
        let device: DeviceName = name.parse().ok()?;
        device.as_partition().is_none().then(|| (device.gpu(), wish(spec)))
    };
    spec.gpus.iter().filter_map(by_address).collect()
}

fn wish(spec: &GpuSpec) -> Wish {
    let foreign = spec.foreign_instances.map(|wanted| match wanted {
        ForeignInstances::Keep => ForeignPolicy::Keep,
        ForeignInstances::Adopt => ForeignPolicy::Adopt,
        ForeignInstances::Delete => ForeignPolicy::Delete,
    });
    let mig_mode = spec.mig_mode.map(|wanted| match wanted {
        kerf_api::MigMode::Enabled => MigMode::Enabled,
        kerf_api::MigMode::Disabled => MigMode::Disabled,
    });
    Wish { foreign, mig_mode }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kubelets_verdict_is_in_the_status() {
        let broken = GpuNodeStatus { message: Some("no GPU".into()), ..GpuNodeStatus::default() };
        let broken = Inventory { status: broken, ..Inventory::default() };

        let unknown = status(&broken, &KubeletVerdict::Unknown);
        assert_eq!((unknown.registered, unknown.message.as_deref()), (false, Some("no GPU")));
        assert!(status(&broken, &KubeletVerdict::Registered).registered);

        let refused = status(&broken, &KubeletVerdict::Refused("bad name".into()));
        assert!(!refused.registered);
        assert_eq!(refused.message.as_deref(), Some("the kubelet refuses the plugin: bad name; no GPU"));
    }

    #[test]
    fn the_spec_says_what_is_wanted_of_each_gpu() {
        let spec: GpuNodeSpec = serde_json::from_value(json!({"gpus": {
            "gpu-3b-00-0": {"migMode": "Enabled"},
            "gpu-5e-00-0": {"foreignInstances": "Adopt"},
            "gpu-5e-00-0-mig-1g10gb-4": {"migMode": "Enabled"},
            "something else": {"migMode": "Disabled"},
        }}))
        .unwrap();
        let (one, other) = ("0000:3b:00.0".parse().unwrap(), "0000:5e:00.0".parse().unwrap());
        let wished = [
            (one, Wish { foreign: None, mig_mode: Some(MigMode::Enabled) }),
            (other, Wish { foreign: Some(ForeignPolicy::Adopt), mig_mode: None }),
        ];
        assert_eq!(wishes_of(&spec), wished.into());
    }
}
