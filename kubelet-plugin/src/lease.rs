//! The sign of life: a Lease that the plugin renews and the controller watches.
//!
//! The controller publishes the node's devices only while the lease is fresh. The kubelet itself wipes a driver's slices
//! 30 s after its plugin went away, so the lease is good for as long.
//!
//! Of two plugins that serve one node, during a rolling update, the younger holds the lease, and the holder writes the
//! GpuNode that the lease vouches for. `HANDOVER.md` tells the states.

use std::time::Duration;

use clap::ValueEnum;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kerf_api::names;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::metrics::{Metrics, Report};
use crate::node::{self, NodeError};

/// How often the lease is renewed: thrice in the time it is good for, so that one lost renewal does no harm.
const RENEW: Duration = Duration::from_secs(names::PLUGIN_LEASE_SECONDS as u64 / 3);

/// How often another's lease is looked at: often enough to take over between its second missed renewal and its end.
const LOOK: Duration = Duration::from_secs(names::PLUGIN_LEASE_SECONDS as u64 / 6);

/// How long a released lease is said to be good for, as client-go does: the API allows no zero.
const RELEASED_SECONDS: i32 = 1;

/// What becomes of the node's devices at the end of a plugin after which nobody serves the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum AtExit {
    /// They are withdrawn at once.
    #[default]
    Withdraw,
    /// They stay published for 30 s; a plugin that is back before loses nothing.
    Keep,
}

/// What becomes of the lease at the end of its holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Given up.
    Release,
    /// Good for its time, and anyone's.
    Leave,
}

/// A process that holds the lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Names the process, unlike any other in the cluster.
    pub identity: String,
    /// When it started.
    pub since: Timestamp,
}

/// The lease of one node, in the hands of one process.
#[derive(Clone)]
pub struct NodeLease {
    client: Client,
    api: Api<Lease>,
    name: String,
    node_name: String,
    holder: Holder,
    metrics: Metrics,
}

impl NodeLease {
    /// The lease of `node_name` in kerf's namespace; nothing is asked for yet.
    pub fn new(client: Client, namespace: &str, node_name: &str, holder: Holder, metrics: Metrics) -> NodeLease {
        let api = Api::namespaced(client.clone(), namespace);
        NodeLease {
            client,
            api,
            name: names::plugin_lease(node_name),
            node_name: node_name.to_owned(),
            holder,
            metrics,
        }
    }

    /// Holds the lease whenever it may, until `shutdown`; then leaves it as `end` says. `held` tells whether it does. Whatever
    /// goes wrong is tried again.
    pub async fn hold(&self, held: &watch::Sender<bool>, end: impl Future<Output = End>, shutdown: CancellationToken) {
        let mut lease = None;
        loop {
            let mut renewed = self.renew(lease).await;
            if renewed.as_ref().is_err_and(NodeError::is_conflict) {
                tracing::info!("another plugin has written the lease");
                renewed = self.renew(None).await;
            }
            lease = renewed.unwrap_or_else(|error| {
                self.metrics.unwritten(Report::Lease);
                tracing::warn!(error = &error as &dyn std::error::Error, "lease not renewed");
                None
            });
            let holds = lease.is_some();
            held.send_if_modified(|held| std::mem::replace(held, holds) != holds);
            let pause = if holds { RENEW } else { LOOK };
            if shutdown.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                break;
            }
        }
        let Some(lease) = lease else { return };
        match self.finish(lease, end.await).await {
            // A successor was faster.
            Err(error) if error.is_conflict() => {}
            Err(error) => {
                self.metrics.unwritten(Report::Lease);
                tracing::warn!(error = &error as &dyn std::error::Error, "the lease is left as it is: it will expire");
            }
            Ok(()) => {}
        }
    }

    /// Whether the GpuNode is this process's to write, when it is about to say that it is registered, or not.
    pub(crate) async fn lets_report(&self, registered: bool) -> Result<bool, NodeError> {
        let found = self.read().await?;
        let spec = found.as_ref().and_then(|lease| lease.spec.as_ref());
        Ok(self.holder.may_report(spec, registered, Timestamp::now()))
    }

    async fn read(&self) -> Result<Option<Lease>, NodeError> {
        node::within(self.api.get_opt(&self.name), "the lease cannot be read").await
    }

    /// Renews `held`, the lease as this process wrote it last. Without it, takes the lease or creates it; gives `None` when
    /// it is left to a successor.
    async fn renew(&self, held: Option<Lease>) -> Result<Option<Lease>, NodeError> {
        let now = Timestamp::now();
        let found = match held {
            Some(lease) => Some(lease),
            None => self.read().await?,
        };
        let spec = self.holder.spec(now);
        match found {
            None => {
                let metadata = ObjectMeta {
                    name: Some(self.name.clone()),
                    owner_references: Some(vec![node::owner(&self.client, &self.node_name).await?]),
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

    async fn finish(&self, lease: Lease, end: End) -> Result<(), NodeError> {
        let now = Timestamp::now();
        let spec = match end {
            End::Release => LeaseSpec {
                lease_duration_seconds: Some(RELEASED_SECONDS),
                renew_time: Some(MicroTime(now)),
                ..LeaseSpec::default()
            },
            // Nobody is older than a holder of unknown age.
            End::Leave => LeaseSpec { acquire_time: None, ..self.holder.spec(now) },
        };
        self.replace(&Lease { spec: Some(spec), ..lease }).await.map(drop)
    }

    /// Fails where the lease has changed since it was read.
    async fn replace(&self, lease: &Lease) -> Result<Lease, NodeError> {
        node::within(self.api.replace(&self.name, &PostParams::default(), lease), "the lease cannot be written").await
    }
}

/// Who holds a lease, seen by one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    /// Nobody, or somebody who has not renewed it twice: he is dead, or as good as that.
    Free,
    /// This process.
    Own,
    /// One that started earlier, or whose age is not known.
    Elder,
    /// One that started later.
    Younger,
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

    fn see(&self, found: Option<&LeaseSpec>, now: Timestamp) -> Seen {
        let Some(found) = found else { return Seen::Free };
        let Some(holder) = found.holder_identity.as_deref().filter(|holder| !holder.is_empty()) else {
            return Seen::Free;
        };
        if holder == self.identity {
            return Seen::Own;
        }
        let renewals = SignedDuration::from_secs(found.lease_duration_seconds.unwrap_or_default().into()) * 2 / 3;
        // A renewal in the future is of a clock that was set back since, and says nothing about a living process.
        let renewed = found.renew_time.as_ref().map(|renewed| now.duration_since(renewed.0));
        if renewed.is_none_or(|age| age.abs() > renewals) {
            return Seen::Free;
        }
        let later = found.acquire_time.as_ref().is_some_and(|acquired| acquired.0 > self.since);
        if later { Seen::Younger } else { Seen::Elder }
    }

    /// Whether the lease is this process's to write. Not while a process that started later renews it: then a rolling
    /// update is under way.
    fn may_take(&self, found: Option<&LeaseSpec>, now: Timestamp) -> bool {
        self.see(found, now) != Seen::Younger
    }

    /// Whether the GpuNode is this process's to write. A younger one that the kubelet does not know yet leaves it to the
    /// elder, whose word is good: to say that nobody is registered would withdraw the node's devices.
    fn may_report(&self, found: Option<&LeaseSpec>, registered: bool, now: Timestamp) -> bool {
        match self.see(found, now) {
            Seen::Free | Seen::Own => true,
            Seen::Elder => registered,
            Seen::Younger => false,
        }
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
        assert!(!old.may_take(Some(&new.spec(at(190))), now), "also when one renewal was lost");
        assert!(old.may_take(Some(&new.spec(at(189))), now), "unless the successor died, before its lease ends");
        assert!(old.may_take(Some(&new.spec(at(3600))), now), "or the clock was set back");
        assert!(old.may_take(Some(&old.spec(at(100))), now));
        assert!(old.may_take(None, now));
        assert!(old.may_take(Some(&LeaseSpec { acquire_time: Some(MicroTime(at(205))), ..LeaseSpec::default() }), now));
    }
    #[test]
    fn the_gpu_node_is_written_by_who_holds_the_lease() {
        let (old, new, now) = (holder("old", 100), holder("new", 200), at(210));
        let (olds, news) = (old.spec(at(209)), new.spec(at(209)));
        let left = LeaseSpec { acquire_time: None, ..news.clone() };
        for (who, found, unregistered, registered) in [
            (&old, None, true, true),
            (&old, Some(&olds), true, true),
            (&new, Some(&olds), false, true),
            (&old, Some(&news), false, false),
            (&old, Some(&left), false, true),
            (&old, Some(&new.spec(at(189))), true, true),
            (&new, Some(&LeaseSpec::default()), true, true),
        ] {
            let answers = (who.may_report(found, false, now), who.may_report(found, true, now));
            assert_eq!(answers, (unregistered, registered), "{} sees {found:?}", who.identity);
        }
    }
}
