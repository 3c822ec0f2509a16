//! Leader election in simulated time.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use kerf_controller::leader::{Candidate, DURATION, RENEW_DEADLINE, RETRY, Store};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

/// The lease of all candidates of a test; each has a connection of its own to it.
#[derive(Clone, Default)]
pub(crate) struct Memory {
    lease: Arc<Mutex<Option<Lease>>>,
    /// What becomes of this candidate's requests.
    connection: Arc<Mutex<Connection>>,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum Connection {
    #[default]
    Works,
    Fails,
    Hangs,
}

impl Memory {
    fn set(&self, connection: Connection) {
        *self.connection.lock().unwrap() = connection;
    }

    async fn connect(&self) -> kube::Result<()> {
        let connection = *self.connection.lock().unwrap();
        match connection {
            Connection::Works => Ok(()),
            Connection::Fails => Err(kube::Error::LinesCodecMaxLineLengthExceeded),
            Connection::Hangs => std::future::pending().await,
        }
    }

    pub(crate) fn holder(&self) -> Option<String> {
        self.lease.lock().unwrap().as_ref()?.spec.as_ref()?.holder_identity.clone()
    }
}

impl Store for Memory {
    async fn get(&self) -> kube::Result<Option<Lease>> {
        self.connect().await?;
        Ok(self.lease.lock().unwrap().clone())
    }

    async fn put(&self, mut lease: Lease) -> kube::Result<Option<Lease>> {
        self.connect().await?;
        let mut stored = self.lease.lock().unwrap();
        let version = stored.as_ref().and_then(|lease| lease.metadata.resource_version.clone());
        if version != lease.metadata.resource_version {
            return Ok(None);
        }
        let next = version.map_or(1, |version| version.parse::<u64>().unwrap() + 1);
        lease.metadata.resource_version = Some(next.to_string());
        *stored = Some(lease.clone());
        Ok(Some(lease))
    }
}

pub(crate) struct Running {
    memory: Memory,
    leading: watch::Receiver<bool>,
    /// As the watch on the lease does.
    vacant: Arc<Notify>,
    stop: CancellationToken,
}

impl Running {
    pub(crate) async fn leads(&mut self, within: Duration) {
        timeout(within, self.leading.wait_for(|leads| *leads)).await.expect("leads in time").unwrap();
    }

    pub(crate) async fn follows(&mut self, within: Duration) {
        timeout(within, self.leading.wait_for(|leads| !*leads)).await.expect("gives up in time").unwrap();
    }
}

/// A candidate on `lease` with its own connection.
pub(crate) fn start(lease: &Memory, identity: &str, clock: fn() -> Timestamp) -> Running {
    let memory = Memory { lease: lease.lease.clone(), connection: Arc::default() };
    let (sender, leading) = watch::channel(false);
    let stop = CancellationToken::new();
    let vacant = Arc::new(Notify::new());
    let candidate = Candidate::new(memory.clone(), identity, sender, vacant.clone(), clock, || 1.0);
    tokio::spawn(candidate.run(stop.clone()));
    Running { memory, leading, vacant, stop }
}

const A_MOMENT: Duration = Duration::from_millis(1);

/// Longer than any pause with its jitter.
fn retry() -> Duration {
    RETRY * 2
}

#[tokio::test(start_paused = true)]
async fn one_of_two_leads_and_renews() {
    let lease = Memory::default();
    let mut a = start(&lease, "a", Timestamp::now);
    a.leads(A_MOMENT).await;
    // Clocks of different machines do not matter.
    let b = start(&lease, "b", || Timestamp::UNIX_EPOCH);
    for _ in 0..100 {
        sleep(RETRY).await;
        assert!(*a.leading.borrow() && !*b.leading.borrow());
    }
    let spec = lease.lease.lock().unwrap().clone().unwrap().spec.unwrap();
    assert_eq!(spec.lease_transitions, Some(0));
    assert_eq!(spec.lease_duration_seconds, Some(10));
    assert!(spec.acquire_time <= spec.renew_time);
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_stops_hands_over_at_once() {
    let lease = Memory::default();
    let mut a = start(&lease, "a", Timestamp::now);
    a.leads(A_MOMENT).await;
    let mut b = start(&lease, "b", Timestamp::now);
    sleep(RETRY).await;
    a.stop.cancel();
    a.follows(A_MOMENT).await;
    assert_eq!(lease.holder(), None, "released");
    b.vacant.notify_one();
    b.leads(A_MOMENT).await;
    assert_eq!(lease.holder().as_deref(), Some("b"));
    assert_eq!(lease.lease.lock().unwrap().as_ref().unwrap().spec.as_ref().unwrap().lease_transitions, Some(1));
}

/// Without the hint, too, and whenever in its pause the other is.
#[tokio::test(start_paused = true)]
async fn a_leader_that_is_killed_is_replaced_within_15_s() {
    for moment in 0..30 {
        let lease = Memory::default();
        let mut a = start(&lease, "a", Timestamp::now);
        a.leads(A_MOMENT).await;
        sleep(Duration::from_millis(100) * moment).await;
        let mut b = start(&lease, "b", Timestamp::now);
        sleep(DURATION + Duration::from_millis(170) * moment).await;
        a.memory.set(Connection::Hangs);
        b.leads(Duration::from_secs(15)).await;
    }
}

/// A hint that is wrong, or late, changes nothing.
#[tokio::test(start_paused = true)]
async fn a_hint_takes_no_lease_away() {
    let lease = Memory::default();
    let mut a = start(&lease, "a", Timestamp::now);
    a.leads(A_MOMENT).await;
    let b = start(&lease, "b", Timestamp::now);
    for _ in 0..20 {
        b.vacant.notify_one();
        a.vacant.notify_one();
        sleep(RETRY / 4).await;
        assert!(*a.leading.borrow() && !*b.leading.borrow());
    }
}

/// Whatever becomes of its connection, the old leader has given up before the new one leads.
#[tokio::test(start_paused = true)]
async fn a_leader_that_is_cut_off_gives_up_first() {
    for connection in [Connection::Fails, Connection::Hangs] {
        let lease = Memory::default();
        let mut a = start(&lease, "a", Timestamp::now);
        a.leads(A_MOMENT).await;
        let mut b = start(&lease, "b", Timestamp::now);
        sleep(DURATION).await;
        a.memory.set(connection);
        let cut = Instant::now();
        a.follows(RENEW_DEADLINE + A_MOMENT).await;
        assert!(!*b.leading.borrow());
        b.leads(DURATION).await;
        assert!(cut.elapsed() > RENEW_DEADLINE);
        assert!(!*a.leading.borrow());

        a.memory.set(Connection::Works);
        sleep(DURATION * 3).await;
        assert!(*b.leading.borrow() && !*a.leading.borrow(), "the old one follows when it is back");
        a.stop.cancel();
        sleep(A_MOMENT).await;
        assert_eq!(lease.holder().as_deref(), Some("b"), "it does not release what is another's");
    }
}

#[tokio::test(start_paused = true)]
async fn a_short_outage_changes_nothing() {
    let lease = Memory::default();
    let mut a = start(&lease, "a", Timestamp::now);
    a.leads(A_MOMENT).await;
    for _ in 0..5 {
        a.memory.set(Connection::Fails);
        sleep(RENEW_DEADLINE / 2).await;
        a.memory.set(Connection::Works);
        sleep(retry()).await;
        assert!(*a.leading.borrow());
    }
}

/// A process that died and came back under its name need not wait for itself.
#[tokio::test(start_paused = true)]
async fn the_same_identity_goes_on() {
    let lease = Memory::default();
    let mut a = start(&lease, "a", Timestamp::now);
    a.leads(A_MOMENT).await;
    a.memory.set(Connection::Hangs);
    let mut again = start(&lease, "a", Timestamp::now);
    again.leads(A_MOMENT).await;
}
