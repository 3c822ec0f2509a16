//! What is published of which node. The golden files are meant to be read.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use k8s_openapi::api::resource::v1::{Counter, Device, ResourceSlice};
use kerf_api::quantity::Amount;
use kerf_api::{Blocked, Gpu, GpuInstanceStatus, GpuNode, GpuOffer, MigMode, MigPlacement, Withheld, names};
use kerf_controller::features::{Counters, ServerFeatures};
use kerf_controller::policy::Offering;
use kerf_controller::render::{Remark, Rendering, render};
use kerf_mig::Placement;

use crate::fixtures::{DRIVER, NODE_UID, blocked, carved, gpu, node};

const EVERY_SERVER: [Counters; 3] = [Counters::None, Counters::Combined, Counters::Separate];

fn rendered(node: &GpuNode, counters: Counters) -> Rendering {
    rendered_for(node, ServerFeatures { counters, taints: true, extended_resources: true })
}

fn rendered_for(node: &GpuNode, features: ServerFeatures) -> Rendering {
    offered(node, &Offering::default(), features)
}

/// What is published where somebody says what shall be.
pub(crate) fn offered(node: &GpuNode, offering: &Offering, features: ServerFeatures) -> Rendering {
    let rendering = render(DRIVER, node, NODE_UID, offering, features);
    check(node, &rendering.slices);
    rendering
}

/// The API's rules, and the one that matters most.
fn check(node: &GpuNode, slices: &[ResourceSlice]) {
    let (mut devices, mut names, mut sets) = (BTreeSet::new(), Vec::new(), BTreeSet::new());
    assert!(!slices.is_empty(), "a pool without devices is one slice");
    for slice in slices {
        let name = slice.metadata.name.as_deref().unwrap();
        assert!(name.len() <= 253);
        names.push(name);
        assert!(slice.spec.shared_counters.as_ref().is_none_or(|sets| (1..=8).contains(&sets.len())));
        assert!(slice.spec.devices.as_ref().is_none_or(|devices| (1..=64).contains(&devices.len())));
        for set in slice.spec.shared_counters.iter().flatten() {
            assert!((1..=32).contains(&set.counters.len()));
            assert!(sets.insert(set.name.clone()), "{} twice", set.name);
        }
        for device in slice.spec.devices.iter().flatten() {
            assert!(devices.insert(device.name.clone()), "{} twice", device.name);
            let attributes = device.attributes.as_ref().map_or(0, BTreeMap::len);
            assert!(attributes + device.capacity.as_ref().map_or(0, BTreeMap::len) <= 32);
            let taints = device.taints.iter().flatten().map(|taint| taint.key.as_str());
            let taints: Vec<&str> = taints.collect();
            assert!(taints.len() <= 4, "as many as Kubernetes 1.34 takes: {taints:?}");
            assert!(taints.windows(2).all(|pair| pair[0] < pair[1]), "each once, in order: {taints:?}");
            assert!(taints.iter().all(|key| is_taint_key(key)), "{taints:?}");
            let consumed = device.consumes_counters.as_deref().unwrap_or_default();
            assert!(consumed.iter().all(|consumption| !consumption.counters.is_empty()));
        }
    }
    assert!(names.windows(2).all(|pair| pair[0] < pair[1]), "written and searched in the same order: {names:?}");
    let all: Vec<&Device> = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten()).collect();
    for device in &all {
        // A device and its GPU, or two partitions on the same memory, never stand beside each other without counters.
        let gpu = device.name.split("-mig-").next().unwrap();
        let beside =
            all.iter().filter(|other| other.name.split("-mig-").next() == Some(gpu) && other.name != device.name);
        let overlaps = beside.filter(|other| place(node, gpu, device).overlaps(place(node, gpu, other)));
        let apart = overlaps.count() == 0;
        assert!(apart || device.consumes_counters.is_some(), "{} overlaps and excludes nothing", device.name);
        for consumption in device.consumes_counters.iter().flatten() {
            assert!(sets.contains(&consumption.counter_set), "{} draws from an unknown set", device.name);
        }
    }
}

/// The memory slices of a device.
fn place(node: &GpuNode, gpu: &str, device: &Device) -> Placement {
    let attributes = device.attributes.as_ref().unwrap();
    if attributes["type"].string.as_deref() == Some(names::TYPE_GPU) {
        return Placement { start: 0, size: u32::MAX };
    }
    let name = attributes["profile"].string.clone().unwrap();
    let gpu = node.status.as_ref().unwrap().gpus.iter().find(|known| known.name == gpu).unwrap();
    let profile = gpu.mig.as_ref().unwrap().profiles.iter().find(|known| known.name == name).unwrap();
    let start: u32 = device.name.rsplit('-').next().unwrap().parse().unwrap();
    let place = profile.placements.iter().find(|place| place.start == start).unwrap();
    Placement { start, size: place.size }
}

/// A label's key in kerf's domain.
fn is_taint_key(key: &str) -> bool {
    let name = key.strip_prefix("kerf.dev/").unwrap_or_default();
    (1..=63).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.ends_with(|c: char| c.is_ascii_alphanumeric())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

/// One line a device.
pub(crate) fn summary(rendering: &Rendering) -> String {
    let mut text = String::new();
    for remark in &rendering.remarks {
        writeln!(text, "remark {}: {remark}", remark.reason()).unwrap();
    }
    for slice in &rendering.slices {
        writeln!(text, "{}", slice.metadata.name.as_deref().unwrap()).unwrap();
        for set in slice.spec.shared_counters.iter().flatten() {
            writeln!(text, "  set {}: {}", set.name, counters(&set.counters)).unwrap();
        }
        for device in slice.spec.devices.iter().flatten() {
            let memory = device.capacity.as_ref().and_then(|capacity| capacity.get("memory"));
            write!(text, "  {} {}", device.name, memory.map_or("-", |memory| &memory.value.0)).unwrap();
            for consumption in device.consumes_counters.iter().flatten() {
                write!(text, " < {}: {}", consumption.counter_set, counters(&consumption.counters)).unwrap();
            }
            for taint in device.taints.iter().flatten() {
                assert_eq!((taint.value.as_ref(), taint.time_added.as_ref()), (None, None));
                write!(text, " ! {}:{}", taint.key, taint.effect).unwrap();
            }
            text.push('\n');
        }
    }
    text
}

fn counters<'a>(counters: impl IntoIterator<Item = (&'a String, &'a Counter)>) -> String {
    let counters = counters.into_iter().map(|(name, counter)| match counter.value.0.as_str() {
        "1" => name.replace("memory-slice-", "ms"),
        amount => format!("{name}={amount}"),
    });
    counters.collect::<Vec<_>>().join(" ")
}

pub(crate) fn devices(slices: &[ResourceSlice]) -> Vec<&Device> {
    slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten()).collect()
}

/// MIG on, and only a reset switches it off.
pub(crate) fn partitions_only(product: &str, bus: u8) -> Gpu {
    let mut gpu = gpu(product, bus);
    gpu.offer = GpuOffer::Partitions;
    let mig = gpu.mig.as_mut().unwrap();
    (mig.current, mig.pending) = (MigMode::Enabled, MigMode::Enabled);
    gpu
}

fn withheld(product: &str, bus: u8) -> Gpu {
    let message = "MIG is pending: reset the GPU".to_owned();
    let withheld = Some(Withheld { reason: "MigModePending".to_owned(), message });
    Gpu { offer: GpuOffer::Nothing, withheld, ..gpu(product, bus) }
}

#[test]
fn h100() {
    let node = node("node-1", vec![gpu("h100-80gb", 0x3b)]);
    for counters in EVERY_SERVER {
        insta::assert_snapshot!(format!("h100 {counters:?}"), summary(&rendered(&node, counters)));
    }
}

#[test]
fn a100_partitions_only() {
    let node = node("node-1", vec![partitions_only("a100-80gb", 0x07)]);
    for counters in EVERY_SERVER {
        insta::assert_snapshot!(format!("a100 {counters:?}"), summary(&rendered(&node, counters)));
    }
}

#[test]
fn rtx_pro_with_twelve_memory_slices() {
    let node = node("node-1", vec![gpu("rtx-pro-6000", 0x05)]);
    insta::assert_snapshot!(summary(&rendered(&node, Counters::Separate)));
}

#[test]
fn mixed_node() {
    let mut broken = withheld("h100-80gb", 0x86);
    broken.name = "gpu-86-00-0".into();
    let gpus =
        vec![withheld("a100-80gb", 0x07), gpu("h100-80gb", 0x3b), broken, gpu("l40s", 0xaf), gpu("a100-40gb", 0xb0)];
    let node = node("node-1", gpus);
    for counters in EVERY_SERVER {
        insta::assert_snapshot!(format!("mixed {counters:?}"), summary(&rendered(&node, counters)));
    }
}

/// The objects as they are sent.
#[test]
fn on_the_wire() {
    let mut node = node("node-1", vec![gpu("h100-80gb", 0x3b), gpu("l40s", 0xaf)]);
    // One profile is enough to read.
    let profiles = &mut node.status.as_mut().unwrap().gpus[0].mig.as_mut().unwrap().profiles;
    profiles.retain(|profile| ["3g.40gb", "7g.80gb"].contains(&profile.name.as_str()));
    insta::assert_yaml_snapshot!(rendered(&node, Counters::Separate).slices);
}

#[test]
fn sixteen_gpus_need_two_slices_of_counters() {
    let node = node("node-1", (0..16).map(|bus| gpu("h100-80gb", bus)).collect());
    let slices = rendered(&node, Counters::Separate).slices;
    let sets: Vec<usize> = slices.iter().filter_map(|slice| Some(slice.spec.shared_counters.as_ref()?.len())).collect();
    assert_eq!(sets, [8, 8]);
    assert_eq!(slices.len(), 18);
    assert_eq!(devices(&slices).len(), 16 * 26);

    let combined = rendered(&node, Counters::Combined).slices;
    assert_eq!(combined.len(), 16, "Kubernetes 1.34: each GPU's counters lie beside its devices");
    assert!(combined.iter().all(|slice| slice.spec.shared_counters.as_ref().is_some_and(|sets| sets.len() == 1)));
}

#[test]
fn a_neighbour_renames_nothing() {
    let names = |gpus| {
        let slices = rendered(&node("node-1", gpus), Counters::Separate).slices;
        let names = slices.into_iter().map(|slice| slice.metadata.name.unwrap());
        names.filter(|name| !name.contains("counters")).collect::<BTreeSet<_>>()
    };
    let both = names(vec![gpu("h100-80gb", 0x3b), gpu("h100-80gb", 0x86)]);
    assert!(names(vec![gpu("h100-80gb", 0x86)]).is_subset(&both));
}

/// A GPU that somebody has cut is not whole, and without counters nothing would keep the two apart.
#[test]
fn without_counters_a_carved_gpu_is_not_offered_whole() {
    let node = node("node-1", vec![carved(gpu("h100-80gb", 0x3b)), gpu("h100-80gb", 0x86)]);
    let rendering = rendered(&node, Counters::None);
    let names: Vec<_> = devices(&rendering.slices).into_iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["gpu-86-00-0"]);
    assert_eq!(rendering.remarks, [Remark::NoCounters { gpus: vec!["gpu-3b-00-0".into(), "gpu-86-00-0".into()] }]);
    assert!(rendering.remarks[0].to_string().contains("DRAPartitionableDevices"));
}

#[test]
fn a_node_without_devices_has_an_empty_pool() {
    for node in [node("node-1", vec![]), node("node-1", vec![withheld("h100-80gb", 0x3b)])] {
        for counters in EVERY_SERVER {
            let slices = rendered(&node, counters).slices;
            assert_eq!(slices.len(), 1);
            assert_eq!(slices[0].spec.devices, None);
        }
    }
}

#[test]
fn long_node_names_stay_legal() {
    let [a, b] = ["a", "b"].map(|end| {
        let name = format!("{}{end}", "node.".repeat(50));
        let slices = rendered(&node(&name, vec![gpu("h100-80gb", 0x3b)]), Counters::Separate).slices;
        assert!(
            slices.iter().all(|slice| slice.spec.pool.name == name && slice.spec.node_name.as_deref() == Some(&name))
        );
        slices.into_iter().map(|slice| slice.metadata.name.unwrap()).collect::<BTreeSet<_>>()
    });
    assert!(a.is_disjoint(&b));
}

/// What a node writes about itself costs it its own devices at most, and one by one.
#[test]
fn what_the_server_would_refuse_is_left_out() {
    let mut odd = gpu("h100-80gb", 0x3b);
    odd.name = "GPU 0".into();
    let mut huge = gpu("h100-80gb", 0x86);
    let placements = &mut huge.mig.as_mut().unwrap().profiles[0].placements;
    placements.push(MigPlacement { start: u32::MAX - 1, size: 1 });
    let mut attribute = gpu("l40s", 0xaf);
    attribute.attributes.insert("bad name".into(), kerf_api::Attribute::int(1));
    let node = node("node-1", vec![odd, huge, attribute.clone(), attribute]);
    let rendering = rendered(&node, Counters::Separate);
    insta::assert_snapshot!(summary(&rendering));
}

/// Names of the devices that can be given out.
fn free(rendering: &Rendering) -> Vec<&str> {
    let free = devices(&rendering.slices).into_iter().filter(|device| device.taints.is_none());
    free.map(|device| device.name.strip_prefix("gpu-3b-00-0-mig-").unwrap_or(&device.name)).collect()
}

/// An H100 on which these profiles lie at these places, each of them in the way.
fn with_instances(instances: &[(&str, u32, u32)]) -> Gpu {
    let mut gpu = gpu("h100-80gb", 0x3b);
    let mig = gpu.mig.as_mut().unwrap();
    for (id, &(profile, start, size)) in (1..).zip(instances) {
        let profile_id = mig.profiles.iter().find(|known| known.name == profile).unwrap().id;
        let placement = MigPlacement { start, size };
        mig.instances.push(GpuInstanceStatus { id, profile_id, placement, ..GpuInstanceStatus::default() });
        gpu.blocked.push(blocked(names::FOREIGN_INSTANCE, Some((start, size))));
    }
    gpu
}

/// Beside a foreign `1g.10gb` that is usable as it is, and a `2g.20gb` that is being removed. Without taints less is
/// offered, and the reader is told why.
#[test]
fn blocked_devices_are_tainted_or_left_out() {
    let mut h100 = with_instances(&[("1g.10gb", 0, 1)]);
    h100.blocked[0].usable = Some("gpu-3b-00-0-mig-1g10gb-0".into());
    h100.blocked.push(blocked(names::CONDEMNED, Some((2, 2))));
    let mut l40s = gpu("l40s", 0xaf);
    l40s.blocked.push(blocked("DriverUpdate", None));
    let node = node("node-1", vec![h100, l40s]);
    for taints in [true, false] {
        let rendering =
            rendered_for(&node, ServerFeatures { counters: Counters::Separate, taints, extended_resources: true });
        insta::assert_snapshot!(
            format!("blocked {}", if taints { "tainted" } else { "left out" }),
            summary(&rendering)
        );
    }
    let with = rendered(&node, Counters::Combined);
    let without =
        rendered_for(&node, ServerFeatures { counters: Counters::Combined, taints: false, extended_resources: true });
    assert_eq!(free(&with), free(&without), "the same can be had either way");
    assert_eq!(devices(&without.slices).len(), free(&without).len());

    let no_counters =
        rendered_for(&node, ServerFeatures { counters: Counters::None, taints: false, extended_resources: true });
    assert_eq!(no_counters.slices.len(), 1);
    assert_eq!(no_counters.slices[0].spec.devices, None, "each GPU as a whole has something on it");
    assert_eq!(no_counters.remarks.len(), 2);
}

#[test]
fn nothing_is_free_on_a_gpu_that_is_blocked_as_a_whole() {
    let mut h100 = gpu("h100-80gb", 0x3b);
    h100.blocked.push(blocked(names::CONDEMNED, None));
    let node = node("node-1", vec![h100]);
    let tainted = rendered(&node, Counters::Separate);
    assert_eq!((free(&tainted), devices(&tainted.slices).len()), (vec![], 26));
    let without =
        rendered_for(&node, ServerFeatures { counters: Counters::Separate, taints: false, extended_resources: true });
    assert_eq!(without.slices.len(), 1, "no counters for a GPU without devices");
    assert_eq!(without.slices[0].spec.shared_counters, None);
    assert!(devices(&without.slices).is_empty());
}

/// A foreign `1g.10gb+me` holds the GPU's one set of media extensions, wherever the next one would lie.
#[test]
fn an_instance_blocks_what_needs_its_engines() {
    let node = node("node-1", vec![with_instances(&[("1g.10gb+me", 0, 1)])]);
    let rendering = rendered(&node, Counters::Separate);
    let free = free(&rendering);
    assert!(free.contains(&"1g10gb-6") && free.contains(&"3g40gb-4"), "{free:?}");
    assert!(!free.iter().any(|name| name.starts_with("1g10gb-me")), "{free:?}");
}

/// Everything that is free can be carved beside what is there; all else cannot.
#[test]
fn blocked_is_what_could_not_be_carved() {
    let geometry = kerf_mig::product::Product::by_key("h100-80gb").unwrap().geometry();
    for there in geometry.offers() {
        let Placement { start, size } = there.placement;
        let node = node("node-1", vec![with_instances(&[(&there.profile.name, start, size)])]);
        let rendering = rendered(&node, Counters::Separate);
        let fitting = geometry.offers().into_iter().filter(|&offer| geometry.fits(&[there], offer));
        let fitting = fitting.map(|offer| format!("{}-{}", offer.profile.label(), offer.placement.start));
        assert_eq!(free(&rendering), fitting.collect::<Vec<_>>(), "beside {there:?}");
    }
}

/// Whatever a node writes: devices that could be blocked are, and the work and the words are bounded.
#[test]
fn odd_blocks_hold_back_more_rather_than_less() {
    let tainted_with = |blocked: Vec<Blocked>| {
        let rendering = rendered(&node("node-1", vec![Gpu { blocked, ..gpu("h100-80gb", 0x3b) }]), Counters::Separate);
        assert_eq!(devices(&rendering.slices).len(), 26, "all are published");
        let keys = devices(&rendering.slices).into_iter().flat_map(|device| device.taints.iter().flatten());
        let keys: BTreeSet<String> = keys.map(|taint| taint.key.clone()).collect();
        let free = free(&rendering).len();
        (keys.into_iter().collect::<Vec<_>>().join(" "), free, rendering.remarks)
    };
    let foreign = |place| blocked(names::FOREIGN_INSTANCE, Some(place));

    for nowhere in [(0, 0), (3, 0), (8, 1), (u32::MAX, u32::MAX)] {
        let (keys, free, remarks) = tainted_with(vec![foreign(nowhere)]);
        assert_eq!((keys.as_str(), free, remarks.len()), ("kerf.dev/foreign-instance", 0, 1), "{nowhere:?}");
        assert!(matches!(&remarks[0], Remark::Doubtful { gpu, .. } if gpu == "gpu-3b-00-0"));
    }
    let (_, free, remarks) = tainted_with(vec![foreign((7, u32::MAX))]);
    assert_eq!((free, remarks), (22, vec![]), "what it covers of the GPU is clear");

    let long = "A".repeat(100_000);
    for reason in ["", "two words", "kerf.dev/x", "ÄÖÜ", "Ends-", &long] {
        let (keys, free, remarks) = tainted_with(vec![blocked(reason, Some((6, 2)))]);
        assert_eq!((keys.as_str(), free, remarks.len()), ("kerf.dev/blocked", 20, 1), "{reason:.20}");
        assert!(remarks[0].to_string().len() < 200);
    }

    let usable = |name: &str| Blocked { usable: Some(name.into()), ..foreign((0, 1)) };
    let (_, exempt, _) = tainted_with(vec![usable("gpu-3b-00-0-mig-1g10gb-0")]);
    for elsewhere in ["gpu-86-00-0-mig-1g10gb-0", "gpu-3b-00-0-mig-1g10gb-9", ""] {
        let (_, free, _) = tainted_with(vec![usable(elsewhere)]);
        assert_eq!(free, exempt - 1, "no other device is exempt: {elsewhere}");
    }
    let (_, free, _) = tainted_with(vec![usable("gpu-3b-00-0-mig-1g10gb-0"), foreign((0, 2))]);
    let (_, both, _) = tainted_with(vec![foreign((0, 2))]);
    assert_eq!(free, both, "usable beside the one, in the way of the other");

    let words = (0..26_u8).map(|n| format!("Reason{}", char::from(b'a' + n)));
    let (keys, free, remarks) = tainted_with(words.map(|word| blocked(&word, Some((0, 8)))).collect());
    assert_eq!((keys.split(' ').count(), free, remarks), (4, 0, vec![]));

    let many = (0..1000).map(|n| foreign((n % 8, 1))).collect();
    let (keys, free, remarks) = tainted_with(many);
    assert_eq!((keys.as_str(), free, remarks.len()), ("kerf.dev/blocked", 0, 1));
    let (_, free, remarks) = tainted_with((0..60).map(|_| blocked("", Some((9, 9)))).collect());
    assert_eq!((free, remarks.len()), (0, 33));
    assert_eq!(remarks[32], Remark::More { count: 88 });
}

/// Profiles that no GPU has cost their partitions, not the controller's time.
#[test]
fn a_geometry_without_bounds_is_not_looked_at() {
    let mut many = gpu("h100-80gb", 0x3b);
    let mig = many.mig.as_mut().unwrap();
    let template = mig.profiles[0].clone();
    for id in 100..10_000 {
        mig.profiles.push(kerf_api::MigProfile { id, name: format!("{id}g"), ..template.clone() });
    }
    let mut wide = gpu("h100-80gb", 0x86);
    let placements = &mut wide.mig.as_mut().unwrap().profiles[0].placements;
    *placements = (0..100_000).map(|start| MigPlacement { start: start % 8, size: 1 + start / 8 }).collect();
    let rendering = rendered(&node("node-1", vec![many, wide]), Counters::Separate);
    let names: Vec<_> = devices(&rendering.slices).into_iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["gpu-3b-00-0", "gpu-86-00-0"], "whole");
    assert_eq!(rendering.remarks.len(), 2);
}

/// Kubernetes allows 64 devices that consume counters in one slice.
#[test]
fn more_devices_than_a_slice_holds() {
    let mut gpu = gpu("rtx-pro-6000", 0x05);
    let mig = gpu.mig.as_mut().unwrap();
    let template = mig.profiles.iter().find(|profile| profile.name == "1g.24gb").unwrap().clone();
    for id in 100..120 {
        mig.profiles.push(kerf_api::MigProfile { id, name: format!("1g.24gb+x{id}"), ..template.clone() });
    }
    let node = node("node-1", vec![gpu]);
    let separate = rendered(&node, Counters::Separate);
    assert_eq!(separate.remarks, []);
    assert_eq!(separate.slices.len(), 3, "counters and two slices of devices");
    assert_eq!(devices(&separate.slices).last().unwrap().name, "gpu-05-00-0", "the whole GPU is tried last");

    let combined = rendered(&node, Counters::Combined);
    assert_eq!(devices(&combined.slices).len(), 1, "whole only");
    assert_eq!(combined.remarks.len(), 1);
}

/// Kubernetes 1.34 allows 1024 counters that all devices of a slice draw from together.
#[test]
fn more_counters_than_a_slice_may_consume() {
    let mut gpu = gpu("h100-80gb", 0x3b);
    let mig = gpu.mig.as_mut().unwrap();
    mig.profiles.truncate(1);
    let wide = |(start, size)| MigPlacement { start, size };
    for (placements, fits) in [(32, true), (33, false)] {
        // Each draws from 31 counters, the whole GPU from 32: 1024 together with 32 of them.
        mig.profiles = (0..placements)
            .map(|id| kerf_api::MigProfile {
                id,
                name: format!("{id}g"),
                placements: vec![wide((id % 2, 31))],
                ..mig.profiles[0].clone()
            })
            .collect();
        let node = node("node-1", vec![Gpu { mig: Some(mig.clone()), ..self::gpu("h100-80gb", 0x3b) }]);
        for (counters, offered) in [(Counters::Separate, true), (Counters::Combined, fits)] {
            let rendering = rendered(&node, counters);
            let expected = if offered { (placements as usize + 1, 0) } else { (1, 1) };
            assert_eq!(
                (devices(&rendering.slices).len(), rendering.remarks.len()),
                expected,
                "{placements} {counters:?}"
            );
        }
    }
}

/// Each GPU costs slices, so a node that reports more than any machine has is cut short, and told so.
#[test]
fn a_node_has_at_most_128_gpus() {
    let gpus: Vec<_> = (0..=u8::MAX).map(|bus| gpu("h100-80gb", bus)).collect();
    let just = rendered(&node("node-1", gpus[..128].to_vec()), Counters::Separate);
    assert_eq!((just.slices.len(), just.remarks.len()), (128 + 16, 0));
    let more = rendered(&node("node-1", gpus), Counters::Separate);
    assert_eq!(more.slices, just.slices);
    let [remark] = &more.remarks[..] else { panic!("{:?}", more.remarks) };
    let said = "128 GPUs: left out: a node has 128 at most, and those that are reported first are offered";
    assert_eq!(remark.to_string(), said);
}

/// The whole GPU takes every counter, so that it excludes each partition, and each partition excludes it.
#[test]
fn whole_gpu_takes_everything() {
    for product in ["h100-80gb", "h200", "b200", "rtx-pro-6000"] {
        let slices = rendered(&node("node-1", vec![gpu(product, 1)]), Counters::Separate).slices;
        let set = &slices[0].spec.shared_counters.as_ref().unwrap()[0];
        let all = devices(&slices);
        let (whole, partitions) = all.split_last().unwrap();
        assert_eq!(whole.consumes_counters.as_ref().unwrap()[0].counters, set.counters);
        for partition in partitions {
            let consumed = &partition.consumes_counters.as_ref().unwrap()[0].counters;
            assert!(!consumed.is_empty());
            for (counter, amount) in consumed {
                assert!(Amount::parse(&amount.value.0) <= Amount::parse(&set.counters[counter].value.0));
            }
        }
    }
}
