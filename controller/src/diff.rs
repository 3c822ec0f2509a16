//! From what is wanted and what is there to what has to be written. Pure.
//!
//! The rules are those of Kubernetes' own helper for drivers (`k8s.io/dynamic-resource-allocation/resourceslice`):
//!
//! * Only slices of the pool's highest generation count, and only when there are as many as each of them says. So the
//!   pool's generation stays when at most one slice changes and none comes or goes, and else rises in every slice: no
//!   reader ever takes a mixture for the whole.
//! * Obsolete slices are deleted first, then changed ones are updated, then missing ones created.
//! * Slices with counter sets are written before slices with devices: their reply shows whether counters are kept.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use kerf_api::names;

use crate::meaning::Meaning;

/// A ResourceSlice that exists, without its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    /// Object name.
    pub name: String,
    /// Object UID.
    pub uid: String,
    /// The version of the object that was seen.
    pub resource_version: String,
    /// Whether it is on its way out.
    pub deleting: bool,
    /// Whether it carries the controller's label.
    pub managed: bool,
    /// UID of the Node that owns it.
    pub owner: Option<String>,
    /// `spec.driver`.
    pub driver: String,
    /// `spec.nodeName`.
    pub node: Option<String>,
    /// `spec.pool.name`.
    pub pool: String,
    /// `spec.pool.generation`.
    pub generation: i64,
    /// `spec.pool.resourceSliceCount`.
    pub slice_count: i64,
    /// What it says.
    pub meaning: Meaning,
    /// When the server saw a taint first, by device and key. It sets the time anew when an update does not repeat it.
    pub taint_times: BTreeMap<(String, String), Time>,
}

impl From<&ResourceSlice> for Observed {
    fn from(slice: &ResourceSlice) -> Observed {
        let metadata = &slice.metadata;
        let label = metadata.labels.as_ref().and_then(|labels| labels.get(names::LABEL_MANAGED_BY));
        Observed {
            name: metadata.name.clone().unwrap_or_default(),
            uid: metadata.uid.clone().unwrap_or_default(),
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
            deleting: metadata.deletion_timestamp.is_some(),
            managed: label.is_some_and(|value| value == names::CONTROLLER),
            owner: owner(metadata.owner_references.as_deref()),
            driver: slice.spec.driver.clone(),
            node: slice.spec.node_name.clone(),
            pool: slice.spec.pool.name.clone(),
            generation: slice.spec.pool.generation,
            slice_count: slice.spec.pool.resource_slice_count,
            meaning: Meaning::of(&slice.spec),
            taint_times: taint_times(slice),
        }
    }
}

fn taint_times(slice: &ResourceSlice) -> BTreeMap<(String, String), Time> {
    let devices = slice.spec.devices.iter().flatten();
    let taints = devices.flat_map(|device| device.taints.iter().flatten().map(|taint| (device.name.clone(), taint)));
    taints.filter_map(|(device, taint)| Some(((device, taint.key.clone()), taint.time_added.clone()?))).collect()
}

/// UID of the owner, when it is one Node and nothing else.
fn owner(references: Option<&[OwnerReference]>) -> Option<String> {
    match references? {
        [one] if one.kind == "Node" && one.controller == Some(true) => Some(one.uid.clone()),
        _ => None,
    }
}

/// A slice to delete: this very object in this very version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delete {
    /// Object name.
    pub name: String,
    /// Precondition.
    pub uid: String,
    /// Precondition.
    pub resource_version: String,
}

/// A slice to write.
#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    /// Replaces the version that the object's `resourceVersion` names.
    Update(ResourceSlice),
    /// Creates it.
    Create(ResourceSlice),
}

impl Write {
    /// The slice as it shall be.
    pub fn slice(&self) -> &ResourceSlice {
        match self {
            Write::Update(slice) | Write::Create(slice) => slice,
        }
    }
}

/// What to do, in this order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Slices that must go, first.
    pub delete: Vec<Delete>,
    /// Slices to write, then.
    pub write: Vec<Write>,
}

impl Plan {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.delete.is_empty() && self.write.is_empty()
    }
}

/// Takes away everything that the controller published, and nothing else.
///
/// Slices of the same driver that another program wrote stay: while a cluster moves to kerf node by node, its
/// predecessor serves the others.
pub fn withdraw<'a>(observed: impl IntoIterator<Item = &'a Observed>) -> Plan {
    let own = observed.into_iter().filter(|slice| slice.managed && !slice.deleting);
    Plan { delete: own.map(deletion).collect(), write: Vec::new() }
}

/// What makes `desired` out of `observed`, which is every slice of one driver on one node.
///
/// `desired` is one pool in writing order, its generation and slice count are not looked at. Slices that are not wanted
/// are deleted, whoever wrote them: there is one writer for a pool.
pub fn diff<'a>(desired: Vec<ResourceSlice>, observed: impl IntoIterator<Item = &'a Observed>) -> Plan {
    let mut kept: BTreeMap<&str, &Observed> = observed.into_iter().map(|slice| (slice.name.as_str(), slice)).collect();
    let by_name: BTreeMap<String, &ResourceSlice> = desired.iter().map(|slice| (name(slice), slice)).collect();
    let pool = desired.first().map(|slice| slice.spec.pool.name.clone());
    let in_pool = |slice: &Observed| Some(&slice.pool) == pool.as_ref();
    let generation = kept.values().filter(|slice| in_pool(slice)).map(|slice| slice.generation).max();

    let mut plan = Plan::default();
    let mut gone = false;
    kept.retain(|name, slice| {
        let keep = by_name.get(*name).is_some_and(|wanted| can_become(slice, wanted));
        if !keep {
            plan.delete.push(deletion(slice));
            gone |= in_pool(slice) && Some(slice.generation) == generation;
        }
        keep
    });

    // Whatever they say, all slices must agree on how many they are.
    let count = i64::try_from(desired.len()).unwrap_or(i64::MAX);
    let is_current = |slice: &Observed, wanted: &ResourceSlice| {
        slice.managed
            && Some(slice.generation) == generation
            && slice.slice_count == count
            && slice.meaning == Meaning::of(&wanted.spec)
    };
    let changed: BTreeSet<&str> =
        kept.iter().filter(|(name, slice)| !is_current(slice, by_name[**name])).map(|(name, _)| *name).collect();
    let added = desired.len() > kept.len();
    let rewrite = gone || added || changed.len() > 1;
    let generation = generation.unwrap_or(0) + i64::from(rewrite);

    let kept: BTreeMap<&str, (&Observed, bool)> =
        kept.iter().map(|(name, slice)| (*name, (*slice, changed.contains(name)))).collect();
    for mut slice in desired {
        slice.spec.pool.generation = generation;
        slice.spec.pool.resource_slice_count = count;
        match kept.get(name(&slice).as_str()) {
            None => plan.write.push(Write::Create(slice)),
            Some((observed, changed)) if rewrite || *changed => {
                slice.metadata.resource_version = Some(observed.resource_version.clone());
                keep_taint_times(&mut slice, observed);
                plan.write.push(Write::Update(slice));
            }
            Some(_) => {}
        }
    }
    plan.write.sort_by_key(|write| (has_devices(write.slice()), matches!(write, Write::Create(_))));
    plan
}

/// A taint that stays has been there since it came.
fn keep_taint_times(slice: &mut ResourceSlice, observed: &Observed) {
    for device in slice.spec.devices.iter_mut().flatten() {
        for taint in device.taints.iter_mut().flatten() {
            taint.time_added = observed.taint_times.get(&(device.name.clone(), taint.key.clone())).cloned();
        }
    }
}

/// Whether an update can make `wanted` of `slice`: driver, pool and node of a slice never change, and a slice of an
/// earlier Node of the same name is about to be collected with it.
fn can_become(slice: &Observed, wanted: &ResourceSlice) -> bool {
    !slice.deleting
        && slice.driver == wanted.spec.driver
        && slice.pool == wanted.spec.pool.name
        && slice.node == wanted.spec.node_name
        && slice.owner == owner(wanted.metadata.owner_references.as_deref())
}

fn has_devices(slice: &ResourceSlice) -> bool {
    slice.spec.devices.is_some()
}

fn name(slice: &ResourceSlice) -> String {
    slice.metadata.name.clone().unwrap_or_default()
}

fn deletion(slice: &Observed) -> Delete {
    Delete { name: slice.name.clone(), uid: slice.uid.clone(), resource_version: slice.resource_version.clone() }
}
