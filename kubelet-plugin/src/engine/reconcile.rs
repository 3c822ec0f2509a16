//! The engine's part in comparing the node with the API server: what is known here, and the release of what nobody else
//! will release.

use std::collections::BTreeSet;
use std::time::Instant;

use kerf_nvml::PciAddress;

use super::locks::BACKGROUND_PATIENCE;
use super::record::Record;
use super::stuck::Released;
use super::{
    DeviceName, Engine, GpuError, JournalError, Ledger, LockError, PreparedClaim, SpecError, UnprepareError, busy,
    is_uid,
};

impl Engine {
    /// Every claim of which there is anything on this node: those of [`Engine::prepared_claims`], and by their bare UID those
    /// of which only files are left that tell nothing.
    ///
    /// # Errors
    /// When the journal or the CDI directory cannot be read.
    pub fn known_claims(&self) -> Result<Vec<PreparedClaim>, UnprepareError> {
        let records = self.records()?;
        let mut leftovers = self.leftovers(&records)?;
        let known: BTreeSet<_> = records.iter().map(|record| record.claim.uid.clone()).collect();
        leftovers.extend(self.metadata.uids().into_iter().filter(|uid| is_uid(uid) && !known.contains(uid)));
        let mut known = self.describe_all(records);
        known.extend(leftovers.into_iter().map(PreparedClaim::unknown));
        Ok(known)
    }

    /// The claims that have files but no record: set aside, cut off, or unreadable.
    pub(super) fn leftovers(&self, records: &[Record]) -> Result<BTreeSet<String>, UnprepareError> {
        let mut uids = self.journal.all_uids()?;
        uids.extend(self.specs.list().map_err(SpecError)?);
        let known: BTreeSet<_> = records.iter().map(|record| &record.claim.uid).collect();
        uids.retain(|uid| is_uid(uid) && !known.contains(uid));
        Ok(uids)
    }

    /// Releases a claim that is gone from the API server, as [`Engine::unprepare`] does. `is_still_gone` is asked with the
    /// claim locked: a Prepare that came meanwhile waits, and finds the claim released or in place. It may block.
    ///
    /// `None` when nothing was done: the claim is not gone, someone is at work on it or its GPU, or a process uses what it
    /// holds. A pod that was deleted by force runs on for its grace period, which the kubelet grants it all the same, and a
    /// whole GPU would be given to the next one without anything in the way.
    ///
    /// # Errors
    /// What [`Engine::unprepare`] says, except that a lock is held.
    pub fn release_left_behind(
        &self,
        claim_uid: &str,
        is_still_gone: &dyn Fn() -> bool,
    ) -> Result<Option<Released>, UnprepareError> {
        let soon = || Instant::now() + BACKGROUND_PATIENCE;
        let holder = format!("the release of claim {claim_uid}, which is gone");
        let released = self.lock_claim(claim_uid, &holder, soon()).map_err(UnprepareError::from).and_then(|_claim| {
            if is_still_gone() && !self.runs_on(claim_uid)? {
                return self.release_claim(claim_uid, soon()).map(Some);
            }
            Ok(None)
        });
        match released {
            Err(UnprepareError::Lock(LockError::Timeout { .. })) => Ok(None),
            released => released,
        }
    }

    /// Whether a process uses a whole GPU that a locked claim holds, or nobody can tell. What else it holds is an instance,
    /// which the driver does not let go of then.
    fn runs_on(&self, uid: &str) -> Result<bool, JournalError> {
        let record = match Ledger::load(self, uid)? {
            Some(ledger) => Some(ledger.record),
            None => match self.former_records() {
                Ok(former) => former.into_iter().find(|record| record.claim.uid == uid),
                Err(error) => {
                    tracing::info!(%error, "the claim is gone, and nobody can tell what it has: not released yet");
                    return Ok(true);
                }
            },
        };
        // What used the GPU in another epoch has ended with it.
        let Some(record) = record.filter(|record| self.epoch().may_be(&record.epoch())) else { return Ok(false) };
        let mut gpus = record.held().filter(|device| device.as_partition().is_none());
        let is_used = |device: &DeviceName| match self.users_of(device.gpu()) {
            Ok(users) => users.is_some_and(|users| {
                tracing::info!(%device, users, "the claim is gone, and its GPU is in use: not released yet");
                true
            }),
            Err(error) => {
                tracing::info!(%device, %error, "the claim is gone, and nobody can tell whether its GPU is in use");
                true
            }
        };
        Ok(gpus.any(is_used))
    }

    /// The processes on a GPU, for a person; none on one that is gone.
    fn users_of(&self, address: PciAddress) -> Result<Option<String>, GpuError> {
        let Some(gpu) = self.find_gpu_if_present(address)? else { return Ok(None) };
        Ok(busy::processes(&self.processes(&gpu)?, None))
    }
}

impl PreparedClaim {
    /// A claim of which nothing is known but that it was here.
    pub(super) fn unknown(uid: String) -> PreparedClaim {
        PreparedClaim { uid, ..PreparedClaim::default() }
    }
}
