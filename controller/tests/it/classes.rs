//! The generated DeviceClasses against an API server in memory, in simulated time.

use std::time::Duration;

use k8s_openapi::api::resource::v1::DeviceClass;
use kerf_api::{GpuNode, GpuOffer};
use kerf_controller::classes::{Keeper, class, offered};
use kerf_controller::events::Reporter;
use kerf_controller::features::{Counters, ServerFeatures};
use kerf_controller::index::{Feed, Index, SharedIndex};
use kerf_controller::liveness::Now;
use kerf_controller::metrics::Metrics;
use kerf_controller::upkeep::Wakes;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::api_server::{ApiServer, State};
use crate::fixtures::{DRIVER, gpu, node};

struct World {
    server: ApiServer,
    index: SharedIndex,
    features: watch::Sender<Option<ServerFeatures>>,
    leading: watch::Sender<bool>,
}

impl World {
    fn new(generate: bool, extended_resources: bool) -> World {
        let server = ApiServer::new(Counters::Separate);
        server.state().extended_resources = extended_resources;
        let index = SharedIndex::new(Index::new(DRIVER, true));
        let features =
            watch::Sender::new(Some(ServerFeatures { counters: Counters::Separate, taints: true, extended_resources }));
        let leading = watch::Sender::new(true);
        let wakes = Wakes { index: index.clone(), features: features.subscribe(), leading: leading.subscribe() };
        let client = server.client();
        let reporter = Reporter::new(client.clone(), "test");
        let keeper = Keeper::new(client, DRIVER, generate, index.clone(), reporter, Metrics::default());
        tokio::spawn(wakes.keep(keeper, CancellationToken::new()));
        World { server, index, features, leading }
    }

    fn apply(&self, gpu_node: GpuNode) {
        self.index.update(|index| index.apply(gpu_node, Now::read()));
    }

    /// The watch shows what the server has.
    fn relist(&self) {
        let classes: Vec<DeviceClass> = self.server.state().classes.values().cloned().collect();
        self.index.update(|index| index.reset(classes, Now::read()));
    }

    /// Waits, in simulated time and with a watch that shows everything, until the server looks as it should.
    async fn until(&self, what: &str, check: impl Fn(&State) -> bool) {
        let wait = async {
            while !check(&self.server.state()) {
                sleep(Duration::from_millis(20)).await;
                self.relist();
            }
        };
        if timeout(Duration::from_secs(60), wait).await.is_err() {
            panic!("not in time: {what}; written: {:#?}", self.server.state().writes);
        }
    }

    /// What is written in half a minute.
    async fn quiet(&self) -> Vec<String> {
        self.server.state().writes.clear();
        for _ in 0..30 {
            sleep(Duration::from_secs(1)).await;
            self.relist();
        }
        std::mem::take(&mut self.server.state().writes)
    }
}

#[tokio::test(start_paused = true)]
async fn classes_follow_the_nodes() {
    let world = World::new(true, true);
    world.apply(node("n", vec![gpu("h100-80gb", 0x3b)]));
    world.until("a class for each profile", |state| state.classes.len() == 7).await;
    world.relist();
    assert_eq!(world.quiet().await, [""; 0], "a quiet cluster costs no writes");
    world.apply(node("m", vec![gpu("h100-80gb", 0x3b), gpu("a30", 0x5e)]));
    let a30 = offered([&node("m", vec![gpu("a30", 0x5e)])]);
    let all = 7 + a30.len();
    if !a30.is_empty() {
        world.until("those of another product", |state| state.classes.len() == all).await;
    }
    // A plugin that is stale, or a kubelet that forgot it, still has its GPUs.
    let mut stale = node("n", vec![gpu("h100-80gb", 0x3b)]);
    stale.status.as_mut().unwrap().registered = false;
    world.apply(stale);
    world.index.update(|index| index.delete(node("m", Vec::new()), Now::read()));
    world.until("those of the node that went are gone", |state| state.classes.len() == 7).await;
    assert!(world.server.state().events.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_profile_that_is_away_for_a_moment_keeps_its_class() {
    let world = World::new(true, true);
    world.apply(node("n", vec![gpu("h100-80gb", 0x3b)]));
    world.until("classes", |state| state.classes.len() == 7).await;
    world.relist();
    let mut away = gpu("h100-80gb", 0x3b);
    away.offer = GpuOffer::Nothing;
    world.apply(node("n", vec![away.clone()]));
    sleep(Duration::from_secs(20)).await;
    world.apply(node("n", vec![gpu("h100-80gb", 0x3b)]));
    assert_eq!(world.quiet().await.iter().filter(|write| write.starts_with("delete")).count(), 0);
    world.apply(node("n", vec![away]));
    world.until("classes are gone", |state| state.classes.is_empty()).await;
}

#[tokio::test(start_paused = true)]
async fn what_a_server_drops_is_said_once_and_comes_with_its_update() {
    let world = World::new(true, false);
    world.apply(node("n", vec![gpu("h100-80gb", 0x3b)]));
    world.until("classes", |state| state.classes.len() == 7 && state.events.len() == 7).await;
    world.relist();
    assert!(world.server.state().events.iter().all(|event| event.contains("DRAExtendedResource")));
    assert_eq!(world.quiet().await, [""; 0]);
    assert_eq!(world.server.state().events.len(), 7, "once");
    world.server.state().extended_resources = true;
    world.features.send_modify(|features| features.as_mut().unwrap().extended_resources = true);
    let named = |class: &DeviceClass| class.spec.as_ref().unwrap().extended_resource_name.is_some();
    world.until("classes with their resource", |state| state.classes.values().all(named)).await;
}

#[tokio::test(start_paused = true)]
async fn an_admins_class_is_left_alone() {
    let world = World::new(true, true);
    let mut admins = class(DRIVER, "1g.10gb", Some("nvidia.com/mig-1g.10gb".into()));
    admins.metadata.labels = None;
    admins.metadata.uid = Some("uid-admins".into());
    world.server.state().classes.insert("mig-1g.10gb.nvidia.com".into(), admins.clone());
    world.relist();
    world.apply(node("n", vec![gpu("h100-80gb", 0x3b)]));
    world.until("the others", |state| state.classes.len() == 7).await;
    world.relist();
    world.index.update(|index| index.delete(node("n", Vec::new()), Now::read()));
    world.until("all but the admin's are gone", |state| state.classes.len() == 1).await;
    let state = world.server.state();
    assert_eq!(state.classes["mig-1g.10gb.nvidia.com"], admins);
    assert!(state.events.iter().any(|event| event.contains("is not the controller's")), "{:?}", state.events);
}

#[tokio::test(start_paused = true)]
async fn who_follows_writes_nothing_and_who_is_switched_off_clears_up() {
    let world = World::new(true, true);
    world.leading.send_replace(false);
    world.apply(node("n", vec![gpu("h100-80gb", 0x3b)]));
    assert_eq!(world.quiet().await, [""; 0]);
    world.leading.send_replace(true);
    world.until("classes", |state| state.classes.len() == 7).await;

    let off = World::new(false, true);
    off.server.state().classes = world.server.state().classes.clone();
    off.relist();
    off.apply(node("n", vec![gpu("h100-80gb", 0x3b)]));
    off.until("no classes", |state| state.classes.is_empty()).await;
}

/// What a node reports is not taken at its word.
#[test]
fn a_hostile_node_makes_no_odd_class() {
    let mut odd = gpu("h100-80gb", 0x3b);
    let profiles = &mut odd.mig.as_mut().unwrap().profiles;
    let template = profiles[0].clone();
    for name in ["1g.10gb\" || true", "1g.10gb/..", "", "MIG"] {
        profiles.push(kerf_api::MigProfile { name: name.into(), ..template.clone() });
    }
    let names = offered([&node("n", vec![odd.clone()])]);
    assert_eq!(names, offered([&node("n", vec![gpu("h100-80gb", 0x3b)])]));
    let profiles = &mut odd.mig.as_mut().unwrap().profiles;
    profiles.extend((0..500).map(|many| kerf_api::MigProfile { name: format!("{many}g.1gb"), ..template.clone() }));
    let all = offered([&node("n", vec![odd.clone()]), &node("m", vec![gpu("h100-80gb", 0x3b)])]);
    assert_eq!(all.len(), 32);
    assert!(names.is_subset(&all), "what more nodes have comes first");
    odd.mig.as_mut().unwrap().profiles.drain(..7);
    let mut other = gpu("a30", 0x3b);
    other.offer = GpuOffer::Partitions;
    let a30 = offered([&node("m", vec![other.clone()])]);
    let all = offered([&node("n", vec![odd]), &node("m", vec![other])]);
    assert!(!a30.is_empty() && a30.is_subset(&all), "what one other node has is pushed out by nobody: {all:?}");
}

/// Else each of the two would make the class its own, in turn.
#[test]
fn one_class_has_one_profile() {
    let mut odd = gpu("h100-80gb", 0x3b);
    let names = offered([&node("n", vec![odd.clone()])]);
    let profiles = &mut odd.mig.as_mut().unwrap().profiles;
    let template = profiles[0].clone();
    for name in ["1g.10gb.me", "1g.10gb+me+all", "1g.10gb+me.all"] {
        profiles.push(kerf_api::MigProfile { name: name.into(), ..template.clone() });
    }
    let mut all = offered([&node("n", vec![odd])]);
    assert!(all.remove("1g.10gb+me+all") && all == names, "{all:?}");
}
