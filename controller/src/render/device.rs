//! One GPU as devices: its partitions and its whole form, with what they consume.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{Counter, CounterSet, Device, DeviceCapacity, DeviceCounterConsumption};
use kerf_api::{Gpu, GpuNodeStatus, MigProfile};
use kerf_mig::{Engine, Engines, Geometry, Offer, Placement, Profile};

use super::attributes;
use super::blocked::Blocks;
use super::choice::{Choice, Standing};
use crate::quantity;

/// The most counters of one set.
const MOST_COUNTERS: usize = 32;

/// The most profiles of one GPU, and the most placements of all of them, so that a GPU has two slices of devices at most. No
/// known product has half of either.
const MOST_PROFILES: usize = 64;
const MOST_PLACEMENTS: usize = 127;

type Counters = BTreeMap<String, Counter>;
type Capacity = BTreeMap<String, DeviceCapacity>;

/// The geometry that the GPU's driver reported, or what is wrong with it: time and memory that it takes to look at one
/// grow with it.
pub(crate) fn geometry(gpu: &Gpu) -> Result<Geometry, &'static str> {
    let profiles = gpu.mig.as_ref().map_or(&[][..], |mig| &mig.profiles);
    let placements = profiles.iter().map(|profile| profile.placements.len()).sum::<usize>();
    if profiles.len() > MOST_PROFILES || placements > MOST_PLACEMENTS {
        return Err("partitions: there are more than 64 profiles, or more than 127 placements of all of them");
    }
    Ok(Geometry::new(profiles.iter().map(profile).collect()))
}

/// The name of a partition as a device.
pub(crate) fn cut_name(gpu: &Gpu, cut: Offer<'_>) -> String {
    format!("{}-mig-{}-{}", gpu.name, cut.profile.label(), cut.placement.start)
}

fn profile(profile: &MigProfile) -> Profile {
    Profile {
        id: profile.id,
        name: profile.name.clone(),
        compute_slices: profile.compute_slices,
        memory_mib: profile.memory_mib,
        engines: Engines {
            multiprocessors: profile.multiprocessors,
            copy_engines: profile.copy_engines,
            decoders: profile.decoders,
            encoders: profile.encoders,
            jpeg_engines: profile.jpeg_engines,
            ofa_engines: profile.ofa_engines,
        },
        max_instances: profile.max_instances,
        placements: profile.placements.iter().map(|p| Placement { start: p.start, size: p.size }).collect(),
    }
}

/// What excludes what on one GPU: its counter set, named like the GPU.
pub(super) struct Exclusion {
    set: CounterSet,
    engines: Vec<Engine>,
}

impl Exclusion {
    /// One counter per memory slice and one per limited engine. `None` when they do not fit into one set.
    pub(super) fn new(gpu: &str, geometry: &Geometry) -> Option<Exclusion> {
        let slices = geometry.memory_slices();
        if usize::try_from(slices).ok()? > MOST_COUNTERS {
            return None;
        }
        let engines = geometry.limited_engines();
        let counters = counters(0..slices, &engines, &geometry.totals());
        (counters.len() <= MOST_COUNTERS)
            .then(|| Exclusion { set: CounterSet { counters, name: gpu.to_owned() }, engines })
    }

    pub(super) fn set(&self) -> &CounterSet {
        &self.set
    }

    /// How many counters these partitions and the whole GPU draw from together.
    pub(super) fn consumed_by_all<'a>(&self, cuts: impl IntoIterator<Item = Offer<'a>>) -> usize {
        let of_one = |offer| self.consumed_by(offer).iter().map(|drawn| drawn.counters.len()).sum::<usize>();
        self.set.counters.len() + cuts.into_iter().map(of_one).sum::<usize>()
    }

    fn consumed_by(&self, offer: Offer<'_>) -> Vec<DeviceCounterConsumption> {
        self.consumption(counters(offer.placement.slices(), &self.engines, &offer.profile.engines))
    }

    fn consumed_by_whole(&self) -> Vec<DeviceCounterConsumption> {
        self.consumption(self.set.counters.clone())
    }

    fn consumption(&self, counters: Counters) -> Vec<DeviceCounterConsumption> {
        vec![DeviceCounterConsumption { counter_set: self.set.name.clone(), counters, compatibility_groups: None }]
    }
}

/// Counters of the memory slices and of those engines of which there are any: the API wants no empty amounts.
fn counters(slices: std::ops::Range<u32>, limited: &[Engine], engines: &Engines) -> Counters {
    let slices = slices.map(|slice| (format!("memory-slice-{slice}"), 1));
    let engines = limited.iter().map(|&engine| (counter_name(engine).to_owned(), engines.get(engine)));
    slices
        .chain(engines)
        .filter(|(_, amount)| *amount > 0)
        .map(|(name, amount)| (name, Counter { value: quantity::count(amount) }))
        .collect()
}

/// The GPU's devices in the order in which the scheduler shall try them: partitions, small before large, then the whole
/// GPU. With the reasons of what was left out.
pub(super) fn devices(
    status: &GpuNodeStatus,
    gpu: &Gpu,
    geometry: &Geometry,
    choice: &Choice<'_>,
    exclusion: Option<&Exclusion>,
    blocks: &Blocks<'_>,
) -> (Vec<Device>, Vec<String>) {
    let (shared, left_out) = attributes::shared(status, gpu, Engine::ALL.len() + 1);
    let partition = |&(cut, standing): &(Offer<'_>, Standing)| {
        let name = cut_name(gpu, cut);
        Device {
            attributes: Some(attributes::partition(gpu, &cut.profile.name, &shared)),
            capacity: Some(capacity(cut.profile.memory_mib, Some(&cut.profile.engines))),
            consumes_counters: exclusion.map(|exclusion| exclusion.consumed_by(cut)),
            taints: blocks.taints(&name, Some(cut), standing),
            name,
            ..Device::default()
        }
    };
    let whole = |standing| {
        // A GPU that is never cut says its memory only: MIG's totals are not its own (an A100 has 108 multiprocessors,
        // 98 in MIG mode).
        let engines = (gpu.offer == kerf_api::GpuOffer::WholeOrPartitions).then(|| geometry.totals());
        Device {
            name: gpu.name.clone(),
            attributes: Some(attributes::whole(gpu, &shared)),
            capacity: Some(capacity(gpu.memory_mib, engines.as_ref())).filter(|capacity| !capacity.is_empty()),
            consumes_counters: exclusion.map(Exclusion::consumed_by_whole),
            taints: blocks.taints(&gpu.name, None, standing),
            ..Device::default()
        }
    };
    (choice.cuts.iter().map(partition).chain(choice.whole.map(whole)).collect(), left_out)
}

/// Memory, where it is known, and engines, zero included: a selector on a capacity that is absent is an error in CEL.
fn capacity(memory_mib: u64, engines: Option<&Engines>) -> Capacity {
    let memory = (memory_mib > 0).then(|| ("memory", quantity::mebibytes(memory_mib)));
    let engines = engines.into_iter().flat_map(|engines| {
        Engine::ALL.into_iter().map(|engine| (capacity_name(engine), quantity::count(engines.get(engine))))
    });
    memory
        .into_iter()
        .chain(engines)
        .map(|(name, value)| (name.to_owned(), DeviceCapacity { value, request_policy: None }))
        .collect()
}

fn capacity_name(engine: Engine) -> &'static str {
    match engine {
        Engine::Multiprocessors => "multiprocessors",
        Engine::Copy => "copyEngines",
        Engine::Decoder => "decoders",
        Engine::Encoder => "encoders",
        Engine::Jpeg => "jpegEngines",
        Engine::Ofa => "ofaEngines",
    }
}

fn counter_name(engine: Engine) -> &'static str {
    match engine {
        Engine::Multiprocessors => "multiprocessors",
        Engine::Copy => "copy-engines",
        Engine::Decoder => "decoders",
        Engine::Encoder => "encoders",
        Engine::Jpeg => "jpeg-engines",
        Engine::Ofa => "ofa-engines",
    }
}
