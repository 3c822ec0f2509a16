//! What a person has to know about devices that are not offered.

use std::fmt;

/// Why something that the node's plugin offered is not published, or is published as not to be given out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Remark {
    /// The API server drops shared counters, without which partitions would exclude nothing.
    NoCounters {
        /// The GPUs whose partitions are not offered.
        gpus: Vec<String>,
    },
    /// The API server drops taints, without which devices would be given out that cannot be.
    NoTaints {
        /// The GPUs of which devices are not offered.
        gpus: Vec<String>,
    },
    /// What blocks devices is not said in a way that can be taken at its word, so more may be held back than has to be.
    Doubtful {
        /// The GPU.
        gpu: String,
        /// What is odd, and what is made of it.
        why: String,
    },
    /// There is more to say than anybody would read.
    More {
        /// How many remarks are not made.
        count: usize,
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
            Remark::NoTaints { .. } => "BlockedDevicesNotOffered",
            Remark::Doubtful { .. } => "BlockedDoubtful",
            Remark::More { .. } => "MoreRemarks",
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
            Remark::NoTaints { gpus } => write!(
                f,
                "devices of {} that something on the GPU blocks (see the GpuNode) are not published: the API server \
                 drops the taints that would keep them from being given out. Switch the feature gate DRADeviceTaints \
                 on, on kube-apiserver and kube-scheduler (it is on by default from Kubernetes 1.36)",
                gpus.join(", ")
            ),
            Remark::Doubtful { gpu, why } => write!(f, "{gpu}: blocked: {why}"),
            Remark::More { count } => write!(f, "{count} more remarks about this node are not made"),
            Remark::LeftOut { what, why } => write!(f, "{what}: left out: {why}"),
        }
    }
}
