//! Keeps the labels on the Nodes.

use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kerf_api::{GpuNode, names};
use kube::api::{Patch, PatchParams};
use kube::core::PartialObjectMetaExt as _;
use kube::{Api, Client};
use tokio::time::{Instant, timeout};
use tracing::{debug, info, warn};

use super::{Found, Labels, Offered, apply, wanted};
use crate::features::{Counters, ServerFeatures};
use crate::index::{NodeView, SharedIndex};
use crate::liveness::Now;
use crate::metrics::{Class, Metrics};
use crate::policy::{MigConfigState, Resolution};
use crate::queue::Outcome;
use crate::upkeep::{PATIENCE, Upkeep};

/// Writes the labels of all nodes that have a plugin of this driver, and takes them away where there is none.
pub struct Keeper {
    client: Client,
    /// Whether there shall be any.
    enabled: bool,
    index: SharedIndex,
    metrics: Metrics,
    counters: bool,
    seen: HashMap<String, Seen>,
}

/// What was looked at last of one node.
struct Seen {
    uid: String,
    labels: Arc<Found>,
    gpu_node: Option<Arc<GpuNode>>,
    foreign: bool,
    resolution: Arc<Resolution>,
    mig_config_state: Option<MigConfigState>,
    counters: bool,
}

impl Seen {
    fn is(&self, view: &NodeView, counters: bool) -> bool {
        let same_node = match (&self.gpu_node, &view.gpu_node) {
            (Some(seen), Some(now)) => Arc::ptr_eq(seen, now),
            (seen, now) => seen.is_none() && now.is_none(),
        };
        same_node
            && self.uid == view.uid
            && Arc::ptr_eq(&self.labels, &view.labels)
            && self.foreign == view.foreign
            && Arc::ptr_eq(&self.resolution, &view.resolution)
            && self.mig_config_state == view.mig_config_state
            && self.counters == counters
    }
}

impl Keeper {
    /// Keeps the labels, or sees to it that there are none.
    pub fn new(client: Client, enabled: bool, index: SharedIndex, metrics: Metrics) -> Keeper {
        Keeper { client, enabled, index, metrics, counters: false, seen: HashMap::new() }
    }

    /// What has to be applied to a node, if anything.
    fn due(&self, seen: &Seen) -> Option<Labels> {
        if seen.foreign {
            return None;
        }
        let wanted = match &seen.gpu_node {
            Some(gpu_node) if self.enabled => {
                let offered = Offered::of(gpu_node, &seen.resolution, seen.counters);
                wanted(gpu_node, &offered, seen.mig_config_state.map(MigConfigState::as_str))?
            }
            _ => Labels::new(),
        };
        apply(&wanted, &seen.labels)
    }
}

impl Upkeep for Keeper {
    fn changed(&mut self, features: ServerFeatures) -> Vec<String> {
        self.counters = features.counters != Counters::None;
        let views = self.index.lock().node_views(Now::read());
        let mut changed = Vec::new();
        let mut seen = HashMap::with_capacity(views.len());
        for view in views {
            let known = self.seen.remove(&view.name).filter(|known| known.is(&view, self.counters));
            let now = known.unwrap_or_else(|| {
                changed.push(view.name.clone());
                let NodeView { uid, labels, gpu_node, foreign, resolution, mig_config_state, .. } = view.clone();
                Seen { uid, labels, gpu_node, foreign, resolution, mig_config_state, counters: self.counters }
            });
            seen.insert(view.name, now);
        }
        self.seen = seen;
        changed
    }

    async fn look(&mut self, node: &str) -> (Outcome, Option<Instant>) {
        let Some(seen) = self.seen.get(node) else { return (Outcome::Idle, None) };
        let Some(labels) = self.due(seen) else { return (Outcome::Idle, None) };
        let count = labels.len();
        let outcome = match timeout(PATIENCE, write(&self.client, node, &seen.uid, labels)).await {
            Ok(Ok(())) => {
                info!(node, labels = count, "labelled");
                Outcome::Wrote
            }
            // Another has put a label there, or the Node has gone, and the watch shows it any moment.
            Ok(Err(kube::Error::Api(status))) if [404, 409].contains(&status.code) => {
                debug!(node, %status.message, "another change came first");
                Outcome::Failed
            }
            Ok(Err(error)) => {
                self.metrics.failed(Class::of(&error));
                warn!(node, error = &error as &dyn std::error::Error, "cannot label the node; will be tried again");
                Outcome::Failed
            }
            Err(_) => {
                self.metrics.failed(Class::Unavailable);
                warn!(node, "cannot label the node: no answer within {PATIENCE:?}; will be tried again");
                Outcome::Failed
            }
        };
        (outcome, None)
    }

    fn forget(&mut self) {
        self.seen.clear();
    }
}

/// Applies `labels` in place of what was applied before. The UID keeps a Node of the same name that came later safe, and one that
/// has gone from being made again.
pub(crate) async fn write(client: &Client, node: &str, uid: &str, labels: Labels) -> kube::Result<()> {
    let metadata = ObjectMeta { uid: Some(uid.to_owned()), labels: Some(labels), ..ObjectMeta::default() };
    let patch = Patch::Apply(metadata.into_request_partial::<Node>());
    let api: Api<Node> = Api::all(client.clone());
    api.patch_metadata(node, &PatchParams::apply(names::NODE_LABELS), &patch).await.map(drop)
}
