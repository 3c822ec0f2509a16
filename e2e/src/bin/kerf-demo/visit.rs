//! The story on a cluster that is there already: simulated GPUs and kerf come by their charts, and go again.
//!
//! Both charts go into namespaces that carry a mark. A namespace without it is not the demo's, and nothing is done.

use anyhow::{Context, Result, ensure};
use clap::Args;
use kerf_api::names;
use kerf_e2e::{Cluster, Tenant, deploy, helm};
use kube::Client;
use serde_json::Value;

use crate::story::Story;

/// Release and namespace of each chart.
const SIMULATOR: (&str, &str) = ("simulator", "kerf-simulator");
const KERF: (&str, &str) = ("kerf", names::NAMESPACE);

/// The story's own namespace.
const STAGE: &str = "kerf-demo";

/// Marks what the demo made.
const MARK: &str = "kerf.dev/demo";

/// The label by which the simulator's chart finds its nodes, for `kubectl` and for Helm's `--set`.
const SIMULATED: &str = "kerf.dev/simulated-gpus";
const SIMULATED_VALUE: &str = r"kubeletPlugin.nodeSelector.kerf\.dev/simulated-gpus=true";

/// Where the nodes find what they run.
#[derive(Args)]
pub(crate) struct Images {
    /// What the names of kerf's images begin with.
    #[arg(long, default_value = "localhost/kerf-")]
    images: String,
    /// Their tag.
    #[arg(long, default_value = "dev")]
    tag: String,
    /// Image of the story's pods: with a shell and glibc.
    #[arg(long, default_value = "ubuntu:24.04")]
    pod_image: String,
    /// Further values for kerf's chart, as files: where the kubelet is, for example.
    #[arg(long)]
    values: Vec<String>,
    /// Where the simulated driver is laid out on the node.
    #[arg(long, default_value = "/var/lib/kerf-simulator/driver")]
    driver_root: String,
}

/// Tells the story on the cluster of KUBECONFIG.
pub(crate) async fn visit(images: &Images) -> Result<()> {
    let cluster = Cluster::from_env()?;
    let client = Client::try_default().await.context("KUBECONFIG names no cluster")?;
    for (_, namespace) in [SIMULATOR, KERF] {
        ensure!(
            is_free(&cluster, namespace)?,
            "there is a namespace {namespace} already, which is not the demo's: kerf may be installed for real; \
             use another cluster, or follow docs/try-without-gpu.md"
        );
    }
    clear(&cluster)?;

    let mut story = Story::begin();
    let node = cluster.node()?.name.clone();
    for (_, namespace) in [SIMULATOR, KERF] {
        cluster.kubectl(&["create", "namespace", namespace])?;
        cluster.kubectl(&["label", "namespace", namespace, &format!("{MARK}=true")])?;
    }
    cluster.kubectl(&["label", "node", &node, "--overwrite", &format!("{SIMULATED}=true")])?;
    install(SIMULATOR, "sim-chart", &simulator_values(images), &[])?;
    story.step(&format!("node {node} has a simulated driver"));
    install(KERF, "chart", &kerf_values(images), &images.values)?;
    story.step("kerf is installed");
    let user = Tenant::new(cluster, client, STAGE).await?.with_image(&images.pod_image);
    story.tell(&user).await
}

/// Takes everything away again but the CRDs, which Helm leaves, and the files of the simulated driver.
pub(crate) fn leave() -> Result<()> {
    clear(&Cluster::from_env()?)
}

fn simulator_values(images: &Images) -> Vec<String> {
    vec![
        format!("image.repository={}simulator", images.images),
        format!("image.tag={}", images.tag),
        format!("driverRoot={}", images.driver_root),
    ]
}

fn kerf_values(images: &Images) -> Vec<String> {
    let mut values = vec![format!("driverRoot={}", images.driver_root), SIMULATED_VALUE.to_owned()];
    for (part, program) in [("kubeletPlugin", "kubelet-plugin"), ("controller", "controller")] {
        values.push(format!("{part}.image.repository={}{program}", images.images));
        values.push(format!("{part}.image.tag={}", images.tag));
    }
    values
}

fn install((release, namespace): (&str, &str), chart: &str, values: &[String], files: &[String]) -> Result<()> {
    let chart = deploy().join(chart);
    let chart = chart.to_str().context("the path of the charts is not text")?;
    let mut arguments = vec!["install", release, chart, "--namespace", namespace, "--wait", "--timeout=3m"];
    arguments.extend(files.iter().flat_map(|file| ["--values", file.as_str()]));
    arguments.extend(values.iter().flat_map(|value| ["--set-string", value.as_str()]));
    helm(&arguments).map(drop).with_context(|| {
        format!("cannot install {release}: are its images on the nodes? `kubectl -n {namespace} get pods` shows it")
    })
}

/// Whether a namespace is not there, or is the demo's.
fn is_free(cluster: &Cluster, namespace: &str) -> Result<bool> {
    let found = cluster.kubectl(&["get", "namespace", namespace, "--ignore-not-found", "-o", "json"])?;
    if found.trim().is_empty() {
        return Ok(true);
    }
    let found: Value = serde_json::from_str(&found)?;
    Ok(found["metadata"]["labels"][MARK] == "true")
}

/// First the pods, while there is a plugin to release their claims.
fn clear(cluster: &Cluster) -> Result<()> {
    cluster.kubectl(&["delete", "namespace", STAGE, "--ignore-not-found", "--timeout=120s"])?;
    for (release, namespace) in [KERF, SIMULATOR] {
        if is_free(cluster, namespace)? {
            helm(&["uninstall", release, "--namespace", namespace, "--ignore-not-found", "--wait"])?;
            cluster.kubectl(&["delete", "namespace", namespace, "--ignore-not-found", "--timeout=120s"])?;
        }
    }
    cluster.kubectl(&["label", "nodes", "-l", SIMULATED, &format!("{SIMULATED}-")]).map(drop)
}
