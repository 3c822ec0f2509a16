//! Feeds the index from watches on the API server.

use std::fmt::Debug;
use std::sync::Arc;

use futures::{StreamExt as _, pin_mut};
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt as _, watcher as watch};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::health::Pending;
use crate::index::{Feed, Index};
use crate::liveness::Now;
use crate::writer::SharedIndex;

/// Shows `index` what is there of one kind, until `stop`.
///
/// `convert` keeps of an object what the index needs, before anything is stored. `pending` is dropped when the index has
/// seen everything for the first time; `doubt` is notified whenever the watch was interrupted.
pub async fn feed<K, T>(
    index: SharedIndex,
    api: Api<K>,
    config: watcher::Config,
    convert: fn(K) -> T,
    pending: Pending,
    doubt: Arc<Notify>,
    stop: CancellationToken,
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    Index: Feed<T>,
{
    let mut pending = Some(pending);
    let mut listed = Vec::new();
    let events = watch(api, config).default_backoff().take_until(stop.cancelled_owned());
    pin_mut!(events);
    while let Some(event) = events.next().await {
        let now = Now::read();
        match event {
            Ok(Event::Apply(object)) => index.update(|index| index.apply(convert(object), now)),
            Ok(Event::Delete(object)) => index.update(|index| index.delete(convert(object), now)),
            Ok(Event::Init) => {
                listed.clear();
                if pending.is_none() {
                    doubt.notify_one();
                }
            }
            Ok(Event::InitApply(object)) => listed.push(convert(object)),
            Ok(Event::InitDone) => {
                let objects = std::mem::take(&mut listed);
                index.update(|index| index.reset(objects, now));
                pending = None;
            }
            Err(error) => {
                warn!(error = &error as &dyn std::error::Error, "a watch was interrupted");
                doubt.notify_one();
            }
        }
    }
}
