//! Compute instances.

use std::ffi::c_uint;

use kerf_mig::Placement;
use nvml_wrapper_sys::bindings as sys;

use super::export;
use super::mig::{get_placement, put_placements};
use super::out::{Out, field, version_of};
use crate::code::Code;
use crate::handle::Handle;
use crate::view::{Ci, CiProfile};
use crate::wire::Op;

type PlacementC = sys::nvmlComputeInstancePlacement_t;

fn profile_v1(found: &CiProfile) -> sys::nvmlComputeInstanceProfileInfo_t {
    let shared = found.shared;
    sys::nvmlComputeInstanceProfileInfo_t {
        id: found.id,
        sliceCount: found.slices,
        instanceCount: found.max_instances,
        multiprocessorCount: found.multiprocessors,
        sharedCopyEngineCount: shared.copy_engines,
        sharedDecoderCount: shared.decoders,
        sharedEncoderCount: shared.encoders,
        sharedJpegCount: shared.jpeg_engines,
        sharedOfaCount: shared.ofa_engines,
    }
}

const V2: c_uint = version_of::<sys::nvmlComputeInstanceProfileInfo_v2_t>(2);
const V3: c_uint = version_of::<sys::nvmlComputeInstanceProfileInfo_v3_t>(3);

export! {
    fn nvmlGpuInstanceGetComputeInstanceProfileInfo(call, gi: Handle, profile: c_uint, engines: c_uint)
        -> sys::nvmlComputeInstanceProfileInfo_t {
        Ok(profile_v1(&call.ask(Op::CiProfile(gi, profile, engines))?))
    }

    fn nvmlGpuInstanceGetComputeInstanceProfileInfoV(
        call, gi: Handle, profile: c_uint, engines: c_uint, info: Out<sys::nvmlComputeInstanceProfileInfo_v2_t>,
    ) {
        let version = info.version()?;
        if ![V2, V3].contains(&version) {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        let found: CiProfile = call.ask(Op::CiProfile(gi, profile, engines))?;
        let v1 = profile_v1(&found);
        let v2 = sys::nvmlComputeInstanceProfileInfo_v2_t {
            version,
            id: v1.id,
            sliceCount: v1.sliceCount,
            instanceCount: v1.instanceCount,
            multiprocessorCount: v1.multiprocessorCount,
            sharedCopyEngineCount: v1.sharedCopyEngineCount,
            sharedDecoderCount: v1.sharedDecoderCount,
            sharedEncoderCount: v1.sharedEncoderCount,
            sharedJpegCount: v1.sharedJpegCount,
            sharedOfaCount: v1.sharedOfaCount,
            name: field(&format!("MIG {}", found.name)),
        };
        info.put(v2)?; // version 3 begins alike ...
        if version == V3 {
            let info = info.cast::<sys::nvmlComputeInstanceProfileInfo_v3_t>();
            info.put(sys::nvmlComputeInstanceProfileInfo_v3_t { capabilities: 0, ..info.get()? })?; // ... and has this
        }
        Ok(())
    }

    fn nvmlGpuInstanceGetComputeInstancePossiblePlacements(
        call, gi: Handle, profile: c_uint, array: Out<PlacementC>, count: Out<c_uint>,
    ) {
        let found: Vec<Placement> = call.ask(Op::CiPlacements(gi, profile))?;
        put_placements(&found, array.cast(), count)
    }

    fn nvmlGpuInstanceGetComputeInstanceRemainingCapacity(call, gi: Handle, profile: c_uint) -> c_uint {
        call.ask(Op::CiCapacity(gi, profile))
    }

    fn nvmlGpuInstanceCreateComputeInstance(call, gi: Handle, profile: c_uint) -> Handle {
        Ok(call.ask::<Ci>(Op::CreateCi(gi, profile, None))?.handle)
    }

    fn nvmlGpuInstanceCreateComputeInstanceWithPlacement(
        call, gi: Handle, profile: c_uint, placement: Out<PlacementC>,
    ) -> Handle {
        let placement = get_placement(placement.cast())?;
        Ok(call.ask::<Ci>(Op::CreateCi(gi, profile, Some(placement)))?.handle)
    }

    fn nvmlComputeInstanceDestroy(call, ci: Handle) { call.ask(Op::DestroyCi(ci)) }

    /// The array holds as many as there can be of the profile (nvml.h); its size is not said.
    fn nvmlGpuInstanceGetComputeInstances(call, gi: Handle, profile: c_uint, array: Out<Handle>, count: Out<c_uint>) {
        let found: Vec<Ci> = call.ask(Op::Cis(gi, profile))?;
        let found: Vec<Handle> = found.iter().map(|ci| ci.handle).collect();
        array.list(found.len(), count, &found)
    }

    fn nvmlGpuInstanceGetComputeInstanceById(call, gi: Handle, id: c_uint) -> Handle {
        Ok(call.ask::<Ci>(Op::CiById(gi, id))?.handle)
    }

    /// `device` is the MIG device that the compute instance is. The header says "parent device"; programs rely on this.
    fn nvmlComputeInstanceGetInfo | nvmlComputeInstanceGetInfo_v2(call, ci: Handle)
        -> sys::nvmlComputeInstanceInfo_t {
        let ci: Ci = call.ask(Op::Ci(ci))?;
        Ok(sys::nvmlComputeInstanceInfo_t {
            device: ci.device.as_ptr(),
            gpuInstance: ci.gpu_instance.as_ptr(),
            id: ci.id,
            profileId: ci.profile,
            placement: PlacementC { start: ci.placement.start, size: ci.placement.size },
        })
    }
}

const _: () = {
    // Sizes and version words of nvml.h on 64-bit machines.
    assert!(size_of::<sys::nvmlComputeInstanceProfileInfo_t>() == 36);
    assert!(V2 == 0x0200_0088 && V3 == 0x0300_008c);
    assert!(size_of::<PlacementC>() == 8);
    assert!(size_of::<sys::nvmlComputeInstanceInfo_t>() == 32);
};
