//! What the watches have seen, by node, and what follows from it. Synchronous, without input or output.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kerf_api::{GpuNode, names};
use kube::ResourceExt as _;
use kube::core::PartialObjectMeta;
use tokio::time::Instant;

use crate::diff::Observed;
use crate::liveness::{Life, Liveness, Now};

/// How long the watch on leases may show nothing before it is taken to be cut off. Some lease is renewed every five
/// seconds at most: that of the leading controller itself lies in the same namespace.
const SILENCE: Duration = Duration::from_secs(15);

/// How long a plugin may be without its registration before its devices are withdrawn: as long as the kubelet waits
/// when a plugin disconnects. A plugin that restarts is back within a second or two.
const REGISTRATION_GRACE: Duration = Duration::from_secs(30);

/// What to do about a node's devices.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Offer what the plugin found; the slices belong to the Node with this UID.
    Publish {
        /// What the plugin found.
        gpu_node: Arc<GpuNode>,
        /// The owner.
        node_uid: String,
    },
    /// Offer nothing.
    Withdraw(Reason),
    /// Leave everything as it is.
    Leave(Reason),
}

/// Why nothing is published now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// There is no Node of that name. What belonged to it is being collected.
    NoNode,
    /// The node has no plugin of ours.
    NoPlugin,
    /// The node's plugin serves another driver name.
    OtherDriver,
    /// The GpuNode is that of an earlier Node of the same name.
    EarlierNode,
    /// The plugin has never made a lease, or it was deleted.
    NoLease,
    /// The plugin stopped in good order.
    Released,
    /// The plugin has not renewed its lease in time.
    Stale,
    /// The controller has not watched long enough to know whether the plugin is alive.
    Unproven,
    /// The controller does not see leases at present.
    Blind,
    /// The kubelet has not accepted the plugin.
    Unregistered,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::NoNode => "there is no Node of that name",
            Reason::NoPlugin => "the node has no GpuNode",
            Reason::OtherDriver => "the node's plugin serves another driver name",
            Reason::EarlierNode => "the GpuNode belongs to an earlier Node of the same name",
            Reason::NoLease => "the node's plugin has no lease",
            Reason::Released => "the node's plugin has stopped",
            Reason::Stale => "the node's plugin has not renewed its lease in time",
            Reason::Unproven => "it is not known yet whether the node's plugin is alive",
            Reason::Blind => "the watch on leases shows nothing at present",
            Reason::Unregistered => "the node's plugin is not registered with the kubelet",
        })
    }
}

/// A decision, for now.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// What to do.
    pub decision: Decision,
    /// When time alone can change the decision.
    pub recheck: Option<Instant>,
    /// Changes whenever anything about the node does.
    pub revision: u64,
}

/// Takes what one watch sees.
pub trait Feed<T> {
    /// The object is new or changed.
    fn apply(&mut self, object: T, now: Now);
    /// The object is gone.
    fn delete(&mut self, object: T, now: Now);
    /// These are all objects there are.
    fn reset(&mut self, objects: Vec<T>, now: Now);
}

/// All nodes.
#[derive(Debug)]
pub struct Index {
    driver: String,
    nodes: BTreeMap<String, NodeState>,
    dirty: BTreeSet<String>,
    /// When the watch on leases last showed anything.
    heard: Option<Instant>,
}

#[derive(Debug, Default)]
struct NodeState {
    uid: Option<String>,
    gpu_node: Option<Arc<GpuNode>>,
    unregistered_since: Option<Instant>,
    lease: Option<Liveness>,
    slices: BTreeMap<String, Observed>,
    revision: u64,
}

impl Index {
    /// An index for one driver name.
    pub fn new(driver: impl Into<String>) -> Index {
        Index { driver: driver.into(), nodes: BTreeMap::new(), dirty: BTreeSet::new(), heard: None }
    }

    /// The nodes about which something changed since the last call.
    pub fn take_dirty(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.dirty)
    }

    /// Every node that anything is known of.
    pub fn nodes(&self) -> Vec<String> {
        self.nodes.keys().cloned().collect()
    }

    /// Whether anything is known of `node`.
    pub fn knows(&self, node: &str) -> bool {
        self.nodes.contains_key(node)
    }

    /// The slices of our driver on `node`, by name.
    pub fn slices(&self, node: &str) -> Vec<Observed> {
        self.nodes.get(node).map(|state| state.slices.values().cloned().collect()).unwrap_or_default()
    }

    /// What to do about `node` at `now`.
    pub fn verdict(&self, node: &str, now: Now) -> Verdict {
        let nothing = NodeState::default();
        let state = self.nodes.get(node).unwrap_or(&nothing);
        let (decision, recheck) = self.decide(state, now.instant);
        Verdict { decision, recheck, revision: state.revision }
    }

    fn decide(&self, state: &NodeState, now: Instant) -> (Decision, Option<Instant>) {
        let withdraw = |reason| (Decision::Withdraw(reason), None);
        let Some(uid) = &state.uid else { return (Decision::Leave(Reason::NoNode), None) };
        let Some(gpu_node) = &state.gpu_node else { return withdraw(Reason::NoPlugin) };
        let status = gpu_node.status.as_ref();
        if status.is_some_and(|status| !status.driver_name.is_empty() && status.driver_name != self.driver) {
            return withdraw(Reason::OtherDriver);
        }
        if gpu_node.owner_references().iter().any(|owner| owner.kind == "Node" && owner.uid != *uid) {
            return withdraw(Reason::EarlierNode);
        }
        if self.heard.is_none_or(|heard| heard + SILENCE < now) {
            return (Decision::Leave(Reason::Blind), Some(now + SILENCE));
        }
        let fresh_until = match state.lease.as_ref().map(|lease| lease.at(now)) {
            None => return withdraw(Reason::NoLease),
            Some(Life::Released) => return withdraw(Reason::Released),
            Some(Life::Stale) => return withdraw(Reason::Stale),
            Some(Life::Unproven(until)) => return (Decision::Leave(Reason::Unproven), Some(until)),
            Some(Life::Fresh(until)) => until,
        };
        if !status.is_some_and(|status| status.registered) {
            let withdrawn_at = state.unregistered_since.unwrap_or(now) + REGISTRATION_GRACE;
            return if withdrawn_at <= now {
                withdraw(Reason::Unregistered)
            } else {
                (Decision::Leave(Reason::Unregistered), Some(withdrawn_at.min(fresh_until)))
            };
        }
        let publish = Decision::Publish { gpu_node: gpu_node.clone(), node_uid: uid.clone() };
        (publish, Some(fresh_until))
    }

    /// A slice as it is after a write of our own, before the watch shows it.
    pub fn written(&mut self, slice: Observed) {
        if let Some(node) = slice.node.clone() {
            self.state(&node).slices.insert(slice.name.clone(), slice);
        }
    }

    /// A slice of `node` that we deleted ourselves.
    pub fn removed(&mut self, node: &str, name: &str, uid: &str) {
        self.remove_slice(node, name, uid);
        self.forget_empty(node);
    }

    fn remove_slice(&mut self, node: &str, name: &str, uid: &str) -> bool {
        let Some(state) = self.nodes.get_mut(node) else { return false };
        // Another UID: a deletion that is seen late, of a predecessor of the same name.
        state.slices.get(name).is_some_and(|known| known.uid == uid) && state.slices.remove(name).is_some()
    }

    fn state(&mut self, node: &str) -> &mut NodeState {
        self.nodes.entry(node.to_owned()).or_default()
    }

    fn mark(&mut self, node: &str) {
        if let Some(state) = self.nodes.get_mut(node) {
            state.revision += 1;
        }
        self.dirty.insert(node.to_owned());
        self.forget_empty(node);
    }

    fn forget_empty(&mut self, node: &str) {
        let empty = |state: &NodeState| {
            state.uid.is_none() && state.gpu_node.is_none() && state.lease.is_none() && state.slices.is_empty()
        };
        if self.nodes.get(node).is_some_and(empty) {
            self.nodes.remove(node);
        }
    }

    /// Deletes what is known of one kind on all nodes but `keep`.
    fn retain(&mut self, keep: &BTreeSet<String>, mut forget: impl FnMut(&mut NodeState) -> bool) {
        for node in self.nodes() {
            if !keep.contains(&node) && forget(self.state(&node)) {
                self.mark(&node);
            }
        }
    }

    /// The watch on leases shows something. After a silence that was too long nothing is known of any lease: they are
    /// all doubted until they are seen again, else one cut connection would withdraw the whole cluster's devices.
    fn hear(&mut self, now: Now) {
        let was_blind = self.heard.is_some_and(|heard| heard + SILENCE < now.instant);
        self.heard = Some(now.instant);
        if was_blind {
            for node in self.nodes() {
                if let Some(lease) = &mut self.state(&node).lease {
                    lease.doubt(now);
                    self.mark(&node);
                }
            }
        }
    }

    /// One lease, of a plugin or not. `watched`: it changed under the eyes of the watch.
    fn see_lease(&mut self, lease: &Lease, watched: bool, now: Now) {
        let name = lease.name_any();
        let Some(node) = name.strip_prefix(&names::plugin_lease("")) else { return };
        let state = self.state(node);
        let before = state.lease.as_ref().map(|lease| lease.at(now.instant));
        match &mut state.lease {
            Some(known) => known.see(lease, now),
            unknown if watched => *unknown = Some(Liveness::renewed(lease, now)),
            unknown => *unknown = Some(Liveness::found(lease, now)),
        }
        let after = state.lease.as_ref().map(|lease| lease.at(now.instant));
        let fresh = |life| matches!(life, Some(Life::Fresh(_)));
        // A renewal in time changes no decision; the next look comes by the clock.
        if before != after && !(fresh(before) && fresh(after)) {
            self.mark(node);
        }
    }
}

impl Feed<GpuNode> for Index {
    fn apply(&mut self, mut gpu_node: GpuNode, now: Now) {
        gpu_node.metadata.managed_fields = None;
        let node = gpu_node.name_any();
        let registered = gpu_node.status.as_ref().is_some_and(|status| status.registered);
        let state = self.state(&node);
        let same = state.gpu_node.as_ref().is_some_and(|known| {
            known.status == gpu_node.status && known.metadata.owner_references == gpu_node.metadata.owner_references
        });
        state.unregistered_since = (!registered).then(|| state.unregistered_since.unwrap_or(now.instant));
        state.gpu_node = Some(Arc::new(gpu_node));
        if !same {
            self.mark(&node);
        }
    }

    fn delete(&mut self, gpu_node: GpuNode, _: Now) {
        let node = gpu_node.name_any();
        let state = self.state(&node);
        (state.gpu_node, state.unregistered_since) = (None, None);
        self.mark(&node);
    }

    fn reset(&mut self, gpu_nodes: Vec<GpuNode>, now: Now) {
        let names = gpu_nodes.iter().map(GpuNode::name_any).collect();
        self.retain(&names, |state| {
            state.unregistered_since = None;
            state.gpu_node.take().is_some()
        });
        gpu_nodes.into_iter().for_each(|gpu_node| self.apply(gpu_node, now));
    }
}

impl Feed<PartialObjectMeta<Node>> for Index {
    fn apply(&mut self, object: PartialObjectMeta<Node>, _: Now) {
        let (node, uid) = (object.name_any(), object.metadata.uid);
        let state = self.state(&node);
        if state.uid != uid {
            state.uid = uid;
            self.mark(&node);
        }
    }

    fn delete(&mut self, object: PartialObjectMeta<Node>, _: Now) {
        let node = object.name_any();
        let state = self.state(&node);
        if state.uid == object.metadata.uid {
            state.uid = None;
            self.mark(&node);
        }
    }

    fn reset(&mut self, objects: Vec<PartialObjectMeta<Node>>, now: Now) {
        let names = objects.iter().map(PartialObjectMeta::name_any).collect();
        self.retain(&names, |state| state.uid.take().is_some());
        objects.into_iter().for_each(|object| self.apply(object, now));
    }
}

impl Feed<Lease> for Index {
    fn apply(&mut self, lease: Lease, now: Now) {
        self.hear(now);
        self.see_lease(&lease, true, now);
    }

    fn delete(&mut self, lease: Lease, now: Now) {
        self.hear(now);
        let name = lease.name_any();
        if let Some(node) = name.strip_prefix(&names::plugin_lease("")) {
            self.state(node).lease = None;
            self.mark(node);
        }
    }

    fn reset(&mut self, leases: Vec<Lease>, now: Now) {
        self.hear(now);
        let prefix = names::plugin_lease("");
        let names =
            leases.iter().filter_map(|lease| Some(lease.name_any().strip_prefix(&prefix)?.to_owned())).collect();
        self.retain(&names, |state| state.lease.take().is_some());
        leases.iter().for_each(|lease| self.see_lease(lease, false, now));
    }
}

impl Feed<Observed> for Index {
    fn apply(&mut self, slice: Observed, _: Now) {
        let Some(node) = slice.node.clone().filter(|_| slice.driver == self.driver) else { return };
        let known = self.nodes.get(&node).and_then(|state| state.slices.get(&slice.name));
        if known.is_some_and(|known| *known == slice || is_older(&slice, known)) {
            return;
        }
        self.state(&node).slices.insert(slice.name.clone(), slice);
        self.mark(&node);
    }

    fn delete(&mut self, slice: Observed, _: Now) {
        if let Some(node) = &slice.node
            && self.remove_slice(node, &slice.name, &slice.uid)
        {
            self.mark(node);
        }
    }

    fn reset(&mut self, slices: Vec<Observed>, now: Now) {
        let mut by_node: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for slice in &slices {
            by_node.entry(slice.node.clone().unwrap_or_default()).or_default().insert(slice.name.clone());
        }
        for node in self.nodes() {
            let names = by_node.remove(&node).unwrap_or_default();
            let state = self.state(&node);
            let before = state.slices.len();
            state.slices.retain(|name, _| names.contains(name));
            if state.slices.len() != before {
                self.mark(&node);
            }
        }
        slices.into_iter().for_each(|slice| self.apply(slice, now));
    }
}

/// Whether the watch shows a version that a write of our own has already replaced.
fn is_older(seen: &Observed, known: &Observed) -> bool {
    let version = |slice: &Observed| slice.resource_version.parse::<u64>().ok();
    match (version(seen), version(known)) {
        (Some(seen), Some(known)) => seen < known,
        _ => false,
    }
}
