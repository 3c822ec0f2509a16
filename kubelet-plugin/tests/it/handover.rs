//! Two plugins on one node, old and new, as in a rolling update: the real program twice, and a kubelet that calls either.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use kerf_proto::dra::v1::dra_plugin_client::DraPluginClient;
use kerf_proto::dra::v1::{
    self, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tonic::Status;
use tonic::transport::Channel;

use crate::engine_node::{GPU, H100, MIG_1G, MIG_3G, Node, SECOND, SECOND_1G, TWO_H100};
use crate::program::{PATIENCE, Plugin};
use crate::rpc;

const OLD: &str = "00000000-0000-4000-8000-00000000001d";
const NEW: &str = "00000000-0000-4000-8000-0000000000e1";

/// A node with a plugin that serves it, and holds its lease.
struct Host {
    node: Node,
    /// Has a directory and an API server, and never runs.
    template: Plugin,
    old: Plugin,
}

impl Host {
    async fn start(gpus: &str) -> Host {
        let node = Node::start(gpus);
        let template = Plugin::spawn(&node.root(), "error", &[]).await;
        let mut old = template.beside(OLD, &[]);
        old.register().await;
        holds_lease(&mut old).await;
        Host { node, template, old }
    }

    /// Another plugin that serves the node and holds the lease.
    async fn another(&self, uid: &str) -> Plugin {
        let mut plugin = self.template.beside(uid, &[]);
        plugin.register().await;
        holds_lease(&mut plugin).await;
        plugin
    }

    /// As the controller decides whether to publish: the kubelet knows a plugin, and the lease was renewed in its time.
    fn assert_published(&self) {
        let api = &self.template.api;
        let status = &api.get("/apis/kerf.dev/v1alpha1/gpunodes/node-1").unwrap()["status"];
        assert_eq!(status["registered"], true);
        let lease =
            api.get("/apis/coordination.k8s.io/v1/namespaces/kerf-system/leases/kubelet-plugin-node-1").unwrap();
        let (holder, duration) = (&lease["spec"]["holderIdentity"], &lease["spec"]["leaseDurationSeconds"]);
        assert!(holder.is_string() && *duration == json!(30), "{lease}");
    }
}

/// Whether this plugin is the one that holds the lease.
fn is_holder(plugin: &Plugin) -> bool {
    let pid = plugin.process.id();
    plugin.lease_holder().is_some_and(|holder| holder.ends_with(&format!("_{pid}")))
}

async fn holds_lease(plugin: &mut Plugin) {
    let deadline = Instant::now() + PATIENCE;
    while !is_holder(plugin) {
        assert!(Instant::now() < deadline, "it does not get the lease");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn sockets(paths: &kerf_kubelet_plugin::paths::Paths) -> BTreeSet<String> {
    let names = |directory: &Path| {
        let entries = std::fs::read_dir(directory).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect::<Vec<_>>()
    };
    let mut sockets = names(paths.registration_socket.parent().unwrap());
    sockets.extend(names(&paths.plugin_directory));
    sockets.into_iter().filter(|name| name.ends_with(".sock")).collect()
}

fn both_sockets(uid: &str) -> [String; 2] {
    [format!("dra-{uid}.sock"), format!("gpu.nvidia.com-{uid}@reg.sock")]
}

#[tokio::test]
async fn what_the_old_one_prepared_the_new_one_releases() {
    let mut host = Host::start(H100).await;
    let claim = host.old.claim_of("slice", &[MIG_3G]);
    let prepared = host.old.prepare(&claim).await;
    assert_eq!(prepared.error, "");
    let live = host.node.live(GPU);

    let mut new = host.another(NEW).await;
    host.assert_published();
    assert_eq!(new.prepare(&claim).await, prepared, "the same to both");
    assert_eq!(host.node.live(GPU), live);
    assert!(host.old.terminate().await.success());
    assert_eq!(sockets(&new.paths), both_sockets(NEW).into());
    assert!(is_holder(&new), "the old one gives nothing up");
    host.assert_published();

    assert_eq!(new.unprepare(&claim).await, "");
    assert_eq!(host.node.live(GPU), []);
    assert!(new.terminate().await.success());
    assert_eq!(new.lease_holder(), None, "nobody is left");
}

#[tokio::test]
async fn two_that_prepare_the_same_claim_at_once_carve_it_once() {
    let host = Host::start(TWO_H100).await;
    let new = host.another(NEW).await;
    for round in 0..10 {
        let claim = host.old.claim_of(&format!("both-{round}"), &[MIG_1G, SECOND_1G]);
        let (one, other) = tokio::join!(host.old.prepare(&claim), new.prepare(&claim));
        assert_eq!((one.error.as_str(), one.devices.len()), ("", 2));
        assert_eq!(one, other);
        assert_eq!((host.node.live(GPU).len(), host.node.live(SECOND).len()), (1, 1));
        let released = tokio::join!(host.old.unprepare(&claim), new.unprepare(&claim));
        assert_eq!(released, (String::new(), String::new()));
        assert_eq!((host.node.live(GPU), host.node.live(SECOND)), (vec![], vec![]));
    }
}

/// A kubelet that is connected to both, and calls the new one when it has lost the old one.
struct Kubelet<'a> {
    old: DraPluginClient<Channel>,
    new: &'a Plugin,
    calls_to_old: Cell<usize>,
    has_lost_old: Cell<bool>,
}

impl Kubelet<'_> {
    async fn connect<'a>(old: &Plugin, new: &'a Plugin) -> Kubelet<'a> {
        let old = DraPluginClient::new(rpc::connect(&old.paths.dra_socket).await);
        Kubelet { old, new, calls_to_old: Cell::new(0), has_lost_old: Cell::new(false) }
    }

    /// Whether the old one has taken the call. One that was never sent is none.
    fn is_taken<T>(&self, answer: &Result<T, Status>) -> bool {
        self.calls_to_old.set(self.calls_to_old.get() + 1);
        let Err(status) = answer else { return true };
        let lost = ["No such file", "Connection refused", "operation was canceled"];
        let why = format!("{status:?}");
        assert!(lost.iter().any(|lost| why.contains(lost)), "{why}");
        self.has_lost_old.set(true);
        false
    }

    async fn prepare(&self, claim: &v1::Claim, old: bool) -> NodePrepareResourceResponse {
        if old && !self.has_lost_old.get() {
            let request = NodePrepareResourcesRequest { claims: vec![claim.clone()] };
            let answer = self.old.clone().node_prepare_resources(request).await;
            if self.is_taken(&answer) {
                return answer.unwrap().into_inner().claims.remove(&claim.uid).unwrap();
            }
        }
        self.new.prepare(claim).await
    }

    async fn unprepare(&self, claim: &v1::Claim, old: bool) -> String {
        if old && !self.has_lost_old.get() {
            let request = NodeUnprepareResourcesRequest { claims: vec![claim.clone()] };
            let answer = self.old.clone().node_unprepare_resources(request).await;
            if self.is_taken(&answer) {
                return answer.unwrap().into_inner().claims.remove(&claim.uid).unwrap().error;
            }
        }
        self.new.unprepare(claim).await
    }

    async fn pod(&self, claim: &v1::Claim, prepares_old: bool) {
        let begun = Instant::now();
        let prepared = self.prepare(claim, prepares_old).await;
        assert_eq!((prepared.error.as_str(), prepared.devices.len()), ("", 1), "{}", claim.name);
        assert_eq!(self.unprepare(claim, !prepares_old).await, "", "{}", claim.name);
        assert!(begun.elapsed() < Duration::from_secs(5), "{}: {:?}", claim.name, begun.elapsed());
    }
}

/// Thirty claims a second on the slices of two GPUs, prepared by the old one and released by the new one or the other way
/// round, while the old one ends.
#[tokio::test]
async fn no_call_fails_while_the_old_one_ends() {
    const AT_ONCE: usize = 10;
    let mut host = Host::start(TWO_H100).await;
    let new = host.another(NEW).await;
    let device = |number: usize| format!("gpu-{}-00-0-mig-1g10gb-{}", ["3b", "47"][number / 7 % 2], number % 7);
    let claims: Vec<v1::Claim> =
        (0..150).map(|number| host.old.claim_of(&format!("c{number}"), &[&device(number)])).collect();
    let kubelet = Kubelet::connect(&host.old, &new).await;
    let mut ticks = tokio::time::interval(Duration::from_secs(1) * AT_ONCE as u32 / 30);
    for (round, claims) in claims.chunks(AT_ONCE).enumerate() {
        ticks.tick().await;
        let pods = claims.iter().enumerate().map(|(number, claim)| kubelet.pod(claim, number % 2 == 0));
        futures::future::join(futures::future::join_all(pods), async {
            if round == 3 {
                host.old.ask_to_end();
            }
        })
        .await;
    }
    assert!(kubelet.has_lost_old.get(), "it has ended meanwhile");
    assert!(kubelet.calls_to_old.get() >= 3 * AT_ONCE, "{} calls", kubelet.calls_to_old.get());
    assert!(host.old.ended().await.success());
    assert_eq!((host.node.live(GPU), host.node.live(SECOND)), (vec![], vec![]));
    assert_eq!(sockets(&new.paths), both_sockets(NEW).into());
    host.assert_published();
}

/// Carving takes a second on real hardware. What the kubelet waits for is cut off when it forgets the plugin, so the plugin is
/// not forgotten before.
#[tokio::test]
async fn who_is_told_to_end_finishes_its_claims_before_it_is_forgotten() {
    let mut host = Host::start(H100).await;
    host.node.ctl(&["latency", "nvmlDeviceCreateGpuInstanceWithPlacement=1500ms"]);
    let claim = host.old.claim_of("slice", &[MIG_1G]);
    let (prepared, ()) = tokio::join!(host.old.prepare(&claim), async {
        while std::fs::read_dir(&host.old.paths.claims).unwrap().count() == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        host.old.ask_to_end();
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(UnixStream::connect(&host.old.paths.registration_socket).is_ok(), "the claim is in work");
    });
    assert_eq!((prepared.error.as_str(), prepared.devices.len()), ("", 1));
    let registration = host.old.paths.registration_socket.clone();
    let deadline = Instant::now() + PATIENCE;
    while registration.exists() {
        assert!(Instant::now() < deadline, "it is not taken down");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // The kubelet looks every second, and has nobody else to send what comes until then.
    host.node.ctl(&["latency", "nvmlDeviceCreateGpuInstanceWithPlacement=0"]);
    assert_eq!(host.old.unprepare(&claim).await, "");
    assert!(host.old.ended().await.success());
}

#[tokio::test]
async fn what_a_killed_one_left_is_removed_by_the_next_start() {
    let mut host = Host::start(H100).await;
    let claim = host.old.claim_of("slice", &[MIG_1G]);
    assert_eq!(host.old.prepare(&claim).await.error, "");
    let new = host.another(NEW).await;
    host.old.process.kill().unwrap();
    assert_eq!(host.old.process.wait().unwrap().signal(), Some(9));
    let left: BTreeSet<String> = both_sockets(OLD).into_iter().chain(both_sockets(NEW)).collect();
    assert_eq!(sockets(&new.paths), left);
    assert!(is_holder(&new));
    host.assert_published();

    // One that does not answer is no dead one.
    let stopped = Pid::from_child(&new.process);
    kill_process(stopped, Signal::STOP).unwrap();
    let third = "00000000-0000-4000-8000-000000000003";
    let mut next = host.template.beside(third, &[]);
    next.register().await;
    kill_process(stopped, Signal::CONT).unwrap();
    holds_lease(&mut next).await;
    let left: BTreeSet<String> = both_sockets(NEW).into_iter().chain(both_sockets(third)).collect();
    assert_eq!(sockets(&new.paths), left);
    assert_eq!(new.unprepare(&claim).await, "");
    assert_eq!(host.node.live(GPU), []);
}

/// The new one is taken back, or dies: the old one speaks for the node again, and nothing was withdrawn meanwhile.
#[tokio::test]
async fn the_old_one_takes_over_again() {
    let mut host = Host::start(H100).await;
    let mut new = host.another(NEW).await;
    assert!(!is_holder(&host.old));
    assert!(new.terminate().await.success());
    host.assert_published();
    holds_lease(&mut host.old).await;
    host.assert_published();

    // What it reports is its own again: it is heard of a change.
    let claim = host.old.claim_of("slice", &[MIG_1G]);
    assert_eq!(host.old.prepare(&claim).await.error, "");
    let uid = claim.uid.as_str();
    host.old.status("told", |status| status["gpus"][0]["mig"]["instances"][0]["claimUid"] == uid).await;
}

#[tokio::test]
async fn a_plugin_ends_as_it_is_told_to() {
    let mut host = Host::start(H100).await;
    let mut keeping = host.template.beside(NEW, &["--at-exit", "keep"]);
    keeping.register().await;
    holds_lease(&mut keeping).await;
    assert!(host.old.terminate().await.success());
    assert!(keeping.terminate().await.success());
    host.assert_published();
    assert_eq!(sockets(&keeping.paths), BTreeSet::new());
}

#[tokio::test]
async fn a_path_that_is_too_long_is_said_at_once() {
    let template = Plugin::spawn(Path::new("/"), "error", &[]).await;
    let directory = template.directory.path();
    let long = directory.join("x".repeat(90));
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_kerf-kubelet-plugin"))
        .args(["--node-name", "node-1", "--pod-uid", NEW, "--kubeconfig"])
        .arg(directory.join("kubeconfig"))
        .arg("--kubelet-root")
        .arg(&long)
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(error.contains("the kernel allows 107: choose a shorter --kubelet-root or --driver-name"), "{error}");
}
