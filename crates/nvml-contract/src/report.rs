//! The report: a file that a person can send back, from which the simulator is improved.
//!
//! Names are as in the products' files of `kerf-mig`. No UUID, serial number or host name is in it: none is written on
//! purpose, and whatever looks like a UUID is masked.

use kerf_mig::{Placement, Profile};
use kerf_nvml::{Error, GpuFacts, MigMode, MigModes};
use serde::Serialize;

use crate::assertion::{Outcome, Verdict};
use crate::carve::{Carving, Refusal};
use crate::reading::GpuReading;
use crate::suite::Results;
use crate::timing::{Measured, Times};

/// Version of the form. Readers of one version must expect more fields than they know.
const VERSION: u32 = 1;

/// More mismatches of one assertion than this say nothing new.
const MAX_MISMATCHES: usize = 20;

#[derive(Serialize)]
struct Report<'a> {
    version: u32,
    suite: &'static str,
    driver_version: Option<&'a str>,
    cuda_version: Option<String>,
    summary: SummaryEntry,
    gpus: Vec<GpuEntry<'a>>,
    assertions: Vec<AssertionEntry<'a>>,
    carved: Vec<CarvedEntry>,
    times: Vec<TimesEntry>,
}

#[derive(Serialize)]
struct SummaryEntry {
    held: usize,
    failed: usize,
    skipped: usize,
}

#[derive(Serialize)]
struct GpuEntry<'a> {
    index: usize,
    /// Why there is no more to say.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(flatten)]
    read: Option<ReadEntry<'a>>,
}

#[derive(Serialize)]
struct ReadEntry<'a> {
    address: String,
    name: Option<&'a str>,
    brand: Option<&'a str>,
    architecture: Option<&'a str>,
    compute_capability: Option<(u32, u32)>,
    memory_bytes: Option<u64>,
    minor: Option<u32>,
    mig_mode_switchable: Option<bool>,
    mig: Option<ModesEntry>,
    profiles: &'a [Profile],
    instances: Vec<InstanceEntry>,
    processes: Option<usize>,
}

#[derive(Serialize)]
struct ModesEntry {
    current: &'static str,
    pending: &'static str,
}

#[derive(Serialize)]
struct InstanceEntry {
    id: u32,
    profile_id: u32,
    placement: Placement,
    compute_instances: Option<Vec<u32>>,
}

#[derive(Serialize)]
struct AssertionEntry<'a> {
    name: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<&'a str>,
    relied_on_for: &'static str,
    outcome: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mismatches: Vec<MismatchEntry<'a>>,
    /// Mismatches left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_out: Option<usize>,
}

#[derive(Serialize)]
struct MismatchEntry<'a> {
    expected: &'a str,
    found: &'a str,
}

#[derive(Serialize)]
struct CarvedEntry {
    gpu: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    halted: Option<String>,
    cuts: Vec<CutEntry>,
    #[serde(skip_serializing_if = "Option::is_none")]
    capability_files_appear: Option<TimesOnly>,
    #[serde(skip_serializing_if = "Option::is_none")]
    capability_nodes_appear: Option<TimesOnly>,
}

/// Which ids the driver gives out where.
#[derive(Serialize)]
struct CutEntry {
    profile_id: u32,
    start: u32,
    gpu_instance: Option<u32>,
    compute_instance: Option<u32>,
}

#[derive(Serialize)]
struct TimesEntry {
    function: &'static str,
    /// What else is in the time.
    #[serde(skip_serializing_if = "str::is_empty")]
    with: &'static str,
    succeeded: bool,
    #[serde(flatten)]
    times: TimesOnly,
}

#[derive(Serialize)]
struct TimesOnly {
    count: usize,
    min_ms: f64,
    median_ms: f64,
    max_ms: f64,
}

impl From<Times> for TimesOnly {
    fn from(Times { count, min_ms, median_ms, max_ms }: Times) -> TimesOnly {
        // Microseconds are as fine as the measurement.
        let rounded = |ms: f64| (ms * 1000.0).round() / 1000.0;
        TimesOnly { count, min_ms: rounded(min_ms), median_ms: rounded(median_ms), max_ms: rounded(max_ms) }
    }
}

/// The report as JSON.
///
/// # Errors
/// None that is known: everything in it can be written as JSON.
pub fn json(results: &Results) -> Result<String, serde_json::Error> {
    let reading = &results.reading;
    let summary = results.summary();
    let report = Report {
        version: VERSION,
        suite: env!("CARGO_PKG_VERSION"),
        driver_version: reading.driver_version.as_deref().ok(),
        cuda_version: reading.cuda_version.as_ref().ok().map(|cuda| format!("{}.{}", cuda.major, cuda.minor)),
        summary: SummaryEntry { held: summary.held, failed: summary.failed, skipped: summary.skipped },
        gpus: reading.gpus.iter().enumerate().map(|(index, gpu)| gpu_entry(index, gpu.as_ref())).collect(),
        assertions: results.verdicts.iter().map(assertion_entry).collect(),
        carved: results.carvings.iter().map(|(gpu, carving)| carved_entry(gpu.to_string(), carving)).collect(),
        times: results
            .times
            .iter()
            .map(|(Measured { function, with, succeeded }, times)| TimesEntry {
                function,
                with,
                succeeded: *succeeded,
                times: (*times).into(),
            })
            .collect(),
    };
    Ok(masked(&(serde_json::to_string_pretty(&report)? + "\n")))
}

fn gpu_entry<'a>(index: usize, gpu: Result<&'a GpuReading, &Error>) -> GpuEntry<'a> {
    let read = gpu.ok().map(|gpu| {
        let facts = gpu.facts.as_ref().ok();
        ReadEntry {
            address: gpu.name(),
            name: facts.map(|facts| facts.name.as_str()),
            brand: facts.map(|facts| facts.brand.as_str()),
            architecture: facts.map(|facts| facts.architecture.as_str()),
            compute_capability: facts.map(|facts| facts.compute_capability),
            memory_bytes: facts.and_then(|facts| facts.memory_bytes),
            minor: facts.map(|GpuFacts { minor, .. }| *minor),
            mig_mode_switchable: facts.map(|facts| facts.mig_mode_switchable),
            mig: gpu.modes.as_ref().ok().copied().flatten().map(modes_entry),
            profiles: gpu.profiles.as_deref().unwrap_or_default(),
            instances: gpu.instances.iter().flatten().map(instance_entry).collect(),
            processes: gpu.processes.as_ref().ok().map(Vec::len),
        }
    });
    GpuEntry { index, error: gpu.err().map(ToString::to_string), read }
}

fn modes_entry(modes: MigModes) -> ModesEntry {
    let word = |mode| if mode == MigMode::Enabled { "enabled" } else { "disabled" };
    ModesEntry { current: word(modes.current), pending: word(modes.pending) }
}

fn instance_entry(live: &crate::reading::LiveInstance) -> InstanceEntry {
    InstanceEntry {
        id: live.instance.id,
        profile_id: live.instance.profile_id,
        placement: live.instance.placement,
        compute_instances: live.compute.as_ref().ok().map(|compute| compute.iter().map(|one| one.id).collect()),
    }
}

fn assertion_entry(verdict: &Verdict) -> AssertionEntry<'_> {
    let Verdict { name, relied_on_for, gpu, outcome } = verdict;
    let (word, why, mismatches) = match outcome {
        Outcome::Held => ("held", None, &[][..]),
        Outcome::Failed(mismatches) => ("failed", None, &mismatches[..]),
        Outcome::Skipped(why) => ("skipped", Some(why.as_str()), &[][..]),
    };
    AssertionEntry {
        name,
        gpu: gpu.as_deref(),
        relied_on_for,
        outcome: word,
        why,
        mismatches: mismatches
            .iter()
            .take(MAX_MISMATCHES)
            .map(|mismatch| MismatchEntry { expected: &mismatch.expected, found: &mismatch.found })
            .collect(),
        left_out: mismatches.len().checked_sub(MAX_MISMATCHES).filter(|left_out| *left_out > 0),
    }
}

fn carved_entry(gpu: String, carving: &Result<Carving, Refusal>) -> CarvedEntry {
    let refused = carving.as_ref().err().map(ToString::to_string);
    let carving = carving.as_ref().ok();
    let cuts = carving.into_iter().flat_map(|carving| &carving.cuts).map(|cut| CutEntry {
        profile_id: cut.profile_id,
        start: cut.placement.start,
        gpu_instance: cut.created.as_ref().ok().map(|instance| instance.id),
        compute_instance: cut.made.as_ref().and_then(|made| made.compute.as_ref().ok()).map(|compute| compute.id),
    });
    CarvedEntry {
        gpu,
        refused,
        halted: carving.and_then(|carving| carving.halted.as_ref()).map(ToString::to_string),
        cuts: cuts.collect(),
        capability_files_appear: carving.and_then(|carving| Times::of(&carving.waits.files)).map(Into::into),
        capability_nodes_appear: carving.and_then(|carving| Times::of(&carving.waits.nodes)).map(Into::into),
    }
}

/// The text with everything that has the form of a UUID replaced.
fn masked(text: &str) -> String {
    /// Lengths of a UUID's groups of hexadecimal digits.
    const GROUPS: [usize; 5] = [8, 4, 4, 4, 12];
    let uuid_at = |text: &[u8]| {
        let mut at = 0;
        for (position, group) in GROUPS.into_iter().enumerate() {
            if position > 0 {
                (*text.get(at)? == b'-').then_some(())?;
                at += 1;
            }
            text.get(at..at + group)?.iter().all(u8::is_ascii_hexdigit).then_some(())?;
            at += group;
        }
        Some(at)
    };
    let mut masked = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        match uuid_at(rest.as_bytes()) {
            Some(length) => {
                masked.push_str("(uuid)");
                rest = &rest[length..];
            }
            None => {
                masked.push(first);
                rest = &rest[first.len_utf8()..];
            }
        }
    }
    masked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_masked_wherever_they_are() {
        let uuid = "445da789-865d-5fd1-0000-0123456789aB";
        for (text, expected) in [
            (format!("GPU-{uuid} at 3"), "GPU-(uuid) at 3".to_owned()),
            (format!("ü{uuid}{uuid}"), "ü(uuid)(uuid)".to_owned()),
            (format!("f{uuid}"), "f(uuid)".to_owned()),
            (uuid[..35].to_owned(), uuid[..35].to_owned()),
            ("0000:3b:00.0 1g.10gb".to_owned(), "0000:3b:00.0 1g.10gb".to_owned()),
        ] {
            assert_eq!(masked(&text), expected);
        }
    }
}
