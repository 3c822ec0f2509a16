//! The index in the hands of several tasks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, watch};

use super::Index;

/// The index, shared with the watches, and the bell that they ring.
#[derive(Clone, Debug)]
pub struct SharedIndex {
    index: Arc<Mutex<Index>>,
    bell: Arc<Notify>,
    /// The revision that was reached last, for those beside the writer.
    revision: watch::Sender<u64>,
}

impl SharedIndex {
    /// Shares `index`.
    pub fn new(index: Index) -> SharedIndex {
        SharedIndex { index: Arc::new(Mutex::new(index)), bell: Arc::default(), revision: watch::Sender::default() }
    }

    /// Changes the index and wakes the writer.
    pub fn update(&self, change: impl FnOnce(&mut Index)) {
        let revision = {
            let mut index = self.lock();
            change(&mut index);
            index.revision()
        };
        self.bell.notify_one();
        self.revision.send_if_modified(|last| std::mem::replace(last, revision) != revision);
    }

    /// Tells of every change of [`Index::revision`].
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.revision.subscribe()
    }

    /// Returns when the index has changed since the last call.
    pub(crate) async fn changed(&self) {
        self.bell.notified().await;
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Index> {
        // A panic elsewhere cannot leave the index half changed in a way that the next relist does not mend.
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
