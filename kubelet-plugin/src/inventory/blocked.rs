//! What stands in the way of some of a GPU's devices. Pure, but for the names of processes.

use kerf_api::{Blocked, GpuInstanceStatus, MigPlacement, names};
use kerf_nvml::{Error, PciAddress, Process};

use crate::engine::{self, DeviceName, ForeignPolicy, PreparedClaim, PreparedPartition};

/// What blocks a GPU that is carved.
pub(super) struct Carved<'a> {
    pub(super) address: PciAddress,
    pub(super) instances: &'a [GpuInstanceStatus],
    /// Every process on the GPU, or why they cannot be told.
    pub(super) processes: Result<Vec<Process>, Error>,
    /// The device that is exactly an instance; `None` for a profile that is not known.
    pub(super) name: &'a dyn Fn(&GpuInstanceStatus) -> Option<String>,
}

/// What foreign instances and claims that cannot be released keep from being given out, by place.
pub(super) fn find(carved: &Carved<'_>, claims: &[PreparedClaim], policy: ForeignPolicy) -> Vec<Blocked> {
    let foreign = carved.instances.iter().filter(|instance| instance.claim_uid.is_none());
    let foreign = foreign.filter_map(|instance| carved.foreign(instance, policy));
    let of_claims = claims.iter().flat_map(|claim| {
        let there = claim.partitions.iter().filter(|partition| carved.holds(partition));
        let there = there.filter_map(move |partition| match (partition.kept, claim.stuck) {
            (true, _) => Some(carved.kept(claim, partition)),
            // Before it is condemned, so that the taint is there when the claim is not.
            (false, true) => Some(carved.condemned(claim, partition)),
            (false, false) => None,
        });
        let unplaced = claim.unplaced.iter().filter(move |device| claim.stuck && device.gpu() == carved.address);
        there.chain(unplaced.map(move |device| unseen(claim, device)))
    });
    let mut blocked: Vec<Blocked> = foreign.chain(of_claims).collect();
    blocked.sort_by_key(|blocked| blocked.placement.as_ref().map(|placement| (placement.start, placement.size)));
    blocked
}

/// Whether [`find`] may find something, so that it is worth asking for the processes.
pub(super) fn is_possible(address: PciAddress, instances: &[GpuInstanceStatus], claims: &[PreparedClaim]) -> bool {
    let may_block = |claim: &PreparedClaim| {
        let mut here = claim.partitions.iter().filter(|partition| partition.gpu == address);
        let mut unplaced = claim.unplaced.iter();
        here.any(|partition| claim.stuck || partition.kept)
            || unplaced.any(|device| claim.stuck && device.gpu() == address)
    };
    instances.iter().any(|instance| instance.claim_uid.is_none()) || claims.iter().any(may_block)
}

/// It may be anywhere on the GPU.
fn unseen(claim: &PreparedClaim, device: &DeviceName) -> Blocked {
    let message = format!(
        "nobody can tell what {device} of {}, which has ended, has left on the GPU: its journal was lost, and the log of \
         kerf-kubelet-plugin says what is missing; it is looked for again every 10 s",
        claim.whose()
    );
    Blocked { placement: None, reason: names::CONDEMNED.to_owned(), message, usable: None }
}

impl Carved<'_> {
    /// Under the policies that remove foreign instances, an idle one is in nobody's way.
    fn foreign(&self, instance: &GpuInstanceStatus, policy: ForeignPolicy) -> Option<Blocked> {
        let GpuInstanceStatus { id, placement, compute_instances, .. } = instance;
        let users = self.users(*id);
        let is_kept = policy == ForeignPolicy::Keep;
        if users.is_none() && !is_kept {
            return None;
        }
        let usable = (self.name)(instance).filter(|_| is_kept && users.is_none() && compute_instances.len() <= 1);
        let address = self.address;
        let remove = format!(
            "remove it with nvidia-smi mig -i {address} -gi {id} -dci; nvidia-smi mig -i {address} -gi {id} -dgi"
        );
        let todo = match (&users, &usable) {
            (Some(users), _) if is_kept => format!("it is in use by {users}; when they have ended, {remove}"),
            (Some(users), _) => {
                format!("it is in use by {users}, and is removed for a claim that needs its place when they have ended")
            }
            (None, Some(usable)) => format!("it can be claimed as {usable}; to free the place, {remove}"),
            (None, None) => format!("if nothing needs it, {remove}"),
        };
        let message =
            format!("GPU instance {id} (placement {}:{}) belongs to no claim: {todo}", placement.start, placement.size);
        Some(Blocked { placement: Some(*placement), reason: names::FOREIGN_INSTANCE.to_owned(), message, usable })
    }

    /// It stays when the claim ends: what overlaps it is never free.
    fn kept(&self, claim: &PreparedClaim, partition: &PreparedPartition) -> Blocked {
        let PreparedPartition { gpu_instance, placement, device, .. } = partition;
        let message = format!(
            "GPU instance {gpu_instance} (placement {}:{}) was there before {}, which uses it, and stays after it",
            placement.start,
            placement.size,
            claim.whose()
        );
        Blocked {
            placement: Some(MigPlacement { start: placement.start, size: placement.size }),
            reason: names::FOREIGN_INSTANCE.to_owned(),
            message,
            usable: Some(device.to_string()),
        }
    }

    fn condemned(&self, claim: &PreparedClaim, partition: &PreparedPartition) -> Blocked {
        let why = match self.users(partition.gpu_instance) {
            Some(users) => format!("is in use by {users}: it is removed as soon as they have ended"),
            None => "cannot be removed yet, though NVML names no process that uses it: monitoring agents are not named, and \
                     the log of kerf-kubelet-plugin says what was tried"
                .to_owned(),
        };
        let message = format!("{} of {}, which has ended, {why}", partition.device, claim.whose());
        let placement = MigPlacement { start: partition.placement.start, size: partition.placement.size };
        Blocked { placement: Some(placement), reason: names::CONDEMNED.to_owned(), message, usable: None }
    }

    fn users(&self, gpu_instance: u32) -> Option<String> {
        match &self.processes {
            Ok(processes) => engine::processes(processes, Some(gpu_instance)),
            Err(error) => Some(format!("unknown processes ({error})")),
        }
    }

    fn holds(&self, partition: &PreparedPartition) -> bool {
        let id = partition.gpu_instance;
        partition.gpu == self.address && self.instances.iter().any(|instance| instance.id == id)
    }
}
