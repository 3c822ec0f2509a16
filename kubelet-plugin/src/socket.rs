//! A Unix socket to serve on: bound where a stale one may lie, removed when it is not needed any more.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixStream};

use crate::paths::SOCKET_PATH_BYTES;

/// A listening socket's file. Removes the file when dropped, unless another process has put its own there meanwhile.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

/// What can be seen of the process behind a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// It listens.
    Alive,
    /// It has ended without removing its socket.
    Dead,
    /// There is no socket, or it cannot be connected to.
    Unknown,
}

/// Why a socket cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The kernel takes no such path.
    #[error(
        "socket path {} has {} bytes and the kernel allows {SOCKET_PATH_BYTES}: choose a shorter --kubelet-root or --driver-name",
        path.display(), path.as_os_str().len()
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
    },
    /// Something lies there that is no socket.
    #[error("{} is in the way and is no socket: remove it", path.display())]
    InTheWay {
        /// The path.
        path: PathBuf,
    },
    /// The system refuses.
    #[error("socket {} cannot be {action}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Why not.
        source: io::Error,
    },
}

/// Whether a socket can be at `path`.
///
/// # Errors
/// [`SocketError::PathTooLong`].
pub fn check(path: &Path) -> Result<(), SocketError> {
    match path.as_os_str().len() {
        0..=SOCKET_PATH_BYTES => Ok(()),
        _ => Err(SocketError::PathTooLong { path: path.to_owned() }),
    }
}

/// Listens at `path`. Creates the directory, and removes a socket that an earlier process left behind.
///
/// Must be called within a Tokio runtime.
pub fn listen(path: &Path) -> Result<(UnixListener, SocketFile), SocketError> {
    let failed = |action| move |source| SocketError::Io { path: path.to_owned(), action, source };
    check(path)?;
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(failed("given a directory"))?;
    }
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => fs::remove_file(path).map_err(failed("replaced"))?,
        Ok(_) => return Err(SocketError::InTheWay { path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed("looked at")(error)),
    }
    let listener = UnixListener::bind(path).map_err(failed("bound"))?;
    let identity = identity(path).map_err(failed("looked at"))?;
    Ok((listener, SocketFile { path: path.to_owned(), identity }))
}

/// Who listens at `path`.
pub async fn life(path: &Path) -> Life {
    match UnixStream::connect(path).await {
        Ok(_) => Life::Alive,
        // Its queue is full (connect(2), EAGAIN): a process that is too busy, or stopped.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Life::Alive,
        // The same is said of what is no socket.
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && is_socket(path) => Life::Dead,
        Err(_) => Life::Unknown,
    }
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

impl SocketFile {
    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|found| found == self.identity)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(socket = %self.path.display(), %error, "socket not removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_the_own_one_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("new/folder/dra.sock");
        let (stale, file) = listen(&path).unwrap();
        std::mem::forget(file);
        drop(stale);
        assert!(path.exists(), "a killed process leaves its socket behind");

        let (_listener, file) = listen(&path).unwrap();
        UnixStream::connect(&path).await.unwrap();
        drop(file);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_successors_socket_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("dra.sock");
        let (_old, old_file) = listen(&path).unwrap();
        let (_new, _new_file) = listen(&path).unwrap();
        drop(old_file);
        UnixStream::connect(&path).await.unwrap();
    }

    #[tokio::test]
    async fn what_cannot_be_a_socket_is_said() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "precious").unwrap();
        assert!(listen(&file).unwrap_err().to_string().ends_with("is in the way and is no socket: remove it"));
        assert_eq!(fs::read(&file).unwrap(), b"precious");

        let long = directory.path().join("x".repeat(108));
        let error = listen(&long).unwrap_err().to_string();
        assert!(error.contains("bytes and the kernel allows 107"), "{error}");
    }
}
