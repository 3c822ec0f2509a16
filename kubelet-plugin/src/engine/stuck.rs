//! Releases that make no progress: how long they have been tried, and when the kubelet is told that they are done.
//!
//! The kubelet keeps a pod until its claims are released. An instance that a stray process uses, or a GPU that fails, would
//! keep it for ever. After [`Settings::patience`](super::Settings::patience) the claim is *condemned*: the pod may end, the
//! claim's record still holds what is left, and [`Engine::retry_condemned`] goes on.

use std::time::{Duration, Instant};

use super::locks::BACKGROUND_PATIENCE;
use super::record::Record;
use super::{Engine, JournalError, Ledger, PreparedClaim};

/// How a claim was released.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Released {
    /// Nothing of it is left.
    Gone,
    /// Its pod may end; what is left is removed in the background.
    Condemned(Condemned),
}

/// A claim that was released although something of it is left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condemned {
    /// Which.
    pub claim: Box<PreparedClaim>,
    /// What is left, why, and what to do: one sentence.
    pub why: String,
}

/// What a round of the background has brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Retried {
    /// Claims of which nothing is left now.
    pub removed: Vec<PreparedClaim>,
    /// How many are left.
    pub left: usize,
}

impl Record {
    /// Notes, at `now` seconds since the boot, that a release has left something. Condemns the claim when that has been so
    /// for `patience`.
    pub(super) fn note_stuck(&mut self, now: u64, progress: bool, patience: Duration) {
        // A time in the future is of another boot, or was never true.
        let since = self.stuck_since.filter(|since| !progress && *since <= now).unwrap_or(now);
        self.stuck_since = Some(since);
        self.condemned |= now - since >= patience.as_secs();
    }

    /// The claim is wanted again, or goes on.
    pub(super) fn unstick(&mut self) {
        self.stuck_since = None;
        self.condemned = false;
    }
}

/// Seconds since the boot, suspend included: CLOCK_BOOTTIME (kernel/sys.c, `do_sysinfo`).
pub(super) fn seconds_since_boot() -> u64 {
    u64::try_from(rustix::system::sysinfo().uptime).unwrap_or_default()
}

impl Engine {
    /// Tries once to remove what is left of each condemned claim. Claims and GPUs that someone works on are left to the next
    /// round.
    ///
    /// # Errors
    /// When the journal directory cannot be read.
    pub fn retry_condemned(&self) -> Result<Retried, JournalError> {
        let mut retried = Retried::default();
        for record in self.journal.load_all()?.into_iter().filter(|record| record.condemned) {
            if self.retry(&record.claim.uid) {
                retried.removed.push(self.describe(record));
            } else {
                retried.left += 1;
            }
        }
        Ok(retried)
    }

    /// Whether nothing is left of a condemned claim.
    fn retry(&self, uid: &str) -> bool {
        let deadline = Instant::now() + BACKGROUND_PATIENCE;
        let Ok(_claim) = self.lock_claim(uid, "the removal of what an ended claim has left", deadline) else {
            return false;
        };
        // It may have been prepared again, or finished, since it was listed.
        let known = Ledger::load(self, uid).ok().flatten();
        let Some(ledger) = known.filter(|ledger| ledger.record.condemned) else { return false };
        let _span = ledger.record.span().entered();
        match self.release_known(ledger, deadline) {
            Ok(Released::Gone) => true,
            Ok(Released::Condemned(Condemned { why, .. })) => {
                tracing::debug!(why, "still condemned");
                false
            }
            Err(error) => {
                tracing::warn!(%error, "still condemned");
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Claim;
    use super::super::epoch::Epoch;
    use super::*;

    #[test]
    fn patience_ends_and_progress_renews_it() {
        let claim = Claim {
            uid: "a".into(),
            namespace: String::new(),
            name: String::new(),
            pod_claim_name: None,
            devices: Vec::new(),
        };
        let new = || Record::new(&claim, Epoch { boot_id: String::new(), driver_load: None });
        for (what, tries, condemned) in [
            ("the first try", &[(5, false)][..], false),
            ("not yet", &[(5, false), (124, false)], false),
            ("two minutes", &[(5, false), (60, false), (125, false)], true),
            ("something went", &[(5, false), (60, true), (125, false)], false),
            ("two minutes after something went", &[(5, false), (60, true), (180, false)], true),
            ("the node has rebooted", &[(5000, false), (60, false)], false),
            ("once condemned, always", &[(5, false), (125, false), (126, true)], true),
        ] {
            let mut record = new();
            tries.iter().for_each(|(now, progress)| record.note_stuck(*now, *progress, Duration::from_secs(120)));
            assert_eq!(record.condemned, condemned, "{what}");
        }
        let mut record = new();
        record.note_stuck(7, false, Duration::ZERO);
        assert!(record.condemned, "no patience at all");
        record.unstick();
        assert_eq!(record, new());
    }
}
