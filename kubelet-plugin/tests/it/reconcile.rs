//! The reconcile around a node that does as it is told, with an API server in memory and time that passes at once.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kerf_kubelet_plugin::claim::ApiClaims;
use kerf_kubelet_plugin::engine::{ForeignPolicy, PreparedClaim, Released, RemovedForeign, Retried, Wish, Wishes};
use kerf_kubelet_plugin::events;
use kerf_kubelet_plugin::failure::Failure;
use kerf_kubelet_plugin::metrics::Metrics;
use kerf_kubelet_plugin::reconcile::{self, GRACE, Node, ROUND, Reconciler};
use kerf_telemetry::log::JsonLines;
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::layer::SubscriberExt as _;

use crate::api_server::ApiServer;
use crate::testing::lines;

/// A node that knows these claims.
#[derive(Default)]
struct Stub {
    known: Mutex<Vec<PreparedClaim>>,
    released: Mutex<Vec<String>>,
    /// The claims that are locked: those that are being released.
    locked: Mutex<BTreeSet<String>>,
    /// Called when a claim is to be released, before it is asked for once more.
    meanwhile: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    retried: Mutex<u32>,
    swept: Mutex<u32>,
}

impl Node for Stub {
    fn known_claims(&self) -> Result<Vec<PreparedClaim>, Failure> {
        Ok(self.known.lock().unwrap().clone())
    }

    fn release_left_behind(&self, uid: &str, is_still_gone: &dyn Fn() -> bool) -> Result<Option<Released>, Failure> {
        if !self.locked.lock().unwrap().insert(uid.to_owned()) {
            return Ok(None);
        }
        let meanwhile = self.meanwhile.lock().unwrap().take();
        meanwhile.into_iter().for_each(|meanwhile| meanwhile());
        let is_gone = is_still_gone();
        self.locked.lock().unwrap().remove(uid);
        if !is_gone {
            return Ok(None);
        }
        self.known.lock().unwrap().retain(|claim| claim.uid != uid);
        self.released.lock().unwrap().push(uid.to_owned());
        Ok(Some(Released::Gone))
    }

    fn sweep_foreign(&self) -> Result<Vec<RemovedForeign>, Failure> {
        *self.swept.lock().unwrap() += 1;
        Ok(Vec::new())
    }

    fn set_mig_modes(&self) -> Result<(), Failure> {
        Ok(())
    }

    fn has_condemned(&self) -> bool {
        self.known.lock().unwrap().iter().any(|claim| claim.condemned)
    }

    fn retry_condemned(&self) -> Result<Retried, Failure> {
        let mut tries = self.retried.lock().unwrap();
        *tries += 1;
        if *tries < 3 {
            return Ok(Retried { removed: Vec::new(), left: 1 });
        }
        let mut known = self.known.lock().unwrap();
        let (removed, left) = known.drain(..).partition(|claim| claim.condemned);
        *known = left;
        Ok(Retried { removed, left: 0 })
    }
}

struct Reconciling {
    api: ApiServer,
    wishes: Wishes,
    node: Arc<Stub>,
}

fn known(name: &str) -> PreparedClaim {
    PreparedClaim {
        uid: format!("uid-of-{name}"),
        namespace: "team".into(),
        name: name.into(),
        complete: true,
        devices: vec!["gpu-3b-00-0".into()],
        ..PreparedClaim::default()
    }
}

fn path(name: &str) -> String {
    format!("/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/{name}")
}

fn claim(name: &str, pool: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "team", "uid": format!("uid-of-{name}")},
        "spec": {},
        "status": {"allocation": {"devices": {"results": [
            {"request": "gpu", "driver": "gpu.nvidia.com", "pool": pool, "device": "gpu-3b-00-0"},
        ]}}},
    })
}

/// Starts on a node that knows `claims`, with an API server that has none yet.
fn start(claims: &[PreparedClaim]) -> Reconciling {
    let api = ApiServer::default();
    prepared(api, claims)
}

fn prepared(api: ApiServer, claims: &[PreparedClaim]) -> Reconciling {
    let node = Arc::new(Stub { known: Mutex::new(claims.to_vec()), ..Stub::default() });
    let (events, writer) = events::channel("node-1", &Metrics::default());
    tokio::spawn(writer.run(api.client()));
    let wishes = Wishes::new(ForeignPolicy::Keep);
    let reconciler = Reconciler {
        claims: ApiClaims::new(api.client()),
        node: Arc::clone(&node),
        driver_name: "gpu.nvidia.com".into(),
        node_name: "node-1".into(),
        wishes: wishes.clone(),
        events,
        metrics: Metrics::default(),
    };
    tokio::spawn(reconcile::run(reconciler, CancellationToken::new()));
    Reconciling { api, wishes, node }
}

impl Reconciling {
    fn released(&self) -> Vec<String> {
        self.node.released.lock().unwrap().clone()
    }

    async fn until_released(&self, uid: &str) {
        let deadline = Instant::now() + Duration::from_secs(3600);
        while !self.released().iter().any(|released| released == uid) {
            assert!(Instant::now() < deadline, "{uid} is never released");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    fn events(&self) -> Vec<Value> {
        self.api.list("/api/v1/namespaces/default/events/")
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_is_gone_is_released_when_its_time_is_over() {
    let api = ApiServer::default();
    api.put(&path("there"), claim("there", "node-1"));
    api.put(&path("elsewhere"), claim("elsewhere", "node-2"));
    let mut replaced = claim("replaced", "node-1");
    replaced["metadata"]["uid"] = json!("another");
    api.put(&path("replaced"), replaced);
    api.put(&path("not-allocated"), json!({"metadata": {"name": "n", "uid": "uid-of-not-allocated"}, "spec": {}}));
    let begun = Instant::now();
    let names = ["there", "deleted", "elsewhere", "replaced", "not-allocated"];
    let running = prepared(api, &names.map(known));
    running.until_released("uid-of-deleted").await;
    assert!(begun.elapsed() >= GRACE, "{:?}", begun.elapsed());
    assert!(begun.elapsed() <= GRACE + ROUND, "{:?}", begun.elapsed());
    tokio::time::sleep(10 * ROUND).await;
    let mut released = running.released();
    released.sort();
    assert_eq!(released, ["uid-of-deleted", "uid-of-elsewhere", "uid-of-not-allocated", "uid-of-replaced"]);
    let events = running.events();
    assert_eq!(events.len(), 4);
    assert!(events.iter().all(|event| event["reason"] == "ClaimLeftBehind"), "{events:?}");
    let message = events[0]["message"].as_str().unwrap();
    assert!(message.starts_with("claim team/") && message.ends_with("removed gpu-3b-00-0"), "{message}");
}

#[tokio::test(start_paused = true)]
async fn what_is_logged_about_a_claim_names_it() {
    let log = NamedTempFile::new().unwrap();
    let written = JsonLines::new(Mutex::new(log.reopen().unwrap()));
    let _subscriber = tracing::subscriber::set_default(tracing_subscriber::registry().with(written));
    let running = start(&[known("deleted")]);
    running.until_released("uid-of-deleted").await;
    tokio::time::sleep(ROUND).await;

    let lines = lines(&std::fs::read_to_string(log.path()).unwrap());
    for message in ["the claim is gone, and not released yet", "left behind"] {
        let about = lines.iter().find(|line| line["message"] == message);
        let about = about.unwrap_or_else(|| panic!("{message}: {lines:#?}"));
        let found = ["claim.uid", "claim.namespace", "claim.name"].map(|name| about[name].as_str());
        assert_eq!(found, [Some("uid-of-deleted"), Some("team"), Some("deleted")], "{about}");
    }
}

/// Who has asked for it waits for the reading of the GpuNode at most, not for the next round after it.
#[tokio::test(start_paused = true)]
async fn what_is_wanted_of_the_gpus_is_done_when_it_is_told() {
    let running = start(&[]);
    let swept = || *running.node.swept.lock().unwrap();
    tokio::time::sleep(ROUND / 4).await;
    assert_eq!(swept(), 1, "at the start");
    let gpu = "0000:3b:00.0".parse().unwrap();
    let delete = Wish { foreign: Some(ForeignPolicy::Delete), mig_mode: None };
    running.wishes.tell([(gpu, delete)].into());
    tokio::time::sleep(ROUND / 4).await;
    assert_eq!(swept(), 2, "told");
    running.wishes.tell([(gpu, delete)].into());
    tokio::time::sleep(ROUND / 4).await;
    assert_eq!(swept(), 2, "no news");
}

/// No container of an earlier boot lives, so there is nothing to wait for.
#[tokio::test(start_paused = true)]
async fn a_claim_of_an_earlier_boot_is_released_at_once() {
    let begun = Instant::now();
    let running = start(&[PreparedClaim { earlier_boot: true, ..known("old") }]);
    running.until_released("uid-of-old").await;
    assert!(begun.elapsed() < ROUND, "{:?}", begun.elapsed());
}

/// Nothing is released on what is not known: not while the API server fails, and not on a 404 that says nothing.
#[tokio::test(start_paused = true)]
async fn an_outage_releases_nothing() {
    let api = ApiServer::default();
    api.put(&path("there"), claim("there", "node-1"));
    let running = prepared(api, &[known("there"), PreparedClaim { name: String::new(), ..known("nameless") }]);
    running.api.set_failing(true);
    tokio::time::sleep(10 * GRACE).await;
    running.api.set_failing(false);
    running.api.set_unserved(true);
    tokio::time::sleep(10 * GRACE).await;
    running.api.set_unserved(false);
    assert_eq!(running.released(), [""; 0]);
    tokio::time::sleep(10 * GRACE).await;
    assert_eq!(running.released(), ["uid-of-nameless"]);
}

/// Whose journal is lost is looked for by its UID.
#[tokio::test(start_paused = true)]
async fn a_claim_without_a_name_is_found_by_its_uid() {
    let api = ApiServer::default();
    api.put(&path("there"), claim("there", "node-1"));
    let nameless = |name| PreparedClaim { name: String::new(), namespace: String::new(), ..known(name) };
    let running = prepared(api, &["there", "gone"].map(nameless));
    running.until_released("uid-of-gone").await;
    tokio::time::sleep(10 * GRACE).await;
    assert_eq!(running.released(), ["uid-of-gone"]);
}

/// Allocated again at the last moment, when it is locked already.
#[tokio::test(start_paused = true)]
async fn a_claim_that_comes_back_at_the_last_moment_stays() {
    let running = start(&[known("back")]);
    let api = running.api.clone();
    *running.node.meanwhile.lock().unwrap() = Some(Box::new(move || api.put(&path("back"), claim("back", "node-1"))));
    tokio::time::sleep(10 * GRACE).await;
    assert!(running.node.meanwhile.lock().unwrap().is_none(), "it was about to be released");
    assert_eq!(running.released(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn condemned_claims_are_tried_while_there_are_any() {
    let running = start(&[PreparedClaim { condemned: true, ..known("ended") }]);
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(*running.node.retried.lock().unwrap(), 3, "and no more once it is gone");
    assert_eq!(running.released(), [""; 0], "the kubelet has released it");
    let events = running.events();
    assert_eq!((events.len(), events[0]["reason"].as_str()), (1, Some("InstanceRemoved")));
    assert!(*running.node.swept.lock().unwrap() >= 5, "foreign instances are looked for in each round");
}

/// A call to a sick GPU may never return.
#[tokio::test(start_paused = true)]
async fn a_release_that_hangs_holds_up_nothing_else() {
    let running = start(&[known("hangs"), known("gone")]);
    let (let_go, goes) = std::sync::mpsc::channel::<()>();
    *running.node.meanwhile.lock().unwrap() = Some(Box::new(move || goes.recv().unwrap()));
    let swept = || *running.node.swept.lock().unwrap();
    let before = swept();
    for _ in 0..10 * GRACE.as_secs() {
        // A blocked thread stops the clock of a test.
        tokio::time::advance(Duration::from_secs(1)).await;
        tokio::task::spawn_blocking(|| ()).await.unwrap();
    }
    assert_eq!(running.released().len(), 1, "one of the two hangs");
    assert!(swept() >= before + 5, "foreign instances are looked for all the same");
    let_go.send(()).unwrap();
    while running.released().len() < 2 {
        tokio::time::advance(Duration::from_secs(1)).await;
        tokio::task::spawn_blocking(|| ()).await.unwrap();
    }
}
