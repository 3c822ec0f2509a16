//! What can be seen of the program from outside: readiness, metrics, log lines.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use kerf_api::{Gpu, GpuInstanceStatus, GpuNodeStatus, MigProfile, MigStatus};
use kerf_kubelet_plugin::engine::{Lock, Step, Watch as _};
use kerf_kubelet_plugin::failure::{Class, Failure};
use kerf_kubelet_plugin::inventory::{ClaimState, Inventory};
use kerf_kubelet_plugin::metrics::{Metrics, Report, Seen};
use kerf_kubelet_plugin::registration::KubeletVerdict;
use prometheus_client::encoding::text::encode;
use serde_json::Value;
use tokio::sync::watch;

use crate::engine_node::Node;
use crate::program::Plugin;
use crate::testing::{compare_with_page, get, http_address, is_named_on_page, lines};

const ANY: [&str; 2] = ["--http-address", "127.0.0.1:0"];

impl Plugin {
    async fn address(&mut self) -> SocketAddr {
        let log = self.log.path().to_owned();
        let address = || http_address(&std::fs::read_to_string(&log).unwrap());
        self.until("address in the log", || address().is_some()).await;
        address().unwrap()
    }

    fn logged(&self) -> Vec<Value> {
        lines(&std::fs::read_to_string(self.log.path()).unwrap())
    }

    /// Waits until a path is answered so.
    async fn answers(&mut self, address: SocketAddr, path: &'static str, code: u16, body: &str) {
        self.until(&format!("{path}: {code} {body}"), || {
            let (status, found) = get(address, path);
            status == code && found.contains(body)
        })
        .await;
    }
}

/// A rolling update waits for it: neither earlier than the kubelet and the controller know the new plugin, nor for a GPU.
#[tokio::test(flavor = "multi_thread")]
async fn ready_is_a_plugin_that_kubelet_and_api_server_know() {
    let nothing = tempfile::tempdir().unwrap();
    let mut plugin = Plugin::begin(nothing.path(), "info", &ANY).await;
    let address = plugin.address().await;
    assert_eq!(get(address, "/healthz"), (200, "ok\n".into()));
    let waiting = "waiting for: GpuNode in the API server, registration with the kubelet\n";
    plugin.answers(address, "/readyz", 503, waiting).await;
    is_named_on_page(waiting);
    plugin.answers(address, "/metrics", 200, "\nkerf_registered 0\n").await;

    plugin.api.set_failing(true);
    plugin.register().await;
    plugin.answers(address, "/readyz", 503, "waiting for: GpuNode in the API server\n").await;
    plugin.api.set_failing(false);
    plugin.answers(address, "/readyz", 200, "ok\n").await;
    plugin.answers(address, "/metrics", 200, "\nkerf_registered 1\n").await;
    let metrics = get(address, "/metrics").1;
    assert!(!metrics.contains("kerf_claims{"), "without a driver nobody knows: {metrics}");

    plugin.refuse().await;
    plugin.answers(address, "/readyz", 503, "waiting for: registration with the kubelet\n").await;
    plugin.register().await;
    plugin.answers(address, "/readyz", 200, "ok\n").await;
}

/// During a rolling update the old plugin is ended once the new one is ready: it has to be the one that is called by then.
#[tokio::test(flavor = "multi_thread")]
async fn a_successor_is_ready_when_it_can_take_over() {
    let node = Node::start("[{product: h100-80gb}]");
    let mut old = Plugin::begin(&node.root(), "info", &ANY).await;
    old.register().await;
    let old_address = old.address().await;
    old.answers(old_address, "/readyz", 200, "ok\n").await;

    let mut new = old.beside("5a0c3b2e-0000-4000-8000-000000000002", &[]);
    let address = new.address().await;
    let waiting = "waiting for: GpuNode in the API server, registration with the kubelet\n";
    new.answers(address, "/readyz", 503, waiting).await;
    new.register().await;
    new.answers(address, "/readyz", 200, "ok\n").await;
    assert_eq!(get(old_address, "/readyz"), (200, "ok\n".into()), "it goes on until it is told to end");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_becomes_of_a_claim_is_counted_and_logged() {
    let node = Node::start("[{product: h100-80gb}]");
    let mut plugin = Plugin::begin(&node.root(), "info,kerf_kubelet_plugin=debug", &ANY).await;
    plugin.register().await;
    let address = plugin.address().await;
    let device = "gpu-3b-00-0-mig-1g10gb-4";
    let (mine, other) = (plugin.claim_of("mine", &[device]), plugin.claim_of("other", &[device]));
    assert_eq!(plugin.prepare(&mine).await.error, "");
    assert_ne!(plugin.prepare(&other).await.error, "");

    plugin.answers(address, "/metrics", 200, "\nkerf_claims{state=\"prepared\"} 1\n").await;
    let metrics = get(address, "/metrics").1;
    for line in [
        "kerf_prepare_seconds_count{result=\"ok\"} 1",
        "kerf_prepare_seconds_count{result=\"error\"} 1",
        "kerf_errors_total{class=\"in_use\"} 1",
        "kerf_errors_total{class=\"gpu\"} 0",
        "kerf_carve_seconds_count{step=\"create_gpu_instance\"} 1",
        "kerf_carve_seconds_count{step=\"destroy_gpu_instance\"} 0",
        "kerf_lock_wait_seconds_count{lock=\"gpu\"} 2",
        "kerf_gpu_instances{profile=\"1g.10gb\",owner=\"claim\"} 1",
        "kerf_gpus{state=\"offered\"} 1",
    ] {
        assert!(metrics.contains(&format!("{line}\n")), "{line}: {metrics}");
    }
    assert_eq!(plugin.unprepare(&mine).await, "");
    plugin.answers(address, "/metrics", 200, "kerf_unprepare_seconds_count{result=\"ok\"} 1\n").await;

    let log = plugin.logged();
    let about = |uid: &str| -> Vec<&Value> { log.iter().filter(|line| line["claim.uid"] == uid).collect() };
    let (mine, other) = (about("uid-of-mine"), about("uid-of-other"));
    for (lines, name) in [(&mine, "mine"), (&other, "other")] {
        assert!(
            lines.iter().all(|line| line["claim.namespace"] == "default" && line["claim.name"] == name),
            "{lines:?}"
        );
    }
    // Steps are taken in threads of their own.
    for step in ["create_gpu_instance", "create_compute_instance", "destroy_compute_instance", "destroy_gpu_instance"] {
        let found = mine.iter().find(|line| line["step"] == step).unwrap_or_else(|| panic!("{step}: {mine:#?}"));
        assert_eq!((&found["gpu"], &found["device"]), (&"gpu-3b-00-0".into(), &device.into()), "{found}");
        assert_eq!(found["span"], "claim:device:step");
    }
    let message = |lines: &[&Value], message: &str| lines.iter().any(|line| line["message"] == message);
    assert!(message(&mine, "prepared") && message(&mine, "unprepared"), "{mine:#?}");
    let refused = other.iter().find(|line| line["message"] == "not prepared").unwrap();
    assert_eq!(refused["class"], "in_use");
    assert!(refused["error"].as_str().unwrap().contains("default/mine"), "{refused}");
    assert!(log.iter().any(|line| line["message"] == "GpuNode written" && line.get("claim.uid").is_none()));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_is_taken_ends_the_program() {
    let nothing = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let mut plugin = Plugin::begin(nothing.path(), "info", &["--http-address", &address]).await;
    let ended = tokio::task::spawn_blocking(move || (plugin.process.wait().unwrap(), plugin)).await;
    let (status, plugin) = ended.unwrap();
    let log = std::fs::read_to_string(plugin.log.path()).unwrap();
    assert!(!status.success(), "{log}");
    assert!(log.contains(&format!("cannot serve on {address}, given by --http-address: ")), "{log}");
    assert!(!plugin.paths.dra_socket.exists(), "nothing was begun");
}

/// A node with something of everything.
fn seen() -> Seen {
    let instance = |id, claim: Option<&str>| GpuInstanceStatus {
        id,
        profile_id: 19,
        claim_uid: claim.map(str::to_owned),
        ..GpuInstanceStatus::default()
    };
    let mig = MigStatus {
        profiles: vec![MigProfile { id: 19, name: "1g.10gb".into(), ..MigProfile::default() }],
        instances: vec![
            instance(1, Some("a")),
            instance(2, Some("b")),
            instance(3, None),
            instance(4, None),
            GpuInstanceStatus { profile_id: 5, ..instance(5, None) },
        ],
        ..MigStatus::default()
    };
    let gpu = Gpu { mig: Some(mig), ..Gpu::default() };
    let states = [("a", ClaimState::Prepared), ("b", ClaimState::Condemned), ("c", ClaimState::Prepared)];
    let claims = states.map(|(uid, state)| (uid.to_owned(), state));
    let inventory = Inventory {
        status: GpuNodeStatus { gpus: vec![gpu], ..GpuNodeStatus::default() },
        claims: Some(BTreeMap::from(claims)),
        ..Inventory::default()
    };
    Seen {
        inventory: watch::channel(Some(inventory)).1,
        verdict: watch::channel(KubeletVerdict::Refused("no".into())).1,
    }
}

#[test]
fn everything_is_counted_under_its_labels() {
    let metrics = Metrics::default();
    metrics.prepared(Duration::from_millis(700), None);
    metrics.unprepared(Duration::from_secs(44), Some(&Failure { class: Class::Disk, message: String::new() }));
    metrics.failed(Class::Disk);
    metrics.unwritten(Report::Lease);
    metrics.after(Step::WriteJournal, Duration::from_micros(900));
    metrics.waited(Lock::Claim, Duration::from_secs(46));
    let mut text = String::new();
    encode(&mut text, &metrics.registry(&seen())).unwrap();
    for line in [
        "kerf_prepare_seconds_bucket{le=\"0.5\",result=\"ok\"} 0",
        "kerf_prepare_seconds_bucket{le=\"1.0\",result=\"ok\"} 1",
        "kerf_unprepare_seconds_bucket{le=\"45.0\",result=\"error\"} 1",
        "kerf_carve_seconds_bucket{le=\"0.001\",step=\"write_journal\"} 1",
        "kerf_lock_wait_seconds_bucket{le=\"45.0\",lock=\"claim\"} 0",
        "kerf_lock_wait_seconds_bucket{le=\"+Inf\",lock=\"claim\"} 1",
        "kerf_errors_total{class=\"disk\"} 2",
        "kerf_unwritten_reports_total{report=\"lease\"} 1",
        "kerf_unwritten_reports_total{report=\"event\"} 0",
        "kerf_registered 0",
        "kerf_gpus{state=\"offered\"} 1",
        "kerf_gpus{state=\"withheld\"} 0",
        "kerf_claims{state=\"prepared\"} 2",
        "kerf_claims{state=\"condemned\"} 1",
        "kerf_claims{state=\"stuck\"} 0",
        "kerf_gpu_instances{profile=\"1g.10gb\",owner=\"claim\"} 1",
        "kerf_gpu_instances{profile=\"1g.10gb\",owner=\"condemned\"} 1",
        "kerf_gpu_instances{profile=\"1g.10gb\",owner=\"foreign\"} 2",
        "kerf_gpu_instances{profile=\"unknown\",owner=\"foreign\"} 1",
    ] {
        assert!(text.contains(&format!("\n{line}\n")), "{line}: {text}");
    }
}

#[test]
fn every_metric_is_on_its_page() {
    compare_with_page("kubelet-plugin", &Metrics::default().registry(&seen()));
}
