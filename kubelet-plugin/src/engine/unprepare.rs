//! Unprepare: the way of Prepare backwards, from what the journal says.

use std::time::{Duration, Instant};

use super::errors::ReleaseError;
use super::record::Phase;
use super::{Engine, Ledger, SpecError, Step, UnprepareError, is_uid};

/// How long to wait before a busy instance is tried again: at first, and at most.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(3));

impl Engine {
    /// Removes everything that was made for a claim: CDI file, instances, journal; MIG mode goes off with the last
    /// instance where that needs no reset. Succeeds for a claim of which nothing is known.
    ///
    /// An instance in use is tried again until the deadline; other claims may use the GPU meanwhile.
    ///
    /// # Errors
    /// The claim is still known then, and the next call goes on where this one ended.
    pub fn unprepare(&self, claim_uid: &str, deadline: Instant) -> Result<(), UnprepareError> {
        if !is_uid(claim_uid) {
            return Ok(());
        }
        let holder = |claim: &str| format!("the release of claim {claim}");
        let _claim = self.lock_claim(claim_uid, &holder(claim_uid), deadline)?;
        let Some(mut ledger) = Ledger::load(self, claim_uid) else {
            // Nothing but leftovers of a file that was cut off or set aside.
            self.specs.remove(claim_uid).map_err(SpecError)?;
            return Ok(self.journal.remove(claim_uid)?);
        };
        let claim = &ledger.record.claim;
        let holder = holder(&format!("{}/{} ({claim_uid})", claim.namespace, claim.name));
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
                Err(error @ UnprepareError::Release(ReleaseError::Busy { .. })) if left > pause => {
                    tracing::info!(%error, "waiting");
                    busy = Some(error);
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(longest);
                }
                released => return released,
            }
        }
    }

    fn release(&self, ledger: &mut Ledger<'_>) -> Result<(), UnprepareError> {
        ledger.record.adapt_to(&self.epoch());
        ledger.record.phase = Phase::Releasing;
        ledger.save()?;
        let uid = ledger.record.claim.uid.clone();
        // First, so that no new container gets what is about to go.
        self.step(Step::RemoveSpec, || self.specs.remove(&uid)).map_err(SpecError)?;
        let mut failed = None;
        for index in (0..ledger.record.partitions.len()).rev() {
            // What can go goes, also when another instance is in use.
            if let Err(error) = self.release_partition(ledger, index) {
                failed.get_or_insert(error);
            }
        }
        self.settle_modes(ledger.record.partitions.iter().map(|partition| partition.device.gpu()).collect());
        match failed {
            Some(error) => Err(error.into()),
            None => Ok(ledger.remove()?),
        }
    }
}
