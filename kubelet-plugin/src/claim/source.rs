//! Where claims come from.

use std::future::Future;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};

use super::ClaimRef;

/// How long one claim may take to be fetched. Well below the kubelet's patience, so that the pod's events name the cause.
const PATIENCE: Duration = Duration::from_secs(10);

/// Gives claims by name.
pub trait ClaimSource: Send + Sync + 'static {
    /// The claim of that namespace and name, whatever its UID; `None` when there is none.
    fn get(&self, claim: &ClaimRef) -> impl Future<Output = Result<Option<ResourceClaim>, SourceError>> + Send;
}

/// Why a claim could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// No answer.
    #[error("the API server has not answered for {} s: the kubelet will retry", PATIENCE.as_secs())]
    Timeout,
    /// An answer that is none.
    #[error("the claim cannot be read from the API server: {0}")]
    Api(#[from] Box<kube::Error>),
}

/// Claims from the API server.
///
/// Architecture invariant: one GET a claim and no watch. A node needs a claim once, when a pod starts; a cache of a
/// cluster's claims on every node would cost memory and API load for nothing.
#[derive(Clone)]
pub struct ApiClaims {
    client: Client,
}

impl ApiClaims {
    /// Claims that `client` may read.
    pub fn new(client: Client) -> ApiClaims {
        ApiClaims { client }
    }
}

impl ClaimSource for ApiClaims {
    async fn get(&self, claim: &ClaimRef) -> Result<Option<ResourceClaim>, SourceError> {
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
        match tokio::time::timeout(PATIENCE, api.get_opt(&claim.name)).await {
            Ok(found) => Ok(found.map_err(Box::new)?),
            Err(_) => Err(SourceError::Timeout),
        }
    }
}
