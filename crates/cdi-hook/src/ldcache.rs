//! The container's cache of the dynamic linker, so that libraries are found in folders that it does not search by itself.
//!
//! The host's ldconfig makes it, chrooted into the container (`-r`). The image's own is not run: it is the image's, many images
//! have none, and a host's works for every image, as the format has been the same since glibc 2.2, entries say for which
//! machine they are, and musl's linker ignores the file. A cache of our own making would have to know all of that.
//!
//! ldconfig reads whatever the image calls a library. It runs as root of the container's user namespace, before the runtime
//! has locked the container up, so every capability but the two that it needs is taken from it for good. It is told to leave
//! links alone (`-X`): it would make and remove some in every directory that the image names, volumes among them.

use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use rustix::io::Errno;
use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::container::Container;
use crate::root::{Mounts, RootError};

/// Where hosts have it. Ubuntu's `ldconfig` is a shell script around the program.
const LDCONFIG: [&str; 4] = ["/sbin/ldconfig.real", "/usr/sbin/ldconfig.real", "/sbin/ldconfig", "/usr/sbin/ldconfig"];

/// To enter the container, and to write there whoever owns it.
const NEEDED: CapabilitySet = CapabilitySet::SYS_CHROOT.union(CapabilitySet::DAC_OVERRIDE);

/// Where the container keeps its settings.
const SETTINGS: &str = "/etc";

/// Read by ldconfig before any other file of the folder, on distributions that have it.
const CONFIGURATION: &str = "/etc/ld.so.conf.d/00-kerf.conf";

/// The cache cannot be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LdcacheError {
    #[error("capabilities cannot be given up: {0}")]
    Capabilities(Errno),
    #[error("the runtime gives hooks no CAP_SYS_CHROOT, and ldconfig is not run without")]
    NoChroot,
    #[error("{program} cannot be run: {error}")]
    Run { program: &'static str, error: io::Error },
    #[error("{program} has made no cache in the container ({status}): {said}")]
    Failed { program: &'static str, status: String, said: String },
    #[error(transparent)]
    Root(#[from] RootError),
}

/// Makes the cache. A container whose `/etc` is a volume or read-only keeps its own.
pub(crate) fn update(container: &Container, folders: &[PathBuf]) -> Result<(), LdcacheError> {
    let Some(ldconfig) = LDCONFIG.into_iter().find(|path| Path::new(path).is_file()) else {
        eprintln!("kerf-cdi-hook: the host has no ldconfig: the container's cache stays as it is");
        return Ok(());
    };
    match remember(container, folders) {
        Err(error) if error.is_of_the_container() => {
            eprintln!("kerf-cdi-hook: the container's cache stays as it is: {error}");
            return Ok(());
        }
        remembered => remembered?,
    }
    let left = give_up_capabilities().map_err(LdcacheError::Capabilities)?;
    // It would go on without, and find its own way around the image's links.
    if !left.contains(CapabilitySet::SYS_CHROOT) {
        return Err(LdcacheError::NoChroot);
    }
    let run = Command::new(ldconfig)
        .env_clear()
        .args(["-X", "-r"])
        .arg(&container.path)
        .args(folders)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .output()
        .map_err(|error| LdcacheError::Run { program: ldconfig, error })?;
    if run.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&run.stderr).trim().to_owned();
    Err(LdcacheError::Failed { program: ldconfig, status: describe(run.status), said })
}

/// Tells the container's own ldconfig of the folders, should it ever run, where it reads a folder of settings.
fn remember(container: &Container, folders: &[PathBuf]) -> Result<(), RootError> {
    container.root.directory(Path::new(SETTINGS), Mounts::Stay)?;
    let path = Path::new(CONFIGURATION);
    match container.root.directory(path.parent().unwrap_or(path), Mounts::Stay) {
        Ok(directory) => {
            let lines = folders.iter().map(|folder| format!("{}\n", folder.display()));
            container.root.write(&directory, path, &lines.collect::<String>())
        }
        Err(error) if error.error == Errno::NOENT => Ok(()),
        Err(error) => Err(error),
    }
}

/// For this process and all that it starts. Tells what is left.
fn give_up_capabilities() -> rustix::io::Result<CapabilitySet> {
    let all = (0..u64::BITS).map(|number| CapabilitySet::from_bits_retain(1 << number));
    for capability in all.filter(|capability| !NEEDED.contains(*capability)) {
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            // The kernel has no such capability.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(error) => return Err(error),
        }
    }
    let left = rustix::thread::capabilities(None)?.permitted.intersection(NEEDED);
    let sets = CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, sets)?;
    Ok(left)
}

fn describe(status: ExitStatus) -> String {
    match status.signal() {
        // The hook is in the container's cgroup.
        Some(9) => "killed; is the container's memory limit too low?".to_owned(),
        _ => status.to_string(),
    }
}
