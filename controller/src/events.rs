//! Events for what a person must act on.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kerf_api::{GpuNode, names};
use kube::api::PostParams;
use kube::{Api, Client, Resource as _};
use tracing::warn;

use crate::render::Remark;

/// How long an Event may take: devices matter more.
const PATIENCE: Duration = Duration::from_secs(5);

/// The longest message of an Event, in bytes.
const LONGEST_MESSAGE: usize = 1024;

/// Where Events about objects without a namespace belong.
const NAMESPACE: &str = "default";

/// Writes Events about GpuNodes and DeviceClasses. `kubectl describe` of the object shows them.
#[derive(Clone)]
pub struct Reporter {
    api: Api<Event>,
    identity: String,
}

impl Reporter {
    /// `identity` names this process in the Events.
    pub fn new(client: Client, identity: impl Into<String>) -> Reporter {
        Reporter { api: Api::namespaced(client, NAMESPACE), identity: identity.into() }
    }

    /// Says `remark` about `gpu_node`. A failure is logged and nothing else: the remark is in the log as well.
    pub async fn report(&self, gpu_node: &GpuNode, remark: &Remark) {
        self.report_about(gpu_node.object_ref(&()), remark.reason(), &remark.to_string()).await;
    }

    /// Says something about an object without a namespace; `reason` is one CamelCase word.
    pub async fn report_about(&self, object: ObjectReference, reason: &str, message: &str) {
        let event = self.event(object, reason, message, Timestamp::now());
        let params = PostParams::default();
        match tokio::time::timeout(PATIENCE, self.api.create(&params, &event)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => warn!(error = &error as &dyn std::error::Error, "cannot write an Event"),
            Err(_) => warn!("cannot write an Event: no answer within {PATIENCE:?}"),
        }
    }

    fn event(&self, object: ObjectReference, reason: &str, message: &str, now: Timestamp) -> Event {
        let message = &message[..message.floor_char_boundary(LONGEST_MESSAGE)];
        Event {
            metadata: ObjectMeta {
                generate_name: object.name.as_ref().map(|name| format!("{name}.")),
                namespace: Some(NAMESPACE.to_owned()),
                ..ObjectMeta::default()
            },
            type_: Some("Warning".to_owned()),
            reason: Some(reason.to_owned()),
            message: Some(message.to_owned()),
            involved_object: object,
            count: Some(1),
            first_timestamp: Some(Time(now)),
            last_timestamp: Some(Time(now)),
            source: Some(EventSource { component: Some(names::CONTROLLER.to_owned()), host: None }),
            reporting_component: Some(names::CONTROLLER.to_owned()),
            reporting_instance: Some(self.identity.clone()),
            ..Event::default()
        }
    }
}
