//! Whether a node's plugin is alive, judged by its lease. Pure.
//!
//! Clocks of different machines differ, so what counts is when a renewal was *seen*, by the clock of this process. Only
//! for the first look at a lease is its time compared with the wall clock: a lease renewed moments ago is believed, which
//! can be wrong, when clocks differ, for one duration and no longer.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use kerf_api::names;
use tokio::time::Instant;

/// The longest duration of a lease that is believed.
const LONGEST: u64 = 600;

/// The time, by both clocks.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// This process's clock, which only ever goes forward.
    pub instant: Instant,
    /// The wall clock.
    pub wall: Timestamp,
}

impl Now {
    /// The time now.
    pub fn read() -> Now {
        Now { instant: Instant::now(), wall: Timestamp::now() }
    }
}

/// What is known of a plugin's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// It renewed its lease; good until then.
    Fresh(Instant),
    /// Its lease was not renewed as far as this process can know, but this process has not watched long enough to say
    /// so; until then nothing is published and nothing withdrawn.
    Unproven(Instant),
    /// It has not renewed its lease in time.
    Stale,
    /// It gave its lease up: it went away in good order.
    Released,
}

/// The lease of one plugin, as watched.
#[derive(Clone, Debug)]
pub struct Liveness {
    renewal: Renewal,
    /// Fresh, Unproven or Released; time makes Stale of the first two.
    life: Life,
}

/// What changes when a lease is renewed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Renewal {
    holder: Option<String>,
    time: Option<Timestamp>,
    duration: Duration,
}

impl Renewal {
    fn of(lease: &Lease) -> Renewal {
        let nothing = LeaseSpec::default();
        let spec = lease.spec.as_ref().unwrap_or(&nothing);
        let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let seconds = seconds.unwrap_or(u64::from(names::PLUGIN_LEASE_SECONDS)).clamp(1, LONGEST);
        Renewal {
            holder: spec.holder_identity.clone().filter(|holder| !holder.is_empty()),
            time: spec.renew_time.as_ref().map(|time| time.0),
            duration: Duration::from_secs(seconds),
        }
    }
}

impl Liveness {
    /// A lease that was there when the watch began: nobody saw it being renewed.
    pub fn found(lease: &Lease, now: Now) -> Liveness {
        let renewal = Renewal::of(lease);
        let age = renewal.time.map(|time| now.wall.duration_since(time).unsigned_abs());
        let life = match age.and_then(|age| renewal.duration.checked_sub(age)) {
            _ if renewal.holder.is_none() => Life::Released,
            Some(rest) if !rest.is_zero() => Life::Fresh(now.instant + rest),
            _ => Life::Unproven(now.instant + renewal.duration),
        };
        Liveness { renewal, life }
    }

    /// A lease that appeared, or was renewed, under the eyes of this process.
    pub fn renewed(lease: &Lease, now: Now) -> Liveness {
        let renewal = Renewal::of(lease);
        let life = match renewal.holder {
            None => Life::Released,
            Some(_) => Life::Fresh(now.instant + renewal.duration),
        };
        Liveness { renewal, life }
    }

    /// The same lease seen again.
    pub fn see(&mut self, lease: &Lease, now: Now) {
        if self.renewal != Renewal::of(lease) {
            *self = Liveness::renewed(lease, now);
        }
    }

    /// This process was blind until now: it has to watch for one duration more before it can call the lease stale.
    pub fn doubt(&mut self, now: Now) {
        if self.life != Life::Released {
            self.life = Life::Unproven(now.instant + self.renewal.duration);
        }
    }

    /// What is known at `instant`.
    pub fn at(&self, instant: Instant) -> Life {
        match self.life {
            Life::Fresh(until) | Life::Unproven(until) if until <= instant => Life::Stale,
            life => life,
        }
    }
}
