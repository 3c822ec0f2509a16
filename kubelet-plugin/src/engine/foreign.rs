//! Instances that no record explains: made by a person, by another program, or by kerf before its records were lost.

use std::time::Instant;

use kerf_nvml::{GpuInstance, PciAddress};

use super::errors::ReleaseError;
use super::gpu::LiveGpu;
use super::locks::BACKGROUND_PATIENCE;
use super::record::{PartitionState, Phase, Record};
use super::{DeviceName, Engine, GpuError, Ledger, PrepareError, busy, spans};

/// What to do about GPU instances that no claim explains. One with processes is never destroyed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ForeignPolicy {
    /// They stay. A claim for exactly such an instance uses it; what overlaps it is not given out.
    #[default]
    Keep,
    /// They are taken for kerf's own: destroyed when a claim needs their place and nothing uses them.
    Adopt,
    /// As adopt; and those that nothing uses are destroyed when the plugin starts, and once a minute.
    Delete,
}

/// An instance that no claim explained, and that was destroyed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemovedForeign {
    /// The GPU it was on.
    pub gpu: PciAddress,
    /// What it was.
    pub instance: GpuInstance,
}

impl Engine {
    /// Makes a live foreign instance that is exactly partition `index` the claim's, if the policy and its state allow it.
    pub(super) fn take_foreign(
        &self,
        gpu: &LiveGpu,
        ledger: &mut Ledger<'_>,
        index: usize,
        stranger: &GpuInstance,
    ) -> Result<bool, PrepareError> {
        let fits = ledger.record.partitions[index].describes(stranger);
        if !fits || self.is_used(gpu, stranger.id)? || self.complete_records().is_none() {
            return Ok(false);
        }
        let compute =
            self.nvml.compute_instances(gpu.handle, stranger.id).map_err(gpu.failed("list the compute instances"))?;
        // What is kept is used as whoever made it has cut it. What becomes kerf's own is carved anew, unless it is bare: a
        // compute instance may span less than the device that the claim was promised.
        let is_kept = self.wishes.foreign_for_sure(gpu.address) == ForeignPolicy::Keep;
        if compute.len() > usize::from(is_kept) {
            return Ok(false);
        }
        let partition = &mut ledger.record.partitions[index];
        partition.forget();
        partition.state = PartitionState::Carved;
        partition.gpu_instance = Some(stranger.id);
        partition.kept = is_kept;
        partition.kept_compute = is_kept && !compute.is_empty();
        tracing::info!(gpu_instance = stranger.id, is_kept, "foreign instance taken");
        let device = partition.device.clone();
        ledger.record.phase = Phase::Preparing;
        ledger.save()?;
        ledger.begun.push(device);
        Ok(true)
    }

    /// Destroys foreign instances that are in the way of a device, if the policy and their state allow it.
    pub(super) fn clear_foreign(
        &self,
        gpu: &LiveGpu,
        device: &DeviceName,
        strangers: &[GpuInstance],
    ) -> Result<(), PrepareError> {
        let policy = self.wishes.foreign_for_sure(gpu.address);
        for stranger in strangers {
            let foreign = |users| PrepareError::foreign(device, stranger, users);
            if self.is_used(gpu, stranger.id)? {
                return Err(foreign(Some(busy::users(&*self.nvml, gpu.handle, Some(stranger.id)))));
            }
            if policy == ForeignPolicy::Keep || self.complete_records().is_none() {
                return Err(foreign(None));
            }
            tracing::info!(gpu_instance = stranger.id, "foreign instance in the way destroyed");
            self.destroy(gpu, device, stranger.id).map_err(|error| match error {
                ReleaseError::Busy { users, .. } => foreign(Some(users)),
                ReleaseError::Gpu(error) => error.into(),
                ReleaseError::Journal(error) => error.into(),
            })?;
        }
        Ok(())
    }

    /// Under [`ForeignPolicy::Delete`], destroys every foreign instance that nothing uses. What is locked, fails or is in use
    /// is left to the next time.
    pub fn sweep_foreign(&self) -> Vec<RemovedForeign> {
        let count = self.nvml.gpu_count().unwrap_or_else(|error| {
            tracing::warn!(%error, "foreign instances are not looked for");
            0
        });
        let addresses = (0..count).filter_map(|index| self.nvml.pci_address(self.nvml.gpu(index).ok()?).ok());
        let swept = addresses.filter(|address| self.wishes.foreign_for_sure(*address) == ForeignPolicy::Delete);
        swept.flat_map(|address| self.sweep_gpu(address)).collect()
    }

    fn sweep_gpu(&self, address: PciAddress) -> Vec<RemovedForeign> {
        let _span = spans::gpu_span(address).entered();
        let holder = "the removal of foreign instances";
        let Ok(_gpu) = self.lock_gpus(&[address].into(), holder, Instant::now() + BACKGROUND_PATIENCE) else {
            return Vec::new();
        };
        let strangers = self.find_gpu(address).and_then(|gpu| Ok((gpu, self.strangers(&gpu)?)));
        let (gpu, strangers) = match strangers {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(%error, "foreign instances stay");
                return Vec::new();
            }
        };
        let mut removed = Vec::new();
        for instance in strangers {
            match self.destroy(&gpu, &DeviceName::whole(address), instance.id) {
                Ok(()) => removed.push(RemovedForeign { gpu: address, instance }),
                Err(error) => tracing::info!(%error, "a foreign instance stays"),
            }
        }
        removed
    }

    /// The instances on a locked GPU that no record explains and no process uses. None where that cannot be said for sure.
    fn strangers(&self, gpu: &LiveGpu) -> Result<Vec<GpuInstance>, GpuError> {
        let live = self.live_instances(gpu)?;
        if live.is_empty() {
            return Ok(live);
        }
        // After the listing: who has made one of these had it in his journal before.
        let Some(records) = self.complete_records() else { return Ok(Vec::new()) };
        let geometry = self.geometry(gpu)?;
        let mut strangers = Vec::new();
        for live in live {
            let name = DeviceName::of_instance(gpu.address, geometry.profiles(), &live);
            let explains = |record: &Record| {
                record.held().any(|device| Some(device) == name.as_ref())
                    || record.partitions.iter().any(|one| one.device.gpu() == gpu.address && one.explains(&live))
            };
            if !records.iter().any(explains) && !self.is_used(gpu, live.id)? {
                strangers.push(live);
            }
        }
        Ok(strangers)
    }

    /// The record of every claim in the present epoch; `None` where one may be missing, so that no instance can be called
    /// foreign for sure.
    pub(super) fn complete_records(&self) -> Option<Vec<Record>> {
        self.former_records().inspect_err(|error| tracing::warn!(%error, "foreign instances are left alone")).ok()?;
        let mut records = self.records().ok()?;
        self.specs.list().ok()?;
        // Files that were cut off when they were first written are none of these: nothing was on a GPU by then.
        let is_lost = |uid: &String| self.journal.is_damaged(uid) || self.specs.read(uid).is_err();
        let mut lost = self.journal.unusable().ok()?;
        lost.extend(self.leftovers(&records).ok()?.into_iter().filter(is_lost));
        lost.retain(|uid| !records.iter().any(|record| record.claim.uid == *uid));
        if !lost.is_empty() {
            tracing::warn!(claims = ?lost, "foreign instances are left alone: nobody knows whether they are of these claims");
            return None;
        }
        let epoch = self.epoch();
        records.iter_mut().for_each(|record| record.adapt_to(&epoch));
        Some(records)
    }
}
