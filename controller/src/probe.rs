//! Finds out what the API server supports by trying it: dry-run creates of slices and of a class that nobody could use.
//!
//! A dry run passes through the dropping of fields, validation and admission like a real create, and is then forgotten.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::{
    Counter, CounterSet, Device, DeviceClass, DeviceCounterConsumption, DeviceTaint, ResourcePool, ResourceSlice,
    ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kerf_api::names;
use kerf_telemetry::Pending;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::classes::{probe_class, resource_of};
use crate::features::{Counters, ServerFeatures};
use crate::metrics::{Class, Metrics};
use crate::quantity;

/// Name of the node and the pool in the slices that are tried. No such node exists.
const NOWHERE: &str = "kerf-probe";

/// How often the server's version is looked at.
const VERSION_INTERVAL: Duration = Duration::from_secs(60);

/// How often everything is tried again without any sign of a change: a feature gate changes no version.
const PROBE_INTERVAL: Duration = Duration::from_secs(600);

/// Pause after a doubt or a failure, so that a server that just restarts is not pressed.
const PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// How long a round of tries may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Tries what the API server supports.
///
/// # Errors
///
/// When the server cannot be reached or does not let us try. That it refuses or drops a field is an answer.
pub async fn probe(client: &Client, driver: &str) -> kube::Result<ServerFeatures> {
    let api: Api<ResourceSlice> = Api::all(client.clone());
    let attempt = async |sets: Option<CounterSet>, device: Option<Device>| -> kube::Result<Kept> {
        let slice = slice(driver, sets, device);
        let dry_run = PostParams { dry_run: true, field_manager: None };
        match api.create(&dry_run, &slice).await {
            Ok(stored) if kept_counters(&slice, &stored) && kept_taints(&slice, &stored) => Ok(Kept::Yes),
            Ok(_) => Ok(Kept::Dropped),
            Err(kube::Error::Api(status)) if status.code == 422 || status.code == 400 => {
                debug!(%status.message, "the API server refuses a slice that was tried");
                Ok(Kept::Refused)
            }
            Err(error) => Err(error),
        }
    };
    // Kubernetes 1.34 wants both in one slice, 1.35 and later refuse that.
    let counters = match attempt(Some(counter_set()), Some(consuming())).await? {
        Kept::Yes => Counters::Combined,
        Kept::Dropped => Counters::None,
        Kept::Refused => match (attempt(Some(counter_set()), None).await?, attempt(None, Some(consuming())).await?) {
            (Kept::Yes, Kept::Yes) => Counters::Separate,
            _ => Counters::None,
        },
    };
    let taints = attempt(None, Some(tainted())).await? == Kept::Yes;
    let extended_resources = keeps_extended_resources(client, driver).await?;
    Ok(ServerFeatures { counters, taints, extended_resources })
}

/// Whether a class keeps its extended resource.
async fn keeps_extended_resources(client: &Client, driver: &str) -> kube::Result<bool> {
    let dry_run = PostParams { dry_run: true, field_manager: None };
    match Api::<DeviceClass>::all(client.clone()).create(&dry_run, &probe_class(driver)).await {
        Ok(stored) => Ok(resource_of(&stored).is_some()),
        Err(kube::Error::Api(status)) if status.code == 422 || status.code == 400 => Ok(false),
        Err(error) => Err(error),
    }
}

/// What became of the field that a slice was tried for.
#[derive(Debug, PartialEq, Eq)]
enum Kept {
    Yes,
    Dropped,
    Refused,
}

fn counters() -> BTreeMap<String, Counter> {
    BTreeMap::from([("memory-slice-0".to_owned(), Counter { value: quantity::count(1) })])
}

fn counter_set() -> CounterSet {
    CounterSet { name: "gpu".to_owned(), counters: counters() }
}

fn consuming() -> Device {
    let consumption =
        DeviceCounterConsumption { counter_set: "gpu".to_owned(), counters: counters(), compatibility_groups: None };
    Device { name: "partition".to_owned(), consumes_counters: Some(vec![consumption]), ..Device::default() }
}

fn tainted() -> Device {
    let taint =
        DeviceTaint { effect: "NoSchedule".to_owned(), key: names::TAINT_BLOCKED.to_owned(), ..DeviceTaint::default() };
    Device { name: "gpu".to_owned(), taints: Some(vec![taint]), ..Device::default() }
}

fn slice(driver: &str, set: Option<CounterSet>, device: Option<Device>) -> ResourceSlice {
    ResourceSlice {
        // Under a name that nobody can foresee and take: a dry run meets what is there.
        metadata: ObjectMeta { generate_name: Some(format!("{NOWHERE}-{driver}-")), ..ObjectMeta::default() },
        spec: ResourceSliceSpec {
            driver: driver.to_owned(),
            pool: ResourcePool { name: NOWHERE.to_owned(), generation: 1, resource_slice_count: 1 },
            node_name: Some(NOWHERE.to_owned()),
            shared_counters: set.map(|set| vec![set]),
            devices: device.map(|device| vec![device]),
            ..ResourceSliceSpec::default()
        },
    }
}

/// Whether the stored slice has the counters of the one that was sent: without them its devices exclude nothing.
pub(crate) fn kept_counters(sent: &ResourceSlice, stored: &ResourceSlice) -> bool {
    let sets = |slice: &ResourceSlice| slice.spec.shared_counters.as_ref().map_or(0, Vec::len);
    let consuming = |slice: &ResourceSlice| {
        let devices = slice.spec.devices.iter().flatten();
        devices.filter(|device| device.consumes_counters.as_ref().is_some_and(|list| !list.is_empty())).count()
    };
    sets(stored) >= sets(sent) && consuming(stored) >= consuming(sent)
}

/// Whether the stored slice has the taints of the one that was sent: without them its devices are given out.
pub(crate) fn kept_taints(sent: &ResourceSlice, stored: &ResourceSlice) -> bool {
    let taints = |slice: &ResourceSlice| {
        slice.spec.devices.iter().flatten().map(|device| device.taints.as_ref().map_or(0, Vec::len)).sum::<usize>()
    };
    taints(stored) >= taints(sent)
}

/// Keeps `features` true to the API server, until `stop`. It is `None`, and `pending` held, before the first answer.
///
/// The server is tried again when its version changes, when `doubt` is notified (a watch was interrupted: the server may
/// have been restarted with other gates), and now and then without a reason. Failures are counted in `metrics`.
pub async fn keep_probing(
    client: Client,
    driver: String,
    features: watch::Sender<Option<ServerFeatures>>,
    pending: Pending,
    doubt: Arc<Notify>,
    metrics: Metrics,
    stop: CancellationToken,
) {
    let mut pending = Some(pending);
    let mut pause = PAUSE;
    let mut last: Option<(String, Instant)> = None;
    let mut doubted = true;
    while !stop.is_cancelled() {
        let round = async {
            let version = client.apiserver_version().await?.git_version;
            let known = last.as_ref().is_some_and(|(last, at)| *last == version && at.elapsed() < PROBE_INTERVAL);
            if known && !doubted {
                return Ok::<_, kube::Error>(());
            }
            let found = probe(&client, &driver).await?;
            last = Some((version.clone(), Instant::now()));
            features.send_if_modified(|known| {
                let changed = *known != Some(found);
                if changed {
                    info!(
                        server.version = %version,
                        counters = ?found.counters,
                        taints = found.taints,
                        extended_resources = found.extended_resources,
                        "API server features"
                    );
                }
                *known = Some(found);
                changed
            });
            pending = None;
            Ok(())
        };
        let Some(outcome) = stop.run_until_cancelled(timeout(PATIENCE, round)).await else { return };
        doubted = !matches!(outcome, Ok(Ok(())));
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                metrics.failed(Class::of(&error));
                let error = &error as &dyn std::error::Error;
                warn!(error, "cannot find out what the API server supports; trying again in {pause:?}");
            }
            Err(_) => {
                metrics.failed(Class::Unavailable);
                warn!(
                    "cannot find out what the API server supports: no answer within {PATIENCE:?}; trying again in {pause:?}"
                );
            }
        }
        if doubted {
            stop.run_until_cancelled(tokio::time::sleep(pause)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            continue;
        }
        pause = PAUSE;
        let doubts = timeout(VERSION_INTERVAL, doubt.notified());
        if let Some(Ok(())) = stop.run_until_cancelled(doubts).await {
            doubted = true;
            stop.run_until_cancelled(tokio::time::sleep(PAUSE)).await;
        }
    }
}
