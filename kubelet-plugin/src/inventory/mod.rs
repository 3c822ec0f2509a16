//! What the node has, and what may be offered of it.
//!
//! [`read`] asks NVML and the kernel, GPU by GPU: what fails on one is written into its entry and never touches another.
//! What may be offered of a GPU is decided by pure rules over what was read. [`watch()`] repeats the reading.

mod blocked;
mod former;
mod gpu;
mod host;
mod offer;
#[cfg(test)]
mod tests;
mod watch;

use std::collections::BTreeMap;

use kerf_api::GpuNodeStatus;
use kerf_nvml::Nvml;

pub use host::Host;
pub use watch::{Reader, Watcher, watch};

use crate::attributes;
use crate::engine::{DeviceName, PreparedClaim};

/// Reason of a GPU of which something essential cannot be read.
pub const UNREADABLE: &str = "Unreadable";
/// Reason of a GPU whose MIG mode changes at the next reset.
pub const MIG_MODE_PENDING: &str = "MigModePending";
/// Reason of a GPU whose MIG profiles NVML does not tell.
pub const PROFILES_UNREADABLE: &str = "ProfilesUnreadable";

/// A reading of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// For the GpuNode, but for what the kubelet thinks of the plugin.
    pub status: GpuNodeStatus,
    /// The devices that claims hold here.
    pub held: Vec<HeldDevice>,
    /// Every claim that has something here, by UID; `None` where they cannot be known.
    pub claims: Option<BTreeMap<String, ClaimState>>,
    /// Whether NVML is to be opened anew before the next reading: it failed on something, and a lost GPU or a reloaded
    /// driver is seen again only by a new session.
    pub suspect: bool,
}

/// A device that a claim holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldDevice {
    /// Name of the device.
    pub name: String,
    /// Name of its GPU.
    pub gpu: String,
}

/// How far a claim has got on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimState {
    /// Everything is in place.
    Prepared,
    /// It is being prepared or released, or either was cut off or has failed.
    Unfinished,
    /// Its release has left something so far.
    Stuck,
    /// It is released, and something of it is left all the same.
    Condemned,
}

/// Gives the claims that hold devices at the time of asking, or says why they cannot be known.
pub type Holding<'a> = dyn Fn() -> Result<Vec<PreparedClaim>, String> + 'a;

/// Reads the node.
pub fn read(nvml: &dyn Nvml, host: &Host, holding: &Holding<'_>) -> Inventory {
    let claims = match holding() {
        Ok(claims) => claims,
        Err(error) => return nothing(host, format!("nothing is offered: {error}")),
    };
    let states = Some(claims.iter().map(|claim| (claim.uid.clone(), ClaimState::of(claim))).collect());
    let names = claims.iter().filter(|claim| !claim.condemned).flat_map(|claim| &claim.devices);
    let held = names
        .filter_map(|name| name.parse::<DeviceName>().ok())
        .map(|device| HeldDevice { name: device.to_string(), gpu: DeviceName::whole(device.gpu()).to_string() })
        .collect();
    let (driver_version, cuda, count) = match (nvml.driver_version(), nvml.cuda_driver_version(), nvml.gpu_count()) {
        (Ok(driver_version), Ok(cuda), Ok(count)) => (driver_version, cuda, count),
        (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => {
            let nothing = nothing(host, format!("nothing is offered, the NVIDIA driver does not answer: {error}"));
            return Inventory { held, claims: states, suspect: true, ..nothing };
        }
    };
    let common = attributes::common(&driver_version, cuda);

    let mut gpus = BTreeMap::new();
    let mut nameless = Vec::new();
    for index in 0..count {
        match nvml.gpu(index).and_then(|gpu| Ok((gpu, nvml.pci_address(gpu)?))) {
            Ok((gpu, address)) => {
                gpus.insert(address, gpu::read(nvml, gpu, address, host, &common, &claims, holding));
            }
            Err(error) => nameless.push(format!("GPU index {index} cannot be opened: {error}")),
        }
    }
    // NVML gives no address for a GPU that it cannot open, and lists none that was bound to its driver since. The PCI bus
    // knows them all.
    let missing: Vec<_> = host.pci_gpus().into_iter().filter(|address| !gpus.contains_key(address)).collect();
    let why = if nameless.is_empty() { "NVML does not list it".to_owned() } else { nameless.join("; ") };
    if missing.len() >= nameless.len() {
        nameless.clear();
    }
    gpus.extend(missing.into_iter().map(|address| (address, gpu::unreadable(address, &why))));
    if gpus.is_empty() && nameless.is_empty() {
        nameless.push("the NVIDIA driver finds no GPU on this node".to_owned());
    }

    let gpus: Vec<_> = gpus.into_values().collect();
    let unreadable = |gpu: &kerf_api::Gpu| gpu.withheld.as_ref().is_some_and(|withheld| withheld.reason == UNREADABLE);
    let suspect = !nameless.is_empty() || gpus.iter().any(unreadable);
    let status = GpuNodeStatus {
        driver_name: host.driver_name.clone(),
        boot_id: host.boot_id.clone(),
        driver_version: Some(driver_version),
        cuda_driver_version: Some(format!("{}.{}", cuda.major, cuda.minor)),
        message: Some(nameless.join("; ")).filter(|message| !message.is_empty()),
        gpus,
        ..GpuNodeStatus::default()
    };
    Inventory { status, held, claims: states, suspect }
}

/// What there is to say of a node whose GPUs are out of reach.
pub fn nothing(host: &Host, why: String) -> Inventory {
    let status = GpuNodeStatus {
        driver_name: host.driver_name.clone(),
        boot_id: host.boot_id.clone(),
        message: Some(why),
        ..GpuNodeStatus::default()
    };
    Inventory { status, ..Inventory::default() }
}

impl ClaimState {
    /// All there are.
    pub const ALL: [ClaimState; 4] =
        [ClaimState::Prepared, ClaimState::Unfinished, ClaimState::Stuck, ClaimState::Condemned];

    fn of(claim: &PreparedClaim) -> ClaimState {
        match claim {
            PreparedClaim { condemned: true, .. } => ClaimState::Condemned,
            PreparedClaim { stuck: true, .. } => ClaimState::Stuck,
            PreparedClaim { complete: true, .. } => ClaimState::Prepared,
            _ => ClaimState::Unfinished,
        }
    }

    /// What metrics call it.
    pub fn name(self) -> &'static str {
        match self {
            ClaimState::Prepared => "prepared",
            ClaimState::Unfinished => "unfinished",
            ClaimState::Stuck => "stuck",
            ClaimState::Condemned => "condemned",
        }
    }
}
