//! A simulated node with an engine on it, and an NVML between them that can be told to fail or to wait.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use kerf_kubelet_plugin::engine::{
    AllocatedDevice, Claim, DeviceName, Engine, ForeignPolicy, FormerDriver, Injection, NoWatch, PrepareError,
    PreparedDevice, Released, Settings, Step, Waiting, Watch, Wish, Wishes,
};
use kerf_mig::{Geometry, Placement, Profile};
use kerf_nvml::{
    Code, ComputeInstance, CudaVersion, DriverRoot, Error, Gpu, GpuFacts, GpuInstance, Library, MigMode, MigModes,
    Nvml, PciAddress, Process,
};
use tempfile::TempDir;

/// The first GPU of a simulated node.
pub(crate) const GPU: &str = "gpu-3b-00-0";
/// The second one.
pub(crate) const SECOND: &str = "gpu-47-00-0";

/// A node with one GPU.
pub(crate) const H100: &str = "[{product: h100-80gb}]";
/// A node with two.
pub(crate) const TWO_H100: &str = "[{product: h100-80gb, count: 2}]";

/// Partitions of the first GPU; the first two overlap, the third is beside them.
pub(crate) const MIG_1G: &str = "gpu-3b-00-0-mig-1g10gb-4";
pub(crate) const MIG_2G: &str = "gpu-3b-00-0-mig-2g20gb-4";
pub(crate) const MIG_3G: &str = "gpu-3b-00-0-mig-3g40gb-0";
/// A partition of the second GPU.
pub(crate) const SECOND_1G: &str = "gpu-47-00-0-mig-1g10gb-0";

pub(crate) fn prepare(engine: &Engine, claim: &Claim) -> Result<Vec<PreparedDevice>, PrepareError> {
    engine.prepare(claim, late())
}

pub(crate) fn refused(engine: &Engine, claim: &Claim) -> String {
    prepare(engine, claim).expect_err("it is refused").to_string()
}

pub(crate) fn unprepare(engine: &Engine, claim: &Claim) {
    assert_eq!(engine.unprepare(&claim.uid, late()).unwrap(), Released::Gone);
}

/// Simulates a node until dropped.
pub(crate) struct Node {
    daemon: Child,
    dir: TempDir,
    pub(crate) nvml: Arc<dyn Nvml>,
}

/// A program of `kerf-nvml-sim`, from the target directory that holds this test.
fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let directory = test.parent().and_then(Path::parent).expect("tests lie in <target>/<profile>/deps");
    let program = directory.join(name);
    assert!(program.exists(), "{} is missing: run `cargo build -p kerf-nvml-sim` first", program.display());
    program
}

/// What is wanted of the GPUs when the controller wants nothing of any.
pub(crate) fn wishes(policy: ForeignPolicy) -> Wishes {
    let wishes = Wishes::new(policy);
    let everywhere = (0..=255u8).map(|bus| format!("0000:{bus:02x}:00.0").parse().unwrap());
    wishes.tell(everywhere.map(|gpu| (gpu, Wish::default())).collect());
    wishes
}

impl Node {
    /// A node with these GPUs: the list `gpus` of a node file, as flow-style YAML.
    pub(crate) fn start(gpus: &str) -> Node {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("node.yaml");
        let text = format!("driverVersion: 535.261.03\ncudaDriverVersion: \"12.2\"\ngpus: {gpus}\n");
        std::fs::write(&file, text).unwrap();
        let root = dir.path().join("driver");
        let mut serve = Command::new(program("nvml-sim"));
        serve.args(["serve", "--node"]).arg(&file).arg("--root").arg(&root).stdout(Stdio::piped());
        let mut daemon = serve.spawn().unwrap();
        let lines = BufReader::new(daemon.stdout.take().unwrap()).lines();
        let (ready, wait) = mpsc::channel();
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| _ = ready.send(line)));
        let line = wait.recv_timeout(Duration::from_secs(30)).expect("nvml-sim says something within 30 s");
        assert_eq!(line.trim(), "ready");
        let nvml = Arc::new(Library::open(&DriverRoot::at(root)).unwrap());
        Node { daemon, dir, nvml }
    }

    /// Runs `nvml-sim ctl`.
    pub(crate) fn ctl(&self, arguments: &[&str]) {
        let mut command = Command::new(program("nvml-sim"));
        command.args(["ctl", "--root"]).arg(self.root()).args(arguments).stdout(Stdio::null());
        assert!(command.status().unwrap().success(), "{command:?}");
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.dir.path().join("driver")
    }

    pub(crate) fn settings(&self) -> Settings {
        Settings {
            driver_root: DriverRoot::below(self.dir.path(), Path::new("/driver")),
            driver_name: "gpu.nvidia.com".to_owned(),
            claims: self.dir.path().join("claims"),
            locks: self.dir.path().join("locks"),
            cdi: self.dir.path().join("cdi"),
            metadata: self.dir.path().join("metadata"),
            injection: Injection { hook: None, metadata: true, additional_gids: true },
            boot_id: "first boot".to_owned(),
            patience: Duration::from_secs(120),
            wishes: wishes(ForeignPolicy::Keep),
            former: FormerDriver::new(self.dir.path(), &self.dir.path().join("cdi")),
            waiting: Waiting::default(),
        }
    }

    /// An engine, as a plugin process has one.
    pub(crate) fn engine(&self) -> Engine {
        Engine::open(Arc::clone(&self.nvml), self.settings()).unwrap()
    }

    /// An engine with a session of its own, as after a driver reload.
    pub(crate) fn engine_anew(&self) -> Engine {
        let nvml = Library::open(&self.settings().driver_root).unwrap();
        Engine::open(Arc::new(nvml), self.settings()).unwrap()
    }

    /// An engine over an NVML that can be told to fail.
    pub(crate) fn faulty_engine(&self) -> (Engine, Arc<Faulty>) {
        self.faulty_engine_with(self.settings())
    }

    /// The same, with other settings.
    pub(crate) fn faulty_engine_with(&self, settings: Settings) -> (Engine, Arc<Faulty>) {
        self.faulty_engine_watched(settings, Arc::new(NoWatch))
    }

    /// The same, with its steps watched.
    pub(crate) fn faulty_engine_watched(&self, settings: Settings, watch: Arc<dyn Watch>) -> (Engine, Arc<Faulty>) {
        let faulty = Arc::new(Faulty::new(Arc::clone(&self.nvml)));
        let nvml: Arc<dyn Nvml> = faulty.clone();
        (Engine::open_watched(nvml, settings, watch).unwrap(), faulty)
    }

    /// An engine whose steps are watched.
    pub(crate) fn watched_engine(&self, watch: Arc<dyn Watch>) -> Engine {
        Engine::open_watched(Arc::clone(&self.nvml), self.settings(), watch).unwrap()
    }

    pub(crate) fn gpu(&self, name: &str) -> Gpu {
        self.nvml.gpu_at(address(name)).unwrap()
    }

    /// Somebody else makes a GPU instance on the first GPU, with so many compute instances of one slice each.
    pub(crate) fn make_foreign(&self, device: &str, compute_instances: usize) -> GpuInstance {
        let gpu = self.gpu(GPU);
        self.nvml.set_mig_mode(gpu, MigMode::Enabled).unwrap();
        let geometry = Geometry::new(self.nvml.gpu_instance_profiles(gpu).unwrap());
        let name: DeviceName = device.parse().unwrap();
        let partition = name.as_partition().unwrap();
        let offer = geometry.offer_by_label(&partition.label, partition.start).unwrap();
        let instance = self.nvml.create_gpu_instance(gpu, offer.profile.id, offer.placement).unwrap();
        for _ in 0..compute_instances {
            self.nvml.create_compute_instance(gpu, instance.id, 1).unwrap();
        }
        instance
    }

    /// Whoever made instances on the first GPU removes them, and switches MIG off.
    pub(crate) fn remove_foreign(&self) {
        let gpu = self.gpu(GPU);
        for instance in self.nvml.gpu_instances(gpu).unwrap() {
            for compute in self.nvml.compute_instances(gpu, instance.id).unwrap() {
                self.nvml.destroy_compute_instance(gpu, instance.id, compute.id).unwrap();
            }
            self.nvml.destroy_gpu_instance(gpu, instance.id).unwrap();
        }
        self.nvml.set_mig_mode(gpu, MigMode::Disabled).unwrap();
    }

    /// The live instances of a GPU as (profile id, start, size, number of compute instances), by start.
    pub(crate) fn live(&self, name: &str) -> Vec<(u32, u32, u32, usize)> {
        let gpu = self.gpu(name);
        let mut live: Vec<_> = self
            .nvml
            .gpu_instances(gpu)
            .unwrap()
            .into_iter()
            .map(|instance| {
                let compute = self.nvml.compute_instances(gpu, instance.id).unwrap();
                (instance.profile_id, instance.placement.start, instance.placement.size, compute.len())
            })
            .collect();
        live.sort_by_key(|instance| instance.1);
        live
    }

    pub(crate) fn mig_is_on(&self, name: &str) -> bool {
        matches!(self.nvml.mig_modes(self.gpu(name)), Ok(Some(MigModes { current: MigMode::Enabled, .. })))
    }

    /// Names of the files in the journal directory.
    pub(crate) fn journal_files(&self) -> Vec<String> {
        files(&self.settings().claims)
    }

    /// Names of the files in the CDI directory.
    pub(crate) fn cdi_files(&self) -> Vec<String> {
        files(&self.settings().cdi)
    }

    /// Names of the claims that have device metadata.
    pub(crate) fn metadata_files(&self) -> Vec<String> {
        files(&self.settings().metadata)
    }

    /// A claim's CDI file.
    pub(crate) fn cdi(&self, claim: &Claim) -> serde_json::Value {
        let path = self.settings().cdi.join(format!("k8s.gpu.nvidia.com-claim_{}.json", claim.uid));
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    /// The paths of the device nodes that a claim's CDI file gives to one of its devices.
    pub(crate) fn nodes(&self, claim: &Claim, device: &str) -> Vec<String> {
        let spec = self.cdi(claim);
        let name = format!("{}-{device}", claim.uid);
        let devices = spec["devices"].as_array().unwrap();
        let device = devices.iter().find(|device| device["name"] == name.as_str()).unwrap();
        let nodes = device["containerEdits"]["deviceNodes"].as_array().unwrap();
        nodes.iter().map(|node| node["path"].as_str().unwrap().to_owned()).collect()
    }

    /// Nothing of any claim is left, and the GPU is as it was found.
    pub(crate) fn assert_clean(&self, gpu: &str, context: &str) {
        assert_eq!(self.live(gpu), [], "instances are left: {context}");
        assert!(!self.mig_is_on(gpu), "MIG is still on: {context}");
        assert_eq!(self.journal_files(), [""; 0], "journal: {context}");
        assert_eq!(self.cdi_files(), [""; 0], "CDI: {context}");
        assert_eq!(self.metadata_files(), [""; 0], "device metadata: {context}");
        let locks = files(&self.settings().locks);
        assert!(locks.iter().all(|lock| !lock.starts_with("claim-")), "locks: {context}: {locks:?}");
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

fn files(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

pub(crate) fn address(gpu: &str) -> PciAddress {
    gpu.parse::<DeviceName>().unwrap().gpu()
}

/// A claim for these devices, one request each.
pub(crate) fn claim(uid: &str, devices: &[&str]) -> Claim {
    let devices = devices.iter().enumerate().map(|(number, device)| AllocatedDevice {
        request: format!("request-{number}"),
        subrequest: None,
        pool: "node-1".to_owned(),
        device: (*device).to_owned(),
        share_id: None,
        admin_access: false,
    });
    Claim {
        uid: uid.to_owned(),
        namespace: "team".to_owned(),
        name: format!("claim-{uid}"),
        pod_claim_name: None,
        devices: devices.collect(),
    }
}

/// Late enough for anything that does not wait for someone.
pub(crate) fn late() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Soon enough for what is known to wait in vain.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_millis(200)
}

/// What a crash panics with.
pub(crate) const CRASH: &str = "crash";

/// Counts the steps, and panics at one of them: the moment of a crash.
#[derive(Default)]
pub(crate) struct Crash {
    /// Moments seen so far: each step has one before and one after it.
    seen: Mutex<Vec<(Step, bool)>>,
    /// The number of the moment to crash at.
    at: Option<usize>,
    /// The step to crash after, and how often it comes before.
    after: Option<(Step, usize)>,
}

impl Crash {
    pub(crate) fn at(moment: usize) -> Arc<Crash> {
        Arc::new(Crash { at: Some(moment), ..Crash::default() })
    }

    /// After a step that has come so often before.
    pub(crate) fn after(step: Step, times: usize) -> Arc<Crash> {
        Arc::new(Crash { after: Some((step, times)), ..Crash::default() })
    }

    pub(crate) fn never() -> Arc<Crash> {
        Arc::default()
    }

    /// The steps taken, in order.
    pub(crate) fn steps(&self) -> Vec<Step> {
        self.seen.lock().unwrap().iter().filter(|(_, after)| *after).map(|(step, _)| *step).collect()
    }

    pub(crate) fn moments(&self) -> usize {
        self.seen.lock().unwrap().len()
    }

    fn moment(&self, step: Step, after: bool) {
        let is_now = {
            let mut seen = self.seen.lock().unwrap();
            let times = seen.iter().filter(|moment| **moment == (step, true)).count();
            seen.push((step, after));
            self.at == Some(seen.len() - 1) || after && self.after == Some((step, times))
        };
        if is_now {
            // No message: a crash has none either.
            std::panic::resume_unwind(Box::new(CRASH));
        }
    }
}

impl Watch for Crash {
    fn before(&self, step: Step) {
        self.moment(step, false);
    }

    fn after(&self, step: Step, _: Duration) {
        self.moment(step, true);
    }
}

/// What a call does instead of its work.
#[derive(Clone)]
pub(crate) enum Fault {
    /// None: this call works, a later one is meant.
    Pass,
    /// Fails, and does nothing.
    Fail(Code),
    /// Does its work, and reports that it failed.
    FailAfterwards(Code),
    /// Of `set_mig_mode`: does nothing but make the mode pending, and says this.
    LeavePending(Option<Code>),
    /// Tells that it has come, and does its work when told to.
    Wait { come: mpsc::Sender<()>, go: Arc<Mutex<mpsc::Receiver<()>>> },
}

/// An NVML whose calls fail as they were told, each fault once.
pub(crate) struct Faulty {
    inner: Arc<dyn Nvml>,
    faults: Mutex<VecDeque<(&'static str, Fault)>>,
    processes: Mutex<Vec<Process>>,
    /// A mode that waits for a reset.
    pending: Mutex<Option<MigMode>>,
}

impl Faulty {
    fn new(inner: Arc<dyn Nvml>) -> Faulty {
        Faulty { inner, faults: Mutex::default(), processes: Mutex::default(), pending: Mutex::default() }
    }

    /// The next call of a function meets this fault.
    pub(crate) fn next(&self, function: &'static str, fault: Fault) {
        self.faults.lock().unwrap().push_back((function, fault));
    }

    /// The next call of a function waits. Returns what tells that it has come, and what lets it go.
    pub(crate) fn hold(&self, function: &'static str) -> (mpsc::Receiver<()>, mpsc::Sender<()>) {
        let ((come, has_come), (let_go, go)) = (mpsc::channel(), mpsc::channel());
        self.next(function, Fault::Wait { come, go: Arc::new(Mutex::new(go)) });
        (has_come, let_go)
    }

    /// These processes are seen on every GPU.
    pub(crate) fn set_processes(&self, processes: &[Process]) {
        *self.processes.lock().unwrap() = processes.to_vec();
    }

    /// From now on every instance is in use.
    pub(crate) fn occupy(&self) {
        for _ in 0..50 {
            self.next("destroy_compute_instance", Fault::Fail(Code::InUse));
            self.next("destroy_gpu_instance", Fault::Fail(Code::InUse));
        }
    }

    /// Whether every fault was met.
    pub(crate) fn is_done(&self) -> bool {
        self.faults.lock().unwrap().is_empty()
    }

    pub(crate) fn clear(&self) {
        self.faults.lock().unwrap().clear();
    }

    fn call<T>(&self, function: &'static str, work: impl FnOnce(&dyn Nvml) -> Result<T, Error>) -> Result<T, Error> {
        let fault = {
            let mut faults = self.faults.lock().unwrap();
            let position = faults.iter().position(|(name, _)| *name == function);
            position.and_then(|position| faults.remove(position)).map(|(_, fault)| fault)
        };
        match fault {
            None | Some(Fault::Pass | Fault::LeavePending(_)) => work(&*self.inner),
            Some(Fault::Fail(code)) => Err(Error { call: function, code }),
            Some(Fault::FailAfterwards(code)) => {
                work(&*self.inner)?;
                Err(Error { call: function, code })
            }
            Some(Fault::Wait { come, go }) => {
                come.send(()).unwrap();
                go.lock().unwrap().recv_timeout(Duration::from_secs(60)).expect("someone lets it go");
                work(&*self.inner)
            }
        }
    }
}

impl Nvml for Faulty {
    fn driver_version(&self) -> Result<String, Error> {
        self.call("driver_version", |nvml| nvml.driver_version())
    }

    fn cuda_driver_version(&self) -> Result<CudaVersion, Error> {
        self.inner.cuda_driver_version()
    }

    fn gpu_count(&self) -> Result<u32, Error> {
        self.inner.gpu_count()
    }

    fn gpu(&self, index: u32) -> Result<Gpu, Error> {
        self.inner.gpu(index)
    }

    fn gpu_at(&self, address: PciAddress) -> Result<Gpu, Error> {
        self.call("gpu_at", |nvml| nvml.gpu_at(address))
    }

    fn pci_address(&self, gpu: Gpu) -> Result<PciAddress, Error> {
        self.inner.pci_address(gpu)
    }

    fn facts(&self, gpu: Gpu) -> Result<GpuFacts, Error> {
        self.call("facts", |nvml| nvml.facts(gpu))
    }

    fn mig_modes(&self, gpu: Gpu) -> Result<Option<MigModes>, Error> {
        let pending = *self.pending.lock().unwrap();
        let modes = self.call("mig_modes", |nvml| nvml.mig_modes(gpu))?;
        Ok(modes.map(|modes| MigModes { pending: pending.unwrap_or(modes.pending), ..modes }))
    }

    fn set_mig_mode(&self, gpu: Gpu, mode: MigMode) -> Result<(), Error> {
        let leaves_pending = {
            let mut faults = self.faults.lock().unwrap();
            match faults.front() {
                Some(("set_mig_mode", Fault::LeavePending(code))) => {
                    let code = *code;
                    faults.pop_front();
                    Some(code)
                }
                _ => None,
            }
        };
        *self.pending.lock().unwrap() = leaves_pending.map(|_| mode);
        match leaves_pending {
            Some(Some(code)) => Err(Error { call: "set_mig_mode", code }),
            Some(None) => Ok(()),
            None => self.call("set_mig_mode", |nvml| nvml.set_mig_mode(gpu, mode)),
        }
    }

    fn gpu_instance_profiles(&self, gpu: Gpu) -> Result<Vec<Profile>, Error> {
        self.call("gpu_instance_profiles", |nvml| nvml.gpu_instance_profiles(gpu))
    }

    fn gpu_instances(&self, gpu: Gpu) -> Result<Vec<GpuInstance>, Error> {
        self.call("gpu_instances", |nvml| nvml.gpu_instances(gpu))
    }

    fn create_gpu_instance(&self, gpu: Gpu, profile_id: u32, placement: Placement) -> Result<GpuInstance, Error> {
        self.call("create_gpu_instance", |nvml| nvml.create_gpu_instance(gpu, profile_id, placement))
    }

    fn destroy_gpu_instance(&self, gpu: Gpu, gpu_instance: u32) -> Result<(), Error> {
        self.call("destroy_gpu_instance", |nvml| nvml.destroy_gpu_instance(gpu, gpu_instance))
    }

    fn compute_instances(&self, gpu: Gpu, gpu_instance: u32) -> Result<Vec<ComputeInstance>, Error> {
        self.call("compute_instances", |nvml| nvml.compute_instances(gpu, gpu_instance))
    }

    fn create_compute_instance(
        &self,
        gpu: Gpu,
        gpu_instance: u32,
        compute_slices: u32,
    ) -> Result<ComputeInstance, Error> {
        self.call("create_compute_instance", |nvml| nvml.create_compute_instance(gpu, gpu_instance, compute_slices))
    }

    fn destroy_compute_instance(&self, gpu: Gpu, gpu_instance: u32, compute_instance: u32) -> Result<(), Error> {
        self.call("destroy_compute_instance", |nvml| nvml.destroy_compute_instance(gpu, gpu_instance, compute_instance))
    }

    fn processes(&self, gpu: Gpu) -> Result<Vec<Process>, Error> {
        self.call("processes", |nvml| nvml.processes(gpu))
            .map(|seen| [seen, self.processes.lock().unwrap().clone()].concat())
    }
}
