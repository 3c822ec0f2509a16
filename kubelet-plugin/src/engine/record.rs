//! What the journal keeps of a claim, and the pure rules about it.
//!
//! The format is versioned. Within a version fields are only added: what this build does not know it keeps in `extra`
//! and writes back, so that a downgrade loses nothing. A change that an older build would misread takes a new version,
//! and a file of a newer version is refused and left alone.

use std::collections::BTreeSet;

use kerf_mig::Placement;
use kerf_nvml::{GpuInstance, PciAddress};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::epoch::Epoch;
use super::{Claim, DeviceName};

/// The version that this build writes, and the newest that it reads.
pub(super) const VERSION: u64 = 1;

/// Everything that is needed to undo, or to finish, what was begun for a claim.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Record {
    /// See [`VERSION`].
    pub(super) version: u64,
    /// Whose it is.
    pub(super) claim: ClaimRef,
    /// The kernel's boot id when it was written, see [`Epoch`].
    pub(super) boot_id: String,
    /// The driver's loading when it was written, see [`Epoch`]. Absent where it was not known, and in files of builds that
    /// did not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) driver_load: Option<u64>,
    /// Where the claim stands.
    pub(super) phase: Phase,
    /// Since when nothing of it could be removed although it should be, in seconds since the boot; see [`stuck`](super::stuck).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) stuck_since: Option<u64>,
    /// Whether the kubelet was told that it is released although something is left. A build that does not know this sees a
    /// release that was cut off, which holds the devices all the same.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) condemned: bool,
    /// What the claim was allocated.
    pub(super) results: Vec<AllocationResult>,
    /// The partitions that are to be, or may be, on a GPU for this claim. Beside those in `results` also some of an
    /// earlier allocation of the same claim, until they are released.
    pub(super) partitions: Vec<PartitionRecord>,
    /// Whether it stands for a claim of the driver that was here [before](super::FormerDriver). Such a record is never written.
    #[serde(skip)]
    pub(super) former: bool,
    #[serde(flatten)]
    pub(super) extra: Map<String, Value>,
}

/// A ResourceClaim by name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ClaimRef {
    pub(super) uid: String,
    pub(super) namespace: String,
    pub(super) name: String,
    #[serde(flatten)]
    pub(super) extra: Map<String, Value>,
}

/// Where a claim stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Phase {
    /// Being prepared, or preparing it failed or was cut off.
    Preparing,
    /// Everything is in place, as far as this file knows.
    Prepared,
    /// Being released, or releasing it failed or was cut off.
    Releasing,
}

/// One result of the allocation, see [`super::AllocatedDevice`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AllocationResult {
    pub(super) request: String,
    pub(super) pool: String,
    pub(super) device: DeviceName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) share_id: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) admin_access: bool,
    #[serde(flatten)]
    pub(super) extra: Map<String, Value>,
}

/// A partition of a claim.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PartitionRecord {
    pub(super) device: DeviceName,
    /// Hardware profile id.
    pub(super) profile_id: u32,
    placement: PlacementRecord,
    pub(super) state: PartitionState,
    /// Whether the GPU instance was there before the claim, and stays after it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) kept: bool,
    /// The same of its compute instance.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) kept_compute: bool,
    /// Known once `state` is `Carved`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) gpu_instance: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) compute_instance: Option<u32>,
    /// MIG device UUID, for a person: the same one may come again for another instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) uuid: Option<String>,
    #[serde(flatten)]
    pub(super) extra: Map<String, Value>,
}

/// The memory slices of a partition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct PlacementRecord {
    start: u32,
    size: u32,
    #[serde(flatten)]
    extra: Map<String, Value>,
}

/// How far a partition has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum PartitionState {
    /// Nothing of it is on the GPU.
    Planned,
    /// Its place was seen empty and the GPU instance is being created: it may be there, its id is not known.
    Carving,
    /// The GPU instance was created; the compute instance may be missing.
    Carved,
}

impl Record {
    /// The record of a claim for which nothing was done yet.
    pub(super) fn new(claim: &Claim, epoch: Epoch) -> Record {
        Record {
            version: VERSION,
            claim: ClaimRef {
                uid: claim.uid.clone(),
                namespace: claim.namespace.clone(),
                name: claim.name.clone(),
                extra: Map::new(),
            },
            boot_id: epoch.boot_id,
            driver_load: epoch.driver_load,
            phase: Phase::Preparing,
            stuck_since: None,
            condemned: false,
            results: Vec::new(),
            partitions: Vec::new(),
            former: false,
            extra: Map::new(),
        }
    }

    /// Every GPU that the claim holds or has touched.
    pub(super) fn gpus(&self) -> BTreeSet<PciAddress> {
        let results = self.results.iter().map(|result| result.device.gpu());
        results.chain(self.partitions.iter().map(|partition| partition.device.gpu())).collect()
    }

    /// Takes over what the claim is allocated now. What this build does not know about a result stays with it.
    pub(super) fn set_results(&mut self, mut results: Vec<AllocationResult>) {
        for result in &mut results {
            let same = |old: &&AllocationResult| {
                old.device == result.device && old.request == result.request && old.share_id == result.share_id
            };
            if let Some(old) = self.results.iter().find(same) {
                result.extra = old.extra.clone();
            }
        }
        self.results = results;
    }

    /// The epoch in which it was written.
    pub(super) fn epoch(&self) -> Epoch {
        Epoch { boot_id: self.boot_id.clone(), driver_load: self.driver_load }
    }

    /// Forgets what is gone in the present epoch: the instances of another.
    pub(super) fn forget_what_ended_before(&mut self, epoch: &Epoch) {
        if !epoch.may_be(&self.epoch()) {
            self.phase = Phase::Preparing;
            self.stuck_since = None;
            self.partitions.iter_mut().for_each(PartitionRecord::forget);
        }
    }

    /// Takes the record into the present epoch.
    pub(super) fn adapt_to(&mut self, epoch: &Epoch) {
        self.forget_what_ended_before(epoch);
        epoch.boot_id.clone_into(&mut self.boot_id);
        self.driver_load = epoch.driver_load.or(self.driver_load);
    }

    /// The devices that it holds: not those that it may only look at, and of a condemned claim the partitions that may be left.
    pub(super) fn held(&self) -> impl Iterator<Item = &DeviceName> {
        let devices = self.results.iter().filter(|result| !result.admin_access).map(|result| &result.device);
        devices.filter(|device| {
            let mut partitions = self.partitions.iter().filter(|partition| partition.device == **device);
            !self.condemned || device.as_partition().is_some() && partitions.all(PartitionRecord::may_be_on_gpu)
        })
    }

    /// The partitions that it has by name only: its journal was lost, and the GPU has not told the rest yet.
    pub(super) fn unplaced(&self) -> impl Iterator<Item = &DeviceName> {
        let has_place = |device: &DeviceName| self.partitions.iter().any(|partition| partition.device == *device);
        let partitions =
            self.results.iter().filter(|result| !result.admin_access && result.device.as_partition().is_some());
        partitions.map(|result| &result.device).filter(move |device| !has_place(device))
    }

    /// `namespace/name (uid)`, for messages.
    pub(super) fn describe_claim(&self) -> String {
        let ClaimRef { uid, namespace, name, .. } = &self.claim;
        match (self.former, name.is_empty()) {
            (false, _) => format!("{namespace}/{name} ({uid})"),
            (true, false) => format!("{namespace}/{name} ({uid}), which NVIDIA's DRA driver has prepared,"),
            (true, true) => format!("{uid}, which NVIDIA's DRA driver has prepared,"),
        }
    }

    /// Whether an instance of this claim may be on a GPU.
    pub(super) fn may_be_on_gpu(&self) -> bool {
        self.partitions.iter().any(PartitionRecord::may_be_on_gpu)
    }
}

impl PartitionRecord {
    /// A partition of which nothing exists yet.
    pub(super) fn planned(device: DeviceName, profile_id: u32, placement: Placement) -> PartitionRecord {
        PartitionRecord {
            device,
            profile_id,
            placement: PlacementRecord { start: placement.start, size: placement.size, extra: Map::new() },
            state: PartitionState::Planned,
            kept: false,
            kept_compute: false,
            gpu_instance: None,
            compute_instance: None,
            uuid: None,
            extra: Map::new(),
        }
    }

    /// The memory slices that it covers.
    pub(super) fn placement(&self) -> Placement {
        Placement { start: self.placement.start, size: self.placement.size }
    }

    /// Whether something of it may be on the GPU.
    pub(super) fn may_be_on_gpu(&self) -> bool {
        self.state != PartitionState::Planned
    }

    /// Nothing of it is on the GPU any more.
    pub(super) fn forget(&mut self) {
        self.state = PartitionState::Planned;
        self.kept = false;
        self.kept_compute = false;
        self.gpu_instance = None;
        self.compute_instance = None;
        self.uuid = None;
    }

    /// Whether a live instance has this partition's profile and placement: it is this one, or a stranger in its place.
    pub(super) fn describes(&self, live: &GpuInstance) -> bool {
        live.profile_id == self.profile_id && live.placement == self.placement()
    }

    /// Whether a live instance is the one that was carved for this partition, as far as the journal can tell.
    ///
    /// Ids are given out again after a driver reload, so profile and placement must fit as well. UUIDs prove nothing:
    /// the kernel module derives them from GPU, instance id and engine, so a successor has the same.
    pub(super) fn explains(&self, live: &GpuInstance) -> bool {
        self.describes(live)
            && match self.state {
                PartitionState::Planned => false,
                PartitionState::Carving => true,
                PartitionState::Carved => self.gpu_instance == Some(live.id),
            }
    }
}
