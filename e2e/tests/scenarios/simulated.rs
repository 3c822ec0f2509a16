//! What `docs/try-without-gpu.md` promises: two charts and one manifest, and a slice is cut on a node without a GPU. And the
//! demo, which does the same by itself.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kerf_api::names;
use kerf_e2e::{Cluster, Installation, built, deploy, eventually, helm};
use kube::Client;
use serde_json::json;

const RELEASE: &str = "simulator";
const NAMESPACE: &str = "kerf-simulator";
const LABEL: &str = "kerf.dev/simulated-gpus";
const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn two_charts_and_a_manifest_show_a_slice() {
    let directory = std::env::temp_dir().join("kerf-simulated");
    std::fs::create_dir_all(&directory).unwrap();
    let cluster = Cluster::from_env().unwrap();
    let client = Client::try_default().await.unwrap();
    let mut kerf = Installation::new(&cluster, &client, &directory);
    let shown = show(&cluster, &mut kerf, &directory).await;
    let logs = kerf.logs();
    let removed = remove(&cluster, &mut kerf, &directory).await;
    shown.with_context(|| logs).unwrap();
    removed.unwrap();
}

async fn show(cluster: &Cluster, kerf: &mut Installation, directory: &Path) -> Result<()> {
    let node = &cluster.node()?.name;
    cluster.kubectl(&["label", "node", node, &format!("{LABEL}=true"), "--overwrite"])?;
    let root = directory.join("driver");
    let (chart, root_value) = (deploy().join("sim-chart"), format!("driverRoot={}", root.display()));
    let chart = chart.to_str().context("a path is not text")?;
    let install = ["upgrade", "--install", RELEASE, chart, "--namespace", NAMESPACE, "--create-namespace", "--wait"];
    let image = ["image.repository=localhost/kerf-simulator", "image.tag=dev", "image.pullPolicy=Never"];
    let values = image.iter().copied().chain([root_value.as_str(), "node.latency=none"]);
    let values: Vec<&str> = values.flat_map(|value| ["--set", value]).collect();
    helm(&[install.as_slice(), &values].concat())?;
    kerf.uninstall().await?;
    kerf.install(&root).await?;
    kerf.registered().await?;

    let sample = std::fs::read_to_string(deploy().join("samples/mig-slice.yaml"))?;
    let image =
        sample.lines().find_map(|line| line.trim().strip_prefix("image: ")).context("the sample has an image")?;
    let local = directory.join("mig-slice.yaml");
    std::fs::write(&local, sample.replace(image, "localhost/kerf-e2e:1"))?;
    let local = local.to_str().context("a path is not text")?;
    cluster.kubectl(&["apply", "-f", local])?;
    cluster.kubectl(&["wait", "--for=condition=Ready", "--timeout=60s", "pod/mig-slice"])?;
    let listing = eventually("the pod lists its slice", PATIENCE, async || {
        let listing = cluster.kubectl(&["logs", "mig-slice"])?;
        Ok((!listing.is_empty()).then_some(listing))
    })
    .await?;
    ensure!(listing.matches("MIG 1g.10gb").count() == 1, "{listing}");
    Ok(())
}

async fn remove(cluster: &Cluster, kerf: &mut Installation, directory: &Path) -> Result<()> {
    let sample = deploy().join("samples/mig-slice.yaml");
    let sample = sample.to_str().context("a path is not text")?;
    cluster.kubectl(&["delete", "--ignore-not-found", "--timeout=60s", "-f", sample])?;
    kerf.uninstall().await?;
    helm(&["uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--ignore-not-found"])?;
    cluster.kubectl(&["label", "node", &cluster.node()?.name, &format!("{LABEL}-")])?;
    std::fs::remove_dir_all(directory)?;
    Ok(())
}

/// `make demo KUBECONFIG=...`, on a cluster of which it knows nothing else.
#[tokio::test]
async fn the_demo_comes_to_a_cluster_and_leaves_it() {
    let directory = std::env::temp_dir().join("kerf-visited");
    std::fs::create_dir_all(&directory).unwrap();
    let cluster = Cluster::from_env().unwrap();
    let client = Client::try_default().await.unwrap();
    Installation::new(&cluster, &client, &directory).uninstall().await.unwrap();
    let told = visit(&cluster, &directory);
    let left = demo(&cluster, &["leave"]).and_then(|output| said(&output));
    told.unwrap();
    left.unwrap();
    let namespaces = cluster.kubectl(&["get", "namespaces", "-o", "name"]).unwrap();
    assert!(!namespaces.contains("kerf"), "{namespaces}");
    let labelled = cluster.kubectl(&["get", "nodes", "-l", LABEL, "-o", "name"]).unwrap();
    assert_eq!(labelled, "");
    std::fs::remove_dir_all(&directory).unwrap();
}

fn visit(cluster: &Cluster, directory: &Path) -> Result<()> {
    let node = cluster.node()?;
    let never = json!({ "image": { "pullPolicy": "Never" } });
    let values = json!({
        "kubeletRoot": node.kubelet_root, "cdiRoot": node.cdi_root, "kubeletPlugin": never, "controller": never,
    });
    let file = directory.join("values.json");
    std::fs::write(&file, values.to_string())?;
    let root = directory.join("driver");
    let text = |path: &Path| path.to_str().context("a path is not text").map(str::to_owned);
    let (file, root) = (text(&file)?, text(&root)?);
    let visit = ["visit", "--pod-image", "localhost/kerf-e2e:1", "--values", &file, "--driver-root", &root];

    // Of the scenarios before, and not the demo's: what may be somebody's kerf is left alone.
    let mine = ["delete", "namespace", names::NAMESPACE, "--ignore-not-found"];
    cluster.kubectl(&mine)?;
    cluster.kubectl(&["create", "namespace", names::NAMESPACE])?;
    let refused = demo(cluster, &visit)?;
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success() && error.contains("which is not the demo's"), "{error}");
    cluster.kubectl(&mine)?;

    let story = said(&demo(cluster, &visit)?)?;
    for line in ["is installed", "2 x H100 80GB and 1 x L40S", "MIG 1g.10gb", "on the other one", "so it waits"] {
        ensure!(story.contains(line), "{line}\n{story}");
    }
    ensure!(story.trim_end().ends_with("all 3 GPUs hold no instance again"), "{story}");
    Ok(())
}

/// The demo as a user starts it: it has the cluster's kubeconfig and nothing else.
fn demo(cluster: &Cluster, arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new(built("kerf-demo")?);
    command.env_remove("KERF_CLUSTER").env("KUBECONFIG", cluster.kubeconfig()).args(arguments);
    command.output().context("cannot run kerf-demo")
}

fn said(output: &Output) -> Result<String> {
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{out}\n{error}");
    Ok(out.into_owned())
}
