//! kerf on a cluster as an admin has it there: its images, its chart, and what becomes of its pods.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{ContainerStatus, Namespace, Pod};
use kerf_api::names::{CONTROLLER, NAMESPACE, plugin_lease};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::chart::{deploy, helm};
use crate::cluster::Cluster;
use crate::wait::eventually;

/// Name of the Helm release, and with it of everything that the chart makes.
const RELEASE: &str = "kerf";

/// How long pods may take to come and to go.
const PATIENCE: Duration = Duration::from_secs(90);

/// One of kerf's two programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The node's part, a DaemonSet.
    KubeletPlugin,
    /// The cluster's part, a Deployment.
    Controller,
}

impl Part {
    /// The component in the names and labels of the chart.
    fn component(self) -> &'static str {
        match self {
            Part::KubeletPlugin => "kubelet-plugin",
            Part::Controller => "controller",
        }
    }

    fn name(self) -> String {
        format!("{RELEASE}-{}", self.component())
    }

    fn selector(self) -> ListParams {
        let component = self.component();
        ListParams::default().labels(&format!("app.kubernetes.io/name=kerf,app.kubernetes.io/component={component}"))
    }
}

/// kerf, installed by its chart.
pub struct Installation {
    cluster: Cluster,
    client: Client,
    values: PathBuf,
    /// Containers whose end is the scenario's doing. Any other end is a failure.
    ended: BTreeSet<String>,
    /// Whoever held the node's lease when the plugin was ended: not the plugin that is waited for.
    former: Option<String>,
}

impl Installation {
    /// kerf that is not installed yet. `directory` receives the values that differ from the chart's own.
    pub fn new(cluster: &Cluster, client: &Client, directory: &Path) -> Installation {
        Installation {
            cluster: cluster.clone(),
            client: client.clone(),
            values: directory.join("values.yaml"),
            ended: BTreeSet::new(),
            former: None,
        }
    }

    /// Installs the chart for the driver at `driver_root`.
    ///
    /// # Errors
    ///
    /// What Helm says.
    pub async fn install(&self, driver_root: &Path) -> Result<()> {
        let node = self.cluster.node()?;
        let image = |program: &str| json!({ "image": { "repository": format!("localhost/kerf-{program}"), "tag": "dev", "pullPolicy": "Never" } });
        let values = json!({
            "driverRoot": driver_root,
            "kubeletRoot": node.kubelet_root,
            "cdiRoot": node.cdi_root,
            "hookRoot": node.hook_root,
            "logFormat": "text",
            "kubeletPlugin": image("kubelet-plugin"),
            "controller": image("controller"),
        });
        std::fs::write(&self.values, serde_saphyr::to_string(&values)?)?;
        let namespace: Namespace = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Namespace",
            "metadata": {
                "name": NAMESPACE,
                "labels": { "pod-security.kubernetes.io/enforce": "privileged" },
            },
        }))?;
        let apply = PatchParams::apply("kerf-e2e").force();
        Api::<Namespace>::all(self.client.clone()).patch(NAMESPACE, &apply, &Patch::Apply(&namespace)).await?;
        self.upgrade(&[])
    }

    /// `helm upgrade --install` with the scenario's values and these arguments; does not wait for the pods.
    ///
    /// # Errors
    ///
    /// What Helm says.
    pub fn upgrade(&self, arguments: &[&str]) -> Result<()> {
        let chart = deploy().join("chart");
        let (chart, values) = (text(&chart)?, text(&self.values)?);
        // The CRD stays when a release goes, and may be another's.
        let install =
            ["upgrade", "--install", "--take-ownership", RELEASE, chart, "--namespace", NAMESPACE, "--values", values];
        helm(&[&install, arguments].concat()).map(|_| ())
    }

    /// `helm upgrade` to what is another version to Kubernetes: all pods are replaced.
    ///
    /// # Errors
    ///
    /// What Helm says.
    pub fn update(&self, version: &str) -> Result<()> {
        let set = |program| format!("{program}.podAnnotations.version={version}");
        self.upgrade(&["--set-string", &set("kubeletPlugin"), "--set-string", &set("controller")])
    }

    /// `helm rollback` to the version before.
    ///
    /// # Errors
    ///
    /// What Helm says.
    pub fn roll_back(&self) -> Result<()> {
        helm(&["rollback", RELEASE, "--namespace", NAMESPACE]).map(|_| ())
    }

    /// `helm test`: a pod of the chart claims a device and lists it.
    ///
    /// # Errors
    ///
    /// What Helm says.
    pub fn test(&self) -> Result<()> {
        helm(&["test", RELEASE, "--namespace", NAMESPACE, "--timeout=60s"]).map(|_| ())
    }

    /// `helm uninstall`, then waits until no pod of kerf is left. Nothing happens where kerf is not installed.
    ///
    /// # Errors
    ///
    /// What Helm says, and when pods stay.
    pub async fn uninstall(&mut self) -> Result<()> {
        self.former = self.holder().await?.or(self.former.take());
        helm(&["uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found"])?;
        let pods = self.all_pods();
        let ours = ListParams::default().labels("app.kubernetes.io/name=kerf");
        eventually("kerf's pods are gone", PATIENCE, async || {
            let left: Vec<_> = pods.list(&ours).await?.items.into_iter().map(|pod| pod.metadata.name).collect();
            ensure!(left.is_empty(), "{left:?}");
            Ok(Some(()))
        })
        .await
    }

    /// Waits until a plugin that was not ended by the scenario is registered with the kubelet: only then it takes its
    /// lease. A pod that is bound earlier fails its first Prepare, and the kubelet takes its time before the next.
    ///
    /// # Errors
    ///
    /// When it takes too long, or a program has ended by itself.
    pub async fn registered(&self) -> Result<()> {
        eventually("the plugin is registered", PATIENCE, async || {
            self.check().await?;
            let holder = self.holder().await?;
            Ok((holder.is_some() && holder != self.former).then_some(()))
        })
        .await
    }

    /// Waits until every pod of a part is of its newest kind and ready.
    ///
    /// # Errors
    ///
    /// When it takes too long.
    pub async fn rolled_out(&self, part: Part) -> Result<()> {
        eventually(&format!("{} is rolled out", part.name()), PATIENCE, async || {
            let done = match part {
                Part::KubeletPlugin => {
                    let set = Api::<DaemonSet>::namespaced(self.client.clone(), NAMESPACE).get(&part.name()).await?;
                    let status = set.status.context("no status yet")?;
                    status.observed_generation == set.metadata.generation
                        && status.desired_number_scheduled > 0
                        && status.updated_number_scheduled == Some(status.desired_number_scheduled)
                        && status.number_ready == status.desired_number_scheduled
                }
                Part::Controller => {
                    let set = Api::<Deployment>::namespaced(self.client.clone(), NAMESPACE).get(&part.name()).await?;
                    let wanted = set.spec.replicas;
                    let status = set.status.context("no status yet")?;
                    status.observed_generation == set.metadata.generation
                        && status.updated_replicas == wanted
                        && status.ready_replicas == wanted
                        && status.replicas == wanted
                }
            };
            // An old pod that is still on its way out is not gone.
            let ending = self.pods(part).await?.into_iter().any(|pod| pod.metadata.deletion_timestamp.is_some());
            Ok((done && !ending).then_some(()))
        })
        .await
    }

    /// SIGKILL for all processes of a part, as soon as there are any: they get no chance to tidy up. The kubelet starts them
    /// again.
    ///
    /// # Errors
    ///
    /// When there are none for too long.
    pub async fn kill(&mut self, part: Part) -> Result<()> {
        let runs = format!("{} runs", part.name());
        let processes = eventually(&runs, PATIENCE, async || Ok(Some(self.processes(part).await?))).await?;
        self.expect_end(part).await?;
        signal_kill(&processes)
    }

    /// Which controller leads, and since when.
    ///
    /// # Errors
    ///
    /// When none has ever led.
    pub async fn lead(&self) -> Result<LeaseSpec> {
        let api: Api<Lease> = Api::namespaced(self.client.clone(), NAMESPACE);
        api.get(CONTROLLER).await?.spec.context("the controllers' lease is empty")
    }

    /// SIGKILL for the controller that leads; the other one is left alone.
    ///
    /// # Errors
    ///
    /// When none leads.
    pub async fn kill_leader(&mut self) -> Result<()> {
        let leader = self.lead().await?.holder_identity.unwrap_or_default();
        // A pod's host name is its own, and the controller's identity begins with it.
        let leads = |pod: &Pod| pod.metadata.name.as_ref().is_some_and(|name| leader.starts_with(name.as_str()));
        let pod = self.pods(Part::Controller).await?.into_iter().find(leads);
        let pod = pod.with_context(|| format!("{leader:?} is none of the controllers"))?;
        self.expect_end(Part::Controller).await?;
        signal_kill(&processes_of(&[pod])?)
    }

    /// New pods for those of a part, at once: the kubelet waits longer each time before it starts a killed container.
    ///
    /// # Errors
    ///
    /// What the API server says.
    pub async fn renew(&mut self, part: Part) -> Result<()> {
        self.expect_end(part).await?;
        let at_once = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        self.all_pods().delete_collection(&at_once, &part.selector()).await?;
        Ok(())
    }

    /// From now on the containers of a part may end: the scenario ends them.
    ///
    /// # Errors
    ///
    /// What the API server says.
    pub async fn expect_end(&mut self, part: Part) -> Result<()> {
        for pod in self.pods(part).await? {
            self.ended.extend(statuses(&pod).filter_map(|status| status.container_id.clone()));
        }
        if part == Part::KubeletPlugin {
            self.former = self.holder().await?.or(self.former.take());
        }
        Ok(())
    }

    /// Takes the plugin off the node, or brings it back.
    ///
    /// # Errors
    ///
    /// What the API server says.
    pub async fn keep_plugin_away(&mut self, away: bool) -> Result<()> {
        self.expect_end(Part::KubeletPlugin).await?;
        let label = if away { json!("away") } else { Value::Null };
        let patch = json!({ "spec": { "template": { "spec": { "nodeSelector": { "kerf.dev/e2e": label } } } } });
        let api: Api<DaemonSet> = Api::namespaced(self.client.clone(), NAMESPACE);
        api.patch(&Part::KubeletPlugin.name(), &PatchParams::default(), &Patch::Merge(&patch)).await?;
        Ok(())
    }

    /// Fails when a container of kerf has ended by itself.
    ///
    /// # Errors
    ///
    /// Says which one, and how it ended.
    pub async fn check(&self) -> Result<()> {
        for part in [Part::KubeletPlugin, Part::Controller] {
            for pod in self.pods(part).await? {
                for status in statuses(&pod) {
                    let states = [&status.state, &status.last_state].into_iter().flatten();
                    for end in states.filter_map(|state| state.terminated.as_ref()) {
                        let known = end.container_id.as_ref().is_some_and(|id| self.ended.contains(id));
                        let ending = pod.metadata.deletion_timestamp.is_some();
                        ensure!(known || ending, "{} has ended by itself: {end:?}", part.name());
                    }
                }
            }
        }
        Ok(())
    }

    /// Resident memory of each process of a part in KiB, from `/proc`.
    ///
    /// # Errors
    ///
    /// When it does not run.
    pub async fn resident_kib(&self, part: Part) -> Result<Vec<u64>> {
        let mut sizes = Vec::new();
        for process in self.processes(part).await? {
            let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
            let size = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix("kB"));
            sizes.push(size.context("no VmRSS in /proc")?.trim().parse()?);
        }
        Ok(sizes)
    }

    /// The pods of a part.
    ///
    /// # Errors
    ///
    /// What the API server says.
    pub async fn pods(&self, part: Part) -> Result<Vec<Pod>> {
        Ok(self.all_pods().list(&part.selector()).await?.items)
    }

    /// The last lines that the programs logged, with those of containers that have ended.
    pub fn logs(&self) -> String {
        let mut report = String::new();
        for part in [Part::KubeletPlugin, Part::Controller] {
            let selector = format!("app.kubernetes.io/name=kerf,app.kubernetes.io/component={}", part.component());
            for previous in ["--previous=true", "--previous=false"] {
                let arguments = ["logs", "-n", NAMESPACE, "-l", &selector, "--prefix", "--tail=40", previous];
                if let Ok(text) = self.cluster.kubectl(&arguments) {
                    report.push_str(&format!("--- {} {previous}\n{text}\n", part.name()));
                }
            }
        }
        report
    }

    fn all_pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// Who holds the node's lease.
    async fn holder(&self) -> Result<Option<String>> {
        let api: Api<Lease> = Api::namespaced(self.client.clone(), NAMESPACE);
        let lease = api.get_opt(&plugin_lease(&self.cluster.node()?.name)).await?;
        let holder = lease.and_then(|lease| lease.spec?.holder_identity);
        Ok(holder.filter(|holder| !holder.is_empty()))
    }

    async fn processes(&self, part: Part) -> Result<Vec<u32>> {
        processes_of(&self.pods(part).await?)
    }
}

/// The processes of the running containers of pods, by the container's name in their control group.
fn processes_of(pods: &[Pod]) -> Result<Vec<u32>> {
    let running = |status: &ContainerStatus| status.state.as_ref().is_some_and(|state| state.running.is_some());
    let ids: Vec<String> = pods
        .iter()
        .flat_map(statuses)
        .filter(|status| running(status))
        .filter_map(|status| Some(status.container_id.as_ref()?.rsplit('/').next()?.to_owned()))
        .collect();
    let mut processes = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // A process may end while its file is read.
        let groups = std::fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
        if ids.iter().any(|id| groups.contains(id)) {
            processes.push(process);
        }
    }
    ensure!(
        !processes.is_empty(),
        "no process of {:?} runs",
        pods.iter().map(|pod| &pod.metadata.name).collect::<Vec<_>>()
    );
    Ok(processes)
}

fn signal_kill(processes: &[u32]) -> Result<()> {
    for process in processes {
        let status = Command::new("kill").args(["-9", &process.to_string()]).status()?;
        ensure!(status.success(), "cannot kill process {process}");
    }
    Ok(())
}

fn statuses(pod: &Pod) -> impl Iterator<Item = &ContainerStatus> {
    pod.status.iter().filter_map(|status| status.container_statuses.as_ref()).flatten()
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not text", path.display()))
}
