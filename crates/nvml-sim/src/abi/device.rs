//! What a device is.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings as sys;

use super::export;
use super::out::{Out, field, version_of};
use crate::code::Code;
use crate::handle::{Handle, Target};
use crate::view::Device;
use crate::wire::Op;

const MIB: u64 = 1 << 20;

fn pci_info(device: &Device) -> sys::nvmlPciInfo_t {
    let pci = device.pci;
    let place = format!("{:02X}:{:02X}.0", pci.bus, pci.device);
    sys::nvmlPciInfo_t {
        busIdLegacy: field(&format!("{:04X}:{place}", pci.domain)),
        domain: pci.domain,
        bus: pci.bus,
        device: pci.device,
        pciDeviceId: device.pci_device_id,
        pciSubSystemId: 0,
        busId: field(&format!("{:08X}:{place}", pci.domain)),
    }
}

/// Memory in bytes, all and in use. A GPU in MIG mode tells of its memory as a whole only to who may see every instance
/// on it.
fn memory(call: &super::call::Call, handle: Handle) -> Result<(u64, u64), Code> {
    let device = call.device(handle)?;
    let divided = device.mig.is_some_and(|(current, _)| current) && device.mig_device.is_none();
    if divided && !call.privileged() {
        Err(Code::NO_PERMISSION)
    } else {
        Ok((device.memory_mib * MIB, device.memory_used))
    }
}

/// What two devices meet at (nvml.h, `nvmlGpuTopologyLevel_t`). Each GPU is below a bridge of its own, as `/sys` shows it.
fn common_ancestor(one: &Device, other: &Device) -> sys::nvmlGpuTopologyLevel_t {
    if one.gpu == other.gpu {
        sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_INTERNAL
    } else if one.pcie_root == other.pcie_root {
        sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_HOSTBRIDGE
    } else if one.numa_node.is_some() && one.numa_node == other.numa_node {
        sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_NODE
    } else {
        sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM
    }
}

export! {
    fn nvmlDeviceGetName(call, device: Handle, name: Out<c_char>, length: c_uint) {
        name.text(length, &call.device(device)?.name)
    }

    fn nvmlDeviceGetUUID(call, device: Handle, uuid: Out<c_char>, length: c_uint) {
        uuid.text(length, &call.device(device)?.uuid)
    }

    fn nvmlDeviceGetSerial(call, device: Handle, serial: Out<c_char>, length: c_uint) {
        serial.text(length, &call.device(device)?.serial)
    }

    fn nvmlDeviceGetMinorNumber(call, device: Handle) -> c_uint { Ok(call.device(device)?.minor) }

    fn nvmlDeviceGetIndex(call, device: Handle) -> c_uint {
        let found = call.device(device)?;
        let place = match device.parts().map(|parts| parts.target) {
            Some(Target::Mig { .. }) => call.mig_devices(found.gpu)?.iter().position(|seen| seen.handle == device),
            _ => call.gpus()?.iter().position(|gpu| gpu.handle == found.gpu),
        };
        Ok(place.ok_or(Code::INVALID_ARGUMENT)? as c_uint)
    }

    fn nvmlDeviceGetBrand(call, device: Handle) -> sys::nvmlBrandType_t { Ok(call.device(device)?.brand) }

    fn nvmlDeviceGetArchitecture(call, device: Handle) -> c_uint { Ok(call.device(device)?.architecture) }

    fn nvmlDeviceGetCudaComputeCapability(call, device: Handle, major: Out<c_int>, minor: Out<c_int>) {
        let (found_major, found_minor) = call.device(device)?.compute_capability;
        major.put(found_major)?;
        minor.put(found_minor)
    }

    fn nvmlDeviceGetPciInfo | nvmlDeviceGetPciInfo_v2 | nvmlDeviceGetPciInfo_v3(call, device: Handle)
        -> sys::nvmlPciInfo_t { Ok(pci_info(&call.device(device)?)) }

    fn nvmlDeviceGetBoardId(call, device: Handle) -> c_uint {
        let pci = call.device(device)?.pci;
        Ok(pci.domain << 16 | pci.bus << 8 | pci.device)
    }

    fn nvmlDeviceGetMultiGpuBoard(call, device: Handle) -> c_uint { call.device(device).map(|_| 0) }

    fn nvmlDeviceGetNumaNodeId(call, device: Handle) -> c_uint {
        call.device(device)?.numa_node.ok_or(Code::NOT_SUPPORTED)
    }

    fn nvmlDeviceGetTopologyCommonAncestor(call, one: Handle, other: Handle, level: Out<sys::nvmlGpuTopologyLevel_t>) {
        level.put(common_ancestor(&call.device(one)?, &call.device(other)?))
    }

    fn nvmlDeviceGetVirtualizationMode(call, device: Handle) -> sys::nvmlGpuVirtualizationMode_t {
        Ok(call.device(device)?.virtualization)
    }

    fn nvmlDeviceGetMemoryInfo(call, device: Handle) -> sys::nvmlMemory_t {
        let (total, used) = memory(call, device)?;
        Ok(sys::nvmlMemory_t { total, free: total.saturating_sub(used), used })
    }

    fn nvmlDeviceGetMemoryInfo_v2(call, device: Handle, memory_info: Out<sys::nvmlMemory_v2_t>) {
        let version = version_of::<sys::nvmlMemory_v2_t>(2);
        if memory_info.version()? != version {
            return Err(Code::ARGUMENT_VERSION_MISMATCH);
        }
        let (total, used) = memory(call, device)?;
        let free = total.saturating_sub(used);
        memory_info.put(sys::nvmlMemory_v2_t { version, total, reserved: 0, free, used })
    }

    fn nvmlDeviceGetBAR1MemoryInfo(call, device: Handle) -> sys::nvmlBAR1Memory_t {
        // The window covers the whole memory on GPUs of data centres: the next power of two.
        let total: c_ulonglong = memory(call, device)?.0.next_power_of_two();
        Ok(sys::nvmlBAR1Memory_t { bar1Total: total, bar1Free: total, bar1Used: 0 })
    }

    fn nvmlDeviceGetAttributes | nvmlDeviceGetAttributes_v2(call, device: Handle) -> sys::nvmlDeviceAttributes_t {
        let device = call.device(device)?;
        let made = device.mig_device.ok_or(Code::NOT_SUPPORTED)?;
        Ok(sys::nvmlDeviceAttributes_t {
            multiprocessorCount: made.multiprocessors,
            sharedCopyEngineCount: made.copy_engines,
            sharedDecoderCount: made.decoders,
            sharedEncoderCount: made.encoders,
            sharedJpegCount: made.jpeg_engines,
            sharedOfaCount: made.ofa_engines,
            gpuInstanceSliceCount: made.gi_slices,
            computeInstanceSliceCount: made.ci_slices,
            memorySizeMB: device.memory_mib,
        })
    }

    fn nvmlDeviceGetComputeMode(call, device: Handle) -> sys::nvmlComputeMode_t {
        Ok(call.device(device)?.compute_mode)
    }

    fn nvmlDeviceSetComputeMode(call, device: Handle, mode: sys::nvmlComputeMode_t) {
        call.ask(Op::SetComputeMode(device, mode))
    }

    fn nvmlDeviceGetPersistenceMode(call, device: Handle) -> sys::nvmlEnableState_t {
        Ok(u32::from(call.device(device)?.persistence))
    }

    fn nvmlDeviceSetPersistenceMode(call, device: Handle, mode: sys::nvmlEnableState_t) {
        call.ask(Op::SetPersistence(device, mode != 0))
    }

    /// Nothing shows a picture.
    fn nvmlDeviceGetDisplayMode | nvmlDeviceGetDisplayActive(call, device: Handle) -> sys::nvmlEnableState_t {
        call.device(device).map(|_| 0)
    }
}

const _: () = {
    // Sizes of nvml.h on 64-bit machines.
    assert!(size_of::<sys::nvmlPciInfo_t>() == 68);
    assert!(size_of::<sys::nvmlMemory_t>() == 24);
    assert!(size_of::<sys::nvmlMemory_v2_t>() == 40);
    assert!(version_of::<sys::nvmlMemory_v2_t>(2) == 0x0200_0028);
    assert!(size_of::<sys::nvmlDeviceAttributes_t>() == 40);
    assert!(size_of::<Handle>() == size_of::<sys::nvmlDevice_t>());
};
