//! What kerf relies on about what a GPU says it can be cut into.

use std::collections::BTreeSet;

use kerf_mig::{Geometry, Placement, Profile};
use kerf_nvml::{MigMode, MigModes};

use crate::assertion::{Assertion, Findings, Outcome};
use crate::reading::GpuReading;

/// In the order in which they are told.
pub(crate) const GEOMETRY: &[Assertion<GpuReading>] = &[
    Assertion {
        name: "mig.modes",
        relied_on_for: "a whole GPU is handed out with MIG verifiably off; no instance is taken to live there then",
        check: modes,
    },
    Assertion {
        name: "mig.profiles",
        relied_on_for: "partitions are published as the GPU tells its profiles, where MIG is switched on demand also \
                        while it is off",
        check: profiles,
    },
    Assertion {
        name: "mig.profiles-stable",
        relied_on_for: "what was published can still be carved later; profiles are remembered while the driver is loaded",
        check: profiles_stable,
    },
    Assertion {
        name: "mig.profile-ids",
        relied_on_for: "instances are created by profile id and recognised by it; devices are named by the profile's label",
        check: profile_ids,
    },
    Assertion {
        name: "mig.profile-names",
        relied_on_for: "users ask for partitions by profile name",
        check: profile_names,
    },
    Assertion {
        name: "mig.placements",
        relied_on_for: "memory slices are counted so that what overlaps excludes itself in the scheduler",
        check: placements,
    },
    Assertion {
        name: "mig.max-instances",
        relied_on_for: "the counters that are published beside the memory slices admit as many instances as the GPU does",
        check: max_instances,
    },
];

/// More memory slices than any product has (12 on an RTX PRO 6000, NVIDIA MIG user guide).
const MAX_SLICES: u32 = 64;

/// Why there is nothing to say about this GPU's profiles.
fn nothing_to_cut(gpu: &GpuReading) -> Option<Outcome> {
    let why = match (&gpu.modes, &gpu.profiles) {
        (Ok(None), _) => "the GPU has no MIG",
        (_, Err(_)) => "the profiles cannot be read",
        (_, Ok(profiles)) if profiles.is_empty() => "the GPU tells no profiles in this mode",
        _ => return None,
    };
    Some(Outcome::Skipped(why.to_owned()))
}

fn told(gpu: &GpuReading) -> &[Profile] {
    gpu.profiles.as_deref().unwrap_or_default()
}

fn modes(gpu: &GpuReading) -> Outcome {
    let mut findings = Findings::default();
    if let Some(modes) = findings.value(&gpu.modes, "the MIG modes, or that there is no MIG") {
        let live = gpu.instances.as_ref().map_or(0, Vec::len);
        let on = matches!(modes, Some(MigModes { current: MigMode::Enabled, .. }));
        findings.expect(on || live == 0, "no instance while MIG is off", || format!("{live}"));
        findings.expect(modes.is_some() || told(gpu).is_empty(), "no profiles on a GPU without MIG", || {
            format!("{}", told(gpu).len())
        });
    }
    findings.outcome()
}

fn profiles(gpu: &GpuReading) -> Outcome {
    let mut findings = Findings::default();
    let Some(profiles) = findings.value(&gpu.profiles, "the profiles, none on a GPU without MIG") else {
        return findings.outcome();
    };
    let Ok(Some(modes)) = gpu.modes else { return Outcome::Skipped("the GPU has no MIG".to_owned()) };
    let switchable = gpu.facts.as_ref().is_ok_and(|facts| facts.mig_mode_switchable);
    let on = modes.current == MigMode::Enabled;
    if !on && !switchable {
        return Outcome::Skipped("MIG is off, and this GPU need not tell its profiles then".to_owned());
    }
    findings
        .expect(!profiles.is_empty(), "profiles", || format!("none while MIG is {}", if on { "on" } else { "off" }));
    for profile in profiles {
        let Profile { name, compute_slices, memory_mib, max_instances, .. } = profile;
        let sizes = *compute_slices > 0 && *max_instances > 0 && (*memory_mib > 0 || !has_memory(gpu));
        findings.expect(sizes, format!("compute slices, memory and a number of instances of {name}"), || {
            format!("{compute_slices} slices, {memory_mib} MiB, {max_instances} instances")
        });
    }
    findings.outcome()
}

/// Whether the GPU has memory of its own: on an integrated one the profiles have none either.
fn has_memory(gpu: &GpuReading) -> bool {
    gpu.facts.as_ref().is_ok_and(|facts| facts.memory_bytes.is_some())
}

fn profiles_stable(gpu: &GpuReading) -> Outcome {
    if let Some(skipped) = nothing_to_cut(gpu) {
        return skipped;
    }
    let mut findings = Findings::default();
    if let Some(again) = findings.value(&gpu.again.1, "the profiles a second time") {
        let first = told(gpu);
        findings.expect(first.len() == again.len(), format!("{} profiles again", first.len()), || {
            format!("{}", again.len())
        });
        for (one, other) in first.iter().zip(again).filter(|(one, other)| one != other) {
            findings.expect(false, format!("{one:?}"), || format!("{other:?} in its place when read again"));
        }
    }
    findings.outcome()
}

fn profile_ids(gpu: &GpuReading) -> Outcome {
    if let Some(skipped) = nothing_to_cut(gpu) {
        return skipped;
    }
    let mut findings = Findings::default();
    let (mut ids, mut labels) = (BTreeSet::new(), BTreeSet::new());
    for profile in told(gpu) {
        let (id, label) = (profile.id, profile.label());
        findings.expect(ids.insert(id), "one profile of each id", || format!("two of {id}"));
        findings.expect(labels.insert(label.clone()), "one profile of each label", || format!("two of {label:?}"));
    }
    findings.outcome()
}

fn profile_names(gpu: &GpuReading) -> Outcome {
    if let Some(skipped) = nothing_to_cut(gpu) {
        return skipped;
    }
    let mut findings = Findings::default();
    for Profile { name, compute_slices, .. } in told(gpu) {
        let expected = format!("{compute_slices}g.<n>gb, perhaps with +<attribute> or -<attribute>");
        findings.expect(slices_in_name(name) == Some(*compute_slices), expected, || format!("{name:?}"));
    }
    findings.outcome()
}

/// The compute slices that a profile's name speaks of; `None` for what is no name of a profile.
fn slices_in_name(name: &str) -> Option<u32> {
    let (size, attribute) = match name.split_once(['+', '-']) {
        Some((size, attribute)) => (size, Some(attribute)),
        None => (name, None),
    };
    let of_words = |attribute: &str| {
        attribute.split('.').all(|word| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphanumeric()))
    };
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u32>().ok())?;
    let (compute, memory) = size.strip_suffix("gb")?.split_once("g.")?;
    digits(memory)?;
    attribute.is_none_or(of_words).then(|| digits(compute))?
}

fn placements(gpu: &GpuReading) -> Outcome {
    if let Some(skipped) = nothing_to_cut(gpu) {
        return skipped;
    }
    let mut findings = Findings::default();
    let slices = told(gpu).iter().flat_map(|profile| &profile.placements).map(|place| place.end()).max().unwrap_or(0);
    for Profile { name, placements, .. } in told(gpu) {
        let list = || text(placements);
        let size = placements.first().map_or(0, |first| first.size);
        let one_size = placements.iter().all(|placement| placement.size == size);
        findings.expect(size > 0 && one_size, format!("placements of {name}, all of one size"), list);
        let ascending = placements.windows(2).all(|pair| pair[0] < pair[1]);
        findings.expect(ascending, format!("each placement of {name} once"), list);
    }
    // NVML does not tell the number of memory slices: kerf takes it to be where the last placement ends.
    let whole = Placement { start: 0, size: slices };
    let spanned = told(gpu).iter().any(|profile| profile.placements.contains(&whole));
    findings.expect(spanned && slices <= MAX_SLICES, "a profile over all memory slices", || {
        format!("placements that end at {slices}, and none from 0 to there")
    });
    findings.outcome()
}

pub(crate) fn text(placements: &[Placement]) -> String {
    let all: Vec<_> = placements.iter().map(|placement| format!("{}:{}", placement.start, placement.size)).collect();
    if all.is_empty() { "none".to_owned() } else { all.join(", ") }
}

/// As many placements of a profile as can be had beside each other.
pub(crate) fn apart(profile: &Profile) -> Vec<Placement> {
    let mut placements = profile.placements.clone();
    placements.sort_by_key(|placement| placement.end());
    let mut apart: Vec<Placement> = Vec::new();
    for placement in placements.into_iter().filter(|placement| placement.size > 0) {
        if apart.last().is_none_or(|last| last.end() <= placement.start) {
            apart.push(placement);
        }
    }
    apart
}

fn max_instances(gpu: &GpuReading) -> Outcome {
    if let Some(skipped) = nothing_to_cut(gpu) {
        return skipped;
    }
    let mut findings = Findings::default();
    let geometry = Geometry::new(told(gpu).to_vec());
    let (totals, counted) = (geometry.totals(), geometry.limited_engines());
    for profile in told(gpu) {
        let by_memory = u32::try_from(apart(profile).len()).unwrap_or(u32::MAX);
        let by_engines = counted.iter().filter_map(|&engine| {
            let each = profile.engines.get(engine);
            totals.get(engine).checked_div(each)
        });
        let admitted = by_engines.min().map_or(by_memory, |engines| engines.min(by_memory));
        let expected = format!("{} instances of {}, as many as the counters admit", admitted, profile.name);
        findings.expect(profile.max_instances == admitted, expected, || format!("{}", profile.max_instances));
    }
    findings.outcome()
}

#[cfg(test)]
mod tests {
    use kerf_mig::product::Product;

    use super::*;

    #[test]
    fn names_of_profiles_are_read() {
        for (name, slices) in [
            ("1g.10gb", Some(1)),
            ("1g.10gb+me", Some(1)),
            ("2g.48gb+me.all", Some(2)),
            ("1g.24gb-me", Some(1)),
            ("4g.96gb+gfx", Some(4)),
            ("1g.0gb", Some(1)),
            ("", None),
            ("1g.10gb+", None),
            ("1g.10gb+me.", None),
            ("MIG 1g.10gb", None),
            ("1c.2g.20gb", None),
            ("+1g.10gb", None),
            ("g.10gb", None),
            ("1g.gb", None),
        ] {
            assert_eq!(slices_in_name(name), slices, "{name:?}");
        }
    }

    #[test]
    fn as_many_placements_as_fit_beside_each_other() {
        let product = Product::by_key("h100-80gb").unwrap();
        let count = |name: &str| {
            let profile = product.mig.iter().flat_map(|mig| &mig.profiles).find(|known| known.profile.name == name);
            apart(&profile.unwrap().profile).len()
        };
        assert_eq!(["1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "7g.80gb"].map(count), [7, 4, 3, 2, 1]);
    }
}
