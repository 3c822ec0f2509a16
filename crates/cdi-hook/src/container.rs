//! The container that is being made: what the runtime says of it.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::root::{Root, RootError};

/// More than any state has, of which the runtime writes a few hundred bytes and the annotations of the container.
const LONGEST_STATE: u64 = 4 << 20;

/// A container that is being made.
#[derive(Debug)]
pub(crate) struct Container {
    /// Where its root directory is, as the host sees it.
    pub(crate) path: PathBuf,
    /// The same, opened.
    pub(crate) root: Root,
}

/// The runtime does not say where the container is.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ContainerError {
    #[error("the container's state cannot be read from stdin: {0}")]
    State(io::Error),
    #[error("the container's state on stdin is not JSON: {0}")]
    Json(serde_json::Error),
    #[error("the container's state names no bundle")]
    Bundle,
    #[error("the container's configuration {path} cannot be read: {error}")]
    Config { path: PathBuf, error: io::Error },
    #[error("the container's configuration {0} names no root.path")]
    NoRoot(PathBuf),
    #[error(transparent)]
    Root(#[from] RootError),
}

impl Container {
    /// The container of a state as a hook gets it (OCI runtime specification, "State").
    pub(crate) fn from_state(state: impl Read) -> Result<Container, ContainerError> {
        let mut text = Vec::new();
        state.take(LONGEST_STATE).read_to_end(&mut text).map_err(ContainerError::State)?;
        let state: Value = serde_json::from_slice(&text).map_err(ContainerError::Json)?;
        let bundle = state["bundle"].as_str().map(Path::new).ok_or(ContainerError::Bundle)?;
        let path = bundle.join("config.json");
        let unreadable = |error| ContainerError::Config { path: path.clone(), error };
        let config: Value = fs::read(&path)
            .and_then(|text| serde_json::from_slice(&text).map_err(io::Error::from))
            .map_err(unreadable)?;
        // Relative to the bundle unless it is absolute.
        let root = config["root"]["path"].as_str().filter(|root| !root.is_empty());
        let path = bundle.join(root.ok_or_else(|| ContainerError::NoRoot(path.clone()))?);
        Ok(Container { root: Root::open(&path)?, path })
    }
}
