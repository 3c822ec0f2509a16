//! The NVML calls kerf makes, in kerf's own types.
//!
//! [`Nvml`] is the contract; [`Library`] is its implementation, over the `libnvidia-ml.so.1` found under a driver root, and
//! [`Uninitialized`] stands for it where there is none. Instances are named by their ids and never by handles: handles go
//! stale, ids are what the kernel and `nvidia-smi` speak of.
//!
//! Architecture invariant: `unsafe` lives in the module `raw` only, and no type of the raw bindings leaves this crate.

mod driver_root;
mod error;
mod library;
mod lookup;
mod raw;
mod types;
mod uninitialized;
mod words;

pub use driver_root::{DriverRoot, DriverRootError};
pub use error::{Code, Error};
pub use library::{Library, OpenError};
pub use lookup::Lookup;
pub use types::{
    ComputeInstance, CudaVersion, GpuFacts, GpuInstance, MigMode, MigModes, PciAddress, PciAddressError, Process,
};
pub use uninitialized::Uninitialized;

use kerf_mig::{Placement, Profile};

/// A GPU within one NVML session, and of no use in another. Valid until the driver is reloaded; found again by
/// [`Nvml::gpu_at`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gpu(pub(crate) usize);

impl Gpu {
    /// The handle that one implementation of [`Nvml`] knows by `key`; to any other it means nothing.
    pub const fn from_key(key: usize) -> Gpu {
        Gpu(key)
    }

    /// What the handle was made of.
    pub const fn key(self) -> usize {
        self.0
    }
}

/// The NVML calls kerf makes. All block; on real hardware carving takes of the order of a second.
pub trait Nvml: Send + Sync {
    /// `nvmlSystemGetDriverVersion`.
    fn driver_version(&self) -> Result<String, Error>;

    /// `nvmlSystemGetCudaDriverVersion_v2`.
    fn cuda_driver_version(&self) -> Result<CudaVersion, Error>;

    /// `nvmlDeviceGetCount_v2`.
    fn gpu_count(&self) -> Result<u32, Error>;

    /// `nvmlDeviceGetHandleByIndex_v2`. Fails for a broken GPU without harm to its neighbours.
    fn gpu(&self, index: u32) -> Result<Gpu, Error>;

    /// `nvmlDeviceGetHandleByPciBusId_v2`.
    fn gpu_at(&self, address: PciAddress) -> Result<Gpu, Error>;

    /// `nvmlDeviceGetPciInfo_v3`: where the GPU is.
    fn pci_address(&self, gpu: Gpu) -> Result<PciAddress, Error>;

    /// Everything about a GPU that does not change while the driver is loaded.
    fn facts(&self, gpu: Gpu) -> Result<GpuFacts, Error>;

    /// `nvmlDeviceGetMigMode`; `None` where the GPU has no MIG: it says NOT_SUPPORTED, and tells no profiles either. The same
    /// answer of a GPU that tells profiles is an error: taken at its word, one in MIG mode would be handed out whole.
    fn mig_modes(&self, gpu: Gpu) -> Result<Option<MigModes>, Error>;

    /// `nvmlDeviceSetMigMode`. Fails when either the return value or the activation status says so: both are obeyed. After
    /// the latter the mode may be pending. May reset the GPU: what was read before can be out of date, the minor number
    /// too (nvml.h).
    fn set_mig_mode(&self, gpu: Gpu, mode: MigMode) -> Result<(), Error>;

    /// Every GPU-instance profile with all its placements, whether or not MIG is on now. Empty on a GPU without MIG, and
    /// where the driver answers only while MIG is on. Profiles that the driver does not support, or that this library
    /// version does not know, are left out.
    fn gpu_instance_profiles(&self, gpu: Gpu) -> Result<Vec<Profile>, Error>;

    /// Every live GPU instance, also those without a compute instance. Empty where MIG is off.
    fn gpu_instances(&self, gpu: Gpu) -> Result<Vec<GpuInstance>, Error>;

    /// `nvmlDeviceCreateGpuInstanceWithPlacement`.
    fn create_gpu_instance(&self, gpu: Gpu, profile_id: u32, placement: Placement) -> Result<GpuInstance, Error>;

    /// `nvmlGpuInstanceDestroy`. Fails with [`Code::InUse`] while it holds a compute instance or a client.
    fn destroy_gpu_instance(&self, gpu: Gpu, gpu_instance: u32) -> Result<(), Error>;

    /// Every compute instance of a GPU instance.
    fn compute_instances(&self, gpu: Gpu, gpu_instance: u32) -> Result<Vec<ComputeInstance>, Error>;

    /// Creates the compute instance that spans the whole GPU instance (`compute_slices` of it).
    fn create_compute_instance(
        &self,
        gpu: Gpu,
        gpu_instance: u32,
        compute_slices: u32,
    ) -> Result<ComputeInstance, Error>;

    /// `nvmlComputeInstanceDestroy`. Fails with [`Code::InUse`] while a process uses it.
    fn destroy_compute_instance(&self, gpu: Gpu, gpu_instance: u32, compute_instance: u32) -> Result<(), Error>;

    /// Processes that compute on the GPU or on any of its instances.
    fn processes(&self, gpu: Gpu) -> Result<Vec<Process>, Error>;
}
