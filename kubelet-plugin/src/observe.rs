//! What can be seen of this process from outside, and what it waits for before it is ready.
//!
//! Ready is a plugin to which the kubelet can send claims and whose node the controller can publish: a rolling update ends
//! the old plugin then. Architecture invariant: readiness says nothing about GPUs. A node whose driver is missing or whose
//! GPU is broken has a plugin that is ready, and tells what is wrong in its GpuNode.

use kerf_telemetry::Readiness;
use kerf_telemetry::http::Server;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::metrics::{Metrics, Seen};
use crate::registration::KubeletVerdict;

/// Serves until `stop`. `standing` is whether the API server holds the GpuNode as this process wrote it.
pub(crate) async fn observe(
    server: Server,
    metrics: Metrics,
    seen: Seen,
    standing: watch::Receiver<bool>,
    stop: CancellationToken,
) {
    let readiness = Readiness::default();
    let registry = metrics.registry(&seen);
    let Seen { inventory, verdict } = seen;
    let is_registered = |verdict: &KubeletVerdict| *verdict == KubeletVerdict::Registered;
    let follow = async {
        tokio::join!(
            follow(&readiness, "first look at the GPUs", inventory, Option::is_some),
            follow(&readiness, "registration with the kubelet", verdict, is_registered),
            follow(&readiness, "GpuNode in the API server", standing, |stands| *stands),
        )
    };
    tokio::select! {
        // In this order: what is waited for is known before the first answer.
        biased;
        _ = follow => {}
        () = server.serve(readiness.clone(), registry, stop) => {}
    }
}

/// Not ready as long as something that is seen does not hold.
async fn follow<T>(readiness: &Readiness, what: &'static str, mut seen: watch::Receiver<T>, holds: fn(&T) -> bool) {
    loop {
        let pending = readiness.wait_for(what);
        if seen.wait_for(holds).await.is_err() {
            // Nobody will say any more: the process ends.
            return std::future::pending().await;
        }
        drop(pending);
        if seen.wait_for(|seen| !holds(seen)).await.is_err() {
            return std::future::pending().await;
        }
    }
}
