//! Waiting longer after each failure.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};
use std::time::Duration;

/// Doubles from `first` to `most`. Each wait is shortened by a random part of up to a quarter, so that the plugins of
/// many nodes do not come back to a restarted API server in step.
#[derive(Clone, Debug)]
pub(crate) struct Backoff {
    first: Duration,
    most: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) fn new(first: Duration, most: Duration) -> Backoff {
        Backoff { first, most, next: first }
    }

    /// How long to wait after one more failure.
    pub(crate) fn failed(&mut self) -> Duration {
        let wait = self.next;
        self.next = (wait * 2).min(self.most);
        // The standard library's per-process random keys are random enough for this.
        let random = RandomState::new().build_hasher().finish();
        wait.mul_f64(1.0 - 0.25 * (random as f64 / u64::MAX as f64))
    }

    /// The next wait is the first one again.
    pub(crate) fn succeeded(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_a_bound_and_start_over() {
        let second = Duration::from_secs(1);
        let mut backoff = Backoff::new(second, 5 * second);
        for nominal in [1, 2, 4, 5, 5] {
            let wait = backoff.failed();
            let nominal = nominal * second;
            assert!(nominal * 3 / 4 <= wait && wait <= nominal, "{wait:?} is not within a quarter of {nominal:?}");
        }
        backoff.succeeded();
        assert!(backoff.failed() <= second);
    }
}
