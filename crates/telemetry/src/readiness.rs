//! Whether a process is ready, and what it still waits for.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::watch;
use tracing::info;

/// Ready when nobody holds a [`Pending`] any more.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    pending: Arc<watch::Sender<BTreeSet<&'static str>>>,
}

/// Something that has to happen first. Dropping it says that it has.
#[derive(Debug)]
pub struct Pending {
    what: &'static str,
    readiness: Readiness,
}

impl Readiness {
    /// Not ready before the returned guard is dropped. `what` is what is waited for; one guard at a time has that name.
    pub fn wait_for(&self, what: &'static str) -> Pending {
        self.pending.send_modify(|pending| {
            pending.insert(what);
        });
        Pending { what, readiness: self.clone() }
    }

    /// What is still waited for; nothing when ready.
    pub fn pending(&self) -> Vec<&'static str> {
        self.pending.borrow().iter().copied().collect()
    }

    /// Returns when nothing is waited for, or nothing but `aside`: for work that does not need it.
    pub async fn ready_but_for(&self, aside: &str) {
        let _ = self.pending.subscribe().wait_for(|pending| pending.iter().all(|what| *what == aside)).await;
    }

    /// Returns when nothing is waited for.
    pub async fn ready(&self) {
        // The sender lives as long as `self`, so there always is an answer.
        let _ = self.pending.subscribe().wait_for(BTreeSet::is_empty).await;
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.readiness.pending.send_modify(|pending| {
            pending.remove(self.what);
        });
        let left = self.readiness.pending();
        if left.is_empty() {
            info!(done = self.what, "ready");
        } else {
            info!(done = self.what, pending = left.join(", "), "not ready yet");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn ready_when_nothing_is_pending() {
        let readiness = Readiness::default();
        readiness.ready().await;
        let (a, b) = (readiness.wait_for("a"), readiness.wait_for("b"));
        assert_eq!(readiness.pending(), ["a", "b"]);
        drop(a);
        assert_eq!(readiness.pending(), ["b"]);
        let waiting = tokio::spawn(async move { readiness.ready().await });
        drop(b);
        waiting.await.unwrap();
    }

    #[tokio::test]
    async fn not_everything_waits_for_everything() {
        let readiness = Readiness::default();
        let (a, _b) = (readiness.wait_for("a"), readiness.wait_for("b"));
        let waiting = readiness.clone();
        let waiting = tokio::spawn(async move { waiting.ready_but_for("b").await });
        drop(a);
        waiting.await.unwrap();
        assert_eq!(readiness.pending(), ["b"]);
    }
}
