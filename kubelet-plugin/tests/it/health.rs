//! The health service over a real socket.

use std::time::Duration;

use kerf_api::{Gpu, GpuNodeStatus, GpuOffer, Withheld};
use kerf_kubelet_plugin::health::Health;
use kerf_kubelet_plugin::inventory::{HeldDevice, Inventory, MIG_MODE_PENDING, UNREADABLE};
use kerf_proto::health::v1::dra_resource_health_client::DraResourceHealthClient as V1;
use kerf_proto::health::v1::{HealthStatus, NodeWatchResourcesRequest, NodeWatchResourcesResponse};
use kerf_proto::health::v1alpha1::dra_resource_health_client::DraResourceHealthClient as V1alpha1;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tonic::transport::Server;

use crate::rpc::Serving;

const PATIENCE: Duration = Duration::from_secs(20);

fn gpu(name: &str, withheld: Option<(&str, &str)>) -> Gpu {
    let withheld = withheld.map(|(reason, message)| Withheld { reason: reason.into(), message: message.into() });
    Gpu { name: name.into(), offer: GpuOffer::Whole, withheld, ..Gpu::default() }
}

fn inventory(gpus: Vec<Gpu>, held: &[(&str, &str)]) -> Inventory {
    let held = held.iter().map(|(name, gpu)| HeldDevice { name: (*name).into(), gpu: (*gpu).into() }).collect();
    Inventory { status: GpuNodeStatus { gpus, ..GpuNodeStatus::default() }, held, ..Inventory::default() }
}

async fn next(stream: &mut Streaming<NodeWatchResourcesResponse>) -> Vec<(String, HealthStatus, String)> {
    let list = tokio::time::timeout(PATIENCE, stream.message()).await.unwrap().unwrap().unwrap();
    let entry = |device: kerf_proto::health::v1::DeviceHealth| {
        let id = device.device.clone().unwrap();
        assert_eq!(id.pool_name, "node-1");
        assert_eq!(device.health_check_timeout_seconds, 30);
        assert!(device.message.len() <= 1024, "the kubelet cuts longer messages anywhere");
        (id.device_name, device.health(), device.message)
    };
    list.devices.into_iter().map(entry).collect()
}

#[tokio::test]
async fn the_whole_list_comes_at_once_on_change_and_to_both_versions() {
    let (sender, receiver) = watch::channel(None);
    let shutdown = CancellationToken::new();
    let health = Health::new("node-1", receiver, shutdown.clone());
    let serving = Serving::start(Server::builder().add_service(health.v1()).add_service(health.v1alpha1()));
    let mut kubelet = V1::new(serving.connect().await);
    let mut stream = kubelet.node_watch_resources(NodeWatchResourcesRequest {}).await.unwrap().into_inner();

    let slice = ("gpu-3b-00-0-mig-1g10gb-4", "gpu-3b-00-0");
    let gone = ("gpu-d8-00-0-mig-1g10gb-0", "gpu-d8-00-0");
    let whole = ("gpu-5e-00-0", "gpu-5e-00-0");
    let gpus = vec![gpu("gpu-3b-00-0", None), gpu("gpu-5e-00-0", Some((MIG_MODE_PENDING, "reset it")))];
    sender.send_replace(Some(inventory(gpus, &[slice, gone, whole])));
    let good = next(&mut stream).await;
    assert_eq!(
        good,
        [
            ("gpu-3b-00-0".into(), HealthStatus::Healthy, String::new()),
            ("gpu-5e-00-0".into(), HealthStatus::Healthy, "reset it".into()),
            (slice.0.into(), HealthStatus::Healthy, String::new()),
            (gone.0.into(), HealthStatus::Unhealthy, "gpu-d8-00-0 is not on this node any more".into()),
        ]
    );

    let long = "ä".repeat(1000);
    sender.send_replace(Some(inventory(vec![gpu("gpu-3b-00-0", Some((UNREADABLE, &long)))], &[slice])));
    let lost = next(&mut stream).await;
    let health: Vec<_> = lost.iter().map(|(name, health, _)| (name.as_str(), *health)).collect();
    assert_eq!(health, [("gpu-3b-00-0", HealthStatus::Unhealthy), (slice.0, HealthStatus::Unhealthy)]);

    let mut old_kubelet = V1alpha1::new(serving.connect().await);
    let mut old = old_kubelet.node_watch_resources(NodeWatchResourcesRequest {}).await.unwrap().into_inner();
    assert_eq!(next(&mut old).await, lost, "at once, though nothing changes");

    shutdown.cancel();
    assert!(tokio::time::timeout(PATIENCE, stream.message()).await.unwrap().unwrap().is_none(), "ends in good order");
}
