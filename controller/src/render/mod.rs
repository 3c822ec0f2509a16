//! The core: what a node's plugin found, as far as it is to be offered, as ResourceSlices. Pure.
//!
//! One pool a node. Counter sets in slices of their own, at most eight in each, then one slice a GPU: what happens to
//! one GPU later changes one slice and keeps the pool's generation.

mod attributes;
mod blocked;
mod choice;
mod device;
mod name;
mod remark;

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::{CounterSet, Device, ResourcePool, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kerf_api::{Gpu, GpuNode, GpuNodeStatus, GpuOffer, names};
use kube::ResourceExt as _;

use crate::features::{Counters, ServerFeatures};
use crate::policy::{Forms, Offering};
use blocked::Blocks;
use choice::Choice;
use device::Exclusion;
pub(crate) use device::{cut_name, geometry};
pub(crate) use name::is_dns_label;
pub use remark::Remark;

/// The most GPUs of one node. The largest machines have 16; a node that reports more is not taken at its word, as each of them
/// costs two slices.
pub(crate) const MOST_GPUS: usize = 128;

/// The most counters that all devices of a slice draw from together, where they are in one slice with the counters
/// (Kubernetes 1.34, `ResourceSliceMaxDeviceCountersPerSlice`).
const MOST_CONSUMED: usize = 1024;

/// The most counter sets of one slice.
const MOST_COUNTER_SETS: usize = 8;

/// The most devices of one slice when any of them consumes counters.
const MOST_DEVICES: usize = 64;

/// The most remarks about one node: each is an Event.
const MOST_REMARKS: usize = 32;

/// Place of a slice in the order of names, in which the scheduler searches.
mod rank {
    /// Slices without devices.
    pub(super) const COUNTERS: u8 = 0;
    /// GPUs that are not carved on demand, because they cannot be or because an admin has fixed what they offer: a claim that
    /// they can serve gets one of these first.
    pub(super) const FIXED: u8 = 1;
    /// GPUs that are.
    pub(super) const PARTITIONABLE: u8 = 2;
}

/// What a node shall offer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rendering {
    /// The slices in the order of their names, those with counter sets first. Generation and slice count of the pool are left at 0: only
    /// [`diff`](crate::diff) knows them.
    pub slices: Vec<ResourceSlice>,
    /// What is not offered although the plugin offered it, for a person.
    pub remarks: Vec<Remark>,
}

/// Renders what `offering` says of `gpu_node` for `driver`. The slices are owned by the Node with the UID `node_uid` and vanish
/// with it.
///
/// Nothing in `gpu_node` makes this fail: it is written by a node, and what the API server would refuse is left out with
/// a remark. A node without any device gets one slice without devices, which says that the driver is there.
pub fn render(
    driver: &str,
    gpu_node: &GpuNode,
    node_uid: &str,
    offering: &Offering,
    features: ServerFeatures,
) -> Rendering {
    let nothing = GpuNodeStatus::default();
    let status = gpu_node.status.as_ref().unwrap_or(&nothing);
    let node = gpu_node.name_any();
    let mut layout = Layout::new(driver, &node, node_uid, offering, features);
    if status.gpus.len() > MOST_GPUS {
        let more = format!("{} GPUs", status.gpus.len() - MOST_GPUS);
        layout.leave_out(&more, "a node has 128 at most, and those that are reported first are offered");
    }
    for gpu in status.gpus.iter().take(MOST_GPUS) {
        layout.add(status, gpu);
    }
    layout.finish()
}

/// The slices of one node in the making.
struct Layout<'a> {
    driver: &'a str,
    node: &'a str,
    node_uid: &'a str,
    offering: &'a Offering,
    features: ServerFeatures,
    sets: Vec<CounterSet>,
    slices: Vec<ResourceSlice>,
    /// Names so far: a counter set or device that is there twice would make the whole pool invalid.
    gpus: BTreeSet<String>,
    devices: BTreeSet<String>,
    without_counters: Vec<String>,
    without_taints: Vec<String>,
    remarks: Vec<Remark>,
}

impl<'a> Layout<'a> {
    fn new(
        driver: &'a str,
        node: &'a str,
        node_uid: &'a str,
        offering: &'a Offering,
        features: ServerFeatures,
    ) -> Layout<'a> {
        Layout {
            driver,
            node,
            node_uid,
            offering,
            features,
            sets: Vec::new(),
            slices: Vec::new(),
            gpus: BTreeSet::new(),
            devices: BTreeSet::new(),
            without_counters: Vec::new(),
            without_taints: Vec::new(),
            remarks: Vec::new(),
        }
    }

    fn add(&mut self, status: &GpuNodeStatus, gpu: &Gpu) {
        let offering = self.offering;
        if gpu.offer == GpuOffer::Nothing && offering.held_of(&gpu.name).next().is_none() {
            return;
        }
        if !is_dns_label(&gpu.name) {
            self.leave_out(&gpu.name, "the name is not a DNS label");
            return;
        }
        if gpu.name.contains("-mig-") {
            self.leave_out(&gpu.name, "the name of a GPU must not be one of a partition");
            return;
        }
        if !self.gpus.insert(gpu.name.clone()) {
            self.leave_out(&gpu.name, "the name is used twice on this node");
            return;
        }
        let geometry = geometry(gpu).unwrap_or_else(|problem| {
            self.leave_out(&gpu.name, problem);
            kerf_mig::Geometry::default()
        });
        let (blocks, doubts) = Blocks::of(gpu, &geometry);
        self.remarks.extend(doubts.into_iter().map(|why| Remark::Doubtful { gpu: gpu.name.clone(), why }));
        let choice = Choice::of(gpu, &geometry, offering);
        let cut = !choice.cuts.is_empty() || gpu.offer != GpuOffer::Whole && geometry.memory_slices() > 0;
        let exclusion = if cut { self.exclusion(gpu, &geometry, &choice) } else { None };
        let choice = if exclusion.is_some() { choice } else { choice.without_counters(gpu, &geometry, offering) };
        let (mut devices, left_out) = device::devices(status, gpu, &geometry, &choice, exclusion.as_ref(), &blocks);
        for problem in left_out {
            self.leave_out(&gpu.name, &problem);
        }
        devices.retain(|device| self.admit(device));
        if !self.features.taints {
            self.do_without_taints(gpu, exclusion.is_some(), &mut devices);
        }
        if devices.is_empty() {
            return;
        }
        let fixed = gpu.offer == GpuOffer::Whole || matches!(offering.forms(&gpu.name), Forms::Fixed(_) | Forms::Whole);
        let rank = if fixed { rank::FIXED } else { rank::PARTITIONABLE };
        let combined = exclusion.as_ref().filter(|_| self.features.counters == Counters::Combined);
        let combined = combined.map(|exclusion| vec![exclusion.set().clone()]);
        let chunks = if combined.is_some() { devices.len() } else { MOST_DEVICES };
        for (index, chunk) in devices.chunks(chunks).enumerate() {
            let part = if index == 0 { gpu.name.clone() } else { format!("{}-{index:02}", gpu.name) };
            let slice = self.slice(rank, &part, combined.clone(), Some(chunk.to_vec()));
            self.slices.push(slice);
        }
        if let Some(exclusion) = exclusion.filter(|_| self.features.counters == Counters::Separate) {
            self.sets.push(exclusion.set().clone());
        }
    }

    /// Leaves out what a taint would hold back. Of what is held, though, the scheduler forgets the counters if it is not there,
    /// and may give out what overlaps it; where there are counters, it stays, and somebody may get it who waits for it when its
    /// claim ends.
    fn do_without_taints(&mut self, gpu: &Gpu, counters: bool, devices: &mut Vec<Device>) {
        let held = &self.offering.held;
        if devices.iter().any(|device| device.taints.is_some() && !held.contains(&device.name)) {
            self.without_taints.push(gpu.name.clone());
        }
        devices.retain(|device| device.taints.is_none() || counters && held.contains(&device.name));
        devices.iter_mut().for_each(|device| device.taints = None);
    }

    /// The counters that keep the forms of one GPU apart; `None` where there can be none, with a remark where that costs
    /// something.
    fn exclusion(&mut self, gpu: &Gpu, geometry: &kerf_mig::Geometry, choice: &Choice<'_>) -> Option<Exclusion> {
        let needed = choice.needs_counters(gpu, self.offering);
        if self.features.counters == Counters::None {
            self.without_counters.extend(needed.then(|| gpu.name.clone()));
            return None;
        }
        let problem = match Exclusion::new(&gpu.name, geometry) {
            None => "partitions: they need more than the 32 counters that one set can hold",
            Some(exclusion) if self.features.counters == Counters::Combined && !fits_one_slice(&exclusion, choice) => {
                "partitions: they are too many for the one slice that Kubernetes 1.34 allows"
            }
            Some(exclusion) => return Some(exclusion),
        };
        if needed {
            self.leave_out(&gpu.name, problem);
        }
        None
    }

    fn admit(&mut self, device: &Device) -> bool {
        if !is_dns_label(&device.name) {
            self.leave_out(&device.name, "the name is not a DNS label");
            return false;
        }
        let new = self.devices.insert(device.name.clone());
        if !new {
            self.leave_out(&device.name, "the name is used twice on this node");
        }
        new
    }

    fn leave_out(&mut self, what: &str, why: &str) {
        self.remarks.push(Remark::LeftOut { what: what.to_owned(), why: why.to_owned() });
    }

    fn finish(mut self) -> Rendering {
        let more = self.remarks.len().saturating_sub(MOST_REMARKS);
        if more > 0 {
            self.remarks.truncate(MOST_REMARKS);
            self.remarks.push(Remark::More { count: more });
        }
        if !self.without_counters.is_empty() {
            self.remarks.push(Remark::NoCounters { gpus: std::mem::take(&mut self.without_counters) });
        }
        if !self.without_taints.is_empty() {
            self.remarks.push(Remark::NoTaints { gpus: std::mem::take(&mut self.without_taints) });
        }
        let sets = std::mem::take(&mut self.sets);
        let counters = sets
            .chunks(MOST_COUNTER_SETS)
            .enumerate()
            .map(|(index, sets)| self.slice(rank::COUNTERS, &format!("counters-{index}"), Some(sets.to_vec()), None));
        let mut slices: Vec<ResourceSlice> = counters.collect();
        slices.append(&mut self.slices);
        slices.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
        if slices.is_empty() {
            slices.push(self.slice(rank::COUNTERS, "empty", None, None));
        }
        Rendering { slices, remarks: self.remarks }
    }

    fn slice(
        &self,
        rank: u8,
        part: &str,
        shared_counters: Option<Vec<CounterSet>>,
        devices: Option<Vec<Device>>,
    ) -> ResourceSlice {
        let owner = OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: self.node.to_owned(),
            uid: self.node_uid.to_owned(),
            controller: Some(true),
            block_owner_deletion: None,
        };
        ResourceSlice {
            metadata: ObjectMeta {
                name: Some(name::slice(self.node, self.driver, rank, part)),
                labels: Some([(names::LABEL_MANAGED_BY.to_owned(), names::CONTROLLER.to_owned())].into()),
                owner_references: Some(vec![owner]),
                ..ObjectMeta::default()
            },
            spec: ResourceSliceSpec {
                driver: self.driver.to_owned(),
                pool: ResourcePool { name: self.node.to_owned(), generation: 0, resource_slice_count: 0 },
                node_name: Some(self.node.to_owned()),
                shared_counters,
                devices,
                ..ResourceSliceSpec::default()
            },
        }
    }
}

/// Whether Kubernetes 1.34, which wants them in the slice of their counters, takes these devices.
fn fits_one_slice(exclusion: &Exclusion, choice: &Choice<'_>) -> bool {
    let cuts = choice.cuts.iter().map(|(cut, _)| *cut);
    choice.cuts.len() < MOST_DEVICES && exclusion.consumed_by_all(cuts) <= MOST_CONSUMED
}
