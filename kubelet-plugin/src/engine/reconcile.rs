//! The engine's part in comparing the node with the API server: what is known here, and the release of what nobody else
//! will release.

use std::collections::BTreeSet;
use std::time::Instant;

use super::locks::BACKGROUND_PATIENCE;
use super::record::Record;
use super::stuck::Released;
use super::{Engine, LockError, PreparedClaim, SpecError, UnprepareError, is_uid};

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
    /// `None` when nothing was done: the claim is not gone, or someone is at work on it or its GPU.
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
            if is_still_gone() { self.release_claim(claim_uid, soon()).map(Some) } else { Ok(None) }
        });
        match released {
            Err(UnprepareError::Lock(LockError::Timeout { .. })) => Ok(None),
            released => released,
        }
    }
}

impl PreparedClaim {
    /// A claim of which nothing is known but that it was here.
    fn unknown(uid: String) -> PreparedClaim {
        PreparedClaim { uid, ..PreparedClaim::default() }
    }
}
