//! What a person has to know about devices that are not offered.

use std::fmt;

/// Why something that the node's plugin offered is not published.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Remark {
    /// The API server drops shared counters, without which partitions would exclude nothing.
    NoCounters {
        /// The GPUs whose partitions are not offered.
        gpus: Vec<String>,
    },
    /// The API server would refuse it.
    LeftOut {
        /// The GPU or device.
        what: String,
        /// What is wrong with it.
        why: String,
    },
}

impl Remark {
    /// One CamelCase word for an Event's reason.
    pub fn reason(&self) -> &'static str {
        match self {
            Remark::NoCounters { .. } => "PartitionsNotOffered",
            Remark::LeftOut { .. } => "LeftOut",
        }
    }
}

impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Remark::NoCounters { gpus } => write!(
                f,
                "no MIG partitions are offered of {}: the API server drops the counters that keep them from \
                 overlapping. Switch the feature gate DRAPartitionableDevices on, on kube-apiserver and \
                 kube-scheduler (it is on by default from Kubernetes 1.36). Until then each GPU is offered whole, \
                 where it can be",
                gpus.join(", ")
            ),
            Remark::LeftOut { what, why } => write!(f, "{what}: left out: {why}"),
        }
    }
}
