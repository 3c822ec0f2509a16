//! MIG mode, MIG devices and GPU instances.

use std::ffi::c_uint;

use kerf_mig::Placement;
use nvml_wrapper_sys::bindings as sys;

use super::call::Call;
use super::export;
use super::out::{Out, field, version_of};
use crate::code::Code;
use crate::handle::Handle;
use crate::view::{Gi, GiProfile, GiProfileKey};
use crate::wire::Op;

type PlacementC = sys::nvmlGpuInstancePlacement_t;

fn profile_v1(found: &GiProfile) -> sys::nvmlGpuInstanceProfileInfo_t {
    let (profile, engines) = (&found.profile, found.profile.engines);
    sys::nvmlGpuInstanceProfileInfo_t {
        id: profile.id,
        isP2pSupported: 0,
        sliceCount: profile.compute_slices,
        instanceCount: profile.max_instances,
        multiprocessorCount: engines.multiprocessors,
        copyEngineCount: engines.copy_engines,
        decoderCount: engines.decoders,
        encoderCount: engines.encoders,
        jpegCount: engines.jpeg_engines,
        ofaCount: engines.ofa_engines,
        memorySizeMB: profile.memory_mib,
    }
}

const V2: c_uint = version_of::<sys::nvmlGpuInstanceProfileInfo_v2_t>(2);
const V3: c_uint = version_of::<sys::nvmlGpuInstanceProfileInfo_v3_t>(3);

/// The versioned call: which structure the caller has is said by its version word.
fn profile_versioned(
    call: &Call,
    device: Handle,
    key: GiProfileKey,
    info: Out<sys::nvmlGpuInstanceProfileInfo_v2_t>,
) -> Result<(), Code> {
    let version = info.version()?;
    if ![V2, V3].contains(&version) {
        return Err(Code::ARGUMENT_VERSION_MISMATCH);
    }
    let found: GiProfile = call.ask(Op::GiProfile(device, key))?;
    let (v1, name) = (profile_v1(&found), field(&format!("MIG {}", found.profile.name)));
    if version == V2 {
        info.put(sys::nvmlGpuInstanceProfileInfo_v2_t {
            version,
            id: v1.id,
            isP2pSupported: v1.isP2pSupported,
            sliceCount: v1.sliceCount,
            instanceCount: v1.instanceCount,
            multiprocessorCount: v1.multiprocessorCount,
            copyEngineCount: v1.copyEngineCount,
            decoderCount: v1.decoderCount,
            encoderCount: v1.encoderCount,
            jpegCount: v1.jpegCount,
            ofaCount: v1.ofaCount,
            memorySizeMB: v1.memorySizeMB,
            name,
        })
    } else {
        info.cast().put(sys::nvmlGpuInstanceProfileInfo_v3_t {
            version,
            id: v1.id,
            sliceCount: v1.sliceCount,
            instanceCount: v1.instanceCount,
            multiprocessorCount: v1.multiprocessorCount,
            copyEngineCount: v1.copyEngineCount,
            decoderCount: v1.decoderCount,
            encoderCount: v1.encoderCount,
            jpegCount: v1.jpegCount,
            ofaCount: v1.ofaCount,
            memorySizeMB: v1.memorySizeMB,
            name,
            capabilities: found.capabilities,
        })
    }
}

/// Placements go into an array whose size the caller said in `count`; without an array, only their number is told.
pub(super) fn put_placements(found: &[Placement], array: Out<PlacementC>, count: Out<c_uint>) -> Result<(), Code> {
    if array.is_null() {
        return count.put(found.len() as c_uint);
    }
    let found: Vec<PlacementC> = found.iter().map(|p| PlacementC { start: p.start, size: p.size }).collect();
    array.list(count.get()? as usize, count, &found)
}

pub(super) fn get_placement(wanted: Out<PlacementC>) -> Result<Placement, Code> {
    let PlacementC { start, size } = wanted.get()?;
    Ok(Placement { start, size })
}

export! {
    fn nvmlDeviceGetMigMode(call, device: Handle, current: Out<c_uint>, pending: Out<c_uint>) {
        let (now, later) = call.device(device)?.mig.ok_or(Code::NOT_SUPPORTED)?;
        current.put(now.into())?;
        pending.put(later.into())
    }

    fn nvmlDeviceSetMigMode(call, device: Handle, mode: c_uint) -> sys::nvmlReturn_t {
        match mode {
            0 | 1 => call.ask(Op::SetMigMode(device, mode == 1)),
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    fn nvmlDeviceGetMaxMigDeviceCount(call, device: Handle) -> c_uint { Ok(call.device(device)?.max_mig_devices) }

    fn nvmlDeviceGetMigDeviceHandleByIndex(call, device: Handle, index: c_uint) -> Handle {
        Ok(call.mig_devices(device)?.get(index as usize).ok_or(Code::NOT_FOUND)?.handle)
    }

    fn nvmlDeviceIsMigDeviceHandle(call, device: Handle) -> c_uint {
        Ok(call.device(device)?.mig_device.is_some().into())
    }

    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(call, device: Handle) -> Handle {
        let device = call.device(device)?;
        if device.mig_device.is_some() { Ok(device.gpu) } else { Err(Code::INVALID_ARGUMENT) }
    }

    fn nvmlDeviceGetGpuInstanceId(call, device: Handle) -> c_uint {
        Ok(call.device(device)?.mig_device.ok_or(Code::NOT_SUPPORTED)?.gi)
    }

    fn nvmlDeviceGetComputeInstanceId(call, device: Handle) -> c_uint {
        Ok(call.device(device)?.mig_device.ok_or(Code::NOT_SUPPORTED)?.ci)
    }

    fn nvmlDeviceGetGpuInstanceProfileInfo(call, device: Handle, profile: c_uint)
        -> sys::nvmlGpuInstanceProfileInfo_t {
        Ok(profile_v1(&call.ask(Op::GiProfile(device, GiProfileKey::Index(profile)))?))
    }

    fn nvmlDeviceGetGpuInstanceProfileInfoV(
        call, device: Handle, profile: c_uint, info: Out<sys::nvmlGpuInstanceProfileInfo_v2_t>,
    ) {
        profile_versioned(call, device, GiProfileKey::IndexMigOn(profile), info)
    }

    fn nvmlDeviceGetGpuInstanceProfileInfoByIdV(
        call, device: Handle, profile: c_uint, info: Out<sys::nvmlGpuInstanceProfileInfo_v2_t>,
    ) {
        profile_versioned(call, device, GiProfileKey::IdMigOn(profile), info)
    }

    fn nvmlDeviceGetGpuInstancePossiblePlacements | nvmlDeviceGetGpuInstancePossiblePlacements_v2(
        call, device: Handle, profile: c_uint, array: Out<PlacementC>, count: Out<c_uint>,
    ) {
        let found: Vec<Placement> = call.ask(Op::GiPlacements(device, profile))?;
        put_placements(&found, array, count)
    }

    fn nvmlDeviceGetGpuInstanceRemainingCapacity(call, device: Handle, profile: c_uint) -> c_uint {
        call.ask(Op::GiCapacity(device, profile))
    }

    fn nvmlDeviceCreateGpuInstance(call, device: Handle, profile: c_uint) -> Handle {
        Ok(call.ask::<Gi>(Op::CreateGi(device, profile, None))?.handle)
    }

    fn nvmlDeviceCreateGpuInstanceWithPlacement(call, device: Handle, profile: c_uint, placement: Out<PlacementC>)
        -> Handle {
        Ok(call.ask::<Gi>(Op::CreateGi(device, profile, Some(get_placement(placement)?)))?.handle)
    }

    fn nvmlGpuInstanceDestroy(call, gi: Handle) { call.ask(Op::DestroyGi(gi)) }

    /// The array holds as many as there can be of the profile (nvml.h); its size is not said.
    fn nvmlDeviceGetGpuInstances(call, device: Handle, profile: c_uint, array: Out<Handle>, count: Out<c_uint>) {
        let found: Vec<Gi> = call.ask(Op::Gis(device, profile))?;
        let found: Vec<Handle> = found.iter().map(|gi| gi.handle).collect();
        array.list(found.len(), count, &found)
    }

    fn nvmlDeviceGetGpuInstanceById(call, device: Handle, id: c_uint) -> Handle {
        Ok(call.ask::<Gi>(Op::GiById(device, id))?.handle)
    }

    fn nvmlGpuInstanceGetInfo(call, gi: Handle) -> sys::nvmlGpuInstanceInfo_t {
        let gi: Gi = call.ask(Op::Gi(gi))?;
        Ok(sys::nvmlGpuInstanceInfo_t {
            device: gi.gpu.as_ptr(),
            id: gi.id,
            profileId: gi.profile,
            placement: PlacementC { start: gi.placement.start, size: gi.placement.size },
        })
    }
}

const _: () = {
    // Sizes and version words of nvml.h on 64-bit machines.
    assert!(size_of::<sys::nvmlGpuInstanceProfileInfo_t>() == 48);
    assert!(V2 == 0x0200_0098 && V3 == 0x0300_0098);
    assert!(size_of::<PlacementC>() == 8);
    assert!(size_of::<sys::nvmlGpuInstanceInfo_t>() == 24);
};
