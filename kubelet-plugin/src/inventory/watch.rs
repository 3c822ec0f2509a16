//! Reads the node again and again.

use std::sync::Arc;
use std::time::Duration;

use kerf_api::{Blocked, Gpu};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Inventory;
use crate::backoff::Backoff;
use crate::events::Events;

/// How often the node is read when nothing is known to have happened.
const REREAD: Duration = Duration::from_secs(60);

/// How long to wait after something happened before reading: pods start and end in groups.
const SETTLE: Duration = Duration::from_secs(1);

/// The first wait after NVML did not answer at all; doubles up to [`REREAD`].
const RETRY: Duration = Duration::from_secs(1);

/// When a reading that does not end is worth a line in the log, again and again.
const SLOW: Duration = Duration::from_secs(30);

/// When it is worth that nothing is offered any more: opening NVML for many GPUs whose driver is not kept loaded takes tens of
/// seconds, and no more.
const SILENT: Duration = Duration::from_secs(60);

/// Where inventories come from.
pub trait Reader: Send + Sync + 'static {
    /// Reads the node. Blocks, for ever if a GPU hangs.
    fn read(&self) -> Inventory;

    /// What there is to say of the node when it cannot be read, and why.
    fn nothing(&self, why: String) -> Inventory;
}

/// What reads the node and who hears of it.
pub struct Watcher {
    /// Reads the node.
    pub reader: Arc<dyn Reader>,
    /// Told when something has changed, such as a carved partition.
    pub changed: Arc<Notify>,
    /// Where a person is told of what is withheld.
    pub events: Events,
}

/// Reads at once, after each change and every minute, until `shutdown`. `inventory` changes only when a reading differs from
/// the one before. While one does not end nothing is offered: what is given out then could not be prepared.
pub async fn watch(watcher: Watcher, inventory: watch::Sender<Option<Inventory>>, shutdown: CancellationToken) {
    let publish = |reading: Inventory| {
        announce(inventory.borrow().as_ref(), &reading, &watcher.events);
        inventory.send_if_modified(|known| {
            let changed = known.as_ref() != Some(&reading);
            *known = Some(reading);
            changed
        });
    };
    let mut backoff = Backoff::new(RETRY, REREAD);
    loop {
        let reading = tokio::select! {
            reading = read(&watcher.reader, publish) => reading,
            () = shutdown.cancelled() => return,
        };
        let wait = match &reading {
            Some(reading) if reading.status.driver_version.is_some() => {
                backoff.succeeded();
                REREAD
            }
            _ => backoff.failed(),
        };
        reading.into_iter().for_each(publish);
        let settled = async {
            watcher.changed.notified().await;
            tokio::time::sleep(SETTLE).await;
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = settled => {}
            () = shutdown.cancelled() => return,
        }
    }
}

/// One reading; none where it panics. What there is to say meanwhile is published.
async fn read(reader: &Arc<dyn Reader>, publish: impl Fn(Inventory)) -> Option<Inventory> {
    let begun = Instant::now();
    let this = Arc::clone(reader);
    let mut reading = tokio::task::spawn_blocking(move || this.read());
    loop {
        match tokio::time::timeout(SLOW, &mut reading).await {
            Ok(Ok(inventory)) => return Some(inventory),
            Ok(Err(error)) => {
                tracing::error!(error = &error as &dyn std::error::Error, "reading the GPUs failed");
                return None;
            }
            Err(_) => {
                tracing::warn!("NVML has not answered for {} s", begun.elapsed().as_secs());
                if begun.elapsed() >= SILENT {
                    let why = format!(
                        "nothing is offered: NVML has not answered for {} s; does a GPU hang? See nvidia-smi and the kernel log \
                         of the node",
                        SILENT.as_secs()
                    );
                    publish(reader.nothing(why));
                }
            }
        }
    }
}

/// Tells a person what is withheld now and was not before, and the log also what is back.
fn announce(before: Option<&Inventory>, now: &Inventory, events: &Events) {
    let before = before.map(|before| &before.status);
    if let Some(message) = now.status.message.as_ref()
        && before.is_none_or(|before| before.message.as_ref() != Some(message))
    {
        tracing::warn!(why = message, "GPUs are missing");
        events.node("GpusUnavailable", message);
    }
    for gpu in &now.status.gpus {
        let known = before.and_then(|before| before.gpus.iter().find(|known| known.name == gpu.name));
        let known_withheld = known.and_then(|known| known.withheld.as_ref());
        match &gpu.withheld {
            Some(withheld) if known_withheld != Some(withheld) => {
                let (reason, message) = (&withheld.reason, &withheld.message);
                tracing::warn!(gpu = gpu.name, reason, why = message, offer = ?gpu.offer, "GPU withheld");
                events.node(reason, &format!("{}: {message}", gpu.name));
            }
            None if known.is_none() || known_withheld.is_some() => {
                tracing::info!(gpu = gpu.name, product = gpu.product, offer = ?gpu.offer, "GPU offered");
            }
            _ => {}
        }
        announce_blocked(known, gpu, events);
    }
}

/// The same of what stands in the way of some of a GPU's devices. One that only has other users is no news.
fn announce_blocked(before: Option<&Gpu>, now: &Gpu, events: &Events) {
    let before = before.map_or(&[][..], |before| &before.blocked);
    let is_in = |one: &Blocked, all: &[Blocked]| {
        all.iter().any(|other| (&other.reason, other.placement) == (&one.reason, one.placement))
    };
    for new in now.blocked.iter().filter(|blocked| !is_in(blocked, before)) {
        let Blocked { reason, message, usable, .. } = new;
        tracing::warn!(gpu = now.name, reason, why = message, usable, "devices are blocked");
        events.node(reason, &format!("{}: {message}", now.name));
    }
    for old in before.iter().filter(|blocked| !is_in(blocked, &now.blocked)) {
        let Blocked { reason, message, .. } = old;
        tracing::info!(gpu = now.name, reason, was = message, "devices are free again");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use kerf_api::GpuNodeStatus;

    use super::*;

    fn inventory(driver_version: Option<&str>, boot_id: &str) -> Inventory {
        let status = GpuNodeStatus {
            driver_version: driver_version.map(Into::into),
            boot_id: boot_id.into(),
            ..GpuNodeStatus::default()
        };
        Inventory { status, ..Inventory::default() }
    }

    struct Readings {
        read: Box<dyn Fn() -> Inventory + Send + Sync>,
    }

    impl Reader for Readings {
        fn read(&self) -> Inventory {
            (self.read)()
        }

        fn nothing(&self, why: String) -> Inventory {
            let status = GpuNodeStatus { message: Some(why), ..GpuNodeStatus::default() };
            Inventory { status, ..Inventory::default() }
        }
    }

    /// Starts watching; the n-th reading, counted from 0, is `nth(n)`.
    fn start(nth: fn(usize) -> Inventory) -> (Arc<Notify>, Arc<AtomicUsize>, watch::Receiver<Option<Inventory>>) {
        let count = Arc::new(AtomicUsize::new(0));
        let changed = Arc::new(Notify::new());
        let reads = Arc::clone(&count);
        let (events, _writer) = crate::events::channel("node-1", &crate::metrics::Metrics::default());
        let watcher = Watcher {
            reader: Arc::new(Readings { read: Box::new(move || nth(reads.fetch_add(1, Ordering::SeqCst))) }),
            changed: Arc::clone(&changed),
            events,
        };
        let (sender, receiver) = watch::channel(None);
        tokio::spawn(watch(watcher, sender, CancellationToken::new()));
        (changed, count, receiver)
    }

    #[tokio::test(start_paused = true)]
    async fn equal_readings_are_no_news() {
        let (_changed, count, mut receiver) = start(|n| inventory(Some("1"), if n < 3 { "a" } else { "b" }));
        receiver.changed().await.unwrap();
        assert_eq!(receiver.borrow_and_update().as_ref().unwrap().status.boot_id, "a");
        receiver.changed().await.unwrap();
        assert_eq!(receiver.borrow_and_update().as_ref().unwrap().status.boot_id, "b");
        assert_eq!(count.load(Ordering::SeqCst), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_is_read_soon_and_several_at_once() {
        let (changed, count, mut receiver) = start(|n| inventory(Some("1"), &n.to_string()));
        receiver.changed().await.unwrap();
        let begun = Instant::now();
        changed.notify_one();
        changed.notify_one();
        receiver.changed().await.unwrap();
        assert!(begun.elapsed() < 2 * SETTLE, "{:?}", begun.elapsed());
        assert_eq!(count.load(Ordering::SeqCst), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_missing_driver_is_tried_soon_then_less_often() {
        let (_changed, _count, mut receiver) = start(|n| inventory((n == 4).then_some("1"), ""));
        receiver.wait_for(Option::is_some).await.unwrap();
        let begun = Instant::now();
        receiver
            .wait_for(|known| known.as_ref().is_some_and(|known| known.status.driver_version.is_some()))
            .await
            .unwrap();
        let waited = begun.elapsed();
        assert!(Duration::from_secs(10) < waited && waited < Duration::from_secs(16), "1 + 2 + 4 + 8 s: {waited:?}");
    }
    #[tokio::test(start_paused = true)]
    async fn while_a_reading_hangs_nothing_is_offered() {
        let (let_go, goes) = std::sync::mpsc::channel::<()>();
        let goes = std::sync::Mutex::new(goes);
        let reads = AtomicUsize::new(0);
        let read = move || {
            // The second one hangs.
            if reads.fetch_add(1, Ordering::SeqCst) == 1 {
                goes.lock().unwrap().recv().unwrap();
            }
            inventory(Some("1"), "a")
        };
        let (events, _writer) = crate::events::channel("node-1", &crate::metrics::Metrics::default());
        let changed = Arc::new(Notify::new());
        let watcher =
            Watcher { reader: Arc::new(Readings { read: Box::new(read) }), changed: Arc::clone(&changed), events };
        let (sender, receiver) = watch::channel(None);
        tokio::spawn(watch(watcher, sender, CancellationToken::new()));
        let message = || receiver.borrow().as_ref().map(|known: &Inventory| known.status.message.clone());
        while message().is_none() {
            tokio::task::yield_now().await;
        }
        changed.notify_one();
        let begun = Instant::now();
        while message().unwrap().is_none() {
            // A blocked thread stops the clock of a test.
            tokio::time::advance(Duration::from_secs(1)).await;
            assert!(begun.elapsed() < 2 * SILENT);
        }
        assert!(message().unwrap().unwrap().contains("NVML has not answered for 60 s"));
        assert!(begun.elapsed() >= SILENT, "{:?}", begun.elapsed());
        let_go.send(()).unwrap();
        while message().unwrap().is_some() {
            tokio::task::yield_now().await;
        }
    }
}
