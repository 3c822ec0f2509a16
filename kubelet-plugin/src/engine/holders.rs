//! Who holds what: the node's last line of defence against a device given out twice. Pure.

use kerf_mig::Placement;
use kerf_nvml::PciAddress;

use super::DeviceName;
use super::record::Record;

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
}

impl Extent {
    /// Whether both want the same part of one GPU.
    pub(super) fn overlaps(self, other: Extent) -> bool {
        match (self, other) {
            (Extent::Slices(one), Extent::Slices(other)) => one.overlaps(other),
            _ => true,
        }
    }
}

/// Everything that the records say is held. Results with admin access hold nothing; a record holds what it says in any
/// phase and from any boot, because the claim is allocated until it is released.
pub(super) fn holds(records: &[Record]) -> Vec<Hold> {
    records
        .iter()
        .flat_map(|record| {
            let claim = format!("{}/{} ({})", record.claim.namespace, record.claim.name, record.claim.uid);
            let whole = record
                .results
                .iter()
                .filter(|result| !result.admin_access && result.device.as_partition().is_none())
                .map(|result| (&result.device, Extent::Whole));
            let partitions =
                record.partitions.iter().map(|partition| (&partition.device, Extent::Slices(partition.placement)));
            whole
                .chain(partitions)
                .map(|(device, extent)| Hold { device: device.clone(), extent, claim: claim.clone() })
                .collect::<Vec<_>>()
        })
        .collect()
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
    fn admin_access_holds_nothing() {
        let records =
            [record("Prepared", "gpu-3b-00-0", true, None), record("Prepared", "gpu-3b-00-0-mig-3g40gb-0", true, None)];
        assert_eq!(holds(&records), []);
    }
}
