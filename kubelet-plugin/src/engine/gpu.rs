//! A GPU as it is at the moment of a call, and what need not be asked each time.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kerf_mig::Geometry;
use kerf_nvml::{Code, Error, Gpu, GpuFacts, GpuInstance, PciAddress, Process};

use super::{Engine, GpuError};
use crate::attributes::{self, Attributes, Location};

/// A GPU that NVML gave out.
#[derive(Clone, Copy, Debug)]
pub(super) struct LiveGpu {
    pub(super) address: PciAddress,
    pub(super) handle: Gpu,
    /// The N of `/dev/nvidiaN`.
    pub(super) minor: u32,
    /// Whether MIG mode changes without a reset.
    pub(super) switchable: bool,
}

/// What does not change while the driver is loaded: the facts of a handle, its geometry once it told one, and its attributes. Everything
/// known of a GPU is forgotten when its mode was switched, which may re-initialise it, and when a claim on it failed.
#[derive(Debug, Default)]
pub(super) struct KnownGpus(Mutex<HashMap<PciAddress, KnownGpu>>);

#[derive(Debug)]
struct KnownGpu {
    gpu: LiveGpu,
    facts: Arc<GpuFacts>,
    geometry: Option<Arc<Geometry>>,
    attributes: Option<Arc<Attributes>>,
}

impl KnownGpus {
    pub(super) fn forget(&self, gpus: &BTreeSet<PciAddress>) {
        self.lock().retain(|gpu, _| !gpus.contains(gpu));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PciAddress, KnownGpu>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
        let known = self.gpus.lock().get(&address).map(|known| known.gpu).filter(|gpu| gpu.handle == handle);
        match known {
            Some(gpu) => Ok(gpu),
            None => self.learn(address, handle).map(|(gpu, _)| gpu),
        }
    }

    fn learn(&self, address: PciAddress, handle: Gpu) -> Result<(LiveGpu, Arc<GpuFacts>), GpuError> {
        let doing = "read what does not change";
        let facts = self.nvml.facts(handle).map_err(|error| GpuError::Nvml { gpu: address, doing, error })?;
        let gpu = LiveGpu { address, handle, minor: facts.minor, switchable: facts.mig_mode_switchable };
        let facts = Arc::new(facts);
        self.gpus.lock().insert(address, KnownGpu { gpu, facts: Arc::clone(&facts), geometry: None, attributes: None });
        Ok((gpu, facts))
    }

    /// As [`Engine::find_gpu`], with what does not change.
    pub(super) fn find_gpu_with_facts(&self, address: PciAddress) -> Result<(LiveGpu, Arc<GpuFacts>), GpuError> {
        let gpu = self.find_gpu(address)?;
        let facts = self.gpus.lock().get(&address).map(|known| Arc::clone(&known.facts));
        facts.map_or_else(|| self.learn(address, gpu.handle), |facts| Ok((gpu, facts)))
    }

    /// The attributes of a GPU, as the controller publishes them.
    pub(super) fn attributes(&self, gpu: &LiveGpu, driver_version: &str) -> Result<Arc<Attributes>, GpuError> {
        let known = self.gpus.lock().get(&gpu.address).map(|it| (Arc::clone(&it.facts), it.attributes.clone()));
        let facts = match known {
            Some((_, Some(attributes))) => return Ok(attributes),
            Some((facts, None)) => facts,
            None => self.learn(gpu.address, gpu.handle)?.1,
        };
        let common = self.nvml.cuda_driver_version().map(|cuda| attributes::common(driver_version, cuda));
        let is_complete = common.is_ok();
        let location = Location::of(&self.driver_root, gpu.address);
        let attributes = Arc::new(attributes::of_gpu(&facts, gpu.address, &location, &common.unwrap_or_default()));
        if is_complete && let Some(known) = self.gpus.lock().get_mut(&gpu.address) {
            known.attributes = Some(Arc::clone(&attributes));
        }
        Ok(attributes)
    }

    /// What a GPU can be cut into; empty where it has no MIG or tells it only while MIG is on.
    pub(super) fn geometry(&self, gpu: &LiveGpu) -> Result<Arc<Geometry>, GpuError> {
        if let Some(KnownGpu { geometry: Some(geometry), .. }) = self.gpus.lock().get(&gpu.address) {
            return Ok(Arc::clone(geometry));
        }
        let profiles = self.nvml.gpu_instance_profiles(gpu.handle).map_err(gpu.failed("read the MIG profiles"))?;
        let geometry = Arc::new(Geometry::new(profiles));
        if !geometry.is_empty()
            && let Some(known) = self.gpus.lock().get_mut(&gpu.address)
        {
            known.geometry = Some(Arc::clone(&geometry));
        }
        Ok(geometry)
    }

    /// As [`Engine::find_gpu`], where a GPU that is not there any more is no error: what was on it is gone with it.
    ///
    /// A GPU that fell off the bus comes back only through a reset, which no instance survives (NVIDIA MIG user guide).
    pub(super) fn find_gpu_if_present(&self, address: PciAddress) -> Result<Option<LiveGpu>, GpuError> {
        match self.find_gpu(address) {
            Ok(gpu) => Ok(Some(gpu)),
            // Something else than the GPU itself may be not found on a GPU that is there.
            Err(GpuError::Unreachable { error: Error { code: Code::NotFound, .. }, .. }) => Ok(None),
            Err(GpuError::Unreachable { error, .. } | GpuError::Nvml { error, .. })
                if error.code == Code::GpuIsLost =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Every process that computes on the GPU or on an instance of it.
    pub(super) fn processes(&self, gpu: &LiveGpu) -> Result<Vec<Process>, GpuError> {
        self.nvml.processes(gpu.handle).map_err(gpu.failed("list the processes"))
    }

    /// Every live GPU instance; none where MIG is off.
    pub(super) fn live_instances(&self, gpu: &LiveGpu) -> Result<Vec<GpuInstance>, GpuError> {
        match self.nvml.gpu_instances(gpu.handle) {
            Err(Error { code: Code::NotSupported, .. }) => Ok(Vec::new()),
            instances => instances.map_err(gpu.failed("list the GPU instances")),
        }
    }
}
