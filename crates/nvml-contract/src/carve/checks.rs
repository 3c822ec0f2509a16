//! What kerf relies on when it carves, judged over what happened.

use std::collections::BTreeSet;

use kerf_mig::Placement;
use kerf_nvml::{Code, Error, GpuInstance, MigMode, MigModes};

use super::record::{Carving, Computed, Cut, Halt, Made, State, Switch};
use crate::assertion::{Assertion, Findings, Outcome};
use crate::instance_checks::{expect_files, judge_nodes};
use crate::kernel::Capability;

/// In the order in which they are told.
pub(crate) const CARVE: &[Assertion<Carving>] = &[
    Assertion {
        name: "carve.mig-on",
        relied_on_for: "a claim for a partition switches MIG on where that needs no reset",
        check: mig_on,
    },
    Assertion {
        name: "carve.created",
        relied_on_for: "a claim gets the profile at the placement that the scheduler allocated",
        check: created,
    },
    Assertion {
        name: "carve.listed",
        relied_on_for: "after a crash kerf recognises what it made by profile and placement, also without a compute instance",
        check: listed,
    },
    Assertion {
        name: "carve.overlap",
        relied_on_for: "the GPU itself refuses what overlaps: insufficient resources, the last line of defence",
        check: overlap,
    },
    Assertion {
        name: "carve.refusal-changes-nothing",
        relied_on_for: "a create that failed left nothing behind and hurt no neighbour",
        check: refusal_changes_nothing,
    },
    Assertion {
        name: "carve.compute-instance",
        relied_on_for: "one compute instance over the whole GPU instance is the device that a container sees",
        check: compute_instance,
    },
    Assertion {
        name: "carve.capability-files",
        relied_on_for: "the numbers of the device nodes are read right after creating",
        check: capability_files,
    },
    Assertion {
        name: "carve.capability-nodes",
        relied_on_for: "the node on the host opens the same instance as the one in the container",
        check: capability_nodes,
    },
    Assertion {
        name: "carve.in-use",
        relied_on_for: "an instance in use cannot be destroyed, and says so: in use, which is retried",
        check: in_use,
    },
    Assertion {
        name: "carve.destroyed",
        relied_on_for: "when a destroy succeeded the place is free for the next claim",
        check: destroyed,
    },
    Assertion {
        name: "carve.gone",
        relied_on_for: "unprepare is repeated after a crash: what is gone already says so",
        check: gone,
    },
    Assertion {
        name: "carve.files-gone",
        relied_on_for: "an instance's capability file tells of a live instance",
        check: files_gone,
    },
    Assertion {
        name: "carve.max-instances",
        relied_on_for: "every device that the scheduler can allocate at once can be made at once",
        check: max_instances,
    },
    Assertion { name: "carve.uuids", relied_on_for: "users tell MIG devices apart by UUID", check: uuids },
    Assertion {
        name: "carve.one-more",
        relied_on_for: "what engines and other limits do not allow is refused: insufficient resources",
        check: one_more,
    },
    Assertion {
        name: "carve.mig-held",
        relied_on_for: "switching MIG off never takes a live instance along",
        check: mig_held,
    },
    Assertion {
        name: "carve.mig-off",
        relied_on_for: "the last partition's end gives the whole GPU back to CUDA",
        check: mig_off,
    },
    Assertion { name: "carve.as-found", relied_on_for: "everything that kerf makes can be undone", check: as_found },
];

const ON: MigModes = MigModes { current: MigMode::Enabled, pending: MigMode::Enabled };
const OFF: MigModes = MigModes { current: MigMode::Disabled, pending: MigMode::Disabled };

fn skipped(carving: &Carving, what: &str) -> Outcome {
    Outcome::Skipped(match &carving.halted {
        Some(halt) => format!("{what}: {halt}"),
        None => what.to_owned(),
    })
}

fn mismatch(error: Result<impl Sized, &Error>) -> String {
    error.map_or_else(ToString::to_string, |_| "success".to_owned())
}

/// Judges every cut that came as far as `stage`.
fn each<'a, T>(
    carving: &'a Carving,
    stage: impl Fn(&'a Cut) -> Option<T>,
    judge: impl Fn(&mut Findings, &str, &'a Cut, T),
) -> Outcome {
    let mut findings = Findings::default();
    let mut judged = false;
    for cut in &carving.cuts {
        if let Some(value) = stage(cut) {
            judged = true;
            judge(&mut findings, &format!("{} at {}", cut.profile, cut.placement.start), cut, value);
        }
    }
    if judged { findings.outcome() } else { skipped(carving, "no cut came so far") }
}

fn made(cut: &Cut) -> Option<(&GpuInstance, &Made)> {
    Some((cut.created.as_ref().ok()?, cut.made.as_ref()?))
}

fn computed(cut: &Cut) -> Option<(&GpuInstance, &Computed)> {
    let (instance, made) = made(cut)?;
    Some((instance, made.computed.as_ref()?))
}

fn switched(switch: &Switch, wanted: MigModes) -> Outcome {
    let mut findings = Findings::default();
    let name = if switch.wanted == MigMode::Enabled { "on" } else { "off" };
    findings.value(&switch.answer, format!("MIG switched {name}, by return value and activation status"));
    findings.value(&switch.found_again, "the GPU at its address after the switch");
    if let Some(modes) = findings.value(&switch.modes, "the MIG modes after the switch") {
        findings.expect(*modes == Some(wanted), format!("MIG {name}, read back"), || format!("{modes:?}"));
    }
    findings.outcome()
}

fn mig_on(carving: &Carving) -> Outcome {
    match &carving.switched_on {
        Some(switch) => switched(switch, ON),
        None if carving.found.modes == Some(ON) => Outcome::Skipped("MIG was on already".to_owned()),
        None => skipped(carving, "MIG was not switched on"),
    }
}

fn created(carving: &Carving) -> Outcome {
    each(carving, Some, |findings, name, cut, _| {
        if let Some(instance) = findings.value(&cut.created, format!("{name} created")) {
            let as_asked = (instance.profile_id, instance.placement) == (cut.profile_id, cut.placement);
            findings.expect(as_asked, format!("profile {} at {:?}", cut.profile_id, cut.placement), || {
                format!("{instance:?}")
            });
        }
    })
}

fn listed(carving: &Carving) -> Outcome {
    each(carving, made, |findings, name, cut, (instance, made)| {
        let wanted = GpuInstance { id: instance.id, profile_id: cut.profile_id, placement: cut.placement };
        if let Some(listed) = findings.value(&made.listed, format!("the instances with {name} among them")) {
            findings.expect(*listed == [wanted], format!("{wanted:?} alone"), || format!("{listed:?}"));
        }
    })
}

fn overlap(carving: &Carving) -> Outcome {
    each(carving, made, |findings, name, _, (_, made)| {
        for overlap in &made.overlaps {
            let refused = matches!(&overlap.answer, Err(error) if error.code == Code::InsufficientResources);
            let expected = format!("{} refused beside {name}: insufficient resources (23)", overlap.asked);
            findings.expect(refused, expected, || mismatch(overlap.answer.as_ref()));
        }
    })
}

fn refusal_changes_nothing(carving: &Carving) -> Outcome {
    each(carving, made, |findings, name, _, (_, made)| {
        for overlap in made.overlaps.iter().filter(|overlap| overlap.answer.is_err()) {
            let expected = format!("the same instances after {} was refused beside {name}", overlap.asked);
            findings.expect(overlap.listed == made.listed, expected, || format!("{:?}", overlap.listed));
        }
    })
}

fn compute_instance(carving: &Carving) -> Outcome {
    each(carving, made, |findings, name, _, (_, made)| {
        let Some(compute) = findings.value(&made.compute, format!("a compute instance over all of {name}")) else {
            return;
        };
        findings.expect(compute.uuid.starts_with("MIG-"), format!("a UUID of {name} that begins with MIG-"), || {
            "another form".to_owned()
        });
        let Some(computed) = &made.computed else { return };
        if let Some(listed) = findings.value(&computed.listed, format!("the compute instances of {name}")) {
            findings.expect(*listed == [compute.clone()], format!("the one compute instance of {name}"), || {
                let ids: Vec<u32> = listed.iter().map(|listed| listed.id).collect();
                format!("ids {ids:?}, where {} was made, or other UUIDs", compute.id)
            });
        }
    })
}

fn capabilities(cut: &Cut) -> impl Iterator<Item = (String, &Capability)> {
    let name = |what| format!("the {what} of {} at {}", cut.profile, cut.placement.start);
    let made = cut.made.as_ref();
    let of_compute = made.and_then(|made| made.computed.as_ref());
    let gpu = made.map(|made| (name("GPU instance"), &made.capability));
    gpu.into_iter().chain(of_compute.map(|computed| (name("compute instance"), &computed.capability)))
}

fn capability_files(carving: &Carving) -> Outcome {
    each(carving, made, |findings, _, cut, _| {
        for (name, capability) in capabilities(cut) {
            expect_files(findings, &name, capability);
        }
    })
}

fn capability_nodes(carving: &Carving) -> Outcome {
    let all: Vec<_> = carving.cuts.iter().flat_map(capabilities).collect();
    if all.is_empty() {
        return skipped(carving, "no cut came so far");
    }
    judge_nodes(all.iter().map(|(name, capability)| (name.as_str(), *capability)))
}

fn in_use(carving: &Carving) -> Outcome {
    each(carving, made, |findings, name, cut, (_, made)| {
        let (Some((instance, computed)), Ok(compute)) = (computed(cut), &made.compute) else { return };
        let refused = matches!(&computed.destroyed_too_early, Err(error) if error.code == Code::InUse);
        let expected = format!("{name} not destroyed while a compute instance is in it: in use (19)");
        findings.expect(refused, expected, || mismatch(computed.destroyed_too_early.as_ref()));
        let (instances, within) = &computed.still;
        let there = instances.iter().flatten().any(|live| live.id == instance.id)
            && within.iter().flatten().any(|live| live.id == compute.id);
        findings.expect(there, format!("{name} there with its compute instance after that"), || "not there".to_owned());
    })
}

fn destroyed(carving: &Carving) -> Outcome {
    each(carving, made, |findings, name, _, (_, made)| {
        if let Some(computed) = &made.computed {
            findings.value(&computed.destroyed, format!("the compute instance of {name} destroyed"));
            if let Some(left) = findings.value(&computed.left, format!("the compute instances of {name} then")) {
                findings.expect(left.is_empty(), format!("none of {name}"), || format!("{}", left.len()));
            }
        }
        findings.value(&made.destroyed, format!("{name} destroyed"));
        if let Some(left) = findings.value(&made.left, "the instances then") {
            findings.expect(left.is_empty(), format!("no instance after {name}"), || format!("{left:?}"));
        }
    })
}

fn gone(carving: &Carving) -> Outcome {
    each(carving, made, |findings, name, _, (_, made)| {
        let again = made.computed.as_ref().filter(|computed| computed.destroyed.is_ok());
        let again = again.map(|computed| ("destroying its compute instance again", &computed.destroyed_again));
        for (doing, answer) in again.into_iter().chain(made.on_gone.iter().map(|(doing, answer)| (*doing, answer))) {
            let gone = matches!(answer, Err(error) if error.is_gone());
            let expected = format!("{name} is gone, {doing} says: not found (6)");
            findings.expect(gone, expected, || mismatch(answer.as_ref()));
        }
    })
}

fn files_gone(carving: &Carving) -> Outcome {
    each(carving, made, |findings, name, _, (_, made)| {
        for file in &made.stale_files {
            findings.expect(false, format!("no capability file when {name} is gone"), || file.clone());
        }
    })
}

fn max_instances(carving: &Carving) -> Outcome {
    if carving.fills.is_empty() {
        return skipped(carving, "no profile was made as often as it may be");
    }
    let mut findings = Findings::default();
    for fill in &carving.fills {
        let (name, wanted) = (&fill.profile.name, fill.profile.max_instances as usize);
        let room = fill.placements.len();
        findings.expect(room == wanted, format!("room for {wanted} of {name}"), || format!("for {room}"));
        for (answer, placement) in fill.created.iter().zip(&fill.placements) {
            findings.value(answer, format!("{name} at {} with a compute instance, one of {wanted}", placement.start));
        }
        if let Some(listed) = findings.value(&fill.listed, format!("all of {name}")) {
            let mut places: Vec<Placement> = listed.iter().map(|live| live.placement).collect();
            places.sort_unstable();
            findings.expect(places == fill.placements, format!("{name} at {:?}", fill.placements), || {
                format!("{listed:?}")
            });
        }
    }
    findings.outcome()
}

fn uuids(carving: &Carving) -> Outcome {
    if carving.fills.is_empty() {
        return skipped(carving, "no profile was made as often as it may be");
    }
    let mut findings = Findings::default();
    for fill in &carving.fills {
        let live: Vec<&str> = fill.created.iter().flatten().map(|compute| compute.uuid.as_str()).collect();
        let different = live.iter().collect::<BTreeSet<_>>().len();
        let expected = format!("{} UUIDs of {} living at once", live.len(), fill.profile.name);
        findings.expect(different == live.len(), expected, || format!("{different}"));
    }
    findings.outcome()
}

fn one_more(carving: &Carving) -> Outcome {
    let tried: Vec<_> =
        carving.fills.iter().filter_map(|fill| Some((&fill.profile, fill.one_more.as_ref()?))).collect();
    if tried.is_empty() {
        return skipped(carving, "no profile leaves room for one more than it may be");
    }
    let mut findings = Findings::default();
    for (profile, answer) in tried {
        let refused = matches!(answer, Err(error) if error.code == Code::InsufficientResources);
        let (name, max) = (&profile.name, profile.max_instances);
        let expected = format!("no more than {max} of {name}: insufficient resources (23)");
        findings.expect(refused, expected, || mismatch(answer.as_ref()));
    }
    findings.outcome()
}

/// Why MIG mode was not switched off.
fn mode_stays(carving: &Carving) -> Outcome {
    if carving.switchable {
        skipped(carving, "MIG was not switched off")
    } else {
        Outcome::Skipped("MIG mode of this GPU changes only with a reset".to_owned())
    }
}

fn mig_held(carving: &Carving) -> Outcome {
    let Some(refused) = &carving.refused_off else { return mode_stays(carving) };
    let mut findings = Findings::default();
    let expected = "MIG not switched off while an instance lives: an error";
    findings.expect(refused.answer.is_err(), expected, || "success".to_owned());
    let current = refused.modes.as_ref().ok().and_then(|modes| modes.map(|modes| modes.current));
    findings.expect(current == Some(MigMode::Enabled), "MIG still on", || format!("{:?}", refused.modes));
    findings.expect(refused.listed == Ok(vec![refused.instance]), "the instance still there", || {
        format!("{:?}", refused.listed)
    });
    findings.outcome()
}

fn mig_off(carving: &Carving) -> Outcome {
    carving.switched_off.as_ref().map_or_else(|| mode_stays(carving), |switch| switched(switch, OFF))
}

fn as_found(carving: &Carving) -> Outcome {
    let mut findings = Findings::default();
    if let Some(left) = findings.value(&carving.left, "the GPU as it was found") {
        let State { modes, instances } = &carving.found;
        let found = || format!("{:?}, {:?}", left.modes, left.instances);
        findings.expect(*left == carving.found, format!("{modes:?}, {instances:?}"), found);
    }
    if let Some(Halt::Stuck(what)) = &carving.halted {
        findings.expect(false, "everything removed that was made", || what.clone());
    }
    findings.outcome()
}
