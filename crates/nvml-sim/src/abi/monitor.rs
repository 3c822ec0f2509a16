//! What a device does at the moment: nothing, it is idle and cool.
//!
//! Under MIG the driver tells utilisation neither of the GPU nor of its instances (nvml.h).

use std::ffi::{c_int, c_uint};

use nvml_wrapper_sys::bindings as sys;

use super::export;
use super::out::Out;
use crate::code::Code;
use crate::handle::Handle;

/// Temperature of an idle GPU in degrees Celsius.
const IDLE_TEMPERATURE: c_uint = 30;

/// Utilisation in percent, of a GPU that is not divided.
fn idle(call: &super::call::Call, device: Handle) -> Result<c_uint, Code> {
    let divided = call.device(device)?.mig.is_some_and(|(current, _)| current);
    if divided { Err(Code::NOT_SUPPORTED) } else { Ok(0) }
}

export! {
    fn nvmlDeviceGetTemperature(call, device: Handle, sensor: sys::nvmlTemperatureSensors_t) -> c_uint {
        if sensor != sys::nvmlTemperatureSensors_enum_NVML_TEMPERATURE_GPU {
            return Err(Code::INVALID_ARGUMENT);
        }
        call.device(device).map(|_| IDLE_TEMPERATURE)
    }

    fn nvmlDeviceGetPerformanceState | nvmlDeviceGetPowerState(call, device: Handle) -> sys::nvmlPstates_t {
        call.device(device).map(|_| sys::nvmlPStates_enum_NVML_PSTATE_0)
    }

    fn nvmlDeviceGetUtilizationRates(call, device: Handle) -> sys::nvmlUtilization_t {
        idle(call, device).map(|percent| sys::nvmlUtilization_t { gpu: percent, memory: percent })
    }

    /// Each value has a result of its own.
    fn nvmlDeviceGetFieldValues(call, device: Handle, count: c_int, values: Out<sys::nvmlFieldValue_t>) {
        let device = call.device(device)?;
        let switchable = u32::from(device.mig_switchable);
        for index in 0..usize::try_from(count).map_err(|_| Code::INVALID_ARGUMENT)? {
            let mut value = values.at(index).get()?;
            let answer = match value.fieldId {
                sys::field_id::NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED
                | sys::field_id::NVML_FI_DEV_IS_MIG_MODE_INDEPENDENT_MIG_QUERY_CAPABLE => Ok(switchable),
                _ => Err(Code::NOT_SUPPORTED),
            };
            value.nvmlReturn = answer.err().map_or(0, |code| code.0);
            if let Ok(number) = answer {
                value.valueType = sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT;
                value.value = sys::nvmlValue_t { uiVal: number };
            }
            values.at(index).put(value)?;
        }
        Ok(())
    }
}
