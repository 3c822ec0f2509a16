//! Serving and calling over real Unix sockets.

use std::path::{Path, PathBuf};

use kerf_kubelet_plugin::socket::{self, SocketFile};
use tempfile::TempDir;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Router;
use tonic::transport::{Channel, Endpoint};

/// A running server; ends when dropped.
pub(crate) struct Serving {
    path: PathBuf,
    shutdown: CancellationToken,
    _file: SocketFile,
    _directory: TempDir,
}

impl Serving {
    /// Serves `router` on a socket of its own.
    pub(crate) fn start(router: Router) -> Serving {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("dra.sock");
        let (listener, file) = socket::listen(&path).unwrap();
        let shutdown = CancellationToken::new();
        let until = shutdown.clone().cancelled_owned();
        tokio::spawn(router.serve_with_incoming_shutdown(UnixListenerStream::new(listener), until));
        Serving { path, shutdown, _file: file, _directory: directory }
    }

    /// A connection to it.
    pub(crate) async fn connect(&self) -> Channel {
        connect(&self.path).await
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

/// A connection to a socket.
pub(crate) async fn connect(path: &Path) -> Channel {
    try_connect(path).await.unwrap()
}

/// A connection to a socket, if someone listens.
pub(crate) async fn try_connect(path: &Path) -> Result<Channel, tonic::transport::Error> {
    Endpoint::from_shared(format!("unix://{}", path.display()))?.connect().await
}
