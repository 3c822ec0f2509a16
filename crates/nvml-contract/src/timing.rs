//! How long NVML's calls take here: what the simulator is calibrated with.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use kerf_mig::{Placement, Profile};
use kerf_nvml::{
    ComputeInstance, CudaVersion, Error, Gpu, GpuFacts, GpuInstance, MigMode, MigModes, Nvml, PciAddress, Process,
};

/// An [`Nvml`] that measures another one.
pub struct Timed<'a> {
    nvml: &'a dyn Nvml,
    times: Mutex<BTreeMap<Measured, Vec<Duration>>>,
}

/// What was measured: one call of kerf's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Measured {
    /// The NVML function that it is for.
    pub function: &'static str,
    /// What else is called for it, in words; empty where nothing is.
    pub with: &'static str,
    /// Whether it succeeded: refusals are counted apart, as they may be quicker.
    pub succeeded: bool,
}

/// Times of one kind, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    /// How many were measured.
    pub count: usize,
    /// The shortest.
    pub min_ms: f64,
    /// As many took longer as took less.
    pub median_ms: f64,
    /// The longest.
    pub max_ms: f64,
}

impl Times {
    /// What was measured once.
    pub fn once(took: Duration) -> Times {
        let ms = took.as_secs_f64() * 1000.0;
        Times { count: 1, min_ms: ms, median_ms: ms, max_ms: ms }
    }

    /// `None` where nothing was measured.
    pub(crate) fn of(durations: &[Duration]) -> Option<Times> {
        let mut sorted: Vec<f64> = durations.iter().map(|duration| duration.as_secs_f64() * 1000.0).collect();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len();
        let (lower, upper) = (sorted.get(count.checked_sub(1)? / 2)?, sorted.get(count / 2)?);
        Some(Times { count, min_ms: *sorted.first()?, median_ms: (lower + upper) / 2.0, max_ms: *sorted.last()? })
    }
}

impl<'a> Timed<'a> {
    /// Measures `nvml`.
    pub fn new(nvml: &'a dyn Nvml) -> Timed<'a> {
        Timed { nvml, times: Mutex::default() }
    }

    /// What was measured so far.
    pub fn times(&self) -> Vec<(Measured, Times)> {
        let times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        times.iter().filter_map(|(measured, durations)| Some((*measured, Times::of(durations)?))).collect()
    }

    /// The one that is measured.
    pub(crate) fn unmeasured(&self) -> &'a dyn Nvml {
        self.nvml
    }

    fn measure<T>(
        &self,
        function: &'static str,
        with: &'static str,
        call: impl FnOnce(&dyn Nvml) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let start = Instant::now();
        let answer = call(self.nvml);
        let took = start.elapsed();
        let measured = Measured { function, with, succeeded: answer.is_ok() };
        self.times.lock().unwrap_or_else(PoisonError::into_inner).entry(measured).or_default().push(took);
        answer
    }
}

impl Nvml for Timed<'_> {
    fn driver_version(&self) -> Result<String, Error> {
        self.measure("nvmlSystemGetDriverVersion", "", |nvml| nvml.driver_version())
    }

    fn cuda_driver_version(&self) -> Result<CudaVersion, Error> {
        self.measure("nvmlSystemGetCudaDriverVersion_v2", "", |nvml| nvml.cuda_driver_version())
    }

    fn gpu_count(&self) -> Result<u32, Error> {
        self.measure("nvmlDeviceGetCount_v2", "", |nvml| nvml.gpu_count())
    }

    fn gpu(&self, index: u32) -> Result<Gpu, Error> {
        self.measure("nvmlDeviceGetHandleByIndex_v2", "", |nvml| nvml.gpu(index))
    }

    fn gpu_at(&self, address: PciAddress) -> Result<Gpu, Error> {
        self.measure("nvmlDeviceGetHandleByPciBusId_v2", "", |nvml| nvml.gpu_at(address))
    }

    fn pci_address(&self, gpu: Gpu) -> Result<PciAddress, Error> {
        self.measure("nvmlDeviceGetPciInfo_v3", "", |nvml| nvml.pci_address(gpu))
    }

    fn facts(&self, gpu: Gpu) -> Result<GpuFacts, Error> {
        let with = "nvmlDeviceGetArchitecture, GetFieldValues, GetMinorNumber, GetName, GetBrand, \
                    GetCudaComputeCapability and GetMemoryInfo";
        self.measure("nvmlDeviceGetUUID", with, |nvml| nvml.facts(gpu))
    }

    fn mig_modes(&self, gpu: Gpu) -> Result<Option<MigModes>, Error> {
        self.measure("nvmlDeviceGetMigMode", "", |nvml| nvml.mig_modes(gpu))
    }

    fn set_mig_mode(&self, gpu: Gpu, mode: MigMode) -> Result<(), Error> {
        self.measure("nvmlDeviceSetMigMode", "", |nvml| nvml.set_mig_mode(gpu, mode))
    }

    fn gpu_instance_profiles(&self, gpu: Gpu) -> Result<Vec<Profile>, Error> {
        let with = "of each profile, nvmlDeviceGetGpuInstancePossiblePlacements of each, nvmlDeviceGetMemoryInfo";
        self.measure("nvmlDeviceGetGpuInstanceProfileInfo", with, |nvml| nvml.gpu_instance_profiles(gpu))
    }

    fn gpu_instances(&self, gpu: Gpu) -> Result<Vec<GpuInstance>, Error> {
        let with = "of each profile, nvmlGpuInstanceGetInfo of each instance";
        self.measure("nvmlDeviceGetGpuInstances", with, |nvml| nvml.gpu_instances(gpu))
    }

    fn create_gpu_instance(&self, gpu: Gpu, profile_id: u32, placement: Placement) -> Result<GpuInstance, Error> {
        let with = "nvmlGpuInstanceGetInfo";
        self.measure("nvmlDeviceCreateGpuInstanceWithPlacement", with, |nvml| {
            nvml.create_gpu_instance(gpu, profile_id, placement)
        })
    }

    fn destroy_gpu_instance(&self, gpu: Gpu, gpu_instance: u32) -> Result<(), Error> {
        let with = "nvmlDeviceGetGpuInstanceById";
        self.measure("nvmlGpuInstanceDestroy", with, |nvml| nvml.destroy_gpu_instance(gpu, gpu_instance))
    }

    fn compute_instances(&self, gpu: Gpu, gpu_instance: u32) -> Result<Vec<ComputeInstance>, Error> {
        let with = "of each profile, nvmlDeviceGetGpuInstanceById, nvmlGpuInstanceGetComputeInstanceProfileInfo of \
                    each profile, nvmlComputeInstanceGetInfo_v2 and nvmlDeviceGetUUID of each instance";
        self.measure("nvmlGpuInstanceGetComputeInstances", with, |nvml| nvml.compute_instances(gpu, gpu_instance))
    }

    fn create_compute_instance(
        &self,
        gpu: Gpu,
        gpu_instance: u32,
        compute_slices: u32,
    ) -> Result<ComputeInstance, Error> {
        let with = "nvmlDeviceGetGpuInstanceById, nvmlGpuInstanceGetComputeInstanceProfileInfo of each profile, \
                    nvmlComputeInstanceGetInfo_v2, nvmlDeviceGetUUID";
        self.measure("nvmlGpuInstanceCreateComputeInstance", with, |nvml| {
            nvml.create_compute_instance(gpu, gpu_instance, compute_slices)
        })
    }

    fn destroy_compute_instance(&self, gpu: Gpu, gpu_instance: u32, compute_instance: u32) -> Result<(), Error> {
        let with = "nvmlDeviceGetGpuInstanceById, nvmlGpuInstanceGetComputeInstanceById";
        self.measure("nvmlComputeInstanceDestroy", with, |nvml| {
            nvml.destroy_compute_instance(gpu, gpu_instance, compute_instance)
        })
    }

    fn processes(&self, gpu: Gpu) -> Result<Vec<Process>, Error> {
        self.measure("nvmlDeviceGetComputeRunningProcesses_v3", "", |nvml| nvml.processes(gpu))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_the_least_the_middle_and_the_most() {
        let times = |ms: &[u64]| Times::of(&ms.iter().map(|ms| Duration::from_millis(*ms)).collect::<Vec<_>>());
        let expected = |count, min_ms, median_ms, max_ms| Some(Times { count, min_ms, median_ms, max_ms });
        assert_eq!(times(&[]), None);
        assert_eq!(times(&[5]), expected(1, 5.0, 5.0, 5.0));
        assert_eq!(times(&[9, 1, 2]), expected(3, 1.0, 2.0, 9.0));
        assert_eq!(times(&[4, 1, 2, 9]), expected(4, 1.0, 3.0, 9.0));
    }
}
