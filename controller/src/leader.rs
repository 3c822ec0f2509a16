//! Leader election over a Lease: of several controllers one writes.
//!
//! As everywhere in Kubernetes, a lease is another's until its record has not changed for its duration *by the own
//! clock*; the times in it are for people. Who leads stops before others may start: it gives up when it could not renew
//! for [`RENEW_DEADLINE`], which is shorter than [`DURATION`].
//!
//! A leader that stops gives its lease up, and the others, who are told, take it at once. One that is killed is replaced
//! after [`DURATION`] and at most two pauses of [`RETRY`]: within 15 s.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kerf_api::names;
use kube::Api;
use kube::api::PostParams;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

/// How long a lease is good for without renewal.
pub const DURATION: Duration = Duration::from_secs(10);

/// How long a leader goes on without being able to renew.
pub const RENEW_DEADLINE: Duration = Duration::from_secs(7);

/// Pause between two renewals, and between two looks at another's lease; up to a fifth longer.
pub const RETRY: Duration = Duration::from_secs(2);

/// How long one request may take.
const PATIENCE: Duration = Duration::from_secs(3);

/// Where the lease is kept.
pub trait Store: Send + Sync {
    /// The lease, if there is one.
    fn get(&self) -> impl Future<Output = kube::Result<Option<Lease>>> + Send;

    /// Creates the lease when it has no `resourceVersion`, else replaces that version. `None`: another came first.
    fn put(&self, lease: Lease) -> impl Future<Output = kube::Result<Option<Lease>>> + Send;
}

/// The lease in the cluster.
#[derive(Clone, Debug)]
pub struct ClusterStore {
    /// The leases of kerf's namespace.
    pub api: Api<Lease>,
    /// The lease's name.
    pub name: String,
}

impl Store for ClusterStore {
    async fn get(&self) -> kube::Result<Option<Lease>> {
        self.api.get_opt(&self.name).await
    }

    async fn put(&self, mut lease: Lease) -> kube::Result<Option<Lease>> {
        let params = PostParams::default();
        let replace = lease.metadata.resource_version.is_some();
        lease.metadata.name = Some(self.name.clone());
        let reply = if replace {
            self.api.replace(&self.name, &params, &lease).await
        } else {
            self.api.create(&params, &lease).await
        };
        match reply {
            Ok(lease) => Ok(Some(lease)),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
            // Deleted in between. But where nothing can be created, the namespace is missing.
            Err(kube::Error::Api(status)) if status.code == 404 && replace => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// One candidate.
pub struct Candidate<S> {
    store: S,
    identity: String,
    leading: watch::Sender<bool>,
    /// Told when the lease may be free.
    vacant: Arc<Notify>,
    /// Wall clock, for the times in the lease.
    clock: fn() -> Timestamp,
    /// A number from 0 to 1, that spreads the candidates' requests.
    jitter: fn() -> f64,
    /// The lease as last seen, and when it changed.
    seen: Option<(Lease, Instant)>,
    /// Whether kerf had been removed when this process came: it is a new kerf, and need not wait.
    after_removal: bool,
}

impl<S: Store> Candidate<S> {
    /// A candidate under the name `identity`, which no other may have. `leading` says whether it leads; a hint through
    /// `vacant` makes it look at the lease at once.
    pub fn new(
        store: S,
        identity: impl Into<String>,
        leading: watch::Sender<bool>,
        vacant: Arc<Notify>,
        clock: fn() -> Timestamp,
        jitter: fn() -> f64,
    ) -> Candidate<S> {
        let identity = identity.into();
        Candidate { store, identity, leading, vacant, clock, jitter, seen: None, after_removal: false }
    }

    /// Leads whenever it can, until `stop`; then gives the lease up, so that another need not wait.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut renewed = Instant::now();
        loop {
            let asked = Instant::now();
            // Not longer than the deadline allows, else a request that hangs would make two leaders.
            let patience =
                if *self.leading.borrow() { (renewed + RENEW_DEADLINE - asked).min(PATIENCE) } else { PATIENCE };
            let round = timeout(patience, self.round());
            let held = match stop.run_until_cancelled(round).await {
                None => break,
                Some(Ok(Ok(held))) => Some(held),
                Some(Ok(Err(error))) => {
                    warn!(error = &error as &dyn std::error::Error, "cannot read or renew the lease of the leader");
                    None
                }
                Some(Err(_)) => {
                    warn!("cannot read or renew the lease of the leader: no answer within {patience:?}");
                    None
                }
            };
            match held {
                Some(true) => {
                    // The others count from when they saw the renewal, which was not before it was asked for.
                    renewed = asked;
                    self.lead(true);
                }
                Some(false) => self.lead(false),
                None if renewed + RENEW_DEADLINE <= Instant::now() => self.lead(false),
                None => {}
            }
            let mut pause = RETRY.mul_f64(1.0 + (self.jitter)() / 5.0);
            let due = if *self.leading.borrow() { Some(renewed + RENEW_DEADLINE) } else { self.expiry() };
            if let Some(left) = due.map(|due| due.saturating_duration_since(Instant::now())) {
                pause = pause.min(left);
            }
            let wait = async {
                tokio::select! {
                    () = sleep(pause) => {}
                    () = self.vacant.notified() => {}
                }
            };
            if stop.run_until_cancelled(wait).await.is_none() {
                break;
            }
        }
        self.release().await;
    }

    fn lead(&self, lead: bool) {
        let changed = self.leading.send_replace(lead) != lead;
        match lead {
            true if changed => info!(identity = %self.identity, "this process leads"),
            false if changed => warn!(identity = %self.identity, "this process no longer leads"),
            _ => {}
        }
    }

    /// Takes or renews the lease if that may be. Whether it is ours now.
    async fn round(&mut self) -> kube::Result<bool> {
        let found = self.store.get().await?;
        if let Some(lease) = &found {
            let known = self.seen.as_ref().is_some_and(|(seen, _)| seen.spec == lease.spec);
            let removed = holder(lease) == names::REMOVED;
            // Once somebody of the new kerf has led, the next removal is one of this kerf.
            self.after_removal = removed && (self.after_removal || self.seen.is_none());
            if !known {
                self.seen = Some((lease.clone(), Instant::now()));
            }
            if !self.is_ours(lease) && self.is_held(lease) {
                debug!(holder = holder(lease), "another process leads");
                return Ok(false);
            }
        }
        let wanted = self.claim(found);
        match self.store.put(wanted).await? {
            Some(lease) => {
                self.seen = Some((lease, Instant::now()));
                self.after_removal = false;
                Ok(true)
            }
            None => Ok(false),
        }
    }

    fn is_ours(&self, lease: &Lease) -> bool {
        holder(lease) == self.identity
    }

    /// Whether somebody holds it, as far as this process has seen.
    fn is_held(&self, lease: &Lease) -> bool {
        let removed = self.after_removal && holder(lease) == names::REMOVED;
        !is_vacant(lease) && !removed && self.expiry().is_some()
    }

    /// When the lease that was last seen ends, if it is not renewed; `None` when that is over.
    fn expiry(&self) -> Option<Instant> {
        let (lease, since) = self.seen.as_ref()?;
        let seconds = lease.spec.as_ref().and_then(|spec| spec.lease_duration_seconds);
        let duration = seconds.and_then(|s| u64::try_from(s).ok()).map_or(DURATION, Duration::from_secs);
        Some(*since + duration).filter(|expiry| Instant::now() < *expiry)
    }

    /// The lease as it shall be when it is ours.
    fn claim(&self, found: Option<Lease>) -> Lease {
        let now = MicroTime((self.clock)());
        let ours = found.as_ref().is_some_and(|lease| self.is_ours(lease));
        let existed = found.is_some();
        let found = found.unwrap_or_default();
        let before = found.spec.unwrap_or_default();
        let transitions = before.lease_transitions.unwrap_or_default();
        Lease {
            metadata: ObjectMeta { managed_fields: None, ..found.metadata },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.identity.clone()),
                lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
                acquire_time: before.acquire_time.filter(|_| ours).or_else(|| Some(now.clone())),
                renew_time: Some(now),
                lease_transitions: Some(transitions.saturating_add(i32::from(existed && !ours))),
                preferred_holder: before.preferred_holder,
                strategy: before.strategy,
            }),
        }
    }

    /// Gives the lease up if it is ours.
    async fn release(&mut self) {
        if !self.leading.send_replace(false) {
            return;
        }
        let Some((mut lease, _)) = self.seen.take() else { return };
        lease.metadata.managed_fields = None;
        let spec = lease.spec.get_or_insert_default();
        spec.holder_identity = None;
        spec.lease_duration_seconds = Some(1);
        spec.renew_time = Some(MicroTime((self.clock)()));
        match timeout(PATIENCE, self.store.put(lease)).await {
            Ok(Ok(Some(_))) => info!(identity = %self.identity, "gave leadership up"),
            Ok(Ok(None)) => debug!("another process has taken the lease already"),
            Ok(Err(error)) => warn!(
                error = &error as &dyn std::error::Error,
                "cannot give leadership up; another process has to wait {DURATION:?}"
            ),
            Err(_) => warn!("cannot give leadership up: no answer; another process has to wait {DURATION:?}"),
        }
    }
}

/// Whether nobody holds a lease.
pub fn is_vacant(lease: &Lease) -> bool {
    holder(lease).is_empty()
}

fn holder(lease: &Lease) -> &str {
    lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default()
}
