//! The driver over a simulated node: what is read of it while things happen to it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kerf_api::{GpuOffer, MigPlacement, names};
use kerf_kubelet_plugin::dra::Carver as _;
use kerf_kubelet_plugin::driver::{Driver, DriverFiles};
use kerf_kubelet_plugin::engine::Wishes;
use kerf_kubelet_plugin::inventory::{Inventory, MIG_MODE_PENDING, UNREADABLE};
use kerf_kubelet_plugin::metrics::Metrics;
use kerf_kubelet_plugin::paths::Paths;
use kerf_kubelet_plugin::reconcile::Node as _;
use kerf_kubelet_plugin::{ForeignPolicy, events};
use kerf_nvml::{DriverRoot, MigMode};
use kerf_nvml_sim::client::Client;
use kerf_nvml_sim::fault::{CallFault, Span};
use rustix::fs::inotify;
use serde_json::Value;
use tempfile::TempDir;
use tokio::sync::Notify;

use crate::engine_node::{GPU, MIG_1G, MIG_3G, Node, SECOND, SECOND_1G, claim, late, soon};

fn driver(node: &Node) -> (Driver, TempDir) {
    let directory = tempfile::tempdir().unwrap();
    (anew(node, &directory), directory)
}

/// As another process of the plugin has it.
fn anew(node: &Node, directory: &TempDir) -> Driver {
    let files =
        DriverFiles { host_root: "/".into(), driver_root: Some(node.root()), injection: node.settings().injection };
    let (events, _writer) = events::channel("node-1", &Metrics::default());
    let changed = Arc::new(Notify::new());
    Driver::new(
        files,
        "gpu.nvidia.com",
        &paths(directory),
        Wishes::new(ForeignPolicy::Keep),
        events,
        changed,
        Metrics::default(),
    )
}

fn paths(directory: &TempDir) -> Paths {
    Paths::new(directory.path(), &directory.path().join("cdi"), "gpu.nvidia.com")
}

/// Name, offer and reason of every GPU.
fn offers(inventory: &Inventory) -> Vec<(&str, GpuOffer, Option<&str>)> {
    let gpus = inventory.status.gpus.iter();
    gpus.map(|gpu| (gpu.name.as_str(), gpu.offer, gpu.withheld.as_ref().map(|withheld| withheld.reason.as_str())))
        .collect()
}

#[test]
fn a_gpu_breaks_and_comes_back_and_its_neighbour_is_offered_all_the_time() {
    let node = Node::start("[{product: h100-80gb, count: 2}]");
    let (driver, _directory) = driver(&node);
    let good = (GPU, GpuOffer::WholeOrPartitions, None);
    let whole = [good, (SECOND, GpuOffer::WholeOrPartitions, None)];
    assert_eq!(offers(&driver.read_inventory()), whole);

    node.ctl(&["break", "1"]);
    for _ in 0..2 {
        let inventory = driver.read_inventory();
        assert_eq!(
            offers(&inventory),
            [good, (SECOND, GpuOffer::Nothing, Some(UNREADABLE))],
            "with an old and a new session"
        );
        assert!(inventory.suspect);
    }

    node.ctl(&["mend", "1"]);
    assert_eq!(offers(&driver.read_inventory()), whole);
}

#[test]
fn a_strangers_instance_blocks_its_place_until_it_is_gone() {
    let node = Node::start("[{product: h100-80gb}]");
    let (driver, _directory) = driver(&node);
    let stranger = node.make_foreign("gpu-3b-00-0-mig-1g10gb-2", 1);

    let inventory = driver.read_inventory();
    assert_eq!(offers(&inventory), [(GPU, GpuOffer::WholeOrPartitions, None)]);
    let found = &inventory.status.gpus[0];
    let [blocked] = &found.blocked[..] else { panic!("{found:?}") };
    let (placement, usable) = (MigPlacement { start: 2, size: 1 }, "gpu-3b-00-0-mig-1g10gb-2");
    assert_eq!((blocked.reason.as_str(), blocked.placement), (names::FOREIGN_INSTANCE, Some(placement)));
    assert_eq!(blocked.usable.as_deref(), Some(usable));
    assert!(blocked.message.contains(&format!("GPU instance {} (placement 2:1)", stranger.id)), "{}", blocked.message);
    assert_eq!(found.mig.as_ref().unwrap().instances[0].claim_uid, None);

    // It can be claimed as it is, and blocks its place all the same: it stays when the claim ends.
    let late = Instant::now() + Duration::from_secs(60);
    driver.prepare(&claim("a", &[usable]), late).unwrap();
    let claimed = driver.read_inventory().status.gpus.remove(0);
    let [blocked] = &claimed.blocked[..] else { panic!("{claimed:?}") };
    assert_eq!((blocked.placement, blocked.usable.as_deref()), (Some(placement), Some(usable)));
    assert_eq!(claimed.mig.unwrap().instances[0].claim_uid.as_deref(), Some("a"));
    driver.unprepare("a", late).unwrap();
    assert_eq!(driver.read_inventory().status.gpus[0].blocked.len(), 1);

    node.remove_foreign();
    assert_eq!(driver.read_inventory().status.gpus[0].blocked, []);
}

#[test]
fn an_ampere_gpu_waits_for_its_reset() {
    let node = Node::start("[{product: a100-80gb}]");
    let (driver, _directory) = driver(&node);
    assert_eq!(offers(&driver.read_inventory()), [(GPU, GpuOffer::Whole, None)]);
    // Refused for now, because the driver above has the GPU open, and due at the next reset.
    node.nvml.set_mig_mode(node.gpu(GPU), MigMode::Enabled).unwrap_err();
    assert_eq!(offers(&driver.read_inventory()), [(GPU, GpuOffer::Nothing, Some(MIG_MODE_PENDING))]);
    node.ctl(&["reset", "0"]);
    assert_eq!(offers(&driver.read_inventory()), [(GPU, GpuOffer::Partitions, None)]);
}

/// Writes journals of so many claims of an earlier boot, an hour ago.
fn collect_claims(node: &Node, driver: &Driver, paths: &Paths, count: usize) {
    let late = Instant::now() + Duration::from_secs(60);
    driver.prepare(&claim("pattern", &["gpu-3b-00-0-mig-1g10gb-4"]), late).unwrap();
    let mut record: Value = serde_json::from_slice(&fs::read(paths.claims.join("pattern.json")).unwrap()).unwrap();
    driver.unprepare("pattern", late).unwrap();
    assert_eq!(node.live(GPU), []);
    record["bootId"] = "an earlier boot".into();
    for number in 0..count {
        let uid = format!("old-{number}");
        record["claim"]["uid"] = uid.clone().into();
        fs::write(paths.claims.join(uid).with_extension("json"), record.to_string()).unwrap();
    }
    let before = SystemTime::now() - Duration::from_secs(3600);
    File::open(&paths.claims).unwrap().set_modified(before).unwrap();
}

/// A node may have collected claims while nobody released them. Each of them is read once before the first inventory.
#[test]
fn a_journal_is_read_once_at_the_start() {
    let node = Node::start("[{product: h100-80gb}]");
    let (first, directory) = driver(&node);
    let paths = paths(&directory);
    collect_claims(&node, &first, &paths, 30);
    drop(first);
    let watch = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
    inotify::add_watch(&watch, &paths.claims, inotify::WatchFlags::OPEN).unwrap();
    let opened = || {
        let mut buffer = [const { MaybeUninit::uninit() }; 1 << 12];
        let mut events = inotify::Reader::new(&watch, &mut buffer);
        let mut opened = BTreeMap::<String, usize>::new();
        while let Ok(event) = events.next() {
            // The directory itself has no name.
            event
                .file_name()
                .into_iter()
                .for_each(|name| *opened.entry(name.to_str().unwrap().to_owned()).or_default() += 1);
        }
        opened.into_values().collect::<Vec<_>>()
    };

    let second = anew(&node, &directory);
    assert_eq!(second.read_inventory().held.len(), 30);
    assert_eq!(opened(), [1; 30]);
    assert_eq!(second.read_inventory().held.len(), 30);
    assert_eq!(opened(), [1; 30], "later ones read anew");
}

/// Start to first inventory with 10,000 old claims, in time and in time of the processor: `cargo test -p kerf-kubelet-plugin
/// --test it -- --ignored --nocapture ten_thousand`.
#[test]
#[ignore = "a measurement, which only prints"]
fn ten_thousand_old_claims() {
    let node = Node::start("[{product: h100-80gb, count: 8}]");
    let (first, directory) = driver(&node);
    collect_claims(&node, &first, &paths(&directory), 10_000);
    drop(first);
    // Of this thread, see proc_pid_schedstat(5).
    let processor_time = || {
        let spent = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        Duration::from_nanos(spent.split(' ').next().unwrap().parse().unwrap())
    };
    for round in 0..5 {
        let driver = anew(&node, &directory);
        for which in ["first", "second"] {
            let (started, spent) = (Instant::now(), processor_time());
            let held = driver.read_inventory().held.len();
            let (spent, took) = (processor_time() - spent, started.elapsed());
            println!("round {round}: {held} claims, {which} inventory: {took:?}, {spent:?} of the processor");
        }
    }
}

/// Existing claims select by these.
#[test]
fn an_h100_is_described_as_claims_expect_it() {
    let node = Node::start("[{product: h100-80gb}]");
    let (driver, _directory) = driver(&node);
    let inventory = driver.read_inventory();
    let gpu = &inventory.status.gpus[0];
    assert_eq!(gpu.memory_mib, 81559);
    assert_eq!(gpu.mig.as_ref().unwrap().profiles.len(), 7);
    let mut attributes = gpu.attributes.clone();
    attributes.remove("uuid").unwrap();
    insta::assert_json_snapshot!(attributes);
}

/// A driver that was removed, or does not match the kernel any more: nodes are drained to mend that.
#[test]
fn without_a_driver_pods_end() {
    let node = Node::start("[{product: h100-80gb, count: 2}]");
    let (first, directory) = driver(&node);
    let paths = paths(&directory);
    for (uid, device) in [("whole", SECOND), ("part", MIG_1G), ("old", MIG_3G)] {
        first.prepare(&claim(uid, &[device]), late()).unwrap();
    }
    drop(first);
    let journal = |uid: &str| paths.claims.join(uid).with_extension("json");
    let change = |uid: &str, key: &str, value: Value| {
        let mut record: Value = serde_json::from_slice(&fs::read(journal(uid)).unwrap()).unwrap();
        record[key] = value;
        fs::write(journal(uid), record.to_string()).unwrap();
    };
    change("old", "bootId", "an earlier boot".into());
    let library = fs::canonicalize(DriverRoot::at(node.root()).nvml_library().unwrap()).unwrap();
    let aside = library.with_extension("aside");
    fs::rename(&library, &aside).unwrap();

    let second = anew(&node, &directory);
    second.unprepare("never-seen", soon()).unwrap();
    for (uid, what) in [("whole", "a whole GPU"), ("old", "of an earlier boot there is nothing")] {
        second.unprepare(uid, soon()).unwrap();
        assert!(!journal(uid).exists(), "{what}");
    }
    let refused = second.unprepare("part", soon()).unwrap_err().to_string();
    assert!(
        refused.contains("cannot be taken back yet") && refused.contains("libnvidia-ml.so.1 not found"),
        "{refused}"
    );
    assert!(second.prepare(&claim("new", &[SECOND_1G]), soon()).is_err());
    // Since the node has booted.
    change("part", "stuckSince", 0.into());
    second.unprepare("part", soon()).unwrap();
    let known = second.known_claims().unwrap();
    assert_eq!(known.iter().map(|claim| (claim.uid.as_str(), claim.condemned)).collect::<Vec<_>>(), [("part", true)]);
    assert_eq!(second.retry_condemned().unwrap().left, 1);
    assert_eq!(second.sweep_foreign().map_err(|_| ()), Err(()), "nothing is known of the GPUs");

    fs::rename(&aside, &library).unwrap();
    let retried = second.retry_condemned().unwrap();
    assert_eq!((retried.removed.len(), retried.left), (1, 0));
    assert!(!journal("part").exists());
}

/// A GPU that is in a bad way can keep whoever opens the driver for ever.
#[test]
fn a_driver_that_hangs_when_it_is_opened_keeps_no_pod() {
    let node = Node::start("[{product: h100-80gb, count: 2}]");
    let (first, directory) = driver(&node);
    first.prepare(&claim("whole", &[SECOND]), late()).unwrap();
    drop(first);
    let simulation = Client::new(node.root());
    simulation.arm(CallFault::new("nvmlInitWithFlags").hangs(Span::Forever)).unwrap();
    let second = anew(&node, &directory);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| second.read_inventory());
        while simulation.faults().unwrap()[0].met == 0 {
            std::thread::yield_now();
        }
        let preparing = scope.spawn(|| second.prepare(&claim("next", &[GPU]), late()));
        second.unprepare("whole", late()).unwrap();
        let refused = preparing.join().unwrap().unwrap_err().to_string();
        assert!(refused.contains("has not answered for 10 s since it was opened or closed"), "{refused}");
        simulation.clear_all().unwrap();
        assert_eq!(reading.join().unwrap().status.gpus.len(), 2);
    });
    second.prepare(&claim("next", &[GPU]), late()).unwrap();
}

/// A session that something failed on is closed, just when NVML may hang.
#[test]
fn a_driver_that_hangs_when_it_is_closed_keeps_no_pod() {
    let node = Node::start("[{product: h100-80gb, count: 2}]");
    let (driver, _directory) = driver(&node);
    driver.prepare(&claim("whole", &[GPU]), late()).unwrap();
    let simulation = Client::new(node.root());
    simulation.arm(CallFault::new("nvmlShutdown").hangs(Span::Forever)).unwrap();
    node.ctl(&["break", "1"]);
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| driver.read_inventory());
        while simulation.faults().unwrap()[0].met == 0 {
            std::thread::yield_now();
        }
        let preparing = scope.spawn(|| driver.prepare(&claim("next", &[SECOND]), late()));
        driver.unprepare("whole", late()).unwrap();
        let refused = preparing.join().unwrap().unwrap_err().to_string();
        assert!(refused.contains("has not answered for 10 s since it was opened or closed"), "{refused}");
        simulation.clear_all().unwrap();
        assert!(reading.join().unwrap().suspect);
    });
    node.ctl(&["mend", "1"]);
    driver.prepare(&claim("next", &[SECOND]), late()).unwrap();
}
