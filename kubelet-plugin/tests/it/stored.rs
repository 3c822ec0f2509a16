//! What a version leaves on a node's disk and in the API server is read by every later one.
//!
//! `tests/stored/<version>` holds a journal in each state, CDI files and a GpuNode as that version wrote them, and what it
//! said of them. Before a version is tagged, `KERF_STORED=write cargo test -p kerf-kubelet-plugin --test it stored` writes its
//! folder; a test fails where that was forgotten, and where this build writes something else than it did.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kerf_api::{GpuNode, GpuNodeSpec};
use kerf_cdi::Spec;
use kerf_kubelet_plugin::driver::{Driver, DriverFiles};
use kerf_kubelet_plugin::engine::{Claim, JournalFile, Released, Settings, Step, Wishes};
use kerf_kubelet_plugin::metrics::Metrics;
use kerf_kubelet_plugin::paths::Paths;
use kerf_kubelet_plugin::{ForeignPolicy, events};
use serde_json::{Map, Value, json};
use tokio::sync::Notify;

use crate::engine_crash::dies;
use crate::engine_node::{
    Crash, GPU, MIG_1G, MIG_3G, Node, SECOND, TWO_H100, claim, late, prepare, refused, soon, unprepare,
};

/// Every file below a folder, by its path in it.
type Files = BTreeMap<PathBuf, String>;

const SAYS: &str = "says.json";
const GPU_NODE: &str = "gpu-node.json";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stored")
}

fn read(folder: &Path) -> Files {
    let mut files = Files::new();
    let mut directories = vec![folder.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else {
                files.insert(path.strip_prefix(folder).unwrap().to_owned(), fs::read_to_string(&path).unwrap());
            }
        }
    }
    files
}

fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// The claim that a file below `claims` is about.
fn uid_of(path: &Path) -> Option<&str> {
    path.strip_prefix("claims").ok()?.to_str()?.strip_suffix(".json")
}

fn journal(uid: &str, text: &str) -> JournalFile {
    JournalFile::read(uid, text.as_bytes()).unwrap()
}

/// What a journal tells of its claim, in the epoch in which it was written.
fn says(uid: &str, text: &str) -> Value {
    let file = journal(uid, text);
    let claim = file.claim();
    let partitions = claim.partitions.iter().map(|partition| {
        json!({
            "device": partition.device.to_string(), "gpu": partition.gpu.to_string(), "kept": partition.kept,
            "placement": [partition.placement.start, partition.placement.size], "gpuInstance": partition.gpu_instance,
        })
    });
    let holds = [GPU, SECOND].map(|gpu| file.holds(crate::engine_node::address(gpu), None));
    json!({
        "name": format!("{}/{}", claim.namespace, claim.name), "devices": claim.devices, "complete": claim.complete,
        "stuck": claim.stuck, "condemned": claim.condemned, "partitions": partitions.collect::<Vec<_>>(),
        "holds": holds,
    })
}

/// Leaves files in each state, and keeps a copy.
struct Writer {
    node: Node,
    files: Files,
}

impl Writer {
    /// Copies what is there of a claim, and ends it.
    fn keep(&mut self, claim: &Claim) {
        let settings = self.node.settings();
        let place = settings.metadata;
        let names = [
            (settings.claims, "claims", format!("{}.json", claim.uid)),
            (settings.cdi, "cdi", format!("k8s.gpu.nvidia.com-claim_{}.json", claim.uid)),
        ];
        for (directory, kind, name) in names {
            if let Ok(text) = fs::read_to_string(directory.join(&name)) {
                // Where the node's files are is another place in each run.
                let text = text.replace(place.to_str().unwrap(), "/var/lib/kubelet/plugins/gpu.nvidia.com/metadata");
                self.files.insert(Path::new(kind).join(name), text);
            }
        }
        unprepare(&self.node.engine(), claim);
    }

    /// Dies after the n-th time that a call writes the journal.
    fn die(&self, writes: usize, call: impl Fn(&kerf_kubelet_plugin::engine::Engine)) -> bool {
        let watch = Crash::after(Step::WriteJournal, writes);
        dies(|| call(&self.node.watched_engine(watch)))
    }

    fn write(mut self) -> Files {
        let prepares = |claim: &Claim| {
            let claim = claim.clone();
            move |engine: &kerf_kubelet_plugin::engine::Engine| _ = prepare(engine, &claim).unwrap()
        };
        for (writes, state) in ["planned", "carving", "carved", "with-compute-instance", "prepared"].iter().enumerate()
        {
            let claim = claim(state, &[MIG_1G]);
            assert!(self.die(writes, prepares(&claim)), "{state}");
            self.keep(&claim);
        }
        for (uid, devices) in [("whole", &[GPU][..]), ("mixed", &[MIG_3G, MIG_1G, SECOND])] {
            let claim = claim(uid, devices);
            prepare(&self.node.engine(), &claim).unwrap();
            self.keep(&claim);
        }
        for (writes, state) in ["releasing", "destroyed"].iter().enumerate() {
            let claim = claim(state, &[MIG_1G]);
            prepare(&self.node.engine(), &claim).unwrap();
            assert!(self.die(writes, |engine| _ = engine.unprepare(state, late()).unwrap()), "{state}");
            self.keep(&claim);
        }
        for (uid, patience) in [("stuck", Duration::from_secs(120)), ("condemned", Duration::ZERO)] {
            let claim = claim(uid, &[MIG_1G, MIG_3G]);
            let (engine, faulty) = self.node.faulty_engine_with(Settings { patience, ..self.node.settings() });
            prepare(&engine, &claim).unwrap();
            faulty.occupy();
            let released = engine.unprepare(uid, soon());
            assert_eq!(matches!(released, Ok(Released::Condemned(_))), uid == "condemned", "{released:?}");
            self.keep(&claim);
        }
        for (uid, compute_instances) in [("kept", 0), ("kept-with-compute-instance", 1)] {
            self.node.make_foreign(MIG_1G, compute_instances);
            let claim = claim(uid, &[MIG_1G]);
            prepare(&self.node.engine(), &claim).unwrap();
            self.keep(&claim);
            self.node.remove_foreign();
        }
        let mut looking = claim("admin", &[GPU]);
        looking.devices[0].admin_access = true;
        let mut shared = claim("shared", &[SECOND]);
        shared.devices[0].share_id = Some("7a5c2f7e-6b0e-4c29-9a43-0c3f9f5b3a10".to_owned());
        for claim in [looking, shared] {
            prepare(&self.node.engine(), &claim).unwrap();
            self.keep(&claim);
        }
        self.node.make_foreign("gpu-3b-00-0-mig-1g10gb-2", 1);
        self.files.insert(GPU_NODE.into(), format!("{:#}\n", json!(self.gpu_node())));
        let said = self.files.iter().filter_map(|(path, text)| {
            let uid = uid_of(path)?;
            Some((uid.to_owned(), says(uid, text)))
        });
        let said = Value::Object(said.collect());
        self.files.insert(SAYS.into(), format!("{said:#}\n"));
        self.files
    }

    fn gpu_node(&self) -> GpuNode {
        let directory = tempfile::tempdir().unwrap();
        let paths = Paths::new(directory.path(), &directory.path().join("cdi"), "gpu.nvidia.com");
        let files = DriverFiles {
            host_root: "/".into(),
            driver_root: Some(self.node.root()),
            injection: self.node.settings().injection,
        };
        let (events, _writer) = events::channel("node-1", &Metrics::default());
        let changed = Arc::new(Notify::new());
        let driver = Driver::new(
            files,
            "gpu.nvidia.com",
            &paths,
            Wishes::new(ForeignPolicy::Keep),
            events,
            changed,
            Metrics::default(),
        );
        let mut status = driver.read_inventory().status;
        (status.boot_id, status.registered) = ("first boot".to_owned(), true);
        let mut gpu_node = GpuNode::new("node-1", GpuNodeSpec::default());
        gpu_node.status = Some(status);
        gpu_node
    }
}

fn written() -> Files {
    Writer { node: Node::start(TWO_H100), files: Files::new() }.write()
}

/// Without what differs from one run to the next.
fn alike(files: Files) -> BTreeMap<PathBuf, Value> {
    let alike = |text: &str| {
        let mut content = json_of(text);
        let fields = content.as_object_mut().unwrap();
        fields.remove("driverLoad");
        fields.entry("stuckSince").and_modify(|since| *since = json!(1));
        content
    };
    files.into_iter().map(|(path, text)| (path, alike(&text))).collect()
}

#[test]
fn the_folder_of_this_version_is_what_it_writes() {
    let folder = folder().join(env!("CARGO_PKG_VERSION"));
    let files = written();
    if std::env::var("KERF_STORED").is_ok_and(|what| what == "write") {
        for (path, text) in &files {
            let path = folder.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }
    assert!(folder.exists(), "{} is missing: see the head of this file", folder.display());
    let (stored, files) = (alike(read(&folder)), alike(files));
    assert_eq!(stored.keys().collect::<Vec<_>>(), files.keys().collect::<Vec<_>>());
    for (path, content) in &files {
        assert_eq!(stored[path], *content, "{}: see the head of this file", path.display());
    }
}

fn versions() -> Vec<Files> {
    let versions: Vec<_> = fs::read_dir(folder()).unwrap().map(|entry| read(&entry.unwrap().path())).collect();
    assert!(!versions.is_empty());
    versions
}

#[test]
fn what_every_version_wrote_is_read_and_written_back() {
    for files in versions() {
        let said = json_of(&files[Path::new(SAYS)]);
        let mut journals = 0;
        for (path, text) in &files {
            let (name, content) = (path.display(), json_of(text));
            if let Some(uid) = uid_of(path) {
                journals += 1;
                assert_eq!(says(uid, text), said[uid], "{name}");
                assert_eq!(serde_json::from_slice::<Value>(&journal(uid, text).to_bytes()).unwrap(), content, "{name}");
            } else if path.starts_with("cdi") {
                let spec = Spec::from_json(text.as_bytes()).unwrap();
                assert_eq!(serde_json::from_slice::<Value>(&spec.to_json().unwrap()).unwrap(), content, "{name}");
            } else if path == Path::new(GPU_NODE) {
                let gpu_node: GpuNode = serde_json::from_str(text).unwrap();
                assert_eq!(json!(gpu_node), content, "{name}");
            }
        }
        assert_eq!(said.as_object().map(Map::len), Some(journals));
    }
}

/// Fields that a later version may add, in every object of the file.
fn invent(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.values_mut().for_each(invent);
            fields.insert("invented".to_owned(), json!({"by": "a later version", "for": [1, null]}));
        }
        Value::Array(items) => items.iter_mut().for_each(invent),
        _ => {}
    }
}

#[test]
fn what_a_later_version_adds_survives_at_every_level() {
    for files in versions() {
        for (path, text) in files {
            let Some(uid) = uid_of(&path) else { continue };
            let mut later = json_of(&text);
            invent(&mut later);
            let written = later.to_string();
            let back: Value = serde_json::from_slice(&journal(uid, &written).to_bytes()).unwrap();
            assert_eq!(back, later, "{}", path.display());
            assert_eq!(says(uid, &written), says(uid, &text), "{}", path.display());
        }
    }
}

/// The files of a node that was updated: every claim holds what it held, goes on, and ends.
#[test]
fn a_node_goes_on_with_the_files_of_every_version() {
    for files in versions() {
        let node = Node::start(TWO_H100);
        let settings = node.settings();
        // The simulated driver is another, and no reload of it.
        let files = alike(files);
        for (path, content) in &files {
            let Some(kind) = path.parent().and_then(Path::to_str) else { continue };
            let directory = match kind {
                "claims" => &settings.claims,
                "cdi" => &settings.cdi,
                _ => continue,
            };
            fs::create_dir_all(directory).unwrap();
            fs::write(directory.join(path.file_name().unwrap()), content.to_string()).unwrap();
        }
        let engine = node.engine();
        let uids: Vec<&str> = files.keys().filter_map(|path| uid_of(path)).collect();
        assert_eq!(engine.prepared_claims().unwrap().len(), uids.len());
        assert_eq!(engine.take_set_aside(), []);
        let error = refused(&engine, &claim("another", &[MIG_3G]));
        assert!(error.contains("claim team/claim-"), "{error}");
        for uid in uids {
            assert_eq!(engine.unprepare(uid, late()).unwrap(), Released::Gone, "{uid}");
        }
        node.assert_clean(GPU, "all are released");
        node.assert_clean(SECOND, "all are released");
    }
}

/// One claim alone, which a version prepared before the driver was loaded anew: the kubelet asks again.
#[test]
fn a_claim_of_every_version_is_prepared_again() {
    for files in versions() {
        let node = Node::start(TWO_H100);
        let settings = node.settings();
        let cdi = "k8s.gpu.nvidia.com-claim_mixed.json";
        for (directory, kind, name) in [(&settings.claims, "claims", "mixed.json"), (&settings.cdi, "cdi", cdi)] {
            fs::create_dir_all(directory).unwrap();
            fs::write(directory.join(name), &files[&Path::new(kind).join(name)]).unwrap();
        }
        let before: Spec = Spec::from_json(&fs::read(settings.cdi.join(cdi)).unwrap()).unwrap();
        let mixed = claim("mixed", &[MIG_3G, MIG_1G, SECOND]);
        let prepared = prepare(&node.engine(), &mixed).unwrap();
        let ids: Vec<_> = prepared.iter().flat_map(|device| device.cdi_ids.clone()).collect();
        let known = before.devices.iter().map(|device| format!("k8s.gpu.nvidia.com/claim={}", device.name));
        assert_eq!(ids, known.collect::<Vec<_>>());
        assert_eq!((node.live(GPU).len(), node.live(SECOND).len()), (2, 0));
        unprepare(&node.engine(), &mixed);
        node.assert_clean(GPU, "released");
    }
}
