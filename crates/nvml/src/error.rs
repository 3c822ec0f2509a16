//! One error type: which call, on what, which code.

use std::fmt;

/// NVML's return codes that kerf tells apart (nvml.h, `nvmlReturn_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Code {
    /// 1: the library is not initialised.
    Uninitialized,
    /// 2: an argument is invalid, or a handle is stale.
    InvalidArgument,
    /// 3: the GPU or the driver cannot do it, or not in its present mode.
    NotSupported,
    /// 4: the caller may not do it.
    NoPermission,
    /// 6: no such instance or GPU.
    NotFound,
    /// 10: no answer in time.
    Timeout,
    /// 13: the library does not have this function.
    FunctionNotFound,
    /// 15: the GPU fell off the bus.
    GpuIsLost,
    /// 16: the GPU must be reset first.
    ResetRequired,
    /// 19: in use by another client.
    InUse,
    /// 23: no room, or this very instance exists already.
    InsufficientResources,
    /// Any other code, by its number.
    Other(u32),
}

/// A failed NVML call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The NVML function.
    pub call: &'static str,
    /// What it said.
    pub code: Code,
}

impl std::error::Error for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed: {}", self.call, self.code)
    }
}
