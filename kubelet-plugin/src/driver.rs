//! The NVIDIA driver as the plugin holds it: its library, and the engine over it.
//!
//! Both are opened when they are first needed and kept, as a session: opening NVML takes of the order of a second on real
//! hardware, which no pod should wait for. A session sees neither a reloaded driver nor a GPU that came back after a reset,
//! so one that failed on anything is closed as soon as nobody uses it, and the next call opens another. NVML counts how
//! often it was initialised within a process, and two sessions at a time would be one to it; that is why a session in use
//! is left alone.
//!
//! Journal and locks are on disk, so nothing is lost with a session. Claims are released without one, too: a driver that cannot
//! be used any more shall keep no pod.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kerf_nvml::{DriverRoot, DriverRootError, Library, Nvml, Uninitialized};
use tokio::sync::Notify;

use crate::claim::ClaimRef;
use crate::dra::Carver;
use crate::engine::{
    Claim, Condemned, Engine, FormerDriver, Injection, OpenError, PreparedClaim, PreparedDevice, ReleaseError,
    Released, RemovedForeign, Retried, Settings, UnprepareError, Waiting, Wishes,
};
use crate::events::Events;
use crate::failure::Failure;
use crate::inventory::{self, Host, Inventory, Reader};
use crate::metrics::Metrics;
use crate::paths::Paths;
use crate::reconcile::Node;

/// How long a release may make no progress before the pod is let go. Long enough for a process that was killed to end, and
/// well below what a person waits for.
const PATIENCE: Duration = Duration::from_secs(120);

/// How long to wait for another caller that opens or closes the driver. It takes of the order of a second, and what has to go on
/// without a driver shall still do so within the kubelet's patience.
const OPENING: Duration = Duration::from_secs(10);

/// Where the driver is, and what containers get beside it.
#[derive(Clone, Debug)]
pub struct DriverFiles {
    /// Where this program sees the host's root directory.
    pub host_root: PathBuf,
    /// The driver root, as the host calls it; looked for in the usual places when not given.
    pub driver_root: Option<PathBuf>,
    /// See [`Injection`].
    pub injection: Injection,
}

/// The driver of this node, opened on demand.
pub struct Driver {
    files: DriverFiles,
    driver_name: String,
    wishes: Wishes,
    former: FormerDriver,
    waiting: Waiting,
    paths: Paths,
    slot: Mutex<Slot>,
    /// Told when a try to open or close the driver has ended.
    settled: Condvar,
    events: Events,
    /// Told after every prepare and unprepare.
    changed: Arc<Notify>,
    metrics: Metrics,
    /// Whether a claim may be condemned.
    has_condemned: AtomicBool,
}

/// Where the session is.
#[derive(Default)]
struct Slot {
    session: Option<Arc<Session>>,
    /// Whether a caller is about to make or to end one. It may never come back: NVML can hang on a sick GPU.
    changing: bool,
}

/// Ends a try to open or close the driver, also when it panics, and lets the next caller go on.
struct Changing<'a>(&'a Driver);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.lock().changing = false;
        self.0.settled.notify_all();
    }
}

struct Session {
    nvml: Arc<dyn Nvml>,
    engine: Engine,
    root: DriverRoot,
}

/// Where claims are released.
struct Releasing {
    session: Arc<Session>,
    /// Why the session has no driver, if so.
    missing: Option<DriverError>,
}

impl Releasing {
    /// The outcome with the reason that says most: without a driver that is why it cannot be used.
    fn explain(self, released: Result<Released, UnprepareError>) -> Result<Released, Failure> {
        match (released, self.missing) {
            (Ok(Released::Condemned(Condemned { claim, .. })), Some(error)) => {
                let why = format!("it is removed when the driver can be used again: {error}");
                Ok(Released::Condemned(Condemned { claim, why }))
            }
            (Err(UnprepareError::Release(ReleaseError::Gpu(_))), Some(error)) => {
                Err(DriverError::StillHeld(Box::new(error)).into())
            }
            (released, _) => Ok(released?),
        }
    }
}

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// No driver is found.
    #[error("the NVIDIA driver on this node cannot be used: {0}")]
    Root(#[from] DriverRootError),
    /// NVML cannot be loaded or does not start.
    #[error("the NVIDIA driver on this node cannot be used: {0}")]
    Library(#[from] kerf_nvml::OpenError),
    /// Another caller is at it, and does not come back.
    #[error(
        "the NVIDIA driver on this node has not answered for {} s since it was opened or closed; does a GPU hang? See nvidia-smi and the \
         kernel log of the node", OPENING.as_secs()
    )]
    Opening,
    /// The engine's files cannot be used.
    #[error(transparent)]
    Engine(#[from] OpenError),
    /// A claim has partitions, and to take them back the driver is needed.
    #[error("the claim's devices cannot be taken back yet, the kubelet tries again by itself: {0}")]
    StillHeld(Box<DriverError>),
}

impl Driver {
    /// Nothing is opened yet. `changed` is told when a claim was prepared or released.
    pub fn new(
        files: DriverFiles,
        driver_name: &str,
        paths: &Paths,
        wishes: Wishes,
        events: Events,
        changed: Arc<Notify>,
        metrics: Metrics,
    ) -> Driver {
        Driver {
            files,
            driver_name: driver_name.to_owned(),
            wishes,
            former: FormerDriver::new(&paths.plugin_directory, &paths.cdi),
            waiting: Waiting::default(),
            paths: paths.clone(),
            slot: Mutex::default(),
            settled: Condvar::new(),
            events,
            changed,
            metrics,
            has_condemned: AtomicBool::new(true),
        }
    }

    /// The driver that was here before, to be told whether it runs.
    pub fn former(&self) -> &FormerDriver {
        &self.former
    }

    /// Reads the node. Blocks.
    pub fn read_inventory(&self) -> Inventory {
        let session = match self.session() {
            Ok(session) => session,
            Err(error) => return self.nothing(format!("nothing is offered: {error}")),
        };
        let holding = || session.engine.prepared_claims().map_err(|error| error.to_string());
        let host = self.host(Some(session.root.clone()), session.engine.former_doubt());
        let inventory = inventory::read(&*session.nvml, &host, &holding);
        self.tell_set_aside(&session.engine);
        drop(session);
        if inventory.suspect {
            self.close_unless_in_use();
        }
        inventory
    }

    fn tell_set_aside(&self, engine: &Engine) {
        for set_aside in engine.take_set_aside() {
            let message = format!(
                "the journal of claim {} was damaged ({}) and lies now at {}; what can be known of the claim is taken from \
                 its CDI file",
                set_aside.claim_uid,
                set_aside.reason,
                set_aside.path.display()
            );
            tracing::error!(what = message, "journal damaged");
            self.events.node("JournalDamaged", &message);
        }
    }

    fn host(&self, driver_root: Option<DriverRoot>, former_doubt: Option<String>) -> Host {
        Host {
            driver_name: self.driver_name.clone(),
            boot_id: match &driver_root {
                Some(root) => root.boot_id(),
                None => DriverRoot::below(&self.files.host_root, Path::new("/")).boot_id(),
            },
            wishes: self.wishes.clone(),
            driver_root,
            former_doubt,
        }
    }

    /// The session, opened if there is none. Callers wait for each other while one opens or closes it, up to [`OPENING`].
    fn session(&self) -> Result<Arc<Session>, DriverError> {
        let deadline = Instant::now() + OPENING;
        let mut slot = self.lock();
        while slot.changing {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(DriverError::Opening);
            }
            slot = self.settled.wait_timeout(slot, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        if let Some(session) = &slot.session {
            return Ok(Arc::clone(session));
        }
        let _changing = self.change(slot);
        let session = Arc::new(self.open()?);
        self.lock().session = Some(Arc::clone(&session));
        Ok(session)
    }

    /// Lets nobody but the caller open or close the driver until what is returned is dropped.
    fn change(&self, mut slot: MutexGuard<'_, Slot>) -> Changing<'_> {
        slot.changing = true;
        Changing(self)
    }

    fn lock(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self) -> Result<Session, DriverError> {
        let DriverFiles { host_root, driver_root, .. } = &self.files;
        let root = match driver_root {
            Some(root) => DriverRoot::below(host_root, root),
            None => DriverRoot::detect(host_root, DriverRoot::CANDIDATES)?,
        };
        let session = self.session_over(Arc::new(Library::open(&root)?), root)?;
        tracing::info!(driver_root = %session.root.host_path(session.root.path()).display(), "NVIDIA driver opened");
        Ok(session)
    }

    /// The session; where the driver cannot be used, one in which no GPU answers. What has nothing on a GPU is released there
    /// as anywhere, and the rest is condemned when its time has come.
    fn releasing(&self) -> Result<Releasing, DriverError> {
        let error = match self.session() {
            Ok(session) => return Ok(Releasing { session, missing: None }),
            Err(DriverError::Engine(error)) => return Err(error.into()),
            Err(error) => error,
        };
        let DriverFiles { host_root, driver_root, .. } = &self.files;
        let root = DriverRoot::below(host_root, driver_root.as_deref().unwrap_or(Path::new("/")));
        let session = self.session_over(Arc::new(Uninitialized), root)?;
        self.tell_set_aside(&session.engine);
        Ok(Releasing { session: Arc::new(session), missing: Some(error) })
    }

    fn session_over(&self, nvml: Arc<dyn Nvml>, root: DriverRoot) -> Result<Session, OpenError> {
        let settings = Settings {
            driver_root: root.clone(),
            driver_name: self.driver_name.clone(),
            claims: self.paths.claims.clone(),
            locks: self.paths.locks.clone(),
            cdi: self.paths.cdi.clone(),
            metadata: self.paths.metadata.clone(),
            injection: self.files.injection.clone(),
            boot_id: root.boot_id(),
            patience: PATIENCE,
            wishes: self.wishes.clone(),
            former: self.former.clone(),
            waiting: self.waiting.clone(),
        };
        let engine = Engine::open_watched(Arc::clone(&nvml), settings, Arc::new(self.metrics.clone()))?;
        Ok(Session { nvml, engine, root })
    }

    /// What is left of the claim is told at the node as well, by the inventory.
    fn report_condemned(&self, Condemned { claim, why }: &Condemned) {
        self.has_condemned.store(true, Ordering::Relaxed);
        tracing::warn!(why, "released, and removed later");
        if !claim.name.is_empty() {
            let claim =
                ClaimRef { uid: claim.uid.clone(), namespace: claim.namespace.clone(), name: claim.name.clone() };
            self.events.claim_condemned(&claim, &format!("the pod can end, what it used is not given out yet: {why}"));
        }
    }

    fn close_unless_in_use(&self) {
        let mut slot = self.lock();
        // Nobody can get at it while the mutex is held, so a count of one stays one.
        if let Some(session) = slot.session.take_if(|session| Arc::strong_count(session) == 1) {
            let _changing = self.change(slot);
            drop(session);
            tracing::info!("NVIDIA driver closed, to be opened anew");
        }
    }
}

impl Reader for Driver {
    fn read(&self) -> Inventory {
        self.read_inventory()
    }

    fn nothing(&self, why: String) -> Inventory {
        inventory::nothing(&self.host(None, None), why)
    }
}

impl Carver for Driver {
    fn prepare(&self, claim: &Claim, deadline: Instant) -> Result<Vec<PreparedDevice>, Failure> {
        let prepared = self.session()?.engine.prepare(claim, deadline);
        self.changed.notify_one();
        Ok(prepared?)
    }

    fn unprepare(&self, uid: &str, deadline: Instant) -> Result<(), Failure> {
        let releasing = self.releasing()?;
        let released = releasing.session.engine.unprepare(uid, deadline);
        self.changed.notify_one();
        if let Released::Condemned(condemned) = releasing.explain(released)? {
            self.report_condemned(&condemned);
        }
        Ok(())
    }
}

impl Node for Driver {
    fn known_claims(&self) -> Result<Vec<PreparedClaim>, Failure> {
        let claims = self.releasing()?.session.engine.known_claims()?;
        if claims.iter().any(|claim| claim.condemned) {
            self.has_condemned.store(true, Ordering::Relaxed);
        }
        Ok(claims)
    }

    fn release_left_behind(
        &self,
        claim_uid: &str,
        is_still_gone: &dyn Fn() -> bool,
    ) -> Result<Option<Released>, Failure> {
        let releasing = self.releasing()?;
        let released = releasing.session.engine.release_left_behind(claim_uid, is_still_gone).transpose();
        self.changed.notify_one();
        let released = released.map(|released| releasing.explain(released)).transpose()?;
        if matches!(released, Some(Released::Condemned(_))) {
            self.has_condemned.store(true, Ordering::Relaxed);
        }
        Ok(released)
    }

    fn sweep_foreign(&self) -> Result<Vec<RemovedForeign>, Failure> {
        let removed = self.session()?.engine.sweep_foreign();
        if !removed.is_empty() {
            self.changed.notify_one();
        }
        Ok(removed)
    }

    fn set_mig_modes(&self) -> Result<(), Failure> {
        if self.session()?.engine.set_mig_modes() {
            self.changed.notify_one();
        }
        Ok(())
    }

    fn has_condemned(&self) -> bool {
        self.has_condemned.load(Ordering::Relaxed)
    }

    fn retry_condemned(&self) -> Result<Retried, Failure> {
        let retried = self.releasing()?.session.engine.retry_condemned()?;
        self.has_condemned.store(retried.left > 0, Ordering::Relaxed);
        if !retried.removed.is_empty() {
            self.changed.notify_one();
        }
        Ok(retried)
    }
}
