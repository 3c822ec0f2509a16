//! What the policies make of the nodes.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kerf_api::{GpuNodeSpec, GpuNodeStatus, GpuPolicyStatus, names};
use kube::ResourceExt as _;

use super::{Decision, Index, NodeState, Reason};
use crate::liveness::Now;
use crate::policy::report::{self, NodeReport};
use crate::policy::{MigConfigState, NodeView, Offering, Policy, resolve};
use crate::render::MOST_GPUS;

/// A GpuNode whose spec is not what it should be.
#[derive(Clone, Debug, PartialEq)]
pub struct Wish {
    /// The node's name.
    pub node: String,
    /// UID of the GpuNode.
    pub uid: String,
    /// What it should be.
    pub spec: GpuNodeSpec,
}

/// A GpuPolicy whose status is not what it should be.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The policy's name.
    pub policy: String,
    /// Its UID.
    pub uid: String,
    /// What it should be.
    pub status: GpuPolicyStatus,
}

impl Index {
    /// What a node shall offer, and what is held of it.
    pub(super) fn offering<'a>(&self, state: &'a NodeState) -> &'a Offering {
        state.offering.get_or_init(|| {
            let nothing = GpuNodeStatus::default();
            let status = state.gpu_node.as_ref().and_then(|gpu_node| gpu_node.status.as_ref()).unwrap_or(&nothing);
            let held = state.held.values().flatten().cloned().collect();
            Offering { resolution: Arc::new(resolve(&self.rules, &state.node_labels, status)), held: Arc::new(held) }
        })
    }

    /// The answer to the label `nvidia.com/mig.config` of `node`; `None`: it is not there, or not followed.
    pub fn mig_config_state(&self, node: &str, now: Now) -> Option<MigConfigState> {
        let state = self.nodes.get(node)?;
        let unpublished = self.unpublished(state, now);
        let view = self.view(state, unpublished.as_deref())?;
        view.mig_config_state(&view.progress())
    }

    /// The GpuNodes that do not say what the policies ask of their nodes.
    pub fn wishes(&self) -> Vec<Wish> {
        let wish = |(node, state): (&String, &NodeState)| {
            let gpu_node = self.own_gpu_node(state)?;
            let gpus = gpu_node.status.iter().flat_map(|status| &status.gpus).take(MOST_GPUS);
            let spec = GpuNodeSpec { gpus: self.offering(state).resolution.wishes(gpus) };
            (spec != gpu_node.spec).then(|| Wish { node: node.clone(), uid: gpu_node.uid().unwrap_or_default(), spec })
        };
        self.nodes.iter().filter_map(wish).collect()
    }

    /// The policies whose status does not say what is so at `now`.
    pub fn reports(&self, now: Now) -> Vec<Report> {
        if self.rules.policies.is_empty() {
            return Vec::new();
        }
        let node = |(node, state)| {
            let unpublished = self.unpublished(state, now);
            let view = self.view(state, unpublished.as_deref())?;
            let resolution = &*self.offering(state).resolution;
            let matched = !resolution.matches.is_empty();
            matched.then(|| NodeReport { node, resolution, progress: view.progress() })
        };
        let nodes: Vec<NodeReport<'_>> =
            self.nodes.iter().filter_map(|(name, state)| node((name.as_str(), state))).collect();
        let report = |policy: &Policy| {
            let status = report::status(policy, &self.rules.layouts, &nodes, &Time(now.wall));
            let ours = self.reporter(policy).is_none_or(|driver| driver == self.driver);
            (ours && status != policy.status).then(|| Report {
                policy: policy.name.clone(),
                uid: policy.uid.clone(),
                status,
            })
        };
        self.rules.policies.iter().filter_map(report).collect()
    }

    /// The driver whose controller reports of a policy: of several kerfs whose GPUs it matches one only, the usual name first, so
    /// that they do not overwrite each other for ever. `None`: it matches none.
    fn reporter(&self, policy: &Policy) -> Option<&str> {
        let matched = self.nodes.values().filter_map(|state| {
            let driver = state.gpu_node.as_deref()?.status.as_ref()?.driver_name.as_str();
            let matches = !driver.is_empty() && self.offering(state).resolution.matches.contains_key(&policy.name);
            matches.then_some(driver)
        });
        matched.min_by_key(|driver| (*driver != names::DRIVER_NAME, *driver))
    }

    /// Why nothing is published of a node now. What is published stays so where the controller merely does not see the node.
    fn unpublished(&self, state: &NodeState, now: Now) -> Option<String> {
        match self.decide(state, now.instant).0 {
            Decision::Publish { .. } => None,
            Decision::Leave(Reason::Blind | Reason::Unproven) if !state.slices.is_empty() => None,
            Decision::Withdraw(reason) | Decision::Leave(reason) => Some(reason.to_string()),
        }
    }

    fn view<'a>(&self, state: &'a NodeState, unpublished: Option<&'a str>) -> Option<NodeView<'a>> {
        let status = self.own_gpu_node(state)?.status.as_ref()?;
        Some(NodeView { status, offering: self.offering(state), unpublished })
    }

    /// The GpuNode, if it is one of this driver.
    fn own_gpu_node<'a>(&self, state: &'a NodeState) -> Option<&'a kerf_api::GpuNode> {
        let gpu_node = state.gpu_node.as_deref()?;
        gpu_node.status.as_ref().is_some_and(|status| status.driver_name == self.driver).then_some(gpu_node)
    }
}
