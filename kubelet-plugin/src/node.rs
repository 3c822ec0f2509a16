//! This node as an object of the API.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Api, Client};

/// How long one exchange with the API server may take.
pub(crate) const API_PATIENCE: Duration = Duration::from_secs(10);

/// Why something about this node could not be read from or written to the API server.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NodeError {
    /// No answer.
    #[error("the API server has not answered for {} s", API_PATIENCE.as_secs())]
    Timeout,
    /// No such node.
    #[error("there is no node {0}: check --node-name")]
    NoNode(String),
    /// An answer that is none.
    #[error("{action}: {source}")]
    Api {
        /// What was tried.
        action: &'static str,
        /// What came back.
        source: Box<kube::Error>,
    },
}

impl NodeError {
    /// Whether somebody else has written the object meanwhile.
    pub(crate) fn is_conflict(&self) -> bool {
        self.has_code(409)
    }

    /// Whether there is no such object.
    pub(crate) fn is_not_found(&self) -> bool {
        self.has_code(404)
    }

    fn has_code(&self, code: u16) -> bool {
        matches!(self, NodeError::Api { source, .. } if matches!(&**source, kube::Error::Api(status) if status.code == code))
    }
}

/// This node as owner of an object, which then goes when the node is deleted. Always asked anew: a node that was deleted
/// and came back has another UID.
pub(crate) async fn owner(client: &Client, node_name: &str) -> Result<OwnerReference, NodeError> {
    let api: Api<Node> = Api::all(client.clone());
    let node = within(api.get_opt(node_name), "the node cannot be read").await?;
    let uid = node.and_then(|node| node.metadata.uid).ok_or_else(|| NodeError::NoNode(node_name.to_owned()))?;
    Ok(OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node_name.to_owned(),
        uid,
        ..OwnerReference::default()
    })
}

/// Waits for an exchange with the API server, not for ever.
pub(crate) async fn within<T>(
    exchange: impl Future<Output = Result<T, kube::Error>>,
    action: &'static str,
) -> Result<T, NodeError> {
    match tokio::time::timeout(API_PATIENCE, exchange).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(NodeError::Api { action, source: Box::new(error) }),
        Err(_) => Err(NodeError::Timeout),
    }
}
