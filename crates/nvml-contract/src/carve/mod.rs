//! Carving one idle GPU in every way, and leaving it as it was.
//!
//! ```text
//!  idle GPU ──refuse──▶ nothing is done: instances, processes, MIG off where only a reset turns it on, a pending mode
//!     │
//!     ▼ MIG off: switch on, read back
//!   empty ◀─────────────────────────────────────────────────────────┐
//!     │ each profile at each placement:                             │
//!     ├──▶ GPU instance ──▶ (overlaps refused)                      │
//!     │         └──▶ with compute instance ──▶ (early destroy refused)
//!     │                   └──▶ compute instance destroyed, again    │
//!     │                             └──▶ GPU instance destroyed, again
//!     │ each profile as often as it may be, and once more ──────────┤ clear
//!     │ one instance, MIG off refused ──────────────────────────────┘
//!     ▼ where no reset is needed: switch off, read back
//!   restore: clear what was made, mode as found ──▶ read: as found?
//! ```
//!
//! Every arrow back to *empty* is `Bench::clear`, and there is no way out but through `Bench::restore`: after the last
//! step, after the first that fails for good, when the user interrupts (looked for before each cut, so that one in
//! progress ends as always), and on a panic. Only what was made here is ever destroyed: an instance that somebody else
//! makes meanwhile stays. A process that is killed outright leaves at most what one cut or fill has made.

mod bench;
pub(crate) mod checks;
mod record;

pub use bench::Patience;
pub use record::{Carving, Computed, Cut, Fill, Halt, Made, Overlap, RefusedOff, State, Switch, Waits};

use kerf_mig::{Placement, Profile};
use kerf_nvml::{Error, Gpu, GpuFacts, GpuInstance, MigMode, MigModes, Nvml, PciAddress};

use self::bench::{Bench, read_state};
use crate::geometry_checks::apart;
use crate::kernel::Kernel;

/// Why a GPU is not carved. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No such GPU, or one that cannot be asked.
    #[error("{0}; name a GPU by its PCI address, as nvidia-smi lists it")]
    Unreadable(Error),
    /// No MIG.
    #[error("the GPU has no MIG")]
    NoMig,
    /// A mode is pending.
    #[error("its MIG mode changes at the next reset; reset the GPU first")]
    Pending,
    /// MIG is off and needs a reset.
    #[error("MIG is off and only a reset of the GPU turns it on; turn it on first (nvidia-smi -mig 1, then a reset)")]
    NeedsReset,
    /// Instances live on it.
    #[error("{0} GPU instances live on it; carving is for an idle GPU")]
    Occupied(usize),
    /// Processes run on it.
    #[error("{0} processes run on it; carving is for an idle GPU")]
    Busy(usize),
}

/// What carving works with.
#[derive(Clone, Copy)]
pub(crate) struct Tools<'a> {
    pub(crate) nvml: &'a dyn Nvml,
    pub(crate) kernel: &'a dyn Kernel,
    pub(crate) patience: Patience,
    /// Whether the user wishes to end.
    pub(crate) stop: &'a dyn Fn() -> bool,
    /// Told what is done now.
    pub(crate) doing: &'a dyn Fn(&str),
}

/// Carves the GPU at an address in every way.
pub(crate) fn carve(tools: Tools<'_>, address: PciAddress) -> Result<Carving, Refusal> {
    let Tools { nvml, kernel, patience, .. } = tools;
    let (gpu, facts, found) = examine(nvml, address)?;
    let mut bench = Bench::new(nvml, kernel, patience, (address, gpu, facts.minor), found.clone());
    let mut carving = Carving {
        switchable: facts.mig_mode_switchable,
        found: found.clone(),
        switched_on: None,
        cuts: Vec::new(),
        fills: Vec::new(),
        refused_off: None,
        switched_off: None,
        halted: None,
        left: Ok(found),
        waits: Waits::default(),
    };
    carving.halted = work(tools, &mut bench, &mut carving).err();
    (tools.doing)("cleaning up");
    let (cleared, left) = bench.restore();
    carving.halted = carving.halted.or(cleared.err());
    carving.left = left;
    carving.waits = std::mem::take(&mut bench.waits);
    Ok(carving)
}

/// That the GPU is idle and can be left as it is found.
fn examine(nvml: &dyn Nvml, address: PciAddress) -> Result<(Gpu, GpuFacts, State), Refusal> {
    let gpu = nvml.gpu_at(address).map_err(Refusal::Unreadable)?;
    let facts = nvml.facts(gpu).map_err(Refusal::Unreadable)?;
    let found = read_state(nvml, gpu).map_err(Refusal::Unreadable)?;
    let processes = nvml.processes(gpu).map_err(Refusal::Unreadable)?.len();
    let refusal = match found.modes {
        None => Refusal::NoMig,
        Some(MigModes { current, pending }) if current != pending => Refusal::Pending,
        _ if !found.instances.is_empty() => Refusal::Occupied(found.instances.len()),
        _ if processes > 0 => Refusal::Busy(processes),
        Some(MigModes { current: MigMode::Disabled, .. }) if !facts.mig_mode_switchable => Refusal::NeedsReset,
        Some(_) => return Ok((gpu, facts, found)),
    };
    Err(refusal)
}

/// From the empty GPU to the empty GPU. Ends early by an error.
fn work(tools: Tools<'_>, bench: &mut Bench<'_>, carving: &mut Carving) -> Result<(), Halt> {
    let go_on = |doing: String| {
        (tools.doing)(&doing);
        if (tools.stop)() { Err(Halt::Interrupted) } else { Ok(()) }
    };
    if carving.found.modes.is_some_and(|modes| modes.current == MigMode::Disabled) {
        go_on("switching MIG on".to_owned())?;
        let switch = bench.switch(MigMode::Enabled);
        let on = matches!(switch.modes, Ok(Some(MigModes { current: MigMode::Enabled, .. })));
        carving.switched_on = Some(switch);
        if !on {
            return Err(Halt::ModeOff);
        }
    }
    let profiles = bench.nvml.gpu_instance_profiles(bench.gpu).map_err(|error| Halt::NoProfiles(error.to_string()))?;
    let Some(smallest) = profiles.iter().filter(|profile| !profile.placements.is_empty()).min_by_key(|p| p.memory_mib)
    else {
        return Err(Halt::NoProfiles("the GPU tells none while MIG is on".to_owned()));
    };

    let total: usize = profiles.iter().map(|profile| profile.placements.len()).sum();
    for profile in &profiles {
        for &placement in &profile.placements {
            let done = carving.cuts.len() + 1;
            go_on(format!("{} at {} ({done} of {total} cuts)", profile.name, placement.start))?;
            carving.cuts.push(cut(bench, &profiles, profile, placement));
            bench.clear()?;
        }
    }
    for profile in &profiles {
        go_on(format!("{} as often as it may be", profile.name))?;
        let fill = fill(bench, profile);
        carving.fills.push(fill);
        bench.clear()?;
    }
    if carving.switchable {
        go_on("switching MIG off, with an instance and without".to_owned())?;
        carving.refused_off = refused_off(bench, smallest);
        bench.clear()?;
        carving.switched_off = Some(bench.switch(MigMode::Disabled));
    }
    Ok(())
}

fn cut(bench: &mut Bench<'_>, profiles: &[Profile], profile: &Profile, placement: Placement) -> Cut {
    let created = bench.create(profile.id, placement);
    let made = created.as_ref().ok().map(|instance| live_and_die(bench, profiles, profile, *instance));
    Cut { profile: profile.name.clone(), profile_id: profile.id, placement, created, made }
}

/// The life of one GPU instance.
fn live_and_die(bench: &mut Bench<'_>, profiles: &[Profile], profile: &Profile, instance: GpuInstance) -> Made {
    let id = instance.id;
    let listed = bench.instances();
    let overlaps = overlaps(bench, profiles, profile, instance.placement);
    let capability = bench.await_capability(id, None);
    let compute = bench.create_compute(id, profile.compute_slices);
    let compute_id = compute.as_ref().ok().map(|compute| compute.id);
    let computed = compute_id.map(|compute| live_and_die_within(bench, id, compute));

    let (nvml, gpu) = (bench.nvml, bench.gpu);
    let destroyed = nvml.destroy_gpu_instance(gpu, id);
    let left = bench.instances();
    let gone = destroyed.is_ok();
    if gone && left.as_ref().is_ok_and(|left| left.iter().all(|live| live.id != id)) {
        bench.forget(id);
    }
    let on_gone = if gone {
        vec![
            ("destroying it again", nvml.destroy_gpu_instance(gpu, id)),
            ("listing what is in it", nvml.compute_instances(gpu, id).map(drop)),
            ("creating a compute instance in it", bench.create_compute(id, profile.compute_slices).map(drop)),
            ("destroying a compute instance in it", nvml.destroy_compute_instance(gpu, id, compute_id.unwrap_or(0))),
        ]
    } else {
        Vec::new()
    };
    let mut stale_files = Vec::new();
    if gone && !bench.file_goes(id, None) {
        stale_files.push(format!("that of GPU instance {id}"));
    }
    if let Some(compute) = compute_id.filter(|_| gone)
        && !bench.file_goes(id, Some(compute))
    {
        stale_files.push(format!("that of compute instance {compute} of GPU instance {id}"));
    }
    Made { listed, overlaps, capability, compute, computed, destroyed, left, on_gone, stale_files }
}

/// The life of the compute instance in it.
fn live_and_die_within(bench: &mut Bench<'_>, gpu_instance: u32, id: u32) -> Computed {
    let capability = bench.await_capability(gpu_instance, Some(id));
    let (nvml, gpu) = (bench.nvml, bench.gpu);
    let list = || nvml.compute_instances(gpu, gpu_instance);
    Computed {
        listed: list(),
        capability,
        destroyed_too_early: nvml.destroy_gpu_instance(gpu, gpu_instance),
        still: (bench.instances(), list()),
        destroyed: nvml.destroy_compute_instance(gpu, gpu_instance, id),
        destroyed_again: nvml.destroy_compute_instance(gpu, gpu_instance, id),
        left: list(),
    }
}

/// Tries to create the same again, and another profile where there is no room for it.
fn overlaps(bench: &mut Bench<'_>, profiles: &[Profile], profile: &Profile, taken: Placement) -> Vec<Overlap> {
    let others = profiles.iter().filter(|other| other.id != profile.id);
    let mut others = others.flat_map(|other| other.placements.iter().map(move |placement| (other, *placement)));
    let other = others.find(|(_, placement)| placement.overlaps(taken));
    let attempts = [Some((profile, taken)), other].into_iter().flatten();
    let mut attempt = |(profile, placement): (&Profile, Placement)| {
        let answer = bench.create(profile.id, placement);
        Overlap { asked: format!("{} at {}", profile.name, placement.start), answer, listed: bench.instances() }
    };
    attempts.map(&mut attempt).collect()
}

fn fill(bench: &mut Bench<'_>, profile: &Profile) -> Fill {
    let mut placements = apart(profile);
    placements.truncate(profile.max_instances as usize);
    let mut create = |placement: &Placement| {
        let instance = bench.create(profile.id, *placement)?;
        bench.create_compute(instance.id, profile.compute_slices)
    };
    let created = placements.iter().map(&mut create).collect();
    let listed = bench.instances();
    let free = |placement: &&Placement| !placements.iter().any(|taken| taken.overlaps(**placement));
    let one_more = profile.placements.iter().find(free).map(|placement| bench.create(profile.id, *placement));
    Fill { profile: profile.clone(), placements, created, listed, one_more }
}

/// `None` when no instance can be had, which the cuts have told already.
fn refused_off(bench: &mut Bench<'_>, profile: &Profile) -> Option<RefusedOff> {
    let instance = bench.create(profile.id, *profile.placements.first()?).ok()?;
    let Switch { answer, modes, .. } = bench.switch(MigMode::Disabled);
    let listed = bench.instances();
    // Refused or not, MIG has to be on for the instance to go.
    let on = MigModes { current: MigMode::Enabled, pending: MigMode::Enabled };
    if modes != Ok(Some(on)) {
        bench.switch(MigMode::Enabled);
    }
    Some(RefusedOff { instance, answer, modes, listed })
}
