//! Events for what a person must act on.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kerf_api::{GpuNode, names};
use kube::runtime::events::{Event, EventType, Recorder};
use kube::{Client, Resource as _};
use tracing::warn;

use crate::render::Remark;

/// How long an Event may take: devices matter more.
const PATIENCE: Duration = Duration::from_secs(5);

/// The longest note of an Event, in bytes.
const LONGEST_NOTE: usize = 1024;

/// Writes Events about GpuNodes. `kubectl describe gpunode` shows them.
#[derive(Clone)]
pub struct Reporter {
    recorder: Recorder,
}

impl Reporter {
    /// `identity` names this process in the Events.
    pub fn new(client: Client, identity: &str) -> Reporter {
        let reporter = kube::runtime::events::Reporter {
            controller: names::CONTROLLER.to_owned(),
            instance: Some(identity.to_owned()),
        };
        Reporter { recorder: Recorder::new(client, reporter) }
    }

    /// Says `remark` about `gpu_node`. A failure is logged and nothing else: the remark is in the log as well.
    pub async fn report(&self, gpu_node: &GpuNode, remark: &Remark) {
        let mut note = remark.to_string();
        note.truncate(note.floor_char_boundary(LONGEST_NOTE));
        let event = Event {
            type_: EventType::Warning,
            reason: remark.reason().to_owned(),
            note: Some(note),
            action: "Publish".to_owned(),
            secondary: None,
        };
        let about: ObjectReference = gpu_node.object_ref(&());
        match tokio::time::timeout(PATIENCE, self.recorder.publish(&event, &about)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(%error, "cannot write an Event"),
            Err(_) => warn!("cannot write an Event: no answer within {PATIENCE:?}"),
        }
    }
}
