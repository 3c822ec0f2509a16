//! What is published of which node. The golden files are meant to be read.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use k8s_openapi::api::resource::v1::{Counter, Device, ResourceSlice};
use kerf_api::{Gpu, GpuNode, GpuOffer, MigMode, Withheld};
use kerf_controller::features::{Counters, ServerFeatures};
use kerf_controller::quantity::Amount;
use kerf_controller::render::{Remark, Rendering, render};

use crate::fixtures::{DRIVER, NODE_UID, carved, gpu, node};

const EVERY_SERVER: [Counters; 3] = [Counters::None, Counters::Combined, Counters::Separate];

fn rendered(node: &GpuNode, counters: Counters) -> Rendering {
    let rendering = render(DRIVER, node, NODE_UID, ServerFeatures { counters });
    check(&rendering.slices);
    rendering
}

/// The API's rules, and the one that matters most.
fn check(slices: &[ResourceSlice]) {
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
            let consumed = device.consumes_counters.as_deref().unwrap_or_default();
            assert!(consumed.iter().all(|consumption| !consumption.counters.is_empty()));
        }
    }
    assert!(names.windows(2).all(|pair| pair[0] < pair[1]), "written and searched in the same order: {names:?}");
    let all: Vec<&Device> = slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten()).collect();
    for device in &all {
        // A device and its GPU, or two partitions of one GPU, never stand beside each other without counters.
        let gpu = device.name.split("-mig-").next().unwrap();
        let others = all.iter().filter(|other| other.name.starts_with(gpu)).count();
        assert!(others == 1 || device.consumes_counters.is_some(), "{} overlaps and excludes nothing", device.name);
        for consumption in device.consumes_counters.iter().flatten() {
            assert!(sets.contains(&consumption.counter_set), "{} draws from an unknown set", device.name);
        }
    }
}

/// One line a device.
fn summary(rendering: &Rendering) -> String {
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

fn devices(slices: &[ResourceSlice]) -> Vec<&Device> {
    slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten()).collect()
}

/// MIG on, and only a reset switches it off.
fn partitions_only(product: &str, bus: u8) -> Gpu {
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
    placements.push(kerf_api::MigPlacement { start: u32::MAX - 1, size: 1 });
    let mut attribute = gpu("l40s", 0xaf);
    attribute.attributes.insert("bad name".into(), kerf_api::Attribute::int(1));
    let node = node("node-1", vec![odd, huge, attribute.clone(), attribute]);
    let rendering = rendered(&node, Counters::Separate);
    insta::assert_snapshot!(summary(&rendering));
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
