//! How the watches change the index.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kerf_api::{GpuNode, names};
use kube::ResourceExt as _;
use kube::core::PartialObjectMeta;

use super::Index;
use crate::diff::Observed;
use crate::held::Holding;
use crate::labels::Found;
use crate::liveness::Now;
use crate::policy::{LayoutFile, Policy};

/// Takes what one watch sees.
pub trait Feed<T> {
    /// The object is new or changed.
    fn apply(&mut self, object: T, now: Now);
    /// The object is gone.
    fn delete(&mut self, object: T, now: Now);
    /// These are all objects there are.
    fn reset(&mut self, objects: Vec<T>, now: Now);
}

impl Feed<GpuNode> for Index {
    fn apply(&mut self, mut gpu_node: GpuNode, now: Now) {
        gpu_node.metadata.managed_fields = None;
        let node = gpu_node.name_any();
        let registered = gpu_node.status.as_ref().is_some_and(|status| status.registered);
        let state = self.state(&node);
        let same = state.gpu_node.as_ref().is_some_and(|known| {
            known.status == gpu_node.status
                && known.spec == gpu_node.spec
                && known.metadata.owner_references == gpu_node.metadata.owner_references
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
        let found = Found::of(&object.metadata);
        let (node, uid) = (object.name_any(), object.metadata.uid);
        let labels = object.metadata.labels.unwrap_or_default();
        let state = self.state(&node);
        let relabelled = *state.found != found;
        if relabelled {
            state.found = Arc::new(found);
        }
        if state.uid != uid || state.node_labels != labels {
            (state.uid, state.node_labels) = (uid, labels);
            self.mark(&node);
        } else if relabelled {
            // The slices do not depend on it.
            self.revision += 1;
        }
    }

    fn delete(&mut self, object: PartialObjectMeta<Node>, _: Now) {
        let node = object.name_any();
        let state = self.state(&node);
        if state.uid == object.metadata.uid {
            (state.uid, state.node_labels) = (None, BTreeMap::new());
            self.mark(&node);
        }
    }

    fn reset(&mut self, objects: Vec<PartialObjectMeta<Node>>, now: Now) {
        let names = objects.iter().map(PartialObjectMeta::name_any).collect();
        self.retain(&names, |state| {
            state.node_labels.clear();
            state.uid.take().is_some()
        });
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
        let Some(node) = &slice.node else { return };
        if let Some(state) = self.nodes.get_mut(node) {
            state.meanwhile.deleted.insert(slice.uid.clone());
        }
        if self.remove_slice(node, &slice.name, &slice.uid) {
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
            state.meanwhile.relisted = true;
            let before = state.slices.len();
            state.slices.retain(|name, _| names.contains(name));
            if state.slices.len() != before {
                self.mark(&node);
            }
        }
        slices.into_iter().for_each(|slice| self.apply(slice, now));
    }
}

impl Feed<Policy> for Index {
    fn apply(&mut self, policy: Policy, _: Now) {
        let known = self.rules.policies.iter_mut().find(|known| known.name == policy.name);
        let same = known.as_ref().is_some_and(|known| known.says_the_same(&policy));
        match known {
            Some(known) => *known = policy,
            None => self.rules.policies.push(policy),
        }
        // What was reported of it may have been changed by somebody.
        self.revision += 1;
        if !same {
            self.rules.sort();
            self.mark_all();
        }
    }

    fn delete(&mut self, policy: Policy, _: Now) {
        let before = self.rules.policies.len();
        // Another UID: a deletion that is seen late, of a predecessor of the same name.
        self.rules.policies.retain(|known| known.name != policy.name || known.uid != policy.uid);
        if self.rules.policies.len() != before {
            self.mark_all();
        }
    }

    fn reset(&mut self, policies: Vec<Policy>, now: Now) {
        let names: BTreeSet<&str> = policies.iter().map(|policy| policy.name.as_str()).collect();
        let before = self.rules.policies.len();
        self.rules.policies.retain(|known| names.contains(known.name.as_str()));
        if self.rules.policies.len() != before {
            self.mark_all();
        }
        policies.into_iter().for_each(|policy| self.apply(policy, now));
    }
}

impl Feed<LayoutFile> for Index {
    fn apply(&mut self, layouts: LayoutFile, _: Now) {
        if self.rules.layouts != layouts {
            self.rules.layouts = layouts;
            self.mark_all();
        }
    }

    fn delete(&mut self, _: LayoutFile, now: Now) {
        self.apply(LayoutFile::Absent, now);
    }

    fn reset(&mut self, mut layouts: Vec<LayoutFile>, now: Now) {
        self.apply(layouts.pop().unwrap_or_default(), now);
    }
}

impl Feed<Holding> for Index {
    fn apply(&mut self, holding: Holding, _: Now) {
        let Holding { claim, mut devices } = holding;
        let before = self.claims.remove(&claim).unwrap_or_default();
        let nodes: BTreeSet<String> = devices.keys().cloned().collect();
        for node in before.union(&nodes) {
            let held = devices.remove(node);
            let state = self.state(node);
            if state.held.get(&claim) != held.as_ref() {
                match held {
                    Some(held) => state.held.insert(claim.clone(), held),
                    None => state.held.remove(&claim),
                };
                self.mark(node);
            }
        }
        if !nodes.is_empty() {
            self.claims.insert(claim, nodes);
        }
    }

    fn delete(&mut self, holding: Holding, now: Now) {
        self.apply(Holding { claim: holding.claim, devices: BTreeMap::new() }, now);
    }

    fn reset(&mut self, holdings: Vec<Holding>, now: Now) {
        let there: BTreeSet<&str> = holdings.iter().map(|holding| holding.claim.as_str()).collect();
        let gone = self.claims.keys().filter(|claim| !there.contains(claim.as_str()));
        let gone: Vec<String> = gone.cloned().collect();
        let ended = gone.into_iter().map(|claim| Holding { claim, ..Holding::default() });
        for holding in ended.collect::<Vec<_>>().into_iter().chain(holdings) {
            self.apply(holding, now);
        }
    }
}

/// Whether the watch shows a version that a write of our own has already replaced.
pub(super) fn is_older(seen: &Observed, known: &Observed) -> bool {
    let version = |slice: &Observed| slice.resource_version.parse::<u64>().ok();
    match (version(seen), version(known)) {
        (Some(seen), Some(known)) => seen < known,
        _ => false,
    }
}
