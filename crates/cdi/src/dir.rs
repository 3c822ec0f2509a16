//! A directory of specs, one file for each claim, that container runtimes watch while it changes.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use crate::{DecodeError, Invalid, Kind, Spec};

/// The specs of one kind in a CDI directory (`/var/run/cdi`), each under an id such as a claim's UID.
///
/// The files are named `<vendor>-<class>_<id>.json`, as the CDI library names the specs of transient devices. Files
/// with other names are never touched; in particular the `.yaml` files of other drivers with the same kind.
///
/// A spec appears, changes and disappears in one step, for whoever reads while the machine runs. Nothing is synced to the
/// disk: the directory is a tmpfs as a rule, and after a loss of power a spec is made anew before its container starts.
/// Calls for different ids may run at the same time, in this and
/// in other processes; for one id the caller sees to it that there is only one at a time.
///
/// All methods block on file I/O.
#[derive(Debug, Clone)]
pub struct SpecDir {
    root: PathBuf,
    kind: Kind,
}

/// A failed operation on a [`SpecDir`].
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An id that cannot be part of a file name and be found again.
    #[error("`{0}` cannot be the id of a CDI spec: only ASCII letters, digits and `-` are allowed, at least one")]
    Id(String),
    /// A spec for another directory.
    #[error("a CDI spec of kind {found} was given to the directory for {expected}")]
    Kind {
        /// Kind of the directory.
        expected: Kind,
        /// Kind of the spec.
        found: Kind,
    },
    /// A spec that runtimes would refuse.
    #[error("the CDI spec for {path} is invalid, nothing was written: {source}")]
    Invalid {
        /// The file that would have been written.
        path: PathBuf,
        /// What is wrong with it.
        source: Invalid,
    },
    /// The directory is absent and cannot be made.
    #[error("cannot create the CDI directory {path}: {source}")]
    Create {
        /// The directory.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A spec cannot be written; an older one under this id is still in place.
    #[error("cannot write the CDI spec {path}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A spec cannot be read.
    #[error("cannot read the CDI spec {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file under our name holds something else.
    #[error("the CDI spec {path} was damaged or written by another program: {source}")]
    Decode {
        /// The file.
        path: PathBuf,
        /// What was found.
        source: DecodeError,
    },
    /// A spec cannot be removed.
    #[error("cannot remove the CDI spec {path}: {source}")]
    Remove {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The directory cannot be listed.
    #[error("cannot list the CDI directory {path}: {source}")]
    List {
        /// The directory.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// Ends of file names. Runtimes load `.json` and `.yaml` only, so they never see a temporary file.
const SPEC_SUFFIX: &str = ".json";
const TEMPORARY_SUFFIX: &str = ".tmp";

impl SpecDir {
    /// The specs of `kind` in the directory `root`, which need not exist yet.
    pub fn new(root: impl Into<PathBuf>, kind: Kind) -> Self {
        Self { root: root.into(), kind }
    }

    /// Kind of the specs.
    pub fn kind(&self) -> &Kind {
        &self.kind
    }

    /// The file for `id`.
    ///
    /// # Errors
    ///
    /// When `id` is not a legal one.
    pub fn path(&self, id: &str) -> Result<PathBuf, Error> {
        if !is_id(id) {
            return Err(Error::Id(id.to_owned()));
        }
        Ok(self.root.join(format!("{}{id}{SPEC_SUFFIX}", self.prefix())))
    }

    /// Makes `spec` the one of `id`, readable by all, and creates the directory if it is absent. Tells whether
    /// anything had to be written: a file that already holds the spec is left alone, since runtimes reload all specs
    /// on every change.
    ///
    /// # Errors
    ///
    /// When the spec is invalid or of another kind, or cannot be written. The former spec then stays.
    pub fn write(&self, id: &str, spec: &Spec) -> Result<bool, Error> {
        let path = self.path(id)?;
        if spec.kind != self.kind {
            return Err(Error::Kind { expected: self.kind.clone(), found: spec.kind.clone() });
        }
        let json = match spec.to_json() {
            Ok(json) => json,
            Err(source) => return Err(Error::Invalid { path, source }),
        };
        if fs::read(&path).is_ok_and(|present| present == json) {
            return Ok(false);
        }
        fs::create_dir_all(&self.root).map_err(|source| Error::Create { path: self.root.clone(), source })?;
        match self.replace(&path, id, &json) {
            Ok(()) => Ok(true),
            Err(source) => Err(Error::Write { path, source }),
        }
    }

    /// The spec of `id`, if there is one.
    ///
    /// # Errors
    ///
    /// When the file cannot be read or does not hold a spec of ours.
    pub fn read(&self, id: &str) -> Result<Option<Spec>, Error> {
        let path = self.path(id)?;
        let json = match fs::read(&path) {
            Ok(json) => json,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(Error::Read { path, source }),
        };
        match Spec::from_json(&json) {
            Ok(spec) => Ok(Some(spec)),
            Err(source) => Err(Error::Decode { path, source }),
        }
    }

    /// Removes the spec of `id`, and what an interrupted [`write`](Self::write) has left. It is no error if there is
    /// none.
    ///
    /// # Errors
    ///
    /// When a file is there and cannot be removed.
    pub fn remove(&self, id: &str) -> Result<(), Error> {
        let spec = self.path(id)?;
        let leftovers = self.files()?.into_iter().filter(|file| file.id == id).map(|file| self.root.join(file.name));
        for path in [spec].into_iter().chain(leftovers) {
            match fs::remove_file(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(Error::Remove { path, source }),
            }
        }
        Ok(())
    }

    /// All ids of which there is a spec, or what an interrupted [`write`](Self::write) has left, in order.
    ///
    /// # Errors
    ///
    /// When the directory is there and cannot be read.
    pub fn list(&self) -> Result<Vec<String>, Error> {
        let ids: BTreeSet<String> = self.files()?.into_iter().map(|file| file.id).collect();
        Ok(ids.into_iter().collect())
    }

    fn prefix(&self) -> String {
        format!("{}-{}_", self.kind.vendor(), self.kind.class())
    }

    fn replace(&self, path: &Path, id: &str, json: &[u8]) -> io::Result<()> {
        let mut file = tempfile::Builder::new()
            .prefix(&format!(".{}{id}.", self.prefix()))
            .suffix(TEMPORARY_SUFFIX)
            .tempfile_in(&self.root)?;
        file.write_all(json)?;
        file.as_file().set_permissions(Permissions::from_mode(0o644))?;
        file.persist(path)?;
        Ok(())
    }

    /// Our files, temporary ones included.
    fn files(&self) -> Result<Vec<OwnFile>, Error> {
        let list = || -> io::Result<Vec<OwnFile>> {
            let mut files = Vec::new();
            for entry in fs::read_dir(&self.root)? {
                // A name that is not UTF-8 is not ours.
                files.extend(entry?.file_name().into_string().ok().and_then(|name| self.own(name)));
            }
            Ok(files)
        };
        match list() {
            Ok(files) => Ok(files),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(source) => Err(Error::List { path: self.root.clone(), source }),
        }
    }

    fn own(&self, name: String) -> Option<OwnFile> {
        let id = match name.strip_prefix('.') {
            Some(name) => name.strip_suffix(TEMPORARY_SUFFIX)?.rsplit_once('.')?.0,
            None => name.strip_suffix(SPEC_SUFFIX)?,
        };
        let id = id.strip_prefix(&self.prefix()).filter(|id| is_id(id))?.to_owned();
        Some(OwnFile { id, name })
    }
}

struct OwnFile {
    id: String,
    name: String,
}

/// No dots and underscores: they part the id from what is around it in a file name.
fn is_id(id: &str) -> bool {
    !id.is_empty() && id.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
}
