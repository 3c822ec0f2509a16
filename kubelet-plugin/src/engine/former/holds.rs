//! What the former driver's claims hold of the GPUs that are there, in the words of kerf's own records. Pure.

use std::sync::Arc;

use kerf_mig::{Geometry, Placement};
use kerf_nvml::{GpuInstance, PciAddress};
use serde_json::Map;

use super::super::epoch::Epoch;
use super::super::record::{AllocationResult, PartitionRecord, PartitionState, Phase, Record};
use super::super::{Claim, DeviceName};
use super::checkpoint::{Cut, Held, HeldDevice, What, Which};

/// A GPU that answers.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) address: PciAddress,
    pub(super) uuid: String,
    pub(super) minor: u32,
    /// What can be cut, and what lives; `None` where it does not tell.
    pub(super) mig: Option<(Arc<Geometry>, Vec<GpuInstance>)>,
}

/// The record that stands for a claim, and a GPU that it has and that is none of `seen`: of that one nothing is held.
pub(super) fn record<'a>(held: &'a Held, seen: &[Seen], epoch: &Epoch) -> (Record, Option<&'a Which>) {
    let claim = Claim {
        uid: held.uid.clone(),
        namespace: held.namespace.clone(),
        name: held.name.clone(),
        pod_claim_name: None,
        devices: Vec::new(),
    };
    let mut record = Record::new(&claim, epoch.clone());
    record.former = true;
    record.phase = if held.complete { Phase::Prepared } else { Phase::Preparing };
    let mut missing = None;
    for HeldDevice { request, what } in &held.devices {
        let (What::Gpu(which) | What::Instance { gpu: which, .. }) = what;
        let Some(gpu) = seen.iter().find(|gpu| which.is(gpu)) else {
            missing = Some(which);
            continue;
        };
        let partition = match what {
            What::Gpu(_) => None,
            What::Instance { id, cut, .. } => gpu.partition(*id, *cut),
        };
        let device = match &partition {
            Some(partition) => partition.device.clone(),
            // Whatever it is, it is somewhere on the GPU.
            None => DeviceName::whole(gpu.address),
        };
        record.results.push(AllocationResult {
            request: request.clone(),
            pool: String::new(),
            device,
            share_id: None,
            admin_access: false,
            extra: Map::new(),
        });
        record.partitions.extend(partition);
    }
    (record, missing)
}

impl Which {
    fn is(&self, gpu: &Seen) -> bool {
        match self {
            Which::Uuid(uuid) => *uuid == gpu.uuid,
            Which::Minor(minor) => *minor == gpu.minor,
        }
    }
}

impl Seen {
    /// A partition by the id of its live instance, else by its name; `None` where neither tells.
    fn partition(&self, id: Option<u32>, cut: Option<Cut>) -> Option<PartitionRecord> {
        let (geometry, live) = self.mig.as_ref()?;
        // The id is believed rather than the name: that protects an instance too many, and never one too few.
        let live = id.and_then(|id| live.iter().find(|live| live.id == id));
        let (profile_id, placement) = match (live, cut) {
            (Some(GpuInstance { profile_id, placement, .. }), _) => (*profile_id, *placement),
            (None, Some(Cut { profile_id, start })) => (profile_id, geometry.offer_by_id(profile_id, start)?.placement),
            (None, None) => return None,
        };
        let Placement { start, .. } = placement;
        let profile = geometry.offer_by_id(profile_id, start)?.profile;
        let mut partition =
            PartitionRecord::planned(DeviceName::partition(self.address, profile, placement), profile_id, placement);
        if let Some(live) = live {
            partition.state = PartitionState::Carved;
            partition.gpu_instance = Some(live.id);
        }
        Some(partition)
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use kerf_mig::{Engines, Profile};

    use super::*;

    fn gpu(instances: &[GpuInstance]) -> Seen {
        let profile = Profile {
            id: 19,
            name: "1g.10gb".into(),
            compute_slices: 1,
            memory_mib: 9984,
            engines: Engines::default(),
            max_instances: 7,
            placements: (0..7).map(|start| Placement { start, size: 1 }).collect(),
        };
        Seen {
            address: "0000:3b:00.0".parse().unwrap(),
            uuid: "GPU-1".into(),
            minor: 0,
            mig: Some((Arc::new(Geometry::new(vec![profile])), instances.to_vec())),
        }
    }

    fn of(devices: &[What], seen: &[Seen]) -> (Record, Option<Which>) {
        let devices = devices.iter().map(|what| HeldDevice { request: "r".into(), what: what.clone() });
        let devices = devices.collect();
        let held = Held { uid: "u".into(), namespace: String::new(), name: String::new(), complete: true, devices };
        let epoch = Epoch { boot_id: "boot".into(), driver_load: None };
        let (record, missing) = record(&held, seen, &epoch);
        (record, missing.cloned())
    }

    fn whole(uuid: &str) -> What {
        What::Gpu(Which::Uuid(uuid.into()))
    }

    fn instance(id: Option<u32>, cut: Option<Cut>) -> What {
        What::Instance { gpu: Which::Uuid("GPU-1".into()), id, cut }
    }

    #[test]
    fn devices_get_their_names() {
        let live = GpuInstance { id: 9, profile_id: 19, placement: Placement { start: 3, size: 1 } };
        let (there, elsewhere) = (Cut { profile_id: 19, start: 3 }, Cut { profile_id: 19, start: 5 });
        let stranger = Cut { profile_id: 99, start: 0 };
        for (what, device, state) in [
            (whole("GPU-1"), "gpu-3b-00-0", None),
            (What::Gpu(Which::Minor(0)), "gpu-3b-00-0", None),
            (instance(Some(9), Some(there)), "gpu-3b-00-0-mig-1g10gb-3", Some(PartitionState::Carved)),
            (instance(Some(9), None), "gpu-3b-00-0-mig-1g10gb-3", Some(PartitionState::Carved)),
            (instance(Some(9), Some(elsewhere)), "gpu-3b-00-0-mig-1g10gb-3", Some(PartitionState::Carved)),
            (instance(Some(4), Some(there)), "gpu-3b-00-0-mig-1g10gb-3", Some(PartitionState::Planned)),
            (instance(None, Some(elsewhere)), "gpu-3b-00-0-mig-1g10gb-5", Some(PartitionState::Planned)),
            (instance(Some(4), Some(stranger)), "gpu-3b-00-0", None),
            (instance(Some(4), None), "gpu-3b-00-0", None),
        ] {
            let (record, _) = of(slice::from_ref(&what), &[gpu(&[live])]);
            assert_eq!(record.results[0].device.to_string(), device, "{what:?}");
            assert_eq!(record.partitions.first().map(|partition| partition.state), state, "{what:?}");
        }
        let silent = Seen { mig: None, ..gpu(&[]) };
        let (record, _) = of(&[instance(Some(9), Some(there))], &[silent]);
        assert_eq!(record.results[0].device.to_string(), "gpu-3b-00-0");
    }

    /// What is there is held, whatever else the claim has.
    #[test]
    fn a_gpu_that_is_not_there_is_said() {
        for devices in [[whole("GPU-2"), whole("GPU-1")], [What::Gpu(Which::Minor(0)), whole("GPU-2")]] {
            let (record, missing) = of(&devices, &[gpu(&[])]);
            assert_eq!(missing, Some(Which::Uuid("GPU-2".into())));
            let held: Vec<_> = record.results.iter().map(|result| result.device.to_string()).collect();
            assert_eq!(held, ["gpu-3b-00-0"]);
        }
        assert_eq!(of(&[What::Gpu(Which::Minor(1))], &[gpu(&[])]).1, Some(Which::Minor(1)));
    }
}
