//! What the plugin writes to the API server, and above all when it writes nothing.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kerf_api::{GpuNodeStatus, names};
use kerf_kubelet_plugin::claim::ClaimRef;
use kerf_kubelet_plugin::engine::{ForeignPolicy, Wishes};
use kerf_kubelet_plugin::inventory::Inventory;
use kerf_kubelet_plugin::lease::{End, Holder, NodeLease};
use kerf_kubelet_plugin::metrics::Metrics;
use kerf_kubelet_plugin::node_status::Sources;
use kerf_kubelet_plugin::registration::KubeletVerdict;
use kerf_kubelet_plugin::{events, node_status};
use serde_json::{Value, json};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::api_server::ApiServer;

const GPU_NODE: &str = "/apis/kerf.dev/v1alpha1/gpunodes/node-1";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/kerf-system/leases/kubelet-plugin-node-1";

fn server_with_node() -> ApiServer {
    let api = ApiServer::default();
    api.put("/api/v1/nodes/node-1", json!({"metadata": {"name": "node-1", "uid": "node-uid"}}));
    api
}

/// Waits, in paused time, until a condition holds.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(600);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: never");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

struct Publishing {
    api: ApiServer,
    inventory: watch::Sender<Option<Inventory>>,
    verdict: watch::Sender<KubeletVerdict>,
    held: watch::Sender<bool>,
    standing: watch::Receiver<bool>,
    wishes: Wishes,
    changed: Arc<Notify>,
}

fn publish(api: ApiServer) -> Publishing {
    publish_as(api, Holder { identity: "one".into(), since: Timestamp::now() })
}

fn publish_as(api: ApiServer, holder: Holder) -> Publishing {
    let (inventory, inventories) = watch::channel(None);
    let (verdict, verdicts) = watch::channel(KubeletVerdict::Unknown);
    let (held, holds) = watch::channel(false);
    let (stands, standing) = watch::channel(false);
    let client = api.client();
    let lease = NodeLease::new(client.clone(), names::NAMESPACE, "node-1", holder, Metrics::default());
    let (wishes, changed) = (Wishes::new(ForeignPolicy::Keep), Arc::new(Notify::new()));
    let sources = Sources {
        inventory: inventories,
        verdict: verdicts,
        held: holds,
        wishes: wishes.clone(),
        changed: Arc::clone(&changed),
        metrics: Metrics::default(),
    };
    tokio::spawn(async move {
        node_status::publish(client, "node-1", sources, &lease, stands, CancellationToken::new()).await;
    });
    Publishing { api, inventory, verdict, held, standing, wishes, changed }
}

impl Publishing {
    fn found(&self, driver_version: &str) {
        let status = GpuNodeStatus { driver_version: Some(driver_version.into()), ..GpuNodeStatus::default() };
        self.inventory.send_replace(Some(Inventory { status, ..Inventory::default() }));
    }

    fn status(&self) -> Value {
        self.api.get(GPU_NODE).map_or(Value::Null, |object| object["status"].clone())
    }
}

#[tokio::test(start_paused = true)]
async fn the_gpu_node_is_made_and_then_written_on_change_only() {
    let node = publish(server_with_node());
    node.found("535.261.03");
    node.verdict.send_replace(KubeletVerdict::Registered);
    until("written", || node.status()["registered"] == true).await;
    let object = node.api.get(GPU_NODE).unwrap();
    assert_eq!(object["metadata"]["ownerReferences"][0]["uid"], "node-uid", "it goes with the node");
    assert_eq!(object["status"]["driverVersion"], "535.261.03");
    let writes = node.api.writes().len();
    assert_eq!(writes, 2, "create, status");

    node.found("535.261.03");
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(node.api.writes().len(), writes, "a quiet node writes nothing");

    node.found("570.86.15");
    until("changed", || node.status()["driverVersion"] == "570.86.15").await;
    assert_eq!(node.api.writes().len(), writes + 1);

    node.api.remove(GPU_NODE);
    until("made again", || node.status()["registered"] == true).await;
}

/// Without a write of the plugin's own.
#[tokio::test(start_paused = true)]
async fn what_the_controller_wants_is_heard_within_a_minute() {
    let api = server_with_node();
    let gpu_node =
        |spec| json!({"metadata": {"name": "node-1", "uid": "u"}, "spec": spec, "status": GpuNodeStatus::default()});
    api.put(GPU_NODE, gpu_node(json!({})));
    let node = publish(api);
    node.inventory.send_replace(Some(Inventory::default()));
    node.changed.notified().await;
    let gpu = "0000:3b:00.0".parse().unwrap();
    assert_eq!(node.wishes.foreign(gpu), ForeignPolicy::Keep);

    let spec = json!({"gpus": {"gpu-3b-00-0": {"foreignInstances": "Delete"}}, "somethingNew": true});
    node.api.put(GPU_NODE, gpu_node(spec));
    tokio::time::timeout(Duration::from_secs(61), node.changed.notified()).await.unwrap();
    assert_eq!(node.wishes.foreign(gpu), ForeignPolicy::Delete);
    assert_eq!(node.api.writes(), [""; 0]);
}

/// Who vouches for the GpuNode has to wait until it is this plugin's word, and says that the kubelet knows it.
#[tokio::test(start_paused = true)]
async fn the_gpu_node_stands_only_when_written_and_registered() {
    let api = server_with_node();
    let left = json!({"registered": true, "driverVersion": "470.1"});
    api.put(GPU_NODE, json!({"metadata": {"name": "node-1", "uid": "u"}, "spec": {}, "status": left}));
    let node = publish(api);
    node.found("535.261.03");
    until("written", || node.status()["driverVersion"] == "535.261.03").await;
    assert_eq!(node.status()["registered"], false);
    assert!(!*node.standing.borrow(), "not registered yet");

    node.verdict.send_replace(KubeletVerdict::Registered);
    until("stands", || *node.standing.borrow()).await;
    assert_eq!(node.status()["registered"], true);
}

/// The status that the predecessor left is right until the kubelet has had a chance to say something.
#[tokio::test(start_paused = true)]
async fn a_restart_of_the_plugin_writes_nothing() {
    let api = server_with_node();
    let status =
        GpuNodeStatus { registered: true, driver_version: Some("535.261.03".into()), ..GpuNodeStatus::default() };
    api.put(GPU_NODE, json!({"metadata": {"name": "node-1", "uid": "u"}, "spec": {}, "status": status}));
    let node = publish(api);
    node.found("535.261.03");
    tokio::time::sleep(Duration::from_secs(2)).await;
    node.verdict.send_replace(KubeletVerdict::Registered);
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(node.api.writes(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn an_unregistered_plugin_says_so_in_the_end() {
    let node = publish(server_with_node());
    node.found("535.261.03");
    until("written", || node.status()["registered"] == false).await;
    node.verdict.send_replace(KubeletVerdict::Refused("duplicate endpoint".into()));
    until("said", || node.status()["message"] == "the kubelet refuses the plugin: duplicate endpoint").await;
}

#[tokio::test(start_paused = true)]
async fn a_failing_api_server_is_tried_again() {
    let api = server_with_node();
    api.set_failing(true);
    let node = publish(api);
    node.found("535.261.03");
    tokio::time::sleep(Duration::from_secs(120)).await;
    node.api.set_failing(false);
    until("written", || node.status()["driverVersion"] == "535.261.03").await;
}

struct Holding {
    held: watch::Receiver<bool>,
    shutdown: CancellationToken,
    task: JoinHandle<()>,
}

impl Holding {
    async fn end(self) {
        self.shutdown.cancel();
        self.task.await.unwrap();
    }
}

fn hold(api: &ApiServer, identity: &str, since: Timestamp, end: End) -> Holding {
    let shutdown = CancellationToken::new();
    let until = shutdown.clone();
    let holder = Holder { identity: identity.into(), since };
    let lease = NodeLease::new(api.client(), names::NAMESPACE, "node-1", holder, Metrics::default());
    let (sender, held) = watch::channel(false);
    let task = tokio::spawn(async move { lease.hold(&sender, async { end }, until).await });
    Holding { held, shutdown, task }
}

fn holder(api: &ApiServer) -> Value {
    api.get(LEASE).map_or(Value::Null, |lease| lease["spec"]["holderIdentity"].clone())
}

#[tokio::test(start_paused = true)]
async fn the_lease_is_renewed_and_released() {
    let api = server_with_node();
    let one = hold(&api, "one", Timestamp::now(), End::Release);
    until("taken", || holder(&api) == "one").await;
    let lease = api.get(LEASE).unwrap();
    assert_eq!(lease["spec"]["leaseDurationSeconds"], 30);
    assert_eq!(lease["metadata"]["ownerReferences"][0]["uid"], "node-uid");

    tokio::time::sleep(Duration::from_secs(95)).await;
    assert_eq!(api.writes().len(), 10, "one every 10 s");

    api.remove(LEASE);
    until("made again", || holder(&api) == "one").await;

    one.end().await;
    assert_eq!(holder(&api), Value::Null);
    assert_eq!(api.get(LEASE).unwrap()["spec"]["leaseDurationSeconds"], 1);
}

/// In a rolling update the successor starts while the predecessor still runs, and must not lose its lease to it.
#[tokio::test(start_paused = true)]
async fn the_lease_passes_to_the_successor() {
    let api = server_with_node();
    let start = Timestamp::now();
    let mut old = hold(&api, "old", start, End::Release);
    until("taken", || holder(&api) == "old").await;
    let _new = hold(&api, "new", start + Duration::from_secs(1), End::Release);
    until("passed on", || holder(&api) == "new").await;
    old.held.wait_for(|held| !held).await.unwrap();
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(holder(&api), "new", "the old one stands back");
    old.end().await;
    assert_eq!(holder(&api), "new", "and releases nothing");
}

/// An update that is taken back ends the younger one. Whoever is left takes the lease, and it was never free meanwhile.
#[tokio::test(start_paused = true)]
async fn the_lease_goes_back_to_the_predecessor() {
    let api = server_with_node();
    let start = Timestamp::now();
    let mut old = hold(&api, "old", start, End::Release);
    until("taken", || holder(&api) == "old").await;
    let new = hold(&api, "new", start + Duration::from_secs(1), End::Leave);
    old.held.wait_for(|held| !held).await.unwrap();
    new.end().await;
    let lease = api.get(LEASE).unwrap();
    assert_eq!((&lease["spec"]["leaseDurationSeconds"], holder(&api)), (&json!(30), json!("new")), "still good");
    let ended = Instant::now();
    until("taken back", || holder(&api) == "old").await;
    assert!(ended.elapsed() <= Duration::from_secs(6), "{:?}", ended.elapsed());
}

/// Of two plugins one writes, and it is the one whose lease vouches for what is written.
#[tokio::test(start_paused = true)]
async fn the_gpu_node_is_written_by_one_of_two() {
    let api = server_with_node();
    let now = Timestamp::now();
    let (elder, younger) = (now - Duration::from_secs(60), now);
    let holder = |identity: &str, since| Holder { identity: identity.into(), since };
    let old = publish_as(api.clone(), holder("old", elder));
    old.found("535.261.03");
    old.verdict.send_replace(KubeletVerdict::Registered);
    until("written", || old.status()["registered"] == true).await;
    let olds = hold(&api, "old", elder, End::Release);
    until("taken", || *olds.held.borrow()).await;

    // Longer than a plugin waits for the kubelet before it says that it is not registered.
    let mut new = publish_as(api.clone(), holder("new", younger));
    new.found("570.86.15");
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!((&new.status()["registered"], &new.status()["driverVersion"]), (&json!(true), &json!("535.261.03")));

    new.verdict.send_replace(KubeletVerdict::Registered);
    new.standing.wait_for(|stands| *stands).await.unwrap();
    assert_eq!(new.status()["driverVersion"], "570.86.15");
    let news = hold(&api, "new", younger, End::Leave);
    until("taken", || *news.held.borrow() && !*olds.held.borrow()).await;
    old.found("535.261.04");
    tokio::time::sleep(Duration::from_secs(200)).await;
    assert_eq!(new.status()["driverVersion"], "570.86.15", "the old one stands back");

    // It knows that it has the lease again from who holds it, and does not wait for its next look.
    news.end().await;
    until("old holds it", || *olds.held.borrow()).await;
    old.held.send_replace(true);
    until("old speaks again", || old.status()["driverVersion"] == "535.261.04").await;
    olds.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_same_event_is_counted_and_not_repeated() {
    let api = server_with_node();
    let (events, writer) = events::channel("node-1", &Metrics::default());
    tokio::spawn(writer.run(api.client()));
    let claim = ClaimRef { uid: "u".into(), namespace: "team".into(), name: "slice".into() };
    for _ in 0..20 {
        events.claim_not_released(&claim, "in use by process 42");
    }
    let stored = || api.list("/api/v1/namespaces/team/events/");
    until("written", || !stored().is_empty()).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(api.writes().len(), 1);

    tokio::time::sleep(Duration::from_secs(60)).await;
    events.claim_not_released(&claim, "in use by process 42");
    until("counted", || stored()[0]["count"] == 21).await;
    assert_eq!((api.writes().len(), stored().len()), (2, 1));

    events.claim_not_released(&claim, "in use by process 43");
    events.node("MigModePending", "gpu-3b-00-0: reset it");
    until("both written", || stored().len() == 2 && !api.list("/api/v1/namespaces/default/events/").is_empty()).await;
    let node = &api.list("/api/v1/namespaces/default/events/")[0];
    assert_eq!((&node["involvedObject"]["kind"], &node["involvedObject"]["uid"]), (&json!("Node"), &json!("node-1")));
    assert_eq!((&node["type"], &node["source"]["component"]), (&json!("Warning"), &json!("kerf-kubelet-plugin")));
}
