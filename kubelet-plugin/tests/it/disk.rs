//! Disks that are full, read-only or slow, and files that were cut off.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kerf_kubelet_plugin::engine::{Engine, Settings};
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount};
use serde_json::Value;
use tempfile::TempDir;

use crate::engine_node::{self, GPU, Node, SECOND, claim, late};
use crate::program::{PATIENCE, Plugin};
use crate::tracer::{Moment, Side, Strike, Tracer};

const H100: &str = "[{product: h100-80gb}]";
const MIG_1G: &str = "gpu-3b-00-0-mig-1g10gb-4";
const MIG_2G: &str = "gpu-3b-00-0-mig-2g20gb-4";
const MIG_3G: &str = "gpu-3b-00-0-mig-3g40gb-0";

/// What every file system gives out at once, here.
const PAGE: u64 = 4096;

/// A small file system; unmounted when dropped.
struct Disk {
    directory: TempDir,
}

impl Disk {
    fn mount() -> Disk {
        let directory = tempfile::tempdir().unwrap();
        mount("kerf-test", directory.path(), "tmpfs", MountFlags::empty(), Some(c"size=256k")).expect("root may mount");
        Disk { directory }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Leaves room for so many pages.
    fn fill(&self, pages: u64) {
        let mut ballast = File::create(self.ballast()).unwrap();
        let page = [1; PAGE as usize];
        let mut size = 0;
        loop {
            match ballast.write_all(&page) {
                Ok(()) => size += PAGE,
                Err(error) => break assert_eq!(error.kind(), ErrorKind::StorageFull),
            }
        }
        ballast.set_len(size - pages * PAGE).unwrap();
    }

    fn free(&self) {
        fs::remove_file(self.ballast()).unwrap();
    }

    fn ballast(&self) -> PathBuf {
        self.path().join("ballast")
    }

    fn set_read_only(&self, read_only: bool) {
        let flags = if read_only { MountFlags::RDONLY } else { MountFlags::empty() };
        mount_remount(self.path(), flags, "").unwrap();
    }

    /// Paths of all files that are half-written or would never go.
    fn litter(&self) -> Vec<PathBuf> {
        let directories = ["claims", "cdi"].map(|name| fs::read_dir(self.path().join(name)).into_iter().flatten());
        let files = directories.into_iter().flatten().map(|entry| entry.unwrap().path());
        files.filter(|path| path.extension().is_none_or(|extension| extension != "json")).collect()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // A test that has failed may have files open.
        unmount(self.path(), UnmountFlags::DETACH).unwrap();
    }
}

/// An engine with directories of its own choice.
fn engine(node: &Node, settings: impl FnOnce(Settings) -> Settings) -> Engine {
    Engine::open(Arc::clone(&node.nvml), settings(node.settings())).unwrap()
}

/// All that the engine writes is on this disk.
fn engine_on(node: &Node, disk: &Disk) -> Engine {
    let [claims, locks, cdi] = ["claims", "locks", "cdi"].map(|name| disk.path().join(name));
    engine(node, |settings| Settings { claims, locks, cdi, ..settings })
}

fn assert_nothing_on_gpu(node: &Node, context: &str) {
    assert_eq!(node.live(GPU), [], "{context}");
    assert!(!node.mig_is_on(GPU), "{context}");
}

/// The error says which file it is about, what the system said, and what to do.
fn assert_clear(error: &str, disk: &Disk, cause: &str) {
    assert!(error.contains(&*disk.path().to_string_lossy()), "{error}");
    assert!(error.contains(cause) && error.contains("writable and not full"), "{error}");
}

/// Whatever the last bytes are enough for: Prepare works in the end or leaves nothing.
#[test]
fn prepare_on_a_full_disk_leaves_nothing_and_works_when_there_is_room() {
    let node = Node::start(H100);
    for devices in [&[MIG_3G, MIG_1G][..], &[GPU]] {
        let disk = Disk::mount();
        let engine = engine_on(&node, &disk);
        let claim = claim("a", devices);
        let mut refusals = 0;
        for pages in 0.. {
            disk.fill(pages);
            let context = format!("{devices:?} with {pages} free pages");
            let prepared = engine.prepare(&claim, late());
            if let Err(error) = &prepared {
                refusals += 1;
                assert_clear(&error.to_string(), &disk, "No space left on device");
                assert_nothing_on_gpu(&node, &context);
                let cdi = fs::read_dir(disk.path().join("cdi"));
                assert_eq!(cdi.map_or(0, Iterator::count), 0, "{context}");
            }
            disk.free();
            assert_eq!(engine.prepare(&claim, late()).unwrap().len(), devices.len(), "{context}");
            engine.unprepare("a", late()).unwrap();
            assert_nothing_on_gpu(&node, &context);
            assert_eq!(disk.litter(), Vec::<PathBuf>::new(), "{context}");
            if prepared.is_ok() {
                break;
            }
        }
        assert!(refusals > 1, "{devices:?}: only {refusals} refusals");
    }
}

/// What failed leaves no record that would hold the device, and no half of a file that takes the room.
#[test]
fn prepare_on_a_full_disk_leaves_no_file() {
    let node = Node::start(H100);
    for pages in 0..4 {
        let disk = Disk::mount();
        let claims = disk.path().join("claims");
        let engine = engine(&node, |settings| Settings { claims: claims.clone(), ..settings });
        disk.fill(pages);
        let prepared = engine.prepare(&claim("a", &[MIG_1G]), late());
        if prepared.is_err() {
            let left: Vec<_> = fs::read_dir(claims).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(left, Vec::<OsString>::new(), "{pages} free pages");
        } else {
            engine.unprepare("a", late()).unwrap();
        }
        node.assert_clean(GPU, &format!("{pages} free pages"));
    }
}

/// A pod whose disk is full can end, however full it is.
#[test]
fn unprepare_on_a_full_disk_works() {
    let node = Node::start(H100);
    for devices in [&[MIG_3G, MIG_1G][..], &[GPU]] {
        for pages in 0..4 {
            let disk = Disk::mount();
            let engine = engine_on(&node, &disk);
            engine.prepare(&claim("a", devices), late()).unwrap();
            disk.fill(pages);
            let context = format!("{devices:?} with {pages} free pages");
            let released = engine.unprepare("a", late());
            assert!(released.is_ok(), "{context}: {}", released.unwrap_err());
            assert_nothing_on_gpu(&node, &context);
            assert_eq!(engine.prepared_claims().unwrap(), [], "{context}");
            assert_eq!(disk.litter(), Vec::<PathBuf>::new(), "{context}");
        }
    }
}

#[test]
fn a_full_cdi_directory_is_told_and_nothing_stays_carved() {
    let node = Node::start(H100);
    for devices in [&[MIG_3G, MIG_1G][..], &[GPU]] {
        let disk = Disk::mount();
        let cdi = disk.path().join("cdi");
        let engine = engine(&node, |settings| Settings { cdi, ..settings });
        let claim = claim("a", devices);
        disk.fill(0);
        let error = engine.prepare(&claim, late()).unwrap_err().to_string();
        assert_clear(&error, &disk, "No space left on device");
        node.assert_clean(GPU, "it was undone");
        assert_eq!(disk.litter(), Vec::<PathBuf>::new());
        disk.free();
        engine.prepare(&claim, late()).unwrap();
        disk.fill(0);
        engine.unprepare("a", late()).unwrap();
        node.assert_clean(GPU, "it was released");
        assert_eq!(fs::read_dir(disk.path().join("cdi")).unwrap().count(), 0);
    }
}

/// Nothing can be done on it, so nothing is: it is told, and what was there stays until it is writable again.
#[test]
fn a_read_only_disk_is_told_and_waited_for() {
    let node = Node::start(H100);
    for devices in [&[MIG_3G, MIG_1G][..], &[GPU]] {
        for on_disk in [&["claims", "locks", "cdi"][..], &["claims"], &["cdi"]] {
            let context = format!("{devices:?}, read-only {on_disk:?}");
            let (disk, other) = (Disk::mount(), tempfile::tempdir().unwrap());
            let place = |name| if on_disk.contains(&name) { disk.path().join(name) } else { other.path().join(name) };
            let [claims, locks, cdi] = ["claims", "locks", "cdi"].map(place);
            fs::create_dir_all(&cdi).unwrap();
            let engine = engine(&node, |settings| Settings { claims, locks, cdi, ..settings });
            let claim = claim("a", devices);

            disk.set_read_only(true);
            let error = engine.prepare(&claim, late()).unwrap_err().to_string();
            assert_clear(&error, &disk, "Read-only file system");
            assert_nothing_on_gpu(&node, &context);
            disk.set_read_only(false);
            let prepared = engine.prepare(&claim, late()).unwrap();

            disk.set_read_only(true);
            let error = engine.unprepare("a", late()).unwrap_err().to_string();
            assert_clear(&error, &disk, "Read-only file system");
            let other = engine.prepare(&engine_node::claim("b", &[devices[0]]), late()).unwrap_err().to_string();
            assert!(other.contains("Read-only file system") || other.contains("held by claim team/claim-a"), "{other}");
            disk.set_read_only(false);
            assert_eq!(engine.prepare(&claim, late()).unwrap(), prepared, "{context}");
            engine.unprepare("a", late()).unwrap();
            assert_nothing_on_gpu(&node, &context);
            assert_eq!(disk.litter(), Vec::<PathBuf>::new(), "{context}");
        }
    }
}

/// A disk that does not answer one claim's sync costs the claims on other GPUs nothing.
#[tokio::test]
async fn a_slow_disk_holds_up_its_claim_alone() {
    let node = Node::start("[{product: h100-80gb, count: 2}]");
    let plugin = Plugin::start(&node.root()).await;
    let slow = plugin.claim_of("slow", &[MIG_1G]);
    let quick = plugin.claim_of("quick", &[SECOND]);
    let moment = Moment {
        step: "fsync kubelet/plugins/gpu.nvidia.com/claims/uid-of-slow.tmp".to_owned(),
        nth: 1,
        side: Side::Before,
    };
    let tracer = Tracer::attach(&plugin.process, plugin.directory.path(), Strike::Hold(moment));
    let mut waiting = std::pin::pin!(plugin.prepare(&slow));
    let deadline = Instant::now() + PATIENCE;
    while !tracer.has_struck() {
        assert!(Instant::now() < deadline, "the journal is synced");
        let answer = tokio::time::timeout(Duration::from_millis(5), &mut waiting).await;
        assert!(answer.is_err(), "{answer:?}");
    }
    let quick_answer = tokio::time::timeout(PATIENCE, plugin.prepare(&quick)).await.expect("it does not wait");
    assert_eq!(quick_answer.error, "");
    assert_eq!(tokio::time::timeout(PATIENCE, plugin.unprepare(&quick)).await.expect("it does not wait"), "");
    let early = futures::poll!(&mut waiting);
    assert!(early.is_pending(), "{early:?}");
    assert!(tracer.finish().struck);
    assert_eq!(waiting.await.error, "");
    assert_eq!(plugin.unprepare(&slow).await, "");
    assert_eq!((node.live(GPU), node.live(SECOND)), (vec![], vec![]));
}

/// What may stand in a journal file instead of a record: what a power cut has left.
fn not_records(record: &[u8]) -> Vec<Vec<u8>> {
    let mut flipped = record.to_vec();
    flipped[record.len() / 2] ^= 0x80;
    // All but the last bytes: `}` and the end of the line.
    let cut = (0..record.len() - 1).step_by(record.len() / 24).map(|length| record[..length].to_vec());
    let torn = [vec![0; record.len()], (0..=255).collect(), flipped];
    cut.chain(torn).collect()
}

/// The CDI file tells what the journal cannot: the claim keeps its devices, and is prepared and released as ever.
#[test]
fn a_journal_that_was_cut_off_loses_nothing() {
    let node = Node::start(H100);
    let claim = claim("a", &[MIG_1G, MIG_3G]);
    let prepared = node.engine().prepare(&claim, late()).unwrap();
    let (live, spec) = (node.live(GPU), node.cdi(&claim));
    let path = node.settings().claims.join("a.json");
    for (number, content) in not_records(&fs::read(&path).unwrap()).into_iter().enumerate() {
        fs::write(&path, &content).unwrap();
        let engine = node.engine();
        let [aside] = &engine.take_set_aside()[..] else { panic!("{number} is not set aside") };
        assert_eq!((aside.claim_uid.as_str(), &fs::read(&aside.path).unwrap()), ("a", &content), "{number}");
        let error = engine.prepare(&engine_node::claim("b", &[MIG_2G]), late()).unwrap_err().to_string();
        assert!(error.contains("held by claim") && error.contains("(a)"), "{number}: {error}");
        if number % 2 == 0 {
            engine.unprepare("a", late()).unwrap();
            node.assert_clean(GPU, &format!("{number}"));
        }
        assert_eq!(engine.prepare(&claim, late()).unwrap(), prepared, "{number}");
        assert_eq!((node.live(GPU), node.cdi(&claim)), (live.clone(), spec.clone()), "{number}");
    }
}

/// The program starts on whatever lies there, and tells a person.
#[tokio::test]
async fn the_program_starts_on_damaged_journals_and_tells_it() {
    let node = Node::start(H100);
    let mut plugin = Plugin::start(&node.root()).await;
    let devices = [MIG_1G, MIG_3G];
    let claims = devices.map(|device| plugin.claim_of(device, &[device]));
    let mut prepared = Vec::new();
    for claim in &claims {
        prepared.push(plugin.prepare(claim).await);
        assert_eq!(prepared.last().unwrap().error, "");
    }
    let live = node.live(GPU);
    let journal = |claim: usize| plugin.paths.claims.join(format!("{}.json", claims[claim].uid));
    let journals = [journal(0), journal(1)];
    plugin.process.kill().unwrap();
    plugin.process.wait().unwrap();
    let record = fs::read(&journals[0]).unwrap();
    fs::write(&journals[0], &record[..record.len() / 2]).unwrap();
    fs::write(&journals[1], r#"{"invented": true}"#).unwrap();
    plugin.spawn_again();
    plugin.go();
    plugin.register().await;

    let api = plugin.api.clone();
    let events = || {
        let events = api.list("/api/v1/namespaces/default/events/");
        events.into_iter().filter(|event| event["reason"] == "JournalDamaged").collect::<Vec<_>>()
    };
    plugin.until("an event for each", || events().len() == 2).await;
    for (claim, journal) in claims.iter().zip(&journals) {
        let aside = journal.with_extension("damaged").display().to_string();
        let tells = |event: &Value| {
            let message = event["message"].as_str().unwrap();
            message.contains(&claim.uid) && message.contains(&aside)
        };
        assert!(events().iter().any(tells), "{:?}", events());
    }
    let other = plugin.prepare(&plugin.claim_of("other", &[MIG_2G])).await;
    assert!(other.error.contains(&claims[0].uid), "{}", other.error);
    assert_eq!(plugin.prepare(&claims[0]).await, prepared[0]);
    assert_eq!(node.live(GPU), live);
    for claim in &claims {
        assert_eq!(plugin.unprepare(claim).await, "");
    }
    assert_eq!(node.live(GPU), []);
    assert_eq!(fs::read_dir(&plugin.paths.claims).unwrap().count(), 0, "also what was set aside");
}
