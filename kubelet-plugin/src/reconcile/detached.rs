//! Work on the node that may never end: a call to a sick GPU can hang, and with it the thread that made it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tracing::Instrument as _;

/// How long to wait for a piece of work. On real hardware one takes of the order of a second.
const LIMIT: Duration = Duration::from_secs(30);

/// How many pieces of one kind may be left behind. Each has locked the GPU or the claim that keeps it, and those after it pass
/// over what is locked, so that there are about as many as GPUs that hang.
const MOST: usize = 8;

/// One kind of work. What takes too long goes on by itself.
pub(super) struct Detached {
    what: &'static str,
    free: Arc<Semaphore>,
}

impl Detached {
    pub(super) fn new(what: &'static str) -> Detached {
        Detached { what, free: Arc::new(Semaphore::new(MOST)) }
    }

    /// Does the work; `None` where it has not ended in time, or is not begun as too much of its kind has not ended.
    pub(super) async fn run<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Option<T> {
        let what = self.what;
        let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() else {
            tracing::warn!(
                what,
                "not done, as nothing of it ends any more: does a GPU hang? See nvidia-smi and the kernel log"
            );
            return None;
        };
        let work = async move {
            let done = work.await;
            drop(permit);
            done
        };
        let ended = tokio::time::timeout(LIMIT, tokio::spawn(work.in_current_span())).await;
        ended
            .inspect_err(|_| tracing::warn!(what, "not done after {} s: goes on in the background", LIMIT.as_secs()))
            .ok()?
            .inspect_err(|error| tracing::error!(what, %error, "not done"))
            .ok()
    }
}
