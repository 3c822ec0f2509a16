//! Events for what a person must act on.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kerf_api::{GpuNode, names};
use kube::api::PostParams;
use kube::{Api, Client, Resource as _, ResourceExt as _};
use tracing::warn;

use crate::render::Remark;

/// How long an Event may take: devices matter more.
const PATIENCE: Duration = Duration::from_secs(5);

/// The longest message of an Event, in bytes.
const LONGEST_MESSAGE: usize = 1024;

/// Where Events about objects without a namespace belong.
const NAMESPACE: &str = "default";

/// Writes Events about GpuNodes. `kubectl describe gpunode` shows them.
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
        let event = self.event(gpu_node, remark, Timestamp::now());
        let params = PostParams::default();
        match tokio::time::timeout(PATIENCE, self.api.create(&params, &event)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => warn!(error = &error as &dyn std::error::Error, "cannot write an Event"),
            Err(_) => warn!("cannot write an Event: no answer within {PATIENCE:?}"),
        }
    }

    fn event(&self, gpu_node: &GpuNode, remark: &Remark, now: Timestamp) -> Event {
        let mut message = remark.to_string();
        message.truncate(message.floor_char_boundary(LONGEST_MESSAGE));
        Event {
            metadata: ObjectMeta {
                generate_name: Some(format!("{}.", gpu_node.name_any())),
                namespace: Some(NAMESPACE.to_owned()),
                ..ObjectMeta::default()
            },
            type_: Some("Warning".to_owned()),
            reason: Some(remark.reason().to_owned()),
            message: Some(message),
            involved_object: gpu_node.object_ref(&()),
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
