//! The other plugins of this driver on this node: the one that this one takes over from, or hands over to.
//!
//! Each pod has sockets of its own, so who lives can be seen: somebody listens. Sockets are bound, and those of the dead
//! removed, under a lock on the plugin's directory. Without it a socket between bind(2) and listen(2) would look dead.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::time::Instant;

use crate::paths::{Paths, Socket};
use crate::socket::{self, Life, SocketError, SocketFile};

/// How long to wait for another process that binds its sockets: it takes it milliseconds.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often the lock is tried.
const POLL: Duration = Duration::from_millis(20);

/// Listens at this plugin's socket, after removing those of this kind whose process is dead: the kubelet forgets a plugin
/// when its registration socket goes, and tries for ever to reach it until then.
///
/// # Errors
/// As [`socket::listen`].
pub async fn listen(paths: &Paths, socket: Socket) -> Result<(UnixListener, SocketFile), SocketError> {
    let own = paths.socket(socket);
    let lock = lock(&paths.plugin_directory).await;
    if lock.is_some() {
        for other in others(paths, socket) {
            if socket::life(&other).await == Life::Dead {
                match fs::remove_file(&other) {
                    Ok(()) => tracing::info!(socket = %other.display(), "removed what a dead plugin had left"),
                    Err(error) => tracing::warn!(socket = %other.display(), %error, "a dead plugin's socket stays"),
                }
            }
        }
    }
    socket::listen(own)
}

/// Whether another plugin serves this node.
pub async fn is_any_alive(paths: &Paths) -> bool {
    for other in others(paths, Socket::Registration) {
        if socket::life(&other).await == Life::Alive {
            return true;
        }
    }
    false
}

/// The sockets of one kind of all plugins of this driver but this one.
fn others(paths: &Paths, socket: Socket) -> Vec<PathBuf> {
    let own = paths.socket(socket);
    let entries = own.parent().map(fs::read_dir).into_iter().flatten().flatten().flatten();
    let others = entries.filter(|entry| paths.is_socket_name(socket, &entry.file_name()));
    others.map(|entry| entry.path()).filter(|path| path != own).collect()
}

/// The lock, until the file is dropped. `None` where it is not to be had: then nobody's sockets are removed.
async fn lock(directory: &Path) -> Option<File> {
    let failed = |error: &dyn std::fmt::Display| {
        tracing::warn!(directory = %directory.display(), %error, "sockets of dead plugins are not looked for");
    };
    let file = fs::create_dir_all(directory).and_then(|()| File::open(directory));
    let file = file.inspect_err(|error| failed(error)).ok()?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        match file.try_lock() {
            Ok(()) => return Some(file),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => tokio::time::sleep(POLL).await,
            Err(error) => {
                failed(&error);
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The paths of two pods on one node.
    fn two() -> (tempfile::TempDir, Paths, Paths) {
        let directory = tempfile::tempdir().unwrap();
        let paths = Paths::new(directory.path(), &directory.path().join("cdi"), "gpu.nvidia.com");
        let (old, new) = (paths.clone().of_pod("00000000-0000"), paths.of_pod("11111111-1111"));
        (directory, old, new)
    }

    #[tokio::test]
    async fn the_dead_are_cleared_away_and_the_living_are_not() {
        let (_directory, old, new) = two();
        for socket in [Socket::Registration, Socket::Dra] {
            let (living, _file) = listen(&old, socket).await.unwrap();
            let (_new, _file) = listen(&new, socket).await.unwrap();
            assert!(old.socket(socket).exists());

            drop(living);
            assert!(old.socket(socket).exists(), "a killed process leaves its socket behind");
            let (_new, _file) = listen(&new, socket).await.unwrap();
            assert!(!old.socket(socket).exists());
        }
    }

    #[tokio::test]
    async fn who_listens_is_alive() {
        let (_directory, old, new) = two();
        assert!(!is_any_alive(&new).await, "no directory yet");
        let (living, _file) = listen(&old, Socket::Registration).await.unwrap();
        assert!(is_any_alive(&new).await);
        assert!(!is_any_alive(&old).await, "it is alone");
        drop(living);
        assert!(!is_any_alive(&new).await);
    }

    #[tokio::test]
    async fn what_is_none_of_ours_stays() {
        let (_directory, old, new) = two();
        let registry = old.registration_socket.parent().unwrap();
        fs::create_dir_all(registry).unwrap();
        let stranger = registry.join("compute-domain.nvidia.com-reg.sock");
        drop(std::os::unix::net::UnixListener::bind(&stranger).unwrap());
        let file = registry.join(old.registration_socket.file_name().unwrap());
        fs::write(&file, "no socket").unwrap();
        let _listening = listen(&new, Socket::Registration).await.unwrap();
        assert!(stranger.exists() && file.exists());
        assert!(!is_any_alive(&new).await);
    }

    #[tokio::test(start_paused = true)]
    async fn who_cannot_be_sure_removes_nothing() {
        let (_directory, old, new) = two();
        drop(listen(&old, Socket::Dra).await.map(|(listener, file)| (drop(listener), std::mem::forget(file))));
        let held = lock(&old.plugin_directory).await.unwrap();
        let _listening = listen(&new, Socket::Dra).await.unwrap();
        assert!(old.dra_socket.exists() && new.dra_socket.exists());
        drop(held);
    }
}
