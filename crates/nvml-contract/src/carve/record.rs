//! What happened while a GPU was carved: every step with its answer. What it means is judged afterwards.

use std::time::Duration;

use kerf_mig::{Placement, Profile};
use kerf_nvml::{ComputeInstance, GpuInstance, MigMode, MigModes};

use crate::kernel::Capability;
use crate::reading::Answer;

/// What must be as it was in the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// MIG mode.
    pub modes: Option<MigModes>,
    /// Live GPU instances, by id.
    pub instances: Vec<GpuInstance>,
}

/// All that happened on one GPU.
#[derive(Clone, Debug)]
pub struct Carving {
    /// Whether MIG mode switches without a reset.
    pub switchable: bool,
    /// How the GPU was found.
    pub found: State,
    /// Switching MIG on; nothing where it was on.
    pub switched_on: Option<Switch>,
    /// Every profile at every placement, one at a time.
    pub cuts: Vec<Cut>,
    /// Every profile as often as it may be at once.
    pub fills: Vec<Fill>,
    /// Switching MIG off while an instance lives.
    pub refused_off: Option<RefusedOff>,
    /// Switching MIG off on the empty GPU.
    pub switched_off: Option<Switch>,
    /// Why not everything was done.
    pub halted: Option<Halt>,
    /// How the GPU was left, read after the clean-up.
    pub left: Answer<State>,
    /// How long capability files and nodes took to appear.
    pub waits: Waits,
}

/// Why carving ended early.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Halt {
    /// The user wished so.
    #[error("interrupted")]
    Interrupted,
    /// MIG mode did not come on.
    #[error("MIG mode is not on")]
    ModeOff,
    /// The GPU told no profiles with MIG on.
    #[error("the profiles cannot be read: {0}")]
    NoProfiles(String),
    /// What was made could not be removed.
    #[error("{0}")]
    Stuck(String),
}

/// A switch of MIG mode, and what was there afterwards.
#[derive(Clone, Debug)]
pub struct Switch {
    /// The mode asked for.
    pub wanted: MigMode,
    /// Return value and activation status.
    pub answer: Answer<()>,
    /// Whether the GPU could be found again at its address.
    pub found_again: Answer<()>,
    /// The modes, read back.
    pub modes: Answer<Option<MigModes>>,
}

/// One profile at one placement, made and removed.
#[derive(Clone, Debug)]
pub struct Cut {
    /// The profile's name.
    pub profile: String,
    /// Its id.
    pub profile_id: u32,
    /// Where.
    pub placement: Placement,
    /// Creating the GPU instance.
    pub created: Answer<GpuInstance>,
    /// What followed.
    pub made: Option<Made>,
}

/// What followed on creating a GPU instance.
#[derive(Clone, Debug)]
pub struct Made {
    /// Every instance then.
    pub listed: Answer<Vec<GpuInstance>>,
    /// Attempts to create where there is no room.
    pub overlaps: Vec<Overlap>,
    /// Its capability.
    pub capability: Capability,
    /// Creating the compute instance.
    pub compute: Answer<ComputeInstance>,
    /// What followed on that.
    pub computed: Option<Computed>,
    /// Destroying the GPU instance, empty again.
    pub destroyed: Answer<()>,
    /// Every instance then.
    pub left: Answer<Vec<GpuInstance>>,
    /// Calls about the instance that is gone: what was tried, and what came of it.
    pub on_gone: Vec<(&'static str, Answer<()>)>,
    /// Capability files that outlived it.
    pub stale_files: Vec<String>,
}

/// An attempt to create where there is no room.
#[derive(Clone, Debug)]
pub struct Overlap {
    /// What was asked for.
    pub asked: String,
    /// The answer.
    pub answer: Answer<GpuInstance>,
    /// Every instance afterwards.
    pub listed: Answer<Vec<GpuInstance>>,
}

/// What followed on creating a compute instance.
#[derive(Clone, Debug)]
pub struct Computed {
    /// The compute instances then.
    pub listed: Answer<Vec<ComputeInstance>>,
    /// Its capability.
    pub capability: Capability,
    /// Destroying the GPU instance although the compute instance is in it.
    pub destroyed_too_early: Answer<()>,
    /// Every GPU instance, and the compute instances, after that.
    pub still: (Answer<Vec<GpuInstance>>, Answer<Vec<ComputeInstance>>),
    /// Destroying the compute instance.
    pub destroyed: Answer<()>,
    /// Destroying it again.
    pub destroyed_again: Answer<()>,
    /// The compute instances at the end.
    pub left: Answer<Vec<ComputeInstance>>,
}

/// One profile as often as it may be at once.
#[derive(Clone, Debug)]
pub struct Fill {
    /// The profile.
    pub profile: Profile,
    /// Where it was tried.
    pub placements: Vec<Placement>,
    /// Creating each with its compute instance.
    pub created: Vec<Answer<ComputeInstance>>,
    /// Every GPU instance then.
    pub listed: Answer<Vec<GpuInstance>>,
    /// One more than that, at a placement that is free; `None` where none is.
    pub one_more: Option<Answer<GpuInstance>>,
}

/// Switching MIG off while an instance lives.
#[derive(Clone, Debug)]
pub struct RefusedOff {
    /// The instance.
    pub instance: GpuInstance,
    /// The answer.
    pub answer: Answer<()>,
    /// The modes then.
    pub modes: Answer<Option<MigModes>>,
    /// Every instance then.
    pub listed: Answer<Vec<GpuInstance>>,
}

/// How long things took to appear after the call that made them.
#[derive(Clone, Debug, Default)]
pub struct Waits {
    /// Capability files of GPU instances and of compute instances.
    pub files: Vec<Duration>,
    /// Their device nodes.
    pub nodes: Vec<Duration>,
}
