//! Unprepare: the way of Prepare backwards, from what the journal says.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::errors::ReleaseError;
use super::record::Phase;
use super::stuck::{self, Condemned, Released};
use super::{Engine, Ledger, LockError, PreparedClaim, SpecError, Step, UnprepareError, is_uid};

/// How long to wait before a busy instance is tried again: at first, and at most.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(3));

/// Since when releases wait for a lock in vain, by the claim's UID. An NVML call on a sick GPU may never return, and keeps what
/// was locked for it: nothing can be journalled of that then, as the journal is written under the same lock.
///
/// Clones are one: engines come and go with the driver's sessions, and the wait goes on.
#[derive(Clone, Debug, Default)]
pub struct Waiting(Arc<Mutex<HashMap<String, Instant>>>);

impl Waiting {
    /// For how long a release has been waiting that has failed again, this time since `begun`.
    fn failed(&self, uid: &str, begun: Instant) -> Duration {
        self.lock().entry(uid.to_owned()).or_insert(begun).elapsed()
    }

    /// A release waits no more: it has got its locks, or the claim is wanted again.
    pub(super) fn ended(&self, uid: &str) {
        self.lock().remove(uid);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Engine {
    /// Removes everything that was made for a claim: CDI file, instances, journal; MIG mode goes off with the last
    /// instance where that needs no reset. Succeeds for a claim of which nothing is known.
    ///
    /// An instance in use is tried again until the deadline; other claims may use the GPU meanwhile. When a release has made
    /// no progress for [`Settings::patience`](super::Settings::patience), over all calls, the claim is condemned instead. So it
    /// is when it could lock neither claim nor GPUs for as long: then its journal does not say so, what it says is still held,
    /// and who has the lock, or the next reconcile, goes on.
    ///
    /// # Errors
    /// The claim is still known then, and the next call goes on where this one ended.
    pub fn unprepare(&self, claim_uid: &str, deadline: Instant) -> Result<Released, UnprepareError> {
        if !is_uid(claim_uid) {
            return Ok(Released::Gone);
        }
        let begun = Instant::now();
        let released = self
            .lock_claim(claim_uid, &format!("the release of claim {claim_uid}"), deadline)
            .map_err(UnprepareError::from)
            .and_then(|_claim| self.release_claim(claim_uid, deadline));
        let Err(UnprepareError::Lock(error @ LockError::Timeout { .. })) = released else {
            self.waiting.ended(claim_uid);
            return released;
        };
        if self.waiting.failed(claim_uid, begun) < self.patience {
            return Err(error.into());
        }
        let record = self.journal.load_all()?.into_iter().find(|record| record.claim.uid == claim_uid);
        let claim = record.map_or_else(|| PreparedClaim::unknown(claim_uid.to_owned()), |record| self.describe(record));
        Ok(Released::Condemned(Condemned { claim: Box::new(claim), why: error.to_string() }))
    }

    /// Releases a claim whose lock is held.
    pub(super) fn release_claim(&self, uid: &str, deadline: Instant) -> Result<Released, UnprepareError> {
        self.release_former(uid)?;
        match Ledger::load(self, uid)? {
            Some(ledger) => self.release_known(ledger, deadline),
            // Nothing but leftovers of a file that was cut off or set aside.
            None => {
                self.specs.remove(uid).map_err(SpecError)?;
                self.remove_metadata(uid);
                self.journal.remove(uid)?;
                Ok(Released::Gone)
            }
        }
    }

    /// Removes what a claim's containers were told. What stays is known, and goes with the next reconcile: it keeps no pod.
    pub(super) fn remove_metadata(&self, uid: &str) {
        if self.metadata.has(uid)
            && let Err(error) = self.step(Step::RemoveMetadata, || self.metadata.remove(uid))
        {
            tracing::warn!(%error, "the device metadata of a released claim stays for now");
        }
    }

    /// Releases a claim whose lock is held and whose record is at hand.
    pub(super) fn release_known(&self, mut ledger: Ledger<'_>, deadline: Instant) -> Result<Released, UnprepareError> {
        let holder = format!("the release of claim {}", ledger.record.describe_claim());
        let (mut pause, longest) = BACKOFF;
        let mut busy = None;
        loop {
            let gpus = match self.lock_gpus(&ledger.record.gpus(), &holder, deadline) {
                Ok(gpus) => gpus,
                // The reason to wait says more than that the wait was in vain.
                Err(error) => return Err(busy.unwrap_or(error.into())),
            };
            let released = self.release(&mut ledger);
            drop(gpus);
            let left = deadline.saturating_duration_since(Instant::now());
            match released {
                Ok(()) => return Ok(Released::Gone),
                Err(UnprepareError::Release(error)) if ledger.record.condemned && error.is_of_the_gpu() => {
                    let (claim, why) = (Box::new(self.describe(ledger.record)), error.to_string());
                    return Ok(Released::Condemned(Condemned { claim, why }));
                }
                Err(error @ UnprepareError::Release(ReleaseError::Busy { .. })) if left > pause => {
                    tracing::info!(%error, "waiting");
                    busy = Some(error);
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(longest);
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn release(&self, ledger: &mut Ledger<'_>) -> Result<(), UnprepareError> {
        // The epoch stays as it was: that no container of the claim lives is true of the next process, too.
        ledger.record.forget_what_ended_before(&self.epoch());
        ledger.record.phase = Phase::Releasing;
        // A disk that is full keeps no pod: to remove a file needs no room, and what is on the GPU needs no journal to go.
        ledger.save_if_possible();
        let uid = ledger.record.claim.uid.clone();
        // First, so that no new container gets what is about to go. Unless it is the one that tells what has to go.
        if ledger.missing.is_none() {
            self.step(Step::RemoveSpec, || self.specs.remove(&uid)).map_err(SpecError)?;
        }
        let (mut failed, mut progress) = (None, false);
        for index in (0..ledger.record.partitions.len()).rev() {
            // What can go goes, also when another instance is in use.
            let was_there = ledger.record.partitions[index].may_be_on_gpu();
            match self.release_partition(ledger, index) {
                Ok(()) => progress |= was_there,
                Err(error) => _ = failed.get_or_insert(error),
            }
        }
        self.settle_modes(ledger.record.partitions.iter().map(|partition| partition.device.gpu()).collect());
        let failed = failed.or_else(|| ledger.missing.take().map(ReleaseError::from));
        let Some(error) = failed else {
            self.remove_metadata(&uid);
            return Ok(ledger.remove()?);
        };
        if error.is_of_the_gpu() {
            ledger.record.note_stuck(stuck::seconds_since_boot(), progress, self.patience);
            ledger.save()?;
        }
        Err(error.into())
    }
}
