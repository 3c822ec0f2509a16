//! What a claim's CDI file tells when its journal cannot: the second witness.
//!
//! The file names the claim's devices and, by their capability nodes, the very GPU instances. So a damaged journal file
//! neither frees a device that containers use nor leaves an instance behind.

use std::collections::BTreeSet;

use kerf_cdi::{Device, Spec};
use kerf_mig::Offer;
use kerf_nvml::{Code, Error};
use serde_json::Map;

use super::cdi_edits::{self, Kept};
use super::driver_files::DriverFiles;
use super::gpu::LiveGpu;
use super::record::{AllocationResult, PartitionRecord, PartitionState, Record};
use super::{Claim, DeviceName, Engine, GpuError, JournalError, capabilities};

/// What a CDI file tells.
pub(super) struct Recovered {
    pub(super) record: Record,
    /// See [`Engine::complete`].
    pub(super) missing: Option<GpuError>,
}

impl Engine {
    /// The record of every claim: of those whose journal is lost, what their CDI file tells.
    pub(super) fn records(&self) -> Result<Vec<Record>, JournalError> {
        Ok(self.with_lost(self.journal.load_all()?))
    }

    /// The records of the journal, and those that stand for what is lost of it.
    pub(super) fn with_lost(&self, mut records: Vec<Record>) -> Vec<Record> {
        // What is not known of a partition is held with all of its GPU.
        records.iter_mut().for_each(|record| _ = self.complete(record));
        let known: BTreeSet<_> = records.iter().map(|record| record.claim.uid.clone()).collect();
        let specs = self.specs.list().unwrap_or_else(|error| {
            tracing::warn!(%error, "journals that were set aside cannot be made up for");
            Vec::new()
        });
        let recovered = specs.iter().filter(|uid| !known.contains(*uid)).filter_map(|uid| self.recover(uid));
        records.extend(recovered.map(|recovered| recovered.record));
        // What cannot be told is asked for where it matters: see `Engine::former_records`.
        let former = self.former_records().unwrap_or_default().into_iter();
        let is_new = |record: &Record| !records.iter().any(|known| known.claim.uid == record.claim.uid);
        let former: Vec<_> = former.filter(is_new).collect();
        records.extend(former);
        records
    }

    /// A claim's record from its CDI file alone; `None` without one.
    pub(super) fn recover(&self, uid: &str) -> Option<Recovered> {
        let spec = self.spec(uid)?;
        let claim = Claim {
            uid: uid.to_owned(),
            namespace: String::new(),
            name: String::new(),
            pod_claim_name: None,
            devices: Vec::new(),
        };
        let mut record = Record::new(&claim, self.epoch());
        record.results = spec
            .devices
            .iter()
            .filter_map(|device| {
                Some(AllocationResult {
                    request: String::new(),
                    pool: String::new(),
                    device: name_of(uid, device)?,
                    share_id: None,
                    admin_access: cdi_edits::is_admin_access(device),
                    extra: Map::new(),
                })
            })
            .collect();
        let missing = self.complete_from(&mut record, Some(&spec));
        Some(Recovered { record, missing })
    }

    /// Finds out what is behind the partitions of which a record has nothing but the name. Returns why that cannot be told
    /// of one, whose GPU does not answer: without it the claim can be neither repaired nor released.
    pub(super) fn complete(&self, record: &mut Record) -> Option<GpuError> {
        record.unplaced().next()?;
        let spec = self.spec(&record.claim.uid);
        self.complete_from(record, spec.as_ref())
    }

    fn complete_from(&self, record: &mut Record, spec: Option<&Spec>) -> Option<GpuError> {
        let (mut found, mut missing) = (Vec::new(), None);
        for name in record.unplaced() {
            let devices = spec.iter().flat_map(|spec| &spec.devices);
            let device = devices.into_iter().find(|device| name_of(&record.claim.uid, device).as_ref() == Some(name));
            match self.recover_partition(name, device) {
                Ok(partition) => found.extend(partition),
                Err(error) => missing = Some(error),
            }
        }
        record.partitions.extend(found);
        // Of another epoch nothing is left, whatever it was.
        missing.filter(|_| self.epoch().may_be(&record.epoch()))
    }

    fn spec(&self, uid: &str) -> Option<Spec> {
        self.specs.read(uid).unwrap_or_else(|error| {
            tracing::warn!(%error, "the CDI file tells nothing");
            None
        })
    }

    /// `None` where nothing of the partition can be live: its GPU is gone, or has no such partition. Without its `device` in a
    /// CDI file it is what lies in its place.
    fn recover_partition(
        &self,
        name: &DeviceName,
        device: Option<&Device>,
    ) -> Result<Option<PartitionRecord>, GpuError> {
        let Some(partition) = name.as_partition() else { return Ok(None) };
        let Some(gpu) = self.find_gpu_if_present(name.gpu())? else { return Ok(None) };
        let geometry = self.geometry(&gpu)?;
        let nodes = device.map(capability_minors).unwrap_or_default();
        let files = DriverFiles::new(&self.driver_root);
        let gpu_instance = files.gpu_instance_of_nodes(gpu.minor, &nodes);
        let Some(offer) = geometry.offer_by_label(&partition.label, partition.start) else {
            let Some(id) = gpu_instance else { return Ok(None) };
            // An instance without a profile: the profiles were not all read.
            let code = match self.nvml.compute_instances(gpu.handle, id) {
                Err(error) if error.is_gone() => return Ok(None),
                Err(error) => error.code,
                Ok(_) => Code::NotFound,
            };
            self.gpus.forget(&BTreeSet::from([gpu.address]));
            let call = "nvmlDeviceGetGpuInstanceProfileInfo";
            return Err(gpu.failed("find the profile of a live GPU instance")(Error { call, code }));
        };
        let mut record = PartitionRecord::planned(name.clone(), offer.profile.id, offer.placement);
        match (device, gpu_instance) {
            (None, _) => record.state = PartitionState::Carving,
            (Some(device), Some(_)) => {
                record.state = PartitionState::Carved;
                record.gpu_instance = gpu_instance;
                let kept = Kept::of(device);
                record.kept = kept.is_some();
                record.kept_compute = kept == Some(Kept::Both);
            }
            (Some(_), None) if !nodes.is_empty() => self.is_empty_place(&gpu, name, offer)?,
            (Some(_), None) => {}
        }
        Ok(Some(record))
    }

    /// That nothing lies where a partition was, of which the kernel does not tell any more which instance it was.
    fn is_empty_place(&self, gpu: &LiveGpu, device: &DeviceName, offer: Offer<'_>) -> Result<(), GpuError> {
        let is_it =
            |live: &&kerf_nvml::GpuInstance| (live.profile_id, live.placement) == (offer.profile.id, offer.placement);
        match self.live_instances(gpu)?.iter().find(is_it) {
            None => Ok(()),
            Some(live) => Err(GpuError::Unidentified {
                gpu: gpu.address,
                device: device.clone(),
                instance: live.id,
                proc: self.driver_root.proc(),
            }),
        }
    }
}

/// The name of a device in a claim's CDI document, if it is one of ours.
fn name_of(uid: &str, device: &Device) -> Option<DeviceName> {
    device.name.strip_prefix(uid)?.strip_prefix('-')?.parse().ok()
}

/// The minor numbers of a device's capability nodes.
fn capability_minors(device: &Device) -> Vec<u32> {
    let minor = |path: &str| path.strip_prefix("/dev/")?.strip_prefix(capabilities::NODE_PREFIX)?.parse().ok();
    device.container_edits.device_nodes.iter().filter_map(|node| minor(&node.path)).collect()
}
