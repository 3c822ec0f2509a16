//! Wires the parts: what starts when, and how all of it ends.
//!
//! At SIGTERM the registration socket goes first, which is how the kubelet learns to send no more claims; then claims in
//! work are finished; then the lease is released, and with it the publication of the node's devices.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kerf_telemetry::http::{BindError, Server as HttpServer};
use kerf_telemetry::log;
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tracing::{Instrument as _, info_span};

use crate::args::Args;
use crate::claim::ApiClaims;
use crate::dra::Dra;
use crate::driver::{Driver, DriverFiles};
use crate::health::Health;
use crate::inventory::Watcher;
use crate::lease::Holder;
use crate::metrics::{Metrics, Seen};
use crate::observe::observe;
use crate::paths::Paths;
use crate::reconcile::Reconciler;
use crate::registration::KubeletVerdict;
use crate::socket::{self, SocketError};
use crate::{events, inventory, lease, node_status, reconcile, registration};

/// How many threads serve the kubelet. Work on GPUs has threads of its own.
const WORKERS: usize = 2;

/// How long claims in work may take to finish at the end. Kubernetes kills a pod after 30 s unless told otherwise; what
/// was not finished is mended by the next start.
const DRAIN: Duration = Duration::from_secs(20);

/// How long to wait for the API server's connection.
const CONNECT: Duration = Duration::from_secs(5);

/// Why the program ends early.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Threads or signals are not to be had.
    #[error("the system does not let the program start: {0}")]
    System(#[from] std::io::Error),
    /// No kubeconfig.
    #[error("the kubeconfig {} cannot be used: {error}", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: Box<KubeconfigError>,
    },
    /// Not in a pod.
    #[error("no --kubeconfig is given and the pod's service account cannot be used: {0}")]
    InCluster(#[from] InClusterError),
    /// The client cannot be made.
    #[error("the API server cannot be talked to: {0}")]
    Client(#[from] Box<kube::Error>),
    /// See [`SocketError`].
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// See [`BindError`].
    #[error(transparent)]
    Http(#[from] BindError),
    /// A server ended by itself.
    #[error("the {server} server has ended: {error}")]
    Server {
        /// Which one.
        server: &'static str,
        /// Why.
        error: String,
    },
}

/// Runs the plugin until SIGTERM or SIGINT.
pub fn run(args: Args) -> Result<(), RunError> {
    log::init(args.telemetry.log_format);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build()?;
    let done = runtime.block_on(serve(args));
    // A call into the driver that hangs must not hold up the end.
    runtime.shutdown_background();
    done
}

async fn serve(args: Args) -> Result<(), RunError> {
    let Args {
        node_name,
        driver_name,
        driver_root,
        host_driver_root,
        kubelet_root,
        cdi_root,
        namespace,
        kubeconfig,
        foreign_instances,
        telemetry,
    } = args;
    let client = client(kubeconfig).await?;
    let http_server = match telemetry.http_address {
        Some(address) => Some(HttpServer::bind(address).await?),
        None => None,
    };
    let metrics = Metrics::default();
    let paths = Paths::new(&kubelet_root, &cdi_root, &driver_name);
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);

    let (events, event_writer) = events::channel(&node_name);
    let (inventory_sender, inventory) = watch::channel(None);
    let (verdict_sender, verdict) = watch::channel(KubeletVerdict::Unknown);
    let changed = Arc::new(Notify::new());
    let files = DriverFiles { driver_root, host_driver_root };
    let driver = Arc::new(Driver::new(
        files,
        &driver_name,
        &paths,
        foreign_instances,
        events.clone(),
        Arc::clone(&changed),
        metrics.clone(),
    ));
    let (deregister, drain, retire) = (CancellationToken::new(), CancellationToken::new(), CancellationToken::new());

    // The DRA socket comes first: the kubelet connects to it as soon as it knows of it.
    let (dra_listener, dra_file) = socket::listen(&paths.dra_socket)?;
    let claims = ApiClaims::new(client.clone());
    let dra = Dra::new(&driver_name, &node_name, claims.clone(), Arc::clone(&driver), events.clone(), metrics.clone());
    let health = Health::new(&node_name, inventory.clone(), drain.clone());
    let dra_server = Server::builder()
        .add_service(dra.v1())
        .add_service(dra.v1beta1())
        .add_service(health.v1())
        .add_service(health.v1alpha1())
        .serve_with_incoming_shutdown(UnixListenerStream::new(dra_listener), drain.clone().cancelled_owned());
    let mut dra_server = tokio::spawn(dra_server.instrument(info_span!("dra")));

    let (registration_listener, registration_file) = socket::listen(&paths.registration_socket)?;
    let info = registration::plugin_info(&driver_name, &paths);
    let registration_server =
        registration::serve(registration_listener, info, verdict_sender, deregister.clone().cancelled_owned());
    let mut registration_server = tokio::spawn(registration_server.instrument(info_span!("registration")));

    let reconciler = Reconciler {
        claims,
        node: Arc::clone(&driver),
        driver_name: driver_name.clone(),
        node_name: node_name.clone(),
        events: events.clone(),
        metrics: metrics.clone(),
    };
    let reconciling = tokio::spawn(reconcile::run(reconciler, drain.clone()).instrument(info_span!("reconcile")));
    let reader = Arc::clone(&driver);
    let watcher = Watcher { read: Arc::new(move || reader.read_inventory()), changed, events };
    let watching = inventory::watch(watcher, inventory_sender, retire.clone());
    let watching = tokio::spawn(watching.instrument(info_span!("inventory")));
    let (stands, standing) = watch::channel(false);
    if let Some(server) = http_server {
        let seen = Seen { inventory: inventory.clone(), verdict: verdict.clone() };
        let observing = observe(server, metrics, seen, standing.clone(), retire.clone());
        tokio::spawn(observing.instrument(info_span!("http")));
    }
    let publishing = publish(client.clone(), node_name.clone(), inventory, verdict, stands, retire.clone());
    let publishing = tokio::spawn(publishing.instrument(info_span!("node_status")));
    let leasing = hold(client.clone(), namespace, node_name.clone(), standing, retire.clone());
    let leasing = tokio::spawn(leasing.instrument(info_span!("lease")));
    let writing_events = tokio::spawn(event_writer.run(client).instrument(info_span!("events")));
    tracing::info!(node = node_name, driver = driver_name, socket = %dra_file.path().display(), "serving");

    let early = tokio::select! {
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
        ended = &mut dra_server => Some(("DRA", ended)),
        ended = &mut registration_server => Some(("registration", ended)),
    };

    tracing::info!("stopping: no more claims");
    drop(registration_file);
    deregister.cancel();
    drain.cancel();
    if early.is_none() {
        finish("claims in work", DRAIN, dra_server).await;
    }
    retire.cancel();
    for (what, task) in
        [("reconcile", reconciling), ("lease", leasing), ("inventory", watching), ("GpuNode", publishing)]
    {
        finish(what, CONNECT, task).await;
    }
    writing_events.abort();
    drop(dra_file);
    tracing::info!("stopped");
    match early {
        None => Ok(()),
        Some((server, ended)) => {
            let error = match ended {
                Ok(Ok(())) => "no reason given".to_owned(),
                Ok(Err(error)) => error.to_string(),
                Err(error) => error.to_string(),
            };
            Err(RunError::Server { server, error })
        }
    }
}

async fn client(kubeconfig: Option<PathBuf>) -> Result<Client, RunError> {
    let mut config = match kubeconfig {
        None => Config::incluster()?,
        Some(path) => {
            let read = async {
                let kubeconfig = Kubeconfig::read_from(&path)?;
                Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await
            };
            let unusable = |error| RunError::Kubeconfig { path: path.clone(), error: Box::new(error) };
            read.await.map_err(unusable)?
        }
    };
    config.connect_timeout = Some(CONNECT);
    Ok(Client::try_from(config).map_err(Box::new)?)
}

async fn publish(
    client: Client,
    node_name: String,
    inventory: watch::Receiver<Option<inventory::Inventory>>,
    verdict: watch::Receiver<KubeletVerdict>,
    stands: watch::Sender<bool>,
    shutdown: CancellationToken,
) {
    node_status::publish(client, &node_name, inventory, verdict, stands, shutdown).await;
}

/// Takes the lease once the GpuNode stands. Earlier it would vouch for what an earlier plugin left there: devices would be
/// published, and pods bound, that the kubelet cannot have prepared yet or that are not there any more.
async fn hold(
    client: Client,
    namespace: String,
    node_name: String,
    mut standing: watch::Receiver<bool>,
    shutdown: CancellationToken,
) {
    if !matches!(shutdown.run_until_cancelled(standing.wait_for(|stands| *stands)).await, Some(Ok(_))) {
        return;
    }
    let identity = format!("{node_name}_{}_{}", inventory::boot_id(), std::process::id());
    let holder = Holder { identity, since: Timestamp::now() };
    lease::hold(client, &namespace, &node_name, holder, shutdown).await;
}

/// Waits for a task to end, but not for ever.
async fn finish<T>(what: &str, patience: Duration, mut task: JoinHandle<T>) {
    if tokio::time::timeout(patience, &mut task).await.is_err() {
        tracing::warn!("{what}: not finished within {} s", patience.as_secs());
        task.abort();
    }
}
