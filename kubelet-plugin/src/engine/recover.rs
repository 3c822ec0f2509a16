//! What a claim's CDI file tells when its journal cannot: the second witness.
//!
//! The file names the claim's devices and, by their capability nodes, the very GPU instances. So a damaged journal file
//! neither frees a device that containers use nor leaves an instance behind.

use std::collections::BTreeSet;

use kerf_cdi::Device;
use kerf_nvml::{Code, Error};
use serde_json::Map;

use super::cdi_edits::{self, Kept};
use super::driver_files::DriverFiles;
use super::record::{AllocationResult, PartitionRecord, PartitionState, Record};
use super::{Claim, DeviceName, Engine, GpuError, JournalError, capabilities};

/// What a CDI file tells.
pub(super) struct Recovered {
    pub(super) record: Record,
    /// Why a partition is not in it, whose GPU could not be asked. Without it the claim can be neither repaired nor released.
    pub(super) missing: Option<GpuError>,
}

impl Engine {
    /// The record of every claim: of those whose journal is lost, what their CDI file tells.
    pub(super) fn records(&self) -> Result<Vec<Record>, JournalError> {
        Ok(self.with_lost(self.journal.load_all()?))
    }

    /// The records of the journal, and those that stand for what is lost of it.
    pub(super) fn with_lost(&self, mut records: Vec<Record>) -> Vec<Record> {
        let known: BTreeSet<_> = records.iter().map(|record| record.claim.uid.clone()).collect();
        let specs = self.specs.list().unwrap_or_else(|error| {
            tracing::warn!(%error, "journals that were set aside cannot be made up for");
            Vec::new()
        });
        // What is not known of a partition is held with all of its GPU.
        let recovered = specs.iter().filter(|uid| !known.contains(*uid)).filter_map(|uid| self.recover(uid));
        records.extend(recovered.map(|recovered| recovered.record));
        records
    }

    /// A claim's record from its CDI file alone; `None` without one.
    pub(super) fn recover(&self, uid: &str) -> Option<Recovered> {
        let spec = match self.specs.read(uid) {
            Ok(spec) => spec?,
            Err(error) => {
                tracing::warn!(%error, "the CDI file tells nothing");
                return None;
            }
        };
        let claim = Claim { uid: uid.to_owned(), namespace: String::new(), name: String::new(), devices: Vec::new() };
        let (mut record, mut missing) = (Record::new(&claim, self.epoch()), None);
        let mig_minors = DriverFiles::new(&self.driver_root, &self.host_driver_root).mig_minors().unwrap_or_default();
        for device in &spec.devices {
            let name = device.name.strip_prefix(uid).and_then(|name| name.strip_prefix('-'));
            let Some(name) = name.and_then(|name| name.parse::<DeviceName>().ok()) else { continue };
            let admin_access = cdi_edits::is_admin_access(device);
            if !admin_access {
                match self.recover_partition(&name, device, &mig_minors) {
                    Ok(partition) => record.partitions.extend(partition),
                    Err(error) => missing = Some(error),
                }
            }
            record.results.push(AllocationResult {
                request: String::new(),
                pool: String::new(),
                device: name,
                share_id: None,
                admin_access,
                extra: Map::new(),
            });
        }
        Some(Recovered { record, missing })
    }

    /// `None` for a whole GPU, and where nothing of the partition can be live: its GPU is gone, or has no such partition.
    fn recover_partition(
        &self,
        name: &DeviceName,
        device: &Device,
        mig_minors: &str,
    ) -> Result<Option<PartitionRecord>, GpuError> {
        let Some(partition) = name.as_partition() else { return Ok(None) };
        let Some(gpu) = self.find_gpu_if_present(name.gpu())? else { return Ok(None) };
        let geometry = self.geometry(&gpu)?;
        let gpu_instance = device.container_edits.device_nodes.iter().find_map(|node| {
            let minor = node.path.strip_prefix("/dev/")?.strip_prefix(capabilities::NODE_PREFIX)?;
            capabilities::gpu_instance_of_minor(mig_minors, minor.parse().ok()?)
        });
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
        if gpu_instance.is_some() {
            record.state = PartitionState::Carved;
            record.gpu_instance = gpu_instance;
            let kept = Kept::of(device);
            record.kept = kept.is_some();
            record.kept_compute = kept == Some(Kept::Both);
        }
        Ok(Some(record))
    }
}
