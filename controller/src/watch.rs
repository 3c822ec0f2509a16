//! Feeds the index from watches on the API server.

use std::fmt::Debug;
use std::time::Duration;

use futures::{StreamExt as _, pin_mut};
use kerf_telemetry::Pending;
use kube::runtime::watcher as watch;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::index::{Feed, Index, SharedIndex};
use crate::liveness::Now;

/// Pause after the first error in a row; doubled with each. kube's own back-off starts anew with each try to list.
const PAUSE: Duration = Duration::from_millis(250);

/// The longest pause: an API server that is back shall not wait long for its watches.
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// How a watch begins.
pub struct Start<T> {
    /// Dropped when the index has seen everything for the first time.
    pub pending: Pending,
    /// What is done as long as nothing was seen.
    pub unseen: Unseen<T>,
}

/// What is done about objects that cannot be listed for the first time.
pub enum Unseen<T> {
    /// They are waited for.
    Wait,
    /// An API server that does not know the kind has none.
    NoneIfUnknown,
    /// A right to read them that does not come within some seconds is not waited for: this takes their place.
    IfForbidden(T),
}

/// Shows `index` what is there of one kind, until `stop`.
///
/// `convert` keeps of an object what the index needs, before anything is stored; it sees each one first. `doubt` is told whenever
/// the watch was interrupted, and by which error.
pub async fn feed<K, T>(
    index: SharedIndex,
    api: Api<K>,
    config: watcher::Config,
    convert: impl Fn(K) -> T,
    start: Start<T>,
    doubt: impl Fn(Option<&watcher::Error>),
    stop: CancellationToken,
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    Index: Feed<T>,
{
    let mut unseen = Some(start);
    let mut listed = Vec::new();
    let mut pause = PAUSE;
    let events = watch(api, config).take_until(stop.clone().cancelled_owned());
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
                if unseen.is_none() {
                    doubt(None);
                }
            }
            Ok(Event::InitApply(object)) => listed.push(convert(object)),
            Ok(Event::InitDone) => {
                let objects = std::mem::take(&mut listed);
                index.update(|index| index.reset(objects, now));
                pause = PAUSE;
                unseen = None;
            }
            Err(error) => {
                warn!(error = &error as &dyn std::error::Error, "a watch was interrupted");
                doubt(Some(&error));
                if let Some(start) = unseen.take_if(|start| start.unseen.is_meant_by(&error, pause)) {
                    index.update(|index| index.reset(start.unseen.into_objects(), now));
                }
                stop.run_until_cancelled(tokio::time::sleep(pause)).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}

impl<T> Unseen<T> {
    /// Whether a first list that fails so is not tried again before the index goes on. `pause` says for how long it has failed.
    fn is_meant_by(&self, error: &watcher::Error, pause: Duration) -> bool {
        let watcher::Error::InitialListFailed(kube::Error::Api(status)) = error else { return false };
        match self {
            Unseen::Wait => false,
            Unseen::NoneIfUnknown => status.code == 404,
            Unseen::IfForbidden(_) => status.code == 403 && pause >= LONGEST_PAUSE,
        }
    }

    fn into_objects(self) -> Vec<T> {
        match self {
            Unseen::Wait | Unseen::NoneIfUnknown => Vec::new(),
            Unseen::IfForbidden(object) => vec![object],
        }
    }
}
