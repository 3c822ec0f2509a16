//! Tells nodes what the policies ask of them, and the policies' authors what has come of it.
//!
//! Architecture invariant: this writes on change only, and only while this process leads. It writes `GpuNode.spec` and
//! `GpuPolicy.status` and nothing else; nobody else writes those.

use std::collections::HashMap;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kerf_api::{GpuNode, GpuNodeSpec, GpuPolicy, GpuPolicyStatus, names};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource as _};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::index::{Report, SharedIndex, Wish};
use crate::liveness::Now;
use crate::metrics::{Class, Metrics};

/// How long a change waits for others.
const DEBOUNCE: Duration = Duration::from_millis(500);

/// When to look again without a change: time alone makes a plugin stale.
const REVIEW: Duration = Duration::from_secs(30);

/// When to look again after a failure.
const RETRY: Duration = Duration::from_secs(5);

/// How long what was written is not written again, though the API server does not show it: the watch may be late, or the
/// CustomResourceDefinition may be of another version and drop some of it.
const SETTLE: Duration = Duration::from_secs(60);

/// How long one request may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// How many requests are under way at the same time.
const CONCURRENCY: usize = 8;

/// What this is made of.
pub struct Steward {
    /// Talks to the API server.
    pub client: Client,
    /// What the watches have seen.
    pub index: SharedIndex,
    /// Whether this process leads.
    pub leading: watch::Receiver<bool>,
    /// Counts failures.
    pub metrics: Metrics,
}

/// What was written last, and when, and what could not be, by the objects' UIDs.
#[derive(Default)]
struct Memory {
    wishes: HashMap<String, (Instant, GpuNodeSpec)>,
    reports: HashMap<String, (Instant, GpuPolicyStatus)>,
    failed: HashMap<String, Instant>,
}

impl Steward {
    /// Writes until `stop`, whenever this process leads.
    pub async fn run(mut self, stop: CancellationToken) {
        let work = async {
            while self.leading.wait_for(|leading| *leading).await.is_ok() {
                self.lead().await;
            }
        };
        stop.run_until_cancelled(work).await;
    }

    async fn lead(&mut self) {
        let mut revisions = self.index.subscribe();
        let mut memory = Memory::default();
        let mut due = Instant::now();
        loop {
            tokio::select! {
                _ = revisions.changed() => {}
                () = sleep_until(due) => {}
                _ = self.leading.wait_for(|leading| !*leading) => return,
            }
            sleep(DEBOUNCE).await;
            revisions.mark_unchanged();
            let (wishes, reports) = {
                let index = self.index.lock();
                (index.wishes(), index.reports(Now::read()))
            };
            self.write(wishes, reports, &mut memory).await;
            due = Instant::now() + if memory.failed.is_empty() { REVIEW } else { RETRY };
        }
    }

    /// Writes what was neither written nor refused a moment ago.
    async fn write(&self, mut wishes: Vec<Wish>, mut reports: Vec<Report>, memory: &mut Memory) {
        let now = Instant::now();
        memory.wishes.retain(|_, (at, _)| *at + SETTLE > now);
        memory.reports.retain(|_, (at, _)| *at + SETTLE > now);
        memory.failed.retain(|_, at| *at + RETRY > now);
        wishes.retain(|wish| memory.wishes.get(&wish.uid).is_none_or(|(_, spec)| *spec != wish.spec));
        wishes.retain(|wish| !memory.failed.contains_key(&wish.uid));
        reports.retain(|report| {
            memory.reports.get(&report.uid).is_none_or(|(_, status)| !same_but_for_times(status, &report.status))
        });
        reports.retain(|report| !memory.failed.contains_key(&report.uid));
        let tell = |wish: Wish| async move { (self.tell(&wish).await, wish.uid, wish.spec) };
        let report = |report: Report| async move { (self.report(&report).await, report.uid, report.status) };
        let told: Vec<_> = futures::stream::iter(wishes).map(tell).buffer_unordered(CONCURRENCY).collect().await;
        let reported: Vec<_> = futures::stream::iter(reports).map(report).buffer_unordered(CONCURRENCY).collect().await;
        let ended = Instant::now();
        for (done, uid, spec) in told {
            if done {
                memory.wishes.insert(uid, (now, spec));
            } else {
                memory.failed.insert(uid, ended);
            }
        }
        for (done, uid, status) in reported {
            if done {
                memory.reports.insert(uid, (now, status));
            } else {
                memory.failed.insert(uid, ended);
            }
        }
    }

    async fn tell(&self, wish: &Wish) -> bool {
        let Wish { node, uid, spec } = wish;
        let api: Api<GpuNode> = Api::all(self.client.clone());
        let patch = json!([
            // Not the object of a node that was deleted and came back meanwhile.
            { "op": "test", "path": "/metadata/uid", "value": uid },
            // As a whole. Of a spec whose last field is not applied any more the API server makes a null, and refuses it.
            { "op": "add", "path": "/spec", "value": spec },
        ]);
        let params = PatchParams { field_manager: Some(names::CONTROLLER.to_owned()), ..PatchParams::default() };
        let request = async {
            let patch = serde_json::from_value(patch).map_err(kube::Error::SerdeError)?;
            api.patch(node, &params, &Patch::<()>::Json(patch)).await
        };
        let told = self.request(&format!("GpuNode {node}"), request).await;
        if told {
            info!(%node, gpus = spec.gpus.len(), "told the node what the policies ask of its GPUs");
        }
        told
    }

    async fn report(&self, report: &Report) -> bool {
        let Report { policy, uid, status } = report;
        let api: Api<GpuPolicy> = Api::all(self.client.clone());
        let patch = json!({
            "apiVersion": GpuPolicy::api_version(&()),
            "kind": GpuPolicy::kind(&()),
            "metadata": { "name": policy, "uid": uid },
            "status": status,
        });
        let params = PatchParams::apply(names::CONTROLLER).force();
        let what = format!("status of GpuPolicy {policy}");
        self.request(&what, api.patch_status(policy, &params, &Patch::Apply(patch))).await
    }

    /// Whether it was done, or is of no use any more.
    async fn request<T>(&self, what: &str, request: impl Future<Output = kube::Result<T>>) -> bool {
        if !*self.leading.borrow() {
            return false;
        }
        match timeout(PATIENCE, request).await {
            Ok(Ok(_)) => {
                debug!("{what} written");
                true
            }
            // Gone, or another of the same name: the watch is about to say so.
            Ok(Err(kube::Error::Api(status))) if [404, 409].contains(&status.code) => {
                debug!(%status.message, "{what} not written");
                true
            }
            Ok(Err(error)) => {
                self.metrics.failed(Class::of(&error));
                warn!(error = &error as &dyn std::error::Error, "cannot write {what}; trying again in {RETRY:?}");
                false
            }
            Err(_) => {
                self.metrics.failed(Class::Unavailable);
                warn!("cannot write {what}: no answer within {PATIENCE:?}; trying again in {RETRY:?}");
                false
            }
        }
    }
}

/// Whether they say the same; a time that differs alone is no news.
fn same_but_for_times(a: &GpuPolicyStatus, b: &GpuPolicyStatus) -> bool {
    let words = |status: &GpuPolicyStatus| -> Vec<_> {
        let each = |one: &Condition| (one.type_.clone(), one.status.clone(), one.reason.clone(), one.message.clone());
        status.conditions.iter().map(each).collect()
    };
    let rest = |status: &GpuPolicyStatus| (status.observed_generation, status.nodes_matched);
    words(a) == words(b) && rest(a) == rest(b) && a.nodes == b.nodes
}
