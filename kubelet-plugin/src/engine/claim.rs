//! What goes into the engine and what comes out.

use std::path::PathBuf;

use kerf_mig::Placement;
use kerf_nvml::PciAddress;

use super::epoch::Epoch;
use super::record::{PartitionRecord, Phase, Record};
use super::{DeviceName, Engine, holders};

/// A claim as the API server says it is allocated, reduced to this driver's devices on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// UID of the ResourceClaim: everything is keyed by it.
    pub uid: String,
    /// Its namespace, for messages.
    pub namespace: String,
    /// Its name, for messages and for what its containers are told.
    pub name: String,
    /// What the pod calls it whose template it was made from.
    pub pod_claim_name: Option<String>,
    /// What it was allocated here, in the order of the allocation.
    pub devices: Vec<AllocatedDevice>,
}

/// One result of an allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedDevice {
    /// The base name of the request, without the subrequest part.
    pub request: String,
    /// Which of the request's alternatives was chosen, `large` of `gpu/large`.
    pub subrequest: Option<String>,
    /// The pool: the node's name.
    pub pool: String,
    /// The device's name, see [`DeviceName`].
    pub device: String,
    /// Which share of a shareable device; `None` for an unshared one.
    pub share_id: Option<String>,
    /// Whether the claim only looks: such a result holds nothing and never carves.
    pub admin_access: bool,
}

/// What the kubelet is told about one result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreparedDevice {
    /// Base names of the requests it serves.
    pub requests: Vec<String>,
    /// As allocated.
    pub pool: String,
    /// As allocated.
    pub device: String,
    /// Fully qualified CDI names, the same at every repeat.
    pub cdi_ids: Vec<String>,
    /// As allocated.
    pub share_id: Option<String>,
}

/// A claim that the journal knows on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreparedClaim {
    /// UID of the ResourceClaim.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Whether it is prepared whole; `false` while it is being prepared or released, or where either failed half-way.
    pub complete: bool,
    /// Whether a release of it has left something so far.
    pub stuck: bool,
    /// Whether it was released although something of it is left, see [`super::Released::Condemned`].
    pub condemned: bool,
    /// Whether it was last prepared before the node booted: none of its containers can live.
    pub earlier_boot: bool,
    /// Names of the devices it was allocated.
    pub devices: Vec<String>,
    /// Those of them that it holds: not what it may look at with admin access, nor what a condemned claim has let go of.
    pub held: Vec<String>,
    /// The instances that were carved for it and may be live.
    pub partitions: Vec<PreparedPartition>,
    /// Its partitions of which nobody can tell yet what of them is on their GPU: the claim's journal was lost.
    pub unplaced: Vec<DeviceName>,
    /// What it holds, where another driver has prepared it [before](super::FormerDriver): of that the API server says nothing
    /// that would keep it from other claims.
    pub former: Vec<FormerHold>,
}

/// A part of a GPU that a claim of the former driver holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormerHold {
    /// The GPU.
    pub gpu: PciAddress,
    /// Which memory slices; `None`: all of it.
    pub placement: Option<Placement>,
}

/// An instance that was carved for a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreparedPartition {
    /// The device it is.
    pub device: DeviceName,
    /// The GPU it is on.
    pub gpu: PciAddress,
    /// The memory slices it covers.
    pub placement: Placement,
    /// Its GPU instance id.
    pub gpu_instance: u32,
    /// Whether the instance was there before the claim, and stays after it.
    pub kept: bool,
}

/// A journal file that could not be used and was moved out of the way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetAside {
    /// UID of the claim it was about, from the file's name.
    pub claim_uid: String,
    /// Where it lies now, for a person to look at.
    pub path: PathBuf,
    /// What was wrong with it.
    pub reason: String,
}

impl Engine {
    /// What a record says, in the present epoch.
    pub(super) fn describe(&self, record: Record) -> PreparedClaim {
        record.describe_in(&self.epoch())
    }

    /// The same of many.
    pub(super) fn describe_all(&self, records: Vec<Record>) -> Vec<PreparedClaim> {
        let epoch = self.epoch();
        records.into_iter().map(|record| record.describe_in(&epoch)).collect()
    }
}

impl Record {
    fn describe_in(mut self, epoch: &Epoch) -> PreparedClaim {
        let earlier_boot = self.boot_id != epoch.boot_id;
        self.adapt_to(epoch);
        self.into_claim(earlier_boot)
    }

    /// What it says about the claim. `earlier_boot`: see [`PreparedClaim::earlier_boot`].
    pub(super) fn into_claim(self, earlier_boot: bool) -> PreparedClaim {
        let partition = |partition: &PartitionRecord| {
            Some(PreparedPartition {
                gpu: partition.device.gpu(),
                device: partition.device.clone(),
                placement: partition.placement(),
                gpu_instance: partition.gpu_instance?,
                kept: partition.kept,
            })
        };
        PreparedClaim {
            earlier_boot,
            stuck: self.stuck_since.is_some(),
            condemned: self.condemned,
            complete: self.phase == Phase::Prepared,
            devices: self.results.iter().map(|result| result.device.to_string()).collect(),
            held: self.held().map(DeviceName::to_string).collect(),
            partitions: self.partitions.iter().filter_map(partition).collect(),
            unplaced: self.unplaced().cloned().collect(),
            former: if self.former { holders::former_holds(&self) } else { Vec::new() },
            uid: self.claim.uid,
            namespace: self.claim.namespace,
            name: self.claim.name,
        }
    }
}

impl PreparedClaim {
    /// Which claim it is, for messages: by name where that is known, else by UID.
    pub fn whose(&self) -> String {
        let PreparedClaim { uid, namespace, name, .. } = self;
        if name.is_empty() { format!("claim {uid}") } else { format!("claim {namespace}/{name} ({uid})") }
    }
}
