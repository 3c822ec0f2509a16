//! How the leader keeps true what there is beside slices: item by item, after each change, at the pace of a [`Queue`].

use std::future::pending;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::features::ServerFeatures;
use crate::index::SharedIndex;
use crate::queue::{Outcome, Queue};

/// How long one request may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// When to look again without a change: time alone makes a plugin stale.
const REVIEW: Duration = Duration::from_secs(30);

/// One kind of thing that is kept true.
pub trait Upkeep: Send {
    /// The items about which something has changed since the last call. All of them after [`forget`](Upkeep::forget).
    fn changed(&mut self, features: ServerFeatures) -> Vec<String>;

    /// Makes one item true. How that ended, and when time alone makes another look necessary.
    fn look(&mut self, item: &str) -> impl Future<Output = (Outcome, Option<Instant>)> + Send;

    /// Another process may have changed everything.
    fn forget(&mut self);
}

/// What wakes an upkeep.
#[derive(Clone, Debug)]
pub struct Wakes {
    /// What the watches have seen.
    pub index: SharedIndex,
    /// What the server supports.
    pub features: watch::Receiver<Option<ServerFeatures>>,
    /// Whether this process leads.
    pub leading: watch::Receiver<bool>,
}

impl Wakes {
    /// Keeps it up while this process leads, until `stop`. A request that is under way when leadership is lost is given up.
    pub async fn keep(mut self, mut upkeep: impl Upkeep, stop: CancellationToken) {
        let mut revisions = self.index.subscribe();
        loop {
            let leads = async {
                let leads = self.leading.wait_for(|leading| *leading).await.is_ok();
                leads && self.features.wait_for(Option::is_some).await.is_ok()
            };
            if stop.run_until_cancelled(leads).await != Some(true) {
                return;
            }
            upkeep.forget();
            let mut leading = self.leading.clone();
            let lost = async { leading.wait_for(|leading| !*leading).await.is_ok() };
            let lead = lead(&mut upkeep, &mut revisions, &mut self.features);
            let until_lost = async {
                tokio::select! {
                    () = lead => false,
                    lost = lost => lost,
                }
            };
            if stop.run_until_cancelled(until_lost).await != Some(true) {
                return;
            }
        }
    }
}

/// Never ends by itself.
async fn lead(
    upkeep: &mut impl Upkeep,
    revisions: &mut watch::Receiver<u64>,
    features: &mut watch::Receiver<Option<ServerFeatures>>,
) {
    let mut queue = Queue::default();
    loop {
        revisions.mark_unchanged();
        if let Some(features) = *features.borrow_and_update() {
            let now = Instant::now();
            upkeep.changed(features).iter().for_each(|item| queue.mark(item, now));
        }
        while let Some(item) = queue.next(Instant::now()) {
            let (outcome, recheck) = upkeep.look(&item).await;
            queue.finish(&item, outcome, recheck, Instant::now());
        }
        let timer = async {
            match queue.next_due() {
                Some(due) => sleep_until(due).await,
                None => pending().await,
            }
        };
        tokio::select! {
            () = timer => {}
            () = sleep(REVIEW) => {}
            () = next(revisions) => {}
            () = next(features) => {}
        }
    }
}

async fn next<T>(changes: &mut watch::Receiver<T>) {
    if changes.changed().await.is_err() {
        // Whoever tells of changes has ended, and the process is about to.
        pending::<()>().await;
    }
}
