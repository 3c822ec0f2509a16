//! The sign of life: a Lease that the plugin renews and the controller watches.
//!
//! The controller publishes the node's devices only while the lease is fresh. The kubelet itself wipes a driver's slices
//! 30 s after its plugin went away, so the lease is good for as long.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kerf_api::names;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::node::{self, NodeError};

/// How often the lease is renewed: thrice in the time it is good for, so that one lost renewal does no harm.
const RENEW: Duration = Duration::from_secs(names::PLUGIN_LEASE_SECONDS as u64 / 3);

/// How long a released lease is said to be good for, as client-go does: the API allows no zero.
const RELEASED_SECONDS: i32 = 1;

/// A process that holds the lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Names the process, unlike any other in the cluster.
    pub identity: String,
    /// When it started.
    pub since: Timestamp,
}

struct Keeper<'a> {
    client: Client,
    api: Api<Lease>,
    name: String,
    node_name: &'a str,
    holder: Holder,
}

/// Renews the lease until `shutdown`, then releases it. Whatever goes wrong is tried again at the next renewal.
pub async fn hold(client: Client, namespace: &str, node_name: &str, holder: Holder, shutdown: CancellationToken) {
    let api: Api<Lease> = Api::namespaced(client.clone(), namespace);
    let keeper = Keeper { client, api, name: names::plugin_lease(node_name), node_name, holder };
    let mut held = None;
    let mut ticks = tokio::time::interval(RENEW);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = shutdown.cancelled() => break,
        }
        held = keeper.renew(held).await.unwrap_or_else(|error| {
            tracing::warn!(error = &error as &dyn std::error::Error, "lease not renewed");
            None
        });
    }
    if let Some(lease) = held
        && let Err(error) = keeper.release(lease).await
    {
        tracing::warn!(error = &error as &dyn std::error::Error, "lease not released: it will expire");
    }
}

impl Keeper<'_> {
    /// Renews `held`, the lease as this process wrote it last. Without it, takes the lease or creates it; gives `None` when
    /// it is left to a successor.
    async fn renew(&self, held: Option<Lease>) -> Result<Option<Lease>, NodeError> {
        let now = Timestamp::now();
        let found = match held {
            Some(lease) => Some(lease),
            None => node::within(self.api.get_opt(&self.name), "the lease cannot be read").await?,
        };
        let spec = self.holder.spec(now);
        match found {
            None => {
                let metadata = ObjectMeta {
                    name: Some(self.name.clone()),
                    owner_references: Some(vec![node::owner(&self.client, self.node_name).await?]),
                    ..ObjectMeta::default()
                };
                let lease = Lease { metadata, spec: Some(spec) };
                let params = PostParams::default();
                node::within(self.api.create(&params, &lease), "the lease cannot be created").await.map(Some)
            }
            Some(lease) if self.holder.may_take(lease.spec.as_ref(), now) => {
                self.replace(&Lease { spec: Some(spec), ..lease }).await.map(Some)
            }
            Some(_) => Ok(None),
        }
    }

    async fn release(&self, lease: Lease) -> Result<(), NodeError> {
        let spec = LeaseSpec {
            lease_duration_seconds: Some(RELEASED_SECONDS),
            renew_time: Some(MicroTime(Timestamp::now())),
            ..LeaseSpec::default()
        };
        self.replace(&Lease { spec: Some(spec), ..lease }).await.map(drop)
    }

    /// Fails where the lease has changed since it was read.
    async fn replace(&self, lease: &Lease) -> Result<Lease, NodeError> {
        node::within(self.api.replace(&self.name, &PostParams::default(), lease), "the lease cannot be written").await
    }
}

impl Holder {
    fn spec(&self, now: Timestamp) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            acquire_time: Some(MicroTime(self.since)),
            renew_time: Some(MicroTime(now)),
            lease_duration_seconds: Some(names::PLUGIN_LEASE_SECONDS as i32),
            ..LeaseSpec::default()
        }
    }

    /// Whether the lease is this process's to write. Not while a process that started later renews it: then a rolling
    /// update is under way, and taking it back would only lead to its release when this process ends.
    fn may_take(&self, found: Option<&LeaseSpec>, now: Timestamp) -> bool {
        let Some(found) = found else { return true };
        let Some(holder) = found.holder_identity.as_deref().filter(|holder| !holder.is_empty()) else { return true };
        let good_for = SignedDuration::from_secs(found.lease_duration_seconds.unwrap_or_default().into());
        // A renewal in the future is of a clock that was set back since, and says nothing about a living process.
        let renewed = found.renew_time.as_ref().map(|renewed| now.duration_since(renewed.0));
        let expired = renewed.is_none_or(|age| age.abs() > good_for);
        let later = found.acquire_time.as_ref().is_some_and(|acquired| acquired.0 > self.since);
        holder == self.identity || expired || !later
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn holder(identity: &str, since: i64) -> Holder {
        Holder { identity: identity.into(), since: at(since) }
    }

    #[test]
    fn the_lease_goes_to_the_youngest_process() {
        let old = holder("old", 100);
        let new = holder("new", 200);
        let now = at(210);
        assert!(new.may_take(Some(&old.spec(at(209))), now), "a successor need not wait");
        assert!(!old.may_take(Some(&new.spec(at(209))), now), "a predecessor stands back");
        assert!(old.may_take(Some(&new.spec(at(170))), now), "unless the successor died");
        assert!(old.may_take(Some(&new.spec(at(3600))), now), "or the clock was set back");
        assert!(old.may_take(Some(&old.spec(at(100))), now));
        assert!(old.may_take(None, now));
        assert!(old.may_take(Some(&LeaseSpec { acquire_time: Some(MicroTime(at(205))), ..LeaseSpec::default() }), now));
    }
}
