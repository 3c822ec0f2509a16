//! Event sets. Nothing happens yet that would be an event: waiting ends with a time-out.

use std::collections::BTreeSet;
use std::ffi::{c_uint, c_ulonglong};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nvml_wrapper_sys::bindings as sys;

use super::export;
use super::out::Out;
use crate::code::Code;
use crate::handle::Handle;

/// The event sets of this process by handle. They belong to the process, not to the node.
static SETS: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// What can be registered for: critical errors (XID) and changes of the MIG configuration.
const SUPPORTED: c_ulonglong = (sys::nvmlEventTypeXidCriticalError | sys::nvmlEventMigConfigChange) as c_ulonglong;

fn known(set: u64) -> Result<(), Code> {
    let sets = SETS.lock().unwrap_or_else(PoisonError::into_inner);
    if sets.contains(&set) { Ok(()) } else { Err(Code::INVALID_ARGUMENT) }
}

export! {
    fn nvmlEventSetCreate(call) -> u64 {
        call.pass()?;
        let mut sets = SETS.lock().unwrap_or_else(PoisonError::into_inner);
        let set = sets.last().map_or(1, |last| last + 1);
        sets.insert(set);
        Ok(set)
    }

    fn nvmlEventSetFree(call, set: u64) {
        call.pass()?;
        let known = SETS.lock().unwrap_or_else(PoisonError::into_inner).remove(&set);
        if known { Ok(()) } else { Err(Code::INVALID_ARGUMENT) }
    }

    fn nvmlDeviceGetSupportedEventTypes(call, device: Handle) -> c_ulonglong {
        call.device(device).map(|_| SUPPORTED)
    }

    /// Events are registered for on the GPU, never on a MIG device (nvml.h).
    fn nvmlDeviceRegisterEvents(call, device: Handle, types: c_ulonglong, set: u64) {
        known(set)?;
        let mig_device = call.device(device)?.mig_device.is_some();
        if mig_device || types & !SUPPORTED != 0 { Err(Code::NOT_SUPPORTED) } else { Ok(()) }
    }

    fn nvmlEventSetWait | nvmlEventSetWait_v2(call, set: u64, data: Out<sys::nvmlEventData_t>, timeout_ms: c_uint) {
        known(set)?;
        data.given()?;
        call.pass()?;
        std::thread::sleep(Duration::from_millis(timeout_ms.into()));
        call.node()?;
        Err(Code::TIMEOUT)
    }
}

const _: () = assert!(size_of::<sys::nvmlEventData_t>() == 32);
