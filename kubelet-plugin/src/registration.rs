//! Making the plugin known to the kubelet.
//!
//! Architecture invariant: this server shares nothing with the others, no lock and no queue. Newer kubelets call
//! `GetInfo` again and again and drop a plugin that does not answer, so it must answer while a GPU hangs.

use std::future::Future;

use kerf_proto::registration::registration_server::{Registration, RegistrationServer};
use kerf_proto::registration::{DRA_PLUGIN, InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use kerf_proto::{dra, health};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::paths::Paths;

/// What the kubelet thinks of the plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum KubeletVerdict {
    /// It has said nothing yet.
    #[default]
    Unknown,
    /// It will send claims.
    Registered,
    /// It will not, for the reason given. It tries again by itself.
    Refused(String),
}

struct Service {
    info: PluginInfo,
    verdict: watch::Sender<KubeletVerdict>,
}

/// What the plugin says about itself: the DRA and health services at its DRA socket, the best first, because the kubelet
/// takes the first that it knows.
pub fn plugin_info(driver_name: &str, paths: &Paths) -> PluginInfo {
    let supported_versions = [
        dra::v1::SUPPORTED_VERSION,
        dra::v1beta1::SUPPORTED_VERSION,
        health::v1::SUPPORTED_VERSION,
        health::v1alpha1::SUPPORTED_VERSION,
    ];
    PluginInfo {
        r#type: DRA_PLUGIN.to_owned(),
        name: driver_name.to_owned(),
        endpoint: paths.dra_socket.display().to_string(),
        supported_versions: supported_versions.map(str::to_owned).to_vec(),
    }
}

/// Answers the kubelet until `shutdown` is done. `verdict` follows what the kubelet says.
pub async fn serve(
    listener: UnixListener,
    info: PluginInfo,
    verdict: watch::Sender<KubeletVerdict>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    Server::builder()
        .add_service(RegistrationServer::new(Service { info, verdict }))
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), shutdown)
        .await
}

#[tonic::async_trait]
impl Registration for Service {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus { plugin_registered, error } = request.into_inner();
        let verdict = if plugin_registered {
            tracing::info!("the kubelet has registered the plugin");
            KubeletVerdict::Registered
        } else {
            tracing::error!(error, "the kubelet has refused the plugin and will try again");
            KubeletVerdict::Refused(error)
        };
        self.verdict.send_if_modified(|known| {
            let changed = *known != verdict;
            *known = verdict;
            changed
        });
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
