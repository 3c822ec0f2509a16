//! Why a claim could not be prepared or released. The texts are what `kubectl describe pod` shows: one sentence, what is
//! the matter and what to do, with the cause in it.

use std::io;
use std::path::PathBuf;

use kerf_nvml::{Error as NvmlError, PciAddress};

pub use super::journal::JournalError;
pub use super::metadata::MetadataError;
use super::{DeviceName, DeviceNameError, FormerError};

/// The engine could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The journal directory cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The lock directory cannot be used.
    #[error(transparent)]
    Lock(#[from] LockError),
}

/// A lock could not be had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Someone else held it until the deadline.
    #[error("{name} is still in use by {holder}; the kubelet tries again by itself")]
    Timeout {
        /// What is locked: a GPU or a claim.
        name: String,
        /// Who has it.
        holder: String,
    },
    /// The file system failed.
    #[error("cannot lock {}: {error}; check that the disk is mounted, writable and not full", path.display())]
    Io {
        /// The lock file or its directory.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

/// A CDI file could not be used.
#[derive(Debug, thiserror::Error)]
#[error("{0}; check that the CDI directory is mounted, writable and not full")]
pub struct SpecError(pub(super) kerf_cdi::Error);

/// A GPU did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// NVML does not give the GPU out.
    #[error("the GPU at {gpu} cannot be reached: {error}; see nvidia-smi and the kernel log of the node")]
    Unreachable {
        /// Where it should be.
        gpu: PciAddress,
        /// What NVML said.
        error: NvmlError,
    },
    /// A call failed.
    #[error("cannot {doing} on the GPU at {gpu}: {error}; see nvidia-smi and the kernel log of the node")]
    Nvml {
        /// Where it is.
        gpu: PciAddress,
        /// What was tried.
        doing: &'static str,
        /// What NVML said.
        error: NvmlError,
    },
    /// An instance is there of which it cannot be told whether it is a claim's.
    #[error(
        "GPU instance {instance} on the GPU at {gpu} may be {device}, and nobody can tell: the claim's journal was lost, and \
         the driver tells no capability device of it below {}; check that the plugin sees the host's /proc", proc.display()
    )]
    Unidentified {
        /// Where the GPU is.
        gpu: PciAddress,
        /// The device that the claim has.
        device: DeviceName,
        /// The GPU instance in its place.
        instance: u32,
        /// Where it was looked for.
        proc: PathBuf,
    },
}

/// A claim could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The UID cannot be part of a file name and a CDI name.
    #[error("{0:?} is not the UID of a claim; recreate the claim")]
    ClaimUid(String),
    /// There is nothing to do.
    #[error("the claim is allocated no device of this node; recreate the pod")]
    NothingAllocated,
    /// The device is not one of this driver's.
    #[error("{0}; it was published by another driver or version: recreate the claim")]
    DeviceName(#[from] DeviceNameError),
    /// See [`LockError`].
    #[error(transparent)]
    Lock(#[from] LockError),
    /// See [`JournalError`].
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// See [`SpecError`].
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// See [`MetadataError`].
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// See [`GpuError`].
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// See [`FormerError`].
    #[error(transparent)]
    FormerDriver(#[from] FormerError),
    /// NVML did not say which driver it belongs to.
    #[error("cannot read the driver's version: {0}; see nvidia-smi on the node")]
    DriverVersion(NvmlError),
    /// Another claim has the device or a part of it.
    #[error(
        "{device} is held by claim {holder} through {held}; it is free once the pods of that claim have ended, and the \
         kubelet tries again by itself"
    )]
    Held {
        /// What is asked for.
        device: DeviceName,
        /// `namespace/name (uid)` of the claim that has it.
        holder: String,
        /// The device of that claim.
        held: DeviceName,
    },
    /// A claim that has ended has left something there.
    #[error(
        "{device} is not free yet: {left}, which has ended, is in use by {users}; it is removed as soon as \
         they have ended: end them, or wait, the kubelet tries again by itself"
    )]
    Condemned {
        /// What is asked for.
        device: DeviceName,
        /// The device that could not be removed yet, and its claim: `gpu-... of claim namespace/name (uid)`.
        left: String,
        /// The processes that use it.
        users: String,
    },
    /// A claim that has ended may have left something there.
    #[error(
        "{device} is not free yet: nobody can tell what {left}, which has ended, has left on the GPU at {gpu}; it is looked for \
         again every 10 s: see nvidia-smi and the log of kerf-kubelet-plugin on the node", gpu = device.gpu()
    )]
    CondemnedUnseen {
        /// What is asked for.
        device: DeviceName,
        /// As in [`PrepareError::Condemned`].
        left: String,
    },
    /// The allocation contradicts itself.
    #[error("the claim is allocated both {one} and {other}, which overlap; recreate the claim")]
    Overlap {
        /// One device.
        one: DeviceName,
        /// The other.
        other: DeviceName,
    },
    /// The GPU is in use outside of this driver.
    #[error(
        "{device} is occupied by GPU instance {instance} at memory slices {first}-{last}, which no claim on this node \
         explains; remove it with nvidia-smi mig -dci -gi {instance} and -dgi -gi {instance} on the GPU at {gpu}, or use \
         another device", gpu = device.gpu()
    )]
    Foreign {
        /// What is asked for.
        device: DeviceName,
        /// The stranger's GPU instance id.
        instance: u32,
        /// Its first memory slice.
        first: u32,
        /// Its last memory slice.
        last: u32,
    },
    /// The GPU is in use outside of this driver, and that by processes.
    #[error(
        "{device} is occupied by GPU instance {instance} at memory slices {first}-{last}, which no claim on this node explains \
         and which is in use by {users}; end them, then remove it with nvidia-smi mig -dci -gi {instance} and -dgi -gi \
         {instance} on the GPU at {gpu}, or use another device", gpu = device.gpu()
    )]
    ForeignInUse {
        /// What is asked for.
        device: DeviceName,
        /// The stranger's GPU instance id.
        instance: u32,
        /// Its first memory slice.
        first: u32,
        /// Its last memory slice.
        last: u32,
        /// The processes that use it.
        users: String,
    },
    /// Inside the claim's own instance are compute instances of someone else.
    #[error(
        "GPU instance {instance} of {device} holds compute instances that kerf did not make; remove them with nvidia-smi \
         mig -dci -gi {instance} on the GPU at {gpu}", gpu = device.gpu()
    )]
    ForeignCompute {
        /// What is asked for.
        device: DeviceName,
        /// Its GPU instance id.
        instance: u32,
    },
    /// The GPU has no such profile or placement.
    #[error("the GPU at {gpu} has no partition {device}; it or its driver was changed: recreate the claim", gpu = device.gpu())]
    NoSuchPartition {
        /// What is asked for.
        device: DeviceName,
    },
    /// The GPU cannot be cut.
    #[error("the GPU at {gpu} has no MIG, so {device} cannot be carved; recreate the claim", gpu = device.gpu())]
    NoMig {
        /// What is asked for.
        device: DeviceName,
    },
    /// MIG mode is off and does not go on without a reset.
    #[error(
        "{device} needs MIG mode on the GPU at {gpu}, which is off and changes only with a GPU reset; run nvidia-smi -i \
         {gpu} -mig 1 and reset the GPU or reboot the node", gpu = device.gpu()
    )]
    MigOff {
        /// What is asked for.
        device: DeviceName,
    },
    /// MIG mode is on and does not go off without a reset.
    #[error(
        "{device} needs MIG mode off on the GPU at {gpu}, which is on and changes only with a GPU reset; run nvidia-smi -i \
         {gpu} -mig 0 and reset the GPU or reboot the node", gpu = device.gpu()
    )]
    MigOn {
        /// What is asked for.
        device: DeviceName,
    },
    /// The mode was switched without complaint, and did not change.
    #[error(
        "MIG mode of the GPU at {gpu} did not change although the driver said so; reset the GPU or reboot the node"
    )]
    MigModeStuck {
        /// Where the GPU is.
        gpu: PciAddress,
    },
    /// The mode cannot be switched because the GPU is in use.
    #[error("MIG mode of the GPU at {gpu} cannot be switched, it is in use by {users}; end them, or wait")]
    MigModeBusy {
        /// Where the GPU is.
        gpu: PciAddress,
        /// The processes that use it.
        users: String,
    },
    /// The mode cannot be switched before a reset.
    #[error(
        "MIG mode of the GPU at {gpu} does not change before the GPU is reset; reset it with nvidia-smi --gpu-reset -i {gpu} \
         or reboot the node, which for a GPU passed through to a virtual machine means that machine"
    )]
    MigModeNeedsReset {
        /// Where the GPU is.
        gpu: PciAddress,
    },
    /// The partition that a claim with admin access looks at is not carved.
    #[error(
        "{device} is not carved at the moment, and a claim with admin access never carves; wait until it is in use"
    )]
    NotCarved {
        /// What is asked for.
        device: DeviceName,
    },
    /// A device node of the GPU is missing.
    #[error(
        "{} does not exist on the node, so containers cannot use {device}; run nvidia-modprobe -u -c {minor} on the node, or \
         check the driver's installation", path.display()
    )]
    NoDeviceNode {
        /// What is asked for.
        device: DeviceName,
        /// The node that should be there.
        path: PathBuf,
        /// The GPU's minor number.
        minor: u32,
    },
    /// The kernel does not tell the capability device of an instance.
    #[error(
        "the driver tells no capability device for {instance} of {device} below {}; check that the plugin sees the host's /proc \
         and that the driver supports MIG", proc.display()
    )]
    NoCapability {
        /// What is asked for.
        device: DeviceName,
        /// Which instance.
        instance: String,
        /// Where it was looked for.
        proc: PathBuf,
    },
    /// A device of an earlier allocation of this claim could not be released.
    #[error("the claim's former device cannot be released: {0}")]
    Former(ReleaseError),
}

/// An instance could not be removed.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    /// Something uses it.
    #[error("{device} ({instance}) is in use by {users}; it is removed as soon as they have ended: end them, or wait")]
    Busy {
        /// The device.
        device: DeviceName,
        /// Which instance of it.
        instance: String,
        /// The processes that use it.
        users: String,
    },
    /// See [`GpuError`].
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// See [`JournalError`].
    #[error(transparent)]
    Journal(#[from] JournalError),
}

/// A claim could not be released.
#[derive(Debug, thiserror::Error)]
pub enum UnprepareError {
    /// See [`LockError`].
    #[error(transparent)]
    Lock(#[from] LockError),
    /// See [`JournalError`].
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// See [`SpecError`].
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// See [`ReleaseError`].
    #[error(transparent)]
    Release(#[from] ReleaseError),
}
impl ReleaseError {
    /// Whether it says something about the GPU, which may never change, and not about the disk.
    pub(super) fn is_of_the_gpu(&self) -> bool {
        matches!(self, ReleaseError::Busy { .. } | ReleaseError::Gpu(_))
    }
}
