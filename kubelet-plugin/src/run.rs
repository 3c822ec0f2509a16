//! Wires the parts: what starts when, and how all of it ends.
//!
//! At SIGTERM the claims in work are finished first: the kubelet cuts off what it waits for when it forgets a plugin. Then
//! the registration socket goes, which is how it learns to forget this one, and with it the lease. What it sends before it
//! has learned that is served, or goes to another plugin if there is one. `HANDOVER.md` tells all of it.

use std::error::Error;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kerf_proto::registration::PluginInfo;
use kerf_telemetry::http::{BindError, Server as HttpServer};
use kerf_telemetry::log;
use kube::config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, watch};
use tokio::task::JoinError;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tracing::{Instrument as _, info_span};

use crate::args::{Args, CdiPart};
use crate::claim::ApiClaims;
use crate::dra::Dra;
use crate::driver::{Driver, DriverFiles};
use crate::engine::{Injection, Wishes};
use crate::health::Health;
use crate::hook::{self, Hook, HookError};
use crate::inventory::Watcher;
use crate::lease::{AtExit, End, Holder, NodeLease};
use crate::metrics::{Metrics, Seen};
use crate::node_status::Sources;
use crate::observe::observe;
use crate::paths::{Paths, Socket};
use crate::reconcile::Reconciler;
use crate::registration::KubeletVerdict;
use crate::socket::{self, SocketError};
use crate::{events, inventory, neighbours, node_status, reconcile, registration};

/// How many threads serve the kubelet. Work on GPUs has threads of its own.
const WORKERS: usize = 2;

/// How long the kubelet is kept waiting for a plugin that has not seen its GPUs. Opening NVML takes of the order of a second
/// on real hardware; a plugin that cannot is of use all the same, as it releases claims.
const FIRST_LOOK: Duration = Duration::from_secs(5);

/// How long to wait at the end for a moment with no claim in work, once before the kubelet is told and once after it. What
/// is not finished then is mended by the next start. With the rest it is less than the 60 s that the chart gives the pod.
const DRAIN: Duration = Duration::from_secs(10);

/// How long the kubelet may take to see that a registration socket is gone: it looks every second
/// (`k8s.io/kubernetes/pkg/kubelet/pluginmanager`, `loopSleepDuration`).
const FORGET: Duration = Duration::from_secs(2);

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
        pod_uid,
        host_root,
        driver_root,
        kubelet_root,
        cdi_root,
        cdi_hook,
        hook_root,
        cdi_without,
        namespace,
        kubeconfig,
        foreign_instances,
        at_exit,
        telemetry,
    } = args;
    let client = client(kubeconfig).await?;
    let http_server = match telemetry.http_address {
        Some(address) => Some(HttpServer::bind(address).await?),
        None => None,
    };
    let metrics = Metrics::default();
    let alone = Paths::new(&kubelet_root, &cdi_root, &driver_name);
    let paths = match &pod_uid {
        None => alone,
        Some(uid) => alone.of_pod(uid),
    };
    socket::check(&paths.registration_socket)?;
    let since = Timestamp::now();
    // In containers the process id says little: it may be 1 in both of two pods.
    let identity = format!("{node_name}_{}_{}", since.as_nanosecond(), std::process::id());
    let lease = NodeLease::new(client.clone(), &namespace, &node_name, Holder { identity, since }, metrics.clone());
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);

    let (events, event_writer) = events::channel(&node_name, &metrics);
    let (inventory_sender, inventory) = watch::channel(None);
    let (verdict_sender, verdict) = watch::channel(KubeletVerdict::Unknown);
    let changed = Arc::new(Notify::new());
    let wishes = Wishes::new(foreign_instances);
    let leaves_out = |part| cdi_without.contains(&part);
    let injection = Injection {
        hook: if leaves_out(CdiPart::Hooks) {
            None
        } else {
            install_hook(cdi_hook, &hook_root.join(&driver_name), &paths.bin, &host_root)
        },
        metadata: !leaves_out(CdiPart::Metadata),
        additional_gids: !leaves_out(CdiPart::AdditionalGids),
    };
    let files = DriverFiles { host_root, driver_root, injection };
    let driver = Arc::new(Driver::new(
        files,
        &driver_name,
        &paths,
        wishes.clone(),
        events.clone(),
        Arc::clone(&changed),
        metrics.clone(),
    ));
    let (deregister, drain) = (CancellationToken::new(), CancellationToken::new());
    let (stands, standing) = watch::channel(false);
    let (held_sender, held) = watch::channel(false);
    if let Some(server) = http_server {
        let seen = Seen { inventory: inventory.clone(), verdict: verdict.clone() };
        let observing = observe(server, metrics.clone(), seen, standing.clone(), drain.clone());
        tokio::spawn(observing.instrument(info_span!("http")));
    }
    let writing_events = tokio::spawn(event_writer.run(client.clone()).instrument(info_span!("events")));

    tokio::select! {
        () = neighbours::wait_for_former(&paths, driver.former(), &events) => {}
        _ = terminate.recv() => return Ok(()),
        _ = interrupt.recv() => return Ok(()),
    }
    let former = driver.former().clone();
    let watching_former = neighbours::watch_former(paths.clone(), former, Arc::clone(&changed), drain.clone());
    tokio::spawn(watching_former.instrument(info_span!("former_driver")));

    // The DRA socket comes first: the kubelet connects to it as soon as it knows of it.
    let (dra_listener, dra_file) = neighbours::listen(&paths, Socket::Dra).await?;
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

    let info = registration::plugin_info(&driver_name, &paths);
    let registering = register(paths.clone(), info, inventory.clone(), verdict_sender, deregister.clone());
    let mut registering = tokio::spawn(registering.instrument(info_span!("registration")));

    let reconciler = Reconciler {
        claims,
        node: Arc::clone(&driver),
        driver_name: driver_name.clone(),
        node_name: node_name.clone(),
        wishes: wishes.clone(),
        events: events.clone(),
        metrics: metrics.clone(),
    };
    let reconciling = tokio::spawn(reconcile::run(reconciler, drain.clone()).instrument(info_span!("reconcile")));
    let watcher = Watcher { reader: driver, changed: Arc::clone(&changed), events };
    let watching = inventory::watch(watcher, inventory_sender, drain.clone());
    let watching = tokio::spawn(watching.instrument(info_span!("inventory")));
    let sources = Sources { inventory, verdict: verdict.clone(), held, wishes, changed, metrics: metrics.clone() };
    let publishing = publish(client.clone(), node_name.clone(), sources, lease.clone(), stands, deregister.clone());
    let publishing = tokio::spawn(publishing.instrument(info_span!("node_status")));
    let leasing = hold(lease, standing, held_sender, end(paths.clone(), at_exit), deregister.clone());
    let leasing = tokio::spawn(leasing.instrument(info_span!("lease")));
    tracing::info!(node = node_name, driver = driver_name, socket = %dra_file.path().display(), "serving");

    let early = tokio::select! {
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
        ended = &mut dra_server => Some(ended_early("DRA", ended)),
        ended = &mut registering => Some(ended_early("registration", ended)),
    };

    let work = dra.work();
    work.close();
    if early.is_none() {
        tracing::info!(claims = work.len(), "stopping");
        finish("claims in work", DRAIN, work.wait()).await;
    }
    if early.is_none() && neighbours::is_any_alive(&paths).await {
        // The kubelet calls another plugin as soon as it has lost its connection to this one.
        drain.cancel();
        finish("calls", DRAIN, &mut dra_server).await;
        deregister.cancel();
    } else {
        // Else it has nobody to call: it is served until it knows that.
        deregister.cancel();
        if early.is_none() && *verdict.borrow() == KubeletVerdict::Registered {
            tokio::time::sleep(FORGET).await;
        }
        drain.cancel();
    }
    finish("claims in work", DRAIN, work.wait()).await;
    if early.is_none() && !dra_server.is_finished() {
        finish("calls", CONNECT, dra_server).await;
    }
    for (what, task) in
        [("reconcile", reconciling), ("lease", leasing), ("inventory", watching), ("GpuNode", publishing)]
    {
        finish(what, CONNECT, task).await;
    }
    writing_events.abort();
    drop(dra_file);
    tracing::info!("stopped");
    early.map_or(Ok(()), Err)
}

/// Brings the hook to where container runtimes find it, in `directory` or else in `bin`. Without it the plugin is of use all the
/// same.
fn install_hook(program: Option<PathBuf>, directory: &Path, bin: &Path, host_root: &Path) -> Option<Hook> {
    let program = program.unwrap_or_else(hook::beside_this_program);
    let installed = Hook::install(&program, directory, host_root).or_else(|error| {
        let hook = Hook::install(&program, bin, host_root)?;
        tracing::warn!(%error, "the hook lies where pods in user namespaces (hostUsers: false) cannot reach it: they will not start");
        Ok(hook)
    });
    match installed {
        Ok(hook) => {
            let Hook { path, updates_ldcache } = &hook;
            tracing::info!(path = %path.display(), updates_ldcache, "containers get a hook");
            Some(hook)
        }
        Err::<_, HookError>(error) => {
            tracing::warn!(%error, "containers get no hook: images that are not built on Debian or Ubuntu may not find \
                the driver's libraries");
            None
        }
    }
}

fn ended_early(server: &'static str, ended: Result<Result<(), impl Display>, JoinError>) -> RunError {
    let error = match ended {
        Ok(Ok(())) => "no reason given".to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(error) => error.to_string(),
    };
    RunError::Server { server, error }
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

/// Makes the plugin known to the kubelet once it has seen its GPUs, until `deregister`. The kubelet sends claims to the
/// plugin that it knows last: one that cannot serve yet leaves them to its predecessor.
async fn register(
    paths: Paths,
    info: PluginInfo,
    mut inventory: watch::Receiver<Option<inventory::Inventory>>,
    verdict: watch::Sender<KubeletVerdict>,
    deregister: CancellationToken,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let has_seen = |seen: &Option<inventory::Inventory>| {
        seen.as_ref().is_some_and(|inventory| inventory.status.driver_version.is_some())
    };
    let seen = tokio::time::timeout(FIRST_LOOK, inventory.wait_for(has_seen));
    match deregister.run_until_cancelled(seen).await {
        None => return Ok(()),
        Some(Ok(_)) => {}
        Some(Err(_)) => tracing::warn!("registering without having seen a GPU"),
    }
    let (listener, file) = neighbours::listen(&paths, Socket::Registration).await?;
    let ending = async move {
        deregister.cancelled().await;
        drop(file);
    };
    Ok(registration::serve(listener, info, verdict, ending).await?)
}

async fn publish(
    client: Client,
    node_name: String,
    sources: Sources,
    lease: NodeLease,
    stands: watch::Sender<bool>,
    shutdown: CancellationToken,
) {
    node_status::publish(client, &node_name, sources, &lease, stands, shutdown).await;
}

/// Takes the lease once the GpuNode stands. Earlier it would vouch for what an earlier plugin left there: devices would be
/// published, and pods bound, that the kubelet cannot have prepared yet or that are not there any more.
async fn hold(
    lease: NodeLease,
    mut standing: watch::Receiver<bool>,
    held: watch::Sender<bool>,
    end: impl Future<Output = End>,
    shutdown: CancellationToken,
) {
    if matches!(shutdown.run_until_cancelled(standing.wait_for(|stands| *stands)).await, Some(Ok(_))) {
        lease.hold(&held, end, shutdown).await;
    }
}

/// How the lease is left: where another plugin serves the node, nothing is to be withdrawn.
async fn end(paths: Paths, at_exit: AtExit) -> End {
    if at_exit == AtExit::Keep || neighbours::is_any_alive(&paths).await { End::Leave } else { End::Release }
}

/// Waits for something to end, but not for ever.
async fn finish<T>(what: &str, patience: Duration, ending: impl Future<Output = T>) {
    if tokio::time::timeout(patience, ending).await.is_err() {
        tracing::warn!("{what}: not finished within {} s", patience.as_secs());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hook_lies_where_it_can() {
        let host = tempfile::tempdir().unwrap();
        let [program, open, bin] = ["program", "open", "bin"].map(|name| host.path().join(name));
        let install = || install_hook(Some(program.clone()), &open, &bin, host.path()).map(|hook| hook.path);
        assert_eq!(install(), None, "there is none");
        std::fs::write(&program, "a program").unwrap();
        assert_eq!(install(), Some(open.join(hook::NAME)));
        std::fs::remove_dir_all(&open).unwrap();
        std::fs::write(&open, "a file in the directory's place").unwrap();
        assert_eq!(install(), Some(bin.join(hook::NAME)));
    }
}
