//! Why a claim could not be prepared or released, sorted by where one has to look: for the metrics and the log. The
//! kubelet, and with it `kubectl describe pod`, gets the sentence.

use std::error::Error;
use std::fmt;

use kerf_telemetry::OneLine;

use crate::claim::{ClaimError, SourceError};
use crate::driver::DriverError;
use crate::engine::{FormerError, GpuError, JournalError, LockError, PrepareError, ReleaseError, UnprepareError};

/// Where one has to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// The claim, or what it was allocated, cannot be prepared as it is.
    Claim,
    /// The API server does not answer, or not as it should.
    ApiServer,
    /// No NVIDIA driver can be used on the node.
    Driver,
    /// A GPU or the driver does not do what it should.
    Gpu,
    /// Something is in the way: another claim, a process, an instance that no claim explains.
    InUse,
    /// A lock was held by someone else until the deadline.
    Lock,
    /// The node's disk cannot be written or read.
    Disk,
    /// kerf itself is broken.
    Defect,
}

/// A failure that is told to the kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Where to look.
    pub class: Class,
    /// What is the matter, in one line, which is all that the kubelet shows of it.
    pub message: String,
}

impl Class {
    /// All there are.
    pub const ALL: [Class; 8] = [
        Class::Claim,
        Class::ApiServer,
        Class::Driver,
        Class::Gpu,
        Class::InUse,
        Class::Lock,
        Class::Disk,
        Class::Defect,
    ];

    /// What logs and metrics call it.
    pub fn name(self) -> &'static str {
        match self {
            Class::Claim => "claim",
            Class::ApiServer => "api_server",
            Class::Driver => "driver",
            Class::Gpu => "gpu",
            Class::InUse => "in_use",
            Class::Lock => "lock",
            Class::Disk => "disk",
            Class::Defect => "defect",
        }
    }
}

impl Failure {
    /// An error of a class.
    pub fn new(class: Class, error: &dyn Error) -> Failure {
        Failure { class, message: OneLine(error).to_string() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Errors whose class is known.
trait Classified: Error {
    fn class(&self) -> Class;
}

impl<E: Classified> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::new(error.class(), &error)
    }
}

impl Classified for ClaimError {
    fn class(&self) -> Class {
        Class::Claim
    }
}

impl Classified for SourceError {
    fn class(&self) -> Class {
        Class::ApiServer
    }
}

impl Classified for DriverError {
    fn class(&self) -> Class {
        match self {
            DriverError::Root(_) | DriverError::Library(_) | DriverError::Opening => Class::Driver,
            DriverError::Engine(_) => Class::Disk,
            DriverError::StillHeld(error) => error.class(),
        }
    }
}

impl Classified for LockError {
    fn class(&self) -> Class {
        match self {
            LockError::Timeout { .. } => Class::Lock,
            LockError::Io { .. } => Class::Disk,
        }
    }
}

impl Classified for JournalError {
    fn class(&self) -> Class {
        Class::Disk
    }
}

impl Classified for GpuError {
    fn class(&self) -> Class {
        Class::Gpu
    }
}

impl Classified for FormerError {
    fn class(&self) -> Class {
        match self {
            FormerError::Unreadable { .. } => Class::Disk,
            FormerError::Runs => Class::InUse,
            FormerError::Gpu(error) => error.class(),
            FormerError::Nameless(_) => Class::Gpu,
        }
    }
}

impl Classified for ReleaseError {
    fn class(&self) -> Class {
        match self {
            ReleaseError::Busy { .. } => Class::InUse,
            ReleaseError::Gpu(error) => error.class(),
            ReleaseError::Journal(error) => error.class(),
        }
    }
}

impl Classified for UnprepareError {
    fn class(&self) -> Class {
        match self {
            UnprepareError::Lock(error) => error.class(),
            UnprepareError::Journal(error) => error.class(),
            UnprepareError::Spec(_) => Class::Disk,
            UnprepareError::Release(error) => error.class(),
        }
    }
}

impl Classified for PrepareError {
    fn class(&self) -> Class {
        match self {
            PrepareError::ClaimUid(_)
            | PrepareError::NothingAllocated
            | PrepareError::DeviceName(_)
            | PrepareError::Overlap { .. }
            | PrepareError::NoSuchPartition { .. }
            | PrepareError::NoMig { .. }
            | PrepareError::NotCarved { .. } => Class::Claim,
            PrepareError::Lock(error) => error.class(),
            PrepareError::Journal(error) => error.class(),
            PrepareError::Spec(_) | PrepareError::Metadata(_) => Class::Disk,
            PrepareError::Gpu(error) => error.class(),
            PrepareError::FormerDriver(error) => error.class(),
            PrepareError::Held { .. }
            | PrepareError::Condemned { .. }
            | PrepareError::CondemnedUnseen { .. }
            | PrepareError::Foreign { .. }
            | PrepareError::ForeignInUse { .. }
            | PrepareError::ForeignCompute { .. }
            | PrepareError::MigModeBusy { .. } => Class::InUse,
            PrepareError::DriverVersion(_)
            | PrepareError::MigOff { .. }
            | PrepareError::MigOn { .. }
            | PrepareError::MigModeStuck { .. }
            | PrepareError::MigModeNeedsReset { .. }
            | PrepareError::NoDeviceNode { .. }
            | PrepareError::NoCapability { .. } => Class::Gpu,
            PrepareError::Former(error) => error.class(),
        }
    }
}
