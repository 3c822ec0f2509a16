//! Initialisation, versions, and finding devices.

use std::ffi::{c_char, c_int, c_uint};

use super::call::{initialise, shut_down};
use super::out::{Out, Text};
use super::{Ret, export};
use crate::code::Code;
use crate::handle::Handle;
use crate::view::PciAddress;
use crate::wire::Op;

/// What has to work before anything is initialised.
pub(super) const LIFE: &[&str] = &["nvmlInit", "nvmlInit_v2", "nvmlInitWithFlags", "nvmlShutdown"];

#[unsafe(no_mangle)]
extern "C" fn nvmlInit() -> Ret {
    initialise("nvmlInit")
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> Ret {
    initialise("nvmlInit_v2")
}

/// The flags are about GPUs that are missing or attached late, of which there are none.
#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> Ret {
    initialise("nvmlInitWithFlags")
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> Ret {
    shut_down()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: Ret) -> *const c_char {
    Code(code).text().as_ptr()
}

export! {
    fn nvmlSystemGetDriverVersion(call, version: Out<c_char>, length: c_uint) {
        version.text(length, &call.node()?.driver_version)
    }

    fn nvmlSystemGetNVMLVersion(call, version: Out<c_char>, length: c_uint) {
        let node = call.node()?;
        version.text(length, &format!("{}.{}", node.cuda_driver_version / 1000, node.driver_version))
    }

    fn nvmlSystemGetCudaDriverVersion | nvmlSystemGetCudaDriverVersion_v2(call) -> c_int {
        Ok(call.node()?.cuda_driver_version)
    }

    fn nvmlSystemGetProcessName(call, pid: c_uint, name: Out<c_char>, length: c_uint) {
        if let Some(found) = call.ask::<Option<String>>(Op::ProcessName(pid))? {
            return name.text(length, &found);
        }
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| Code::NOT_FOUND)?;
        let program = line.split(|byte| *byte == 0).next().unwrap_or_default();
        name.text(length, &String::from_utf8_lossy(program))
    }

    /// A GPU that fell off the bus is counted and keeps its index; getting its handle fails (nvml.h names GPU_IS_LOST
    /// among the codes of that call, not of this one). Whether a library that is initialised later still counts it is
    /// not published.
    fn nvmlDeviceGetCount | nvmlDeviceGetCount_v2(call) -> c_uint {
        Ok(call.gpus()?.len() as c_uint)
    }

    fn nvmlDeviceGetHandleByIndex | nvmlDeviceGetHandleByIndex_v2(call, index: c_uint) -> Handle {
        call.found(call.gpus_before()?.get(index as usize).map(|gpu| gpu.handle), Code::INVALID_ARGUMENT)
    }

    fn nvmlDeviceGetHandleByPciBusId | nvmlDeviceGetHandleByPciBusId_v2(call, address: Text) -> Handle {
        let address = PciAddress::parse(&address.get()?).ok_or(Code::INVALID_ARGUMENT)?.to_string();
        let gpus = call.gpus_before()?;
        call.found(gpus.iter().find(|gpu| gpu.pci == address).map(|gpu| gpu.handle), Code::NOT_FOUND)
    }

    fn nvmlDeviceGetHandleByUUID(call, uuid: Text) -> Handle {
        let uuid = uuid.get()?;
        let gpus = call.gpus_before()?;
        if let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == uuid) {
            return call.found(Some(gpu.handle), Code::NOT_FOUND);
        }
        let device = call.found(call.ask_before(Op::MigByUuid(uuid)).ok(), Code::NOT_FOUND)?;
        let parent = call.device(device)?.gpu;
        let seen = gpus.iter().any(|gpu| gpu.handle == parent)
            && call.mig_devices(parent)?.iter().any(|seen| seen.handle == device);
        if seen { Ok(device) } else { Err(Code::NOT_FOUND) }
    }

    fn nvmlUnitGetCount(call) -> c_uint { call.pass().map(|()| 0) }

    fn nvmlGetExcludedDeviceCount(call) -> c_uint { call.pass().map(|()| 0) }
}
