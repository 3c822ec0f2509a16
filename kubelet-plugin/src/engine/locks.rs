//! Locks by name, valid in this process and across processes: during a rolling update two plugins serve one node.
//!
//! Inside the process waiters sleep on a condition; another process is seen through a lock on a file, which the kernel
//! drops when its holder dies. The holder writes its name into the file, so that a waiter that gives up can tell it.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::LockError;

/// How long background work waits for a lock: who has it works on the claim or its GPU, and the next round comes.
pub(super) const BACKGROUND_PATIENCE: Duration = Duration::from_secs(1);

/// How often a lock that another process holds is tried.
const POLL: Duration = Duration::from_millis(20);

/// The locks of one node.
#[derive(Debug)]
pub(super) struct Locks {
    dir: PathBuf,
    /// Who holds what in this process.
    held: Mutex<HashMap<String, String>>,
    released: Condvar,
}

/// A held lock.
#[derive(Debug)]
#[must_use = "the lock is released when this is dropped"]
pub(super) struct Guard<'a> {
    locks: &'a Locks,
    name: String,
    /// Unlocked by the kernel when it is closed.
    file: Option<File>,
    temporary: bool,
}

impl Locks {
    /// Makes the directory.
    pub(super) fn open(dir: &Path) -> Result<Locks, LockError> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .map_err(|error| LockError::Io { path: dir.to_owned(), error })?;
        Ok(Locks { dir: dir.to_owned(), held: Mutex::default(), released: Condvar::new() })
    }

    /// Removes the files of temporary locks that a killed process has left: their names begin with `prefix`, and nobody
    /// comes for them again.
    pub(super) fn remove_leftovers(&self, prefix: &str) {
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let path = entry.path();
            let is_one = entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix));
            // As long as this has the lock, whoever wants it waits for this very file, and looks again when he has it.
            if is_one
                && let Ok(file) = File::open(&path)
                && file.try_lock().is_ok()
                && is_at(&file, &path).unwrap_or(false)
                && let Err(error) = fs::remove_file(&path)
            {
                tracing::debug!(path = %path.display(), %error, "a lock file that nobody uses stays");
            }
        }
    }

    /// Waits for a lock whose file stays for the next holder.
    pub(super) fn acquire(&self, name: &str, holder: &str, deadline: Instant) -> Result<Guard<'_>, LockError> {
        self.lock(name, holder, deadline, false)
    }

    /// Waits for a lock whose file goes with its holder: for names that do not come again.
    pub(super) fn acquire_temporary(
        &self,
        name: &str,
        holder: &str,
        deadline: Instant,
    ) -> Result<Guard<'_>, LockError> {
        self.lock(name, holder, deadline, true)
    }

    fn lock(&self, name: &str, holder: &str, deadline: Instant, temporary: bool) -> Result<Guard<'_>, LockError> {
        let holder = format!("{holder} in process {}", std::process::id());
        self.enter(name, &holder, deadline)?;
        // From here on dropping the guard leaves again.
        let mut guard = Guard { locks: self, name: name.to_owned(), file: None, temporary };
        let path = self.path(name);
        let io_error = |error| LockError::Io { path: path.clone(), error };
        loop {
            let mut file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(&path)
                .map_err(io_error)?;
            match file.try_lock() {
                // A former holder may have removed the file between open and lock: then this one locks nobody out.
                Ok(()) if !is_at(&file, &path).map_err(io_error)? => continue,
                Ok(()) => {
                    // It is held without it. The name is for people, and on a full disk a pod can end all the same.
                    if let Err(error) = write_holder(&mut file, &holder) {
                        tracing::debug!(path = %path.display(), %error, "the holder of the lock is not told");
                    }
                    guard.file = Some(file);
                    return Ok(guard);
                }
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(POLL),
                Err(TryLockError::WouldBlock) => {
                    let holder = fs::read_to_string(&path).unwrap_or_default();
                    let holder = if holder.is_empty() { "another process".to_owned() } else { holder };
                    return Err(LockError::Timeout { name: name.to_owned(), holder });
                }
                Err(TryLockError::Error(error)) => return Err(io_error(error)),
            }
        }
    }

    /// Waits until nobody else in this process has the name, and takes it.
    fn enter(&self, name: &str, holder: &str, deadline: Instant) -> Result<(), LockError> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(other) = held.get(name) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(LockError::Timeout { name: name.to_owned(), holder: other.clone() });
            }
            held = self.released.wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        held.insert(name.to_owned(), holder.to_owned());
        Ok(())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.lock"))
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if let Some(file) = self.file.take()
            && self.temporary
        {
            // While it is still locked, so that no one else's file is removed. A file that stays does no harm.
            let _ = fs::remove_file(self.locks.path(&self.name));
            drop(file);
        }
        self.locks.held.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
        self.locks.released.notify_all();
    }
}

/// Whether a path still leads to this very file.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let here = file.metadata()?;
    match fs::metadata(path) {
        Ok(there) => Ok(here.dev() == there.dev() && here.ino() == there.ino()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn write_holder(file: &mut File, holder: &str) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    file.write_all(holder.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(50)
    }

    fn late() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    /// Two `Locks` on one directory are two processes: nothing but the files is common.
    fn two_processes() -> (tempfile::TempDir, Locks, Locks) {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (Locks::open(dir.path()).unwrap(), Locks::open(dir.path()).unwrap());
        (dir, one, two)
    }

    #[test]
    fn what_a_killed_process_has_left_goes_and_what_is_held_stays() {
        let (dir, one, two) = two_processes();
        let _claim = one.acquire_temporary("claim-held", "a", late()).unwrap();
        let _gpu = one.acquire("gpu-3b-00-0", "a", late()).unwrap();
        drop(one.acquire("gpu-af-00-0", "a", late()).unwrap());
        fs::write(dir.path().join("claim-left.lock"), "killed").unwrap();
        two.remove_leftovers("claim-");
        let mut left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["claim-held.lock", "gpu-3b-00-0.lock", "gpu-af-00-0.lock"]);
        assert!(two.acquire_temporary("claim-held", "b", soon()).is_err());
    }

    #[test]
    fn a_waiter_that_gives_up_knows_the_holder() {
        let (_dir, one, two) = two_processes();
        let held = one.acquire("gpu-3b-00-0", "claim default/a", late()).unwrap();
        for locks in [&one, &two] {
            let error = locks.acquire("gpu-3b-00-0", "claim default/b", soon()).unwrap_err().to_string();
            assert!(error.contains("gpu-3b-00-0"), "{error}");
            assert!(error.contains(&format!("claim default/a in process {}", std::process::id())), "{error}");
        }
        let _another = two.acquire("gpu-af-00-0", "claim default/b", soon()).unwrap();
        drop(held);
        let _free = two.acquire("gpu-3b-00-0", "claim default/b", soon()).unwrap();
    }

    #[test]
    fn a_waiter_goes_on_when_the_holder_leaves() {
        let (_dir, one, two) = two_processes();
        for waiter in [&one, &two] {
            let held = one.acquire("x", "a", late()).unwrap();
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| waiter.acquire("x", "b", late()).map(drop));
                drop(held);
                waiting.join().unwrap().unwrap();
            });
        }
    }

    #[test]
    fn nobody_shares_a_lock_whose_file_comes_and_goes() {
        let (dir, one, two) = two_processes();
        let inside = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for locks in [&one, &one, &two, &two] {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _guard = locks.acquire_temporary("claim-x", "test", late()).unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        std::thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "no file is left");
    }
}
