//! kill -9: the program dies at every system call that changes the world, and its next start and the kubelet's retry mend
//! whatever is left.
//!
//! The steps are found by watching, not told by the program. By default a sample of each row is run, chosen by KERF_SEED;
//! with KERF_TORTURE=all every moment, once with each thing the kubelet may do next.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kerf_nvml_sim::client::Client;
use kerf_proto::dra::v1::dra_plugin_client::DraPluginClient;
use kerf_proto::dra::v1::{
    self, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest,
};
use serde_json::Value;
use tonic::Status;

use crate::engine_node::{GPU, Node, SECOND};
use crate::program::{PATIENCE, Plugin};
use crate::tracer::{Moment, Strike, Trace, Tracer};
use crate::{rpc, settings};

/// What the program is at when it is killed.
struct Row {
    name: &'static str,
    /// Numbers of the claims that are prepared before.
    prepared: &'static [usize],
    act: Act,
    /// The number of the claim that this is about, and that the kubelet tries again afterwards.
    claim: usize,
    /// A row with fewer moments than this proves nothing.
    at_least: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Prepare,
    Unprepare,
    /// The program starts, until its lease vouches for what it has published.
    Start,
    /// The program starts after a reboot, until it has released the claim, which the API server has no more.
    Reconcile,
}

/// The devices of each claim.
const CLAIMS: [(&str, &[&str]); 2] = [
    ("slice", &["gpu-3b-00-0-mig-1g10gb-6"]),
    ("mixed", &["gpu-3b-00-0-mig-3g40gb-0", "gpu-3b-00-0-mig-1g10gb-4", SECOND]),
];

const PREPARE: [Row; 2] = [
    Row { name: "prepare a partition", prepared: &[], act: Act::Prepare, claim: 0, at_least: 40 },
    Row { name: "prepare two partitions and a GPU", prepared: &[], act: Act::Prepare, claim: 1, at_least: 60 },
];

const UNPREPARE: [Row; 2] = [
    Row { name: "unprepare a partition", prepared: &[0], act: Act::Unprepare, claim: 0, at_least: 25 },
    Row { name: "unprepare two partitions and a GPU", prepared: &[1], act: Act::Unprepare, claim: 1, at_least: 40 },
];

const START: [Row; 1] = [Row { name: "start", prepared: &[0, 1], act: Act::Start, claim: 1, at_least: 20 }];

const RECONCILE: [Row; 1] =
    [Row { name: "release what was left behind", prepared: &[0, 1], act: Act::Reconcile, claim: 1, at_least: 30 }];

/// How many moments of a row are run when not all are.
const SAMPLE: usize = 16;

#[tokio::test]
async fn prepare_survives_sigkill() {
    matrix(&PREPARE).await;
}

#[tokio::test]
async fn unprepare_survives_sigkill() {
    matrix(&UNPREPARE).await;
}

#[tokio::test]
async fn the_start_survives_sigkill() {
    matrix(&START).await;
}

#[tokio::test]
async fn reconcile_survives_sigkill() {
    matrix(&RECONCILE).await;
}

async fn matrix(rows: &[Row]) {
    let (all, seed) = (settings::plays_all(), settings::seed());
    let mut host = Host::start().await;
    for row in rows {
        let moments = host.run(row, None, Act::Prepare).await.moments;
        assert!(moments.len() >= row.at_least, "{}: only {} moments: {moments:#?}", row.name, moments.len());
        let step = if all { 1 } else { moments.len().div_ceil(SAMPLE) };
        let (mut runs, mut missed) = (0, Vec::new());
        for (number, moment) in moments.iter().enumerate().skip(seed % step).step_by(step) {
            let (one, other) = (Act::Prepare, Act::Unprepare);
            let nexts = match (all, (number / step + seed) % 2) {
                (true, _) => &[one, other][..],
                (false, 0) => &[one],
                (false, _) => &[other],
            };
            for next in nexts {
                let struck = host.run(row, Some(moment), *next).await.struck;
                runs += 1;
                if !struck {
                    missed.push(moment);
                }
            }
        }
        let names: Vec<_> = missed.iter().map(ToString::to_string).collect();
        println!(
            "{}: {} moments, {runs} runs (seed {seed}), not killed because the moment did not come again: {names:?}",
            row.name,
            moments.len()
        );
        // What goes over a connection is cut into messages as it comes, and what the API server is told comes when it comes.
        let may_differ = |moment: &Moment| moment.step.contains("to the kubelet") || moment.step.contains(" /api");
        assert!(missed.iter().all(|moment| may_differ(moment)) && missed.len() * 2 < runs, "{}: {names:?}", row.name);
    }
}

/// A node with the program on it.
struct Host {
    node: Node,
    plugin: Plugin,
    claims: Vec<Known>,
}

/// The instances of each GPU, as [`Node::live`] tells them.
type Live = BTreeMap<&'static str, Vec<(u32, u32, u32, usize)>>;

/// Path, identity, age and content of a file.
type File = (PathBuf, u64, i64, i64, Vec<u8>);

/// A claim, and how everything is when it is prepared.
struct Known {
    claim: v1::Claim,
    answer: NodePrepareResourceResponse,
    spec: Value,
    /// What its containers are told, by request.
    told: BTreeMap<String, Value>,
    live: Live,
}

impl Host {
    async fn start() -> Host {
        let node = Node::start("[{product: h100-80gb}, {product: h100-80gb}]");
        let plugin = Plugin::start(&node.root()).await;
        assert!(plugin.hook().exists(), "the start includes that the hook is copied");
        let mut host = Host { node, plugin, claims: Vec::new() };
        for (name, devices) in CLAIMS {
            let claim = host.plugin.claim_of(name, devices);
            let answer = host.plugin.prepare(&claim).await;
            assert_eq!((answer.error.as_str(), answer.devices.len()), ("", devices.len()));
            let known = Known { spec: host.spec(&claim), told: host.told(&claim), live: host.live(), claim, answer };
            assert_eq!(host.plugin.unprepare(&known.claim).await, "");
            host.claims.push(known);
        }
        host.assert_prepared(&[], "at first");
        host
    }

    /// Does what the row says, dies at a moment, starts again, and does what the kubelet does next.
    async fn run(&mut self, row: &Row, moment: Option<&Moment>, next: Act) -> Trace {
        for (number, known) in self.claims.iter().enumerate() {
            if row.prepared.contains(&number) {
                assert_eq!(self.plugin.prepare(&known.claim).await, known.answer);
            } else {
                assert_eq!(self.plugin.unprepare(&known.claim).await, "");
            }
        }
        let strike = moment.map_or(Strike::Never, |moment| Strike::Kill(moment.clone()));
        let mut untouched = Vec::new();
        let trace = match row.act {
            Act::Start => {
                self.stop();
                self.start_under(strike, |host| host.plugin.lease_holder().is_some()).await
            }
            Act::Reconcile => {
                self.stop();
                self.leave_behind(row.claim);
                untouched = self.files_of_others(row.claim);
                // The start goes on beside it: to its end, or a moment of it comes in one run and not in the next.
                let done = |host: &Host| host.is_released(row.claim) && host.plugin.lease_holder().is_some();
                self.start_under(strike, done).await
            }
            call => self.call_under(strike, call, row.claim).await,
        };
        let context = match moment {
            Some(moment) if trace.struck => format!("{}: killed {moment}, then {next:?}", row.name),
            _ => format!("{}: not killed, then {next:?}", row.name),
        };
        if trace.struck {
            assert_eq!(self.plugin.process.wait().unwrap().signal(), Some(9), "{context}");
            self.plugin.spawn_again();
            self.plugin.go();
            self.plugin.register().await;
        }

        let mut prepared = row.prepared.to_vec();
        prepared.retain(|number| *number != row.claim);
        if row.act == Act::Reconcile {
            self.until_released(row.claim, &context).await;
            assert_eq!(self.files(), untouched, "the other claim is none of its business: {context}");
            self.assert_prepared(&prepared, &context);
            let (name, devices) = CLAIMS[row.claim];
            self.plugin.claim_of(name, devices);
        }
        if next == Act::Prepare {
            prepared.push(row.claim);
        }
        self.call(next, row.claim, &context).await;
        self.assert_prepared(&prepared, &context);
        let files = self.files();
        self.call(next, row.claim, &context).await;
        assert_eq!(self.files(), files, "a repeat changes nothing: {context}");
        self.assert_prepared(&prepared, &context);
        trace
    }

    /// The kubelet's call, which succeeds.
    async fn call(&self, call: Act, claim: usize, context: &str) {
        let known = &self.claims[claim];
        match call {
            Act::Unprepare => assert_eq!(self.plugin.unprepare(&known.claim).await, "", "{context}"),
            _ => assert_eq!(self.plugin.prepare(&known.claim).await, known.answer, "{context}"),
        }
    }

    /// The kubelet's call to a program that may die of it.
    async fn call_under(&mut self, strike: Strike, call: Act, claim: usize) -> Trace {
        let known = &self.claims[claim];
        let mut kubelet = DraPluginClient::new(rpc::connect(&self.plugin.paths.dra_socket).await);
        let tracer = Tracer::attach(&self.plugin.process, self.plugin.directory.path(), strike);
        let claims = vec![known.claim.clone()];
        let call = async {
            match call {
                Act::Unprepare => {
                    kubelet.node_unprepare_resources(NodeUnprepareResourcesRequest { claims }).await.map(drop)
                }
                _ => kubelet.node_prepare_resources(NodePrepareResourcesRequest { claims }).await.map(drop),
            }
        };
        let done: Result<(), Status> =
            tokio::time::timeout(PATIENCE, call).await.expect("an answer, or a closed connection");
        let trace = tracer.finish();
        assert!(done.is_ok() || trace.struck, "{done:?}");
        trace
    }

    fn stop(&mut self) {
        self.plugin.process.kill().unwrap();
        self.plugin.process.wait().unwrap();
    }

    /// The node boots, and meanwhile the claim is deleted: its instances went, its files are there. The other claim keeps
    /// everything, so that it is seen whether anybody touches it.
    fn leave_behind(&self, number: usize) {
        let Known { claim, live, .. } = &self.claims[number];
        self.plugin.api.remove(&format!("/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{}", claim.name));
        let journal = self.journal(number);
        let mut record: Value = serde_json::from_slice(&std::fs::read(&journal).unwrap()).unwrap();
        record["bootId"] = "an earlier boot".into();
        std::fs::write(&journal, record.to_string()).unwrap();
        let driver = Client::new(self.node.root());
        for (place, (gpu, state)) in [GPU, SECOND].into_iter().zip(driver.state().unwrap().gpus).enumerate() {
            for instance in state.mig.unwrap().instances {
                let is_its = live[gpu].iter().any(|(_, start, ..)| *start == instance.placement.start);
                if is_its {
                    driver.destroy(place, instance.id).unwrap();
                }
            }
        }
    }

    fn journal(&self, number: usize) -> PathBuf {
        self.plugin.paths.claims.join(format!("{}.json", self.claims[number].claim.uid))
    }

    /// Whether the claim has no journal any more, and nobody is at work on it.
    fn is_released(&self, number: usize) -> bool {
        let lock = format!("claim-{}.lock", self.claims[number].claim.uid);
        !self.journal(number).exists() && !self.plugin.paths.locks.join(lock).exists()
    }

    async fn until_released(&self, number: usize, context: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.is_released(number) {
            assert!(Instant::now() < deadline, "it is never released: {context}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Another start, as on a node that the API server knows nothing of, until something holds.
    async fn start_under(&mut self, strike: Strike, holds: impl Fn(&Host) -> bool) -> Trace {
        let api = self.plugin.api.clone();
        api.remove("/apis/kerf.dev/v1alpha1/gpunodes/node-1");
        api.remove("/apis/coordination.k8s.io/v1/namespaces/kerf-system/leases/kubelet-plugin-node-1");
        self.plugin.spawn_again();
        let tracer = Tracer::attach(&self.plugin.process, self.plugin.directory.path(), strike);
        self.plugin.go();
        let (mut registered, deadline) = (false, Instant::now() + PATIENCE);
        while !tracer.has_struck() && !holds(self) {
            assert!(Instant::now() < deadline, "it does not come to it");
            registered = registered || self.plugin.try_register().await.is_ok();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tracer.finish()
    }

    /// Exactly these claims are prepared, and of the others nothing is left: on the GPUs, in the CDI directory, on disk.
    fn assert_prepared(&self, prepared: &[usize], context: &str) {
        let mut live: Live = [(GPU, Vec::new()), (SECOND, Vec::new())].into();
        let (mut journals, mut specs, mut uids) = (Vec::new(), Vec::new(), Vec::new());
        for known in prepared.iter().map(|number| &self.claims[*number]) {
            for (gpu, instances) in &known.live {
                live.entry(gpu).or_default().extend(instances);
            }
            journals.push(format!("{}.json", known.claim.uid));
            specs.push(format!("k8s.gpu.nvidia.com-claim_{}.json", known.claim.uid));
            uids.push(known.claim.uid.clone());
            assert_eq!(self.told(&known.claim), known.told, "{context}");
            let spec = self.spec(&known.claim);
            assert_eq!(spec, known.spec, "{context}");
            for node in device_nodes(&spec) {
                assert!(node.exists(), "{} is in a CDI file and does not exist: {context}", node.display());
            }
        }
        live.values_mut().for_each(|instances| instances.sort_by_key(|instance| instance.1));
        assert_eq!(self.live(), live, "{context}");
        for (gpu, instances) in live {
            assert_eq!(self.node.mig_is_on(gpu), !instances.is_empty(), "MIG mode of {gpu}: {context}");
        }
        journals.sort();
        specs.sort();
        uids.sort();
        let paths = &self.plugin.paths;
        // What a write has left that was cut off goes with the claim at the latest.
        let whole = |directory: &Path| {
            let is_leftover = |name: &String| {
                let uids = prepared.iter().map(|number| &self.claims[*number].claim.uid);
                name.ends_with(".tmp") && uids.into_iter().any(|uid| name.contains(uid.as_str()))
            };
            let mut names = names(directory);
            names.retain(|name| !is_leftover(name));
            names
        };
        assert_eq!(whole(&paths.claims), journals, "{context}");
        assert_eq!(whole(&paths.cdi), specs, "{context}");
        assert_eq!(names(&paths.metadata), uids, "{context}");
        let locks = names(&paths.locks);
        assert!(locks.iter().all(|lock| lock.starts_with("gpu-")), "{locks:?}: {context}");
    }

    fn live(&self) -> Live {
        [GPU, SECOND].map(|gpu| (gpu, self.node.live(gpu))).into()
    }

    fn spec(&self, claim: &v1::Claim) -> Value {
        let path = self.plugin.paths.cdi.join(format!("k8s.gpu.nvidia.com-claim_{}.json", claim.uid));
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    /// Its device metadata, but for how often it was written.
    fn told(&self, claim: &v1::Claim) -> BTreeMap<String, Value> {
        let directory = self.plugin.paths.metadata.join(&claim.uid);
        let read = |name: String| {
            let mut told: Value = serde_json::from_slice(&std::fs::read(directory.join(&name)).unwrap()).unwrap();
            assert!(told["metadata"]["generation"].take().is_u64(), "{told}");
            (name, told)
        };
        names(&directory).into_iter().map(read).collect()
    }

    fn files_of_others(&self, number: usize) -> Vec<File> {
        let uid = &self.claims[number].claim.uid;
        self.files().into_iter().filter(|(path, ..)| !path.to_str().unwrap().contains(uid.as_str())).collect()
    }

    /// Every file about a claim.
    fn files(&self) -> Vec<File> {
        let paths = &self.plugin.paths;
        let metadata = names(&paths.metadata).into_iter().map(|uid| paths.metadata.join(uid));
        let directories = [paths.claims.clone(), paths.cdi.clone()].into_iter().chain(metadata);
        let files =
            directories.flat_map(|directory| names(&directory).into_iter().map(move |name| directory.join(name)));
        let fingerprint = |path: PathBuf| {
            let about = path.metadata().unwrap();
            let content = std::fs::read(&path).unwrap();
            (path, about.ino(), about.mtime(), about.mtime_nsec(), content)
        };
        files.map(fingerprint).collect()
    }
}

/// The device nodes that a CDI file names, where they are on the host.
fn device_nodes(spec: &Value) -> Vec<PathBuf> {
    let devices = spec["devices"].as_array().unwrap();
    let edits = devices.iter().chain([spec]).map(|part| &part["containerEdits"]["deviceNodes"]);
    let nodes = edits.flat_map(|nodes| nodes.as_array().into_iter().flatten());
    let paths: Vec<_> = nodes
        .map(|node| node.get("hostPath").unwrap_or(&node["path"]))
        .map(|path| PathBuf::from(path.as_str().unwrap()))
        .collect();
    assert!(!paths.is_empty(), "{spec}");
    paths
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
