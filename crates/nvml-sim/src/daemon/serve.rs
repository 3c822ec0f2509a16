//! The socket and its connections: a thread for each.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use uuid::Uuid;

use super::answer::NodeAtWork;
use super::install::{InstallError, install};
use super::layout::{Layout, LayoutError};
use crate::SOCKET;
use crate::code::Code;
use crate::node_file::NodeSpec;
use crate::wire::{self, Reply};

/// What to serve and where.
#[derive(Debug)]
pub struct Options {
    /// The node.
    pub node: NodeSpec,
    /// The driver root.
    pub root: PathBuf,
    /// Where NVIDIA's own programs are (`usr/bin` below it), if they shall be in the driver root.
    pub programs: Option<PathBuf>,
}

/// Why a node cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The kernel's side of the driver root.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Library and programs.
    #[error(transparent)]
    Install(#[from] InstallError),
    /// The socket.
    #[error("cannot listen on {path}: {reason}")]
    Listen {
        /// Where.
        path: PathBuf,
        /// Why not.
        reason: io::Error,
    },
    /// One of the node file's faults.
    #[error("faults[{entry}] of the node file cannot be done: {code}")]
    Fault {
        /// Which entry.
        entry: usize,
        /// What the driver says.
        code: Code,
    },
}

/// A node that is served. The socket is removed when it is dropped.
#[derive(Debug)]
pub struct Serving {
    socket: PathBuf,
}

impl Drop for Serving {
    fn drop(&mut self) {
        // It may be gone already, with the whole driver root.
        let _ = fs::remove_file(&self.socket);
    }
}

/// Lays out the driver root and serves the node from threads of its own, until the process ends.
///
/// # Errors
///
/// When the driver root cannot be laid out, the socket cannot be had, or one of the node file's faults cannot be done.
pub fn serve(options: Options) -> Result<Serving, ServeError> {
    let Options { node, root, programs } = options;
    let layout = Layout::new(&root, &node)?;
    install(layout.root(), &node.driver_version, programs.as_deref())?;

    let socket = root.join(SOCKET);
    let listener = listen(&socket).map_err(|reason| ServeError::Listen { path: socket.clone(), reason })?;
    // Unlike any loading of the driver before it: nothing is left of those.
    let generation = (Uuid::new_v4().as_u128() % 0x7fff) as u16 + 1;
    let faults = node.faults.clone();
    let node = Arc::new(NodeAtWork::new(node, layout, generation));
    for (entry, step) in faults.into_iter().enumerate() {
        node.step(step).map_err(|code| ServeError::Fault { entry, code })?;
    }
    std::thread::spawn(move || accept(&listener, &node));
    Ok(Serving { socket })
}

fn listen(socket: &Path) -> io::Result<UnixListener> {
    if let Some(directory) = socket.parent() {
        fs::create_dir_all(directory)?;
    }
    match fs::remove_file(socket) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        other => other?,
    }
    let listener = UnixListener::bind(socket)?;
    // Any user of a GPU may speak to the driver.
    fs::set_permissions(socket, fs::Permissions::from_mode(0o666))?;
    Ok(listener)
}

fn accept(listener: &UnixListener, node: &Arc<NodeAtWork>) {
    for connection in listener.incoming() {
        match connection {
            Ok(connection) => {
                let node = Arc::clone(node);
                std::thread::spawn(move || converse(&connection, &node));
            }
            Err(error) => {
                eprintln!("nvml-sim: cannot accept a connection: {error}");
                // Out of file descriptors, most likely: the listener stays readable, so do not spin.
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
        }
    }
}

/// Answers what comes over one connection until the other side hangs up.
fn converse(connection: &UnixStream, node: &Arc<NodeAtWork>) {
    while let Ok(Some(bytes)) = wire::read_bytes(connection) {
        let reply = match answer(&bytes, node) {
            Ok(value) => Reply::Ok(value),
            Err(code) => Reply::Error(code),
        };
        if wire::write(connection, &reply).is_err() {
            break;
        }
    }
}

fn answer(bytes: &[u8], node: &Arc<NodeAtWork>) -> Result<Value, Code> {
    /// Every version of the protocol has at least this.
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    match serde_json::from_slice(bytes) {
        Ok(request) => node.answer(request),
        Err(_) => match serde_json::from_slice(bytes) {
            Ok(Version { version }) if version != wire::VERSION => Err(Code::LIB_RM_VERSION_MISMATCH),
            _ => Err(Code::INVALID_ARGUMENT),
        },
    }
}
