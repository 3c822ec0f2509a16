//! The one implementation of [`Nvml`]: NVML as found under a driver root.

use std::collections::{BTreeSet, HashMap};
use std::error::Error as StdError;
use std::ffi::CString;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kerf_mig::{Placement, Profile};

use crate::raw::{ComputeInstanceHandle, ComputeInstanceProfile, Device, GpuInstanceHandle, GpuInstanceProfile, Raw};
use crate::{
    Code, ComputeInstance, CudaVersion, DriverRoot, DriverRootError, Error, Gpu, GpuFacts, GpuInstance, MigMode,
    MigModes, Nvml, PciAddress, Process, words,
};

/// More profiles than any NVML has (18 of GPU instances, 9 of compute instances in nvml.h of CUDA 13): ends the search
/// in a library that never says INVALID_ARGUMENT.
const MAX_PROFILES: u32 = 64;

/// `NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED` (nvml.h): whether MIG mode switches without a reset.
const FIELD_RESETLESS_MIG: u32 = 184;

/// Gives every [`Gpu`] of this process its own number, so that one session's is never taken for another's.
static NEXT_GPU: AtomicUsize = AtomicUsize::new(0);

/// An NVML session: the library loaded and initialised, until dropped.
///
/// Made for many threads: NVML is documented to be thread-safe, and no lock is held during a call.
pub struct Library {
    raw: Raw,
    /// The GPUs handed out. NVML gives a GPU the same handle each time, so this grows no further than their number.
    gpus: Mutex<Vec<(Gpu, Device)>>,
    /// The profiles of GPUs that were seen in MIG mode: they do not change while the driver is loaded.
    profiles: Mutex<HashMap<Gpu, Arc<[InstanceProfile]>>>,
}

/// What listing the instances of a profile takes.
struct InstanceProfile {
    id: u32,
    max_instances: u32,
}

/// Why there is no NVML session.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No library.
    #[error(transparent)]
    Root(#[from] DriverRootError),
    /// The library does not load: damaged, or for another machine.
    #[error("{} cannot be loaded: {source}; is it this machine's driver?", path.display())]
    Load {
        /// The library.
        path: PathBuf,
        /// What the dynamic linker said.
        source: Box<dyn StdError + Send + Sync>,
    },
    /// NVML does not start.
    #[error("{}: {source}", path.display())]
    Init {
        /// The library.
        path: PathBuf,
        /// What NVML said.
        source: Error,
    },
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}

impl Library {
    /// Loads the driver root's NVML and starts a session. A machine whose driver has no GPU now gets a session, too.
    ///
    /// # Errors
    /// No library, one that does not load, or one that does not start, such as without its kernel module.
    pub fn open(root: &DriverRoot) -> Result<Self, OpenError> {
        let path = root.nvml_library()?;
        let raw = Raw::load(&path).map_err(|source| OpenError::Load { path: path.clone(), source })?;
        raw.init().map_err(|source| OpenError::Init { path, source })?;
        Ok(Library { raw, gpus: Mutex::default(), profiles: Mutex::default() })
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // Nobody is left to tell, and the process ends or opens another session.
        let _ = self.raw.shutdown();
    }
}

/// `answer`, but `None` for one of these codes.
fn unless<T>(codes: &[Code], answer: Result<T, Error>) -> Result<Option<T>, Error> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if codes.contains(&error.code) => Ok(None),
        Err(error) => Err(error),
    }
}

/// What NVML says of something that this GPU, or this library, does not have.
const ABSENT: [Code; 3] = [Code::NotSupported, Code::NotFound, Code::FunctionNotFound];

/// What NVML says of the placements of a profile that it describes for this product but does not offer.
const NOT_OFFERED: [Code; 4] = [Code::NotSupported, Code::NotFound, Code::FunctionNotFound, Code::InvalidArgument];

/// What NVML says of an instance, listed a moment ago, that another client has destroyed since.
const VANISHED: [Code; 2] = [Code::NotFound, Code::InvalidArgument];

/// The profiles that `ask` knows by enum index, counted up until NVML refuses the index. Fails if it refuses the very
/// first: then something else is invalid, such as a stale handle.
fn profiles<T>(ask: impl Fn(u32) -> Result<T, Error>) -> Result<Vec<(u32, T)>, Error> {
    let mut profiles = Vec::new();
    for index in 0..MAX_PROFILES {
        match ask(index) {
            Ok(profile) => profiles.push((index, profile)),
            Err(error) if index > 0 && error.code == Code::InvalidArgument => break,
            Err(error) if ABSENT.contains(&error.code) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(profiles)
}

/// Nothing is left half-done under these locks, so a panic elsewhere does not matter.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn mig_mode(number: u32) -> MigMode {
    if number == 0 { MigMode::Disabled } else { MigMode::Enabled }
}

impl Library {
    fn remember(&self, device: Device) -> Gpu {
        let mut gpus = lock(&self.gpus);
        if let Some((gpu, _)) = gpus.iter().find(|(_, known)| *known == device) {
            return *gpu;
        }
        let gpu = Gpu(NEXT_GPU.fetch_add(1, Ordering::Relaxed));
        gpus.push((gpu, device));
        gpu
    }

    /// NVML's handle. A [`Gpu`] of another session is refused here: its handle may not be looked into.
    fn device(&self, gpu: Gpu) -> Result<Device, Error> {
        let gpus = lock(&self.gpus);
        let found = gpus.iter().find(|(known, _)| *known == gpu).map(|(_, device)| *device);
        found.ok_or(Error { call: "finding a GPU of another NVML session", code: Code::InvalidArgument })
    }

    /// Each profile once, by its hardware id.
    fn gpu_instance_profile_infos(&self, device: Device) -> Result<Vec<(u32, GpuInstanceProfile)>, Error> {
        let mut infos = profiles(|index| self.raw.gpu_instance_profile(device, index))?;
        let mut seen = BTreeSet::new();
        infos.retain(|(_, info)| seen.insert(info.id));
        Ok(infos)
    }

    /// Whether the GPU can be cut: the second opinion on one that says it has no MIG mode. Only a GPU with MIG tells profiles,
    /// and one in MIG mode tells them always (nvml.h: NOT_SUPPORTED "if device doesn't support MIG").
    fn has_profiles(&self, device: Device) -> Result<bool, Error> {
        let infos = unless(&[Code::InvalidArgument], self.gpu_instance_profile_infos(device))?;
        Ok(infos.is_some_and(|infos| !infos.is_empty()))
    }

    /// The profiles as remembered, else asked for: a driver need not tell them all while MIG is off.
    fn instance_profiles(&self, gpu: Gpu, device: Device) -> Result<Arc<[InstanceProfile]>, Error> {
        if let Some(known) = lock(&self.profiles).get(&gpu) {
            return Ok(Arc::clone(known));
        }
        let infos = self.gpu_instance_profile_infos(device)?.into_iter();
        Ok(infos.map(|(_, info)| InstanceProfile { id: info.id, max_instances: info.max_instances }).collect())
    }

    fn compute_instance_profiles(
        &self,
        instance: GpuInstanceHandle,
    ) -> Result<Vec<(u32, ComputeInstanceProfile)>, Error> {
        profiles(|index| self.raw.compute_instance_profile(instance, index))
    }

    fn memory_bytes(&self, device: Device) -> Result<Option<u64>, Error> {
        unless(&[Code::NotSupported], self.raw.memory_total(device))
    }

    fn compute_instance(&self, instance: ComputeInstanceHandle) -> Result<ComputeInstance, Error> {
        let (id, mig_device) = self.raw.compute_instance_info(instance)?;
        let uuid = self.raw.uuid(mig_device)?;
        // nvml.h calls this handle the parent's, and what got the parent's UUID would get the whole GPU.
        if !uuid.starts_with("MIG-") {
            return Err(Error { call: "nvmlComputeInstanceGetInfo_v2 (MIG device)", code: Code::Unknown });
        }
        Ok(ComputeInstance { id, uuid })
    }
}

impl Nvml for Library {
    fn driver_version(&self) -> Result<String, Error> {
        self.raw.driver_version()
    }

    fn cuda_driver_version(&self) -> Result<CudaVersion, Error> {
        let version = self.raw.cuda_driver_version()?;
        Ok(CudaVersion { major: version / 1000, minor: version % 1000 / 10 })
    }

    fn gpu_count(&self) -> Result<u32, Error> {
        self.raw.device_count()
    }

    fn gpu(&self, index: u32) -> Result<Gpu, Error> {
        Ok(self.remember(self.raw.device_by_index(index)?))
    }

    fn gpu_at(&self, address: PciAddress) -> Result<Gpu, Error> {
        let bus_id = CString::new(address.to_string()).expect("digits and punctuation only");
        Ok(self.remember(self.raw.device_by_pci_bus_id(&bus_id)?))
    }

    fn pci_address(&self, gpu: Gpu) -> Result<PciAddress, Error> {
        let bus_id = self.raw.pci_bus_id(self.device(gpu)?)?;
        bus_id.parse().map_err(|_| Error { call: "nvmlDeviceGetPciInfo_v3 (bus id)", code: Code::Unknown })
    }

    fn facts(&self, gpu: Gpu) -> Result<GpuFacts, Error> {
        let device = self.device(gpu)?;
        let architecture = self.raw.architecture(device)?;
        // NVIDIA MIG user guide: from Hopper on, enabling MIG needs no reset. A driver that has the field knows better.
        let by_architecture = architecture >= words::HOPPER && architecture != words::ARCHITECTURE_UNKNOWN;
        let field = self.raw.field(device, FIELD_RESETLESS_MIG);
        Ok(GpuFacts {
            uuid: self.raw.uuid(device)?,
            minor: self.raw.minor_number(device)?,
            name: self.raw.name(device)?,
            brand: words::brand(self.raw.brand(device)?).to_owned(),
            architecture: words::architecture(architecture).to_owned(),
            compute_capability: self.raw.compute_capability(device)?,
            memory_bytes: self.memory_bytes(device)?,
            mig_mode_switchable: field.map_or(by_architecture, |value| value != 0),
        })
    }

    fn mig_modes(&self, gpu: Gpu) -> Result<Option<MigModes>, Error> {
        let device = self.device(gpu)?;
        match self.raw.mig_mode(device) {
            Ok((current, pending)) => Ok(Some(MigModes { current: mig_mode(current), pending: mig_mode(pending) })),
            // A library that does not know MIG does not learn it.
            Err(Error { code: Code::FunctionNotFound, .. }) => Ok(None),
            Err(Error { code: Code::NotSupported, .. }) if !self.has_profiles(device)? => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn set_mig_mode(&self, gpu: Gpu, mode: MigMode) -> Result<(), Error> {
        self.raw.set_mig_mode(self.device(gpu)?, u32::from(mode == MigMode::Enabled))
    }

    fn gpu_instance_profiles(&self, gpu: Gpu) -> Result<Vec<Profile>, Error> {
        let device = self.device(gpu)?;
        let infos = self.gpu_instance_profile_infos(device)?;
        if infos.is_empty() {
            return Ok(Vec::new());
        }
        let gpu_memory_mib = self.memory_bytes(device)?.unwrap_or(0) >> 20;
        let mut profiles = Vec::new();
        for (index, info) in infos {
            let driver = || self.raw.gpu_instance_profile_name(device, index).ok();
            let name = words::profile_name(index, info.compute_slices, info.memory_mib, gpu_memory_mib, driver);
            let placements = self.raw.possible_placements(device, info.id);
            let (Some(name), Some(mut placements)) = (name, unless(&NOT_OFFERED, placements)?) else { continue };
            placements.sort_unstable();
            profiles.push(Profile {
                id: info.id,
                name,
                compute_slices: info.compute_slices,
                memory_mib: info.memory_mib,
                engines: info.engines,
                max_instances: info.max_instances,
                placements,
            });
        }
        Ok(profiles)
    }

    fn gpu_instances(&self, gpu: Gpu) -> Result<Vec<GpuInstance>, Error> {
        let device = self.device(gpu)?;
        let profiles = self.instance_profiles(gpu, device)?;
        let mut instances = Vec::new();
        let mut mig_is_on = false;
        for profile in profiles.iter() {
            let Some(handles) = unless(&ABSENT, self.raw.gpu_instances(device, profile.id, profile.max_instances))?
            else {
                continue;
            };
            mig_is_on = true;
            for handle in handles {
                instances.extend(unless(&VANISHED, self.raw.gpu_instance_info(handle))?);
            }
        }
        if mig_is_on {
            lock(&self.profiles).insert(gpu, profiles);
        }
        Ok(instances)
    }

    fn create_gpu_instance(&self, gpu: Gpu, profile_id: u32, placement: Placement) -> Result<GpuInstance, Error> {
        let handle = self.raw.create_gpu_instance(self.device(gpu)?, profile_id, placement)?;
        self.raw.gpu_instance_info(handle).inspect_err(|_| {
            // The caller learns why it has none; an instance that cannot go either is found by listing.
            let _ = self.raw.destroy_gpu_instance(handle);
        })
    }

    fn destroy_gpu_instance(&self, gpu: Gpu, gpu_instance: u32) -> Result<(), Error> {
        let handle = self.raw.gpu_instance_by_id(self.device(gpu)?, gpu_instance)?;
        self.raw.destroy_gpu_instance(handle)
    }

    fn compute_instances(&self, gpu: Gpu, gpu_instance: u32) -> Result<Vec<ComputeInstance>, Error> {
        let handle = self.raw.gpu_instance_by_id(self.device(gpu)?, gpu_instance)?;
        let mut instances: Vec<ComputeInstance> = Vec::new();
        for (_, profile) in self.compute_instance_profiles(handle)? {
            let listed = self.raw.compute_instances(handle, profile.id, profile.max_instances);
            for handle in unless(&ABSENT, listed)?.unwrap_or_default() {
                let found = unless(&VANISHED, self.compute_instance(handle))?;
                // Two profiles of one size can name the same instance (1_SLICE_REV1, 7_SLICE_NVL).
                instances.extend(found.filter(|found| instances.iter().all(|known| known.id != found.id)));
            }
        }
        Ok(instances)
    }

    fn create_compute_instance(
        &self,
        gpu: Gpu,
        gpu_instance: u32,
        compute_slices: u32,
    ) -> Result<ComputeInstance, Error> {
        let gpu_instance = self.raw.gpu_instance_by_id(self.device(gpu)?, gpu_instance)?;
        // Of several with this size the first is the plain one: 1_SLICE_REV1 and 7_SLICE_NVL have higher indexes, and
        // the latter is described on GPUs that cannot create it.
        let profiles = self.compute_instance_profiles(gpu_instance)?;
        let (_, profile) = profiles.into_iter().find(|(_, profile)| profile.slices == compute_slices).ok_or(Error {
            call: "finding a compute-instance profile of the GPU instance's size",
            code: Code::NotSupported,
        })?;
        let handle = self.raw.create_compute_instance(gpu_instance, profile.id)?;
        self.compute_instance(handle).inspect_err(|_| {
            // As for GPU instances.
            let _ = self.raw.destroy_compute_instance(handle);
        })
    }

    fn destroy_compute_instance(&self, gpu: Gpu, gpu_instance: u32, compute_instance: u32) -> Result<(), Error> {
        let gpu_instance = self.raw.gpu_instance_by_id(self.device(gpu)?, gpu_instance)?;
        let handle = self.raw.compute_instance_by_id(gpu_instance, compute_instance)?;
        self.raw.destroy_compute_instance(handle)
    }

    fn processes(&self, gpu: Gpu) -> Result<Vec<Process>, Error> {
        self.raw.compute_processes(self.device(gpu)?)
    }
}
