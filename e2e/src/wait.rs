//! Waiting for conditions instead of sleeping.

use std::time::Duration;

use anyhow::{Result, bail};
use tokio::time::Instant;

/// How often a condition is looked at.
const POLL: Duration = Duration::from_millis(50);

/// Patience with what Kubernetes does after its API server was away. A component that watches may look for it again only
/// after 60 s: client-go's reflectors wait up to 30 s and as much again at random, and begin anew with short waits only
/// after two quiet minutes (k8s.io/client-go/tools/cache/reflector.go, 1.36). One such component waits for the other.
pub const HEARS_AGAIN: Duration = Duration::from_secs(240);

/// Patience with a pod whose claim may not be prepared at the kubelet's first try, for reasons of Kubernetes: the next one
/// comes after one to one and a half minutes, with the pod's regular sync (pkg/kubelet, `resyncInterval` and its jitter).
pub const RETRIED: Duration = Duration::from_secs(240);

/// Waits until `look` answers `Ok(Some(value))`. An error or `Ok(None)` means "not yet"; after `patience` the last
/// error, or the missing condition, is the failure.
pub async fn eventually<T, F>(what: &str, patience: Duration, mut look: F) -> Result<T>
where
    F: AsyncFnMut() -> Result<Option<T>>,
{
    let deadline = Instant::now() + patience;
    loop {
        let outcome = look().await;
        if let Ok(Some(value)) = outcome {
            return Ok(value);
        }
        if Instant::now() >= deadline {
            return match outcome {
                Err(error) => Err(error.context(format!("{what}: not within {patience:?}"))),
                Ok(_) => bail!("{what}: not within {patience:?}"),
            };
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Watches that `look` stays `Ok(false)` for the whole of `span`.
pub async fn never<F>(what: &str, span: Duration, mut look: F) -> Result<()>
where
    F: AsyncFnMut() -> Result<bool>,
{
    let deadline = Instant::now() + span;
    while Instant::now() < deadline {
        if look().await? {
            bail!("{what}: happened, and must not");
        }
        tokio::time::sleep(POLL).await;
    }
    Ok(())
}
