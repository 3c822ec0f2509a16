//! Events: what a person must act on, at the object where that person will look.
//!
//! [`Events`] takes them from anywhere without waiting; one task writes them. An event is never worth a failure of what it
//! is about: what cannot be written is logged and dropped. The same event again within a minute is counted, not written.
//!
//! They are of core/v1, which `kubectl describe` reads on every supported version.

use std::collections::HashMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use kerf_api::names;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::claim::ClaimRef;
use crate::metrics::{Metrics, Report};
use crate::node::{self, NodeError};

/// Events that wait for a slow API server. More than these are dropped: the log has them all.
const QUEUE: usize = 64;

/// How often the same event is written at most.
const REPEAT: Duration = Duration::from_secs(60);

/// When an event that did not come again is forgotten. The API server keeps events for one hour by default.
const FORGET: Duration = Duration::from_secs(3600);

/// The longest name of an object (`k8s.io/apimachinery` `DNS1123SubdomainMaxLength`).
const NAME_BYTES: usize = 253;

/// Takes events. Clones share one queue.
#[derive(Clone, Debug)]
pub struct Events {
    queue: mpsc::Sender<Happening>,
    metrics: Metrics,
    node_name: String,
}

/// Writes the queued events.
#[derive(Debug)]
pub struct EventWriter {
    queue: mpsc::Receiver<Happening>,
    metrics: Metrics,
    node_name: String,
    written: HashMap<Happening, Written>,
}

/// An event's identity: with equal ones the second is a repetition.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Happening {
    about: About,
    reason: String,
    message: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum About {
    Claim { namespace: String, name: String, uid: String },
    Node,
}

#[derive(Debug)]
struct Written {
    name: String,
    count: i32,
    at: Instant,
}

/// A pair of ends: to report and to write.
pub fn channel(node_name: &str, metrics: &Metrics) -> (Events, EventWriter) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let node_name = node_name.to_owned();
    let events = Events { queue: sender, node_name: node_name.clone(), metrics: metrics.clone() };
    (events, EventWriter { queue: receiver, node_name, written: HashMap::new(), metrics: metrics.clone() })
}

impl Events {
    /// A claim that cannot be prepared until somebody changes it.
    pub fn claim_refused(&self, claim: &ClaimRef, message: &str) {
        self.report(About::from(claim), "PrepareRefused", message);
    }

    /// A claim whose devices cannot be taken back yet; its pod stays in Terminating.
    pub fn claim_not_released(&self, claim: &ClaimRef, message: &str) {
        self.report(About::from(claim), "UnprepareFailed", message);
    }

    /// A claim that was released although a part of its devices could not be taken back.
    pub fn claim_condemned(&self, claim: &ClaimRef, message: &str) {
        self.report(About::from(claim), "UnprepareCondemned", message);
    }

    /// Something about this node's GPUs.
    pub fn node(&self, reason: &str, message: &str) {
        self.report(About::Node, reason, message);
    }

    fn report(&self, about: About, reason: &str, message: &str) {
        let happening = Happening { about, reason: reason.to_owned(), message: message.to_owned() };
        if self.queue.try_send(happening).is_err() {
            self.metrics.unwritten(Report::Event);
            tracing::warn!(node = self.node_name, reason, what = message, "event dropped: the queue is full or closed");
        }
    }
}

impl From<&ClaimRef> for About {
    fn from(claim: &ClaimRef) -> About {
        About::Claim { namespace: claim.namespace.clone(), name: claim.name.clone(), uid: claim.uid.clone() }
    }
}

impl EventWriter {
    /// Writes events until every [`Events`] is gone.
    pub async fn run(mut self, client: Client) {
        while let Some(happening) = self.queue.recv().await {
            let api: Api<Event> = Api::namespaced(client.clone(), happening.about.namespace());
            if let Err(error) = self.write(&api, &happening).await {
                self.metrics.unwritten(Report::Event);
                let Happening { reason, message, .. } = &happening;
                tracing::warn!(reason, what = message, error = &error as &dyn std::error::Error, "event not written");
            }
        }
    }

    async fn write(&mut self, api: &Api<Event>, happening: &Happening) -> Result<(), NodeError> {
        let now = Instant::now();
        self.written.retain(|_, written| now.duration_since(written.at) < FORGET);
        if let Some(written) = self.written.get_mut(happening) {
            written.count = written.count.saturating_add(1);
            if now.duration_since(written.at) < REPEAT {
                return Ok(());
            }
            written.at = now;
            let again = json!({"count": written.count, "lastTimestamp": Time(Timestamp::now())});
            let (params, patch) = (PatchParams::default(), Patch::Merge(again));
            match node::within(api.patch(&written.name, &params, &patch), "the Event cannot be repeated").await {
                Err(error) if error.is_not_found() => {}
                done => return done.map(drop),
            }
        }
        let event = event(happening, &self.node_name);
        let name = event.metadata.name.clone().unwrap_or_default();
        // Remembered even when this fails: a failing API server is not asked again for the same at once.
        self.written.insert(happening.clone(), Written { name, count: 1, at: now });
        node::within(api.create(&PostParams::default(), &event), "the Event cannot be created").await.map(drop)
    }
}

fn event(happening: &Happening, node_name: &str) -> Event {
    let Happening { about, reason, message } = happening;
    let now = Timestamp::now();
    let object = about.reference(node_name);
    Event {
        metadata: ObjectMeta {
            name: Some(name(object.name.as_deref().unwrap_or_default(), now)),
            namespace: Some(about.namespace().to_owned()),
            ..ObjectMeta::default()
        },
        involved_object: object,
        type_: Some("Warning".to_owned()),
        reason: Some(reason.clone()),
        message: Some(message.clone()),
        source: Some(EventSource {
            component: Some(names::KUBELET_PLUGIN.to_owned()),
            host: Some(node_name.to_owned()),
        }),
        reporting_component: Some(names::KUBELET_PLUGIN.to_owned()),
        reporting_instance: Some(node_name.to_owned()),
        count: Some(1),
        first_timestamp: Some(Time(now)),
        last_timestamp: Some(Time(now)),
        event_time: None::<MicroTime>,
        ..Event::default()
    }
}

/// As client-go names events, by object and time; but never longer than a name may be.
fn name(object: &str, now: Timestamp) -> String {
    let time = format!(".{:x}", now.as_nanosecond());
    let room = NAME_BYTES - time.len();
    let object = object[..object.floor_char_boundary(room)].trim_end_matches(['-', '.']);
    format!("{object}{time}")
}

impl About {
    fn namespace(&self) -> &str {
        match self {
            About::Claim { namespace, .. } => namespace,
            // Where events about cluster-scoped objects live.
            About::Node => "default",
        }
    }

    fn reference(&self, node_name: &str) -> ObjectReference {
        match self {
            About::Claim { namespace, name, uid } => ObjectReference {
                api_version: Some("resource.k8s.io/v1".to_owned()),
                kind: Some("ResourceClaim".to_owned()),
                namespace: Some(namespace.clone()),
                name: Some(name.clone()),
                uid: Some(uid.clone()),
                ..ObjectReference::default()
            },
            About::Node => ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Node".to_owned()),
                name: Some(node_name.to_owned()),
                // The kubelet's habit, which `kubectl describe node` looks for.
                uid: Some(node_name.to_owned()),
                ..ObjectReference::default()
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_events_are_names() {
        let now = Timestamp::from_second(1).unwrap();
        assert_eq!(name("slice", now), "slice.3b9aca00");
        let long = name(&format!("{}-{}", "a".repeat(243), "b".repeat(9)), now);
        assert_eq!(long, format!("{}.3b9aca00", "a".repeat(243)));
    }
}
