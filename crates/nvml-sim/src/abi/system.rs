//! Initialisation, versions, and finding devices.

use std::ffi::{c_char, c_int, c_uint};

use super::call::{initialise, shut_down};
use super::out::{Out, Text};
use super::{Ret, export};
use crate::code::Code;
use crate::handle::Handle;
use crate::view::{NodeGpu, PciAddress};
use crate::wire::Op;

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

/// The handle of a GPU that was found.
fn handle_of(gpu: &NodeGpu) -> Result<Handle, Code> {
    if gpu.broken { Err(Code::GPU_IS_LOST) } else { Ok(gpu.handle) }
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

    fn nvmlSystemGetProcessName(_call, pid: c_uint, name: Out<c_char>, length: c_uint) {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| Code::NOT_FOUND)?;
        let program = line.split(|byte| *byte == 0).next().unwrap_or_default();
        name.text(length, &String::from_utf8_lossy(program))
    }

    fn nvmlDeviceGetCount | nvmlDeviceGetCount_v2(call) -> c_uint {
        Ok(call.gpus()?.len() as c_uint)
    }

    fn nvmlDeviceGetHandleByIndex | nvmlDeviceGetHandleByIndex_v2(call, index: c_uint) -> Handle {
        handle_of(call.gpus()?.get(index as usize).ok_or(Code::INVALID_ARGUMENT)?)
    }

    fn nvmlDeviceGetHandleByPciBusId | nvmlDeviceGetHandleByPciBusId_v2(call, address: Text) -> Handle {
        let address = PciAddress::parse(&address.get()?).ok_or(Code::INVALID_ARGUMENT)?.to_string();
        handle_of(call.gpus()?.iter().find(|gpu| gpu.pci == address).ok_or(Code::NOT_FOUND)?)
    }

    fn nvmlDeviceGetHandleByUUID(call, uuid: Text) -> Handle {
        let uuid = uuid.get()?;
        let gpus = call.gpus()?;
        if let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == uuid) {
            return handle_of(gpu);
        }
        let device: Handle = call.ask(Op::MigByUuid(uuid))?;
        let parent = call.device(device)?.gpu;
        let seen = gpus.iter().any(|gpu| gpu.handle == parent)
            && call.mig_devices(parent)?.iter().any(|seen| seen.handle == device);
        if seen { Ok(device) } else { Err(Code::NOT_FOUND) }
    }

    fn nvmlUnitGetCount(_call) -> c_uint { Ok(0) }

    fn nvmlGetExcludedDeviceCount(_call) -> c_uint { Ok(0) }
}
