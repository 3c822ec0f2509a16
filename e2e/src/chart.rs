//! kerf's chart, as Helm sees it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// The folder `deploy/` of the repository.
pub fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy")
}

/// Runs Helm, the one that `KERF_HELM` names or that of the PATH, and returns what it prints.
///
/// # Errors
///
/// What Helm says.
pub fn helm<S: AsRef<std::ffi::OsStr>>(arguments: &[S]) -> Result<String> {
    let helm = std::env::var_os("KERF_HELM").filter(|path| !path.is_empty()).unwrap_or_else(|| "helm".into());
    let output =
        Command::new(helm).args(arguments).output().context("cannot run helm: `make` builds it and names it")?;
    if !output.status.success() {
        let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        bail!("{}\n{}", error.trim(), out.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The manifests of a release of kerf's chart as Helm renders them, with further arguments of `helm template`.
///
/// # Errors
///
/// What Helm says.
pub fn manifests(release: &str, namespace: &str, arguments: &[&str]) -> Result<String> {
    let chart = deploy().join("chart");
    let chart = chart.to_str().context("the path of the chart is not text")?;
    helm(&[&["template", release, chart, "--namespace", namespace], arguments].concat())
}

/// The same as objects.
///
/// # Errors
///
/// What Helm says, and where it did not render YAML.
pub fn render(release: &str, namespace: &str, arguments: &[&str]) -> Result<Vec<Value>> {
    let objects: Vec<Value> = serde_saphyr::from_multiple(&manifests(release, namespace, arguments)?)?;
    Ok(objects.into_iter().filter(|object| !object.is_null()).collect())
}

/// The situations that `deploy/values` has files for, and the one without any: the arguments of Helm for each.
///
/// # Errors
///
/// Where the folder cannot be read.
pub fn situations() -> Result<Vec<Vec<String>>> {
    let mut situations = vec![Vec::new()];
    for entry in std::fs::read_dir(deploy().join("values"))? {
        let path = entry?.path();
        situations.push(vec!["--values".to_owned(), path.to_str().context("a path is not text")?.to_owned()]);
    }
    Ok(situations)
}
