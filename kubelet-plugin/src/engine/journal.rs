//! The journal: one file a claim, replaced atomically, never in the way.
//!
//! `<dir>/<claim uid>.json` is written beside itself (`<claim uid>.tmp`), synced and renamed: it is the old one or the new
//! one, and never half of one. The directory is not synced. A power cut may take a file away or bring one back, and with
//! the power went all that the file could explain (`STATES.md`, *Events from outside*). The claim's lock makes one writer a
//! file, so leftovers of a crash are overwritten and the directory does not grow. A file that is damaged is renamed to
//! `<claim uid>.damaged`. One of a newer format is left alone, and so is its claim: a newer plugin may be at work beside this
//! one, or come back.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::io::Errno;
use serde_json::Value;

use super::SetAside;
use super::record::{Record, VERSION};

/// Ends of file names, after the claim's UID.
const RECORD: &str = ".json";
const TEMPORARY: &str = ".tmp";
const DAMAGED: &str = ".damaged";

/// How old the last change of the directory must be to tell it from the next one by its time: file systems count in steps,
/// the coarsest of 2 s.
const TOLD_APART: Duration = Duration::from_secs(3);

/// A journal directory.
#[derive(Debug)]
pub(super) struct Journal {
    dir: PathBuf,
    set_aside: Mutex<Vec<SetAside>>,
    /// See [`Journal::take_first_reading`].
    first: Mutex<Option<Reading>>,
}

/// Every record that could be used, and when the directory had changed last before it was read.
#[derive(Debug)]
struct Reading {
    changed: SystemTime,
    records: Vec<Record>,
}

/// The journal could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file system failed.
    #[error("cannot {doing} {}: {error}; check that the disk is mounted, writable and not full", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// A newer plugin wrote it.
    #[error(
        "{} has version {version}, and this kubelet plugin reads up to {VERSION}: the claim is left as it is until the newer \
         version of kerf is back on this node", path.display()
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u64,
    },
}

/// Why a file cannot be used.
#[derive(Debug)]
pub(super) enum Unusable {
    /// It is no record, or none of this claim: the reason.
    Damaged(String),
    /// It is of a later format: its version.
    Newer(u64),
}

impl JournalError {
    pub(super) fn new(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> JournalError {
        let path = path.to_owned();
        move |error| JournalError::Io { doing, path, error }
    }
}

impl Journal {
    /// Makes the directory, closed to everyone but this user: it says who holds which GPU.
    pub(super) fn open(dir: &Path) -> Result<Journal, JournalError> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .and_then(|()| fs::set_permissions(dir, Permissions::from_mode(0o700)))
            .map_err(JournalError::new("make the journal directory", dir))?;
        Ok(Journal { dir: dir.to_owned(), set_aside: Mutex::default(), first: Mutex::default() })
    }

    /// Reads everything, and keeps the records for who asks for them first. Returns the claims whose file cannot be used.
    pub(super) fn read_first(&self) -> Result<Vec<String>, JournalError> {
        let changed = self.changed().filter(|changed| changed.elapsed().is_ok_and(|age| age > TOLD_APART));
        let (records, unusable) = self.read_all()?;
        *lock(&self.first) = changed.map(|changed| Reading { changed, records });
        Ok(unusable)
    }

    /// What [`Journal::read_first`] has read, if that is still what is there; once. A node that has collected thousands of
    /// claims is read once at the start, and not again a moment later.
    pub(super) fn take_first_reading(&self) -> Option<Vec<Record>> {
        let Reading { changed, records } = lock(&self.first).take()?;
        // Whoever writes a record renames a file.
        (self.changed() == Some(changed)).then_some(records)
    }

    fn changed(&self) -> Option<SystemTime> {
        fs::metadata(&self.dir).and_then(|directory| directory.modified()).ok()
    }

    /// The record of a claim whose lock is held; `None` where there is none. A file that is damaged is set aside.
    ///
    /// # Errors
    /// [`JournalError::Newer`], and [`JournalError::Io`] when the node is too short of something to read it.
    pub(super) fn load(&self, uid: &str) -> Result<Option<Record>, JournalError> {
        match self.read(uid)? {
            None => Ok(None),
            Some(Ok(record)) => Ok(Some(record)),
            Some(Err(Unusable::Newer(version))) => Err(JournalError::Newer { path: self.path(uid), version }),
            Some(Err(Unusable::Damaged(reason))) => {
                self.put_aside(uid, reason);
                Ok(None)
            }
        }
    }

    /// Every record that can be used. Those of other claims may change meanwhile unless a GPU of theirs is locked; a
    /// file that cannot be used is left to who locks its claim.
    ///
    /// # Errors
    /// When the directory cannot be read, or the node is too short of something to read a file.
    pub(super) fn load_all(&self) -> Result<Vec<Record>, JournalError> {
        Ok(self.read_all()?.0)
    }

    /// The claims whose file cannot be used.
    ///
    /// # Errors
    /// As [`Journal::load_all`].
    pub(super) fn unusable(&self) -> Result<Vec<String>, JournalError> {
        Ok(self.read_all()?.1)
    }

    fn read_all(&self) -> Result<(Vec<Record>, Vec<String>), JournalError> {
        let (mut records, mut unusable) = (Vec::new(), Vec::new());
        for uid in self.uids()? {
            match self.read(&uid)? {
                None => {}
                Some(Ok(record)) => records.push(record),
                Some(Err(_)) => unusable.push(uid),
            }
        }
        Ok((records, unusable))
    }

    /// What a claim's file says; `None` where there is none. A file that is not read for want of something is an error, also
    /// to who wants all: the device of a claim that is not seen would seem free.
    fn read(&self, uid: &str) -> Result<Option<Result<Record, Unusable>>, JournalError> {
        match fs::read(self.path(uid)) {
            Ok(bytes) => Ok(Some(parse(uid, &bytes))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) if is_shortage(&error) => Err(JournalError::new("read", &self.path(uid))(error)),
            Err(error) => Ok(Some(Err(Unusable::Damaged(error.to_string())))),
        }
    }

    /// Whether a claim's file was set aside.
    pub(super) fn is_damaged(&self, uid: &str) -> bool {
        self.damaged(uid).exists()
    }

    /// The claims that have any file here.
    pub(super) fn all_uids(&self) -> Result<BTreeSet<String>, JournalError> {
        Ok(self.list(&[RECORD, TEMPORARY, DAMAGED])?.into_iter().collect())
    }

    fn uids(&self) -> Result<Vec<String>, JournalError> {
        self.list(&[RECORD])
    }

    fn list(&self, suffixes: &[&str]) -> Result<Vec<String>, JournalError> {
        let failed = || JournalError::new("list the journal directory", &self.dir);
        let mut uids = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(failed())? {
            let name = entry.map_err(failed())?.file_name();
            let uid = name.to_str().and_then(|name| suffixes.iter().find_map(|suffix| name.strip_suffix(suffix)));
            uids.extend(uid.map(str::to_owned));
        }
        Ok(uids)
    }

    /// Writes a claim's record.
    pub(super) fn write(&self, record: &Record) -> Result<(), JournalError> {
        let path = self.path(&record.claim.uid);
        let temporary = self.temporary(&record.claim.uid);
        let write = || {
            let bytes = encode(record)?;
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            fs::rename(&temporary, &path)
        };
        write().map_err(|error| {
            // On a full disk its room is wanted; where it cannot be removed it is overwritten or goes with the claim.
            let _ = fs::remove_file(&temporary);
            JournalError::new("write the claim's journal", &path)(error)
        })
    }

    /// Removes everything about a claim, also what was set aside.
    pub(super) fn remove(&self, uid: &str) -> Result<(), JournalError> {
        for path in [self.temporary(uid), self.damaged(uid), self.path(uid)] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(JournalError::new("remove", &path)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The files that were set aside since this was last asked.
    pub(super) fn take_set_aside(&self) -> Vec<SetAside> {
        std::mem::take(&mut *lock(&self.set_aside))
    }

    fn put_aside(&self, uid: &str, reason: String) {
        let (path, aside) = (self.path(uid), self.damaged(uid));
        match fs::rename(&path, &aside) {
            Err(error) => tracing::error!(path = %path.display(), %error, "cannot set a damaged journal file aside"),
            Ok(()) => tracing::error!(path = %aside.display(), reason, "journal file set aside"),
        }
        let set_aside = SetAside { claim_uid: uid.to_owned(), path: aside, reason };
        let mut all = lock(&self.set_aside);
        if !all.contains(&set_aside) {
            all.push(set_aside);
        }
    }

    fn path(&self, uid: &str) -> PathBuf {
        self.dir.join(format!("{uid}{RECORD}"))
    }

    fn temporary(&self, uid: &str) -> PathBuf {
        self.dir.join(format!("{uid}{TEMPORARY}"))
    }

    fn damaged(&self, uid: &str) -> PathBuf {
        self.dir.join(format!("{uid}{DAMAGED}"))
    }
}

/// Whether a file was not read for want of something that has nothing to do with it: it may be as good as ever.
fn is_shortage(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    errno.is_some_and(|errno| [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::AGAIN].contains(&errno))
}

/// Nothing is left half-done under these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A record as a file.
pub(super) fn encode(record: &Record) -> serde_json::Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(record)?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// Reads a record, or says why not.
pub(super) fn parse(uid: &str, bytes: &[u8]) -> Result<Record, Unusable> {
    // All but always it is what it should be, and need not be taken apart to say what is wrong.
    if let Ok(record) = serde_json::from_slice::<Record>(bytes)
        && record.version <= VERSION
        && record.claim.uid == uid
    {
        return Ok(record);
    }
    let damaged = |reason: String| Unusable::Damaged(reason);
    let value: Value = serde_json::from_slice(bytes).map_err(|error| damaged(format!("not JSON: {error}")))?;
    match value.get("version").and_then(Value::as_u64) {
        None => return Err(damaged("it has no version".to_owned())),
        Some(version) if version > VERSION => return Err(Unusable::Newer(version)),
        Some(_) => {}
    }
    let record: Record =
        serde_json::from_value(value).map_err(|error| damaged(format!("not a record of a claim: {error}")))?;
    if record.claim.uid == uid { Ok(record) } else { Err(damaged(format!("it is about claim {}", record.claim.uid))) }
}

#[cfg(test)]
mod tests {
    use super::super::epoch::Epoch;
    use super::super::{Claim, DeviceName};
    use super::*;

    fn epoch(boot_id: &str) -> Epoch {
        Epoch { boot_id: boot_id.into(), driver_load: Some(1) }
    }

    fn record(uid: &str) -> Record {
        let claim = Claim {
            uid: uid.into(),
            namespace: "default".into(),
            name: "claim".into(),
            pod_claim_name: None,
            devices: Vec::new(),
        };
        Record::new(&claim, epoch("boot"))
    }

    fn journal() -> (tempfile::TempDir, Journal) {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(&dir.path().join("claims")).unwrap();
        (dir, journal)
    }

    #[test]
    fn what_is_written_is_read() {
        let (_dir, journal) = journal();
        assert_eq!(journal.load("a").unwrap(), None);
        journal.write(&record("a")).unwrap();
        journal.write(&record("b")).unwrap();
        assert_eq!(journal.load("a").unwrap(), Some(record("a")));
        assert_eq!(journal.load_all().unwrap().len(), 2);
        journal.remove("a").unwrap();
        journal.remove("a").unwrap();
        assert_eq!(journal.load_all().unwrap(), [record("b")]);
        assert_eq!(journal.take_set_aside(), []);
    }

    #[test]
    fn want_of_something_damages_no_file() {
        for (errno, shortage) in [
            (Errno::MFILE, true),
            (Errno::NFILE, true),
            (Errno::NOMEM, true),
            (Errno::IO, false),
            (Errno::ISDIR, false),
            (Errno::ACCESS, false),
        ] {
            assert_eq!(is_shortage(&errno.into()), shortage, "{errno:?}");
        }
        assert!(!is_shortage(&io::Error::other("not of the kernel")));
        let (_dir, journal) = journal();
        fs::create_dir(journal.path("a")).unwrap();
        assert_eq!(journal.load("a").unwrap(), None);
        assert_eq!(journal.take_set_aside().len(), 1);
    }

    #[test]
    fn strangers_cannot_look() {
        let (_dir, journal) = journal();
        journal.write(&record("a")).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&journal.dir), 0o700);
        assert_eq!(mode(&journal.path("a")), 0o600);
    }

    /// An older build rewrites what a newer one wrote without losing what it does not know.
    #[test]
    fn unknown_fields_survive_a_rewrite() {
        let (_dir, journal) = journal();
        let newer = serde_json::json!({
            "version": 1, "bootId": "boot", "phase": "Prepared", "invented": {"a": [1]},
            "claim": {"uid": "a", "namespace": "default", "name": "claim", "generation": 7},
            "results": [{"request": "r", "pool": "n", "device": "gpu-3b-00-0-mig-1g10gb-4", "invented": 1}],
            "partitions": [{"device": "gpu-3b-00-0-mig-1g10gb-4", "profileId": 19, "state": "Carved", "gpuInstance": 5,
                "placement": {"start": 4, "size": 1, "invented": "here as well"}, "mps": true}],
        });
        fs::write(journal.path("a"), newer.to_string()).unwrap();
        let mut record = journal.load("a").unwrap().unwrap();
        let mut results = record.results.clone();
        results.iter_mut().for_each(|result| result.extra.clear());
        record.set_results(results);
        record.adapt_to(&epoch("another boot"));
        journal.write(&record).unwrap();

        let written: Value = serde_json::from_slice(&fs::read(journal.path("a")).unwrap()).unwrap();
        assert_eq!(written["invented"]["a"][0], 1);
        assert_eq!(written["claim"]["generation"], 7);
        assert_eq!(written["results"][0]["invented"], 1);
        assert_eq!(written["partitions"][0]["mps"], true);
        assert_eq!(written["partitions"][0]["placement"]["invented"], "here as well");
        assert_eq!(written["bootId"], "another boot");
        assert_eq!(written["partitions"][0]["state"], "Planned");
    }

    #[test]
    fn what_cannot_be_used_is_set_aside() {
        for (content, reason) in [
            (&b""[..], "not JSON"),
            (b"{\"version\":1,", "not JSON"),
            (b"\xff\x00", "not JSON"),
            (b"[]", "no version"),
            (b"{\"version\":\"1\"}", "no version"),
            (b"{\"version\":1}", "not a record"),
        ] {
            let (_dir, journal) = journal();
            journal.write(&record("good")).unwrap();
            fs::write(journal.path("bad"), content).unwrap();
            assert_eq!(journal.load_all().unwrap(), [record("good")], "the others are there all the same");
            assert_eq!(journal.unusable().unwrap(), ["bad"]);
            assert_eq!(journal.take_set_aside(), [], "it is left to who locks the claim");
            assert_eq!(journal.load("bad").unwrap(), None);
            let aside = journal.take_set_aside();
            assert_eq!(aside.len(), 1);
            assert_eq!(aside[0].claim_uid, "bad");
            assert!(aside[0].reason.contains(reason), "{}", aside[0].reason);
            assert_eq!(fs::read(&aside[0].path).unwrap(), content);
            assert!(!journal.path("bad").exists());
            assert_eq!(journal.unusable().unwrap(), [""; 0], "it is not looked at again");
            assert_eq!(journal.take_set_aside(), []);
            journal.remove("bad").unwrap();
            assert!(!aside[0].path.exists(), "the claim's end removes it");
        }
    }

    #[test]
    fn a_newer_format_is_refused_and_left_alone() {
        let (_dir, journal) = journal();
        journal.write(&record("good")).unwrap();
        fs::write(journal.path("newer"), b"{\"version\":2}").unwrap();
        assert_eq!(journal.load_all().unwrap(), [record("good")]);
        assert_eq!(journal.unusable().unwrap(), ["newer"]);
        let error = journal.load("newer").unwrap_err().to_string();
        for part in ["newer.json has version 2", "reads up to 1", "until the newer version of kerf is back"] {
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(fs::read(journal.path("newer")).unwrap(), b"{\"version\":2}");
        assert_eq!(journal.take_set_aside(), []);
    }

    #[test]
    fn a_record_under_another_claims_name_is_set_aside() {
        let (_dir, journal) = journal();
        journal.write(&record("a")).unwrap();
        fs::rename(journal.path("a"), journal.path("b")).unwrap();
        assert_eq!(journal.load("b").unwrap(), None);
        assert!(journal.take_set_aside()[0].reason.contains("about claim a"));
    }

    #[test]
    fn a_full_disk_leaves_the_old_record() {
        let (_dir, journal) = journal();
        journal.write(&record("a")).unwrap();
        // A directory in the temporary file's place fails the write as any disk error would.
        fs::create_dir(journal.temporary("a")).unwrap();
        let mut changed = record("a");
        changed.boot_id = "other".into();
        let error = journal.write(&changed).unwrap_err().to_string();
        assert!(error.contains("cannot write the claim's journal"), "{error}");
        assert_eq!(journal.load("a").unwrap(), Some(record("a")));
    }

    #[test]
    fn placement_and_id_explain_an_instance() {
        use super::super::record::{PartitionRecord, PartitionState};
        use kerf_mig::Placement;
        use kerf_nvml::GpuInstance;

        let device: DeviceName = "gpu-3b-00-0-mig-1g10gb-4".parse().unwrap();
        let mut partition = PartitionRecord::planned(device, 19, Placement { start: 4, size: 1 });
        let live = GpuInstance { id: 5, profile_id: 19, placement: Placement { start: 4, size: 1 } };
        assert!(!partition.explains(&live), "nothing was begun");
        partition.state = PartitionState::Carving;
        assert!(partition.explains(&live), "cut off between creation and journal");
        partition.state = PartitionState::Carved;
        partition.gpu_instance = Some(5);
        assert!(partition.explains(&live));
        assert!(!partition.explains(&GpuInstance { id: 6, ..live }), "made anew by someone else");
        assert!(!partition.explains(&GpuInstance { profile_id: 20, ..live }), "another profile");
        let moved = Placement { start: 5, size: 1 };
        assert!(!partition.explains(&GpuInstance { placement: moved, ..live }), "an id given out again");
    }
}
