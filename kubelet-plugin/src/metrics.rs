//! What is counted and measured of this program. `docs/metrics.md` lists it all.
//!
//! [`Metrics`] is told what happens; what the node has at the moment is read from the last inventory when it is asked for.
//! Architecture invariant: nobody who asks for metrics makes the plugin call NVML.

use std::collections::BTreeMap;
use std::time::Duration;

use kerf_telemetry::metrics::{Gauges, Label, Labels, durations};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use tokio::sync::watch;

use crate::engine::{Lock, Step, Watch};
use crate::failure::{Class, Failure};
use crate::inventory::{ClaimState, Inventory};
use crate::registration::KubeletVerdict;

const OK: &str = "ok";
const ERROR: &str = "error";

/// What the plugin tells the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// That it lives.
    Lease,
    /// What the node has.
    GpuNode,
    /// What happened.
    Event,
}

impl Report {
    /// All there are.
    const ALL: [Report; 3] = [Report::Lease, Report::GpuNode, Report::Event];

    fn name(self) -> &'static str {
        match self {
            Report::Lease => "lease",
            Report::GpuNode => "gpu_node",
            Report::Event => "event",
        }
    }
}

/// Counts and measures. Clones share everything.
#[derive(Clone, Debug)]
pub struct Metrics {
    prepare: Family<Label, Histogram>,
    unprepare: Family<Label, Histogram>,
    carve: Family<Label, Histogram>,
    lock_wait: Family<Label, Histogram>,
    errors: Family<Label, Counter>,
    unwritten: Family<Label, Counter>,
}

/// What the node is known to have, for the gauges.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The last reading of the node.
    pub inventory: watch::Receiver<Option<Inventory>>,
    /// What the kubelet thinks of the plugin.
    pub verdict: watch::Receiver<KubeletVerdict>,
}

impl Default for Metrics {
    fn default() -> Metrics {
        let errors = Family::<Label, Counter>::default();
        Class::ALL.iter().for_each(|class| drop(errors.get_or_create(&[("class", class.name())])));
        let unwritten = Family::<Label, Counter>::default();
        Report::ALL.iter().for_each(|report| drop(unwritten.get_or_create(&[("report", report.name())])));
        Metrics {
            prepare: durations("result", [OK, ERROR]),
            unprepare: durations("result", [OK, ERROR]),
            carve: durations("step", Step::ALL.map(Step::name)),
            lock_wait: durations("lock", Lock::ALL.map(Lock::name)),
            errors,
            unwritten,
        }
    }
}

impl Metrics {
    /// A claim was prepared, or not.
    pub fn prepared(&self, took: Duration, failure: Option<&Failure>) {
        self.ended(&self.prepare, took, failure);
    }

    /// A claim was released, or not.
    pub fn unprepared(&self, took: Duration, failure: Option<&Failure>) {
        self.ended(&self.unprepare, took, failure);
    }

    /// Something could not be done for a claim.
    pub fn failed(&self, class: Class) {
        self.errors.get_or_create(&[("class", class.name())]).inc();
    }

    /// The API server did not take what the plugin had to tell. It is tried again, but for Events.
    pub fn unwritten(&self, report: Report) {
        self.unwritten.get_or_create(&[("report", report.name())]).inc();
    }

    fn ended(&self, calls: &Family<Label, Histogram>, took: Duration, failure: Option<&Failure>) {
        let result = if failure.is_some() { ERROR } else { OK };
        calls.get_or_create(&[("result", result)]).observe(took.as_secs_f64());
        failure.into_iter().for_each(|failure| self.failed(failure.class));
    }

    /// Everything that this program has to show.
    pub fn registry(&self, seen: &Seen) -> Registry {
        let mut registry = kerf_telemetry::metrics::registry(env!("CARGO_PKG_VERSION"));
        let mut durations = |name: &str, help: &str, family: &Family<Label, Histogram>| {
            registry.register_with_unit(name, help, Unit::Seconds, family.clone());
        };
        durations(
            "kerf_prepare",
            "How long it took to prepare a claim, from the kubelet's call to the answer; result is ok or error",
            &self.prepare,
        );
        durations(
            "kerf_unprepare",
            "How long it took to release a claim, from the kubelet's call to the answer; result is ok or error",
            &self.unprepare,
        );
        durations(
            "kerf_carve",
            "How long each step took that changes a GPU or the disk for a claim, with or without success",
            &self.carve,
        );
        durations(
            "kerf_lock_wait",
            "How long was waited for a lock, had or not; lock is claim or gpu, and other plugin processes hold them too",
            &self.lock_wait,
        );
        let help = "Claims that could not be prepared or released, tries counted one by one, by where one has to look";
        registry.register("kerf_errors", help, self.errors.clone());
        let help = "Reports that the API server did not take, or that had no room to wait, tries counted one by one; report \
                    is lease (that the plugin lives), gpu_node (what the node has) or event";
        registry.register("kerf_unwritten_reports", help, self.unwritten.clone());
        seen.register(&mut registry);
        registry
    }
}

impl Watch for Metrics {
    fn after(&self, step: Step, took: Duration) {
        self.carve.get_or_create(&[("step", step.name())]).observe(took.as_secs_f64());
    }

    fn waited(&self, lock: Lock, took: Duration) {
        self.lock_wait.get_or_create(&[("lock", lock.name())]).observe(took.as_secs_f64());
    }
}

impl Seen {
    fn register(&self, registry: &mut Registry) {
        let verdict = self.verdict.clone();
        let help = "Whether the kubelet has registered the plugin: 1 or 0";
        Gauges::register(registry, "kerf_registered", help, move || {
            vec![(Labels::new(), i64::from(*verdict.borrow() == KubeletVerdict::Registered))]
        });
        let help = "GPUs of the node; state is offered or withheld (nothing, or less than it could do, is offered)";
        self.gauges(registry, "kerf_gpus", help, gpus);
        let help = "Claims that have something on the node; state is prepared, unfinished (at work, or cut off), stuck (its \
                    release makes no progress) or condemned (released, and something of it is left)";
        self.gauges(registry, "kerf_claims", help, claims);
        let help = "GPU instances that are on the node's GPUs; owner is claim, condemned (what an ended claim has left) or \
                    foreign (no claim explains it)";
        self.gauges(registry, "kerf_gpu_instances", help, instances);
    }

    /// Gauges over the last inventory; without one they have no value.
    fn gauges(
        &self,
        registry: &mut Registry,
        name: &'static str,
        help: &'static str,
        count: impl Fn(&Inventory) -> Vec<(Labels, i64)> + Send + Sync + 'static,
    ) {
        let inventory = self.inventory.clone();
        Gauges::register(registry, name, help, move || inventory.borrow().as_ref().map(&count).unwrap_or_default());
    }
}

fn gpus(inventory: &Inventory) -> Vec<(Labels, i64)> {
    let (withheld, offered): (Vec<_>, Vec<_>) = inventory.status.gpus.iter().partition(|gpu| gpu.withheld.is_some());
    [("offered", offered.len()), ("withheld", withheld.len())].map(|(state, many)| value("state", state, many)).into()
}

/// Without a driver nobody has looked: then there is no value, and not 0.
fn claims(inventory: &Inventory) -> Vec<(Labels, i64)> {
    let Some(claims) = &inventory.claims else { return Vec::new() };
    let count = |state| claims.values().filter(|known| **known == state).count();
    ClaimState::ALL.map(|state| value("state", state.name(), count(state))).into()
}

fn instances(inventory: &Inventory) -> Vec<(Labels, i64)> {
    let mut counts: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for mig in inventory.status.gpus.iter().filter_map(|gpu| gpu.mig.as_ref()) {
        for instance in &mig.instances {
            let profile = mig.profiles.iter().find(|profile| profile.id == instance.profile_id);
            let state = |uid| inventory.claims.as_ref().and_then(|claims| claims.get(uid));
            let owner = match &instance.claim_uid {
                None => "foreign",
                Some(uid) if state(uid) == Some(&ClaimState::Condemned) => "condemned",
                Some(_) => "claim",
            };
            *counts.entry((profile.map_or("unknown", |profile| &profile.name), owner)).or_default() += 1;
        }
    }
    let labels = |(profile, owner): (&str, &'static str)| -> Labels {
        vec![("profile", profile.to_owned().into()), ("owner", owner.into())]
    };
    counts.into_iter().map(|(key, many)| (labels(key), gauge(many))).collect()
}

fn value(label: &'static str, value: &'static str, many: usize) -> (Labels, i64) {
    (vec![(label, value.into())], gauge(many))
}

fn gauge(many: usize) -> i64 {
    i64::try_from(many).unwrap_or(i64::MAX)
}
