//! The description of a node that the daemon starts from.
//!
//! ```yaml
//! driverVersion: 535.261.03
//! cudaDriverVersion: "12.2"
//! nodeName: node-1              # optional: makes the UUIDs of two nodes differ
//! uuids: deterministic          # or: fresh
//! latency: none                 # or: real, or {nvmlGpuInstanceDestroy: 1s, ...}: s, ms, or a number of ms
//! gpus:
//! - product: h100-80gb          # a key of kerf-mig's products
//!   count: 2                    # default 1
//! - product: a100-40gb
//!   pciBusId: "0000:d8:00.0"    # default: a place of its own; not with count
//!   mig: {current: false, pending: true}
//! - product: l40s
//!   broken: true                # no handle can be had
//!   numaNode: 1                 # default 0; -1: the kernel knows none
//!   pcieRoot: pci0000:d7        # default: the bus below
//!   virtualization: passthrough # or: vgpu; default none
//! faults:                       # what goes wrong, armed at the start in this order
//! - call: {function: nvmlGpuInstanceDestroy, gpu: 0, code: IN_USE, times: 2}
//! - call: {function: nvmlDeviceSetMigMode, activation: RESET_REQUIRED}
//! - call: {function: nvmlDeviceCreateGpuInstanceWithPlacement, nth: 3, hang: 10s, code: UNKNOWN, after: true}
//! - lost: {gpu: "0000:3b:00.0"}
//! - create: {gpu: 1, profile: 1g.10gb, start: 6, compute: true}
//! - process: {gpu: 1, pid: 4242, gi: 13, ci: 0, name: python3, memoryMib: 512, for: 30s}
//! - busy: {gpu: 1, gi: 13, tries: 3}
//! - capabilities: {gpu: 1, parts: [files, minors, nodes], late: 2s, nth: 1, times: always}
//! ```
//!
//! The keys of a fault are the fields of what [`Step`] names: [`CallFault`](crate::fault::CallFault),
//! [`LostGpu`](crate::fault::LostGpu), [`ForeignInstance`](crate::fault::ForeignInstance),
//! [`Process`](crate::fault::Process), [`Busy`](crate::fault::Busy) and
//! [`LateCapabilities`](crate::fault::LateCapabilities); their defaults are those of `nvml-sim ctl fault`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kerf_mig::product::Product;
use serde::{Deserialize, Deserializer};

use crate::fault::{FaultError, Step};
use crate::node::{GpuSpec, Uuids, Virtualization, gpu_serial, gpu_uuid};
use crate::view::PciAddress;

/// The kernel module's table of capability files has room for this many GPUs.
const MAX_GPUS: usize = 32;

/// A node, as described.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct NodeFile {
    driver_version: String,
    cuda_driver_version: CudaVersion,
    #[serde(default)]
    node_name: String,
    #[serde(default)]
    uuids: Uuids,
    #[serde(default)]
    latency: Latency,
    gpus: Vec<GpuEntry>,
    #[serde(default)]
    faults: Vec<Step>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct GpuEntry {
    product: String,
    count: Option<usize>,
    pci_bus_id: Option<String>,
    pcie_root: Option<String>,
    uuid: Option<String>,
    #[serde(default)]
    numa_node: i32,
    #[serde(default)]
    mig: MigEntry,
    #[serde(default)]
    broken: bool,
    #[serde(default)]
    virtualization: Virtualization,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct MigEntry {
    #[serde(default)]
    current: bool,
    pending: Option<bool>,
}

/// How long calls take.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "LatencyEntry")]
pub enum Latency {
    /// A set with a name.
    Named(LatencySet),
    /// By NVML function.
    Calls(BTreeMap<String, Duration>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum LatencyEntry {
    Name(String),
    Calls(BTreeMap<String, TimeEntry>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TimeEntry {
    Milliseconds(u64),
    Text(String),
}

impl Default for Latency {
    fn default() -> Latency {
        Latency::Named(LatencySet::None)
    }
}

/// Latencies with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LatencySet {
    /// Nothing takes time.
    None,
    /// About as long as on hardware, see [`crate::daemon::real_latencies`].
    Real,
}

/// A CUDA version, written `"12.2"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CudaVersion {
    major: i32,
    minor: i32,
}

/// A node, ready to be simulated.
#[derive(Clone, Debug)]
pub struct NodeSpec {
    /// Driver version.
    pub driver_version: String,
    /// CUDA version of the driver as NVML gives it: 1000 x major + 10 x minor.
    pub cuda_driver_version: i32,
    /// How long calls take.
    pub latency: Latency,
    /// The GPUs, ordered by PCI address as NVML orders them.
    pub gpus: Vec<GpuSpec>,
    /// What goes wrong from the start.
    pub faults: Vec<Step>,
}

/// Why a node file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NodeFileError {
    /// It cannot be read.
    #[error("cannot read the node file {path}: {reason}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why not.
        reason: std::io::Error,
    },
    /// It is not YAML of the expected form.
    #[error("the node file is not of the expected form: {0}")]
    Form(Box<serde_saphyr::Error>),
    /// A product that is not known.
    #[error("gpus[{entry}]: unknown product {product:?}; known are {known}")]
    Product {
        /// Which entry.
        entry: usize,
        /// What it says.
        product: String,
        /// What it could say.
        known: String,
    },
    /// A PCI address that is not one, or not of function 0.
    #[error("gpus[{entry}]: {address:?} is no PCI address of a GPU such as 0000:3b:00.0")]
    Address {
        /// Which entry.
        entry: usize,
        /// What it says.
        address: String,
    },
    /// A PCI root that is not of the kernel's form.
    #[error("gpus[{entry}]: {root:?} is no PCI root complex such as pci0000:3a")]
    Root {
        /// Which entry.
        entry: usize,
        /// What it says.
        root: String,
    },
    /// One address for several GPUs.
    #[error(
        "gpus[{entry}]: the PCI address or the UUID of one GPU cannot be given to {count}; write one entry for each"
    )]
    OneForMany {
        /// Which entry.
        entry: usize,
        /// How many.
        count: usize,
    },
    /// Two GPUs in one place.
    #[error("two GPUs at {0}; give each pciBusId its own GPU")]
    Taken(PciAddress),
    /// A driver version that could not be part of a file name.
    #[error("driverVersion {0:?} is not a version such as 535.261.03")]
    DriverVersion(String),
    /// MIG asked of what has none.
    #[error("gpus[{entry}]: {product} has no MIG here, so its mode cannot be on")]
    NoMig {
        /// Which entry.
        entry: usize,
        /// The product's key.
        product: String,
    },
    /// A fault that could not be on this node.
    #[error("faults[{entry}]: {reason}")]
    Fault {
        /// Which entry.
        entry: usize,
        /// Why not.
        reason: FaultError,
    },
    /// More GPUs than the kernel module serves.
    #[error("{0} GPUs; the driver has capability files for {MAX_GPUS}")]
    TooMany(usize),
}

impl NodeSpec {
    /// Reads a node file.
    ///
    /// # Errors
    ///
    /// When it cannot be read, and as [`NodeSpec::parse`].
    pub fn read(path: &Path) -> Result<NodeSpec, NodeFileError> {
        let text =
            std::fs::read_to_string(path).map_err(|reason| NodeFileError::Read { path: path.to_owned(), reason })?;
        NodeSpec::parse(&text)
    }

    /// Reads the text of a node file.
    ///
    /// # Errors
    ///
    /// When it is of another form, or describes a node that cannot be.
    pub fn parse(text: &str) -> Result<NodeSpec, NodeFileError> {
        let file: NodeFile = serde_saphyr::from_str(text).map_err(|reason| NodeFileError::Form(Box::new(reason)))?;
        let version = file.driver_version;
        if version.is_empty() || !version.bytes().all(|c| c.is_ascii_digit() || c == b'.') {
            return Err(NodeFileError::DriverVersion(version));
        }
        let total: usize = file.gpus.iter().map(|entry| entry.count.unwrap_or(1)).fold(0, usize::saturating_add);
        if total > MAX_GPUS {
            return Err(NodeFileError::TooMany(total));
        }

        let mut gpus = Vec::with_capacity(total);
        let mut places = Places::new(&file.gpus)?;
        for (index, entry) in file.gpus.iter().enumerate() {
            let product = Product::by_key(&entry.product).ok_or_else(|| unknown_product(index, &entry.product))?;
            for _ in 0..entry.count.unwrap_or(1) {
                let pci = match &entry.pci_bus_id {
                    Some(address) => parse_address(index, address)?,
                    None => places.next(),
                };
                gpus.push(gpu(index, entry, product, pci, &file.node_name, file.uuids)?);
            }
        }
        gpus.sort_by_key(|gpu| (gpu.pci.domain, gpu.pci.bus, gpu.pci.device));
        for (place, gpu) in gpus.iter_mut().enumerate() {
            gpu.place = place as u8;
            gpu.minor = place as u32;
        }
        let names: Vec<_> = gpus.iter().map(|gpu| (gpu.uuid.as_str(), gpu.pci)).collect();
        for (entry, step) in file.faults.iter().enumerate() {
            step.check(&names).map_err(|reason| NodeFileError::Fault { entry, reason })?;
        }
        let CudaVersion { major, minor } = file.cuda_driver_version;
        let cuda_driver_version = major * 1000 + minor * 10;
        Ok(NodeSpec { driver_version: version, cuda_driver_version, latency: file.latency, gpus, faults: file.faults })
    }
}

fn gpu(
    index: usize,
    entry: &GpuEntry,
    product: &'static Product,
    pci: PciAddress,
    node: &str,
    uuids: Uuids,
) -> Result<GpuSpec, NodeFileError> {
    let mig = (entry.mig.current, entry.mig.pending.unwrap_or(entry.mig.current));
    let has_mig = product.mig.is_some() && entry.virtualization != Virtualization::Vgpu;
    if !has_mig && (mig.0 || mig.1) {
        return Err(NodeFileError::NoMig { entry: index, product: product.key.clone() });
    }
    let pcie_root = match &entry.pcie_root {
        Some(root) if is_root(root) => root.clone(),
        Some(root) => return Err(NodeFileError::Root { entry: index, root: root.clone() }),
        None => format!("pci{:04x}:{:02x}", pci.domain, pci.bus.saturating_sub(1)),
    };
    let (address, key) = (pci.to_string(), &product.key);
    Ok(GpuSpec {
        place: 0,
        minor: 0,
        pci,
        pcie_root,
        uuid: entry.uuid.clone().unwrap_or_else(|| gpu_uuid(node, &address, key)),
        serial: gpu_serial(node, &address, key),
        product,
        numa_node: u32::try_from(entry.numa_node).ok(),
        virtualization: entry.virtualization,
        uuids,
        mig,
        broken: entry.broken,
    })
}

/// Hands out PCI addresses to GPUs that were given none.
struct Places {
    taken: BTreeSet<PciAddress>,
    next: u32,
}

impl Places {
    fn new(entries: &[GpuEntry]) -> Result<Places, NodeFileError> {
        let mut taken = BTreeSet::new();
        for (index, entry) in entries.iter().enumerate() {
            let count = entry.count.unwrap_or(1);
            if count > 1 && (entry.pci_bus_id.is_some() || entry.uuid.is_some()) {
                return Err(NodeFileError::OneForMany { entry: index, count });
            }
            if let Some(address) = &entry.pci_bus_id {
                let address = parse_address(index, address)?;
                if !taken.insert(address) {
                    return Err(NodeFileError::Taken(address));
                }
            }
        }
        Ok(Places { taken, next: 0 })
    }

    /// From bus 3b upwards, twelve buses apart, sixteen GPUs in a domain.
    fn next(&mut self) -> PciAddress {
        loop {
            let (domain, bus) = (self.next / 16, 0x3b + self.next % 16 * 12);
            self.next += 1;
            let address = PciAddress { domain, bus, device: 0 };
            if self.taken.insert(address) {
                return address;
            }
        }
    }
}

fn unknown_product(entry: usize, product: &str) -> NodeFileError {
    let known: Vec<&str> = Product::all().iter().map(|product| product.key.as_str()).collect();
    NodeFileError::Product { entry, product: product.to_owned(), known: known.join(", ") }
}

fn parse_address(entry: usize, text: &str) -> Result<PciAddress, NodeFileError> {
    PciAddress::parse(text).ok_or_else(|| NodeFileError::Address { entry, address: text.to_owned() })
}

fn is_root(text: &str) -> bool {
    let hex = |part: &str, length| part.len() == length && part.bytes().all(|c| c.is_ascii_hexdigit());
    text.strip_prefix("pci")
        .and_then(|rest| rest.split_once(':'))
        .is_some_and(|(domain, bus)| hex(domain, 4) && hex(bus, 2))
}

impl<'de> Deserialize<'de> for CudaVersion {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<CudaVersion, D::Error> {
        let text = String::deserialize(deserializer)?;
        let parse = || {
            let (major, minor) = text.split_once('.')?;
            let (major, minor): (u16, u8) = (major.parse().ok()?, minor.parse().ok()?);
            Some(CudaVersion { major: i32::from(major), minor: i32::from(minor) })
        };
        parse().ok_or_else(|| serde::de::Error::custom(format!("{text:?} is no CUDA version such as \"12.2\"")))
    }
}

impl TryFrom<LatencyEntry> for Latency {
    type Error = String;

    fn try_from(entry: LatencyEntry) -> Result<Latency, String> {
        let time = |(call, time)| {
            let duration = match time {
                TimeEntry::Milliseconds(ms) => Duration::from_millis(ms),
                TimeEntry::Text(text) => parse_duration(&text)
                    .ok_or_else(|| format!("{call}: {text:?} is no time such as 1s, 250ms or 250"))?,
            };
            Ok((call, duration))
        };
        match entry {
            LatencyEntry::Name(name) if name == "none" => Ok(Latency::Named(LatencySet::None)),
            LatencyEntry::Name(name) if name == "real" => Ok(Latency::Named(LatencySet::Real)),
            LatencyEntry::Name(name) => {
                Err(format!("latency {name:?} is neither none nor real nor a map of functions"))
            }
            LatencyEntry::Calls(calls) => {
                Ok(Latency::Calls(calls.into_iter().map(time).collect::<Result<_, String>>()?))
            }
        }
    }
}

/// A time such as `1s`, `1.5s` or `250ms`; without a unit, milliseconds.
pub fn parse_duration(text: &str) -> Option<Duration> {
    let (number, unit) = match (text.strip_suffix("ms"), text.strip_suffix('s')) {
        (Some(number), _) => (number, 0.001),
        (None, Some(number)) => (number, 1.0),
        (None, None) => (text, 0.001),
    };
    Duration::try_from_secs_f64(number.trim().parse::<f64>().ok()? * unit).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "driverVersion: 535.261.03\ncudaDriverVersion: \"12.2\"\n";

    fn parse(rest: &str) -> Result<NodeSpec, NodeFileError> {
        NodeSpec::parse(&format!("{HEAD}{rest}"))
    }

    #[test]
    fn gpus_are_counted_and_ordered_by_address() {
        let node = parse("gpus: [{product: l40s, pciBusId: '0000:f0:00.0'}, {product: h100-80gb, count: 2}]").unwrap();
        let seen: Vec<_> = node.gpus.iter().map(|gpu| (gpu.pci.to_string(), gpu.minor, &*gpu.product.key)).collect();
        let expected =
            [("0000:3b:00.0", 0, "h100-80gb"), ("0000:47:00.0", 1, "h100-80gb"), ("0000:f0:00.0", 2, "l40s")];
        assert_eq!(seen, expected.map(|(pci, minor, key)| (pci.to_owned(), minor, key)));
        assert_eq!(node.cuda_driver_version, 12020);
        assert_eq!(node.gpus[0].pcie_root, "pci0000:3a");
        assert_ne!(node.gpus[0].uuid, node.gpus[1].uuid);
    }

    #[test]
    fn thirty_two_gpus_have_places_of_their_own() {
        let node = parse("gpus: [{product: t4, count: 32}]").unwrap();
        let places: BTreeSet<_> = node.gpus.iter().map(|gpu| gpu.pci).collect();
        assert_eq!(places.len(), 32);
    }

    #[test]
    fn uuids_are_stable_and_differ_between_nodes() {
        let uuid = |name: &str| {
            parse(&format!("nodeName: {name}\ngpus: [{{product: h100-80gb}}]")).unwrap().gpus[0].uuid.clone()
        };
        assert_eq!(uuid("a"), uuid("a"));
        assert_ne!(uuid("a"), uuid("b"));
    }

    #[test]
    fn latencies_by_name_and_by_call() {
        assert_eq!(parse("latency: real\ngpus: []").unwrap().latency, Latency::Named(LatencySet::Real));
        let calls = parse("latency: {nvmlGpuInstanceDestroy: 1.5s, nvmlInit_v2: 20ms, nvmlShutdown: 30}\ngpus: []")
            .unwrap()
            .latency;
        let expected = [("nvmlGpuInstanceDestroy", 1500), ("nvmlInit_v2", 20), ("nvmlShutdown", 30)];
        let expected = expected.map(|(call, ms)| (call.to_owned(), Duration::from_millis(ms)));
        assert_eq!(calls, Latency::Calls(expected.into()));
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_reason() {
        for (rest, expected) in [
            ("gpus: [{product: h1000}]", "known are"),
            ("gpus: [{product: h100-80gb, pciBusId: '3b:00'}]", "no PCI address"),
            ("gpus: [{product: h100-80gb, pcieRoot: root}]", "no PCI root"),
            ("gpus: [{product: h100-80gb, pciBusId: '0000:3b:00.0', count: 2}]", "cannot be given to 2"),
            ("gpus: [{product: t4, pciBusId: '0000:3b:00.0'}, {product: t4, pciBusId: '0000:3B:00.0'}]", "two GPUs at"),
            ("gpus: [{product: l40s, mig: {current: true}}]", "has no MIG"),
            ("gpus: [{product: h100-80gb, virtualization: vgpu, mig: {current: true}}]", "has no MIG"),
            ("gpus: [{product: t4, count: 33}]", "33 GPUs"),
            ("gpus: [{product: t4, colour: red}]", "colour"),
            ("latency: {nvmlInit_v2: soon}\ngpus: []", "nvmlInit_v2: \"soon\" is no time"),
            ("gpus: []\nfaults: [{call: {function: nvmlInit_v2}}]", "faults[0]: a fault of a call needs"),
            ("gpus: []\nfaults: [{call: {function: nvmlInit_v3, code: IN_USE}}]", "no NVML function"),
            ("gpus: []\nfaults: [{call: {function: nvmlInit_v2, code: BUSY}}]", "no failure of nvml.h"),
            ("gpus: []\nfaults: [{call: {function: nvmlInit_v2, code: 19, colour: red}}]", "colour"),
            ("gpus: [{product: t4}]\nfaults: [{lost: {gpu: 0}}, {lost: {gpu: 1}}]", "faults[1]: the node has no GPU"),
            ("gpus: []\nfaults: [{rain: {}}]", "rain"),
            ("latency: slow\ngpus: []", "neither none nor real"),
        ] {
            let error = parse(rest).expect_err(rest).to_string();
            assert!(error.contains(expected), "{rest}: {error}");
        }
        let error = NodeSpec::parse("driverVersion: ../x\ncudaDriverVersion: \"12.2\"\ngpus: []").unwrap_err();
        assert!(error.to_string().contains("not a version"), "{error}");
    }
}
