//! What becomes of a claim that is known on the node, given what the API server says about it. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

/// For how long a claim has to be gone from the API server before it is released here.
///
/// Objects can vanish before containers end (forced deletion): the kubelet then stops the containers and releases the claim
/// itself, after the pod's grace period, which may be longer than this. Until then processes on its GPUs keep it from being
/// released (`Engine::release_left_behind`); a container without any has nothing that would protect it.
pub const GRACE: Duration = Duration::from_secs(120);

/// What the API server says about a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It is there, and allocated a device of this driver on this node.
    Here,
    /// It is not there, another has its name, it is not allocated, or it is allocated elsewhere.
    Gone,
    /// No answer, or an error.
    Unknown,
}

/// What to do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing, and forget that it ever was gone.
    Leave,
    /// Nothing, but it has been gone since then.
    Wait(Instant),
    /// Nothing is learnt: what was known stays.
    Ignore,
    /// Release it.
    Release,
}

/// Decides about one claim. `gone_since`: since when it is known to be gone without a break. `earlier_boot`: whether it was
/// last prepared before the node booted, so that no container of it can live.
pub fn decide(standing: Standing, gone_since: Option<Instant>, earlier_boot: bool, now: Instant) -> Decision {
    match (standing, gone_since) {
        (Standing::Here, _) => Decision::Leave,
        (Standing::Unknown, _) => Decision::Ignore,
        (Standing::Gone, _) if earlier_boot => Decision::Release,
        (Standing::Gone, Some(since)) if now.saturating_duration_since(since) >= GRACE => Decision::Release,
        (Standing::Gone, since) => Decision::Wait(since.unwrap_or(now)),
    }
}

/// Since when claims are gone, by UID.
#[derive(Clone, Debug, Default)]
pub struct Gone(BTreeMap<String, Instant>);

impl Gone {
    /// Decides about a claim, and remembers.
    pub fn judge(&mut self, uid: &str, standing: Standing, earlier_boot: bool, now: Instant) -> Decision {
        let decision = decide(standing, self.0.get(uid).copied(), earlier_boot, now);
        match decision {
            Decision::Leave => _ = self.0.remove(uid),
            Decision::Wait(since) => _ = self.0.insert(uid.to_owned(), since),
            Decision::Ignore | Decision::Release => {}
        }
        decision
    }

    /// Forgets claims that are not known on the node any more.
    pub fn retain(&mut self, known: &BTreeSet<&str>) {
        self.0.retain(|uid, _| known.contains(uid.as_str()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn a_claim_is_released_when_it_is_gone_for_long_or_for_sure() {
        let start = Instant::now();
        let at = |seconds| start + seconds * SECOND;
        for (what, standing, gone_since, earlier_boot, decision) in [
            ("there", Standing::Here, None, false, Decision::Leave),
            ("there again", Standing::Here, Some(start), false, Decision::Leave),
            ("there after a reboot", Standing::Here, Some(start), true, Decision::Leave),
            ("no answer", Standing::Unknown, None, false, Decision::Ignore),
            ("no answer for long", Standing::Unknown, Some(start), false, Decision::Ignore),
            ("no answer after a reboot", Standing::Unknown, None, true, Decision::Ignore),
            ("just gone", Standing::Gone, None, false, Decision::Wait(at(120))),
            ("gone a while", Standing::Gone, Some(at(1)), false, Decision::Wait(at(1))),
            ("gone for two minutes", Standing::Gone, Some(start), false, Decision::Release),
            ("gone after a reboot", Standing::Gone, None, true, Decision::Release),
        ] {
            assert_eq!(decide(standing, gone_since, earlier_boot, at(120)), decision, "{what}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_break_starts_the_clock_anew() {
        let start = Instant::now();
        let at = |seconds| start + seconds * SECOND;
        for (what, story, released) in [
            ("an outage", &[(0, Standing::Gone), (60, Standing::Unknown), (120, Standing::Gone)][..], true),
            ("it was there", &[(0, Standing::Gone), (60, Standing::Here), (120, Standing::Gone)], false),
            (
                "it was there, then gone",
                &[(0, Standing::Gone), (60, Standing::Here), (61, Standing::Gone), (181, Standing::Gone)],
                true,
            ),
            ("a release that failed", &[(0, Standing::Gone), (120, Standing::Gone), (121, Standing::Gone)], true),
        ] {
            let mut gone = Gone::default();
            let decisions: Vec<_> =
                story.iter().map(|(when, standing)| gone.judge("a", *standing, false, at(*when))).collect();
            assert_eq!(decisions.last() == Some(&Decision::Release), released, "{what}: {decisions:?}");
        }
        let mut gone = Gone::default();
        gone.judge("a", Standing::Gone, false, start);
        gone.retain(&BTreeSet::from(["b"]));
        assert_eq!(gone.judge("a", Standing::Gone, false, at(120)), Decision::Wait(at(120)), "it was away in between");
    }
}
