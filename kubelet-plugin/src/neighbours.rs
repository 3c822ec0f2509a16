//! The other plugins of this driver on this node: the one that this one takes over from, or hands over to.
//!
//! Each pod has sockets of its own, so who lives can be seen: somebody listens. Sockets are bound, and those of the dead
//! removed, under a lock on the plugin's directory. Without it a socket between bind(2) and listen(2) would look dead.
//!
//! And NVIDIA's DRA driver, which has the same name and cannot serve a node together with this one: it takes every MIG instance
//! that it did not make for a leftover. This plugin begins when that one has ended.

use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::engine::{FormerDriver, FormerError};
use crate::events::Events;
use crate::paths::{Paths, Socket};
use crate::socket::{self, Life, SocketError, SocketFile};

/// How long to wait for another process that binds its sockets: it takes it milliseconds.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often the lock is tried.
const POLL: Duration = Duration::from_millis(20);

/// How often to look whether NVIDIA's DRA driver has ended, and whether it has come back.
const FORMER_POLL: Duration = Duration::from_secs(1);
const FORMER_WATCH: Duration = Duration::from_secs(10);

/// How often a person is told that it is waited for.
const REMIND: Duration = Duration::from_secs(60);

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

/// Waits until NVIDIA's DRA driver does not run on this node.
pub async fn wait_for_former(paths: &Paths, former: &FormerDriver, events: &Events) {
    let mut told: Option<Instant> = None;
    while is_former_alive(paths).await {
        former.set_runs(true);
        if told.is_none_or(|at| at.elapsed() > REMIND) {
            let message = format!("kerf waits: {}", FormerError::Runs);
            tracing::warn!(why = message, "not serving yet");
            events.node(kerf_api::names::FORMER_DRIVER, &message);
            told = Some(Instant::now());
        }
        tokio::time::sleep(FORMER_POLL).await;
    }
    former.set_runs(false);
}

/// Keeps `former` told of whether NVIDIA's DRA driver runs, until `stop`. `changed` is told when that has changed.
pub async fn watch_former(paths: Paths, former: FormerDriver, changed: Arc<Notify>, stop: CancellationToken) {
    let watch = async {
        loop {
            tokio::time::sleep(FORMER_WATCH).await;
            if former.set_runs(is_former_alive(&paths).await) {
                changed.notify_one();
            }
        }
    };
    stop.run_until_cancelled(watch).await;
}

async fn is_former_alive(paths: &Paths) -> bool {
    for socket in sockets_beside(&paths.registration_socket, |name| paths.is_former_socket_name(name)) {
        if socket::life(&socket).await == Life::Alive {
            return true;
        }
    }
    false
}

/// The sockets of one kind of all plugins of this driver but this one.
fn others(paths: &Paths, socket: Socket) -> Vec<PathBuf> {
    let own = paths.socket(socket);
    let mut others = sockets_beside(own, |name| paths.is_socket_name(socket, name));
    others.retain(|path| path != own);
    others
}

fn sockets_beside(own: &Path, is_one: impl Fn(&OsStr) -> bool) -> Vec<PathBuf> {
    let entries = own.parent().map(fs::read_dir).into_iter().flatten().flatten().flatten();
    entries.filter(|entry| is_one(&entry.file_name())).map(|entry| entry.path()).collect()
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

    /// It is waited for, and seen when it comes back.
    #[tokio::test(start_paused = true)]
    async fn the_former_driver_has_the_node_to_itself() {
        let (_directory, _, paths) = two();
        let former = FormerDriver::new(&paths.plugin_directory, &paths.cdi);
        let (events, _writer) = crate::events::channel("node-1", &crate::metrics::Metrics::default());
        wait_for_former(&paths, &former, &events).await;

        let registry = paths.registration_socket.parent().unwrap();
        fs::create_dir_all(registry).unwrap();
        let socket = registry.join("gpu.nvidia.com-reg.sock");
        let (listener, file) = socket::listen(&socket).unwrap();
        let waiting = tokio::time::timeout(REMIND, wait_for_former(&paths, &former, &events)).await;
        assert!(waiting.is_err() && !former.set_runs(true), "it runs, and that is known");

        std::mem::forget(file);
        drop(listener);
        wait_for_former(&paths, &former, &events).await;
        assert!(!former.set_runs(false) && socket.exists(), "a socket of a dead one is not ours to remove");

        let (changed, stop) = (Arc::new(Notify::new()), CancellationToken::new());
        tokio::spawn(watch_former(paths.clone(), former.clone(), Arc::clone(&changed), stop.clone()));
        let (_listener, _file) = socket::listen(&socket).unwrap();
        changed.notified().await;
        assert!(!former.set_runs(true));
        stop.cancel();
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
