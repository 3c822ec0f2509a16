//! Reading one GPU.

use kerf_api::{
    Blocked, ComputeInstanceStatus, Gpu, GpuInstanceStatus, MigMode, MigPlacement, MigProfile, MigStatus, Withheld,
};
use kerf_mig::{Placement, Profile};
use kerf_nvml::{Error, GpuFacts, GpuInstance, MigModes, Nvml, PciAddress};

use super::blocked::{self, Carved};
use super::offer::{self, Mig};
use super::{Holding, Host, UNREADABLE, former};
use crate::attributes::{self, Attributes, Location};
use crate::engine::{DeviceName, ForeignPolicy, PreparedClaim};

const MIB: u64 = 1024 * 1024;

/// MIG of a GPU as NVML tells it.
struct Reading {
    modes: MigModes,
    profiles: Result<Vec<Profile>, Error>,
    instances: Vec<GpuInstanceStatus>,
    /// The claims that explain them, where they were asked for again.
    claims: Option<Vec<PreparedClaim>>,
}

/// Everything about a GPU that NVML has opened. Never fails: what cannot be read is said in the entry.
pub(super) fn read(
    nvml: &dyn Nvml,
    gpu: kerf_nvml::Gpu,
    address: PciAddress,
    host: &Host,
    common: &Attributes,
    claims: &[PreparedClaim],
    holding: &Holding<'_>,
) -> Gpu {
    let facts = match nvml.facts(gpu) {
        Ok(facts) => facts,
        Err(error) => return unreadable(address, &error.to_string()),
    };
    let mut entry = describe(&facts, address, host, common);
    match read_mig(nvml, gpu, address, claims, holding) {
        Ok(reading) => {
            let mig = reading.as_ref().map(|reading| Mig {
                modes: reading.modes,
                switchable: facts.mig_mode_switchable,
                profiles: reading.profiles.as_ref().map(Vec::len),
            });
            (entry.offer, entry.withheld) = offer::decide(address, mig.as_ref());
            let newer = reading.as_ref().and_then(|reading| reading.claims.as_deref());
            let claims = newer.unwrap_or(claims);
            if let Some(reading) = &reading {
                entry.blocked = blocked(nvml, gpu, address, reading, claims, host.wishes.foreign(address));
            }
            entry.blocked.extend(former::find(address, claims, host.former_doubt.as_deref()));
            entry.mig = reading.map(|reading| status(reading, facts.mig_mode_switchable));
        }
        Err(error) => entry.withheld = Some(withheld(&error)),
    }
    entry
}

/// The entry of a GPU of which nothing but its place is known.
pub(super) fn unreadable(address: PciAddress, why: &str) -> Gpu {
    Gpu {
        name: DeviceName::whole(address).to_string(),
        pci_bus_id: address.to_string(),
        withheld: Some(withheld(why)),
        ..Gpu::default()
    }
}

fn withheld(why: &str) -> Withheld {
    Withheld {
        reason: UNREADABLE.to_owned(),
        message: format!("the GPU cannot be read, see nvidia-smi and the kernel's log on the node: {why}"),
    }
}

fn describe(facts: &GpuFacts, address: PciAddress, host: &Host, common: &Attributes) -> Gpu {
    let location = host.driver_root.as_ref().map(|root| Location::of(root, address)).unwrap_or_default();
    Gpu {
        name: DeviceName::whole(address).to_string(),
        pci_bus_id: address.to_string(),
        uuid: facts.uuid.clone(),
        minor: facts.minor,
        product: facts.name.clone(),
        memory_mib: facts.memory_bytes.unwrap_or_default() / MIB,
        attributes: attributes::of_gpu(facts, address, &location, common),
        pci_device_id: location.pci_ids,
        ..Gpu::default()
    }
}

fn read_mig(
    nvml: &dyn Nvml,
    gpu: kerf_nvml::Gpu,
    address: PciAddress,
    claims: &[PreparedClaim],
    holding: &Holding<'_>,
) -> Result<Option<Reading>, String> {
    let Some(modes) = nvml.mig_modes(gpu).map_err(|error| error.to_string())? else { return Ok(None) };
    let profiles = nvml.gpu_instance_profiles(gpu);
    let known = profiles.as_deref().unwrap_or_default();
    let explained =
        |claims: &[PreparedClaim]| read_instances(nvml, gpu, address, known, claims).map_err(|error| error.to_string());
    let (mut instances, mut newer) = (explained(claims)?, None);
    if instances.iter().any(|instance| instance.claim_uid.is_none()) {
        // It may have been carved after the journal was read, or was on its way out. An instance that is there after
        // its journal entry was not is a stranger's.
        let claims = holding()?;
        instances = explained(&claims)?;
        newer = Some(claims);
    }
    Ok(Some(Reading { modes, profiles, instances, claims: newer }))
}

fn blocked(
    nvml: &dyn Nvml,
    gpu: kerf_nvml::Gpu,
    address: PciAddress,
    reading: &Reading,
    claims: &[PreparedClaim],
    policy: ForeignPolicy,
) -> Vec<Blocked> {
    let instances = &reading.instances[..];
    if !blocked::is_possible(address, instances, claims) {
        return Vec::new();
    }
    let profiles = reading.profiles.as_deref().unwrap_or_default();
    let name = |instance: &GpuInstanceStatus| {
        let GpuInstanceStatus { id, profile_id, placement, .. } = *instance;
        let placement = Placement { start: placement.start, size: placement.size };
        let live = GpuInstance { id, profile_id, placement };
        Some(DeviceName::of_instance(address, profiles, &live)?.to_string())
    };
    let carved = Carved { address, instances, processes: nvml.processes(gpu), name: &name };
    blocked::find(&carved, claims, policy)
}

fn read_instances(
    nvml: &dyn Nvml,
    gpu: kerf_nvml::Gpu,
    address: PciAddress,
    profiles: &[Profile],
    claims: &[PreparedClaim],
) -> Result<Vec<GpuInstanceStatus>, Error> {
    let instances = nvml.gpu_instances(gpu)?.into_iter().filter_map(|instance| {
        let compute_instances = match nvml.compute_instances(gpu, instance.id) {
            Ok(found) => found,
            // Destroyed since it was listed. Drivers have more than one code for what is not there any more.
            Err(error) if error.is_gone() || !is_listed(nvml, gpu, instance) => return None,
            Err(error) => return Some(Err(error)),
        };
        let compute_instances = compute_instances.into_iter();
        Some(Ok(GpuInstanceStatus {
            id: instance.id,
            profile_id: instance.profile_id,
            placement: MigPlacement { start: instance.placement.start, size: instance.placement.size },
            compute_instances: compute_instances.map(|ci| ComputeInstanceStatus { id: ci.id, uuid: ci.uuid }).collect(),
            claim_uid: explanation(address, instance, profiles, claims).map(|claim| claim.uid.clone()),
        }))
    });
    let mut instances = instances.collect::<Result<Vec<_>, _>>()?;
    instances.sort_by_key(|instance| instance.id);
    Ok(instances)
}

/// Whether an instance is there still, as far as NVML tells.
fn is_listed(nvml: &dyn Nvml, gpu: kerf_nvml::Gpu, instance: GpuInstance) -> bool {
    nvml.gpu_instances(gpu).map_or(true, |listed| listed.contains(&instance))
}

/// The claim that an instance was carved for. While it is being carved its id is not in the journal yet, but its name is.
fn explanation<'a>(
    address: PciAddress,
    instance: GpuInstance,
    profiles: &[Profile],
    claims: &'a [PreparedClaim],
) -> Option<&'a PreparedClaim> {
    let carved = claims.iter().find(|claim| {
        let is_it = |id, placement| (id, placement) == (instance.id, instance.placement);
        claim.partitions.iter().any(|one| one.gpu == address && is_it(one.gpu_instance, one.placement))
    });
    carved.or_else(|| {
        let name = DeviceName::of_instance(address, profiles, &instance)?.to_string();
        claims.iter().find(|claim| claim.held.contains(&name))
    })
}

fn status(reading: Reading, switchable: bool) -> MigStatus {
    let mode = |mode| match mode {
        kerf_nvml::MigMode::Disabled => MigMode::Disabled,
        kerf_nvml::MigMode::Enabled => MigMode::Enabled,
    };
    MigStatus {
        current: mode(reading.modes.current),
        pending: mode(reading.modes.pending),
        switchable,
        profiles: reading.profiles.unwrap_or_default().into_iter().map(profile).collect(),
        instances: reading.instances,
    }
}

fn profile(profile: Profile) -> MigProfile {
    let Profile { id, name, compute_slices, memory_mib, engines, max_instances, placements } = profile;
    MigProfile {
        id,
        name,
        compute_slices,
        memory_mib,
        multiprocessors: engines.multiprocessors,
        copy_engines: engines.copy_engines,
        decoders: engines.decoders,
        encoders: engines.encoders,
        jpeg_engines: engines.jpeg_engines,
        ofa_engines: engines.ofa_engines,
        max_instances,
        placements: placements
            .into_iter()
            .map(|placement| MigPlacement { start: placement.start, size: placement.size })
            .collect(),
    }
}
