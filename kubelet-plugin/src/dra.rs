//! The DRA service: prepares and releases the claims the kubelet names.
//!
//! One implementation answers both API versions, whose messages are the same. Every claim of a call goes its own way, at
//! the same time as the others, and ends in its own entry of the reply: what is wrong with one never fails another.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::join_all;
use kerf_proto::dra::v1::dra_plugin_server::{DraPlugin as V1, DraPluginServer as V1Server};
use kerf_proto::dra::v1::{
    self, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
};
use kerf_proto::dra::v1beta1::dra_plugin_server::{DraPlugin as V1beta1, DraPluginServer as V1beta1Server};
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status};
use tracing::Instrument as _;

use crate::claim::{self, ClaimRef, ClaimSource};
use crate::engine::{Claim, PreparedDevice, claim_span};
use crate::events::Events;
use crate::failure::{Class, Failure};
use crate::metrics::Metrics;

/// How long a call may take. The kubelet gives up after 45 s (`k8s.io/kubernetes/pkg/kubelet/cm/dra/plugin`); an answer
/// before that tells it what the matter was.
const PATIENCE: Duration = Duration::from_secs(40);

/// What the service needs of the node. Both block.
pub trait Carver: Send + Sync + 'static {
    /// Makes the devices of a claim usable.
    fn prepare(&self, claim: &Claim, deadline: Instant) -> Result<Vec<PreparedDevice>, Failure>;

    /// Undoes it. Succeeds for a claim that is not known.
    fn unprepare(&self, uid: &str, deadline: Instant) -> Result<(), Failure>;
}

/// The service. Clones share everything.
pub struct Dra<S, C>(Arc<Shared<S, C>>);

struct Shared<S, C> {
    driver_name: String,
    node_name: String,
    claims: S,
    carver: Arc<C>,
    events: Events,
    work: TaskTracker,
    metrics: Metrics,
}

impl<S: ClaimSource, C: Carver> Dra<S, C> {
    /// The service of `driver_name` on `node_name`, with claims from `claims` and the work done by `carver`.
    pub fn new(
        driver_name: &str,
        node_name: &str,
        claims: S,
        carver: Arc<C>,
        events: Events,
        metrics: Metrics,
    ) -> Dra<S, C> {
        Dra(Arc::new(Shared {
            driver_name: driver_name.to_owned(),
            node_name: node_name.to_owned(),
            claims,
            carver,
            events,
            work: TaskTracker::new(),
            metrics,
        }))
    }

    /// The claims in work. They outlive their calls: a kubelet that has closed its connection stops no carving.
    pub fn work(&self) -> TaskTracker {
        self.0.work.clone()
    }

    /// As gRPC service of version v1.
    pub fn v1(&self) -> V1Server<Self> {
        V1Server::new(self.clone())
    }

    /// As gRPC service of version v1beta1.
    pub fn v1beta1(&self) -> V1beta1Server<Self> {
        V1beta1Server::new(self.clone())
    }

    async fn prepare_all(&self, request: NodePrepareResourcesRequest) -> NodePrepareResourcesResponse {
        let deadline = Instant::now() + PATIENCE;
        let claims = each(request.claims, |claim| async move {
            let (devices, error) = match self.prepare(claim, deadline).await {
                Ok(devices) => (devices.into_iter().map(device).collect(), String::new()),
                Err(failure) => (Vec::new(), failure.message),
            };
            NodePrepareResourceResponse { devices, error }
        });
        NodePrepareResourcesResponse { claims: claims.await }
    }

    async fn unprepare_all(&self, request: NodeUnprepareResourcesRequest) -> NodeUnprepareResourcesResponse {
        let deadline = Instant::now() + PATIENCE;
        let claims = each(request.claims, |claim| async move {
            let failure = self.unprepare(claim, deadline).await.err();
            NodeUnprepareResourceResponse { error: failure.map(|failure| failure.message).unwrap_or_default() }
        });
        NodeUnprepareResourcesResponse { claims: claims.await }
    }

    async fn prepare(&self, asked: ClaimRef, deadline: Instant) -> Result<Vec<PreparedDevice>, Failure> {
        let started = Instant::now();
        let prepared = self.try_prepare(&asked, deadline).await;
        let took = started.elapsed();
        self.0.metrics.prepared(took, prepared.as_ref().err());
        let ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        match &prepared {
            Ok(devices) => {
                let devices: Vec<&str> = devices.iter().map(|device| device.device.as_str()).collect();
                tracing::info!(devices = devices.join(", "), ms, "prepared");
            }
            Err(Failure { class, message }) => {
                tracing::warn!(error = message, class = class.name(), ms, "not prepared");
            }
        }
        prepared
    }

    async fn try_prepare(&self, asked: &ClaimRef, deadline: Instant) -> Result<Vec<PreparedDevice>, Failure> {
        let shared = &self.0;
        let work = shared.work.token();
        let found = shared.claims.get(asked).await?;
        let claim = claim::check(asked, found.as_ref(), &shared.driver_name, &shared.node_name).map_err(|error| {
            let needs_a_person = error.needs_a_person();
            let failure = Failure::from(error);
            if needs_a_person {
                shared.events.claim_refused(asked, &failure.message);
            }
            failure
        })?;
        let carver = Arc::clone(&shared.carver);
        blocking(move || {
            let _work = work;
            carver.prepare(&claim, deadline)
        })
        .await
    }

    async fn unprepare(&self, asked: ClaimRef, deadline: Instant) -> Result<(), Failure> {
        let started = Instant::now();
        let uid = asked.uid.clone();
        let (carver, work) = (Arc::clone(&self.0.carver), self.0.work.token());
        let released = blocking(move || {
            let _work = work;
            carver.unprepare(&uid, deadline)
        })
        .await;
        let took = started.elapsed();
        self.0.metrics.unprepared(took, released.as_ref().err());
        let ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        match &released {
            Ok(()) => tracing::info!(ms, "unprepared"),
            Err(Failure { class, message }) => {
                tracing::warn!(error = message, class = class.name(), ms, "not unprepared");
                // The kubelet keeps the pod in Terminating and tells its log alone why.
                self.0.events.claim_not_released(&asked, message);
            }
        }
        released
    }
}

/// Answers every claim of a call at the same time, each in a span of its own. A UID named twice is answered once.
async fn each<F, T>(claims: Vec<v1::Claim>, answer: impl Fn(ClaimRef) -> F) -> std::collections::HashMap<String, T>
where
    F: Future<Output = T>,
{
    let claims: BTreeMap<String, ClaimRef> = claims
        .into_iter()
        .map(|v1::Claim { uid, namespace, name }| (uid.clone(), ClaimRef { uid, namespace, name }))
        .collect();
    let answers = claims.into_iter().map(|(uid, claim)| {
        let span = claim_span(&claim.uid, &claim.namespace, &claim.name);
        let answer = answer(claim).instrument(span);
        async move { (uid, answer.await) }
    });
    join_all(answers).await.into_iter().collect()
}

/// Does blocking work within the caller's span. A panic is an error like any other: it must not reach other claims.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let span = tracing::Span::current();
    tokio::task::spawn_blocking(move || span.in_scope(work)).await.unwrap_or_else(|panic| {
        let message = format!("kerf has a defect, see the log of kerf-kubelet-plugin on this node: {panic}");
        Err(Failure { class: Class::Defect, message })
    })
}

fn device(prepared: PreparedDevice) -> Device {
    let PreparedDevice { requests, pool, device, cdi_ids, share_id } = prepared;
    Device { request_names: requests, pool_name: pool, device_name: device, cdi_device_ids: cdi_ids, share_id }
}

impl<S, C> Clone for Dra<S, C> {
    fn clone(&self) -> Self {
        Dra(Arc::clone(&self.0))
    }
}

#[tonic::async_trait]
impl<S: ClaimSource, C: Carver> V1 for Dra<S, C> {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        Ok(Response::new(self.prepare_all(request.into_inner()).await))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        Ok(Response::new(self.unprepare_all(request.into_inner()).await))
    }
}

#[tonic::async_trait]
impl<S: ClaimSource, C: Carver> V1beta1 for Dra<S, C> {
    /// As in v1: a kubelet that old does not know `share_id` and skips it.
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        Ok(Response::new(self.prepare_all(request.into_inner()).await))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        Ok(Response::new(self.unprepare_all(request.into_inner()).await))
    }
}
