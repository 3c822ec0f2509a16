//! Reads opaque parameters, and finds everything that is wrong with them rather than the first thing.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Map, Number, Value};

use super::{
    API_VERSION, DeviceConfig, GpuConfig, GpuSharing, MigDeviceConfig, MigDeviceSharing, MpsConfig, SharingStrategy,
    TimeSlice, TimeSlicingConfig, support,
};
use crate::problem::{Problem, field, nearest, quoted};
use crate::quantity::Amount;

/// What could be read of a document, and what is wrong with it. Where nothing is, all of it could be read.
pub(super) struct Reading {
    pub(super) config: Option<DeviceConfig>,
    pub(super) problems: Vec<Problem>,
}

/// What a configuration is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Gpu,
    Mig,
}

/// An object of the document, at a path.
struct Object<'a> {
    path: String,
    fields: &'a Map<String, Value>,
}

pub(super) fn read(parameters: &Value, path: &str) -> Reading {
    let mut problems = Vec::new();
    let config = document(parameters, path, &mut problems);
    Reading { config, problems }
}

fn document(parameters: &Value, path: &str, problems: &mut Vec<Problem>) -> Option<DeviceConfig> {
    let Value::Object(fields) = parameters else {
        let problem = mistyped(path.to_owned(), "an object", parameters);
        problems.push(problem.hint(format!("begin with apiVersion: {API_VERSION}")));
        return None;
    };
    let object = Object { path: path.to_owned(), fields };
    object.word("apiVersion", &[(API_VERSION, ())], API_VERSION, problems);
    let kinds = [("GpuConfig", Kind::Gpu), ("MigDeviceConfig", Kind::Mig)];
    let not_served = object.fields.get("kind").and_then(Value::as_str).and_then(support::kind);
    if let Some(why) = not_served {
        problems.push(Problem::new(field(path, "kind"), format!("{} {why}", object.fields["kind"])));
        return None;
    }
    let kind = object.word("kind", &kinds, "GpuConfig or MigDeviceConfig", problems)?;
    object.only(&["apiVersion", "kind", "sharing"], problems);
    let sharing = object.object("sharing", problems);
    Some(match kind {
        Kind::Gpu => {
            DeviceConfig::Gpu(GpuConfig { sharing: sharing.and_then(|sharing| gpu_sharing(&sharing, problems)) })
        }
        Kind::Mig => {
            DeviceConfig::Mig(MigDeviceConfig { sharing: sharing.and_then(|sharing| mig_sharing(&sharing, problems)) })
        }
    })
}

fn gpu_sharing(sharing: &Object<'_>, problems: &mut Vec<Problem>) -> Option<GpuSharing> {
    sharing.only(&["strategy", "timeSlicingConfig", "mpsConfig"], problems);
    let strategy = strategy(sharing, problems);
    let slicing = sharing.object("timeSlicingConfig", problems);
    let mps = sharing.object("mpsConfig", problems);
    agree(strategy, slicing.as_ref(), mps.as_ref(), problems);
    let slicing = slicing.map(|slicing| time_slicing(&slicing, problems));
    let mps = mps.map(|mps| mps_config(&mps, Kind::Gpu, problems));
    Some(GpuSharing { strategy: strategy?, time_slicing_config: slicing, mps_config: mps })
}

fn mig_sharing(sharing: &Object<'_>, problems: &mut Vec<Problem>) -> Option<MigDeviceSharing> {
    if let Some((_, path)) = sharing.get("timeSlicingConfig") {
        problems.push(Problem::new(path, "MIG devices have no time slices to set").hint("remove it"));
    }
    sharing.only(&["strategy", "mpsConfig", "timeSlicingConfig"], problems);
    let strategy = strategy(sharing, problems);
    let mps = sharing.object("mpsConfig", problems);
    agree(strategy, None, mps.as_ref(), problems);
    let mps = mps.map(|mps| mps_config(&mps, Kind::Mig, problems));
    Some(MigDeviceSharing { strategy: strategy?, mps_config: mps })
}

fn strategy(sharing: &Object<'_>, problems: &mut Vec<Problem>) -> Option<SharingStrategy> {
    let served = SharingStrategy::ALL.into_iter().filter(|strategy| support::strategy(*strategy).is_none());
    let served: Vec<_> = served.map(SharingStrategy::name).collect();
    let known = SharingStrategy::ALL.map(|strategy| (strategy.name(), strategy));
    sharing.word("strategy", &known, &listed(&served, "or"), problems)
}

/// Settings of the strategy that is not chosen say that the writer wants two things.
fn agree(
    strategy: Option<SharingStrategy>,
    slicing: Option<&Object<'_>>,
    mps: Option<&Object<'_>>,
    problems: &mut Vec<Problem>,
) {
    let (settings, of) = match (strategy, slicing, mps) {
        (Some(SharingStrategy::TimeSlicing), _, Some(mps)) => (mps, SharingStrategy::Mps),
        (Some(SharingStrategy::Mps), Some(slicing), _) => (slicing, SharingStrategy::TimeSlicing),
        _ => return,
    };
    let chosen = strategy.map_or("", SharingStrategy::name);
    let message = format!("settings of {of}, and the strategy is {chosen}");
    problems.push(Problem::new(settings.path.clone(), message).hint("remove either"));
}

fn time_slicing(slicing: &Object<'_>, problems: &mut Vec<Problem>) -> TimeSlicingConfig {
    slicing.only(&["interval"], problems);
    if slicing.get("interval").is_none() {
        return TimeSlicingConfig { interval: None };
    }
    let served = TimeSlice::ALL.into_iter().filter(|interval| support::time_slice(*interval).is_none());
    let served: Vec<_> = served.map(TimeSlice::name).collect();
    let known = TimeSlice::ALL.map(|interval| (interval.name(), interval));
    TimeSlicingConfig { interval: slicing.word("interval", &known, &listed(&served, "or"), problems) }
}

fn mps_config(mps: &Object<'_>, kind: Kind, problems: &mut Vec<Problem>) -> MpsConfig {
    const THREADS: &str = "defaultActiveThreadPercentage";
    const LIMIT: &str = "defaultPinnedDeviceMemoryLimit";
    const LIMITS: &str = "defaultPerDevicePinnedMemoryLimit";
    const MULTI_USER: &str = "multiUser";
    mps.only(&[THREADS, LIMIT, LIMITS, MULTI_USER], problems);
    let threads = mps.get(THREADS).and_then(|(value, path)| percentage(value, path, problems));
    let limit = mps.get(LIMIT).and_then(|(value, path)| memory_limit(value, path, problems));
    let mut limits = BTreeMap::new();
    if let Some(by_device) = mps.object(LIMITS, problems) {
        for (device, value) in by_device.fields {
            let path = field(&by_device.path, device);
            problems.extend(device_key(device, &path, kind));
            limits.extend(memory_limit(value, path, problems).map(|limit| (device.clone(), limit)));
        }
    }
    let multi_user = mps.get(MULTI_USER).and_then(|(value, path)| {
        let flag = value.as_bool();
        problems.extend(flag.is_none().then(|| mistyped(path, "true or false", value)));
        flag
    });
    MpsConfig {
        default_active_thread_percentage: threads,
        default_pinned_device_memory_limit: limit,
        default_per_device_pinned_memory_limit: limits,
        multi_user,
    }
}

fn percentage(value: &Value, path: String, problems: &mut Vec<Problem>) -> Option<u32> {
    let Value::Number(number) = value else {
        problems.push(mistyped(path, "a number", value).hint("use a whole number from 0 to 100"));
        return None;
    };
    let percentage = number.as_u64().and_then(|number| u32::try_from(number).ok()).filter(|number| *number <= 100);
    if percentage.is_none() {
        problems
            .push(Problem::new(path, format!("{number} is no percentage")).hint("use a whole number from 0 to 100"));
    }
    percentage
}

/// Limits are counted in whole MiB, which the driver that kerf replaces rounds down to.
fn memory_limit(value: &Value, path: String, problems: &mut Vec<Problem>) -> Option<Quantity> {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => quantity(number),
        _ => {
            problems.push(mistyped(path, "a quantity", value).hint("write it as Kubernetes does, such as 4Gi"));
            return None;
        }
    };
    let problem = match Amount::parse(&text) {
        Some(amount) if amount >= Amount::MEBIBYTE => return Some(Quantity(text)),
        Some(_) => Problem::new(path, format!("{} is less than 1Mi", quoted(&text)))
            .hint("limits are counted in MiB: use 1Mi or more"),
        None => Problem::new(path, format!("{} is no quantity", quoted(&text)))
            .hint("write it as Kubernetes does, such as 4Gi"),
    };
    problems.push(problem);
    None
}

/// The text of a quantity that is written as a number.
fn quantity(number: &Number) -> String {
    number.as_f64().filter(|_| number.is_f64()).map_or_else(|| number.to_string(), |number| number.to_string())
}

/// What is wrong with a key of the limits by device: it is the device's UUID as NVML prints it, or its place among the
/// sorted UUIDs of the devices that the configuration is for.
fn device_key(key: &str, path: &str, kind: Kind) -> Option<Problem> {
    let index =
        key == "0" || (key.bytes().all(|digit| digit.is_ascii_digit()) && !key.starts_with('0') && !key.is_empty());
    let (own, other, what) = match kind {
        Kind::Gpu => ("GPU-", "MIG-", "whole GPUs"),
        Kind::Mig => ("MIG-", "GPU-", "MIG devices"),
    };
    if index || key.strip_prefix(own).is_some_and(is_uuid) {
        return None;
    }
    let message = match key.strip_prefix(other) {
        Some(uuid) if is_uuid(uuid) => format!("{key:?} is none of the {what} that this configuration is for"),
        _ => format!("{} names no device", quoted(key)),
    };
    let hint = format!("use a UUID as nvidia-smi -L prints it ({own}...), or a number from 0");
    Some(Problem::new(path, message).hint(hint))
}

/// Five groups of lower-case hexadecimal digits, as NVML prints them.
fn is_uuid(text: &str) -> bool {
    let groups: Vec<&str> = text.split('-').collect();
    let hexadecimal = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12])
        && groups.iter().all(|group| group.bytes().all(hexadecimal))
}

impl<'a> Object<'a> {
    /// A field, unless it is null: that says as much as a missing one.
    fn get(&self, name: &str) -> Option<(&'a Value, String)> {
        let value = self.fields.get(name).filter(|value| !value.is_null())?;
        Some((value, field(&self.path, name)))
    }

    /// Every field that is none of these is a problem.
    fn only(&self, known: &[&'static str], problems: &mut Vec<Problem>) {
        for name in self.fields.keys().filter(|name| !known.contains(&name.as_str())) {
            let hint = match nearest(name, known.iter().copied()) {
                Some(meant) => format!("did you mean {meant}?"),
                None => format!("known here: {}", listed(known, "and")),
            };
            problems.push(Problem::new(field(&self.path, name), "unknown field").hint(hint));
        }
    }

    /// A field that holds an object.
    fn object(&self, name: &str, problems: &mut Vec<Problem>) -> Option<Object<'a>> {
        let (value, path) = self.get(name)?;
        match value {
            Value::Object(fields) => Some(Object { path, fields }),
            _ => {
                problems.push(mistyped(path, "an object", value));
                None
            }
        }
    }

    /// A field that must be there and be one of some words. `use_these` are those that help.
    fn word<T: Copy>(
        &self,
        name: &str,
        known: &[(&str, T)],
        use_these: &str,
        problems: &mut Vec<Problem>,
    ) -> Option<T> {
        let problem = match self.get(name) {
            None => Problem::new(field(&self.path, name), "missing"),
            Some((Value::String(word), path)) => match known.iter().find(|(known, _)| known == word) {
                Some((_, meaning)) => return Some(*meaning),
                None => Problem::new(path, format!("{} is not known", quoted(word))),
            },
            Some((value, path)) => mistyped(path, "a word", value),
        };
        problems.push(problem.hint(format!("use {use_these}")));
        None
    }
}

fn mistyped(path: String, wanted: &str, found: &Value) -> Problem {
    let found = match found {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    Problem::new(path, format!("must be {wanted}, and is {found}"))
}

/// `a, b and c`.
fn listed(words: &[&str], last: &str) -> String {
    match words {
        [] => String::new(),
        [word] => (*word).to_owned(),
        [first @ .., end] => format!("{} {last} {end}", first.join(", ")),
    }
}
