//! The container's files, as the container itself would see them.
//!
//! Every look-up is one openat2(2) with RESOLVE_IN_ROOT: absolute links start at the container's root, `..` does not leave it,
//! links of `/proc` that lead anywhere are not followed, and nobody can change a part of the way while it is walked. What is
//! made is made below the directory that was opened, by a name without slashes.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// How often a look-up is tried again that was disturbed by a rename (EAGAIN, openat2(2)).
const TRIES: usize = 32;

/// A container's root directory.
#[derive(Debug)]
pub(crate) struct Root(OwnedFd);

/// Whether a way may lead through mounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mounts {
    /// No: what is changed shall be the container's own, and not a volume's, which may be a directory of the host.
    Stay,
    /// Yes.
    Cross,
}

/// Something in the container cannot be done.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} {path} of the container: {error}")]
pub(crate) struct RootError {
    doing: &'static str,
    path: PathBuf,
    pub(crate) error: Errno,
}

impl RootError {
    fn new(doing: &'static str, path: &Path) -> impl FnOnce(Errno) -> RootError {
        move |error| RootError { doing, path: path.to_owned(), error }
    }

    /// Whether the container is as it is, and nothing failed: its directory is a volume, is read-only, or is no directory.
    pub(crate) fn is_of_the_container(&self) -> bool {
        [Errno::XDEV, Errno::ROFS, Errno::NOENT, Errno::NOTDIR, Errno::LOOP].contains(&self.error)
    }
}

/// What a link was found to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Linked {
    /// It is there now.
    Done,
    /// There is something else of its name, which is no link.
    Occupied,
}

impl Root {
    /// The container whose root directory the host calls `path`.
    pub(crate) fn open(path: &Path) -> Result<Root, RootError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Root(rustix::fs::openat(CWD, path, flags, Mode::empty()).map_err(RootError::new("open the root", path))?))
    }

    /// Opens a directory.
    pub(crate) fn directory(&self, path: &Path, mounts: Mounts) -> Result<OwnedFd, RootError> {
        self.look_up(path, mounts).map_err(RootError::new("open the directory", path))
    }

    fn look_up(&self, path: &Path, mounts: Mounts) -> rustix::io::Result<OwnedFd> {
        let mut resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        if mounts == Mounts::Stay {
            resolve |= ResolveFlags::NO_XDEV;
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let look = || rustix::fs::openat2(&self.0, path, flags, Mode::empty(), resolve);
        (0..TRIES).map(|_| look()).find(|found| !matches!(found, Err(Errno::AGAIN))).unwrap_or(Err(Errno::AGAIN))
    }

    /// Opens a directory, and makes what is missing on the way.
    pub(crate) fn make_directory(&self, path: &Path, mounts: Mounts) -> Result<OwnedFd, RootError> {
        let failed = || RootError::new("make the directory", path);
        let mut parts: Vec<&Path> = path.ancestors().filter(|part| part.file_name().is_some()).collect();
        parts.reverse();
        let mut directory = self.look_up(Path::new("/"), mounts).map_err(failed())?;
        for part in parts {
            directory = match self.look_up(part, mounts) {
                Err(Errno::NOENT) => {
                    let name = part.file_name().unwrap_or_default();
                    match rustix::fs::mkdirat(&directory, name, Mode::from_raw_mode(0o755)) {
                        // Somebody was faster, or it is a link that leads nowhere: the look-up tells.
                        Ok(()) | Err(Errno::EXIST) => self.look_up(part, mounts),
                        Err(error) => Err(error),
                    }
                }
                found => found,
            }
            .map_err(failed())?;
        }
        Ok(directory)
    }

    /// Makes a link in a directory. Another link of its name is replaced; whatever else has the name stays.
    pub(crate) fn link(&self, directory: &OwnedFd, path: &Path, target: &str) -> Result<Linked, RootError> {
        let name = path.file_name().unwrap_or_default();
        match rustix::fs::readlinkat(directory, name, Vec::new()) {
            Ok(there) if there.to_bytes() == target.as_bytes() => Ok(Linked::Done),
            Ok(_) | Err(Errno::NOENT) => {
                replace(directory, name, |new| rustix::fs::symlinkat(target, directory, new))
                    .map_err(RootError::new("make the link", path))?;
                Ok(Linked::Done)
            }
            Err(Errno::INVAL) => Ok(Linked::Occupied),
            Err(error) => Err(RootError::new("read the link", path)(error)),
        }
    }

    /// Makes a file in a directory, in place of whatever has its name.
    pub(crate) fn write(&self, directory: &OwnedFd, path: &Path, content: &str) -> Result<(), RootError> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let make = |new: &OsStr| {
            let file = rustix::fs::openat(directory, new, flags, Mode::from_raw_mode(0o644))?;
            File::from(file)
                .write_all(content.as_bytes())
                .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
        };
        replace(directory, path.file_name().unwrap_or_default(), make).map_err(RootError::new("write", path))
    }
}

/// Makes something under a name of its own first, so that the name is never without it.
fn replace(
    directory: &OwnedFd,
    name: &OsStr,
    make: impl FnOnce(&OsStr) -> rustix::io::Result<()>,
) -> rustix::io::Result<()> {
    let mut new = OsStr::new(".kerf-").to_owned();
    new.push(std::process::id().to_string());
    new.push(name);
    let made = make(&new).and_then(|()| rustix::fs::renameat(directory, &new, directory, name));
    if made.is_err() {
        // What failed first is what is told.
        let _ = rustix::fs::unlinkat(directory, &new, AtFlags::empty());
    }
    made
}
