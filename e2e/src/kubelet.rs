//! The kubelet's side of the DRA protocol, for what no pod can provoke: repeated calls, and several claims in one.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use kerf_proto::dra::v1::dra_plugin_client::DraPluginClient;
use kerf_proto::dra::v1::{
    Claim, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodeUnprepareResourceResponse,
    NodeUnprepareResourcesRequest,
};
use tonic::transport::Channel;

/// A connection to a plugin's DRA socket, as the kubelet makes it.
#[derive(Debug)]
pub struct Kubelet {
    client: DraPluginClient<Channel>,
}

/// A claim as the kubelet names it.
pub fn claim_ref(namespace: &str, name: &str, uid: &str) -> Claim {
    Claim { namespace: namespace.to_owned(), name: name.to_owned(), uid: uid.to_owned() }
}

impl Kubelet {
    /// Connects to `socket`.
    pub async fn connect(socket: &Path) -> Result<Kubelet> {
        let target = format!("unix:{}", socket.display());
        let client =
            DraPluginClient::connect(target).await.with_context(|| format!("cannot reach {}", socket.display()))?;
        Ok(Kubelet { client })
    }

    /// NodePrepareResources for these claims in one call; the answers by claim UID.
    pub async fn prepare(&mut self, claims: Vec<Claim>) -> Result<HashMap<String, NodePrepareResourceResponse>> {
        let answer = self.client.node_prepare_resources(NodePrepareResourcesRequest { claims }).await;
        Ok(answer.map_err(|status| anyhow!("NodePrepareResources: {status}"))?.into_inner().claims)
    }

    /// NodeUnprepareResources for these claims in one call; the answers by claim UID.
    pub async fn unprepare(&mut self, claims: Vec<Claim>) -> Result<HashMap<String, NodeUnprepareResourceResponse>> {
        let answer = self.client.node_unprepare_resources(NodeUnprepareResourcesRequest { claims }).await;
        Ok(answer.map_err(|status| anyhow!("NodeUnprepareResources: {status}"))?.into_inner().claims)
    }
}
