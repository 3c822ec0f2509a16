//! Keeps the classes in the API server as the [plan](super::plan()) says.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::resource::v1::DeviceClass;
use kerf_api::names;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::{Api, Client, Resource as _, ResourceExt};
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use super::{Note, Plan, offered, plan};
use crate::events::Reporter;
use crate::features::ServerFeatures;
use crate::index::SharedIndex;
use crate::metrics::{Class, Metrics};
use crate::queue::Outcome;
use crate::upkeep::{PATIENCE, Upkeep};

/// How long a class is kept that no node has the profile of: a GPU that is reset, or a plugin's first look after an update,
/// takes the profile away for a moment only.
const GRACE: Duration = Duration::from_secs(30);

/// The one item of the upkeep: classes depend on each other.
const EVERYTHING: &str = "DeviceClasses";

/// Writes the classes of the profiles that the cluster has.
pub struct Keeper {
    client: Client,
    driver: String,
    /// Whether there shall be any.
    generate: bool,
    index: SharedIndex,
    reporter: Reporter,
    metrics: Metrics,
    memory: Memory,
}

#[derive(Default)]
struct Memory {
    /// The revision of the index and the features that were looked at last.
    seen: Option<(u64, ServerFeatures)>,
    /// Since when no node has the profile of a class.
    unused: BTreeMap<String, Instant>,
    /// What was said last.
    notes: BTreeSet<(String, Note)>,
}

impl Keeper {
    /// Keeps the classes of `driver`, or sees to it that there are none.
    pub fn new(
        client: Client,
        driver: impl Into<String>,
        generate: bool,
        index: SharedIndex,
        reporter: Reporter,
        metrics: Metrics,
    ) -> Keeper {
        Keeper { client, driver: driver.into(), generate, index, reporter, metrics, memory: Memory::default() }
    }

    fn plan(&self, named: bool) -> Plan {
        let (gpu_nodes, there) = {
            let index = self.index.lock();
            (index.gpu_nodes(), index.classes())
        };
        let profiles = if self.generate { offered(gpu_nodes.iter().map(AsRef::as_ref)) } else { BTreeSet::new() };
        plan(&self.driver, &profiles, &there, named)
    }

    /// What may be deleted now of what is superfluous, and when the next of it may be.
    fn due(&mut self, superfluous: Vec<DeviceClass>, now: Instant) -> (Vec<DeviceClass>, Option<Instant>) {
        let grace = if self.generate { GRACE } else { Duration::ZERO };
        let names: BTreeSet<String> = superfluous.iter().map(ResourceExt::name_any).collect();
        self.memory.unused.retain(|name, _| names.contains(name));
        let mut since = |class: &DeviceClass| *self.memory.unused.entry(class.name_any()).or_insert(now);
        let (due, later): (Vec<_>, Vec<_>) =
            superfluous.into_iter().map(|class| (since(&class) + grace, class)).partition(|(due, _)| *due <= now);
        (due.into_iter().map(|(_, class)| class).collect(), later.iter().map(|(due, _)| *due).min())
    }

    async fn carry_out(&self, plan: &Plan) -> Result<bool, WriteError> {
        let api: Api<DeviceClass> = Api::all(self.client.clone());
        let params = PostParams { dry_run: false, field_manager: Some(names::CONTROLLER.to_owned()) };
        for class in &plan.create {
            let name = class.name_any();
            request("create", &name, api.create(&params, class)).await?;
            info!(class = %name, "made a DeviceClass");
        }
        for class in &plan.update {
            let name = class.name_any();
            request("update", &name, api.replace(&name, &params, class)).await?;
            info!(class = %name, "changed a DeviceClass");
        }
        for class in &plan.delete {
            delete(&api, class).await?;
        }
        Ok(!plan.is_empty())
    }

    async fn tell(&mut self, notes: Vec<(DeviceClass, Note)>) {
        let mut told = BTreeSet::new();
        for (class, note) in notes {
            let said = (class.name_any(), note);
            if !self.memory.notes.contains(&said) {
                let (name, note) = &said;
                warn!(class = %name, "{note}");
                self.reporter.report_about(class.object_ref(&()), note.reason(), &note.to_string()).await;
            }
            told.insert(said);
        }
        self.memory.notes = told;
    }
}

impl Upkeep for Keeper {
    fn changed(&mut self, features: ServerFeatures) -> Vec<String> {
        let seen = Some((self.index.lock().revision(), features));
        if std::mem::replace(&mut self.memory.seen, seen) == seen { Vec::new() } else { vec![EVERYTHING.to_owned()] }
    }

    async fn look(&mut self, _: &str) -> (Outcome, Option<Instant>) {
        let Some((_, features)) = self.memory.seen else { return (Outcome::Idle, None) };
        let mut plan = self.plan(features.extended_resources);
        let (due, recheck) = self.due(std::mem::take(&mut plan.delete), Instant::now());
        plan.delete = due;
        let outcome = match self.carry_out(&plan).await {
            Ok(true) => Outcome::Wrote,
            Ok(false) => Outcome::Idle,
            Err(error) => {
                if !error.is_conflict() {
                    self.metrics.failed(error.class());
                    warn!(error = &error as &dyn std::error::Error, "will be tried again");
                }
                return (Outcome::Failed, recheck);
            }
        };
        self.tell(plan.notes).await;
        (outcome, recheck)
    }

    fn forget(&mut self) {
        self.memory = Memory::default();
    }
}

/// Deletes a class, unless it has become another since.
pub(crate) async fn delete(api: &Api<DeviceClass>, class: &DeviceClass) -> Result<(), WriteError> {
    let name = class.name_any();
    let preconditions = Preconditions { uid: class.uid(), resource_version: class.resource_version() };
    let params = DeleteParams::default().preconditions(preconditions);
    match request("delete", &name, api.delete(&name, &params)).await {
        Err(WriteError::Request { source: kube::Error::Api(status), .. }) if status.code == 404 => {}
        done => {
            done?;
            info!(class = %name, "removed a DeviceClass");
        }
    }
    Ok(())
}

/// Why a class is not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The API server refused, or could not be reached.
    #[error("cannot {action} DeviceClass {name}")]
    Request {
        /// What was tried.
        action: &'static str,
        /// Name of the class.
        name: String,
        /// What came back.
        source: kube::Error,
    },
    /// No answer came in time.
    #[error("cannot {action} DeviceClass {name}: no answer within {PATIENCE:?}")]
    Timeout {
        /// What was tried.
        action: &'static str,
        /// Name of the class.
        name: String,
    },
}

impl WriteError {
    /// Whether another change came first: nothing is wrong, it only has to be tried again.
    fn is_conflict(&self) -> bool {
        matches!(self, WriteError::Request { source: kube::Error::Api(status), .. } if [404, 409].contains(&status.code))
    }

    fn class(&self) -> Class {
        match self {
            WriteError::Request { source, .. } => Class::of(source),
            WriteError::Timeout { .. } => Class::Unavailable,
        }
    }
}

async fn request<T>(
    action: &'static str,
    name: &str,
    request: impl Future<Output = kube::Result<T>>,
) -> Result<T, WriteError> {
    match timeout(PATIENCE, request).await {
        Ok(reply) => reply.map_err(|source| WriteError::Request { action, name: name.to_owned(), source }),
        Err(_) => Err(WriteError::Timeout { action, name: name.to_owned() }),
    }
}
