//! The other end of the daemon's socket.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde::de::DeserializeOwned;

use crate::SOCKET;
use crate::code::Code;
use crate::visibility::is_privileged;
use crate::wire::{self, Op, Reply, Request};

/// A client of the daemon of one driver root.
///
/// Calls of several threads go over connections of their own, so none waits for another. A daemon that was restarted is
/// connected to again; handles from before are stale then, as after a reboot.
#[derive(Debug)]
pub struct Client {
    root: PathBuf,
    idle: Mutex<Idle>,
}

/// Connections that no call uses now, and the process that opened them: after a fork the child needs its own.
#[derive(Debug, Default)]
struct Idle {
    process: u32,
    connections: Vec<UnixStream>,
}

impl Client {
    /// A client of the daemon under this driver root. Connects with the first call.
    pub fn new(root: impl Into<PathBuf>) -> Client {
        Client { root: root.into(), idle: Mutex::default() }
    }

    /// The driver root.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Asks the daemon on behalf of an NVML function. The type of the answer is the one that [`Op`] names.
    ///
    /// # Errors
    ///
    /// The daemon's, and [`Code::DRIVER_NOT_LOADED`] when there is none.
    pub fn ask<T: DeserializeOwned>(&self, function: &str, op: Op) -> Result<T, Code> {
        let privileged = is_privileged(&self.root);
        let request = Request { version: wire::VERSION, function: function.to_owned(), privileged, op };
        // A connection from earlier may have been closed by the end of its daemon: then it is tried once more, on a new
        // one. The daemon answers before it ends, so the call was not carried out.
        if let Some(connection) = self.idle_connection()
            && let Ok(reply) = self.exchange(connection, &request)
        {
            return reply;
        }
        let connection = UnixStream::connect(self.root.join(SOCKET)).map_err(|_| Code::DRIVER_NOT_LOADED)?;
        self.exchange(connection, &request).unwrap_or(Err(Code::DRIVER_NOT_LOADED))
    }

    fn exchange<T: DeserializeOwned>(
        &self,
        connection: UnixStream,
        request: &Request,
    ) -> std::io::Result<Result<T, Code>> {
        wire::write(&connection, request)?;
        let reply = wire::read(&connection)?;
        self.keep(connection);
        Ok(match reply {
            Reply::Ok(answer) => Ok(answer),
            Reply::Error(code) => Err(code),
        })
    }

    fn idle_connection(&self) -> Option<UnixStream> {
        let mut idle = self.idle.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if idle.process != std::process::id() {
            *idle = Idle { process: std::process::id(), connections: Vec::new() };
        }
        idle.connections.pop()
    }

    fn keep(&self, connection: UnixStream) {
        self.idle.lock().unwrap_or_else(std::sync::PoisonError::into_inner).connections.push(connection);
    }
}
