//! NVML's return codes.

use nvml_wrapper_sys::bindings as sys;
use serde::{Deserialize, Serialize};

/// A failure as NVML reports it (`nvmlReturn_t`, never `NVML_SUCCESS`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Code(pub u32);

/// The names of nvml.h, without `NVML_ERROR_`.
const NAMES: [(&str, u32); 31] = [
    ("UNINITIALIZED", sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED),
    ("INVALID_ARGUMENT", sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT),
    ("NOT_SUPPORTED", sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED),
    ("NO_PERMISSION", sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION),
    ("ALREADY_INITIALIZED", sys::nvmlReturn_enum_NVML_ERROR_ALREADY_INITIALIZED),
    ("NOT_FOUND", sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND),
    ("INSUFFICIENT_SIZE", sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE),
    ("INSUFFICIENT_POWER", sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_POWER),
    ("DRIVER_NOT_LOADED", sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED),
    ("TIMEOUT", sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT),
    ("IRQ_ISSUE", sys::nvmlReturn_enum_NVML_ERROR_IRQ_ISSUE),
    ("LIBRARY_NOT_FOUND", sys::nvmlReturn_enum_NVML_ERROR_LIBRARY_NOT_FOUND),
    ("FUNCTION_NOT_FOUND", sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND),
    ("CORRUPTED_INFOROM", sys::nvmlReturn_enum_NVML_ERROR_CORRUPTED_INFOROM),
    ("GPU_IS_LOST", sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST),
    ("RESET_REQUIRED", sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED),
    ("OPERATING_SYSTEM", sys::nvmlReturn_enum_NVML_ERROR_OPERATING_SYSTEM),
    ("LIB_RM_VERSION_MISMATCH", sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH),
    ("IN_USE", sys::nvmlReturn_enum_NVML_ERROR_IN_USE),
    ("MEMORY", sys::nvmlReturn_enum_NVML_ERROR_MEMORY),
    ("NO_DATA", sys::nvmlReturn_enum_NVML_ERROR_NO_DATA),
    ("VGPU_ECC_NOT_SUPPORTED", sys::nvmlReturn_enum_NVML_ERROR_VGPU_ECC_NOT_SUPPORTED),
    ("INSUFFICIENT_RESOURCES", sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES),
    ("FREQ_NOT_SUPPORTED", sys::nvmlReturn_enum_NVML_ERROR_FREQ_NOT_SUPPORTED),
    ("ARGUMENT_VERSION_MISMATCH", sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH),
    ("DEPRECATED", sys::nvmlReturn_enum_NVML_ERROR_DEPRECATED),
    ("NOT_READY", sys::nvmlReturn_enum_NVML_ERROR_NOT_READY),
    ("GPU_NOT_FOUND", sys::nvmlReturn_enum_NVML_ERROR_GPU_NOT_FOUND),
    ("INVALID_STATE", sys::nvmlReturn_enum_NVML_ERROR_INVALID_STATE),
    ("RESET_TYPE_NOT_SUPPORTED", sys::nvmlReturn_enum_NVML_ERROR_RESET_TYPE_NOT_SUPPORTED),
    ("UNKNOWN", sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN),
];

impl Code {
    /// The library was not initialised.
    pub const UNINITIALIZED: Code = Code(sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
    /// An argument is out of range, a pointer is null, or a handle is stale.
    pub const INVALID_ARGUMENT: Code = Code(sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
    /// The GPU cannot do it, or not in its present mode.
    pub const NOT_SUPPORTED: Code = Code(sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED);
    /// The caller may not do it.
    pub const NO_PERMISSION: Code = Code(sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION);
    /// No such instance or GPU.
    pub const NOT_FOUND: Code = Code(sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND);
    /// The caller's buffer is too small.
    pub const INSUFFICIENT_SIZE: Code = Code(sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
    /// No daemon answers.
    pub const DRIVER_NOT_LOADED: Code = Code(sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED);
    /// Nothing happened in time.
    pub const TIMEOUT: Code = Code(sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT);
    /// The GPU fell off the bus.
    pub const GPU_IS_LOST: Code = Code(sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST);
    /// The change waits for a reset that is not available here.
    pub const RESET_REQUIRED: Code = Code(sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED);
    /// Library and daemon do not speak the same version of their protocol.
    pub const LIB_RM_VERSION_MISMATCH: Code = Code(sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH);
    /// Something still uses it.
    pub const IN_USE: Code = Code(sys::nvmlReturn_enum_NVML_ERROR_IN_USE);
    /// No room, or this very instance exists already.
    pub const INSUFFICIENT_RESOURCES: Code = Code(sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES);
    /// The version word of a structure is not one of those known.
    pub const ARGUMENT_VERSION_MISMATCH: Code = Code(sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    /// Anything else.
    pub const UNKNOWN: Code = Code(sys::nvmlReturn_enum_NVML_ERROR_UNKNOWN);

    /// The failure of this name in nvml.h, with or without `NVML_ERROR_`.
    pub fn by_name(name: &str) -> Option<Code> {
        let name = name.strip_prefix("NVML_ERROR_").unwrap_or(name);
        NAMES.iter().find(|(known, _)| *known == name).map(|(_, code)| Code(*code))
    }

    /// Its name in nvml.h, without `NVML_ERROR_`.
    pub fn name(self) -> Option<&'static str> {
        NAMES.iter().find(|(_, code)| *code == self.0).map(|(name, _)| *name)
    }

    /// The text of `nvmlErrorString` (nvml.h's description of each code), as a C string.
    pub fn text(self) -> &'static std::ffi::CStr {
        match self.0 {
            sys::nvmlReturn_enum_NVML_SUCCESS => c"Success",
            sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED => c"Uninitialized",
            sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT => c"Invalid Argument",
            sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED => c"Not Supported",
            sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION => c"Insufficient Permissions",
            sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND => c"Not Found",
            sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE => c"Insufficient Size",
            sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED => c"Driver Not Loaded",
            sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT => c"Timeout",
            sys::nvmlReturn_enum_NVML_ERROR_LIBRARY_NOT_FOUND => c"NVML Shared Library Not Found",
            sys::nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND => c"Function Not Found",
            sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST => c"GPU is lost",
            sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED => c"GPU requires reset",
            sys::nvmlReturn_enum_NVML_ERROR_OPERATING_SYSTEM => c"The operating system has blocked the request",
            sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH => c"Driver/library version mismatch",
            sys::nvmlReturn_enum_NVML_ERROR_IN_USE => c"In use by another client",
            sys::nvmlReturn_enum_NVML_ERROR_MEMORY => c"Insufficient Memory",
            sys::nvmlReturn_enum_NVML_ERROR_NO_DATA => c"No data",
            sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES => c"Insufficient Resources",
            sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH => c"Argument version mismatch",
            sys::nvmlReturn_enum_NVML_ERROR_INVALID_STATE => c"Invalid State",
            _ => c"Unknown Error",
        }
    }
}

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.text().to_string_lossy(), self.0)
    }
}

impl std::error::Error for Code {}
