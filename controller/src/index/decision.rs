//! What is decided about a node, and why.

use std::fmt;
use std::sync::Arc;

use kerf_api::GpuNode;
use tokio::time::Instant;

use crate::policy::Offering;

/// What to do about a node's devices.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// Offer of what the plugin found what shall be; the slices belong to the Node with this UID.
    Publish {
        /// What the plugin found.
        gpu_node: Arc<GpuNode>,
        /// The owner.
        node_uid: String,
        /// What shall be offered.
        offering: Offering,
    },
    /// Offer nothing.
    Withdraw(Reason),
    /// Leave everything as it is.
    Leave(Reason),
}

/// Why nothing is published now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// There is no Node of that name. What belonged to it is being collected.
    NoNode,
    /// The node has no plugin of ours.
    NoPlugin,
    /// The node's plugin serves another driver name.
    OtherDriver,
    /// The GpuNode is that of an earlier Node of the same name.
    EarlierNode,
    /// The plugin has never made a lease, or it was deleted.
    NoLease,
    /// The plugin stopped in good order.
    Released,
    /// The plugin has not renewed its lease in time.
    Stale,
    /// The controller has not watched long enough to know whether the plugin is alive.
    Unproven,
    /// The controller does not see leases at present.
    Blind,
    /// The kubelet has not accepted the plugin.
    Unregistered,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::NoNode => "there is no Node of that name",
            Reason::NoPlugin => "the node has no GpuNode",
            Reason::OtherDriver => "the node's plugin serves another driver name",
            Reason::EarlierNode => "the GpuNode belongs to an earlier Node of the same name",
            Reason::NoLease => "the node's plugin has no lease",
            Reason::Released => "the node's plugin has stopped",
            Reason::Stale => "the node's plugin has not renewed its lease in time",
            Reason::Unproven => "it is not known yet whether the node's plugin is alive",
            Reason::Blind => "the watch on leases shows nothing at present",
            Reason::Unregistered => "the node's plugin is not registered with the kubelet",
        })
    }
}

/// A decision, for now.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// What to do.
    pub decision: Decision,
    /// When time alone can change the decision.
    pub recheck: Option<Instant>,
    /// Changes whenever anything about the node does.
    pub revision: u64,
}
