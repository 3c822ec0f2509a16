//! What the driver that kerf replaces does for a configuration and this version of kerf does not: the one place that
//! says so. Words that it refuses are never recommended.

use super::{DeviceConfig, SharingStrategy, TimeSlice};
use crate::problem::{Problem, field};

/// Kinds of the group that mean nothing to kerf, and why.
const KINDS_NOT_SERVED: [(&str, &str); 5] = [
    ("VfioDeviceConfig", "is not served: kerf gives GPUs to containers, not to virtual machines"),
    ("ComputeDomain", COMPUTE_DOMAIN),
    ("ComputeDomainClique", COMPUTE_DOMAIN),
    ("ComputeDomainChannelConfig", COMPUTE_DOMAIN),
    ("ComputeDomainDaemonConfig", COMPUTE_DOMAIN),
];

const COMPUTE_DOMAIN: &str =
    "is not served: compute domains belong to the driver compute-domain.nvidia.com, not to GPUs";

/// Why kerf does not serve a kind of the group. `None`: it does, or nobody knows the kind.
pub(super) fn kind(kind: &str) -> Option<&'static str> {
    KINDS_NOT_SERVED.iter().find(|(known, _)| *known == kind).map(|(_, why)| *why)
}

/// Why a strategy cannot be had.
pub(super) fn strategy(strategy: SharingStrategy) -> Option<&'static str> {
    match strategy {
        SharingStrategy::TimeSlicing => None,
        SharingStrategy::Mps => Some("MPS is not in this version of kerf"),
    }
}

/// Why a time slice cannot be set.
pub(super) fn time_slice(interval: TimeSlice) -> Option<&'static str> {
    match interval {
        TimeSlice::Default => None,
        TimeSlice::Short | TimeSlice::Medium | TimeSlice::Long => {
            Some("this version of kerf leaves time slices as they are")
        }
    }
}

/// See [`DeviceConfig::unsupported`].
pub(super) fn unsupported(config: &DeviceConfig, path: &str) -> Vec<Problem> {
    let sharing = field(path, "sharing");
    let (wanted, slicing) = match config {
        DeviceConfig::Gpu(config) => {
            let sharing = config.sharing.as_ref();
            (sharing.map(|sharing| sharing.strategy), sharing.and_then(|sharing| sharing.time_slicing_config.as_ref()))
        }
        DeviceConfig::Mig(config) => (config.sharing.as_ref().map(|sharing| sharing.strategy), None),
    };
    let mut problems = Vec::new();
    if let Some(why) = wanted.and_then(strategy) {
        let hint = "use TimeSlicing, or leave sharing out";
        problems.push(Problem::new(field(&sharing, "strategy"), why).hint(hint));
    }
    if wanted == Some(SharingStrategy::TimeSlicing)
        && let Some(why) = slicing.and_then(|slicing| slicing.interval).and_then(time_slice)
    {
        let interval = field(&field(&sharing, "timeSlicingConfig"), "interval");
        problems.push(Problem::new(interval, why).hint("use Default"));
    }
    problems
}
