//! The driver over a simulated node: what is read of it while things happen to it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kerf_api::{GpuOffer, MigPlacement, names};
use kerf_kubelet_plugin::dra::Carver as _;
use kerf_kubelet_plugin::driver::{Driver, DriverFiles};
use kerf_kubelet_plugin::inventory::{Inventory, MIG_MODE_PENDING, UNREADABLE};
use kerf_kubelet_plugin::metrics::Metrics;
use kerf_kubelet_plugin::paths::Paths;
use kerf_kubelet_plugin::{ForeignPolicy, events};
use kerf_nvml::MigMode;
use tempfile::TempDir;
use tokio::sync::Notify;

use crate::engine_node::{GPU, Node, SECOND, claim};

fn driver(node: &Node) -> (Driver, TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let paths = Paths::new(directory.path(), &directory.path().join("cdi"), "gpu.nvidia.com");
    let files = DriverFiles { host_root: "/".into(), driver_root: Some(node.root()) };
    let (events, _writer) = events::channel("node-1");
    let changed = Arc::new(Notify::new());
    (Driver::new(files, "gpu.nvidia.com", &paths, ForeignPolicy::Keep, events, changed, Metrics::default()), directory)
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
