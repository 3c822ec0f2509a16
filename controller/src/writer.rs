//! The only writer of ResourceSlices: looks at one node after the other and makes true what the index decides.
//!
//! Architecture invariant: nothing else in kerf creates, updates or deletes a ResourceSlice, and this writes only while
//! this process leads. A restart of the controller touches no slice.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kerf_api::{GpuNode, names};
use kube::api::{DeleteParams, ListParams, PostParams, Preconditions};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, error, info, info_span, warn};

use crate::diff::{Delete, Observed, Plan, Write, diff, withdraw};
use crate::events::Reporter;
use crate::features::{Counters, ServerFeatures};
use crate::index::{Decision, SharedIndex, Verdict};
use crate::liveness::Now;
use crate::meaning::Meaning;
use crate::metrics::{Metrics, Verb};
use crate::naming::{apart, keep_names};
use crate::probe::{kept_counters, kept_taints};
use crate::queue::{Outcome, Queue};
use crate::render::{Remark, Rendering, render};

/// How many nodes are written at the same time. More would not make a cold start faster: one API server stores about
/// ninety slices a second with eight connections, and the next ones wait.
const CONCURRENCY: usize = 8;

/// How long one request may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long what is under way may take when the process has to stop.
const LAST_PATIENCE: Duration = Duration::from_secs(5);

/// Why a request did not do what it should.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The API server refused, or could not be reached.
    #[error("cannot {action} ResourceSlice {name}")]
    Request {
        /// What was tried.
        action: &'static str,
        /// Name of the slice.
        name: String,
        /// What came back.
        source: kube::Error,
    },
    /// No answer came in time.
    #[error("cannot {action} ResourceSlice {name}: no answer within {PATIENCE:?}")]
    Timeout {
        /// What was tried.
        action: &'static str,
        /// Name of the slice.
        name: String,
    },
    /// The API server stored the slice without its counters.
    #[error(
        "the API server drops counters (it stored ResourceSlice {name} without them): \
         the feature gate DRAPartitionableDevices is off"
    )]
    CountersDropped {
        /// Name of the slice.
        name: String,
    },
    /// The API server stored the slice without its taints.
    #[error(
        "the API server drops taints (it stored ResourceSlice {name} without them): \
         the feature gate DRADeviceTaints is off"
    )]
    TaintsDropped {
        /// Name of the slice.
        name: String,
    },
}

impl WriteError {
    /// Whether another change came first: nothing is wrong, it only has to be tried again.
    pub(crate) fn is_conflict(&self) -> bool {
        matches!(self, WriteError::Request { source: kube::Error::Api(status), .. } if [404, 409].contains(&status.code))
    }
}

/// What the writer is made of.
pub struct Writer {
    /// Talks to the API server.
    pub client: Client,
    /// The driver whose slices these are.
    pub driver: String,
    /// What the watches have seen.
    pub index: SharedIndex,
    /// What the server supports; changed here when a reply shows that it is less.
    pub features: watch::Sender<Option<ServerFeatures>>,
    /// Whether this process leads.
    pub leading: watch::Receiver<bool>,
    /// Tells people.
    pub reporter: Reporter,
    /// Counts what is written.
    pub metrics: Metrics,
}

/// What is remembered of a node between two looks.
#[derive(Debug, Default)]
struct Memory {
    /// The last look found nothing to do in this state.
    settled: Option<(u64, Option<ServerFeatures>, Kind)>,
    /// Slices that the server stores in another form than sent, by name: the version it stored and what was meant. They
    /// are left alone until one of the two changes, else they would be written for ever.
    accepted: BTreeMap<String, (String, Meaning)>,
    /// What was last reported.
    remarks: Vec<Remark>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Publish,
    Withdraw,
    Leave,
}

impl Writer {
    /// Writes until `stop`. A request that is under way then is finished first.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut features = self.features.subscribe();
        let mut memories = HashMap::new();
        loop {
            let leads = async {
                let leads = self.leading.wait_for(|leading| *leading).await.is_ok();
                leads && features.wait_for(Option::is_some).await.is_ok()
            };
            match stop.run_until_cancelled(leads).await {
                Some(true) if self.lead(&mut memories, &mut features, &stop).await == Next::Follow => {}
                _ => return,
            }
        }
    }

    /// Writes while this process leads.
    async fn lead(
        &self,
        memories: &mut HashMap<String, Memory>,
        features: &mut watch::Receiver<Option<ServerFeatures>>,
        stop: &CancellationToken,
    ) -> Next {
        info!("writing ResourceSlices");
        let mut leading = self.leading.clone();
        let mut queue = Queue::default();
        let mut looks = FuturesUnordered::new();
        self.mark_all(&mut queue);
        loop {
            for node in self.index.lock().take_dirty() {
                queue.mark(&node, Instant::now());
            }
            while looks.len() < CONCURRENCY
                && let Some(node) = queue.next(Instant::now())
            {
                let memory = memories.remove(&node).unwrap_or_default();
                let span = info_span!("node", %node);
                looks.push(self.look(node, memory).instrument(span));
            }
            let due = queue.next_due().filter(|_| looks.len() < CONCURRENCY);
            let timer = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                Some(look) = looks.next(), if !looks.is_empty() => {
                    let Look { node, memory, outcome, recheck } = look;
                    queue.finish(&node, outcome, recheck, Instant::now());
                    if self.index.lock().knows(&node) {
                        memories.insert(node, memory);
                    }
                }
                () = self.index.changed() => {}
                () = timer => {}
                changed = features.changed() => match changed {
                    Ok(()) => self.mark_all(&mut queue),
                    Err(_) => break,
                },
                lost = leading.wait_for(|leading| !*leading) => {
                    if lost.is_err() {
                        break;
                    }
                    // Another process may write from here on: what is under way is given up at once.
                    warn!("leadership lost: no longer writing ResourceSlices");
                    return Next::Follow;
                }
                () = stop.cancelled() => break,
            }
        }
        let finish = async { while looks.next().await.is_some() {} };
        if tokio::time::timeout(LAST_PATIENCE, finish).await.is_err() {
            warn!("stopped in the middle of writing; the next leader completes it");
        }
        Next::End
    }

    fn mark_all(&self, queue: &mut Queue) {
        let now = Instant::now();
        self.index.lock().nodes().iter().for_each(|node| queue.mark(node, now));
    }

    /// One look at one node.
    async fn look(&self, node: String, mut memory: Memory) -> Look {
        let now = Now::read();
        let Verdict { decision, recheck, revision } = self.index.lock().verdict(&node, now);
        let features = *self.features.borrow();
        let kind = match &decision {
            Decision::Publish { .. } => Kind::Publish,
            Decision::Withdraw(_) => Kind::Withdraw,
            Decision::Leave(_) => Kind::Leave,
        };
        let state = (revision, features, kind);
        if memory.settled == Some(state) {
            return Look { node, memory, outcome: Outcome::Idle, recheck };
        }
        let observed = {
            let mut index = self.index.lock();
            index.begin(&node);
            index.slices(&node)
        };
        let outcome = match (decision, features) {
            (Decision::Publish { gpu_node, node_uid, offering }, Some(features)) => {
                let rendering = render(&self.driver, &gpu_node, &node_uid, &offering, features);
                self.publish(&node, &gpu_node, rendering, observed, &mut memory).await
            }
            (Decision::Withdraw(reason), _) => {
                let plan = withdraw(&observed);
                if !plan.is_empty() {
                    info!(slices = plan.delete.len(), "withdrawing all devices: {reason}");
                }
                memory.remarks.clear();
                self.carry_out(&node, plan, &mut memory).await
            }
            (Decision::Leave(reason), _) => {
                debug!("leaving everything as it is: {reason}");
                Ok(false)
            }
            (Decision::Publish { .. }, None) => Ok(false),
        };
        let outcome = match outcome {
            Ok(false) => Outcome::Idle,
            Ok(true) => Outcome::Wrote,
            Err(error) => self.failed(&error),
        };
        // Own writes change no revision, so what was written is settled as well.
        memory.settled = matches!(outcome, Outcome::Idle | Outcome::Wrote).then_some(state);
        Look { node, memory, outcome, recheck }
    }

    async fn publish(
        &self,
        node: &str,
        gpu_node: &GpuNode,
        rendering: Rendering,
        mut observed: Vec<Observed>,
        memory: &mut Memory,
    ) -> Result<bool, WriteError> {
        for slice in &mut observed {
            if let Some((version, meant)) = memory.accepted.get(&slice.name)
                && *version == slice.resource_version
            {
                slice.meaning = *meant;
            }
        }
        let mut slices = rendering.slices;
        keep_names(&mut slices, &observed);
        let plan = diff(slices, &observed);
        if !plan.is_empty() {
            info!(deleting = plan.delete.len(), writing = plan.write.len(), "publishing devices");
        }
        let wrote = self.carry_out(node, plan, memory).await?;
        if memory.remarks != rendering.remarks {
            for remark in rendering.remarks.iter().filter(|remark| !memory.remarks.contains(remark)) {
                warn!("{remark}");
                self.reporter.report(gpu_node, remark).await;
            }
            memory.remarks = rendering.remarks;
        }
        Ok(wrote)
    }

    /// Does what the plan says, one request after the other. Whether there was anything to do.
    async fn carry_out(&self, node: &str, plan: Plan, memory: &mut Memory) -> Result<bool, WriteError> {
        let any = !plan.is_empty();
        for deletion in plan.delete {
            memory.accepted.remove(&deletion.name);
            self.delete(node, &deletion).await?;
        }
        for write in plan.write {
            self.write(&write, memory).await?;
        }
        Ok(any)
    }

    async fn delete(&self, node: &str, slice: &Delete) -> Result<(), WriteError> {
        let preconditions =
            Preconditions { uid: Some(slice.uid.clone()), resource_version: Some(slice.resource_version.clone()) };
        let params = DeleteParams::default().preconditions(preconditions);
        match self.request(Verb::Delete, &slice.name, self.api().delete(&slice.name, &params)).await {
            Ok(_) => {}
            // Gone already is as good.
            Err(WriteError::Request { source: kube::Error::Api(status), .. }) if status.code == 404 => {}
            Err(error) => return Err(error),
        }
        self.index.lock().removed(node, &slice.name, &slice.uid);
        Ok(())
    }

    async fn write(&self, write: &Write, memory: &mut Memory) -> Result<(), WriteError> {
        let wanted = write.slice();
        let mut name = wanted.metadata.name.clone().unwrap_or_default();
        let params = PostParams { dry_run: false, field_manager: Some(names::CONTROLLER.to_owned()) };
        let api = self.api();
        let stored = match write {
            Write::Update(slice) => self.request(Verb::Update, &name, api.replace(&name, &params, slice)).await?,
            Write::Create(slice) => match self.request(Verb::Create, &name, api.create(&params, slice)).await {
                Err(error) if error.is_conflict() && self.is_anothers(slice).await? => {
                    name = apart(&name);
                    warn!(error = &error as &dyn std::error::Error, instead = %name, "somebody else has taken the name of a slice");
                    let mut slice = slice.clone();
                    slice.metadata.name = Some(name.clone());
                    self.request(Verb::Create, &name, api.create(&params, &slice)).await?
                }
                created => created?,
            },
        };
        let observed = Observed::from(&stored);
        memory.accepted.remove(&name);
        let dropped = if !kept_counters(wanted, &stored) {
            Some(WriteError::CountersDropped { name: name.clone() })
        } else if !kept_taints(wanted, &stored) {
            Some(WriteError::TaintsDropped { name: name.clone() })
        } else {
            None
        };
        let meant = Meaning::of(&wanted.spec);
        if dropped.is_none() && observed.meaning != meant {
            warn!(slice = %name, "the API server stores a slice in another form than it was sent: a newer field may be switched off");
            memory.accepted.insert(name, (observed.resource_version.clone(), meant));
        }
        self.index.lock().written(observed);
        dropped.map_or(Ok(()), Err)
    }

    /// Whether the name that a slice shall have is that of a slice of another driver or node.
    async fn is_anothers(&self, slice: &ResourceSlice) -> Result<bool, WriteError> {
        let name = slice.metadata.name.clone().unwrap_or_default();
        let only_it = ListParams::default().fields(&format!("metadata.name={name}"));
        let action = "look at the name of";
        match tokio::time::timeout(PATIENCE, self.api().list(&only_it)).await {
            Ok(Ok(found)) => Ok(found
                .items
                .iter()
                .any(|found| found.spec.driver != slice.spec.driver || found.spec.node_name != slice.spec.node_name)),
            Ok(Err(source)) => Err(WriteError::Request { action, name, source }),
            Err(_) => Err(WriteError::Timeout { action, name }),
        }
    }

    async fn request<T>(
        &self,
        verb: Verb,
        name: &str,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, WriteError> {
        let action = verb.name();
        let done = match tokio::time::timeout(PATIENCE, request).await {
            Ok(Ok(reply)) => {
                debug!(slice = name, "{action}");
                Ok(reply)
            }
            Ok(Err(source)) => Err(WriteError::Request { action, name: name.to_owned(), source }),
            Err(_) => Err(WriteError::Timeout { action, name: name.to_owned() }),
        };
        self.metrics.wrote(verb, done.as_ref().err());
        done
    }

    fn failed(&self, failure: &WriteError) -> Outcome {
        self.metrics.not_written(failure);
        let lacks = |lack: fn(&mut ServerFeatures)| {
            self.features.send_modify(|features| features.iter_mut().for_each(lack));
            Outcome::Again
        };
        match failure {
            WriteError::CountersDropped { .. } => {
                error!("{failure}; withdrawing devices that overlap");
                return lacks(|features| features.counters = Counters::None);
            }
            WriteError::TaintsDropped { .. } => {
                error!("{failure}; withdrawing devices that are blocked");
                return lacks(|features| features.taints = false);
            }
            WriteError::Request { .. } | WriteError::Timeout { .. } => {}
        }
        if failure.is_conflict() {
            debug!(error = failure as &dyn std::error::Error, "another change came first");
        } else {
            warn!(error = failure as &dyn std::error::Error, "will be tried again");
        }
        Outcome::Failed
    }

    fn api(&self) -> Api<ResourceSlice> {
        Api::all(self.client.clone())
    }
}

/// What a writer does when it has led.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// Waits until it leads again.
    Follow,
    /// Ends.
    End,
}

/// How one look at a node ended.
struct Look {
    node: String,
    memory: Memory,
    outcome: Outcome,
    recheck: Option<Instant>,
}
