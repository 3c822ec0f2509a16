//! Who holds what: the node's last line of defence against a device given out twice. Pure.

use kerf_mig::Placement;
use kerf_nvml::PciAddress;

use super::record::Record;
use super::{DeviceName, FormerHold};

/// How much of a GPU is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    /// All of it.
    Whole,
    /// Some memory slices.
    Slices(Placement),
}

/// What one claim holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hold {
    pub(super) device: DeviceName,
    pub(super) extent: Extent,
    /// `namespace/name (uid)`.
    pub(super) claim: String,
    /// Whether the claim has ended, and this is what could not be removed yet.
    pub(super) condemned: bool,
    /// The GPU instance, as far as it is known.
    pub(super) gpu_instance: Option<u32>,
}

impl Hold {
    /// What the claim in hand is about to hold itself.
    pub(super) fn own(device: DeviceName, extent: Extent) -> Hold {
        Hold { device, extent, claim: String::new(), condemned: false, gpu_instance: None }
    }
}

impl Extent {
    fn placement(self) -> Option<Placement> {
        match self {
            Extent::Whole => None,
            Extent::Slices(placement) => Some(placement),
        }
    }

    /// Whether both want the same part of one GPU.
    pub(super) fn overlaps(self, other: Extent) -> bool {
        match (self, other) {
            (Extent::Slices(one), Extent::Slices(other)) => one.overlaps(other),
            _ => true,
        }
    }
}

/// Everything that the records say is held. Results with admin access hold nothing; a record holds what it says in any
/// phase and from any epoch, because the claim is allocated until it is released. A condemned claim is allocated no more: it
/// holds what may still be on a GPU.
pub(super) fn holds(records: &[Record]) -> Vec<Hold> {
    records.iter().flat_map(holds_of).collect()
}

fn holds_of(record: &Record) -> Vec<Hold> {
    let (claim, condemned) = (record.describe_claim(), record.condemned);
    let hold = |device: &DeviceName, extent, gpu_instance| Hold {
        device: device.clone(),
        extent,
        claim: claim.clone(),
        condemned,
        gpu_instance,
    };
    let gpus = record.results.iter().filter(|result| !result.admin_access && result.device.as_partition().is_none());
    let gpus = gpus.filter(|_| !condemned).map(|result| hold(&result.device, Extent::Whole, None));
    // A partition of which nothing but the name is known may be anywhere on the GPU.
    let unplaced = record.unplaced().map(|device| hold(device, Extent::Whole, None));
    let partitions = record
        .partitions
        .iter()
        .filter(|partition| !condemned || partition.may_be_on_gpu())
        .map(|partition| hold(&partition.device, Extent::Slices(partition.placement()), partition.gpu_instance));
    gpus.chain(unplaced).chain(partitions).collect()
}

/// The same of a claim that another driver has prepared, for those who look on.
pub(super) fn former_holds(record: &Record) -> Vec<FormerHold> {
    let holds = holds_of(record).into_iter();
    holds.map(|Hold { device, extent, .. }| FormerHold { gpu: device.gpu(), placement: extent.placement() }).collect()
}

/// The hold that stands in the way of a part of a GPU.
pub(super) fn in_the_way(holds: &[Hold], gpu: PciAddress, extent: Extent) -> Option<&Hold> {
    holds.iter().find(|hold| hold.device.gpu() == gpu && hold.extent.overlaps(extent))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn record(phase: &str, result: &str, admin: bool, placement: Option<(u32, u32)>) -> Record {
        let partitions: Vec<_> = placement
            .iter()
            .map(|(start, size)| {
                json!({"device": result, "profileId": 9, "placement": {"start": start, "size": size}, "state": "Planned"})
            })
            .collect();
        serde_json::from_value(json!({
            "version": 1, "bootId": "an older boot", "phase": phase,
            "claim": {"uid": "1-2", "namespace": "team", "name": "mine"},
            "results": [{"request": "r", "pool": "node", "device": result, "adminAccess": admin}],
            "partitions": partitions,
        }))
        .unwrap()
    }

    fn blocked(records: &[Record], gpu: &str, extent: Extent) -> bool {
        in_the_way(&holds(records), gpu.parse().unwrap(), extent).is_some()
    }

    const HERE: &str = "0000:3b:00.0";
    const THERE: &str = "0000:af:00.0";

    fn slices(start: u32, size: u32) -> Extent {
        Extent::Slices(Placement { start, size })
    }

    #[test]
    fn a_whole_gpu_excludes_everything_on_it() {
        let records = [record("Prepared", "gpu-3b-00-0", false, None)];
        assert!(blocked(&records, HERE, Extent::Whole));
        assert!(blocked(&records, HERE, slices(6, 1)));
        assert!(!blocked(&records, THERE, Extent::Whole));
        let holds = holds(&records);
        assert_eq!(in_the_way(&holds, HERE.parse().unwrap(), Extent::Whole).unwrap().claim, "team/mine (1-2)");
    }

    #[test]
    fn a_partition_excludes_what_it_overlaps() {
        for phase in ["Preparing", "Prepared", "Releasing"] {
            let records = [record(phase, "gpu-3b-00-0-mig-3g40gb-0", false, Some((0, 4)))];
            assert!(blocked(&records, HERE, Extent::Whole));
            assert!(blocked(&records, HERE, slices(3, 1)));
            assert!(!blocked(&records, HERE, slices(4, 4)));
            assert!(!blocked(&records, THERE, slices(0, 8)));
        }
    }

    #[test]
    fn a_condemned_claim_holds_what_is_left_of_it() {
        let condemned = |result: &str, state: &str, placement| {
            let mut record = record("Releasing", result, false, placement);
            record.condemned = true;
            for partition in &mut record.partitions {
                partition.state = serde_json::from_value(json!(state)).unwrap();
            }
            record
        };
        for state in ["Carving", "Carved"] {
            let left = [condemned("gpu-3b-00-0-mig-3g40gb-0", state, Some((0, 4)))];
            assert!(blocked(&left, HERE, slices(3, 1)) && blocked(&left, HERE, Extent::Whole), "{state}");
            assert!(holds(&left)[0].condemned);
            assert_eq!(left[0].held().count(), 1, "{state}");
        }
        let gone = [condemned("gpu-3b-00-0-mig-3g40gb-0", "Planned", Some((0, 4))), condemned("gpu-3b-00-0", "", None)];
        assert_eq!(holds(&gone), []);
        assert_eq!(gone.iter().flat_map(Record::held).count(), 0);
        // Nobody knows yet what of it is on the GPU, and where.
        let unplaced = [condemned("gpu-3b-00-0-mig-3g40gb-0", "", None)];
        assert!(blocked(&unplaced, HERE, slices(7, 1)) && !blocked(&unplaced, THERE, Extent::Whole));
        assert_eq!(unplaced[0].held().count(), 1);
    }

    #[test]
    fn admin_access_holds_nothing() {
        let records =
            [record("Prepared", "gpu-3b-00-0", true, None), record("Prepared", "gpu-3b-00-0-mig-3g40gb-0", true, None)];
        assert_eq!(holds(&records), []);
    }
}
