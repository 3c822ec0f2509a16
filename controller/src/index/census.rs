//! The nodes and slices in numbers.

use std::collections::BTreeMap;

use super::decision::{Decision, Reason};
use super::{Index, NodeState};
use crate::liveness::Now;

/// How a node's plugin stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// It is alive and registered: its devices are published.
    Live,
    /// It is alive, and the kubelet has not accepted it.
    Unregistered,
    /// It has stopped in good order.
    Stopped,
    /// It has not renewed its lease in time, or has none.
    Stale,
    /// Nobody knows at present.
    Unknown,
}

/// Everything in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Nodes with a plugin of ours.
    pub nodes: BTreeMap<Standing, usize>,
    /// Slices of our driver, whoever wrote them.
    pub slices: usize,
}

impl Standing {
    /// All there are.
    pub const ALL: [Standing; 5] =
        [Standing::Live, Standing::Unregistered, Standing::Stopped, Standing::Stale, Standing::Unknown];

    /// What metrics call it.
    pub fn name(self) -> &'static str {
        match self {
            Standing::Live => "live",
            Standing::Unregistered => "unregistered",
            Standing::Stopped => "stopped",
            Standing::Stale => "stale",
            Standing::Unknown => "unknown",
        }
    }

    /// `None` for a node that has no plugin of ours.
    fn of(decision: &Decision) -> Option<Standing> {
        match decision {
            Decision::Publish { .. } => Some(Standing::Live),
            Decision::Withdraw(reason) | Decision::Leave(reason) => match reason {
                Reason::NoNode | Reason::NoPlugin | Reason::OtherDriver | Reason::EarlierNode => None,
                Reason::Unregistered => Some(Standing::Unregistered),
                Reason::Released => Some(Standing::Stopped),
                Reason::NoLease | Reason::Stale => Some(Standing::Stale),
                Reason::Unproven | Reason::Blind => Some(Standing::Unknown),
            },
        }
    }
}

impl Index {
    /// Counts what is known at `now`.
    pub fn census(&self, now: Now) -> Census {
        let mut census = Census::default();
        for state in self.nodes.values() {
            census.slices += state.slices.len();
            if let Some(standing) = self.standing(state, now) {
                *census.nodes.entry(standing).or_default() += 1;
            }
        }
        census
    }

    fn standing(&self, state: &NodeState, now: Now) -> Option<Standing> {
        Standing::of(&self.decide(state, now.instant).0)
    }
}
