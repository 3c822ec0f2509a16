//! What a node's labels shall be. Pure.
//!
//! Keys and values are those of `internal/lm` in NVIDIA's k8s-device-plugin, which holds GPU feature discovery, and of the
//! gpu-operator (`nvidia.com/gpu.present`) and its MIG manager (`nvidia.com/mig.config.state`). `docs/labels.md` lists them
//! all, and those that are left out.

use std::collections::{BTreeMap, BTreeSet};

use kerf_api::{Gpu, GpuNode, GpuNodeStatus, GpuOffer, MigProfile, names};

use crate::classes::{is_profile, kind};
use crate::policy::{EVERYTHING, Forms, Resolution};

/// Labels by their keys.
pub type Labels = BTreeMap<String, String>;

/// The longest value of a label.
const LONGEST_VALUE: usize = 63;

/// The most GPUs of a node that are looked at, as for what is published.
const MOST_GPUS: usize = 128;

/// What is published of a node, as far as labels tell it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offered {
    /// Whether partitions are offered.
    pub partitions: bool,
    /// How many devices of each profile there are, where what is offered is a fixed layout.
    pub layout: BTreeMap<String, u32>,
    /// The names of the GPUs that are in MIG mode, or shall be: none of them is to be had whole.
    pub cut: BTreeSet<String>,
}

impl Offered {
    /// What a node offers under `resolution`. `counters`: whether the API server keeps counters, without which partitions are
    /// published only where a layout says which.
    pub fn of(gpu_node: &GpuNode, resolution: &Resolution, counters: bool) -> Offered {
        let gpus = gpu_node.status.iter().flat_map(|status| &status.gpus);
        let is_cut = |gpu: &&Gpu| matches!(gpu.offer, GpuOffer::Partitions | GpuOffer::WholeOrPartitions);
        let mut offered = Offered::default();
        for gpu in gpus.filter(is_cut) {
            if gpu.offer == GpuOffer::Partitions {
                offered.cut.insert(gpu.name.clone());
            }
            match resolution.terms.get(&gpu.name).map_or(EVERYTHING, |terms| &terms.forms) {
                Forms::Dynamic { .. } => offered.partitions |= counters,
                Forms::Fixed(cuts) => {
                    offered.cut.insert(gpu.name.clone());
                    cuts.iter().for_each(|cut| *offered.layout.entry(cut.profile.clone()).or_default() += 1);
                }
                Forms::Whole | Forms::Nothing => {}
            }
        }
        offered
    }
}

/// The labels of the node of `gpu_node`. `mig_config_state`: what becomes of the layout that the node's label
/// `nvidia.com/mig.config` asks for.
///
/// `None` while no GPU can be read, as when the driver is being replaced: nobody knows then, and the labels stay as they are.
pub fn wanted(gpu_node: &GpuNode, offered: &Offered, mig_config_state: Option<&str>) -> Option<Labels> {
    let status = gpu_node.status.as_ref()?;
    let (gpu, count) = most_common(status)?;
    let mut labels = Set::default();
    labels.put("gpu.present", "true");
    labels.put("gpu.product", product(&gpu.product));
    labels.put("gpu.count", count);
    // As of a GPU that nobody shares, or that nobody can have because it is cut.
    let whole = status.gpus.iter().any(|other| other.product == gpu.product && !offered.cut.contains(&other.name));
    labels.put("gpu.replicas", u32::from(whole));
    labels.put("gpu.sharing-strategy", "none");
    if gpu.memory_mib > 0 {
        labels.put("gpu.memory", gpu.memory_mib);
    }
    if let Some((major, minor)) = compute_capability(gpu) {
        labels.put("gpu.family", family(major, minor));
        labels.put("gpu.compute.major", major);
        labels.put("gpu.compute.minor", minor);
    }
    labels.versions(status);
    labels.put("mig.capable", status.gpus.iter().any(|gpu| gpu.mig.is_some()));
    labels.put("mps.capable", false);
    if offered.partitions || !offered.layout.is_empty() {
        labels.put("mig.strategy", "mixed");
    }
    for (profile, count) in &offered.layout {
        if let Some((gpu, profile)) = found(status, profile) {
            labels.partition(gpu, profile, *count);
        }
    }
    if let Some(state) = mig_config_state {
        labels.put("mig.config.state", state);
    }
    Some(labels.0)
}

/// The GPU that speaks for the node, and how many there are of it: of several products the one that most GPUs are, then the one
/// with the lowest PCI address. GPU feature discovery takes any of them.
fn most_common(status: &GpuNodeStatus) -> Option<(&Gpu, usize)> {
    let gpus = &status.gpus[..status.gpus.len().min(MOST_GPUS)];
    let known = || gpus.iter().filter(|gpu| !gpu.product.is_empty());
    let count = |gpu: &Gpu| known().filter(|other| other.product == gpu.product).count();
    // The last of the greatest is the first on the node.
    known().map(|gpu| (gpu, count(gpu))).rev().max_by_key(|(_, count)| *count)
}

/// A GPU that can be cut into partitions of this profile, and the profile.
fn found<'a>(status: &'a GpuNodeStatus, profile: &str) -> Option<(&'a Gpu, &'a MigProfile)> {
    let all = status
        .gpus
        .iter()
        .flat_map(|gpu| gpu.mig.iter().flat_map(move |mig| mig.profiles.iter().map(move |p| (gpu, p))));
    all.filter(|(_, found)| is_profile(&found.name)).find(|(_, found)| found.name == profile)
}

#[derive(Default)]
struct Set(Labels);

impl Set {
    /// A value that no label may have is left out: it comes from a node's plugin.
    fn put(&mut self, key: impl std::fmt::Display, value: impl std::fmt::Display) {
        let value = format!("{value}");
        if is_label_value(&value) {
            self.0.insert(format!("{}{key}", names::NODE_LABEL_PREFIX), value);
        }
    }

    /// Driver and CUDA, under the newer keys and those that they replace.
    fn versions(&mut self, status: &GpuNodeStatus) {
        if let Some(version) = &status.driver_version {
            let parts: Vec<&str> = version.split('.').collect();
            if let [major, minor, rest @ ..] = parts.as_slice()
                && rest.len() <= 1
            {
                let revision = rest.first().unwrap_or(&"");
                for (key, value) in [("major", major), ("minor", minor)] {
                    self.put(format_args!("cuda.driver.{key}"), value);
                    self.put(format_args!("cuda.driver-version.{key}"), value);
                }
                self.put("cuda.driver.rev", revision);
                self.put("cuda.driver-version.revision", revision);
                self.put("cuda.driver-version.full", version);
            }
        }
        if let Some(version) = &status.cuda_driver_version
            && let Some((major, minor)) = version.split_once('.')
        {
            for (key, value) in [("major", major), ("minor", minor)] {
                self.put(format_args!("cuda.runtime.{key}"), value);
                self.put(format_args!("cuda.runtime-version.{key}"), value);
            }
            self.put("cuda.runtime-version.full", version);
        }
    }

    /// The partitions of one profile in a fixed layout.
    fn partition(&mut self, gpu: &Gpu, profile: &MigProfile, count: u32) {
        let kind = kind(&profile.name);
        let name = kind.trim_start_matches("mig-");
        let mut put = |key: &str, value: &dyn std::fmt::Display| self.put(format_args!("{kind}.{key}"), value);
        put("product", &format!("{}-MIG-{name}", product(&gpu.product)));
        put("count", &count);
        put("replicas", &1);
        put("sharing-strategy", &"none");
        put("memory", &profile.memory_mib);
        put("multiprocessors", &profile.multiprocessors);
        // The one compute instance takes all of its GPU instance.
        put("slices.gi", &profile.compute_slices);
        put("slices.ci", &profile.compute_slices);
        put("engines.copy", &profile.copy_engines);
        put("engines.decoder", &profile.decoders);
        put("engines.encoder", &profile.encoders);
        put("engines.jpeg", &profile.jpeg_engines);
        put("engines.ofa", &profile.ofa_engines);
    }
}

/// Without what a label may not hold, and words joined by dashes.
fn product(name: &str) -> String {
    let kept: String =
        name.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ' ')).collect();
    let words: Vec<&str> = kept.split_whitespace().collect();
    words.join("-")
}

/// A label's value: at most 63 letters, digits, dashes, underscores and dots, a letter or digit first and last.
fn is_label_value(value: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric();
    value.is_empty()
        || (value.len() <= LONGEST_VALUE
            && value.starts_with(plain)
            && value.ends_with(plain)
            && value.chars().all(|c| plain(c) || matches!(c, '-' | '_' | '.')))
}

fn compute_capability(gpu: &Gpu) -> Option<(u32, u32)> {
    let version = gpu.attributes.get("cudaComputeCapability")?.version.as_deref()?;
    let mut parts = version.split('.').map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??))
}

/// The family of a compute capability, in GPU feature discovery's words.
fn family(major: u32, minor: u32) -> &'static str {
    match (major, minor) {
        (1, _) => "tesla",
        (2, _) => "fermi",
        (3, _) => "kepler",
        (5, _) => "maxwell",
        (6, _) => "pascal",
        (7, ..5) => "volta",
        (7, _) => "turing",
        (8, ..9) => "ampere",
        (8, _) => "ada-lovelace",
        (9, _) => "hopper",
        (10 | 12, _) => "blackwell",
        (13, _) => "rubin",
        _ => "undefined",
    }
}
