//! Processes on a device. No CUDA program can run on a simulated GPU: the lists show those that were put there.

use std::ffi::{c_uint, c_void};

use nvml_wrapper_sys::bindings as sys;

use super::call::Call;
use super::export;
use super::out::Out;
use crate::code::Code;
use crate::handle::Handle;
use crate::view::Process;
use crate::wire::Op;

/// What stands for "in no instance" (nvml.h: 0xFFFFFFFF where MIG is off).
const NO_INSTANCE: c_uint = c_uint::MAX;

/// A GPU in MIG mode lists what runs in its instances only to who may see every instance on it (nvml.h).
fn processes(call: &Call, handle: Handle) -> Result<Vec<Process>, Code> {
    let device = call.device(handle)?;
    let divided = device.mig.is_some_and(|(current, _)| current) && device.mig_device.is_none();
    if divided && !call.privileged() { Err(Code::NO_PERMISSION) } else { call.ask(Op::Processes(handle)) }
}

fn v1(process: &Process) -> sys::nvmlProcessInfo_v1_t {
    sys::nvmlProcessInfo_v1_t { pid: process.pid, usedGpuMemory: process.memory }
}

/// Versions 2 and 3 have the same structure.
fn v2(process: &Process) -> sys::nvmlProcessInfo_v2_t {
    sys::nvmlProcessInfo_v2_t {
        pid: process.pid,
        usedGpuMemory: process.memory,
        gpuInstanceId: process.gi.unwrap_or(NO_INSTANCE),
        computeInstanceId: process.ci.unwrap_or(NO_INSTANCE),
    }
}

/// How many there are goes to `count`, which says before how many fit; with 0 there need be no array (nvml.h).
fn list<T: Copy>(found: &[Process], count: Out<c_uint>, infos: Out<T>, info: fn(&Process) -> T) -> Result<(), Code> {
    let found: Vec<T> = found.iter().map(info).collect();
    infos.list(count.get()? as usize, count, &found)
}

export! {
    fn nvmlDeviceGetComputeRunningProcesses(
        call, device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_v1_t>,
    ) {
        list(&processes(call, device)?, count, infos, v1)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v2 | nvmlDeviceGetComputeRunningProcesses_v3(
        call, device: Handle, count: Out<c_uint>, infos: Out<sys::nvmlProcessInfo_v2_t>,
    ) {
        list(&processes(call, device)?, count, infos, v2)
    }

    /// What runs here computes, and not through MPS.
    fn nvmlDeviceGetGraphicsRunningProcesses
        | nvmlDeviceGetGraphicsRunningProcesses_v2
        | nvmlDeviceGetGraphicsRunningProcesses_v3
        | nvmlDeviceGetMPSComputeRunningProcesses
        | nvmlDeviceGetMPSComputeRunningProcesses_v2
        | nvmlDeviceGetMPSComputeRunningProcesses_v3(call, device: Handle, count: Out<c_uint>, _infos: Out<c_void>) {
        call.device(device)?;
        count.put(0)
    }

    fn nvmlDeviceGetAccountingMode(call, device: Handle) -> sys::nvmlEnableState_t {
        call.device(device).map(|_| 0)
    }
}

const _: () = {
    // Sizes of nvml.h on 64-bit machines.
    assert!(size_of::<sys::nvmlProcessInfo_v1_t>() == 16);
    assert!(size_of::<sys::nvmlProcessInfo_v2_t>() == 24);
};
