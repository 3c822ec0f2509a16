//! What `docs/try-without-gpu.md` promises: two charts and one manifest, and a slice is cut on a node without a GPU.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kerf_e2e::{Cluster, Installation, deploy, eventually, helm};
use kube::Client;

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
