//! What the watches have seen, by node, and what follows from it. Synchronous, without input or output.

mod census;
mod classes;
mod decision;
mod feed;
mod nodes;
mod offering;
mod shared;

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::resource::v1::DeviceClass;
use kerf_api::{GpuNode, names};
use kube::ResourceExt as _;
use tokio::time::Instant;

use crate::diff::Observed;
use crate::labels::Found;
use crate::liveness::{Life, Liveness, Now};
use crate::policy::{Offering, Rules};
pub use census::{Census, Standing};
pub use decision::{Decision, Reason, Verdict};
pub use feed::Feed;
pub use nodes::NodeView;
pub(crate) use nodes::serves;
pub use offering::{Report, Wish};
pub use shared::SharedIndex;

/// How long the watch on leases may show nothing before it is taken to be cut off. Some lease is renewed every few
/// seconds: that of the leading controller itself lies in the same namespace.
const SILENCE: Duration = Duration::from_secs(15);

/// How long a plugin may be without its registration before its devices are withdrawn: as long as the kubelet waits
/// when a plugin disconnects. A plugin that restarts is back within a second or two.
const REGISTRATION_GRACE: Duration = Duration::from_secs(30);

/// All nodes.
#[derive(Debug)]
pub struct Index {
    driver: String,
    nodes: BTreeMap<String, NodeState>,
    /// All DeviceClasses, whoever made them, by name.
    classes: Arc<BTreeMap<String, DeviceClass>>,
    dirty: BTreeSet<String>,
    /// What the admins say about all nodes.
    rules: Rules,
    /// The nodes on which each claim holds something, by the claim's UID.
    claims: BTreeMap<String, BTreeSet<String>>,
    /// Counts changes, over all nodes: a node that is forgotten and comes back never has an old number.
    revision: u64,
    /// When the watch on leases last showed anything.
    heard: Option<Instant>,
}

#[derive(Debug, Default)]
struct NodeState {
    uid: Option<String>,
    /// Its labels that are kerf's or would be, with their owners.
    found: Arc<Found>,
    /// All its labels.
    node_labels: BTreeMap<String, String>,
    gpu_node: Option<Arc<GpuNode>>,
    unregistered_since: Option<Instant>,
    lease: Option<Liveness>,
    slices: BTreeMap<String, Observed>,
    meanwhile: Meanwhile,
    /// Devices that claims hold, by the claim's UID.
    held: BTreeMap<String, BTreeSet<String>>,
    /// What follows from all this for the node's GPUs, once somebody has asked.
    offering: OnceCell<Offering>,
    revision: u64,
}

/// What the watch on slices has shown since the writer last began with a node. The reply to a write can come later than
/// the news of what somebody else did to the slice that was written.
#[derive(Debug, Default)]
struct Meanwhile {
    /// UIDs.
    deleted: BTreeSet<String>,
    relisted: bool,
}

impl Index {
    /// An index for one driver name. `follow_label`: nodes choose their layout by the label `nvidia.com/mig.config`, where no
    /// GpuPolicy says otherwise.
    pub fn new(driver: impl Into<String>, follow_label: bool) -> Index {
        Index {
            driver: driver.into(),
            nodes: BTreeMap::new(),
            classes: Arc::default(),
            dirty: BTreeSet::new(),
            rules: Rules { follow_label, ..Rules::default() },
            claims: BTreeMap::new(),
            revision: 0,
            heard: None,
        }
    }

    /// Counts the changes that matter to anybody.
    pub(crate) fn revision(&self) -> u64 {
        self.revision
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
        if !self.serves(gpu_node) {
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
        let publish = Decision::Publish {
            gpu_node: gpu_node.clone(),
            node_uid: uid.clone(),
            offering: self.offering(state).clone(),
        };
        (publish, Some(fresh_until))
    }

    /// The writer begins with `node`.
    pub fn begin(&mut self, node: &str) {
        if let Some(state) = self.nodes.get_mut(node) {
            state.meanwhile = Meanwhile::default();
        }
    }

    /// A slice as it is after a write of our own, before the watch shows it.
    ///
    /// Not taken when the watch is ahead of the reply: a slice that is gone already would be believed in for ever.
    pub fn written(&mut self, slice: Observed) {
        let Some(node) = slice.node.clone() else { return };
        let state = self.state(&node);
        if state.meanwhile.relisted || state.meanwhile.deleted.contains(&slice.uid) {
            self.mark(&node);
        } else if !state.slices.get(&slice.name).is_some_and(|known| feed::is_older(&slice, known)) {
            state.slices.insert(slice.name.clone(), slice);
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
            self.revision += 1;
            state.revision = self.revision;
            state.offering.take();
        }
        self.dirty.insert(node.to_owned());
        self.forget_empty(node);
    }

    /// Something changed that all nodes depend on.
    fn mark_all(&mut self) {
        self.nodes().iter().for_each(|node| self.mark(node));
    }

    fn forget_empty(&mut self, node: &str) {
        let empty = |state: &NodeState| {
            state.uid.is_none()
                && state.gpu_node.is_none()
                && state.lease.is_none()
                && state.slices.is_empty()
                && state.held.is_empty()
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
