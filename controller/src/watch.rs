//! Feeds the index from watches on the API server.

use std::fmt::Debug;
use std::time::Duration;

use futures::{StreamExt as _, pin_mut};
use kerf_telemetry::Pending;
use kube::runtime::watcher as watch;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::index::{Feed, Index, SharedIndex};
use crate::liveness::Now;

/// Pause after the first error in a row; doubled with each. kube's own back-off starts anew with each try to list.
const PAUSE: Duration = Duration::from_millis(250);

/// The longest pause: an API server that is back shall not wait long for its watches.
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// How long the API server lets a watch run, in seconds; then it is begun anew where it ended. A watch whose connection is dead looks
/// like one that has nothing to show: kube gives it up 5 s after this time, and until then nothing is seen.
pub const TURN: u32 = 30;

/// How a watch begins.
pub struct Start<T> {
    /// Dropped when the index has seen everything for the first time.
    pub pending: Pending,
    /// What is done as long as nothing is seen.
    pub unseen: Unseen<T>,
}

/// What is done about objects that cannot be listed.
pub enum Unseen<T> {
    /// They are waited for.
    Wait,
    /// An API server that does not know the kind has none.
    NoneIfUnknown,
    /// A right to read them that does not come within some seconds is not waited for: this takes their place. Also where the
    /// right was lost since, so that a controller says the same as one that starts anew.
    IfForbidden(T),
}

/// How a watch was interrupted.
#[derive(Debug)]
pub enum Interruption<'a> {
    /// It begins again by itself.
    Anew,
    /// By an error.
    Error(&'a watcher::Error),
    /// It is refused as it was before: the API server is as it was.
    StillRefused(&'a watcher::Error),
}

/// Shows `index` what is there of one kind, until `stop`.
///
/// `convert` keeps of an object what the index needs, before anything is stored; it sees each one first. `interrupted` is told
/// whenever the watch was.
pub async fn feed<K, T>(
    index: SharedIndex,
    api: Api<K>,
    config: watcher::Config,
    convert: impl Fn(K) -> T,
    start: Start<T>,
    interrupted: impl Fn(Interruption<'_>),
    stop: CancellationToken,
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    T: Clone,
    Index: Feed<T>,
{
    let Start { pending, unseen } = start;
    let mut pending = Some(pending);
    let mut refused = None;
    let mut failed: Option<Instant> = None;
    let mut listed = Vec::new();
    let mut pause = PAUSE;
    let begin = || watch(api.clone(), config.clone().timeout(TURN)).take_until(stop.clone().cancelled_owned());
    let events = begin();
    pin_mut!(events);
    while let Some(event) = events.next().await {
        let now = Now::read();
        match event {
            Ok(Event::Apply(object)) => {
                pause = PAUSE;
                index.update(|index| index.apply(convert(object), now));
            }
            Ok(Event::Delete(object)) => index.update(|index| index.delete(convert(object), now)),
            Ok(Event::Init) => {
                listed.clear();
                if pending.is_none() && refused.is_none() {
                    interrupted(Interruption::Anew);
                }
            }
            Ok(Event::InitApply(object)) => listed.push(convert(object)),
            Ok(Event::InitDone) => {
                let objects = std::mem::take(&mut listed);
                index.update(|index| index.reset(objects, now));
                pause = PAUSE;
                (pending, refused) = (None, None);
            }
            Err(error) => {
                let refusal = refusal(&error);
                if refusal.is_some() && refusal == refused {
                    debug!(error = &error as &dyn std::error::Error, "a watch is still refused");
                    interrupted(Interruption::StillRefused(&error));
                } else {
                    warn!(error = &error as &dyn std::error::Error, "a watch was interrupted");
                    interrupted(Interruption::Error(&error));
                }
                refused = refusal;
                // A watch that went on meanwhile need not have shown anything.
                if failed.is_some_and(|failed| failed.elapsed() > 2 * LONGEST_PAUSE) {
                    pause = PAUSE;
                }
                if let Some(objects) = unseen.in_place(refusal, pause) {
                    index.update(|index| index.reset(objects, now));
                    pending = None;
                    // When they can be seen again they are listed, though they have not changed.
                    events.set(begin());
                }
                stop.run_until_cancelled(tokio::time::sleep(pause)).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
                failed = Some(Instant::now());
            }
        }
    }
}

/// The code of a refusal to show anything at all, of which a later try most likely hears again.
fn refusal(error: &watcher::Error) -> Option<u16> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => {
            Some(status.code).filter(|code| [403, 404].contains(code))
        }
        _ => None,
    }
}

impl<T: Clone> Unseen<T> {
    /// What takes the place of objects that cannot be listed; `None`: they are waited for, or what was seen stays. `pause` says
    /// for how long it has failed.
    fn in_place(&self, refusal: Option<u16>, pause: Duration) -> Option<Vec<T>> {
        match self {
            Unseen::NoneIfUnknown if refusal == Some(404) => Some(Vec::new()),
            Unseen::IfForbidden(object) if refusal == Some(403) && pause >= LONGEST_PAUSE => Some(vec![object.clone()]),
            _ => None,
        }
    }
}
