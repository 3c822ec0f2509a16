//! The driver root's user side: the library and the programs.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use super::user_space;
use crate::payload;

/// NVIDIA's programs that need no more than the library. The genuine nvidia-smi goes into our front.
const MPS_PROGRAMS: [&str; 2] = ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"];

/// Why library or programs cannot be installed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// A part of this crate's build is missing.
    #[error("{file} was not built beside {program}; build the whole package kerf-nvml-sim")]
    NotBuilt {
        /// What is missing.
        file: &'static str,
        /// Where it was looked for.
        program: PathBuf,
    },
    /// One of NVIDIA's programs is missing.
    #[error("{0} is missing; get NVIDIA's programs first (.ci/nvidia-programs.sh) or serve without --programs")]
    NoProgram(PathBuf),
    /// Something could not be copied.
    #[error("cannot install {path}: {reason}")]
    Write {
        /// What.
        path: PathBuf,
        /// Why not.
        reason: io::Error,
    },
}

/// Where libraries of this machine's architecture lie on Debian.
fn library_directory() -> String {
    format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH)
}

/// Installs the library of this build as driver version `version`, our nvidia-smi and, from `programs`, NVIDIA's; beside them
/// files that have a driver's names only.
pub(super) fn install(root: &Path, version: &str, programs: Option<&Path>) -> Result<(), InstallError> {
    let libraries = root.join(library_directory());
    let library = format!("libnvidia-ml.so.{version}");
    put(&libraries.join(&library), &read(&built_library()?)?)?;
    let link = libraries.join("libnvidia-ml.so.1");
    replace(&link, |new| symlink(&library, new))?;
    user_space::lay_out(root, &libraries, version, put, |path, make| replace(path, make))?;

    let bin = root.join("usr/bin");
    let mut front = read(&beside("nvidia-smi").ok_or_else(|| not_built("nvidia-smi"))?)?;
    if let Some(programs) = programs {
        let genuine = |name: &str| {
            let path = programs.join("usr/bin").join(name);
            if path.is_file() { read(&path) } else { Err(InstallError::NoProgram(path)) }
        };
        payload::append(&mut front, &genuine("nvidia-smi")?);
        for name in MPS_PROGRAMS {
            put(&bin.join(name), &genuine(name)?)?;
        }
    }
    put(&bin.join("nvidia-smi"), &front)
}

/// The library of this build: cargo leaves it beside the programs, or one folder below, where tests find only that one.
fn built_library() -> Result<PathBuf, InstallError> {
    const FILE: &str = "libkerf_nvml_sim.so";
    let candidates = [beside(FILE), beside("deps").map(|deps| deps.join(FILE))];
    let age = |path: &PathBuf| fs::metadata(path).and_then(|data| data.modified()).ok();
    candidates.into_iter().flatten().filter(|path| path.is_file()).max_by_key(age).ok_or_else(|| not_built(FILE))
}

fn beside(name: &str) -> Option<PathBuf> {
    let path = std::env::current_exe().ok()?.with_file_name(name);
    path.exists().then_some(path)
}

fn not_built(file: &'static str) -> InstallError {
    InstallError::NotBuilt { file, program: std::env::current_exe().unwrap_or_default() }
}

fn read(path: &Path) -> Result<Vec<u8>, InstallError> {
    fs::read(path).map_err(|reason| InstallError::Write { path: path.to_owned(), reason })
}

fn put(path: &Path, content: &[u8]) -> Result<(), InstallError> {
    replace(path, |new| {
        fs::write(new, content)?;
        fs::set_permissions(new, fs::Permissions::from_mode(0o755))
    })
}

/// Replaces a file as a whole: a process that uses the old one keeps it.
fn replace(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), InstallError> {
    let new = path.with_extension("new");
    let replace = || {
        fs::create_dir_all(path.parent().unwrap_or(path))?;
        if new.symlink_metadata().is_ok() {
            fs::remove_file(&new)?;
        }
        make(&new)?;
        fs::rename(&new, path)
    };
    replace().map_err(|reason| InstallError::Write { path: path.to_owned(), reason })
}
