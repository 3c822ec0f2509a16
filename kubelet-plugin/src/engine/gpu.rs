//! A GPU as it is at the moment of a call.

use kerf_nvml::{Code, Error, Gpu, GpuInstance, PciAddress};

use super::{Engine, GpuError};

/// A GPU that NVML gave out. Not kept across calls: a driver reload changes handle and minor number.
#[derive(Clone, Debug)]
pub(super) struct LiveGpu {
    pub(super) address: PciAddress,
    pub(super) handle: Gpu,
    /// The N of `/dev/nvidiaN`.
    pub(super) minor: u32,
    /// Whether MIG mode changes without a reset.
    pub(super) switchable: bool,
}

impl LiveGpu {
    /// Says what was tried when a call failed.
    pub(super) fn failed(&self, doing: &'static str) -> impl FnOnce(Error) -> GpuError {
        let gpu = self.address;
        move |error| GpuError::Nvml { gpu, doing, error }
    }
}

impl Engine {
    /// Finds a GPU by its address.
    pub(super) fn find_gpu(&self, address: PciAddress) -> Result<LiveGpu, GpuError> {
        let unreachable = |error| GpuError::Unreachable { gpu: address, error };
        let handle = self.nvml.gpu_at(address).map_err(unreachable)?;
        let facts = self.nvml.facts(handle).map_err(unreachable)?;
        Ok(LiveGpu { address, handle, minor: facts.minor, switchable: facts.mig_mode_switchable })
    }

    /// As [`Engine::find_gpu`], where a GPU that is not there any more is no error: what was on it is gone with it.
    ///
    /// A GPU that fell off the bus comes back only through a reset, which no instance survives (NVIDIA MIG user guide).
    pub(super) fn find_gpu_if_present(&self, address: PciAddress) -> Result<Option<LiveGpu>, GpuError> {
        match self.find_gpu(address) {
            Ok(gpu) => Ok(Some(gpu)),
            Err(GpuError::Unreachable { error: Error { code: Code::NotFound | Code::GpuIsLost, .. }, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Every live GPU instance; none where MIG is off.
    pub(super) fn live_instances(&self, gpu: &LiveGpu) -> Result<Vec<GpuInstance>, GpuError> {
        match self.nvml.gpu_instances(gpu.handle) {
            Err(Error { code: Code::NotSupported, .. }) => Ok(Vec::new()),
            instances => instances.map_err(gpu.failed("list the GPU instances")),
        }
    }
}
