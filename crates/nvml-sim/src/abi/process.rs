//! Processes on a device. No CUDA program can run on a simulated GPU, so there are none: every list is empty.

use std::ffi::{c_uint, c_void};

use nvml_wrapper_sys::bindings as sys;

use super::export;
use super::out::Out;
use crate::handle::Handle;

export! {
    fn nvmlDeviceGetComputeRunningProcesses
        | nvmlDeviceGetComputeRunningProcesses_v2
        | nvmlDeviceGetComputeRunningProcesses_v3
        | nvmlDeviceGetGraphicsRunningProcesses
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
