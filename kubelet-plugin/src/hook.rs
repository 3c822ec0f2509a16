//! The program that container runtimes run for us: brought to where they find it.
//!
//! A CDI hook is a program of the host. The plugin has ours in its image, and copies it into a directory on the host when it
//! starts, where containers that are made later find it, also while no plugin runs. A newer one takes the place of an older one
//! in one step, so that whoever runs it meanwhile has one or the other; both take the same arguments.
//!
//! Without it containers get less, and start all the same: it is missing in a build without it, and of no use on a file system
//! from which nothing may be run.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, StatVfsMountFlags};

/// What the program is called, beside the plugin and on the host.
pub const NAME: &str = "kerf-cdi-hook";

/// Where hosts have the program that the hook needs for the linker's cache, below their root.
const LDCONFIG: [&str; 4] = ["sbin/ldconfig", "usr/sbin/ldconfig", "sbin/ldconfig.real", "usr/sbin/ldconfig.real"];

/// The hook, ready to be run by container runtimes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hook {
    /// Where it is on the host.
    pub path: PathBuf,
    /// Whether it can bring the linker's cache of containers up to date.
    pub updates_ldcache: bool,
}

/// Why the hook cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// It is not there.
    #[error("this build has no {NAME} at {}", .0.display())]
    Missing(PathBuf),
    /// It cannot be copied.
    #[error("it cannot be copied to {}: {error}", path.display())]
    Copy {
        /// Where to.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// It could not be run.
    #[error("{} is on a file system from which no program may be run (noexec)", .0.display())]
    NoExec(PathBuf),
}

/// Where the program lies that is to be copied: beside this one.
pub fn beside_this_program() -> PathBuf {
    std::env::current_exe().unwrap_or_default().with_file_name(NAME)
}

impl Hook {
    /// Sees to it that `directory`, which has the same path on the host, has the program that is at `source`. Blocks.
    ///
    /// # Errors
    /// When containers cannot have it.
    pub fn install(source: &Path, directory: &Path, host_root: &Path) -> Result<Hook, HookError> {
        let program = match fs::read(source) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(HookError::Missing(source.to_owned())),
            read => read,
        };
        let path = directory.join(NAME);
        program
            .and_then(|program| replace(&path, &program))
            .map_err(|error| HookError::Copy { path: path.clone(), error })?;
        if rustix::fs::statvfs(&path).is_ok_and(|fs| fs.f_flag.contains(StatVfsMountFlags::NOEXEC)) {
            return Err(HookError::NoExec(path));
        }
        let updates_ldcache = LDCONFIG.iter().any(|ldconfig| host_root.join(ldconfig).exists());
        Ok(Hook { path, updates_ldcache })
    }
}

/// Makes a file this program, in one step, unless it is already.
fn replace(path: &Path, program: &[u8]) -> io::Result<()> {
    let is_runnable = |path: &Path| fs::metadata(path).is_ok_and(|about| about.permissions().mode() & 0o777 == 0o755);
    if fs::read(path).is_ok_and(|present| present == program) && is_runnable(path) {
        return Ok(());
    }
    let directory = path.parent().unwrap_or(path);
    fs::create_dir_all(directory)?;
    // Root of a user namespace, as whom hooks of containers in one run, is one of the others.
    fs::set_permissions(directory, Permissions::from_mode(0o755))?;
    // Another plugin may be doing the same. What a killed one has left under the new name is overwritten.
    let lock = fs::File::open(directory)?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
    let new = path.with_extension("tmp");
    let replaced = fs::write(&new, program)
        .and_then(|()| fs::set_permissions(&new, Permissions::from_mode(0o755)))
        .and_then(|()| fs::File::open(&new)?.sync_all())
        .and_then(|()| fs::rename(&new, path));
    if replaced.is_err() {
        let _ = fs::remove_file(&new);
    }
    replaced
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn the_program_is_copied_once_and_replaced_when_it_is_another() {
        let dir = tempfile::tempdir().unwrap();
        let (source, bin) = (dir.path().join("hook"), dir.path().join("plugins/bin"));
        let install = || Hook::install(&source, &bin, dir.path());
        assert!(matches!(install(), Err(HookError::Missing(path)) if path == source));
        assert!(!bin.exists());

        fs::write(&source, "one").unwrap();
        let hook = install().unwrap();
        assert_eq!(hook, Hook { path: bin.join(NAME), updates_ldcache: false });
        let about = fs::metadata(&hook.path).unwrap();
        assert_eq!((fs::read(&hook.path).unwrap(), about.mode() & 0o777), (b"one".to_vec(), 0o755));

        fs::create_dir_all(dir.path().join("sbin")).unwrap();
        fs::write(dir.path().join("sbin/ldconfig"), "").unwrap();
        assert!(install().unwrap().updates_ldcache);
        assert_eq!(fs::metadata(&hook.path).unwrap().ino(), about.ino(), "the same is left alone");

        fs::write(&source, "two").unwrap();
        install().unwrap();
        assert_eq!(fs::read(&hook.path).unwrap(), b"two");
        assert_eq!(fs::read_dir(&bin).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn what_cannot_be_copied_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let (source, bin) = (dir.path().join("hook"), dir.path().join("bin"));
        fs::write(&source, "one").unwrap();
        fs::write(&bin, "a file in the directory's place").unwrap();
        let error = Hook::install(&source, &bin, dir.path()).unwrap_err();
        assert!(error.to_string().contains("bin/kerf-cdi-hook"), "{error}");
    }
}
