//! The carve engine: makes the node match what a claim was allocated, and undoes it.
//!
//! [`Engine::prepare`] is a reconcile: it compares journal, GPU and CDI file with the claim and repairs what differs, so
//! that a repeat is free and a crash at any point is mended by the next call. [`Engine::unprepare`] goes the same way in
//! reverse. `STATES.md` beside this file lists every state, what is where in it, and how it is left.
//!
//! Every call blocks (carving takes of the order of a second on real hardware), holds one lock for its claim and one for
//! each GPU it touches, and gives up at its deadline.
//!
//! Architecture invariant: the engine never speaks to the API server or the kubelet. A claim is what its caller says.

mod busy;
mod capabilities;
mod carve;
mod cdi_edits;
mod claim;
mod device_name;
mod driver_files;
mod epoch;
mod errors;
mod foreign;
mod former;
mod gpu;
mod holders;
mod journal;
mod journal_file;
mod locks;
mod metadata;
mod mode;
mod prepare;
mod reconcile;
mod record;
mod recover;
mod shown;
mod spans;
mod steps;
mod stuck;
mod unprepare;
mod wishes;

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kerf_api::names;
use kerf_cdi::{Kind, SpecDir};
use kerf_nvml::{DriverRoot, Nvml, PciAddress};

pub(crate) use busy::processes;
pub use claim::{AllocatedDevice, Claim, FormerHold, PreparedClaim, PreparedDevice, PreparedPartition, SetAside};
pub use device_name::{DeviceName, DeviceNameError, Partition};
pub use errors::{
    GpuError, JournalError, LockError, MetadataError, OpenError, PrepareError, ReleaseError, SpecError, UnprepareError,
};
pub use foreign::{ForeignPolicy, RemovedForeign};
pub use former::{FormerDriver, FormerError, is_name as is_former_name};
pub use journal_file::JournalFile;
pub use spans::claim_span;
pub use steps::{Lock, NoWatch, Step, Watch};
pub use stuck::{Condemned, Released, Retried};
pub use unprepare::Waiting;
pub use wishes::{Wish, Wishes};

use epoch::Epoch;
use gpu::KnownGpus;
use journal::Journal;
use locks::{Guard, Locks};
use metadata::MetadataDir;
use record::Record;
use recover::Recovered;

use crate::hook::Hook;

/// How the names of claims' locks begin.
const CLAIM_LOCK: &str = "claim-";

/// Where the engine keeps and finds its things.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The driver.
    pub driver_root: DriverRoot,
    /// The DRA driver name that is served.
    pub driver_name: String,
    /// Journal directory; made, closed to other users.
    pub claims: PathBuf,
    /// Lock directory, shared with any other plugin process of this node; made.
    pub locks: PathBuf,
    /// CDI directory that the container runtime reads.
    pub cdi: PathBuf,
    /// Directory of what containers are told of their devices, by the path that the host has for it; made when needed.
    pub metadata: PathBuf,
    /// What containers get beside devices and the driver's files.
    pub injection: Injection,
    /// The kernel's boot id: instances of another boot are gone.
    pub boot_id: String,
    /// How long a release may make no progress before the claim is condemned, see [`Released::Condemned`].
    pub patience: Duration,
    /// What is wanted of the GPUs beyond what claims need.
    pub wishes: Wishes,
    /// Whose claims may hold devices beside ours.
    pub former: FormerDriver,
    /// What waits for a lock; one for all engines of a process.
    pub waiting: Waiting,
}

/// What containers get beside devices and the driver's files. Each has its own way to be wrong on some node, so each can be
/// left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Injection {
    /// Our hook, where container runtimes can run it.
    pub hook: Option<Hook>,
    /// Whether they are told of their devices in files.
    pub metadata: bool,
    /// Whether their processes join the groups that may open a device. Runtimes need to know CDI 0.7 for it.
    pub additional_gids: bool,
}

/// The carve engine of one node. All its methods block; one engine serves any number of threads.
pub struct Engine {
    nvml: Arc<dyn Nvml>,
    watch: Arc<dyn Watch>,
    driver_root: DriverRoot,
    driver_name: String,
    boot_id: String,
    patience: Duration,
    wishes: Wishes,
    former: FormerDriver,
    journal: Journal,
    locks: Locks,
    specs: SpecDir,
    metadata: MetadataDir,
    injection: Injection,
    gpus: KnownGpus,
    waiting: Waiting,
}

impl Engine {
    /// Opens the directories. Nothing on a GPU is looked at or changed.
    ///
    /// # Errors
    /// When a directory cannot be made or read. A damaged journal file is no error, see [`Engine::take_set_aside`].
    pub fn open(nvml: Arc<dyn Nvml>, settings: Settings) -> Result<Engine, OpenError> {
        Engine::open_watched(nvml, settings, Arc::new(NoWatch))
    }

    /// As [`Engine::open`], with someone who is told every step.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn open_watched(nvml: Arc<dyn Nvml>, settings: Settings, watch: Arc<dyn Watch>) -> Result<Engine, OpenError> {
        let Settings {
            driver_root,
            driver_name,
            claims,
            locks,
            cdi,
            metadata,
            injection,
            boot_id,
            patience,
            wishes,
            former,
            waiting,
        } = settings;
        let kind = Kind::new(names::CDI_VENDOR, names::CDI_CLASS).expect("constants that are legal CDI names");
        let engine = Engine {
            nvml,
            watch,
            driver_root,
            driver_name,
            boot_id,
            patience,
            wishes,
            former,
            journal: Journal::open(&claims)?,
            locks: Locks::open(&locks)?,
            specs: SpecDir::new(cdi, kind),
            metadata: MetadataDir(metadata),
            injection,
            gpus: KnownGpus::default(),
            waiting,
        };
        engine.locks.remove_leftovers(CLAIM_LOCK);
        engine.tidy_former();
        for uid in engine.journal.read_first()? {
            let _span = claim_span(&uid, "", "").entered();
            // Who holds the claim's lock now sets the file aside himself.
            if let Ok(_claim) = engine.lock_claim(&uid, "the start of the plugin", Instant::now()) {
                let unknown = engine.journal.load(&uid).err();
                unknown.iter().for_each(|error| tracing::warn!(claim.uid = uid, %error, "a claim is left alone"));
            }
        }
        Ok(engine)
    }

    /// Every claim that something may be in place for on this node, prepared or not.
    ///
    /// # Errors
    /// When the journal directory cannot be read.
    pub fn prepared_claims(&self) -> Result<Vec<PreparedClaim>, JournalError> {
        let records = match self.journal.take_first_reading() {
            Some(records) => self.with_lost(records),
            None => self.records()?,
        };
        Ok(self.describe_all(records))
    }

    /// The journal files that could not be used and were set aside since this was last asked: for a person to be told.
    /// What the claim's CDI file still tells is used in place of the journal.
    pub fn take_set_aside(&self) -> Vec<SetAside> {
        self.journal.take_set_aside()
    }

    /// The present epoch. Asked at each call: the driver can be loaded anew while nobody has a session with it.
    fn epoch(&self) -> Epoch {
        Epoch { boot_id: self.boot_id.clone(), driver_load: self.driver_root.driver_load() }
    }

    /// Takes a step under the eyes of the watch.
    fn step<T, E: fmt::Display>(&self, step: Step, take: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let _span = spans::step_span(step).entered();
        self.watch.before(step);
        let started = Instant::now();
        let taken = take();
        let took = started.elapsed();
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        match &taken {
            Ok(_) => tracing::debug!(us, "step taken"),
            Err(error) => tracing::info!(us, %error, "step failed"),
        }
        self.watch.after(step, took);
        taken
    }

    fn lock_claim(&self, uid: &str, holder: &str, deadline: Instant) -> Result<Guard<'_>, LockError> {
        self.wait(Lock::Claim, || self.locks.acquire_temporary(&format!("{CLAIM_LOCK}{uid}"), holder, deadline))
    }

    /// Locks GPUs in the order of their addresses: whoever locks several does it in this order, so no two wait for each
    /// other.
    fn lock_gpus(
        &self,
        gpus: &BTreeSet<PciAddress>,
        holder: &str,
        deadline: Instant,
    ) -> Result<Vec<Guard<'_>>, LockError> {
        let lock = |gpu| self.locks.acquire(&DeviceName::whole(gpu).to_string(), holder, deadline);
        gpus.iter().map(|gpu| self.wait(Lock::Gpu, || lock(*gpu))).collect()
    }

    /// Waits for a lock under the eyes of the watch.
    fn wait<T>(&self, lock: Lock, acquire: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let acquired = acquire();
        self.watch.waited(lock, started.elapsed());
        acquired
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("journal", &self.journal).field("locks", &self.locks).finish_non_exhaustive()
    }
}

/// A claim's record, and what of it is on disk.
struct Ledger<'a> {
    engine: &'a Engine,
    record: Record,
    saved: Option<Record>,
    /// Why a partition is known by name only, see [`Engine::complete`].
    missing: Option<GpuError>,
    /// The partitions whose creation was begun through this ledger, in order: what a failure of the call undoes.
    begun: Vec<DeviceName>,
}

impl<'a> Ledger<'a> {
    /// What is known of a claim: its journal, else what its CDI file tells, else `None`.
    ///
    /// # Errors
    /// When the journal is of a newer format.
    fn load(engine: &'a Engine, uid: &str) -> Result<Option<Ledger<'a>>, JournalError> {
        if let Some(mut record) = engine.journal.load(uid)? {
            let saved = Some(record.clone());
            let missing = engine.complete(&mut record);
            return Ok(Some(Ledger { engine, record, saved, missing, begun: Vec::new() }));
        }
        let recovered = engine.recover(uid);
        Ok(recovered.map(|Recovered { record, missing }| Ledger { missing, ..Ledger::new(engine, record) }))
    }

    /// A record of which nothing is on disk.
    fn new(engine: &'a Engine, record: Record) -> Ledger<'a> {
        Ledger { engine, record, saved: None, missing: None, begun: Vec::new() }
    }

    /// Makes the disk say what the record says.
    fn save(&mut self) -> Result<(), JournalError> {
        if self.saved.as_ref() != Some(&self.record) {
            self.engine.step(Step::WriteJournal, || self.engine.journal.write(&self.record))?;
            self.saved = Some(self.record.clone());
        }
        Ok(())
    }

    /// As [`Ledger::save`], where the way goes on without: what the disk says then is a hint that is out of date, and holds
    /// too much rather than too little.
    fn save_if_possible(&mut self) {
        if let Err(error) = self.save() {
            tracing::warn!(%error, "the journal is out of date");
        }
    }

    /// Ends the record.
    fn remove(&mut self) -> Result<(), JournalError> {
        let uid = &self.record.claim.uid;
        self.engine.step(Step::RemoveJournal, || self.engine.journal.remove(uid))?;
        self.saved = None;
        Ok(())
    }
}

/// Whether a text can be a claim's UID: part of file names, lock names and CDI names.
fn is_uid(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    (1..=63).contains(&text.len()) && text.bytes().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}
