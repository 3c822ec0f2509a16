//! The writer against an API server in memory, in simulated time.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::jiff::Timestamp;
use kerf_api::{Gpu, GpuNode, names};
use kerf_controller::diff::Observed;
use kerf_controller::events::Reporter;
use kerf_controller::features::{Counters, ServerFeatures};
use kerf_controller::index::{Feed, Index, SharedIndex};
use kerf_controller::liveness::Now;
use kerf_controller::metrics::{Metrics, Seen};
use kerf_controller::writer::Writer;
use prometheus_client::encoding::text::encode;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::api_server::{ApiServer, State};
use crate::fixtures::{DRIVER, NODE_UID, blocked, carved, core_node, gpu, lease, node, registered};

struct World {
    server: ApiServer,
    index: SharedIndex,
    features: watch::Sender<Option<ServerFeatures>>,
    leading: watch::Sender<bool>,
    metrics: Metrics,
    stop: CancellationToken,
    writer: tokio::task::JoinHandle<()>,
}

impl World {
    /// A writer that leads, before a server of which it believes that it keeps counters in this way.
    fn new(server: Counters, believed: Counters) -> World {
        World::on(ApiServer::new(server), believed, true)
    }

    fn on(server: ApiServer, believed: Counters, leads: bool) -> World {
        let index = SharedIndex::new(Index::new(DRIVER, true));
        let features =
            watch::Sender::new(Some(ServerFeatures { counters: believed, taints: true, extended_resources: true }));
        let leading = watch::Sender::new(leads);
        let client = server.client();
        let metrics = Metrics::default();
        let writer = Writer {
            client: client.clone(),
            driver: DRIVER.into(),
            index: index.clone(),
            features: features.clone(),
            leading: leading.subscribe(),
            reporter: Reporter::new(client, "test"),
            metrics: metrics.clone(),
        };
        let stop = CancellationToken::new();
        let writer = tokio::spawn(writer.run(stop.clone()));
        World { server, index, features, leading, metrics, stop, writer }
    }

    fn apply<T>(&self, object: T)
    where
        Index: Feed<T>,
    {
        self.index.update(|index| index.apply(object, Now::read()));
    }

    fn plugin(&self, gpu_node: GpuNode) {
        self.apply(gpu_node);
        self.apply(lease("n", "plugin", Timestamp::now()));
    }

    /// A node with a living plugin.
    fn node(&self, gpus: Vec<Gpu>) {
        self.apply(core_node("n", NODE_UID));
        self.plugin(node("n", gpus));
    }

    /// Waits, in simulated time, until the server looks as it should.
    async fn until(&self, what: &str, check: impl Fn(&State) -> bool) {
        let wait = async {
            while !check(&self.server.state()) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        if timeout(Duration::from_secs(10), wait).await.is_err() {
            panic!("not in time: {what}; written: {:#?}", self.server.state().writes);
        }
    }

    /// Some time in which the plugin lives and the controller sees it.
    async fn live(&self, seconds: u64) {
        for second in 0..seconds {
            sleep(Duration::from_secs(1)).await;
            if second % 5 == 0 {
                let now = Now::read();
                // Simulated time does not move the wall clock.
                let renewed = Timestamp::from_second(i64::try_from(second).unwrap()).unwrap();
                self.apply(lease("n", "plugin", renewed));
                let mut leader = lease("", "test", renewed);
                leader.metadata.name = Some(names::CONTROLLER.into());
                self.index.update(|index| Feed::<Lease>::apply(index, leader, now));
            }
        }
    }

    /// The watch shows what the server has.
    fn relist(&self) {
        let slices: Vec<Observed> = self.server.state().slices.values().map(Observed::from).collect();
        self.index.update(|index| index.reset(slices, Now::read()));
    }

    fn writes(&self) -> Vec<String> {
        std::mem::take(&mut self.server.state().writes)
    }

    /// What happens in half a minute.
    async fn quiet(&self) -> Vec<String> {
        self.writes();
        self.live(30).await;
        self.writes()
    }
}

fn offers(count: usize) -> impl Fn(&State) -> bool {
    move |server: &State| {
        !server.slices.is_empty()
            && server.slices.len() as i64 == server.slices.values().next().unwrap().spec.pool.resource_slice_count
            && server.pool("n").len() == count
    }
}

/// A kubelet may create slices of its node under any name.
#[tokio::test(start_paused = true)]
async fn a_node_is_published_though_another_has_taken_its_names() {
    let names: Vec<String> = {
        let world = World::new(Counters::Separate, Counters::Separate);
        world.node(vec![gpu("h100-80gb", 1), gpu("l40s", 2)]);
        world.until("published", offers(27)).await;
        world.server.state().slices.keys().cloned().collect()
    };
    let world = World::new(Counters::Separate, Counters::Separate);
    for name in &names {
        let mut taken = ResourceSlice::default();
        taken.metadata.name = Some(name.clone());
        (taken.spec.driver, taken.spec.node_name) = ("x.example".into(), Some("thief".into()));
        world.server.state().slices.insert(name.clone(), taken);
    }
    world.node(vec![gpu("h100-80gb", 1), gpu("l40s", 2)]);
    world.until("published", |state| state.slices.len() == 2 * names.len()).await;
    assert_eq!(world.server.state().pool("n").len(), 27);
    let ours = |name: &String| names.iter().any(|taken| name.starts_with(&format!("{taken}-")));
    let found: Vec<String> = world.server.state().slices.keys().filter(|name| ours(name)).cloned().collect();
    assert_eq!(found.len(), names.len(), "their order is that of the names they should have: {found:?}");
    world.relist();
    world.writes();
    world.node(vec![gpu("h100-80gb", 1), gpu("l40s", 2), gpu("l40s", 3)]);
    world.until("one more", |state| state.slices.len() > 2 * names.len()).await;
    let writes = world.writes();
    assert!(found.iter().all(|name| writes.contains(&format!("update {name}"))), "it keeps its names: {writes:?}");
    assert_eq!(world.server.state().pool("n").len(), 28);
}

#[tokio::test(start_paused = true)]
async fn a_slice_that_the_watch_has_not_shown_yet_is_not_made_twice() {
    let world = World::new(Counters::Separate, Counters::Separate);
    world.node(vec![gpu("h100-80gb", 1)]);
    world.until("published", offers(26)).await;
    let before: Vec<String> = world.server.state().slices.keys().cloned().collect();
    world.index.update(|index| index.reset(Vec::<Observed>::new(), Now::read()));
    world.live(5).await;
    assert_eq!(world.server.state().slices.keys().cloned().collect::<Vec<_>>(), before);
}

#[tokio::test(start_paused = true)]
async fn publishes_once() {
    for counters in [Counters::None, Counters::Combined, Counters::Separate] {
        let world = World::new(counters, counters);
        world.node(vec![gpu("h100-80gb", 1), gpu("l40s", 2)]);
        world.until("published", offers(if counters == Counters::None { 2 } else { 27 })).await;
        let writes = world.writes();
        if counters == Counters::Separate {
            assert_eq!(
                writes,
                [
                    "create n-gpu.nvidia.com-000-counters-0",
                    "create n-gpu.nvidia.com-001-gpu-02-00-0",
                    "create n-gpu.nvidia.com-002-gpu-01-00-0",
                ]
            );
        }
        world.relist();
        assert_eq!(world.quiet().await, [""; 0], "the watch shows nothing new");
        world.apply(node("n", vec![carved(gpu("h100-80gb", 1)), gpu("l40s", 2)]));
        if counters != Counters::None {
            assert_eq!(world.quiet().await, [""; 0], "carving changes nothing that is published");
        }
        let events = world.server.state().events.clone();
        assert_eq!(events.len(), usize::from(counters == Counters::None), "{events:?}");
        assert!(events.iter().all(|note| note.contains("DRAPartitionableDevices")));
    }
}

/// The probe was wrong, or an older API server answered: what comes back decides.
#[tokio::test(start_paused = true)]
async fn dropped_counters_are_noticed_by_the_reply() {
    for believed in [Counters::Separate, Counters::Combined] {
        let world = World::new(Counters::None, believed);
        world.node(vec![gpu("h100-80gb", 1), gpu("h100-80gb", 2)]);
        // The server itself checks that overlapping devices are never offered.
        world.until("whole GPUs", |server| offers(2)(server) && !server.events.is_empty()).await;
        assert_eq!(world.features.borrow().unwrap().counters, Counters::None);
        assert_eq!(world.server.state().pool("n"), ["gpu-01-00-0", "gpu-02-00-0"]);
        assert_eq!(world.quiet().await, [""; 0]);
        assert_eq!(world.server.state().events.len(), 1, "said once");
    }
}

fn with_foreign_instance(mut gpu: Gpu) -> Gpu {
    gpu.blocked.push(blocked(names::FOREIGN_INSTANCE, Some((0, 4))));
    gpu
}

fn tainted(server: &State) -> usize {
    let devices = server.slices.values().flat_map(|slice| slice.spec.devices.iter().flatten());
    devices.filter(|device| device.taints.is_some()).count()
}

/// The server writes a time into each taint: that is no reason to write again.
#[tokio::test(start_paused = true)]
async fn a_blocked_gpu_is_one_update() {
    let world = World::new(Counters::Separate, Counters::Separate);
    let gpus = |first: Gpu| vec![first, gpu("h100-80gb", 2)];
    world.node(gpus(gpu("h100-80gb", 1)));
    world.until("published", offers(52)).await;
    world.writes();
    world.apply(node("n", gpus(with_foreign_instance(gpu("h100-80gb", 1)))));
    world.until("tainted", |server| tainted(server) > 0).await;
    world.relist();
    world.live(30).await;
    assert_eq!(world.writes(), ["update n-gpu.nvidia.com-002-gpu-01-00-0"]);
    assert!(offers(52)(&world.server.state()), "nothing vanishes, and the pool is whole");
    assert!(world.server.state().slices.values().all(|slice| slice.spec.pool.generation == 1));

    world.apply(node("n", gpus(gpu("h100-80gb", 1))));
    world.until("free again", |server| tainted(server) == 0).await;
    assert_eq!(world.quiet().await, [""; 0]);
}

/// The probe was wrong, or an older API server answered: what comes back decides.
#[tokio::test(start_paused = true)]
async fn dropped_taints_are_noticed_by_the_reply() {
    let world = World::new(Counters::Separate, Counters::Separate);
    world.server.state().taints = false;
    world.node(vec![with_foreign_instance(gpu("h100-80gb", 1)), gpu("l40s", 2)]);
    let left = |server: &State| {
        let pool = offers(1 + 10)(server).then(|| server.pool("n"));
        pool.is_some_and(|pool| !pool.contains(&"gpu-01-00-0".to_owned()) && pool.contains(&"gpu-02-00-0".to_owned()))
    };
    world.until("blocked devices are gone", |server| left(server) && !server.events.is_empty()).await;
    let wanted = ServerFeatures { counters: Counters::Separate, taints: false, extended_resources: true };
    assert_eq!(*world.features.borrow(), Some(wanted), "nothing is said about counters");
    assert!(world.server.state().events.iter().all(|note| note.contains("DRADeviceTaints")));
    world.relist();
    assert_eq!(world.quiet().await, [""; 0]);

    world.server.state().taints = true;
    world.features.send_replace(Some(ServerFeatures { taints: true, ..wanted }));
    world.until("they are back", offers(27)).await;
}

/// The gate is switched off under a running controller: stored slices keep their counters until they are written.
#[tokio::test(start_paused = true)]
async fn a_gate_that_goes_and_comes() {
    let world = World::new(Counters::Separate, Counters::Separate);
    world.node(vec![gpu("h100-80gb", 1), gpu("h100-80gb", 2)]);
    world.until("partitions", offers(52)).await;
    world.server.state().counters = Counters::None;
    world.features.send_replace(Some(ServerFeatures {
        counters: Counters::None,
        taints: true,
        extended_resources: true,
    }));
    world.until("whole only", offers(2)).await;
    world.server.state().counters = Counters::Separate;
    world.features.send_replace(Some(ServerFeatures {
        counters: Counters::Separate,
        taints: true,
        extended_resources: true,
    }));
    world.until("partitions", offers(52)).await;
    let generations: Vec<i64> = world.server.state().slices.values().map(|slice| slice.spec.pool.generation).collect();
    assert_eq!(generations, [3, 3, 3]);
}

#[tokio::test(start_paused = true)]
async fn a_form_that_the_server_insists_on_is_not_fought() {
    let world = World::new(Counters::Separate, Counters::Separate);
    world.server.state().drops_capacity = true;
    world.node(vec![gpu("l40s", 1), gpu("l40s", 2)]);
    world.until("published", offers(2)).await;
    world.relist();
    assert_eq!(world.quiet().await, [""; 0]);
    let mut changed = gpu("l40s", 1);
    changed.product = "Another".into();
    world.apply(node("n", vec![changed, gpu("l40s", 2)]));
    assert_eq!(world.quiet().await, ["update n-gpu.nvidia.com-001-gpu-01-00-0"], "a change is written all the same");
}

#[tokio::test(start_paused = true)]
async fn slices_go_with_the_plugin_and_come_back() {
    let world = World::new(Counters::Separate, Counters::Separate);
    let gpus = || vec![gpu("h100-80gb", 1)];
    world.node(gpus());
    world.until("published", offers(26)).await;
    let mut foreign = world.server.state().slices.values().next().unwrap().clone();
    (foreign.metadata.name, foreign.metadata.labels) = (Some("foreign".into()), None);
    world.server.state().slices.insert("foreign".into(), foreign);
    world.relist();
    world.until("another writer's slice is deleted", |server| !server.slices.contains_key("foreign")).await;

    // Stopped in good order.
    world.apply(lease("n", "", Timestamp::now()));
    world.until("withdrawn", |server| server.slices.is_empty()).await;
    world.plugin(node("n", gpus()));
    world.until("back", offers(26)).await;

    // Killed: the lease runs out, by the clock alone.
    world.live(60).await;
    world.writes();
    for _ in 0..40 {
        sleep(Duration::from_secs(1)).await;
        let mut leader = lease("", "test", Timestamp::now());
        leader.metadata.name = Some(names::CONTROLLER.into());
        world.apply(leader);
    }
    assert!(world.server.state().slices.is_empty(), "{:?}", world.writes());
    world.plugin(node("n", gpus()));
    world.until("back", offers(26)).await;

    // Not registered for longer than a restart takes.
    world.apply(registered(node("n", gpus()), false));
    world.live(20).await;
    assert!(offers(26)(&world.server.state()));
    world.live(11).await;
    assert!(world.server.state().slices.is_empty());
}

/// The kubelet deletes all slices of its node when it starts.
#[tokio::test(start_paused = true)]
async fn a_wipe_is_repaired_at_once_but_not_in_a_storm() {
    let world = World::new(Counters::Separate, Counters::Separate);
    world.node(vec![gpu("h100-80gb", 1)]);
    world.until("published", offers(26)).await;
    world.live(130).await;
    world.writes();
    world.server.state().slices.clear();
    world.relist();
    let wiped = tokio::time::Instant::now();
    world.until("back", offers(26)).await;
    assert!(wiped.elapsed() < Duration::from_millis(200));
    assert_eq!(world.writes().len(), 2);

    // Something that wipes again and again: five minutes of it, every 100 ms.
    for _ in 0..300 {
        for _ in 0..10 {
            world.server.state().slices.clear();
            world.relist();
            sleep(Duration::from_millis(100)).await;
        }
        world.live(1).await;
    }
    let writes = world.writes().len();
    assert!((10..60).contains(&writes), "{writes} writes in ten minutes");
}

#[tokio::test(start_paused = true)]
async fn only_the_leader_writes() {
    let world = World::new(Counters::Separate, Counters::Separate);
    world.leading.send_replace(false);
    world.node(vec![gpu("h100-80gb", 1)]);
    world.live(20).await;
    assert_eq!(world.writes(), [""; 0]);
    world.leading.send_replace(true);
    world.until("published", offers(26)).await;
    world.writes();
    world.leading.send_replace(false);
    world.plugin(node("n", vec![gpu("l40s", 2)]));
    world.live(20).await;
    assert_eq!(world.writes(), [""; 0]);
    world.leading.send_replace(true);
    world.until("published", offers(1)).await;

    // A restart of the controller disturbs nothing.
    world.writes();
    world.stop.cancel();
    world.writer.await.unwrap();
    assert!(offers(1)(&world.server.state()) && world.server.state().writes.is_empty());
}

/// Who waits for the leadership sees everything by itself: nothing is withdrawn while nobody leads, and there is nothing to
/// write when it takes over.
#[tokio::test(start_paused = true)]
async fn leadership_moves_without_a_write() {
    let first = World::new(Counters::Separate, Counters::Separate);
    let second = World::on(first.server.clone(), Counters::Separate, false);
    for world in [&first, &second] {
        world.node(vec![gpu("h100-80gb", 1), gpu("l40s", 2)]);
    }
    first.until("published", offers(27)).await;
    second.relist();
    first.writer.abort();
    second.writes();
    second.live(15).await;
    second.leading.send_replace(true);
    assert_eq!(second.quiet().await, [""; 0]);
    assert!(offers(27)(&second.server.state()));

    second.apply(node("n", vec![with_foreign_instance(gpu("h100-80gb", 1)), gpu("l40s", 2)]));
    second.until("it leads", |server| tainted(server) > 0).await;
}

/// Whichever request fails, the end is right.
#[tokio::test(start_paused = true)]
async fn failures_are_made_good() {
    for failing in 0..8 {
        let world = World::new(Counters::Separate, Counters::Separate);
        world.node(vec![gpu("h100-80gb", 1), gpu("l40s", 2)]);
        world.until("published", offers(27)).await;
        world.server.state().failures =
            (0..=failing).map(|number| number == failing || number == failing / 2).collect();
        world.plugin(node("n", vec![gpu("h100-80gb", 1), gpu("l40s", 3), gpu("l40s", 4)]));
        world.until("published", offers(28)).await;
        assert_eq!(world.server.state().pool("n")[..2], ["gpu-03-00-0", "gpu-04-00-0"]);
    }
}

/// What was written, and what was not, is counted; what there is, is read.
#[tokio::test(start_paused = true)]
async fn writes_are_counted() {
    let world = World::new(Counters::Separate, Counters::Separate);
    let metrics = || {
        let seen = Seen { index: world.index.clone(), leading: world.leading.subscribe() };
        let mut text = String::new();
        encode(&mut text, &world.metrics.registry(&seen)).unwrap();
        text
    };
    let counted = |lines: &[&str]| {
        let metrics = metrics();
        for line in lines {
            assert!(metrics.contains(&format!("\n{line}\n")), "{line}: {metrics}");
        }
    };
    world.server.state().failures = vec![true];
    world.node(vec![gpu("h100-80gb", 1), gpu("l40s", 2)]);
    world.until("published", offers(27)).await;
    counted(&[
        "kerf_slice_writes_total{verb=\"create\",result=\"ok\"} 3",
        "kerf_slice_writes_total{verb=\"create\",result=\"error\"} 1",
        "kerf_slice_writes_total{verb=\"update\",result=\"ok\"} 0",
        "kerf_errors_total{class=\"unavailable\"} 1",
        "kerf_errors_total{class=\"refused\"} 0",
        "kerf_slices 3",
        "kerf_nodes{state=\"live\"} 1",
        "kerf_leader 1",
    ]);

    // Somebody else changes a slice between the look and the write.
    let name = "n-gpu.nvidia.com-001-gpu-02-00-0";
    {
        let mut server = world.server.state();
        server.resource_version += 1;
        let version = server.resource_version.to_string();
        server.slices.get_mut(name).unwrap().metadata.resource_version = Some(version);
    }
    let mut changed = gpu("l40s", 2);
    changed.product = "Another".into();
    world.plugin(node("n", vec![gpu("h100-80gb", 1), changed]));
    world.live(1).await;
    world.relist();
    world.until("written", |server| server.writes.contains(&format!("update {name}"))).await;
    let conflicts = metrics();
    let conflicts = conflicts.lines().find_map(|line| {
        line.strip_prefix("kerf_slice_writes_total{verb=\"update\",result=\"conflict\"} ")?.parse::<u64>().ok()
    });
    assert!(conflicts.is_some_and(|conflicts| conflicts >= 1), "{conflicts:?}");
    counted(&["kerf_errors_total{class=\"unavailable\"} 1", "kerf_errors_total{class=\"refused\"} 0"]);

    world.apply(lease("n", "", Timestamp::now()));
    world.until("withdrawn", |server| server.slices.is_empty()).await;
    world.leading.send_replace(false);
    counted(&[
        "kerf_slice_writes_total{verb=\"delete\",result=\"ok\"} 3",
        "kerf_slices 0",
        "kerf_nodes{state=\"live\"} 0",
        "kerf_nodes{state=\"stopped\"} 1",
        "kerf_leader 0",
    ]);
}

/// Many nodes are written at the same time, each in its own order.
#[tokio::test(start_paused = true)]
async fn many_nodes() {
    let world = World::new(Counters::Separate, Counters::Separate);
    for number in 0..50 {
        let name = format!("n{number}");
        world.apply(core_node(&name, NODE_UID));
        world.apply(node(&name, vec![gpu("h100-80gb", 1)]));
        world.apply(lease(&name, "plugin", Timestamp::now()));
    }
    world.until("all are published", |server| server.slices.len() == 100).await;
    for number in 0..50 {
        assert_eq!(world.server.state().pool(&format!("n{number}")).len(), 26);
    }
    assert_eq!(world.writes().len(), 100);
}
