//! Puts the parts together and runs them until the process is told to stop.

use std::fmt::Debug;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kerf_api::{GpuNode, GpuPolicy, names};
use kerf_telemetry::Readiness;
use kerf_telemetry::http::{BindError, Server};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{ApiResource, DynamicObject, PartialObjectMeta};
use kube::runtime::watcher;
use kube::{Api, Client, Config, Resource};
use serde::de::DeserializeOwned;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, watch};
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, info, info_span, warn};

use crate::args::{Args, Command, ObjectName};
use crate::classes;
use crate::diff::Observed;
use crate::events::Reporter;
use crate::held::Holding;
use crate::index::{Feed, Index, SharedIndex};
use crate::labels;
use crate::leader::{Candidate, ClusterStore, is_vacant};
use crate::metrics::{Metrics, Seen};
use crate::policy::{LayoutFile, Policy, Steward};
use crate::probe::keep_probing;
use crate::remove::{RemoveError, is_taken, remove};
use crate::upkeep::Wakes;
use crate::watch::{Interruption, Start, TURN, Unseen, feed};
use crate::webhook::{self, Webhook, WebhookError};
use crate::writer::Writer;

/// How long a connection to the API server may take to come about.
const CONNECT: Duration = Duration::from_secs(5);

/// How long the API server may say nothing on a connection: it is taken for dead then, be it in the middle of a list. A watch has its turn
/// in this time, and 5 s more.
const SILENCE: Duration = Duration::from_secs(TURN as u64 + 15);

/// Why the controller cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The kubeconfig file cannot be used.
    #[error("cannot use the kubeconfig {}", path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: kube::config::KubeconfigError,
    },
    /// There is no service account.
    #[error("no service account to talk to the API server with; outside a pod, give --kubeconfig")]
    InCluster {
        /// What is missing.
        source: kube::config::InClusterError,
    },
    /// The configuration makes no client.
    #[error("cannot make a client for the API server")]
    Client {
        /// What is wrong.
        source: kube::Error,
    },
    /// Signals cannot be received.
    #[error("cannot wait for signals")]
    Signal {
        /// What is wrong.
        source: std::io::Error,
    },
    /// See [`BindError`].
    #[error(transparent)]
    Http(#[from] BindError),
    /// See [`WebhookError`].
    #[error(transparent)]
    Webhook(#[from] WebhookError),
    /// See [`RemoveError`].
    #[error(transparent)]
    Remove(#[from] RemoveError),
    /// A part of the controller is broken: the process ends, to be started anew, rather than run without it.
    #[error("the part that {part} has ended, which it never should")]
    Part {
        /// What it did.
        part: &'static str,
        /// The panic, if it was one.
        source: Option<JoinError>,
    },
}

/// Runs the controller until SIGTERM or SIGINT. Slices stay as they are when it ends. With a [`Command`], does that instead.
///
/// # Errors
///
/// When the cluster's configuration cannot be used, a part of the controller breaks, or the command fails.
pub async fn run(args: Args) -> Result<(), RunError> {
    let Args {
        driver_name,
        namespace,
        kubeconfig,
        layouts_config_map,
        mig_config_label,
        identity,
        webhook: webhook_args,
        generate_device_classes,
        node_labels,
        telemetry,
        command,
    } = args;
    let layouts = layouts_config_map
        .unwrap_or_else(|| ObjectName { namespace: namespace.clone(), name: names::LAYOUTS.to_owned() });
    let client = client(kubeconfig).await?;
    let identity = identity.unwrap_or_else(random_identity);
    let leases = Api::<Lease>::namespaced(client.clone(), &namespace);
    let store = ClusterStore { api: leases.clone(), name: names::CONTROLLER.to_owned() };
    if command == Some(Command::Remove) {
        return Ok(remove(&client, &driver_name, &store).await?);
    }
    info!(version = env!("CARGO_PKG_VERSION"), driver = %driver_name, %namespace, %identity, "starting");

    let stop = CancellationToken::new();
    let readiness = Readiness::default();
    let doubt = Arc::new(Notify::new());
    let index = SharedIndex::new(Index::new(&driver_name, mig_config_label));
    let features = watch::Sender::new(None);
    let leading = watch::Sender::new(false);
    let is_leading = leading.subscribe();
    let metrics = Metrics::default();
    let mut parts = Parts(JoinSet::new());

    let watches = Watches {
        index: index.clone(),
        readiness: readiness.clone(),
        doubt: doubt.clone(),
        metrics: metrics.clone(),
        stop: stop.clone(),
    };
    let everything = watcher::Config::default;
    let slices = everything().fields(&format!("spec.driver={driver_name}"));
    let nodes = Api::<PartialObjectMeta<Node>>::all(client.clone());
    let gpu_nodes = Api::<GpuNode>::all(client.clone());
    parts.start(
        "watches ResourceSlices",
        watches.watch("ResourceSlices", Api::all(client.clone()), slices, Unseen::Wait, |slice: ResourceSlice| {
            Observed::from(&slice)
        }),
    );
    let vacant = Arc::new(Notify::new());
    let (hint, leads, own) = (vacant.clone(), is_leading.clone(), identity.clone());
    let look = move |lease: Lease| {
        let free = lease.metadata.name.as_deref() == Some(names::CONTROLLER) && is_vacant(&lease);
        if free || (*leads.borrow() && is_taken(&lease, &own)) {
            hint.notify_one();
        }
        lease
    };
    parts.start("watches Leases", watches.watch("Leases", leases.clone(), everything(), Unseen::Wait, look));
    parts.start("watches Nodes", watches.watch("Nodes", nodes, everything(), Unseen::Wait, std::convert::identity));
    parts.start(
        "watches GpuNodes",
        watches.watch("GpuNodes", gpu_nodes, everything(), Unseen::Wait, std::convert::identity),
    );
    let classes = Api::<DeviceClass>::all(client.clone());
    parts.start(
        "watches DeviceClasses",
        watches.watch("DeviceClasses", classes, everything(), Unseen::Wait, std::convert::identity),
    );
    let policies = Api::<DynamicObject>::all_with(client.clone(), &ApiResource::erase::<GpuPolicy>(&()));
    parts.start(
        "watches GpuPolicies",
        watches.watch("GpuPolicies", policies, everything(), Unseen::NoneIfUnknown, Policy::from),
    );
    let claims = Api::<ResourceClaim>::all(client.clone());
    let driver = driver_name.clone();
    let held = move |claim: ResourceClaim| Holding::of(&driver, &claim);
    parts.start("watches ResourceClaims", watches.watch("ResourceClaims", claims, everything(), Unseen::Wait, held));
    let file = Api::<ConfigMap>::namespaced(client.clone(), &layouts.namespace);
    let only_it = everything().fields(&format!("metadata.name={}", layouts.name));
    let read = |object: ConfigMap| LayoutFile::read(&object);
    let unreadable = Unseen::IfForbidden(LayoutFile::forbidden(&layouts.namespace, &layouts.name));
    parts.start("watches the layouts", watches.watch("the layouts' ConfigMap", file, only_it, unreadable, read));
    let pending = readiness.wait_for("API server features");
    let (probing_client, probed) = (client.clone(), features.clone());
    let probing =
        keep_probing(probing_client, driver_name.clone(), probed, pending, doubt, metrics.clone(), stop.clone());
    parts.start("probes the API server", fine(probing));

    if let Some(webhook) = Webhook::bind(webhook_args).await? {
        let pending = readiness.wait_for(webhook::PENDING);
        let (client, driver, metrics) = (client.clone(), driver_name.clone(), metrics.clone());
        let serving = webhook.run(client, namespace.clone(), driver, metrics, pending, stop.clone());
        parts.start("serves the webhook", async { Ok(serving.await?) });
    }

    // After everything that is waited for is known.
    if let Some(address) = telemetry.http_address {
        let server = Server::bind(address).await?;
        let seen = Seen { index: index.clone(), leading: is_leading.clone() };
        let serving = server.serve(readiness.clone(), metrics.registry(&seen), stop.clone());
        parts.start("serves /readyz and /metrics", fine(serving));
    }

    // Leadership is given up after the last write, not before. Who could not write yet leaves it to others.
    let stop_leading = CancellationToken::new();
    let candidate = Candidate::new(store, &identity, leading, vacant, Timestamp::now, random);
    parts.start("elects a leader", once_listed(&readiness, &stop, candidate.run(stop_leading.clone())));

    let steward =
        Steward { client: client.clone(), index: index.clone(), leading: is_leading.clone(), metrics: metrics.clone() };
    parts.start("follows GpuPolicies", once_listed(&readiness, &stop, steward.run(stop.clone())));

    let reporter = Reporter::new(client.clone(), identity);
    let wakes = Wakes { index: index.clone(), features: features.subscribe(), leading: is_leading.clone() };
    let keeper = classes::Keeper::new(
        client.clone(),
        &driver_name,
        generate_device_classes,
        index.clone(),
        reporter.clone(),
        metrics.clone(),
    );
    parts.start("keeps DeviceClasses", once_listed(&readiness, &stop, wakes.clone().keep(keeper, stop.clone())));
    let keeper = labels::Keeper::new(client.clone(), node_labels, index.clone(), metrics.clone());
    parts.start("keeps labels of Nodes", once_listed(&readiness, &stop, wakes.keep(keeper, stop.clone())));
    let writer = Writer { client, driver: driver_name, index, features, leading: is_leading, reporter, metrics };
    let (writer_stop, last_write) = (stop.clone(), stop_leading.drop_guard());
    let writing = async move {
        let _last_write = last_write;
        writer.run(writer_stop).await;
    };
    parts.start("writes ResourceSlices", once_listed(&readiness, &stop, writing));

    parts.run(&stop).await
}

/// Begins some work once everything is listed: what is not yet listed would look as if it were gone.
fn once_listed<W: Future<Output = ()>>(
    readiness: &Readiness,
    stop: &CancellationToken,
    work: W,
) -> impl Future<Output = Result<(), RunError>> + use<W> {
    let (readiness, stop) = (readiness.clone(), stop.clone());
    fine(async move {
        if stop.run_until_cancelled(readiness.ready_but_for(webhook::PENDING)).await.is_some() {
            work.await;
        }
    })
}

/// What all watches share.
struct Watches {
    index: SharedIndex,
    readiness: Readiness,
    doubt: Arc<Notify>,
    metrics: Metrics,
    stop: CancellationToken,
}

impl Watches {
    /// Feeds the index with `what`, which readiness waits for.
    fn watch<K, T, F>(
        &self,
        what: &'static str,
        api: Api<K>,
        config: watcher::Config,
        unseen: Unseen<T>,
        convert: F,
    ) -> impl Future<Output = Result<(), RunError>> + Send + use<K, T, F>
    where
        F: Fn(K) -> T + Send + 'static,
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
        T: Clone + Send + 'static,
        Index: Feed<T>,
    {
        let (doubt, metrics) = (self.doubt.clone(), self.metrics.clone());
        let interrupted = move |how: Interruption<'_>| {
            if let Interruption::Error(error) | Interruption::StillRefused(error) = how {
                metrics.interrupted(error);
            }
            if !matches!(how, Interruption::StillRefused(_)) {
                doubt.notify_one();
            }
        };
        let start = Start { pending: self.readiness.wait_for(what), unseen };
        fine(feed(self.index.clone(), api, config, convert, start, interrupted, self.stop.clone()))
    }
}

async fn fine(part: impl Future<Output = ()>) -> Result<(), RunError> {
    part.await;
    Ok(())
}

/// The tasks of the process. None of them ends before it is told to.
struct Parts(JoinSet<(&'static str, Result<(), RunError>)>);

impl Parts {
    fn start(&mut self, part: &'static str, task: impl Future<Output = Result<(), RunError>> + Send + 'static) {
        self.0.spawn(async move { (part, task.await) }.instrument(info_span!("part", does = part)));
    }

    /// Waits for a signal, then stops everything; or for the first part that breaks.
    async fn run(mut self, stop: &CancellationToken) -> Result<(), RunError> {
        let signals = |kind| signal(kind).map_err(|source| RunError::Signal { source });
        let (mut terminate, mut interrupt) = (signals(SignalKind::terminate())?, signals(SignalKind::interrupt())?);
        let broken = tokio::select! {
            _ = terminate.recv() => Ok(()),
            _ = interrupt.recv() => Ok(()),
            Some(ended) = self.0.join_next() => Err(match ended {
                Ok((_, Err(error))) => error,
                Ok((part, Ok(()))) => RunError::Part { part, source: None },
                Err(panic) => RunError::Part { part: "panicked", source: Some(panic) },
            }),
        };
        info!("stopping; ResourceSlices stay as they are");
        stop.cancel();
        while let Some(ended) = self.0.join_next().await {
            if let Ok((part, Err(error))) = ended {
                warn!(part, error = &error as &dyn std::error::Error, "failed while stopping");
            }
        }
        broken
    }
}

async fn client(kubeconfig: Option<PathBuf>) -> Result<Client, RunError> {
    let mut config = match kubeconfig {
        Some(path) => {
            let failed = |source| RunError::Kubeconfig { path: path.clone(), source };
            let file = Kubeconfig::read_from(&path).map_err(failed)?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(failed)?
        }
        None => Config::incluster().map_err(|source| RunError::InCluster { source })?,
    };
    config.connect_timeout = Some(CONNECT);
    config.read_timeout = Some(SILENCE);
    // Else a connection that was idle has only what is left of that for its next answer.
    config.reset_reader_on_write = true;
    Client::try_from(config).map_err(|source| RunError::Client { source })
}

/// The host's name, which a person recognizes, and a random part, which no other process has.
fn random_identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}_{}", host.trim(), uuid::Uuid::new_v4())
}

/// A number from 0 to 1.
fn random() -> f64 {
    // Each RandomState has keys of its own.
    f64::from(u16::try_from(RandomState::new().build_hasher().finish() >> 48).unwrap_or_default()) / f64::from(u16::MAX)
}
