//! NVML's C functions, one safe method each: pointers, sizes and buffers end here.
//!
//! Handles never leave the crate, and all but a GPU's are used at once and dropped: another client may destroy the
//! instance at any time. NVML answers INVALID_ARGUMENT to a handle that went stale.

#![expect(unsafe_code, reason = "NVML is a C library; the rest of the crate is safe")]

use std::error::Error as StdError;
use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::path::Path;
use std::ptr::null_mut;

use kerf_mig::{Engines, Placement};
use nvml_wrapper_sys::bindings::{
    NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, NVML_INIT_FLAG_NO_GPUS, NvmlLib, nvmlComputeInstance_t,
    nvmlComputeInstanceInfo_t, nvmlComputeInstanceProfileInfo_t, nvmlDevice_t, nvmlFieldValue_t, nvmlGpuInstance_t,
    nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_t, nvmlGpuInstanceProfileInfo_v2_t,
    nvmlMemory_t, nvmlPciInfo_t, nvmlProcessInfo_t, nvmlReturn_t,
};

use crate::{Code, Error, GpuInstance, Process};

/// Enough for every text NVML returns (nvml.h: names and UUIDs 96, driver version 80).
const TEXT: usize = 96;

/// `nvmlProcessInfo_t.gpuInstanceId` of a process on a GPU without MIG (nvml.h).
const NO_INSTANCE: u32 = 0xFFFF_FFFF;

/// How often a process list may outgrow the array prepared for it.
const MAX_TRIES: u32 = 8;

/// The loaded library.
pub(crate) struct Raw {
    lib: NvmlLib,
}

/// A GPU or a MIG device.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Device(nvmlDevice_t);

// SAFETY: the handle is a token that only NVML looks into, and NVML may be called from any number of threads at once
// (NVML API reference, chapter 1: "thread-safe so it is safe to make simultaneous NVML calls from multiple threads").
unsafe impl Send for Device {}
// SAFETY: as for `Send`.
unsafe impl Sync for Device {}

/// A GPU instance, good until somebody destroys it.
#[derive(Clone, Copy)]
pub(crate) struct GpuInstanceHandle(nvmlGpuInstance_t);

/// A compute instance, good until somebody destroys it.
#[derive(Clone, Copy)]
pub(crate) struct ComputeInstanceHandle(nvmlComputeInstance_t);

/// A GPU-instance profile without name and placements.
pub(crate) struct GpuInstanceProfile {
    pub(crate) id: u32,
    pub(crate) compute_slices: u32,
    pub(crate) max_instances: u32,
    pub(crate) memory_mib: u64,
    pub(crate) engines: Engines,
}

/// A compute-instance profile.
pub(crate) struct ComputeInstanceProfile {
    pub(crate) id: u32,
    pub(crate) slices: u32,
    pub(crate) max_instances: u32,
}

/// C structs that NVML fills.
///
/// # Safety
/// All bits zero must be a value of the type.
unsafe trait Plain: Sized {
    fn zeroed() -> Self {
        // SAFETY: by the contract of the trait.
        unsafe { MaybeUninit::zeroed().assume_init() }
    }
}

// SAFETY: integers and arrays of integers.
unsafe impl Plain for nvmlPciInfo_t {}
// SAFETY: integers.
unsafe impl Plain for nvmlMemory_t {}
// SAFETY: integers and a union of numbers.
unsafe impl Plain for nvmlFieldValue_t {}
// SAFETY: integers.
unsafe impl Plain for nvmlGpuInstanceProfileInfo_t {}
// SAFETY: integers and an array of integers.
unsafe impl Plain for nvmlGpuInstanceProfileInfo_v2_t {}
// SAFETY: integers and a raw pointer.
unsafe impl Plain for nvmlGpuInstanceInfo_t {}
// SAFETY: integers.
unsafe impl Plain for nvmlComputeInstanceProfileInfo_t {}
// SAFETY: integers and raw pointers.
unsafe impl Plain for nvmlComputeInstanceInfo_t {}
// SAFETY: integers.
unsafe impl Plain for nvmlProcessInfo_t {}

/// Calls one function of the library. One that this library does not have fails like NVML's own FUNCTION_NOT_FOUND.
fn call<F: Copy, E>(
    name: &'static str,
    symbol: &Result<F, E>,
    invoke: impl FnOnce(F) -> nvmlReturn_t,
) -> Result<(), Error> {
    let number = symbol.as_ref().map_or(Code::FunctionNotFound.number(), |function| invoke(*function));
    if number == 0 { Ok(()) } else { Err(Error { call: name, code: Code::from(number) }) }
}

/// The text in a buffer, up to its NUL.
fn text(buffer: &[c_char]) -> String {
    let bytes: Vec<u8> = buffer.iter().map(|c| c.to_ne_bytes()[0]).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// What a call puts into an array of `capacity` items, of which it says how many it used.
fn array<T: Clone>(
    capacity: u32,
    blank: T,
    fill: impl FnOnce(*mut T, *mut u32) -> Result<(), Error>,
) -> Result<Vec<T>, Error> {
    let mut items = vec![blank; capacity as usize];
    let mut count = capacity;
    fill(items.as_mut_ptr(), &mut count)?;
    items.truncate(count as usize);
    Ok(items)
}

// The unsafe blocks below call a C function by its signature in nvml.h, as the bindings were generated from it, with
// pointers to live locals of the types it asks for. `Device` and the instance handles come from NVML itself.
impl Raw {
    /// Loads the library, which runs its constructors.
    pub(crate) fn load(path: &Path) -> Result<Raw, Box<dyn StdError + Send + Sync>> {
        // SAFETY: NVML's constructors have no requirements (it is made to be loaded at run time).
        Ok(Raw { lib: unsafe { NvmlLib::new(path) }? })
    }

    /// Without GPUs it succeeds, too.
    pub(crate) fn init(&self) -> Result<(), Error> {
        // SAFETY: takes no pointer.
        call("nvmlInitWithFlags", &self.lib.nvmlInitWithFlags, |f| unsafe { f(NVML_INIT_FLAG_NO_GPUS) })
    }

    pub(crate) fn shutdown(&self) -> Result<(), Error> {
        // SAFETY: takes no pointer.
        call("nvmlShutdown", &self.lib.nvmlShutdown, |f| unsafe { f() })
    }

    pub(crate) fn driver_version(&self) -> Result<String, Error> {
        let mut buffer = [0; TEXT];
        call("nvmlSystemGetDriverVersion", &self.lib.nvmlSystemGetDriverVersion, |f| {
            // SAFETY: the buffer has the length it is said to have.
            unsafe { f(buffer.as_mut_ptr(), TEXT as u32) }
        })?;
        Ok(text(&buffer))
    }

    /// 1000 x major + 10 x minor.
    pub(crate) fn cuda_driver_version(&self) -> Result<u32, Error> {
        let mut version = 0;
        call("nvmlSystemGetCudaDriverVersion_v2", &self.lib.nvmlSystemGetCudaDriverVersion_v2, |f| {
            // SAFETY: a live integer.
            unsafe { f(&mut version) }
        })?;
        Ok(version.unsigned_abs())
    }

    pub(crate) fn device_count(&self) -> Result<u32, Error> {
        let mut count = 0;
        // SAFETY: a live integer.
        call("nvmlDeviceGetCount_v2", &self.lib.nvmlDeviceGetCount_v2, |f| unsafe { f(&mut count) })?;
        Ok(count)
    }

    pub(crate) fn device_by_index(&self, index: u32) -> Result<Device, Error> {
        let mut device = null_mut();
        call("nvmlDeviceGetHandleByIndex_v2", &self.lib.nvmlDeviceGetHandleByIndex_v2, |f| {
            // SAFETY: a live pointer variable.
            unsafe { f(index, &mut device) }
        })?;
        Ok(Device(device))
    }

    pub(crate) fn device_by_pci_bus_id(&self, bus_id: &CStr) -> Result<Device, Error> {
        let mut device = null_mut();
        call("nvmlDeviceGetHandleByPciBusId_v2", &self.lib.nvmlDeviceGetHandleByPciBusId_v2, |f| {
            // SAFETY: a NUL-terminated text and a live pointer variable.
            unsafe { f(bus_id.as_ptr(), &mut device) }
        })?;
        Ok(Device(device))
    }

    /// `domain:bus:device.function` in NVML's form.
    pub(crate) fn pci_bus_id(&self, device: Device) -> Result<String, Error> {
        let mut info = nvmlPciInfo_t::zeroed();
        call("nvmlDeviceGetPciInfo_v3", &self.lib.nvmlDeviceGetPciInfo_v3, |f| {
            // SAFETY: a live struct of the function's version.
            unsafe { f(device.0, &mut info) }
        })?;
        Ok(text(&info.busId))
    }

    /// Of a GPU or a MIG device.
    pub(crate) fn uuid(&self, device: Device) -> Result<String, Error> {
        let mut buffer = [0; TEXT];
        call("nvmlDeviceGetUUID", &self.lib.nvmlDeviceGetUUID, |f| {
            // SAFETY: the buffer has the length it is said to have.
            unsafe { f(device.0, buffer.as_mut_ptr(), TEXT as u32) }
        })?;
        Ok(text(&buffer))
    }

    pub(crate) fn name(&self, device: Device) -> Result<String, Error> {
        let mut buffer = [0; TEXT];
        call("nvmlDeviceGetName", &self.lib.nvmlDeviceGetName, |f| {
            // SAFETY: the buffer has the length it is said to have.
            unsafe { f(device.0, buffer.as_mut_ptr(), TEXT as u32) }
        })?;
        Ok(text(&buffer))
    }

    pub(crate) fn minor_number(&self, device: Device) -> Result<u32, Error> {
        let mut minor = 0;
        call("nvmlDeviceGetMinorNumber", &self.lib.nvmlDeviceGetMinorNumber, |f| {
            // SAFETY: a live integer.
            unsafe { f(device.0, &mut minor) }
        })?;
        Ok(minor)
    }

    pub(crate) fn brand(&self, device: Device) -> Result<u32, Error> {
        let mut brand = 0;
        call("nvmlDeviceGetBrand", &self.lib.nvmlDeviceGetBrand, |f| {
            // SAFETY: a live integer; C's enum is one.
            unsafe { f(device.0, &mut brand) }
        })?;
        Ok(brand)
    }

    pub(crate) fn architecture(&self, device: Device) -> Result<u32, Error> {
        let mut architecture = 0;
        call("nvmlDeviceGetArchitecture", &self.lib.nvmlDeviceGetArchitecture, |f| {
            // SAFETY: a live integer.
            unsafe { f(device.0, &mut architecture) }
        })?;
        Ok(architecture)
    }

    pub(crate) fn compute_capability(&self, device: Device) -> Result<(u32, u32), Error> {
        let (mut major, mut minor) = (0, 0);
        call("nvmlDeviceGetCudaComputeCapability", &self.lib.nvmlDeviceGetCudaComputeCapability, |f| {
            // SAFETY: live integers.
            unsafe { f(device.0, &mut major, &mut minor) }
        })?;
        Ok((major.unsigned_abs(), minor.unsigned_abs()))
    }

    /// Bytes.
    pub(crate) fn memory_total(&self, device: Device) -> Result<u64, Error> {
        let mut memory = nvmlMemory_t::zeroed();
        call("nvmlDeviceGetMemoryInfo", &self.lib.nvmlDeviceGetMemoryInfo, |f| {
            // SAFETY: a live struct of the function's version.
            unsafe { f(device.0, &mut memory) }
        })?;
        Ok(memory.total)
    }

    /// A field value of an unsigned type (nvml.h, `NVML_FI_*`).
    pub(crate) fn field(&self, device: Device, id: u32) -> Result<u32, Error> {
        let mut field = nvmlFieldValue_t { fieldId: id, ..nvmlFieldValue_t::zeroed() };
        call("nvmlDeviceGetFieldValues", &self.lib.nvmlDeviceGetFieldValues, |f| {
            // SAFETY: one live struct, as said.
            let number = unsafe { f(device.0, 1, &mut field) };
            if number == 0 { field.nvmlReturn } else { number }
        })?;
        // SAFETY: the union was zeroed, then filled: any bits are an integer.
        Ok(unsafe { field.value.uiVal })
    }

    /// Current and pending.
    pub(crate) fn mig_mode(&self, device: Device) -> Result<(u32, u32), Error> {
        let (mut current, mut pending) = (0, 0);
        call("nvmlDeviceGetMigMode", &self.lib.nvmlDeviceGetMigMode, |f| {
            // SAFETY: live integers.
            unsafe { f(device.0, &mut current, &mut pending) }
        })?;
        Ok((current, pending))
    }

    /// Fails by the return value, or else by the activation status, which the error then names.
    pub(crate) fn set_mig_mode(&self, device: Device, mode: u32) -> Result<(), Error> {
        let mut activation = 0;
        call("nvmlDeviceSetMigMode", &self.lib.nvmlDeviceSetMigMode, |f| {
            // SAFETY: a live integer; C's enum is one.
            unsafe { f(device.0, mode, &mut activation) }
        })?;
        match activation {
            0 => Ok(()),
            number => Err(Error { call: "nvmlDeviceSetMigMode (activation)", code: Code::from(number) }),
        }
    }

    /// By NVML's enum index. The first version of the call: it does not ask for MIG mode to be on.
    pub(crate) fn gpu_instance_profile(&self, device: Device, index: u32) -> Result<GpuInstanceProfile, Error> {
        let mut info = nvmlGpuInstanceProfileInfo_t::zeroed();
        call("nvmlDeviceGetGpuInstanceProfileInfo", &self.lib.nvmlDeviceGetGpuInstanceProfileInfo, |f| {
            // SAFETY: a live struct of the function's version.
            unsafe { f(device.0, index, &mut info) }
        })?;
        Ok(GpuInstanceProfile {
            id: info.id,
            compute_slices: info.sliceCount,
            max_instances: info.instanceCount,
            memory_mib: info.memorySizeMB,
            engines: Engines {
                multiprocessors: info.multiprocessorCount,
                copy_engines: info.copyEngineCount,
                decoders: info.decoderCount,
                encoders: info.encoderCount,
                jpeg_engines: info.jpegCount,
                ofa_engines: info.ofaCount,
            },
        })
    }

    /// By NVML's enum index, as the driver says it: `MIG 1g.10gb`. nvml.h asks for MIG mode to be on.
    pub(crate) fn gpu_instance_profile_name(&self, device: Device, index: u32) -> Result<String, Error> {
        // The version word is the struct's size and its version (nvml.h, NVML_STRUCT_VERSION).
        let version = size_of::<nvmlGpuInstanceProfileInfo_v2_t>() as u32 | 2 << 24;
        let mut info = nvmlGpuInstanceProfileInfo_v2_t { version, ..Plain::zeroed() };
        call("nvmlDeviceGetGpuInstanceProfileInfoV", &self.lib.nvmlDeviceGetGpuInstanceProfileInfoV, |f| {
            // SAFETY: a live struct of the version it carries.
            unsafe { f(device.0, index, &mut info) }
        })?;
        Ok(text(&info.name))
    }

    /// All placements of a profile, also those taken now.
    pub(crate) fn possible_placements(&self, device: Device, profile_id: u32) -> Result<Vec<Placement>, Error> {
        let ask = |placements: *mut nvmlGpuInstancePlacement_t, count: *mut u32| {
            let v2 = &self.lib.nvmlDeviceGetGpuInstancePossiblePlacements_v2;
            let v1 = &self.lib.nvmlDeviceGetGpuInstancePossiblePlacements; // what R450 and R460 have
            call("nvmlDeviceGetGpuInstancePossiblePlacements_v2", if v2.is_ok() { v2 } else { v1 }, |f| {
                // SAFETY: null asks for the count; else `array` passes as many items as the count says.
                unsafe { f(device.0, profile_id, placements, count) }
            })
        };
        let mut count = 0;
        ask(null_mut(), &mut count)?;
        let placements = array(count, nvmlGpuInstancePlacement_t { start: 0, size: 0 }, ask)?;
        Ok(placements.into_iter().map(placement).collect())
    }

    /// The live instances of one profile, of which there can be `max_instances`.
    pub(crate) fn gpu_instances(
        &self,
        device: Device,
        profile_id: u32,
        max_instances: u32,
    ) -> Result<Vec<GpuInstanceHandle>, Error> {
        let handles = array(max_instances, null_mut(), |handles, count| {
            call("nvmlDeviceGetGpuInstances", &self.lib.nvmlDeviceGetGpuInstances, |f| {
                // SAFETY: the array holds as many instances as the profile allows, which is what nvml.h asks for.
                unsafe { f(device.0, profile_id, handles, count) }
            })
        })?;
        Ok(handles.into_iter().map(GpuInstanceHandle).collect())
    }

    pub(crate) fn gpu_instance_by_id(&self, device: Device, id: u32) -> Result<GpuInstanceHandle, Error> {
        let mut handle = null_mut();
        call("nvmlDeviceGetGpuInstanceById", &self.lib.nvmlDeviceGetGpuInstanceById, |f| {
            // SAFETY: a live pointer variable.
            unsafe { f(device.0, id, &mut handle) }
        })?;
        Ok(GpuInstanceHandle(handle))
    }

    pub(crate) fn gpu_instance_info(&self, instance: GpuInstanceHandle) -> Result<GpuInstance, Error> {
        let mut info = nvmlGpuInstanceInfo_t::zeroed();
        call("nvmlGpuInstanceGetInfo", &self.lib.nvmlGpuInstanceGetInfo, |f| {
            // SAFETY: a live struct of the function's version.
            unsafe { f(instance.0, &mut info) }
        })?;
        Ok(GpuInstance { id: info.id, profile_id: info.profileId, placement: placement(info.placement) })
    }

    pub(crate) fn create_gpu_instance(
        &self,
        device: Device,
        profile_id: u32,
        at: Placement,
    ) -> Result<GpuInstanceHandle, Error> {
        let at = nvmlGpuInstancePlacement_t { start: at.start, size: at.size };
        let mut handle = null_mut();
        call("nvmlDeviceCreateGpuInstanceWithPlacement", &self.lib.nvmlDeviceCreateGpuInstanceWithPlacement, |f| {
            // SAFETY: a live struct and a live pointer variable.
            unsafe { f(device.0, profile_id, &at, &mut handle) }
        })?;
        Ok(GpuInstanceHandle(handle))
    }

    pub(crate) fn destroy_gpu_instance(&self, instance: GpuInstanceHandle) -> Result<(), Error> {
        // SAFETY: the handle comes from NVML.
        call("nvmlGpuInstanceDestroy", &self.lib.nvmlGpuInstanceDestroy, |f| unsafe { f(instance.0) })
    }

    /// By NVML's enum index.
    pub(crate) fn compute_instance_profile(
        &self,
        instance: GpuInstanceHandle,
        index: u32,
    ) -> Result<ComputeInstanceProfile, Error> {
        let mut info = nvmlComputeInstanceProfileInfo_t::zeroed();
        let symbol = &self.lib.nvmlGpuInstanceGetComputeInstanceProfileInfo;
        call("nvmlGpuInstanceGetComputeInstanceProfileInfo", symbol, |f| {
            // SAFETY: a live struct of the function's version.
            unsafe { f(instance.0, index, NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, &mut info) }
        })?;
        Ok(ComputeInstanceProfile { id: info.id, slices: info.sliceCount, max_instances: info.instanceCount })
    }

    /// The live instances of one profile, of which there can be `max_instances`.
    pub(crate) fn compute_instances(
        &self,
        instance: GpuInstanceHandle,
        profile_id: u32,
        max_instances: u32,
    ) -> Result<Vec<ComputeInstanceHandle>, Error> {
        let handles = array(max_instances, null_mut(), |handles, count| {
            call("nvmlGpuInstanceGetComputeInstances", &self.lib.nvmlGpuInstanceGetComputeInstances, |f| {
                // SAFETY: the array holds as many instances as the profile allows, which is what nvml.h asks for.
                unsafe { f(instance.0, profile_id, handles, count) }
            })
        })?;
        Ok(handles.into_iter().map(ComputeInstanceHandle).collect())
    }

    pub(crate) fn compute_instance_by_id(
        &self,
        instance: GpuInstanceHandle,
        id: u32,
    ) -> Result<ComputeInstanceHandle, Error> {
        let mut handle = null_mut();
        call("nvmlGpuInstanceGetComputeInstanceById", &self.lib.nvmlGpuInstanceGetComputeInstanceById, |f| {
            // SAFETY: a live pointer variable.
            unsafe { f(instance.0, id, &mut handle) }
        })?;
        Ok(ComputeInstanceHandle(handle))
    }

    /// Its id, and the MIG device that it is.
    pub(crate) fn compute_instance_info(&self, instance: ComputeInstanceHandle) -> Result<(u32, Device), Error> {
        let mut info = nvmlComputeInstanceInfo_t::zeroed();
        call("nvmlComputeInstanceGetInfo_v2", &self.lib.nvmlComputeInstanceGetInfo_v2, |f| {
            // SAFETY: a live struct of the function's version.
            unsafe { f(instance.0, &mut info) }
        })?;
        Ok((info.id, Device(info.device)))
    }

    pub(crate) fn create_compute_instance(
        &self,
        instance: GpuInstanceHandle,
        profile_id: u32,
    ) -> Result<ComputeInstanceHandle, Error> {
        let mut handle = null_mut();
        call("nvmlGpuInstanceCreateComputeInstance", &self.lib.nvmlGpuInstanceCreateComputeInstance, |f| {
            // SAFETY: a live pointer variable.
            unsafe { f(instance.0, profile_id, &mut handle) }
        })?;
        Ok(ComputeInstanceHandle(handle))
    }

    pub(crate) fn destroy_compute_instance(&self, instance: ComputeInstanceHandle) -> Result<(), Error> {
        // SAFETY: the handle comes from NVML.
        call("nvmlComputeInstanceDestroy", &self.lib.nvmlComputeInstanceDestroy, |f| unsafe { f(instance.0) })
    }

    /// Of the GPU and all its instances.
    pub(crate) fn compute_processes(&self, device: Device) -> Result<Vec<Process>, Error> {
        let v3 = &self.lib.nvmlDeviceGetComputeRunningProcesses_v3;
        let v2 = &self.lib.nvmlDeviceGetComputeRunningProcesses_v2; // what R450 to R470 have, with the same struct
        let symbol = if v3.is_ok() { v3 } else { v2 };
        let mut capacity = 32;
        let mut tries = 0;
        loop {
            tries += 1;
            let mut wanted = capacity;
            let answer = array(capacity, nvmlProcessInfo_t::zeroed(), |processes, count| {
                call("nvmlDeviceGetComputeRunningProcesses_v3", symbol, |f| {
                    // SAFETY: the array has as many items as `count` says; `array` keeps both alive.
                    let number = unsafe { f(device.0, count, processes) };
                    // SAFETY: the same integer.
                    wanted = unsafe { *count };
                    number
                })
            });
            match answer {
                Err(Error { code: Code::InsufficientSize, .. }) if tries < MAX_TRIES => {
                    // More may start before the next try.
                    capacity = wanted.max(capacity).saturating_mul(2).min(1 << 16);
                }
                answer => return Ok(answer?.iter().map(process).collect()),
            }
        }
    }
}

fn placement(placement: nvmlGpuInstancePlacement_t) -> Placement {
    Placement { start: placement.start, size: placement.size }
}

fn process(info: &nvmlProcessInfo_t) -> Process {
    Process { pid: info.pid, gpu_instance: Some(info.gpuInstanceId).filter(|id| *id != NO_INSTANCE) }
}
