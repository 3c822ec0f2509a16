//! One partition: a GPU instance at its place with one compute instance over all of it, made or removed.

use kerf_mig::Placement;
use kerf_nvml::{Code, ComputeInstance, Error, GpuInstance};

use super::errors::ReleaseError;
use super::gpu::LiveGpu;
use super::record::{PartitionRecord, PartitionState, Phase};
use super::{DeviceName, Engine, GpuError, Ledger, PrepareError, Step, busy, spans};

/// A partition that is in place.
#[derive(Clone, Debug)]
pub(super) struct Carved {
    pub(super) gpu_instance: u32,
    pub(super) compute_instance: u32,
    /// UUID of the MIG device.
    pub(super) uuid: String,
}

impl PrepareError {
    /// `users`: the processes that use it, where it is in use.
    pub(super) fn foreign(device: &DeviceName, stranger: &GpuInstance, users: Option<String>) -> PrepareError {
        let Placement { start, size } = stranger.placement;
        let last = start + size.saturating_sub(1);
        let (device, instance) = (device.clone(), stranger.id);
        match users {
            None => PrepareError::Foreign { device, instance, first: start, last },
            Some(users) => PrepareError::ForeignInUse { device, instance, first: start, last, users },
        }
    }
}

impl Engine {
    /// Sees to it that partition `index` of the record is on the GPU, which is in MIG mode and locked.
    pub(super) fn carve(
        &self,
        gpu: &LiveGpu,
        ledger: &mut Ledger<'_>,
        index: usize,
        compute_slices: u32,
    ) -> Result<Carved, PrepareError> {
        let gpu_instance = match self.own_instance(gpu, ledger, index)? {
            Some(gpu_instance) => gpu_instance,
            None => self.create_gpu_instance(gpu, ledger, index)?,
        };
        let compute = self.ensure_compute_instance(gpu, ledger, index, gpu_instance, compute_slices)?;
        Ok(Carved { gpu_instance, compute_instance: compute.id, uuid: compute.uuid })
    }

    /// The live instance that the journal explains as this partition, or a foreign one that the policy lets it take. Anything
    /// else in its place is cleared away, or refused.
    fn own_instance(&self, gpu: &LiveGpu, ledger: &mut Ledger<'_>, index: usize) -> Result<Option<u32>, PrepareError> {
        let partition = &mut ledger.record.partitions[index];
        let live = self.live_instances(gpu)?;
        self.check_listed(gpu, partition, &live)?;
        let mut in_place = live;
        in_place.retain(|live| live.placement.overlaps(partition.placement()));
        match &in_place[..] {
            [] => Ok(None),
            [own] if partition.explains(own) => {
                // One that was cut off before its id was known has never been given to anyone.
                if partition.state == PartitionState::Carving && self.is_used(gpu, own.id)? {
                    let users = busy::users(&*self.nvml, gpu.handle, Some(own.id));
                    return Err(PrepareError::foreign(&partition.device, own, Some(users)));
                }
                partition.state = PartitionState::Carved;
                partition.gpu_instance = Some(own.id);
                Ok(Some(own.id))
            }
            [stranger] if self.take_foreign(gpu, ledger, index, stranger)? => Ok(Some(stranger.id)),
            strangers => {
                self.clear_foreign(gpu, &ledger.record.partitions[index].device, strangers)?;
                Ok(None)
            }
        }
    }

    fn create_gpu_instance(&self, gpu: &LiveGpu, ledger: &mut Ledger<'_>, index: usize) -> Result<u32, PrepareError> {
        ledger.record.phase = Phase::Preparing;
        let partition = &mut ledger.record.partitions[index];
        partition.forget();
        partition.state = PartitionState::Carving;
        let (profile_id, placement) = (partition.profile_id, partition.placement());
        let device = partition.device.clone();
        if let Err(error) = ledger.save() {
            // Then nothing was begun.
            ledger.record.partitions[index].forget();
            return Err(error.into());
        }
        ledger.begun.push(device);
        let created = self
            .step(Step::CreateGpuInstance, || self.nvml.create_gpu_instance(gpu.handle, profile_id, placement))
            .map_err(gpu.failed("create the GPU instance"))?;
        let partition = &mut ledger.record.partitions[index];
        partition.state = PartitionState::Carved;
        partition.gpu_instance = Some(created.id);
        ledger.save()?;
        Ok(created.id)
    }

    /// The one compute instance of the claim's own GPU instance.
    fn ensure_compute_instance(
        &self,
        gpu: &LiveGpu,
        ledger: &mut Ledger<'_>,
        index: usize,
        gpu_instance: u32,
        compute_slices: u32,
    ) -> Result<ComputeInstance, PrepareError> {
        let live =
            self.nvml.compute_instances(gpu.handle, gpu_instance).map_err(gpu.failed("list the compute instances"))?;
        let partition = &mut ledger.record.partitions[index];
        let (compute, new) = match live[..] {
            [] => {
                ledger.record.phase = Phase::Preparing;
                ledger.save()?;
                let create = || self.nvml.create_compute_instance(gpu.handle, gpu_instance, compute_slices);
                let created = self
                    .step(Step::CreateComputeInstance, create)
                    .map_err(gpu.failed("create the compute instance"))?;
                (created, true)
            }
            // Its id need not be the journal's: a crash between creation and journal leaves none there.
            [ref only] => (only.clone(), false),
            _ => return Err(PrepareError::ForeignCompute { device: partition.device.clone(), instance: gpu_instance }),
        };
        let partition = &mut ledger.record.partitions[index];
        partition.kept_compute &= !new;
        partition.compute_instance = Some(compute.id);
        partition.uuid = Some(compute.uuid.clone());
        if new {
            ledger.save()?;
        }
        Ok(compute)
    }

    /// A live instance at exactly this place, looked at and not touched.
    pub(super) fn look(
        &self,
        gpu: &LiveGpu,
        device: &DeviceName,
        profile_id: u32,
        placement: Placement,
    ) -> Result<Carved, PrepareError> {
        let not_carved = || PrepareError::NotCarved { device: device.clone() };
        let wanted = |live: &&GpuInstance| live.profile_id == profile_id && live.placement == placement;
        let instance = self.live_instances(gpu)?.iter().find(wanted).copied().ok_or_else(not_carved)?;
        let compute =
            self.nvml.compute_instances(gpu.handle, instance.id).map_err(gpu.failed("list the compute instances"))?;
        let compute = compute.into_iter().next().ok_or_else(not_carved)?;
        Ok(Carved { gpu_instance: instance.id, compute_instance: compute.id, uuid: compute.uuid })
    }

    /// Removes what is on the GPU of partition `index`, and journals it if the disk allows: the GPU is listed again before
    /// anything else is done. The GPU is locked. What is gone already is fine.
    pub(super) fn release_partition(&self, ledger: &mut Ledger<'_>, index: usize) -> Result<(), ReleaseError> {
        let partition = &ledger.record.partitions[index];
        if !partition.may_be_on_gpu() {
            return Ok(());
        }
        let _span = spans::device_span(&partition.device).entered();
        if let Some(gpu) = self.find_gpu_if_present(partition.device.gpu())? {
            let live = self.live_instances(&gpu)?;
            self.check_listed(&gpu, partition, &live)?;
            if let Some(own) = live.iter().find(|live| partition.explains(live)) {
                let strange = partition.state == PartitionState::Carving && self.is_used(&gpu, own.id)?;
                if partition.kept {
                    self.leave_kept(&gpu, partition, own.id)?;
                } else if !strange {
                    self.destroy(&gpu, &partition.device, own.id)?;
                }
            }
        }
        ledger.record.partitions[index].forget();
        ledger.save_if_possible();
        Ok(())
    }

    /// That the partition's instance is not there if it is not listed: then it is not found by its id either. Listing takes
    /// a call for each profile, and passes over what NVML does not support or does not find. An instance that it has missed
    /// must not be made again, nor forgotten.
    fn check_listed(&self, gpu: &LiveGpu, partition: &PartitionRecord, live: &[GpuInstance]) -> Result<(), GpuError> {
        let Some(id) = partition.gpu_instance.filter(|id| live.iter().all(|live| live.id != *id)) else {
            return Ok(());
        };
        let code = match self.nvml.compute_instances(gpu.handle, id) {
            Err(error) if error.is_gone() => return Ok(()),
            Err(Error { code, .. }) => code,
            Ok(_) => Code::Unknown,
        };
        Err(gpu.failed("list all GPU instances")(Error { call: "nvmlDeviceGetGpuInstances", code }))
    }

    /// Removes the claim's compute instance from a GPU instance that is not the claim's.
    fn leave_kept(&self, gpu: &LiveGpu, partition: &PartitionRecord, gpu_instance: u32) -> Result<(), ReleaseError> {
        if partition.kept_compute {
            return Ok(());
        }
        // A crash before its id was journalled leaves the one that was made where there was none.
        let is_ours = |id| partition.compute_instance.is_none_or(|ours| ours == id);
        self.destroy_compute_instances(gpu, &partition.device, gpu_instance, is_ours)
    }

    /// Destroys a GPU instance with its compute instances. `device` is what it is in the way of.
    pub(super) fn destroy(&self, gpu: &LiveGpu, device: &DeviceName, gpu_instance: u32) -> Result<(), ReleaseError> {
        self.destroy_compute_instances(gpu, device, gpu_instance, |_| true)?;
        match self.step(Step::DestroyGpuInstance, || self.nvml.destroy_gpu_instance(gpu.handle, gpu_instance)) {
            Ok(()) => Ok(()),
            Err(error) if error.is_gone() => {
                let is_there = self.live_instances(gpu)?.iter().any(|live| live.id == gpu_instance);
                if is_there { Err(gpu.failed("destroy the GPU instance")(error).into()) } else { Ok(()) }
            }
            Err(Error { code: Code::InUse, .. }) => {
                Err(self.busy(gpu, device, gpu_instance, format!("GPU instance {gpu_instance}")))
            }
            Err(error) => Err(gpu.failed("destroy the GPU instance")(error).into()),
        }
    }

    fn destroy_compute_instances(
        &self,
        gpu: &LiveGpu,
        device: &DeviceName,
        gpu_instance: u32,
        which: impl Fn(u32) -> bool,
    ) -> Result<(), ReleaseError> {
        let compute = match self.nvml.compute_instances(gpu.handle, gpu_instance) {
            Err(error) if error.is_gone() => Vec::new(),
            compute => compute.map_err(gpu.failed("list the compute instances"))?,
        };
        for ComputeInstance { id, .. } in compute.into_iter().filter(|compute| which(compute.id)) {
            let destroy = || self.nvml.destroy_compute_instance(gpu.handle, gpu_instance, id);
            match self.step(Step::DestroyComputeInstance, destroy) {
                Ok(()) => {}
                Err(error) if error.is_gone() => {}
                Err(Error { code: Code::InUse, .. }) => {
                    let instance = format!("compute instance {id} of GPU instance {gpu_instance}");
                    return Err(self.busy(gpu, device, gpu_instance, instance));
                }
                Err(error) => return Err(gpu.failed("destroy the compute instance")(error).into()),
            }
        }
        Ok(())
    }

    fn busy(&self, gpu: &LiveGpu, device: &DeviceName, gpu_instance: u32, instance: String) -> ReleaseError {
        let users = busy::users(&*self.nvml, gpu.handle, Some(gpu_instance));
        ReleaseError::Busy { device: device.clone(), instance, users }
    }

    /// Whether a process runs in a GPU instance.
    pub(super) fn is_used(&self, gpu: &LiveGpu, gpu_instance: u32) -> Result<bool, GpuError> {
        Ok(self.processes(gpu)?.iter().any(|process| process.gpu_instance == Some(gpu_instance)))
    }
}
