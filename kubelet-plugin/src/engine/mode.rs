//! MIG mode: on while instances live, off otherwise or as it is wanted of the GPU, switched only where that needs no reset.
//!
//! The mode is not journalled: it follows from what is on the GPU, and whoever holds the GPU's lock brings it to what he
//! needs. It is always read back, as drivers were seen to accept a switch and not make it.

use std::collections::BTreeSet;
use std::time::Instant;

use kerf_nvml::{Code, Error, MigMode, MigModes, PciAddress};

use super::gpu::LiveGpu;
use super::locks::BACKGROUND_PATIENCE;
use super::record::Record;
use super::{DeviceName, Engine, GpuError, PrepareError, Step, busy, spans};

impl Engine {
    /// Sees to it that MIG is on. Returns the GPU as it is then: its handle and minor number may have changed.
    pub(super) fn mig_on(&self, gpu: LiveGpu, device: &DeviceName) -> Result<LiveGpu, PrepareError> {
        match self.mig_modes(&gpu)? {
            None => Err(PrepareError::NoMig { device: device.clone() }),
            Some(MigModes { current: MigMode::Enabled, .. }) => Ok(gpu),
            Some(_) if gpu.switchable => self.switch(&gpu, MigMode::Enabled),
            Some(_) => Err(PrepareError::MigOff { device: device.clone() }),
        }
    }

    /// Sees to it that MIG is verifiably off: a GPU in MIG mode without instances is of no use to CUDA. Returns the GPU as
    /// [`Engine::mig_on`] does.
    pub(super) fn mig_off(&self, gpu: LiveGpu, device: &DeviceName) -> Result<LiveGpu, PrepareError> {
        match self.mig_modes(&gpu)? {
            None | Some(MigModes { current: MigMode::Disabled, .. }) => Ok(gpu),
            Some(_) => {
                if !gpu.switchable {
                    return Err(PrepareError::MigOn { device: device.clone() });
                }
                // Whatever lives is foreign: nobody else holds a part of the GPU, and the claim's own parts are gone.
                self.clear_foreign(&gpu, device, &self.live_instances(&gpu)?)?;
                self.switch(&gpu, MigMode::Disabled)
            }
        }
    }

    /// Switches MIG off again when nothing is left on the GPU, so that it is as it was found: users outside of
    /// Kubernetes expect it off. Or to what is wanted of the GPU while it is idle. That it fails is no error, the next claim
    /// for the whole GPU tries again.
    pub(super) fn settle_mode(&self, gpu: &LiveGpu) {
        let _span = spans::gpu_span(gpu.address).entered();
        let settle = || -> Result<(), PrepareError> {
            let wanted = self.wishes.mig_mode(gpu.address).unwrap_or(MigMode::Disabled);
            let differs = self.mig_modes(gpu)?.is_some_and(|modes| modes.current != wanted);
            if differs && gpu.switchable && self.live_instances(gpu)?.is_empty() {
                self.switch(gpu, wanted)?;
            }
            Ok(())
        };
        if let Err(error) = settle() {
            tracing::warn!(%error, "MIG mode stays as it is");
        }
    }

    /// Brings GPUs that nothing uses to the MIG mode that is wanted of them; true when one was switched. What is locked, used
    /// or fails is left to the next time.
    pub fn set_mig_modes(&self) -> bool {
        let wanted = self.wishes.mig_modes();
        let mut switched = false;
        for (address, mode) in wanted {
            let _span = spans::gpu_span(address).entered();
            match self.set_idle_mode(address, mode) {
                Ok(done) => switched |= done,
                Err(error) => tracing::warn!(%error, "MIG mode stays as it is"),
            }
        }
        switched
    }

    fn set_idle_mode(&self, address: PciAddress, mode: MigMode) -> Result<bool, PrepareError> {
        let differs = |gpu: &LiveGpu| -> Result<bool, GpuError> {
            Ok(gpu.switchable && self.mig_modes(gpu)?.is_some_and(|modes| modes.current != mode))
        };
        // Before it is asked anything: who waits for an answer that does not come has the lock, and is enough.
        let deadline = Instant::now() + BACKGROUND_PATIENCE;
        let Ok(_gpu) = self.lock_gpus(&[address].into(), "a change of MIG mode", deadline) else { return Ok(false) };
        let gpu = match self.find_gpu_if_present(address)? {
            Some(gpu) if differs(&gpu)? => gpu,
            _ => return Ok(false),
        };
        // Whoever has made an instance or taken the GPU had it in his journal before.
        let is_of = |record: &Record| record.held().any(|device| device.gpu() == address);
        let is_idle = self.complete_records().is_some_and(|records| !records.iter().any(is_of))
            && self.live_instances(&gpu)?.is_empty();
        if !is_idle {
            return Ok(false);
        }
        self.switch(&gpu, mode)?;
        tracing::info!(?mode, "MIG mode switched, as a GpuPolicy or layout wants it");
        Ok(true)
    }

    fn mig_modes(&self, gpu: &LiveGpu) -> Result<Option<MigModes>, GpuError> {
        self.nvml.mig_modes(gpu.handle).map_err(gpu.failed("read the MIG mode"))
    }

    fn switch(&self, gpu: &LiveGpu, mode: MigMode) -> Result<LiveGpu, PrepareError> {
        let switched = self.set_mode(gpu, mode);
        if switched.is_err() {
            self.put_pending_back(gpu.address);
        }
        match switched {
            Ok(()) => {}
            Err(Error { code: Code::InUse, .. }) => {
                let users = busy::users(&*self.nvml, gpu.handle, None);
                return Err(PrepareError::MigModeBusy { gpu: gpu.address, users });
            }
            Err(Error { code: Code::ResetRequired, .. }) => {
                return Err(PrepareError::MigModeNeedsReset { gpu: gpu.address });
            }
            Err(error) => return Err(gpu.failed("switch the MIG mode")(error).into()),
        }
        let gpu = self.find_gpu(gpu.address)?;
        match self.mig_modes(&gpu)? {
            Some(MigModes { current, .. }) if current == mode => Ok(gpu),
            _ => {
                self.put_pending_back(gpu.address);
                Err(PrepareError::MigModeStuck { gpu: gpu.address })
            }
        }
    }

    /// After a switch that did not come about: makes the mode after the next reset the present one again. Otherwise the GPU
    /// would be withheld until somebody resets it. What does not work is left to the inventory to report.
    fn put_pending_back(&self, address: PciAddress) {
        let Ok(gpu) = self.find_gpu(address) else { return };
        let Ok(Some(MigModes { current, pending })) = self.mig_modes(&gpu) else { return };
        if pending == current {
            return;
        }
        if let Err(error) = self.set_mode(&gpu, current) {
            tracing::warn!(%error, "the pending MIG mode stays");
        }
    }

    /// Asks for a mode. What was known of the GPU is forgotten: it may have been re-initialised.
    fn set_mode(&self, gpu: &LiveGpu, mode: MigMode) -> Result<(), Error> {
        let step = if mode == MigMode::Enabled { Step::EnableMig } else { Step::DisableMig };
        let set = self.step(step, || self.nvml.set_mig_mode(gpu.handle, mode));
        self.gpus.forget(&BTreeSet::from([gpu.address]));
        set
    }
}
