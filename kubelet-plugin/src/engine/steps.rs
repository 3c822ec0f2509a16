//! The steps that change the world, each announced before and after.

use std::time::Duration;

/// A step that changes the disk or the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The claim's journal file is written.
    WriteJournal,
    /// The claim's journal file is removed.
    RemoveJournal,
    /// The claim's CDI file is written.
    WriteSpec,
    /// The claim's CDI file is removed.
    RemoveSpec,
    /// The claim's device metadata is written.
    WriteMetadata,
    /// The claim's device metadata is removed.
    RemoveMetadata,
    /// MIG mode is switched on.
    EnableMig,
    /// MIG mode is switched off.
    DisableMig,
    /// A GPU instance is created.
    CreateGpuInstance,
    /// A compute instance is created.
    CreateComputeInstance,
    /// A compute instance is destroyed.
    DestroyComputeInstance,
    /// A GPU instance is destroyed.
    DestroyGpuInstance,
}

/// What a lock is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lock {
    /// One claim.
    Claim,
    /// One GPU.
    Gpu,
}

/// Told of every [`Step`], and of every wait for a lock. A test that wants to see what a crash leaves panics here.
pub trait Watch: Send + Sync {
    /// The step is about to be taken.
    fn before(&self, _: Step) {}

    /// The step was taken within this time, with or without success.
    fn after(&self, _: Step, _: Duration) {}

    /// A lock was had, or given up, after this time.
    fn waited(&self, _: Lock, _: Duration) {}
}

/// Watches nothing.
#[derive(Debug)]
pub struct NoWatch;

impl Watch for NoWatch {}

impl Step {
    /// All there are.
    pub const ALL: [Step; 12] = [
        Step::WriteJournal,
        Step::RemoveJournal,
        Step::WriteSpec,
        Step::RemoveSpec,
        Step::WriteMetadata,
        Step::RemoveMetadata,
        Step::EnableMig,
        Step::DisableMig,
        Step::CreateGpuInstance,
        Step::CreateComputeInstance,
        Step::DestroyComputeInstance,
        Step::DestroyGpuInstance,
    ];

    /// What logs and metrics call it.
    pub fn name(self) -> &'static str {
        match self {
            Step::WriteJournal => "write_journal",
            Step::RemoveJournal => "remove_journal",
            Step::WriteSpec => "write_cdi",
            Step::RemoveSpec => "remove_cdi",
            Step::WriteMetadata => "write_metadata",
            Step::RemoveMetadata => "remove_metadata",
            Step::EnableMig => "enable_mig",
            Step::DisableMig => "disable_mig",
            Step::CreateGpuInstance => "create_gpu_instance",
            Step::CreateComputeInstance => "create_compute_instance",
            Step::DestroyComputeInstance => "destroy_compute_instance",
            Step::DestroyGpuInstance => "destroy_gpu_instance",
        }
    }
}

impl Lock {
    /// All there are.
    pub const ALL: [Lock; 2] = [Lock::Claim, Lock::Gpu];

    /// What metrics call it.
    pub fn name(self) -> &'static str {
        match self {
            Lock::Claim => "claim",
            Lock::Gpu => "gpu",
        }
    }
}
