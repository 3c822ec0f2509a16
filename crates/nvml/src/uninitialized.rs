//! NVML where it cannot be loaded or does not start.

use kerf_mig::{Placement, Profile};

use crate::{
    Code, ComputeInstance, CudaVersion, Error, Gpu, GpuFacts, GpuInstance, MigMode, MigModes, Nvml, PciAddress, Process,
};

/// Answers every call as NVML does before it is initialised: [`Code::Uninitialized`]. For who has to go on without a driver.
#[derive(Clone, Copy, Debug, Default)]
pub struct Uninitialized;

fn fail<T>(call: &'static str) -> Result<T, Error> {
    Err(Error { call, code: Code::Uninitialized })
}

impl Nvml for Uninitialized {
    fn driver_version(&self) -> Result<String, Error> {
        fail("nvmlSystemGetDriverVersion")
    }

    fn cuda_driver_version(&self) -> Result<CudaVersion, Error> {
        fail("nvmlSystemGetCudaDriverVersion_v2")
    }

    fn gpu_count(&self) -> Result<u32, Error> {
        fail("nvmlDeviceGetCount_v2")
    }

    fn gpu(&self, _index: u32) -> Result<Gpu, Error> {
        fail("nvmlDeviceGetHandleByIndex_v2")
    }

    fn gpu_at(&self, _address: PciAddress) -> Result<Gpu, Error> {
        fail("nvmlDeviceGetHandleByPciBusId_v2")
    }

    fn pci_address(&self, _gpu: Gpu) -> Result<PciAddress, Error> {
        fail("nvmlDeviceGetPciInfo_v3")
    }

    fn facts(&self, _gpu: Gpu) -> Result<GpuFacts, Error> {
        fail("nvmlDeviceGetUUID")
    }

    fn mig_modes(&self, _gpu: Gpu) -> Result<Option<MigModes>, Error> {
        fail("nvmlDeviceGetMigMode")
    }

    fn set_mig_mode(&self, _gpu: Gpu, _mode: MigMode) -> Result<(), Error> {
        fail("nvmlDeviceSetMigMode")
    }

    fn gpu_instance_profiles(&self, _gpu: Gpu) -> Result<Vec<Profile>, Error> {
        fail("nvmlDeviceGetGpuInstanceProfileInfo")
    }

    fn gpu_instances(&self, _gpu: Gpu) -> Result<Vec<GpuInstance>, Error> {
        fail("nvmlDeviceGetGpuInstances")
    }

    fn create_gpu_instance(&self, _gpu: Gpu, _profile_id: u32, _placement: Placement) -> Result<GpuInstance, Error> {
        fail("nvmlDeviceCreateGpuInstanceWithPlacement")
    }

    fn destroy_gpu_instance(&self, _gpu: Gpu, _gpu_instance: u32) -> Result<(), Error> {
        fail("nvmlGpuInstanceDestroy")
    }

    fn compute_instances(&self, _gpu: Gpu, _gpu_instance: u32) -> Result<Vec<ComputeInstance>, Error> {
        fail("nvmlGpuInstanceGetComputeInstances")
    }

    fn create_compute_instance(
        &self,
        _gpu: Gpu,
        _gpu_instance: u32,
        _compute_slices: u32,
    ) -> Result<ComputeInstance, Error> {
        fail("nvmlGpuInstanceCreateComputeInstance")
    }

    fn destroy_compute_instance(&self, _gpu: Gpu, _gpu_instance: u32, _compute_instance: u32) -> Result<(), Error> {
        fail("nvmlComputeInstanceDestroy")
    }

    fn processes(&self, _gpu: Gpu) -> Result<Vec<Process>, Error> {
        fail("nvmlDeviceGetComputeRunningProcesses")
    }
}
