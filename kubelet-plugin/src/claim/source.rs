//! Where claims come from.

use std::collections::HashMap;
use std::future::Future;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{ListParams, ObjectMeta};
use kube::{Api, Client};

use super::ClaimRef;

/// How long one claim may take to be fetched. Well below the kubelet's patience, so that the pod's events name the cause.
const PATIENCE: Duration = Duration::from_secs(10);

/// How many claims are listed at a time.
const PAGE: u32 = 500;

/// Gives claims by name.
pub trait ClaimSource: Send + Sync + 'static {
    /// The claim of that namespace and name, whatever its UID; `None` when there is none.
    fn get(&self, claim: &ClaimRef) -> impl Future<Output = Result<Option<ResourceClaim>, SourceError>> + Send;

    /// The names of all claims of the cluster, by UID: the API has no other way from a UID to a claim.
    fn names(&self) -> impl Future<Output = Result<HashMap<String, ClaimRef>, SourceError>> + Send;
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

impl SourceError {
    /// Whether asking for the next claim can be expected to end the same way.
    pub fn is_outage(&self) -> bool {
        match self {
            SourceError::Timeout => true,
            SourceError::Api(error) => !matches!(**error, kube::Error::Api(_)),
        }
    }
}

/// Claims from the API server.
///
/// Architecture invariant: single GETs and no watch. A node needs its few claims when pods start, and once a minute to see
/// that they are still there; a cache of a cluster's claims on every node would cost memory and API load for nothing.
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
        match within(api.get(&claim.name)).await {
            Ok(found) => Ok(Some(found)),
            Err(SourceError::Api(error)) if is_no_such_claim(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn names(&self) -> Result<HashMap<String, ClaimRef>, SourceError> {
        let api: Api<ResourceClaim> = Api::all(self.client.clone());
        let mut names = HashMap::new();
        let mut page = ListParams::default().limit(PAGE);
        loop {
            let found = within(api.list_metadata(&page)).await?;
            names.extend(found.items.into_iter().filter_map(|claim| {
                let ObjectMeta { uid, namespace, name, .. } = claim.metadata;
                let uid = uid?;
                Some((uid.clone(), ClaimRef { uid, namespace: namespace?, name: name? }))
            }));
            match found.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => page = page.continue_token(&token),
                None => return Ok(names),
            }
        }
    }
}

/// Waits for an answer, not for ever.
async fn within<T>(exchange: impl Future<Output = Result<T, kube::Error>>) -> Result<T, SourceError> {
    match tokio::time::timeout(PATIENCE, exchange).await {
        Ok(answer) => Ok(answer.map_err(Box::new)?),
        Err(_) => Err(SourceError::Timeout),
    }
}

/// Whether the API server itself says that there is no such object. A bare 404 is not enough: proxies give it, and so does
/// an API server that does not serve the API group at the moment, and a claim that is taken for gone loses its devices.
fn is_no_such_claim(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404 && status.reason == "NotFound")
}
