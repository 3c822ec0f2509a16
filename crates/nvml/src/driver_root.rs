//! Where the driver's files are.

use std::path::PathBuf;

/// A directory that holds an NVIDIA driver: libraries, programs and, for a containerised driver, device nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverRoot {
    root: PathBuf,
}

/// Why a driver root is of no use.
#[derive(Debug, thiserror::Error)]
pub enum DriverRootError {}
