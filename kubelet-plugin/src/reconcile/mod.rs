//! Keeps the node in step with the API server: releases claims that are gone there and that nobody else will release,
//! removes foreign instances where the admin wants it, and goes on with condemned claims.
//!
//! The kubelet releases what it knows. What it does not know any more (it lost its checkpoint, the node was away while
//! claims were deleted, a plugin of another name was there before) would hold its devices for ever.
//!
//! Architecture invariant: nothing waits for this, and this waits for no GPU. Claims are prepared and released while it runs,
//! and while it cannot run; what hangs is left behind.

mod decision;
mod detached;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt as _, stream};
use tokio::runtime::Handle;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

pub use decision::{Decision, GRACE, Gone, Standing, decide};

use detached::Detached;

use crate::claim::{self, ClaimRef, ClaimSource, SourceError};
use crate::dra::blocking;
use crate::engine::{Condemned, DeviceName, PreparedClaim, Released, RemovedForeign, Retried, Wishes};
use crate::events::Events;
use crate::failure::Failure;
use crate::metrics::Metrics;

/// How often the node is compared.
pub const ROUND: Duration = Duration::from_secs(60);

/// How often condemned claims are tried, as long as there are any.
pub const RETRY: Duration = Duration::from_secs(10);

/// How many claims are asked for at a time.
const CONCURRENT: usize = 8;

/// What a reconcile needs of the node. All of it blocks, except [`Node::has_condemned`].
pub trait Node: Send + Sync + 'static {
    /// Every claim of which there is anything here.
    fn known_claims(&self) -> Result<Vec<PreparedClaim>, Failure>;

    /// Releases a claim, if it is still gone when it is locked; `None` when nothing was done.
    fn release_left_behind(
        &self,
        claim_uid: &str,
        is_still_gone: &dyn Fn() -> bool,
    ) -> Result<Option<Released>, Failure>;

    /// Removes instances that no claim explains, where the policy says so.
    fn sweep_foreign(&self) -> Result<Vec<RemovedForeign>, Failure>;

    /// Brings GPUs that nothing uses to the MIG mode that is wanted of them.
    fn set_mig_modes(&self) -> Result<(), Failure>;

    /// Whether a claim may be condemned.
    fn has_condemned(&self) -> bool;

    /// Tries to remove what condemned claims have left.
    fn retry_condemned(&self) -> Result<Retried, Failure>;
}

/// Compares one node.
pub struct Reconciler<S, N> {
    /// Where claims are asked for.
    pub claims: S,
    /// The node.
    pub node: Arc<N>,
    /// The DRA driver that is served.
    pub driver_name: String,
    /// The node's name, which is that of its pool.
    pub node_name: String,
    /// What the controller wants of the GPUs: followed as soon as it is told.
    pub wishes: Wishes,
    /// Where a person is told what was removed.
    pub events: Events,
    /// Where failures are counted.
    pub metrics: Metrics,
}

/// What may hang, each by itself.
struct Work {
    list: Detached,
    release: Detached,
    retry: Detached,
    sweep: Detached,
    modes: Detached,
}

/// Compares at once and then every [`ROUND`], until `shutdown`.
pub async fn run<S: ClaimSource, N: Node>(reconciler: Reconciler<S, N>, shutdown: CancellationToken) {
    let reconciler = Arc::new(reconciler);
    let work = async {
        let mut gone = Gone::default();
        let work = Work {
            list: Detached::new("to list the claims"),
            release: Detached::new("to release a claim that is gone"),
            retry: Detached::new("to remove what condemned claims have left"),
            sweep: Detached::new("to look for foreign instances"),
            modes: Detached::new("to look at MIG modes"),
        };
        let mut wishes = reconciler.wishes.changes();
        let (mut rounds, mut retries) = (tokio::time::interval(ROUND), tokio::time::interval(RETRY));
        rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        retries.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = rounds.tick() => reconciler.round(&mut gone, &work).await,
                _ = retries.tick() => reconciler.retry(&work).await,
                Ok(()) = wishes.changed() => reconciler.follow_wishes(&work).await,
            }
        }
    };
    // Wherever it is cut off: the next process compares anew.
    let _ = shutdown.run_until_cancelled(work).await;
}

impl<S: ClaimSource, N: Node> Reconciler<S, N> {
    async fn round(self: &Arc<Self>, gone: &mut Gone, work: &Work) {
        let node = Arc::clone(&self.node);
        let claims = match work.list.run(blocking(move || node.known_claims())).await {
            Some(Ok(claims)) => claims,
            Some(Err(error)) => {
                tracing::warn!(%error, "not compared with the API server");
                return;
            }
            None => return,
        };
        gone.retain(&claims.iter().map(|claim| claim.uid.as_str()).collect());
        for (claim, standing) in self.ask(claims).await {
            match gone.judge(&claim.uid, standing, claim.earlier_boot, Instant::now()) {
                Decision::Leave | Decision::Ignore => {}
                Decision::Wait(since) => {
                    let seconds = since.elapsed().as_secs();
                    claim.span().in_scope(|| tracing::info!(seconds, "the claim is gone, and not released yet"));
                }
                Decision::Release => {
                    let span = claim.span();
                    work.release.run(Arc::clone(self).release(claim)).instrument(span).await;
                }
            }
        }
        self.follow_wishes(work).await;
    }

    /// Removes foreign instances and sets MIG modes, as far as it is wanted. That there is no driver the inventory says.
    async fn follow_wishes(self: &Arc<Self>, work: &Work) {
        let this = Arc::clone(self);
        let sweep = async move {
            let node = Arc::clone(&this.node);
            match blocking(move || node.sweep_foreign()).await {
                Ok(removed) => removed.iter().for_each(|removed| this.tell_swept(removed)),
                Err(error) => tracing::debug!(%error, "foreign instances are not looked for"),
            }
        };
        work.sweep.run(sweep).await;
        let node = Arc::clone(&self.node);
        if let Some(Err(error)) = work.modes.run(blocking(move || node.set_mig_modes())).await {
            tracing::debug!(%error, "MIG modes are not looked at");
        }
    }

    /// What the API server says about each claim. Those that are condemned are released already, whatever it says. Ends with
    /// the first sign that the API server does not answer: what is not asked for is not known.
    async fn ask(&self, mut claims: Vec<PreparedClaim>) -> Vec<(PreparedClaim, Standing)> {
        claims.retain(|claim| !claim.condemned);
        let names = self.names_for(&claims).await;
        let ask = |claim: PreparedClaim| async {
            let standing = self.standing(&claim, &names).await;
            (claim, standing)
        };
        let mut answers = stream::iter(claims).map(ask).buffer_unordered(CONCURRENT);
        let mut standings = Vec::new();
        while let Some((claim, standing)) = answers.next().await {
            match standing {
                Ok(standing) => standings.push((claim, standing)),
                Err(error) => {
                    let span = claim.span();
                    span.in_scope(|| tracing::warn!(%error, "nobody knows whether the claim is still there"));
                    if error.is_outage() {
                        break;
                    }
                }
            }
        }
        standings
    }

    /// The names of all claims, if one of these has none: its journal was lost. Absent where they are needed and not told.
    async fn names_for(&self, claims: &[PreparedClaim]) -> Option<HashMap<String, ClaimRef>> {
        if claims.iter().all(|claim| !claim.name.is_empty()) {
            return Some(HashMap::new());
        }
        let names = self.claims.names().await;
        names.inspect_err(|error| tracing::warn!(%error, "claims whose journal is lost cannot be looked up")).ok()
    }

    async fn standing(
        &self,
        claim: &PreparedClaim,
        names: &Option<HashMap<String, ClaimRef>>,
    ) -> Result<Standing, SourceError> {
        let PreparedClaim { uid, namespace, name, .. } = claim;
        let asked = if name.is_empty() {
            let Some(names) = names else { return Ok(Standing::Unknown) };
            match names.get(uid) {
                Some(asked) => asked.clone(),
                None => return Ok(Standing::Gone),
            }
        } else {
            ClaimRef { uid: uid.clone(), namespace: namespace.clone(), name: name.clone() }
        };
        let found = self.claims.get(&asked).await?;
        let is_here = claim::stands_here(&asked, found.as_ref(), &self.driver_name, &self.node_name);
        Ok(if is_here { Standing::Here } else { Standing::Gone })
    }

    async fn release(self: Arc<Self>, claim: PreparedClaim) {
        let (this, handle, asked) = (Arc::clone(&self), Handle::current(), claim.clone());
        let released = blocking(move || {
            let is_still_gone = || {
                handle.block_on(async {
                    let names = this.names_for(std::slice::from_ref(&asked)).await;
                    matches!(this.standing(&asked, &names).await, Ok(Standing::Gone))
                })
            };
            this.node.release_left_behind(&asked.uid, &is_still_gone)
        });
        let whose = claim.whose();
        match released.await {
            Ok(Some(Released::Gone)) => {
                let message = format!("{whose} is gone, and nobody had released it: removed {}", devices(&claim));
                tracing::warn!(what = message, "left behind");
                self.events.node("ClaimLeftBehind", &message);
            }
            Ok(Some(Released::Condemned(Condemned { why, .. }))) => {
                let message =
                    format!("{whose} is gone, and nobody had released it; what it used is not free yet: {why}");
                tracing::warn!(what = message, "left behind");
                self.events.node("ClaimLeftBehind", &message);
            }
            Ok(None) => tracing::debug!("left to the next round"),
            Err(failure) => {
                self.metrics.failed(failure.class);
                let class = failure.class.name();
                tracing::warn!(error = %failure, class, "gone, and not released: left to the next round");
            }
        }
    }

    async fn retry(self: &Arc<Self>, work: &Work) {
        if !self.node.has_condemned() {
            return;
        }
        let this = Arc::clone(self);
        let retry = async move {
            let node = Arc::clone(&this.node);
            match blocking(move || node.retry_condemned()).await {
                Ok(Retried { removed, .. }) => {
                    for claim in removed {
                        let message = format!("what {} had left is removed: {}", claim.whose(), devices(&claim));
                        claim.span().in_scope(|| tracing::info!(what = message, "condemned no more"));
                        this.events.node("InstanceRemoved", &message);
                    }
                }
                Err(error) => tracing::debug!(%error, "condemned claims are not tried"),
            }
        };
        work.retry.run(retry).await;
    }

    fn tell_swept(&self, RemovedForeign { gpu, instance }: &RemovedForeign) {
        let message = format!(
            "GPU instance {} (placement {}:{}) on the GPU at {gpu} belonged to no claim and was not in use: removed, as \
             --foreign-instances=delete of this node or foreignInstances: Delete of a GpuPolicy asks for",
            instance.id, instance.placement.start, instance.placement.size
        );
        let gpu = DeviceName::whole(*gpu);
        tracing::warn!(%gpu, gpu_instance = instance.id, what = message, "foreign instance removed");
        self.events.node("ForeignInstanceRemoved", &message);
    }
}

/// The devices of a claim by name, each once.
fn devices(claim: &PreparedClaim) -> String {
    let devices: BTreeSet<&str> = claim.devices.iter().map(String::as_str).collect();
    if devices.is_empty() { "its files".to_owned() } else { devices.into_iter().collect::<Vec<_>>().join(", ") }
}
