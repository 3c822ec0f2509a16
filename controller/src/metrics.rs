//! What is counted of this program. `docs/metrics.md` lists it all.
//!
//! [`Metrics`] is told what happens; what the cluster has at the moment is read from the index when it is asked for.

use kerf_telemetry::metrics::{Gauges, Label, Labels};
use kube::runtime::watcher;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use crate::index::{SharedIndex, Standing};
use crate::liveness::Now;
use crate::webhook::Checked;
use crate::writer::WriteError;

/// What a request to write a slice does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Creates it.
    Create,
    /// Replaces it.
    Update,
    /// Deletes it.
    Delete,
}

/// Why the API server did not do what it should, by where one has to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// It refuses: the controller's rights, quotas, admission.
    Refused,
    /// It does not answer, not in time, or with an error of its own.
    Unavailable,
    /// It drops fields: a feature gate is off.
    Dropped,
}

/// What the webhook said of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// There is nothing against it.
    Allowed,
    /// kerf would refuse it.
    Denied,
}

/// Counts. Clones share everything.
#[derive(Clone, Debug)]
pub struct Metrics {
    admissions: Family<[(&'static str, &'static str); 2], Counter>,
    writes: Family<[(&'static str, &'static str); 2], Counter>,
    errors: Family<Label, Counter>,
}

/// What the cluster is known to have, for the gauges.
#[derive(Clone, Debug)]
pub struct Seen {
    /// What the watches have seen.
    pub index: SharedIndex,
    /// Whether this process leads.
    pub leading: watch::Receiver<bool>,
}

const RESULTS: [&str; 3] = ["ok", "conflict", "error"];

impl Verb {
    const ALL: [Verb; 3] = [Verb::Create, Verb::Update, Verb::Delete];

    /// What messages, logs and metrics call it.
    pub fn name(self) -> &'static str {
        match self {
            Verb::Create => "create",
            Verb::Update => "update",
            Verb::Delete => "delete",
        }
    }
}

impl Verdict {
    const ALL: [Verdict; 2] = [Verdict::Allowed, Verdict::Denied];

    fn name(self) -> &'static str {
        match self {
            Verdict::Allowed => "allowed",
            Verdict::Denied => "denied",
        }
    }
}

impl Class {
    const ALL: [Class; 3] = [Class::Refused, Class::Unavailable, Class::Dropped];

    fn name(self) -> &'static str {
        match self {
            Class::Refused => "refused",
            Class::Unavailable => "unavailable",
            Class::Dropped => "dropped",
        }
    }

    /// The class of what a client's request came to.
    pub fn of(error: &kube::Error) -> Class {
        match error {
            kube::Error::Api(status) if (400..500).contains(&status.code) => Class::Refused,
            _ => Class::Unavailable,
        }
    }

    fn of_write(error: &WriteError) -> Class {
        match error {
            WriteError::Request { source, .. } => Class::of(source),
            WriteError::Timeout { .. } => Class::Unavailable,
            WriteError::CountersDropped { .. } | WriteError::TaintsDropped { .. } => Class::Dropped,
        }
    }
}

impl Default for Metrics {
    fn default() -> Metrics {
        let metrics = Metrics { admissions: Family::default(), writes: Family::default(), errors: Family::default() };
        for kind in Checked::ALL {
            Verdict::ALL.iter().for_each(|verdict| drop(metrics.admissions.get_or_create(&admission(kind, *verdict))));
        }
        for verb in Verb::ALL {
            RESULTS.iter().for_each(|result| drop(metrics.writes.get_or_create(&writes(verb, result))));
        }
        Class::ALL.iter().for_each(|class| drop(metrics.errors.get_or_create(&[("class", class.name())])));
        metrics
    }
}

impl Metrics {
    /// A request to write a slice was answered, or was not.
    pub fn wrote(&self, verb: Verb, error: Option<&WriteError>) {
        let result = match error {
            None => "ok",
            Some(error) if error.is_conflict() => "conflict",
            Some(_) => "error",
        };
        self.writes.get_or_create(&writes(verb, result)).inc();
    }

    /// The slices of a node could not be made what they should be. A conflict is no failure.
    pub fn not_written(&self, error: &WriteError) {
        if !error.is_conflict() {
            self.failed(Class::of_write(error));
        }
    }

    /// A watch was interrupted. That the API server has forgotten where it was is no failure.
    pub fn interrupted(&self, error: &watcher::Error) {
        match error {
            watcher::Error::InitialListFailed(error)
            | watcher::Error::WatchStartFailed(error)
            | watcher::Error::WatchFailed(error) => self.failed(Class::of(error)),
            watcher::Error::WatchError(status) if status.code == 410 => {}
            watcher::Error::WatchError(_) | watcher::Error::NoResourceVersion => self.failed(Class::Unavailable),
        }
    }

    /// The webhook was asked about an object.
    pub fn judged(&self, kind: Checked, verdict: Verdict) {
        self.admissions.get_or_create(&admission(kind, verdict)).inc();
    }

    /// The API server did not do what it should.
    pub fn failed(&self, class: Class) {
        self.errors.get_or_create(&[("class", class.name())]).inc();
    }

    /// Everything that this program has to show.
    pub fn registry(&self, seen: &Seen) -> Registry {
        let mut registry = kerf_telemetry::metrics::registry(env!("CARGO_PKG_VERSION"));
        let help = "Requests that write ResourceSlices; verb is create, update or delete, result is ok, conflict (another \
                    change came first: it is tried again) or error";
        registry.register("kerf_slice_writes", help, self.writes.clone());
        let help = "Requests to the API server and watches that failed; class is refused (rights, quotas, admission), \
                    unavailable (no answer, or an error of its own) or dropped (fields that it did not keep)";
        registry.register("kerf_errors", help, self.errors.clone());
        let help = "Objects that the webhook was asked about when they were written, by their kind; result is allowed or denied";
        registry.register("kerf_admission", help, self.admissions.clone());
        seen.register(&mut registry);
        registry
    }
}

impl Seen {
    fn register(&self, registry: &mut Registry) {
        let leading = self.leading.clone();
        Gauges::register(registry, "kerf_leader", "Whether this process leads, and writes: 1 or 0", move || {
            vec![(Labels::new(), i64::from(*leading.borrow()))]
        });
        let index = self.index.clone();
        let help = "Nodes with a GpuNode, as this process sees them; state is live (published), unregistered (with the \
                    kubelet), stopped (in good order), stale (its lease has run out or is missing) or unknown";
        Gauges::register(registry, "kerf_nodes", help, move || {
            let nodes = index.lock().census(Now::read()).nodes;
            let value = |standing: Standing| {
                (vec![("state", standing.name().into())], gauge(nodes.get(&standing).copied().unwrap_or_default()))
            };
            Standing::ALL.map(value).into()
        });
        let index = self.index.clone();
        Gauges::register(
            registry,
            "kerf_slices",
            "ResourceSlices of the driver, as this process sees them",
            move || vec![(Labels::new(), gauge(index.lock().census(Now::read()).slices))],
        );
    }
}

fn admission(kind: Checked, verdict: Verdict) -> [(&'static str, &'static str); 2] {
    [("kind", kind.name()), ("result", verdict.name())]
}

fn writes(verb: Verb, result: &'static str) -> [(&'static str, &'static str); 2] {
    [("verb", verb.name()), ("result", result)]
}

fn gauge(many: usize) -> i64 {
    i64::try_from(many).unwrap_or(i64::MAX)
}
