//! One error type: which call failed, with which code.

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
    /// 7: the caller's array is too small.
    InsufficientSize,
    /// 9: the kernel module is not loaded.
    DriverNotLoaded,
    /// 10: no answer in time.
    Timeout,
    /// 13: the library does not have this function.
    FunctionNotFound,
    /// 15: the GPU fell off the bus.
    GpuIsLost,
    /// 16: the GPU must be reset first.
    ResetRequired,
    /// 18: library and kernel module are of different versions.
    VersionMismatch,
    /// 19: in use by another client.
    InUse,
    /// 23: no room, or this very instance exists already.
    InsufficientResources,
    /// 999: an internal error of the driver.
    Unknown,
    /// Any other code, by its number.
    Other(u32),
}

/// The codes with a variant of their own, and what to call them.
const CODES: [(u32, Code, &str); 15] = [
    (1, Code::Uninitialized, "the library is not initialised"),
    (2, Code::InvalidArgument, "invalid argument"),
    (3, Code::NotSupported, "not supported"),
    (4, Code::NoPermission, "no permission"),
    (6, Code::NotFound, "not found"),
    (7, Code::InsufficientSize, "the array is too small"),
    (9, Code::DriverNotLoaded, "the NVIDIA kernel module is not loaded"),
    (10, Code::Timeout, "timed out"),
    (13, Code::FunctionNotFound, "this driver's library has no such function"),
    (15, Code::GpuIsLost, "the GPU is lost"),
    (16, Code::ResetRequired, "the GPU must be reset"),
    (18, Code::VersionMismatch, "library and kernel module are of different versions"),
    (19, Code::InUse, "in use by another client"),
    (23, Code::InsufficientResources, "insufficient resources"),
    (999, Code::Unknown, "unknown error"),
];

impl From<u32> for Code {
    /// The code with this number.
    fn from(number: u32) -> Self {
        CODES.iter().find(|(known, ..)| *known == number).map_or(Code::Other(number), |(_, code, _)| *code)
    }
}

impl Code {
    fn known(self) -> Option<&'static (u32, Code, &'static str)> {
        CODES.iter().find(|(_, code, _)| *code == self)
    }

    /// NVML's number of the code.
    pub fn number(self) -> u32 {
        match self {
            Code::Other(number) => number,
            code => code.known().map_or(999, |(number, ..)| *number),
        }
    }

    /// What the reader can do about it, where that is not plain from the code.
    fn hint(self) -> Option<&'static str> {
        match self {
            Code::InUse => Some(
                "a process may hold it without being listed: CUDA programs, DCGM, other monitoring agents and device \
                 plugins",
            ),
            Code::NoPermission => Some("MIG is administered by root with CAP_SYS_ADMIN"),
            Code::GpuIsLost => {
                Some("it fell off the bus: look for Xid 79 in the kernel log; the node must be restarted")
            }
            Code::DriverNotLoaded => Some("is nvidia.ko loaded, and /dev/nvidiactl there?"),
            Code::VersionMismatch => Some("the driver was updated under a loaded kernel module: reload it or reboot"),
            _ => None,
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.known().map_or("error", |(.., text)| text);
        write!(f, "{text} ({})", self.number())
    }
}

/// A failed NVML call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The NVML function.
    pub call: &'static str,
    /// What it said.
    pub code: Code,
}

impl Error {
    /// Whether what the call named is not there: NOT_FOUND, or NOT_SUPPORTED because MIG is off, which takes every
    /// instance with it.
    pub fn is_gone(&self) -> bool {
        matches!(self.code, Code::NotFound | Code::NotSupported)
    }
}

impl std::error::Error for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed: {}", self.call, self.code)?;
        self.code.hint().map_or(Ok(()), |hint| write!(f, "; {hint}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_survives_the_round_trip() {
        for number in (1..=30).chain([999, 1000, u32::MAX]) {
            assert_eq!(Code::from(number).number(), number);
        }
        assert_eq!(Code::from(19), Code::InUse);
        assert_eq!(Code::from(23), Code::InsufficientResources);
        assert_eq!(Code::from(25), Code::Other(25));
    }

    #[test]
    fn an_error_says_which_call_which_code_and_what_to_look_at() {
        let error = Error { call: "nvmlGpuInstanceDestroy", code: Code::InUse };
        let text = error.to_string();
        assert!(text.starts_with("nvmlGpuInstanceDestroy failed: in use by another client (19); "), "{text}");
        assert!(text.contains("DCGM"), "{text}");

        let error = Error { call: "nvmlDeviceGetUUID", code: Code::Other(29) };
        assert_eq!(error.to_string(), "nvmlDeviceGetUUID failed: error (29)");
    }

    #[test]
    fn gone_is_what_is_not_there_and_not_what_is_held() {
        let gone = |code| Error { call: "nvmlDeviceGetGpuInstanceById", code }.is_gone();
        assert!(gone(Code::NotFound) && gone(Code::NotSupported));
        assert!(!gone(Code::InUse) && !gone(Code::InvalidArgument) && !gone(Code::GpuIsLost));
    }
}
