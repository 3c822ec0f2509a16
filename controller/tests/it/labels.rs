//! Labels of Nodes: the documented table against the code, and the keeper against an API server in memory.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::Timestamp;
use kerf_api::{GpuNode, GpuOffer};
use kerf_controller::features::{Counters, ServerFeatures};
use kerf_controller::index::{Feed, Index, SharedIndex};
use kerf_controller::labels::{Keeper, Labels, Offered, wanted};
use kerf_controller::liveness::Now;
use kerf_controller::metrics::Metrics;
use kerf_controller::policy::Resolution;
use kerf_controller::upkeep::Wakes;
use kube::core::PartialObjectMeta;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::api_server::{ApiServer, State};
use crate::fixtures::{DRIVER, NODE_UID, gpu, layouts, lease, node};

/// Key and example of each row of a table in `docs/labels.md`.
fn documented(table: &str) -> Labels {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/labels.md");
    let text = std::fs::read_to_string(page).unwrap();
    let (_, rest) = text.split_once(&format!("<!-- {table}:begin -->")).expect("the table has a mark before it");
    let (rows, _) = rest.split_once(&format!("<!-- {table}:end -->")).expect("and one behind it");
    let cell = |cell: Option<&str>| cell.unwrap_or_default().trim().trim_matches('`').to_owned();
    let rows = rows.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let mut cells = row.trim_matches('|').split('|');
        (cell(cells.next()), cell(cells.next()))
    })
    .collect()
}

fn two_h100() -> GpuNode {
    node("n", vec![gpu("h100-80gb", 0x3b), gpu("h100-80gb", 0x5e)])
}

#[test]
fn the_documented_labels_are_those_written() {
    let node = two_h100();
    assert_eq!(wanted(&node, &Offered::of(&node, &Resolution::default(), true), None).unwrap(), documented("node"));
    let layout =
        Offered { partitions: true, layout: BTreeMap::from([("3g.40gb".to_owned(), 4)]), ..Offered::default() };
    let all = wanted(&node, &layout, Some("success")).unwrap();
    let more: Labels = all.into_iter().filter(|(key, _)| !documented("node").contains_key(key)).collect();
    assert_eq!(more, documented("layout"));
}

/// What GPU feature discovery would write for these products, and for names that a label may not have as they are.
#[test]
fn values_are_those_of_gpu_feature_discovery() {
    let labels = |gpus| wanted(&node("n", gpus), &Offered::default(), None);
    let value = |labels: &Labels, key: &str| labels.get(&format!("nvidia.com/{key}")).cloned().unwrap_or_default();
    for (product, name, memory, family) in [
        ("h100-80gb", "NVIDIA-H100-80GB-HBM3", "81559", "hopper"),
        ("a100-80gb", "NVIDIA-A100-SXM4-80GB", "81920", "ampere"),
        ("l40s", "NVIDIA-L40S", "46068", "ada-lovelace"),
    ] {
        let labels = labels(vec![gpu(product, 0x3b)]).unwrap();
        let found = ["gpu.product", "gpu.memory", "gpu.family", "gpu.count"].map(|key| value(&labels, key));
        assert_eq!(found, [name, memory, family, "1"], "{product}");
    }
    let mut odd = gpu("l40s", 0x3b);
    odd.product = "  Quadro  RTX™ (6000) ".into();
    assert_eq!(value(&labels(vec![odd.clone()]).unwrap(), "gpu.product"), "Quadro-RTX-6000");
    odd.product = "x".repeat(64);
    odd.memory_mib = 0;
    let odd = labels(vec![odd]).unwrap();
    assert!(!odd.contains_key("nvidia.com/gpu.product"), "too long for a label: left out");
    assert!(!odd.contains_key("nvidia.com/gpu.memory"), "not reported: left out");
    assert!(!odd.contains_key("nvidia.com/mig.strategy") && value(&odd, "mig.capable") == "false");
}

#[test]
fn gpus_that_are_all_cut_are_none_to_be_had_whole() {
    let node = two_h100();
    let names: Vec<String> = node.status.iter().flat_map(|status| &status.gpus).map(|gpu| gpu.name.clone()).collect();
    for (cut, replicas) in [(&names[..0], "1"), (&names[..1], "1"), (&names[..], "0")] {
        let offered = Offered { cut: cut.iter().cloned().collect(), ..Offered::default() };
        let labels = wanted(&node, &offered, None).unwrap();
        assert_eq!((&*labels["nvidia.com/gpu.replicas"], &*labels["nvidia.com/gpu.count"]), (replicas, "2"), "{cut:?}");
    }
}

#[test]
fn several_products_are_spoken_for_by_the_most() {
    let labels = |gpus| wanted(&node("n", gpus), &Offered::default(), None).unwrap();
    let mixed = labels(vec![gpu("l40s", 0x1b), gpu("h100-80gb", 0x3b), gpu("h100-80gb", 0x5e)]);
    assert_eq!((&*mixed["nvidia.com/gpu.product"], &*mixed["nvidia.com/gpu.count"]), ("NVIDIA-H100-80GB-HBM3", "2"));
    assert_eq!(mixed["nvidia.com/mig.capable"], "true");
    let even = labels(vec![gpu("l40s", 0x1b), gpu("h100-80gb", 0x3b)]);
    assert_eq!((&*even["nvidia.com/gpu.product"], &*even["nvidia.com/gpu.count"]), ("NVIDIA-L40S", "1"));
}

#[test]
fn what_nobody_can_read_changes_no_label() {
    let mut unreadable = gpu("h100-80gb", 0x3b);
    (unreadable.product, unreadable.offer) = (String::new(), GpuOffer::Nothing);
    for node in [node("n", vec![unreadable]), node("n", Vec::new()), GpuNode::new("n", Default::default())] {
        assert_eq!(wanted(&node, &Offered::default(), None), None);
    }
    let mut lacking = node("n", vec![gpu("l40s", 0x3b)]);
    let status = lacking.status.as_mut().unwrap();
    (status.driver_version, status.cuda_driver_version) = (Some("535".into()), None);
    status.gpus[0].attributes.clear();
    let labels = wanted(&lacking, &Offered::default(), None).unwrap();
    let written: Vec<_> = labels.keys().filter(|key| key.contains("cuda") || key.contains("compute")).collect();
    assert!(written.is_empty(), "{written:?}");
}

struct World {
    server: ApiServer,
    index: SharedIndex,
    /// What it is told, as long as it lives.
    _told: (watch::Sender<Option<ServerFeatures>>, watch::Sender<bool>),
}

impl World {
    fn new(enabled: bool) -> World {
        let server = ApiServer::new(Counters::Separate);
        let index = SharedIndex::new(Index::new(DRIVER, true));
        let features = ServerFeatures { counters: Counters::Separate, taints: true, extended_resources: true };
        let told = (watch::Sender::new(Some(features)), watch::Sender::new(true));
        let wakes = Wakes { index: index.clone(), features: told.0.subscribe(), leading: told.1.subscribe() };
        let keeper = Keeper::new(server.client(), enabled, index.clone(), Metrics::default());
        tokio::spawn(wakes.keep(keeper, CancellationToken::new()));
        World { server, index, _told: told }
    }

    fn node(&self, labels: &serde_json::Value) {
        let metadata = json!({"name": "n", "uid": NODE_UID, "labels": labels, "managedFields": []});
        self.server.state().nodes.insert("n".into(), metadata);
        self.show();
    }

    /// The watch shows what the server has.
    fn show(&self) {
        let metadata = serde_json::from_value(self.server.state().nodes["n"].clone()).unwrap();
        let node = PartialObjectMeta::<Node> { types: None, metadata, _phantom: std::marker::PhantomData };
        self.index.update(|index| index.apply(node, Now::read()));
    }

    fn apply(&self, gpu_node: GpuNode) {
        self.index.update(|index| index.apply(gpu_node, Now::read()));
    }

    async fn until(&self, what: &str, check: impl Fn(&State) -> bool) {
        let wait = async {
            while !check(&self.server.state()) {
                sleep(Duration::from_millis(20)).await;
                self.show();
            }
        };
        if timeout(Duration::from_secs(60), wait).await.is_err() {
            panic!("not in time: {what}: {:#?}", self.server.state().nodes);
        }
    }

    async fn quiet(&self) -> usize {
        self.server.state().writes.clear();
        for _ in 0..30 {
            sleep(Duration::from_secs(1)).await;
            self.show();
        }
        self.server.state().writes.len()
    }
}

fn label(state: &State, key: &str) -> Option<String> {
    Some(state.nodes["n"]["labels"].get(format!("nvidia.com/{key}"))?.as_str()?.to_owned())
}

#[tokio::test(start_paused = true)]
async fn a_node_is_labelled_once_and_cleared_when_its_plugin_goes() {
    let world = World::new(true);
    world.node(&json!({"kubernetes.io/hostname": "n", "nvidia.com/gpu.product": "Mine"}));
    world.apply(two_h100());
    world.until("labels", |state| label(state, "gpu.count").as_deref() == Some("2")).await;
    world.show();
    assert_eq!(world.quiet().await, 0, "a quiet cluster costs no writes");
    assert_eq!(label(&world.server.state(), "gpu.product").as_deref(), Some("Mine"), "an owner's key is left alone");

    world.apply(node("n", vec![gpu("h100-80gb", 0x3b)]));
    world.until("another count", |state| label(state, "gpu.count").as_deref() == Some("1")).await;
    // The driver is being replaced.
    world.apply(node("n", Vec::new()));
    assert_eq!(world.quiet().await, 0);
    world.index.update(|index| index.delete(two_h100(), Now::read()));
    world.until("no labels", |state| label(state, "gpu.count").is_none()).await;
    let labels = world.server.state().nodes["n"]["labels"].clone();
    assert_eq!(labels, json!({"kubernetes.io/hostname": "n", "nvidia.com/gpu.product": "Mine"}));
}

/// Nothing tells that a lease is not renewed.
#[tokio::test(start_paused = true)]
async fn a_layout_is_pending_on_a_node_whose_plugin_is_dead() {
    let state = |wanted: &'static str| move |state: &State| label(state, "mig.config.state").as_deref() == Some(wanted);
    let world = World::new(true);
    world.index.update(|index| index.apply(layouts(), Now::read()));
    world.node(&json!({"nvidia.com/mig.config": "mixed"}));
    world.apply(two_h100());
    world.index.update(|index| index.apply(lease("n", "plugin", Timestamp::now()), Now::read()));
    world.until("success", state("success")).await;
    let wait = async {
        while !state("pending")(&world.server.state()) {
            sleep(Duration::from_secs(1)).await;
        }
    };
    timeout(Duration::from_secs(90), wait).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_node_of_another_driver_is_somebody_elses() {
    let world = World::new(true);
    world.node(&json!({}));
    let mut foreign = two_h100();
    foreign.status.as_mut().unwrap().driver_name = "gpu.test.example".into();
    world.apply(foreign);
    assert_eq!(world.quiet().await, 0);
}

#[tokio::test(start_paused = true)]
async fn who_is_switched_off_takes_the_labels_away() {
    let world = World::new(true);
    world.node(&json!({}));
    world.apply(two_h100());
    world.until("labels", |state| label(state, "gpu.present").is_some()).await;
    let off = World::new(false);
    off.server.state().nodes = world.server.state().nodes.clone();
    off.show();
    off.apply(two_h100());
    off.until("no labels", |state| state.nodes["n"]["labels"] == json!({})).await;
}
