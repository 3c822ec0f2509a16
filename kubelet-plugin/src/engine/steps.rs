//! The steps that change the world, each announced before and after.

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

/// Told of every [`Step`]. A test that wants to see what a crash leaves panics here.
pub trait Watch: Send + Sync {
    /// The step is about to be taken.
    fn before(&self, step: Step);

    /// The step was taken, with or without success.
    fn after(&self, step: Step);
}

/// Watches nothing.
#[derive(Debug)]
pub struct NoWatch;

impl Watch for NoWatch {
    fn before(&self, _: Step) {}

    fn after(&self, _: Step) {}
}
