//! GpuNodes: a node writes them, and a node may be in the hands of an enemy. What the controller publishes of them must
//! be what the API server takes and what the scheduler can rely on.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::{Counter, Device, DeviceAttribute, ResourceSlice};
use kerf_api::quantity::Amount;
use kerf_api::{Gpu, GpuNode, GpuNodeStatus, GpuOffer, MigProfile};
use kerf_controller::features::{Counters, ServerFeatures};
use kerf_controller::meaning::Meaning;
use kerf_controller::policy::Offering;
use kerf_controller::render::render;

use crate::dns;

const DRIVER: &str = "gpu.nvidia.com";
const NODE_UID: &str = "00000000-0000-0000-0000-0000000000aa";

/// More devices than any GPU has; beyond, comparing all of them would take the time that the fuzzer has for others.
const MOST_COMPARED: usize = 500;

/// Whatever a node reports, the API server has no more to store of it: 128 GPUs of two slices, and their counters by eight.
const MOST_SLICES: usize = 128 * 2 + 128 / 8;

/// Every GpuNode, also a bare status, gives slices within the limits of every server, the same ones each time, and
/// nothing in them overlaps without excluding itself.
pub fn gpu_node(data: &[u8]) {
    let node = serde_json::from_slice(data).or_else(|_| {
        let status: GpuNodeStatus = serde_json::from_slice(data)?;
        Ok::<_, serde_json::Error>(GpuNode { status: Some(status), ..GpuNode::new("node-1", Default::default()) })
    });
    let Ok(mut node) = node else { return };
    // The API server gives names, and nobody else.
    if !node.metadata.name.as_deref().is_some_and(dns::is_subdomain) {
        node.metadata.name = Some("node-1".to_owned());
    }
    let servers = [Counters::None, Counters::Combined, Counters::Separate];
    for (counters, taints) in servers.into_iter().flat_map(|counters| [(counters, true), (counters, false)]) {
        let features = ServerFeatures { counters, taints, extended_resources: true };
        let rendering = render(DRIVER, &node, NODE_UID, &Offering::default(), features);
        for remark in &rendering.remarks {
            assert!(!remark.reason().is_empty() && !remark.to_string().is_empty());
        }
        let mut devices = rendering.slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
        assert!(taints || devices.all(|device| device.taints.is_none()), "a taint that the server drops");
        let gpus = node.status.as_ref().map_or(&[][..], |status| &status.gpus);
        check_sound(&rendering.slices, gpus, counters);
        if counters == Counters::Separate && taints {
            let again = render(DRIVER, &node, NODE_UID, &Offering::default(), features);
            assert_eq!(again, rendering, "a slice that differs at each look is written at each look");
            let meaning = |slice: &ResourceSlice| Meaning::of(&slice.spec);
            assert!(again.slices.iter().map(meaning).eq(rendering.slices.iter().map(meaning)));
        }
    }
}

/// What is published of these GPUs is what servers take, and nothing in it overlaps without excluding itself.
pub(crate) fn check_sound(slices: &[ResourceSlice], gpus: &[Gpu], counters: Counters) {
    check_pool(slices, counters);
    check_overlaps(slices, gpus);
    check_blocked(slices, gpus);
}

/// The rules of the API server, kubernetes/api `resource/v1`, and those of the scheduler about a whole pool, in
/// Kubernetes 1.34 to 1.37.
fn check_pool(slices: &[ResourceSlice], counters: Counters) {
    assert!(!slices.is_empty(), "the pool says that the driver is there");
    assert!(slices.len() <= MOST_SLICES, "{} slices of one node", slices.len());
    let (mut names, mut devices, mut sets) = (BTreeSet::new(), BTreeSet::new(), BTreeMap::new());
    for slice in slices {
        let name = slice.metadata.name.as_deref().expect("a name");
        assert!(dns::is_subdomain(name), "{name}");
        assert!(names.insert(name), "{name} twice");
        let (in_it, shared) = (&slice.spec.devices, &slice.spec.shared_counters);
        assert!(in_it.as_ref().is_none_or(|devices| (1..=64).contains(&devices.len())));
        assert!(shared.as_ref().is_none_or(|sets| (1..=8).contains(&sets.len())));
        match counters {
            Counters::None => assert!(shared.is_none()),
            Counters::Combined => check_combined(slice),
            Counters::Separate => assert!(shared.is_none() || in_it.is_none(), "{name} has both"),
        }
        for set in shared.iter().flatten() {
            assert!(dns::is_label(&set.name), "{}", set.name);
            check_counters(&set.counters);
            assert!(sets.insert(set.name.as_str(), &set.counters).is_none(), "{} twice", set.name);
        }
        for device in in_it.iter().flatten() {
            assert!(devices.insert(device.name.as_str()), "{} twice", device.name);
            check_device(device);
        }
    }
    for device in slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten()) {
        let consumptions = device.consumes_counters.as_deref().unwrap_or_default();
        assert!(consumptions.len() <= 1, "no device of ours is on two GPUs");
        for consumption in consumptions {
            let set = sets.get(consumption.counter_set.as_str()).expect("a set of the same pool");
            for (name, counter) in &consumption.counters {
                let total = set.get(name).unwrap_or_else(|| panic!("{} draws from {name}", device.name));
                assert!(amount(counter) <= amount(total), "{} can never be allocated", device.name);
            }
        }
    }
}

/// Kubernetes 1.34 counts what all devices and sets of a slice have together.
fn check_combined(slice: &ResourceSlice) {
    let sets = slice.spec.shared_counters.iter().flatten();
    assert!(sets.map(|set| set.counters.len()).sum::<usize>() <= 32);
    let devices = slice.spec.devices.iter().flatten();
    let consumed = devices.flat_map(|device| device.consumes_counters.iter().flatten());
    assert!(consumed.map(|consumption| consumption.counters.len()).sum::<usize>() <= 1024);
}

fn check_device(device: &Device) {
    assert!(dns::is_label(&device.name), "{}", device.name);
    let (attributes, capacity) = (device.attributes.iter().flatten(), device.capacity.iter().flatten());
    assert!(attributes.clone().count() + capacity.clone().count() <= 32);
    for (name, attribute) in attributes {
        check_qualified(name);
        check_attribute(attribute);
    }
    for (name, capacity) in capacity {
        check_qualified(name);
        check_amount(&capacity.value.0);
    }
    for consumption in device.consumes_counters.iter().flatten() {
        check_counters(&consumption.counters);
    }
    let taints = device.taints.as_deref().unwrap_or_default();
    assert!(taints.len() <= 4);
    for taint in taints {
        assert!(["NoSchedule", "NoExecute"].contains(&taint.effect.as_str()), "{}", taint.effect);
        let name = taint.key.rsplit('/').next().unwrap_or_default();
        assert!(!name.is_empty() && name.len() <= 63, "{}", taint.key);
        assert!(taint.value.as_ref().is_none_or(|value| value.len() <= 63));
    }
}

/// A C identifier of at most 32 characters, after a domain of at most 63 or alone.
fn check_qualified(name: &str) {
    let (domain, identifier) = name.split_once('/').map_or((None, name), |(domain, rest)| (Some(domain), rest));
    assert!(domain.is_none_or(|domain| domain.len() <= 63 && dns::is_subdomain(domain)), "{name:?}");
    let head = identifier.bytes().next().unwrap_or(b'-');
    assert!(identifier.len() <= 32 && (head.is_ascii_alphabetic() || head == b'_'), "{name:?}");
    assert!(identifier.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'), "{name:?}");
}

fn check_attribute(attribute: &DeviceAttribute) {
    let DeviceAttribute { string, version, int, bool, .. } = attribute;
    let values = [string.is_some(), version.is_some(), int.is_some(), bool.is_some()];
    assert_eq!(values.into_iter().filter(|set| *set).count(), 1, "{attribute:?}");
    assert!(string.as_ref().or(version.as_ref()).is_none_or(|text| text.len() <= 64), "{attribute:?}");
    if let Some(version) = version {
        let core = version.split(['-', '+']).next().unwrap_or_default();
        let numbers: Vec<&str> = core.split('.').collect();
        let number = |text: &&str| text.parse::<u64>().is_ok_and(|value| value.to_string() == **text);
        assert!(numbers.len() == 3 && numbers.iter().all(number), "{version}");
    }
}

fn check_counters(counters: &BTreeMap<String, Counter>) {
    assert!((1..=32).contains(&counters.len()));
    for (name, counter) in counters {
        assert!(dns::is_label(name), "{name}");
        check_amount(&counter.value.0);
    }
}

/// Kubernetes keeps no more than 2^63 - 1 and caps what is above: the slice that it stores would differ from the one
/// that was written for ever.
fn check_amount(quantity: &str) {
    let amount = Amount::parse(quantity).expect("a quantity");
    assert!(Amount::parse("0") <= Some(amount) && Some(amount) <= Amount::parse("9223372036854775807"), "{quantity}");
}

fn amount(counter: &Counter) -> i128 {
    counter.value.0.parse().expect("counters are plain numbers")
}

/// Of two devices that cover the same of one GPU only one can be allocated.
fn check_overlaps(slices: &[ResourceSlice], gpus: &[Gpu]) {
    let devices: Vec<&Device> = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten()).collect();
    let sets: Amounts<'_> = slices
        .iter()
        .flat_map(|slice| slice.spec.shared_counters.iter().flatten())
        .flat_map(|set| amounts(&set.name, &set.counters))
        .collect();
    let mut names = BTreeSet::new();
    let mut known = 0;
    for gpu in gpus.iter().filter(|gpu| gpu.offer != GpuOffer::Nothing && names.insert(&gpu.name)) {
        let of_it: Vec<Covering<'_>> = devices
            .iter()
            .filter_map(|&device| Some(Covering { extent: extent(gpu, &device.name)?, draws: draws(device), device }))
            .collect();
        known += of_it.len();
        for (index, one) in of_it.iter().enumerate().take(MOST_COMPARED) {
            for other in &of_it[..index] {
                let overlap = one.extent.0 < other.extent.1 && other.extent.0 < one.extent.1;
                assert!(!overlap || one.excludes(other, &sets), "{} and {}", one.device.name, other.device.name);
            }
        }
    }
    assert!(known >= devices.len(), "every device is of some GPU");
}

/// A device in whose place something lies is marked, or not offered where the server takes no marks.
fn check_blocked(slices: &[ResourceSlice], gpus: &[Gpu]) {
    let mut names = BTreeSet::new();
    for gpu in gpus.iter().filter(|gpu| gpu.offer != GpuOffer::Nothing && names.insert(&gpu.name)) {
        for device in slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten()) {
            let Some((from, to)) = extent(gpu, &device.name) else { continue };
            let in_the_way = gpu.blocked.iter().any(|blocked| {
                let place = blocked.placement.map(|place| (u64::from(place.start), u64::from(place.size)));
                let there = place.is_none_or(|(start, size)| start < to && from < start + size);
                there && blocked.usable.as_deref() != Some(&device.name)
            });
            assert!(!in_the_way || device.taints.is_some(), "{} is offered", device.name);
        }
    }
}

/// Amounts by counter set and counter.
type Amounts<'a> = BTreeMap<(&'a str, &'a str), i128>;

/// A device, the memory slices that it covers (from, to), and what it draws.
struct Covering<'a> {
    device: &'a Device,
    extent: (u64, u64),
    draws: Amounts<'a>,
}

impl Covering<'_> {
    /// Whether the counters suffice for one of the two only.
    fn excludes(&self, other: &Covering<'_>, sets: &Amounts<'_>) -> bool {
        let draws = self.draws.iter();
        draws.into_iter().any(|(counter, amount)| {
            other.draws.get(counter).is_some_and(|other| amount + other > sets.get(counter).copied().unwrap_or(0))
        })
    }
}

fn draws(device: &Device) -> Amounts<'_> {
    let consumptions = device.consumes_counters.iter().flatten();
    consumptions.flat_map(|consumption| amounts(&consumption.counter_set, &consumption.counters)).collect()
}

fn amounts<'a>(
    set: &'a str,
    counters: &'a BTreeMap<String, Counter>,
) -> impl Iterator<Item = ((&'a str, &'a str), i128)> {
    counters.iter().map(move |(name, counter)| ((set, name.as_str()), amount(counter)))
}

/// What the node would carve for a device of this name: all of the GPU, or the smallest placement of the first profile
/// with this label at this start. `None` for a device of another GPU.
fn extent(gpu: &Gpu, device: &str) -> Option<(u64, u64)> {
    let rest = device.strip_prefix(&gpu.name)?;
    if rest.is_empty() {
        return Some((0, u64::MAX));
    }
    let (label, start) = rest.strip_prefix("-mig-")?.rsplit_once('-')?;
    let profile = gpu.mig.iter().flat_map(|mig| &mig.profiles).find(|profile| self::label(profile) == label)?;
    let placements = profile.placements.iter().filter(|placement| placement.start.to_string() == start);
    let size = placements.map(|placement| placement.size).filter(|size| *size > 0).min()?;
    let start = start.parse().ok()?;
    Some((start, start + u64::from(size)))
}

fn label(profile: &MigProfile) -> String {
    let profile = kerf_mig::Profile {
        id: profile.id,
        name: profile.name.clone(),
        compute_slices: 0,
        memory_mib: 0,
        engines: kerf_mig::Engines::default(),
        max_instances: 0,
        placements: Vec::new(),
    };
    profile.label()
}
