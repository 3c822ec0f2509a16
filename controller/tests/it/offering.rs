//! What is published where a policy or layout says what shall be, and where claims hold something else. The golden files are
//! meant to be read.

use std::collections::BTreeMap;
use std::sync::Arc;

use kerf_api::{Gpu, GpuNode, GpuOffer};
use kerf_controller::features::{Counters, ServerFeatures};
use kerf_controller::policy::{Offering, Policy, Rules, resolve};
use kerf_controller::render::{Remark, Rendering};
use serde_json::{Value, json};

use crate::fixtures::{blocked, carved, gpu, layouts, node, policy};
use crate::golden::{devices, offered, partitions_only, summary};

const EVERY_SERVER: [Counters; 3] = [Counters::None, Counters::Combined, Counters::Separate];

/// What `policies` come to on `node`, on which these devices are held.
fn offering(node: &GpuNode, policies: Vec<Policy>, held: &[&str]) -> Offering {
    let mut rules = Rules { policies, layouts: layouts(), follow_label: true };
    rules.sort();
    let resolution = Arc::new(resolve(&rules, &BTreeMap::new(), node.status.as_ref().unwrap()));
    Offering { resolution, held: Arc::new(held.iter().map(|name| (*name).to_owned()).collect()) }
}

fn rendered(gpus: Vec<Gpu>, spec: Value, held: &[&str], counters: Counters, taints: bool) -> Rendering {
    let node = node("n", gpus);
    offered(
        &node,
        &offering(&node, vec![policy("p", spec)], held),
        ServerFeatures { counters, taints, extended_resources: true },
    )
}

/// Names of the devices, without what is common to all; those that nobody else gets are in brackets.
fn names(rendering: &Rendering) -> Vec<String> {
    let name = |name: &str| name.strip_prefix("gpu-01-00-0-mig-").unwrap_or(name).to_owned();
    devices(&rendering.slices)
        .into_iter()
        .map(|device| if device.taints.is_some() { format!("({})", name(&device.name)) } else { name(&device.name) })
        .collect()
}

fn layout(devices: Value) -> Value {
    let mut spec = json!({"offer": "Layout", "layout": {}});
    spec["layout"]["migDevices"] = devices;
    spec
}

/// Four A100, MIG on for the first two: what the article promises, on every server, in the default gates of 1.34 too.
#[test]
fn the_articles_mixed_layout() {
    let gpus = || {
        let whole = |bus| gpu("a100-80gb", bus);
        vec![partitions_only("a100-80gb", 1), partitions_only("a100-80gb", 2), whole(3), whole(4)]
    };
    for counters in EVERY_SERVER {
        let rendering = rendered(gpus(), json!({"offer": "Layout", "layout": {"name": "mixed"}}), &[], counters, true);
        assert_eq!(devices(&rendering.slices).len(), 2 + 7 + 2);
        insta::assert_snapshot!(format!("mixed layout {counters:?}"), summary(&rendering));
    }
}

#[test]
fn dynamic_within_bounds() {
    let spec = json!({"offer": "Dynamic", "profiles": ["3g.40gb", "1g.10gb+me"], "whole": false});
    let rendering = rendered(vec![gpu("h100-80gb", 1)], spec.clone(), &[], Counters::Separate, true);
    assert_eq!(names(&rendering)[7..], ["3g40gb-4", "3g40gb-0"]);
    assert_eq!(names(&rendering).len(), 9);
    let without = rendered(vec![gpu("h100-80gb", 1)], spec, &[], Counters::None, true);
    assert_eq!(names(&without), [""; 0]);
    assert_eq!(without.remarks, [Remark::NoCounters { gpus: vec!["gpu-01-00-0".into()] }]);
}

#[test]
fn whole_only_and_off_need_no_counters() {
    for counters in EVERY_SERVER {
        let with =
            |offer| rendered(vec![gpu("h100-80gb", 1), gpu("l40s", 2)], json!({"offer": offer}), &[], counters, true);
        let whole = with("WholeOnly");
        assert_eq!((names(&whole), whole.remarks), (vec!["gpu-01-00-0".to_owned(), "gpu-02-00-0".to_owned()], vec![]));
        let off = with("Nothing");
        assert_eq!((names(&off), off.remarks), (vec![], vec![]));
        assert_eq!(off.slices.len(), 1, "one slice says that the driver is there");
    }
}

/// A GPU that serves one purpose comes before one that could be carved for another.
#[test]
fn fixed_gpus_are_tried_first() {
    let spec = json!({"offer": "WholeOnly", "gpus": {"indices": [1]}});
    let rendering = rendered(vec![gpu("h100-80gb", 1), gpu("h100-80gb", 2)], spec, &[], Counters::Separate, true);
    assert_eq!(names(&rendering)[0], "gpu-02-00-0");
}

/// The layout changes while a claim holds a partition of the old one: that stays, and what it overlaps waits.
#[test]
fn what_is_held_stays() {
    let held = ["gpu-01-00-0-mig-3g40gb-4"];
    let sevens = || layout(json!({"1g.10gb": 7}));
    let ones = ["1g10gb-6", "1g10gb-4", "1g10gb-5", "1g10gb-0", "1g10gb-1", "1g10gb-2", "1g10gb-3"];
    for counters in [Counters::Combined, Counters::Separate] {
        let rendering = rendered(vec![gpu("h100-80gb", 1)], sevens(), &held, counters, true);
        // All of the new layout is there, and counters keep what overlaps from being given out.
        assert_eq!(names(&rendering), [&ones[..], &["(3g40gb-4)"]].concat(), "{counters:?}");
        assert!(devices(&rendering.slices).iter().all(|device| device.consumes_counters.is_some()));
        let untainted = rendered(vec![gpu("h100-80gb", 1)], sevens(), &held, counters, false);
        assert_eq!(names(&untainted), [&ones[..], &["3g40gb-4"]].concat(), "{counters:?}");
        assert_eq!(untainted.remarks, [], "nothing is missing");
    }
    let without = rendered(vec![gpu("h100-80gb", 1)], sevens(), &held, Counters::None, true);
    assert_eq!(names(&without), ["1g10gb-0", "1g10gb-1", "1g10gb-2", "1g10gb-3", "(3g40gb-4)"]);
    // Else who waits for a half would have it the moment it is free, and the layout would wait again.
    let bare = rendered(vec![gpu("h100-80gb", 1)], sevens(), &held, Counters::None, false);
    assert_eq!(names(&bare), ["1g10gb-0", "1g10gb-1", "1g10gb-2", "1g10gb-3"]);
    assert_eq!(bare.remarks, [], "nothing is missing");
    for counters in EVERY_SERVER {
        let free = rendered(vec![gpu("h100-80gb", 1)], sevens(), &[], counters, true);
        assert_eq!(names(&free), ones, "when the claim has ended: {counters:?}");
    }
    insta::assert_snapshot!(
        "held beside a new layout",
        summary(&rendered(vec![gpu("h100-80gb", 1)], sevens(), &held, Counters::Separate, true))
    );
}

/// What is wanted and held at once is an ordinary device.
#[test]
fn what_is_held_and_wanted_is_not_tainted() {
    let spec = layout(json!({"3g.40gb": 2}));
    for counters in EVERY_SERVER {
        let held = ["gpu-01-00-0-mig-3g40gb-4"];
        let rendering = rendered(vec![gpu("h100-80gb", 1)], spec.clone(), &held, counters, true);
        assert_eq!(names(&rendering), ["3g40gb-4", "3g40gb-0"]);
    }
}

#[test]
fn whole_gpus_and_partitions_wait_for_each_other() {
    let threes = || layout(json!({"3g.40gb": 2}));
    let counted =
        |spec, held: &[&str]| names(&rendered(vec![gpu("h100-80gb", 1)], spec, held, Counters::Separate, true));
    let plain = |spec, held: &[&str]| names(&rendered(vec![gpu("h100-80gb", 1)], spec, held, Counters::None, true));
    assert_eq!(counted(threes(), &["gpu-01-00-0"]), ["3g40gb-4", "3g40gb-0", "(gpu-01-00-0)"]);
    assert_eq!(plain(threes(), &["gpu-01-00-0"]), ["(gpu-01-00-0)"]);
    let part = ["gpu-01-00-0-mig-3g40gb-0"];
    assert_eq!(counted(json!({"offer": "WholeOnly"}), &part), ["(3g40gb-0)", "gpu-01-00-0"]);
    assert_eq!(plain(json!({"offer": "WholeOnly"}), &part), ["(3g40gb-0)"]);
    assert_eq!(plain(json!({"offer": "Dynamic"}), &part), ["(3g40gb-0)"], "the server has lost its counters");
    for counters in EVERY_SERVER {
        let off = rendered(vec![gpu("h100-80gb", 1)], json!({"offer": "Nothing"}), &part, counters, true);
        assert_eq!(names(&off), ["(3g40gb-0)"], "{counters:?}");
    }
}

/// On a server without counters, an instance that the claims do not explain keeps the GPU from being offered whole.
#[test]
fn a_cut_gpu_is_not_whole() {
    let gpus = || vec![carved(gpu("h100-80gb", 1))];
    assert_eq!(names(&rendered(gpus(), json!({"offer": "WholeOnly"}), &[], Counters::None, true)), [""; 0]);
}

/// The GPU is withheld for a reason of its own: what is held stays all the same.
#[test]
fn what_is_held_of_a_withheld_gpu_stays() {
    let withheld = || vec![Gpu { offer: GpuOffer::Nothing, ..gpu("h100-80gb", 1) }];
    let held = ["gpu-01-00-0-mig-1g10gb-2", "gpu-02-00-0", "gpu-01-00-0-mig-9g9gb-1"];
    for counters in EVERY_SERVER {
        let rendering = rendered(withheld(), json!({"offer": "Dynamic"}), &held, counters, true);
        assert_eq!(names(&rendering), ["(1g10gb-2)"], "{counters:?}");
    }
    let unreadable = vec![Gpu { name: "gpu-01-00-0".into(), ..Gpu::default() }];
    assert_eq!(
        names(&rendered(unreadable, json!({"offer": "Nothing"}), &["gpu-01-00-0"], Counters::Separate, true)),
        [""; 0]
    );
}

/// What blocks a device does not take it away from who holds it, whatever the server makes of taints.
#[test]
fn what_is_held_and_blocked_stays() {
    let mut h100 = gpu("h100-80gb", 1);
    h100.blocked.push(blocked("Condemned", Some((0, 4))));
    let held = ["gpu-01-00-0-mig-3g40gb-0"];
    let with = |taints| rendered(vec![h100.clone()], layout(json!({"3g.40gb": 2})), &held, Counters::Separate, taints);
    assert_eq!(names(&with(true)), ["3g40gb-4", "(3g40gb-0)"]);
    assert_eq!(names(&with(false)), ["3g40gb-4", "3g40gb-0"]);
}

/// More partitions than a slice of Kubernetes 1.34 takes with their counters: a layout of a few is no trouble.
#[test]
fn a_layout_is_small_enough_for_every_server() {
    let mut many = gpu("rtx-pro-6000", 1);
    let mig = many.mig.as_mut().unwrap();
    let template = mig.profiles.iter().find(|profile| profile.name == "1g.24gb").unwrap().clone();
    for id in 100..120 {
        mig.profiles.push(kerf_api::MigProfile { id, name: format!("1g.24gb+x{id}"), ..template.clone() });
    }
    let rendering = rendered(vec![many], layout(json!({"1g.24gb": 4})), &[], Counters::Combined, true);
    assert_eq!((names(&rendering).len(), rendering.remarks), (4, vec![]));
}
