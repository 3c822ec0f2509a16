//! The DRA driver that served this node before: NVIDIA's (`dra-driver-nvidia-gpu`), whose pods may still run.
//!
//! Its checkpoint lies in the directory that is kerf's now, and says which claims have which devices. They are held, as
//! those of kerf's own claims are, until the kubelet releases the claim. kerf neither writes nor removes the checkpoint, and
//! never touches a GPU for such a claim: that driver serves partitions that it has cut and such that somebody else has made,
//! and its checkpoint does not tell them apart. What is left of a released claim is an instance that no claim explains.

mod checkpoint;
mod holds;

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kerf_api::names;

pub use checkpoint::is_name;

use super::record::Record;
use super::{Engine, GpuError, JournalError};
use checkpoint::Held;
use holds::Seen;

/// What it says in the file of a released claim. That the file is there counts.
const RELEASED: &[u8] = b"{\"version\":1}\n";

/// The former driver of a node, shared by all who have to do with it.
#[derive(Clone, Debug)]
pub struct FormerDriver {
    /// Its checkpoint.
    checkpoint: PathBuf,
    /// A file for each claim in the checkpoint that was released since.
    released: PathBuf,
    /// Where its CDI files are.
    cdi: PathBuf,
    runs: Arc<AtomicBool>,
}

/// Nobody can tell what the former driver's claims hold.
#[derive(Debug, thiserror::Error)]
pub enum FormerError {
    /// The checkpoint is damaged, or of a version that is not known.
    #[error(
        "the checkpoint {} of NVIDIA's DRA driver cannot be read ({why}), so nobody can tell which GPUs that driver's pods \
         use; end the pods with GPUs on this node, then remove the file", path.display()
    )]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// It runs.
    #[error(
        "NVIDIA's DRA driver runs on this node and serves the same devices; a node belongs to one of the two: keep one of \
         them off this node"
    )]
    Runs,
    /// The GPUs do not tell which of them is meant.
    #[error("a GPU that NVIDIA's DRA driver gave to a claim is not found, and not every GPU answers: {0}")]
    Gpu(#[from] GpuError),
    /// The same of a GPU without an address.
    #[error(
        "a GPU that NVIDIA's DRA driver gave to a claim is not found, and not every GPU answers: {0}; see nvidia-smi"
    )]
    Nameless(kerf_nvml::Error),
}

impl FormerDriver {
    /// The driver whose things lie in `directory`, the plugin's own, as both have the same name; `cdi` is the CDI directory.
    pub fn new(directory: &Path, cdi: &Path) -> FormerDriver {
        FormerDriver {
            checkpoint: directory.join("checkpoint.json"),
            released: directory.join("released"),
            cdi: cdi.to_owned(),
            runs: Arc::default(),
        }
    }

    /// Says whether it runs. True if that is news.
    pub fn set_runs(&self, runs: bool) -> bool {
        self.runs.swap(runs, Ordering::Relaxed) != runs
    }

    /// The claims in the checkpoint, none if there is none.
    fn claims(&self, driver: &str, boot_id: &str) -> Result<Vec<Held>, FormerError> {
        let unreadable = |why| FormerError::Unreadable { path: self.checkpoint.clone(), why };
        match fs::read(&self.checkpoint) {
            Ok(bytes) => checkpoint::parse(&bytes, driver, boot_id).map_err(unreadable),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(unreadable(error.to_string())),
        }
    }

    fn marker(&self, uid: &str) -> PathBuf {
        self.released.join(uid)
    }

    /// The CDI file that it has written for a claim (`cmd/gpu-kubelet-plugin/cdi.go` of v0.5.0).
    fn spec(&self, uid: &str) -> PathBuf {
        self.cdi.join(format!("{}-{}_{uid}.yaml", names::CDI_VENDOR, names::CDI_CLASS))
    }

    /// Whether a claim of the checkpoint was released since. Not if its CDI file is there: the driver was back, and has
    /// prepared the claim anew.
    fn is_released(&self, uid: &str) -> bool {
        self.marker(uid).exists() && !self.spec(uid).exists()
    }

    /// Notes that a claim was released.
    fn mark(&self, uid: &str) -> Result<(), JournalError> {
        let marker = self.marker(uid);
        let write = || {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.released)?;
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&marker)?;
            // On a full disk there is room for the file's name.
            file.write_all(RELEASED).and_then(|()| file.sync_all()).or_else(|error| match error.kind() {
                ErrorKind::StorageFull => Ok(()),
                _ => Err(error),
            })
        };
        write().map_err(JournalError::new("note the release of a claim in", &marker))
    }

    /// Removes the notes about claims that are in no checkpoint any more.
    fn tidy(&self, listed: &[Held]) {
        let Ok(entries) = fs::read_dir(&self.released) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name();
            if !listed.iter().any(|held| *held.uid == *name)
                && let Err(error) = fs::remove_file(entry.path())
            {
                tracing::warn!(path = %entry.path().display(), %error, "a note that nobody needs stays");
            }
        }
        // Not while there is one.
        let _ = fs::remove_dir(&self.released);
    }
}

impl Engine {
    /// Why nobody can tell what the former driver's claims hold, if that is so: then nothing is given out.
    pub fn former_doubt(&self) -> Option<String> {
        self.former_records().err().map(|error| error.to_string())
    }

    /// The records that stand for the former driver's claims.
    pub(super) fn former_records(&self) -> Result<Vec<Record>, FormerError> {
        if self.former.runs.load(Ordering::Relaxed) {
            return Err(FormerError::Runs);
        }
        let mut claims = self.former.claims(&self.driver_name, &self.boot_id)?;
        claims.retain(|held| !self.former.is_released(&held.uid));
        if claims.is_empty() {
            return Ok(Vec::new());
        }
        let (seen, mut silent) = self.see_gpus();
        let epoch = self.epoch();
        let mut records = Vec::new();
        for held in &claims {
            let (record, missing) = holds::record(held, &seen, &epoch);
            match (missing, silent.take()) {
                // It may be the one that does not answer.
                (Some(_), Some(silent)) => return Err(silent),
                // It is gone, and nobody is given it.
                (Some(which), None) => tracing::debug!(claim.uid = held.uid, ?which, "a GPU of a former claim is gone"),
                (None, unchanged) => silent = unchanged,
            }
            records.push(record);
        }
        Ok(records)
    }

    /// The GPUs that answer, and why one does not.
    fn see_gpus(&self) -> (Vec<Seen>, Option<FormerError>) {
        let (mut seen, mut silent) = (Vec::new(), None);
        let count = match self.nvml.gpu_count() {
            Ok(count) => count,
            Err(error) => return (seen, Some(FormerError::Nameless(error))),
        };
        for index in 0..count {
            let address =
                self.nvml.gpu(index).and_then(|gpu| self.nvml.pci_address(gpu)).map_err(FormerError::Nameless);
            match address.and_then(|address| Ok(self.find_gpu_with_facts(address)?)) {
                Err(error) => silent = Some(error),
                Ok((gpu, facts)) => {
                    let mig = self.geometry(&gpu).and_then(|geometry| Ok((geometry, self.live_instances(&gpu)?)));
                    let uuid = facts.uuid.clone();
                    seen.push(Seen { address: gpu.address, uuid, minor: gpu.minor, mig: mig.ok() });
                }
            }
        }
        (seen, silent)
    }

    /// Lets go of what the former driver has prepared for a claim whose lock is held.
    pub(super) fn release_former(&self, uid: &str) -> Result<(), JournalError> {
        let spec = self.former.spec(uid);
        let is_listed = || {
            let claims = self.former.claims(&self.driver_name, &self.boot_id);
            claims.is_ok_and(|claims| claims.iter().any(|held| held.uid == uid))
        };
        if !(spec.exists() || is_listed()) || self.former.is_released(uid) {
            return Ok(());
        }
        // First the file: without it nobody starts a container with the claim's devices, whatever the checkpoint says.
        match fs::remove_file(&spec) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(JournalError::new("remove", &spec)(error));
            }
            _ => {}
        }
        self.former.mark(uid)?;
        tracing::info!("released a claim that NVIDIA's DRA driver had prepared");
        Ok(())
    }

    /// Forgets what is known of claims that no checkpoint names any more.
    pub(super) fn tidy_former(&self) {
        if let Ok(claims) = self.former.claims(&self.driver_name, &self.boot_id) {
            self.former.tidy(&claims);
        }
    }
}
