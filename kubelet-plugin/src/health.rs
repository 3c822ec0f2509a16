//! The health service: tells the kubelet which devices work, for the status of the pods that use them.
//!
//! A device is healthy as long as its GPU can be read. A GPU that is withheld for another reason (a MIG mode that waits for
//! a reset) still works for those who hold a part of it; the message says what is the matter.

use std::pin::Pin;
use std::time::Duration;

use futures::Stream;
use jiff::Timestamp;
use kerf_proto::health::v1::dra_resource_health_server::{
    DraResourceHealth as V1, DraResourceHealthServer as V1Server,
};
use kerf_proto::health::v1::{
    DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest, NodeWatchResourcesResponse,
};
use kerf_proto::health::v1alpha1::dra_resource_health_server::{
    DraResourceHealth as V1alpha1, DraResourceHealthServer as V1alpha1Server,
};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::inventory::{Inventory, UNREADABLE};

/// How often the list is repeated. The kubelet takes a device for unknown that is not repeated within [`GOOD_FOR`].
const REPEAT: Duration = Duration::from_secs(10);

/// For how many seconds a statement holds.
const GOOD_FOR: i64 = 30;

/// The longest message, in bytes: the kubelet cuts longer ones, also within a character.
const MESSAGE_BYTES: usize = 1024;

type HealthStream = Pin<Box<dyn Stream<Item = Result<NodeWatchResourcesResponse, Status>> + Send>>;

/// The service. Clones are the same.
#[derive(Clone)]
pub struct Health {
    node_name: String,
    inventory: watch::Receiver<Option<Inventory>>,
    shutdown: CancellationToken,
}

impl Health {
    /// Reports on what `inventory` holds, until `shutdown` ends every stream.
    pub fn new(node_name: &str, inventory: watch::Receiver<Option<Inventory>>, shutdown: CancellationToken) -> Health {
        Health { node_name: node_name.to_owned(), inventory, shutdown }
    }

    /// As gRPC service of version v1.
    pub fn v1(&self) -> V1Server<Self> {
        V1Server::new(self.clone())
    }

    /// As gRPC service of version v1alpha1.
    pub fn v1alpha1(&self) -> V1alpha1Server<Self> {
        V1alpha1Server::new(self.clone())
    }

    /// The complete list at once, on every change and every [`REPEAT`]. Nothing before the node was read once: an empty
    /// list would say that there is no device.
    fn stream(&self) -> HealthStream {
        let mut ticks = tokio::time::interval(REPEAT);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let this = self.clone();
        Box::pin(futures::stream::unfold((this, ticks), |(mut this, mut ticks)| async move {
            loop {
                tokio::select! {
                    _ = ticks.tick() => {}
                    Ok(()) = this.inventory.changed() => ticks.reset(),
                    () = this.shutdown.cancelled() => return None,
                }
                let list = {
                    let inventory = this.inventory.borrow_and_update();
                    inventory.as_ref().map(|inventory| list(inventory, &this.node_name, Timestamp::now()))
                };
                if let Some(devices) = list {
                    return Some((Ok(NodeWatchResourcesResponse { devices }), (this, ticks)));
                }
            }
        }))
    }
}

/// The health of every GPU and of every device that a claim holds here.
fn list(inventory: &Inventory, pool: &str, now: Timestamp) -> Vec<DeviceHealth> {
    let gpu_health = |gpu: &kerf_api::Gpu| match &gpu.withheld {
        Some(withheld) if withheld.reason == UNREADABLE => (HealthStatus::Unhealthy, withheld.message.clone()),
        Some(withheld) => (HealthStatus::Healthy, withheld.message.clone()),
        None => (HealthStatus::Healthy, String::new()),
    };
    let entry = |device_name: String, (health, message): (HealthStatus, String)| DeviceHealth {
        device: Some(DeviceIdentifier { pool_name: pool.to_owned(), device_name }),
        health: health.into(),
        last_updated_time: now.as_second(),
        health_check_timeout_seconds: GOOD_FOR,
        message: cut(message),
    };
    let gpus = inventory.status.gpus.iter().map(|gpu| entry(gpu.name.clone(), gpu_health(gpu)));
    let partitions = inventory.held.iter().filter(|held| held.name != held.gpu).map(|held| {
        let gpu = inventory.status.gpus.iter().find(|gpu| gpu.name == held.gpu);
        let health = gpu.map_or_else(
            || {
                let why = inventory.status.message.clone();
                (HealthStatus::Unhealthy, why.unwrap_or_else(|| format!("{} is not on this node any more", held.gpu)))
            },
            gpu_health,
        );
        entry(held.name.clone(), health)
    });
    gpus.chain(partitions).collect()
}

/// Cuts at a character, in the kubelet's stead.
fn cut(mut message: String) -> String {
    message.truncate(message.floor_char_boundary(MESSAGE_BYTES));
    message
}

#[tonic::async_trait]
impl V1 for Health {
    type NodeWatchResourcesStream = HealthStream;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<HealthStream>, Status> {
        Ok(Response::new(self.stream()))
    }
}

#[tonic::async_trait]
impl V1alpha1 for Health {
    type NodeWatchResourcesStream = HealthStream;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<HealthStream>, Status> {
        Ok(Response::new(self.stream()))
    }
}
