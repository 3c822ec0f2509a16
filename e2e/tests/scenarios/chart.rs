//! The chart on a real API server.

use anyhow::{Context, Result};
use kerf_e2e::{Cluster, deploy, render, situations};
use serde_json::{Value, json};

/// Every field is one that the API server knows and takes, in every situation that the chart is made for.
#[test]
fn every_manifest_passes_strict_validation() {
    validate().unwrap();
}

fn validate() -> Result<()> {
    let cluster = Cluster::from_env()?;
    let strict = |file: &str| cluster.kubectl(&["apply", "--dry-run=server", "--validate=strict", "-f", file]);
    let list = std::env::temp_dir().join(format!("kerf-chart-{}.json", std::process::id()));
    let file = list.to_str().context("the path is not text")?;
    for situation in situations()? {
        let arguments: Vec<&str> = situation.iter().map(String::as_str).collect();
        // A namespace that exists: a dry run makes none.
        let mut objects = render("e2e-chart", "default", &arguments)?;
        // The Prometheus operator is not there to know its resources.
        objects.retain(|object| object["apiVersion"] != "monitoring.coreos.com/v1");
        std::fs::write(&list, json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string())?;
        strict(file).with_context(|| format!("{situation:?}"))?;
    }
    let install = std::fs::read_to_string(deploy().join("install.yaml"))?;
    let mut objects: Vec<Value> = serde_saphyr::from_multiple(&install)?;
    for object in &mut objects {
        let namespace = &mut object["metadata"]["namespace"];
        if namespace == "kerf-system" {
            *namespace = json!("default");
        }
    }
    std::fs::write(&list, json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string())?;
    strict(file).context("deploy/install.yaml")?;
    std::fs::remove_file(&list)?;
    Ok(())
}
