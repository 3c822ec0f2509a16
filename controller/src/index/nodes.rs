//! What is known of the nodes beside their slices, for those who keep something else true.

use std::sync::Arc;

use kerf_api::GpuNode;
use kube::ResourceExt as _;

use super::Index;
use crate::labels::Found;
use crate::liveness::Now;
use crate::policy::{MigConfigState, Resolution};

/// One node that exists.
#[derive(Clone, Debug)]
pub struct NodeView {
    /// The node's name.
    pub name: String,
    /// UID of the Node.
    pub uid: String,
    /// The labels on the Node.
    pub labels: Arc<Found>,
    /// What its plugin found; `None` where there is none, or one of an earlier Node of the name.
    pub gpu_node: Option<Arc<GpuNode>>,
    /// Whether another driver name serves the node: it is somebody else's.
    pub foreign: bool,
    /// What its GPUs shall offer.
    pub resolution: Arc<Resolution>,
    /// The answer to its label `nvidia.com/mig.config`.
    pub mig_config_state: Option<MigConfigState>,
}

impl Index {
    /// All Nodes there are, as they stand at `now`.
    pub fn node_views(&self, now: Now) -> Vec<NodeView> {
        let view = |(name, state): (&String, &super::NodeState)| {
            let uid = state.uid.clone()?;
            let of_this_node = |gpu_node: &Arc<GpuNode>| {
                !gpu_node.owner_references().iter().any(|owner| owner.kind == "Node" && owner.uid != uid)
            };
            let foreign = state.gpu_node.as_ref().is_some_and(|gpu_node| !self.serves(gpu_node));
            let gpu_node = state.gpu_node.clone().filter(of_this_node);
            Some(NodeView {
                name: name.clone(),
                uid,
                labels: state.found.clone(),
                gpu_node,
                foreign,
                resolution: self.offering(state).resolution.clone(),
                mig_config_state: self.mig_config_state(name, now),
            })
        };
        self.nodes.iter().filter_map(view).collect()
    }

    /// Every GpuNode of this driver, whether its plugin lives or not.
    pub fn gpu_nodes(&self) -> Vec<Arc<GpuNode>> {
        let all = self.nodes.values().filter_map(|state| state.gpu_node.clone());
        all.filter(|gpu_node| self.serves(gpu_node)).collect()
    }

    /// [`serves`] of this index' driver.
    pub(super) fn serves(&self, gpu_node: &GpuNode) -> bool {
        serves(&self.driver, gpu_node)
    }
}

/// Whether a GpuNode is one of `driver`; one that does not say so yet is.
pub(crate) fn serves(driver: &str, gpu_node: &GpuNode) -> bool {
    let status = gpu_node.status.as_ref();
    status.is_none_or(|status| status.driver_name.is_empty() || status.driver_name == driver)
}
