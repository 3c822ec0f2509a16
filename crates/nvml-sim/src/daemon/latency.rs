//! How long calls take.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use crate::node_file::{Latency, LatencySet};

/// About as long as calls take on hardware, for those that take long. Everything else is taken to be instant.
///
/// Known from field reports about NVIDIA's DRA driver: creating and destroying a GPU instance are of the order of a
/// second, and walking all MIG device handles of a busy GPU was seen to take ten. The rest is a guess, marked so.
pub fn real_latencies() -> BTreeMap<String, Duration> {
    [
        ("nvmlDeviceCreateGpuInstance", 1000),
        ("nvmlDeviceCreateGpuInstanceWithPlacement", 1000),
        ("nvmlGpuInstanceDestroy", 1000),
        ("nvmlGpuInstanceCreateComputeInstance", 200),              // guess
        ("nvmlGpuInstanceCreateComputeInstanceWithPlacement", 200), // guess
        ("nvmlComputeInstanceDestroy", 200),                        // guess
        ("nvmlDeviceGetMigDeviceHandleByIndex", 100),               // guess: seven and more of them make a walk
        ("nvmlDeviceSetMigMode", 2000),                             // guess
        ("nvmlInit_v2", 20),                                        // guess: persistence mode on
        ("nvmlInitWithFlags", 20),                                  // guess
    ]
    .map(|(call, ms)| (call.to_owned(), Duration::from_millis(ms)))
    .into()
}

/// The latencies in force.
#[derive(Debug)]
pub(super) struct Latencies(RwLock<BTreeMap<String, Duration>>);

impl Latencies {
    pub(super) fn new(latency: Latency) -> Latencies {
        Latencies(RwLock::new(match latency {
            Latency::Calls(calls) => calls,
            Latency::Named(LatencySet::Real) => real_latencies(),
            Latency::Named(LatencySet::None) => BTreeMap::new(),
        }))
    }

    pub(super) fn set(&self, function: String, latency: Duration) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(function, latency);
    }

    /// Takes as long as the function does.
    pub(super) fn pass(&self, function: &str) {
        let latency = self.0.read().unwrap_or_else(PoisonError::into_inner).get(function).copied();
        if let Some(latency) = latency.filter(|latency| !latency.is_zero()) {
            std::thread::sleep(latency);
        }
    }
}
