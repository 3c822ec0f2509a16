//! When a node's devices are published, in injected time.

use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kerf_api::{GpuNode, names};
use kerf_controller::diff::Observed;
use kerf_controller::features::{Counters, ServerFeatures};
use kerf_controller::index::{Census, Decision, Feed, Index, Reason, Standing};
use kerf_controller::liveness::Now;
use kerf_controller::policy::Offering;
use kerf_controller::render::render;
use tokio::time::Instant;

use crate::fixtures::{DRIVER, NODE_UID, core_node, gpu, lease, node, registered};

/// An index, a clock, and a leader that renews its lease so that the controller is not blind.
struct World {
    index: Index,
    start: Now,
    seconds: u64,
}

impl World {
    /// The watches have listed what is there: nothing.
    fn new() -> World {
        let mut world = World {
            index: Index::new(DRIVER, true),
            start: Now { instant: Instant::now(), wall: Timestamp::from_second(1_800_000_000).unwrap() },
            seconds: 0,
        };
        world.index.reset(Vec::<GpuNode>::new(), world.start);
        Feed::<k8s_openapi::api::coordination::v1::Lease>::reset(&mut world.index, Vec::new(), world.start);
        world
    }

    /// A node with a registered plugin whose lease was just made.
    fn published() -> World {
        let mut world = World::new();
        let now = world.now();
        world.index.apply(core_node("n", NODE_UID), now);
        world.index.apply(node("n", vec![gpu("l40s", 1)]), now);
        world.renew();
        assert!(world.publishes());
        world
    }

    fn now(&self) -> Now {
        let passed = Duration::from_secs(self.seconds);
        let wall = self.start.wall + SignedDuration::try_from(passed).unwrap();
        Now { instant: self.start.instant + passed, wall }
    }

    /// Time passes; somebody leads.
    fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.seconds += 1;
            if self.seconds.is_multiple_of(4) {
                let mut lease = lease("", "leader", self.now().wall);
                lease.metadata.name = Some(names::CONTROLLER.into());
                self.index.apply(lease, self.now());
            }
        }
    }

    fn renew(&mut self) {
        let now = self.now();
        self.index.apply(lease("n", "plugin", now.wall), now);
    }

    fn decision(&self) -> Decision {
        self.index.verdict("n", self.now()).decision
    }

    fn publishes(&self) -> bool {
        matches!(self.decision(), Decision::Publish { .. })
    }

    /// What the caller would do if it looks only when it is told to.
    fn seconds_to_recheck(&self) -> Option<u64> {
        let recheck = self.index.verdict("n", self.now()).recheck?;
        Some((recheck - self.now().instant).as_secs())
    }
}

#[test]
fn published_only_when_everything_is_there() {
    let mut world = World::new();
    let now = world.now();
    assert_eq!(world.decision(), Decision::Leave(Reason::NoNode));
    world.index.apply(core_node("n", NODE_UID), now);
    assert_eq!(world.decision(), Decision::Withdraw(Reason::NoPlugin));
    world.index.apply(registered(node("n", vec![]), false), now);
    assert_eq!(world.decision(), Decision::Withdraw(Reason::NoLease));
    world.renew();
    assert_eq!(world.decision(), Decision::Leave(Reason::Unregistered));
    world.index.apply(node("n", vec![]), now);
    assert!(world.publishes());
    world.index.delete(node("n", vec![]), now);
    assert_eq!(world.decision(), Decision::Withdraw(Reason::NoPlugin));
}

#[test]
fn another_drivers_plugin_is_none_of_ours() {
    let mut world = World::published();
    let mut other = node("n", vec![]);
    other.status.as_mut().unwrap().driver_name = "gpu.example.com".into();
    world.index.apply(other, world.now());
    assert_eq!(world.decision(), Decision::Withdraw(Reason::OtherDriver));
}

#[test]
fn a_lease_is_good_for_its_duration_after_each_renewal() {
    let mut world = World::published();
    for _ in 0..10 {
        world.pass(29);
        assert!(world.publishes());
        assert_eq!(world.seconds_to_recheck(), Some(1));
        world.renew();
    }
    world.pass(30);
    assert_eq!(world.decision(), Decision::Withdraw(Reason::Stale));
    world.renew();
    assert!(world.publishes(), "it is back");
}

#[test]
fn nodes_are_counted_by_how_their_plugin_stands() {
    let mut world = World::published();
    for other in ["cpu", "unregistered", "stopped", "lost", "foreign"] {
        world.index.apply(core_node(other, NODE_UID), world.now());
    }
    let mut foreign = node("foreign", vec![]);
    foreign.status.as_mut().unwrap().driver_name = "gpu.example.com".into();
    world.index.apply(foreign, world.now());
    world.index.apply(registered(node("unregistered", vec![]), false), world.now());
    world.index.apply(lease("unregistered", "plugin", world.now().wall), world.now());
    world.index.apply(node("stopped", vec![]), world.now());
    world.index.apply(lease("stopped", "", world.now().wall), world.now());
    world.index.apply(node("lost", vec![]), world.now());
    let standings = [Standing::Live, Standing::Unregistered, Standing::Stopped, Standing::Stale];
    let census = Census { nodes: standings.map(|standing| (standing, 1)).into(), slices: 0 };
    assert_eq!(world.index.census(world.now()), census);

    // Blind: no lease is seen, not even the leader's.
    world.seconds += 60;
    let nodes = world.index.census(world.now()).nodes;
    assert_eq!(nodes, [(Standing::Unknown, 4)].into());
}

/// The watch repeats objects that did not change, after a reconnect for example.
#[test]
fn a_lease_seen_again_is_not_renewed() {
    let mut world = World::published();
    let unchanged = lease("n", "plugin", world.now().wall);
    for _ in 0..3 {
        world.pass(10);
        world.index.apply(unchanged.clone(), world.now());
        world.index.reset(vec![unchanged.clone()], world.now());
    }
    assert_eq!(world.decision(), Decision::Withdraw(Reason::Stale));
}

#[test]
fn a_released_lease_withdraws_at_once() {
    let mut world = World::published();
    world.pass(5);
    world.index.apply(lease("n", "", world.now().wall), world.now());
    assert_eq!(world.decision(), Decision::Withdraw(Reason::Released));
    world.renew();
    assert!(world.publishes());
    world.index.delete(lease("n", "plugin", world.now().wall), world.now());
    assert_eq!(world.decision(), Decision::Withdraw(Reason::NoLease));
}

/// A plugin that restarts is unregistered for a moment; the kubelet itself waits 30 s before it wipes.
#[test]
fn a_missing_registration_is_borne_for_a_while() {
    let mut world = World::published();
    world.pass(100);
    world.renew();
    world.index.apply(registered(node("n", vec![]), false), world.now());
    for _ in 0..2 {
        assert_eq!(world.decision(), Decision::Leave(Reason::Unregistered));
        world.pass(14);
        world.renew();
        // Other changes do not prolong it.
        world.index.apply(registered(node("n", vec![gpu("l40s", 2)]), false), world.now());
    }
    world.pass(2);
    assert_eq!(world.decision(), Decision::Withdraw(Reason::Unregistered));
    world.index.apply(node("n", vec![]), world.now());
    assert!(world.publishes());
}

/// The first look of a controller at a lease that is already there.
#[test]
fn found_leases() {
    let found = |age: i64, holder: &str| {
        let mut world = World::new();
        let now = world.now();
        world.index.apply(core_node("n", NODE_UID), now);
        world.index.apply(node("n", vec![]), now);
        world.index.reset(vec![lease("n", holder, now.wall - SignedDuration::from_secs(age))], now);
        world
    };
    // By the wall clock it is fresh: good for the rest of its duration.
    let mut world = found(10, "plugin");
    assert!(world.publishes());
    world.pass(20);
    assert_eq!(world.decision(), Decision::Withdraw(Reason::Stale));

    // By the wall clock it is old, or from the future: the clocks may differ, so wait and see.
    for age in [31, 3600, -3600] {
        let mut world = found(age, "plugin");
        assert_eq!(world.decision(), Decision::Leave(Reason::Unproven));
        assert_eq!(world.seconds_to_recheck(), Some(30));
        world.pass(10);
        world.renew();
        assert!(world.publishes(), "it was renewed, whatever its clock says");

        let mut world = found(age, "plugin");
        world.pass(30);
        assert_eq!(world.decision(), Decision::Withdraw(Reason::Stale));
    }
    assert_eq!(found(1, "").decision(), Decision::Withdraw(Reason::Released));
}

/// When the controller itself is cut off from the API server, no plugin is to blame.
#[test]
fn a_blind_controller_withdraws_nothing() {
    let mut world = World::published();
    world.seconds += 60;
    assert_eq!(world.decision(), Decision::Leave(Reason::Blind));
    world.index.take_dirty();
    world.pass(4);
    assert_eq!(world.decision(), Decision::Leave(Reason::Unproven), "it sees again, but not yet long enough");
    assert!(world.index.take_dirty().contains("n"));
    world.pass(26);
    world.renew();
    assert!(world.publishes());

    world.seconds += 60;
    world.pass(4);
    world.pass(30);
    assert_eq!(world.decision(), Decision::Withdraw(Reason::Stale), "this plugin is really gone");
}

#[test]
fn a_node_made_anew_waits_for_its_own_plugin() {
    let mut world = World::published();
    let now = world.now();
    world.index.delete(core_node("n", NODE_UID), now);
    assert_eq!(world.decision(), Decision::Leave(Reason::NoNode), "its slices are collected with it");
    world.index.apply(core_node("n", "another"), now);
    world.index.delete(core_node("n", NODE_UID), now);
    assert_eq!(world.decision(), Decision::Withdraw(Reason::EarlierNode));
    let mut gpu_node = node("n", vec![]);
    gpu_node.metadata.owner_references.as_mut().unwrap()[0].uid = "another".into();
    world.index.apply(gpu_node, now);
    match world.decision() {
        Decision::Publish { node_uid, .. } => assert_eq!(node_uid, "another"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn forgotten_nodes_leave_nothing() {
    let mut world = World::published();
    let now = world.now();
    world.index.delete(node("n", vec![]), now);
    world.index.delete(lease("n", "plugin", now.wall), now);
    assert!(world.index.knows("n"));
    world.index.delete(core_node("n", NODE_UID), now);
    assert!(!world.index.knows("n"));
}

#[test]
fn only_changes_make_work() {
    let mut world = World::published();
    let now = world.now();
    world.index.take_dirty();
    world.index.apply(node("n", vec![gpu("l40s", 1)]), now);
    world.index.apply(core_node("n", NODE_UID), now);
    world.index.reset(vec![core_node("n", NODE_UID)], now);
    for _ in 0..10 {
        world.pass(10);
        world.renew();
    }
    assert!(world.index.take_dirty().is_empty(), "a quiet node");
    world.index.apply(node("n", vec![gpu("l40s", 2)]), now);
    assert_eq!(world.index.take_dirty().len(), 1);
}

pub(crate) fn slices() -> Vec<Observed> {
    let features = ServerFeatures { counters: Counters::Separate, taints: true, extended_resources: true };
    let rendered =
        render(DRIVER, &node("n", vec![gpu("h100-80gb", 1), gpu("l40s", 2)]), NODE_UID, &Offering::default(), features)
            .slices;
    let numbered = rendered.into_iter().enumerate().map(|(number, mut slice)| {
        slice.metadata.uid = Some(format!("uid-{number}"));
        slice.metadata.resource_version = Some("10".into());
        Observed::from(&slice)
    });
    let mut slices: Vec<_> = numbered.collect();
    slices.sort_by(|a, b| a.name.cmp(&b.name));
    slices
}

#[test]
fn own_writes_are_known_before_the_watch_shows_them() {
    let mut world = World::published();
    let now = world.now();
    for slice in slices() {
        world.index.written(slice);
    }
    world.index.take_dirty();
    // The watch comes late: with the same, with older versions, with the deletion of a predecessor of the same name.
    for slice in slices() {
        world.index.apply(slice.clone(), now);
        world.index.apply(Observed { resource_version: "9".into(), generation: 7, ..slice.clone() }, now);
        world.index.delete(Observed { uid: "predecessor".into(), resource_version: "8".into(), ..slice }, now);
    }
    assert_eq!(world.index.slices("n"), slices());
    assert!(world.index.take_dirty().is_empty());
}

/// The kubelet wipes at its start, when the plugin has just come up as well: the reply to a create can come later than
/// the news that the slice is gone again.
#[test]
fn what_is_gone_before_the_reply_is_not_believed_in() {
    let news: [fn(&mut World, Observed); 3] = [
        |world, slice| world.index.delete(slice, world.start),
        |world, _| world.index.reset(Vec::<Observed>::new(), world.start),
        |world, slice| {
            world.index.apply(slice.clone(), world.start);
            world.index.delete(slice, world.start);
        },
    ];
    for news in news {
        let mut world = World::published();
        let slice = slices().remove(0);
        world.index.begin("n");
        news(&mut world, slice.clone());
        world.index.take_dirty();
        world.index.written(slice.clone());
        assert!(world.index.slices("n").is_empty());
        assert!(world.index.take_dirty().contains("n"), "to be looked at again");
        world.index.begin("n");
        world.index.written(slice);
        assert_eq!(world.index.slices("n").len(), 1, "the next time");
    }
    let mut world = World::published();
    let slice = slices().remove(0);
    let newer = Observed { resource_version: "11".into(), generation: 7, ..slice.clone() };
    world.index.apply(newer.clone(), world.start);
    world.index.written(slice);
    assert_eq!(world.index.slices("n"), [newer]);
}

#[test]
fn a_wipe_is_noticed() {
    let wipes: [fn(&mut World); 2] = [
        |world| slices().into_iter().for_each(|slice| world.index.delete(slice, world.start)),
        |world| world.index.reset(Vec::<Observed>::new(), world.start),
    ];
    for wipe in wipes {
        let mut world = World::published();
        slices().into_iter().for_each(|slice| world.index.written(slice));
        world.index.take_dirty();
        wipe(&mut world);
        assert!(world.index.slices("n").is_empty());
        assert!(world.index.take_dirty().contains("n"));
        assert!(world.publishes(), "the plugin is alive: they come back");
    }
}

#[test]
fn slices_of_others_are_not_looked_at() {
    let mut world = World::published();
    world.index.take_dirty();
    let other = Observed { driver: "gpu.example.com".into(), ..slices().remove(0) };
    let nowhere = Observed { node: None, ..slices().remove(0) };
    world.index.apply(other, world.start);
    world.index.apply(nowhere, world.start);
    assert!(world.index.slices("n").is_empty() && world.index.take_dirty().is_empty());
}
