//! A node with two plugin processes, and the model beside it.

mod check;
mod counts;
mod mishaps;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use kerf_kubelet_plugin::engine::{
    Claim, DeviceName, Engine, ForeignPolicy, NoWatch, PrepareError, ReleaseError, Released, Settings, UnprepareError,
    Watch,
};
use kerf_kubelet_plugin::reconcile::{Decision, Gone, Standing};
use kerf_mig::Geometry;
use kerf_nvml::PciAddress;
use kerf_nvml_sim::client::Client;
use serde_json::Value;

use super::op::{Ask, Call, Op};
use super::state::{Device, File, Instance, Known, Model, OnGpu, Outcome, Truth, Why};
use crate::engine_node::{CRASH, Crash, Fault, Faulty, Node, claim, late, soon, wishes};
use crate::fault_matrix::is_clear;

pub(super) use counts::Counts;

const GPUS: &str = "[{product: h100-80gb, count: 4}]";

/// A request of the kubelet: Prepare with devices, or Unprepare.
#[derive(Clone, Debug)]
struct Request {
    uid: String,
    prepare: Option<Vec<Device>>,
}

/// A plugin process.
struct Plugin {
    engine: Engine,
    faulty: Arc<Faulty>,
    /// Whether it waits before it condemns.
    patient: bool,
}

pub(super) struct World {
    node: Node,
    client: Client,
    /// The devices of each GPU, the whole one first.
    devices: Vec<Vec<Device>>,
    plugins: Vec<Plugin>,
    model: Model,
    /// Every claim that was ever asked for.
    seen: Vec<(String, Vec<Device>)>,
    /// Those that the API server has no more.
    vanished: BTreeSet<String>,
    /// Since when the model has known a claim as gone.
    gone_since: BTreeMap<String, u64>,
    gone: Gone,
    start: tokio::time::Instant,
    minutes: u64,
    boot: usize,
    pub(super) counts: Counts,
}

impl World {
    pub(super) fn new(policy: ForeignPolicy) -> World {
        let node = Node::start(GPUS);
        let client = Client::new(node.root());
        let state = client.state().unwrap();
        let devices = state.gpus.iter().enumerate().map(|(gpu, state)| {
            let address: PciAddress = state.pci_bus_id.parse().unwrap();
            let geometry = Geometry::new(node.nvml.gpu_instance_profiles(node.nvml.gpu_at(address).unwrap()).unwrap());
            let whole = Device { name: DeviceName::whole(address).to_string(), gpu, part: None };
            let offers = geometry.offers();
            // Those with engines of which a GPU has few exclude each other although they do not overlap.
            let plain = offers.iter().filter(|offer| !offer.profile.label().contains('-'));
            let parts = plain.map(|offer| Device {
                name: DeviceName::partition(address, offer.profile, offer.placement).to_string(),
                gpu,
                part: Some((offer.profile.id, offer.placement)),
            });
            [whole].into_iter().chain(parts).collect::<Vec<_>>()
        });
        let devices = devices.collect();
        let model = Model { policy, claims: BTreeMap::new(), foreign: Vec::new(), busy: Vec::new() };
        let mut world = World {
            node,
            client,
            devices,
            plugins: Vec::new(),
            model,
            seen: Vec::new(),
            vanished: BTreeSet::new(),
            gone_since: BTreeMap::new(),
            gone: Gone::default(),
            start: tokio::time::Instant::now(),
            minutes: 0,
            boot: 1,
            counts: Counts::default(),
        };
        world.plugins = [true, true].map(|patient| world.plugin(patient, Arc::new(NoWatch))).into();
        world
    }

    fn settings(&self, patient: bool) -> Settings {
        Settings {
            boot_id: format!("boot {}", self.boot),
            patience: if patient { Duration::from_secs(1200) } else { Duration::ZERO },
            wishes: wishes(self.model.policy),
            ..self.node.settings()
        }
    }

    fn plugin(&self, patient: bool, watch: Arc<dyn Watch>) -> Plugin {
        let (engine, faulty) = self.node.faulty_engine_watched(self.settings(patient), watch);
        Plugin { engine, faulty, patient }
    }

    fn restart(&mut self, number: usize, patient: bool) {
        self.plugins[number] = self.plugin(patient, Arc::new(NoWatch));
    }

    fn truth(&self) -> Truth {
        let state = self.client.state().unwrap();
        let migs: Vec<_> = state.gpus.iter().map(|gpu| gpu.mig.as_ref().expect("each has MIG")).collect();
        let instances = migs.iter().enumerate().flat_map(|(gpu, mig)| {
            mig.instances.iter().map(move |it| Instance {
                gpu,
                id: it.id,
                part: (it.profile_id, it.placement),
                compute: it.compute_instances.iter().map(|compute| compute.id).collect(),
            })
        });
        Truth { instances: instances.collect(), mig: migs.iter().map(|mig| mig.current).collect() }
    }

    /// One operation, as far as there is something to pick.
    pub(super) fn act(&mut self, operation: &Op) -> anyhow::Result<()> {
        match operation {
            Op::Call(Call { engine, ask }) => {
                if let Some(request) = self.request(ask) {
                    self.call(*engine, &request)?;
                }
            }
            Op::Crash { call: Call { engine, ask }, moment } => {
                if let Some(request) = self.request(ask) {
                    self.crash(*engine, &request, *moment)?;
                }
            }
            Op::Fault { call: Call { engine, ask }, function, nth, code, after } => {
                if let Some(request) = self.request(ask) {
                    let faulty = &self.plugins[*engine].faulty;
                    (1..*nth).for_each(|_| faulty.next(function, Fault::Pass));
                    faulty.next(function, if *after { Fault::FailAfterwards(*code) } else { Fault::Fail(*code) });
                    self.call_with_fault(*engine, &request)?;
                }
            }
            Op::Both(one, other) => {
                if let (Some(one), Some(other)) = (self.request(one), self.request(other)) {
                    self.both(&[one, other])?;
                }
            }
            Op::Restart { engine, patient } => self.restart(*engine, *patient),
            Op::Retry { engine } => self.retry(*engine)?,
            Op::Reconcile { engine, minutes, outage } => self.reconcile(*engine, *minutes, *outage)?,
            Op::Vanishes(number) => {
                let known: Vec<_> = self.model.claims.keys().collect();
                self.vanished.extend(pick(&known, *number).map(|uid| (*uid).clone()));
            }
            Op::Reload => {
                self.client.reload().unwrap();
                self.begin_anew(false);
            }
            Op::Reboot => {
                self.plugins.clear();
                self.client.reboot().unwrap();
                self.node.cdi_files().iter().for_each(|name| fs::remove_file(self.cdi_dir().join(name)).unwrap());
                self.boot += 1;
                self.gone = Gone::default();
                self.gone_since.clear();
                self.begin_anew(true);
                self.plugins = [true, true].map(|patient| self.plugin(patient, Arc::new(NoWatch))).into();
            }
            Op::ForeignComes { gpu, device, compute } => self.foreign_comes(*gpu, *device, *compute),
            Op::ForeignGoes(number) => {
                if let Some(foreign) = pick(&self.model.foreign, *number).cloned()
                    && self.client.destroy(foreign.gpu, foreign.id).is_ok()
                {
                    self.model.foreign.retain(|it| *it != foreign);
                }
            }
            Op::Robbed(number) => self.rob(*number),
            Op::BusyComes(number) => self.busy_comes(*number),
            Op::BusyGoes(number) => {
                if let Some(busy) = pick(&self.model.busy, *number).cloned() {
                    self.client.clear(busy.id).unwrap();
                    self.model.busy.retain(|it| it.id != busy.id);
                }
            }
            Op::Spoilt { claim, file, content } => self.spoil(*claim, *file, *content),
        }
        self.model.disown(&self.truth());
        Ok(())
    }

    /// The request that is meant, of claims that there are.
    fn request(&mut self, ask: &Ask) -> Option<Request> {
        let recent = &self.seen[self.seen.len().saturating_sub(12)..];
        match ask {
            Ask::New(picks) => {
                let uid = format!("c{}", self.seen.len());
                let device = |(gpu, number): &(usize, usize)| {
                    let devices = &self.devices[*gpu];
                    // Each eighth is a whole one.
                    let number = if number % 8 == 0 { 0 } else { 1 + number % (devices.len() - 1) };
                    devices[number].clone()
                };
                let devices: Vec<_> = picks.iter().map(device).collect();
                self.seen.push((uid.clone(), devices.clone()));
                Some(Request { uid, prepare: Some(devices) })
            }
            Ask::Again(number) => {
                let (uid, devices) = pick(recent, *number)?.clone();
                Some(Request { uid, prepare: Some(devices) })
            }
            Ask::Unprepare(number) => {
                let known: Vec<_> = self.model.claims.keys().cloned().collect();
                let recent = recent.iter().map(|(uid, _)| uid.clone()).collect::<Vec<_>>();
                let from = if known.is_empty() || number % 5 == 0 { recent } else { known };
                Some(Request { uid: pick(&from, *number)?.clone(), prepare: None })
            }
            Ask::Stranger => Some(Request { uid: "never-seen".to_owned(), prepare: None }),
        }
    }

    fn expect(&self, model: &mut Model, request: &Request, patient: bool, truth: &Truth) -> Outcome {
        match &request.prepare {
            Some(devices) => model.prepare(&request.uid, devices),
            None => model.unprepare(&request.uid, patient, truth),
        }
    }

    /// Whether the release has to wait for somebody.
    fn waits(&self, request: &Request) -> bool {
        request.prepare.is_none() && self.model.is_busy(&request.uid, &self.truth())
    }

    fn deadline(&self, request: &Request) -> Instant {
        if self.waits(request) { soon() } else { late() }
    }

    fn call(&mut self, number: usize, request: &Request) -> anyhow::Result<()> {
        let plugin = &self.plugins[number];
        let mut expected = self.model.clone();
        let outcome = self.expect(&mut expected, request, plugin.patient, &self.truth());
        let (actual, _) = ask(&plugin.engine, request, self.deadline(request));
        self.counts.count(&actual);
        ensure!(actual == outcome, "{request:?} ends with {actual:?} instead of {outcome:?}");
        self.model = expected;
        self.learn(request, Some(&actual))
    }

    fn crash(&mut self, number: usize, request: &Request, moment: usize) -> anyhow::Result<()> {
        let patient = self.plugins[number].patient;
        self.plugins[number] = self.plugin(patient, Crash::at(moment));
        let deadline = self.deadline(request);
        let mut expected = self.model.clone();
        let outcome = self.expect(&mut expected, request, patient, &self.truth());
        let call = AssertUnwindSafe(|| ask(&self.plugins[number].engine, request, deadline));
        let ended = match catch_unwind(call) {
            Ok((actual, _)) => {
                ensure!(actual == outcome, "{request:?} ends with {actual:?} instead of {outcome:?}");
                self.counts.count(&actual);
                self.model = expected;
                Some(actual)
            }
            Err(why) if why.downcast_ref() == Some(&CRASH) => {
                self.counts.add_one("crash");
                self.is_uncertain(request);
                None
            }
            Err(why) => resume_unwind(why),
        };
        self.restart(number, patient);
        self.learn(request, ended.as_ref())
    }

    fn call_with_fault(&mut self, number: usize, request: &Request) -> anyhow::Result<()> {
        let Plugin { engine, faulty, patient } = &self.plugins[number];
        let mut expected = self.model.clone();
        let outcome = self.expect(&mut expected, request, *patient, &self.truth());
        let (actual, error) = ask(engine, request, self.deadline(request));
        let met = faulty.is_done();
        faulty.clear();
        // What a refused call had begun need not be undone when a fault has met that.
        if actual == outcome && !(met && matches!(actual, Outcome::Refused(_))) {
            self.counts.count(&actual);
            self.model = expected;
            self.learn(request, Some(&actual))
        } else {
            ensure!(met, "without a fault {request:?} ends with {actual:?} instead of {outcome:?}");
            match (&actual, &outcome) {
                (Outcome::Condemned, Outcome::Released) if !patient => {}
                (Outcome::Failed(_) | Outcome::Refused(_) | Outcome::Busy, _) => {
                    let error = error.expect("it fails");
                    is_clear(&error).with_context(|| format!("the error is {error:?}"))?;
                }
                _ => anyhow::bail!("{request:?} ends with {actual:?} instead of {outcome:?}"),
            }
            self.counts.add_one("fault");
            self.is_uncertain(request);
            self.learn(request, None)
        }
    }

    /// Two requests at the same time, to two plugins: as one after the other.
    fn both(&mut self, requests: &[Request; 2]) -> anyhow::Result<()> {
        if requests.iter().any(|request| self.waits(request)) {
            return Ok(());
        }
        let before = self.truth();
        let outcomes = std::thread::scope(|scope| {
            let plugins = &self.plugins;
            let threads = [0, 1].map(|number| {
                let request = &requests[number];
                scope.spawn(move || ask(&plugins[number].engine, request, late()).0)
            });
            threads.map(|thread| thread.join().unwrap_or_else(|why| resume_unwind(why)))
        });
        outcomes.iter().for_each(|outcome| self.counts.count(outcome));
        self.counts.add_one("at the same time");
        let mut why = String::new();
        for order in [[0, 1], [1, 0]] {
            let mut model = self.model.clone();
            let fits = order.iter().all(|number| {
                let undisturbed = model.clone();
                let expected = self.expect(&mut model, &requests[*number], self.plugins[*number].patient, &before);
                // One that is refused later holds its devices for a moment.
                let for_a_moment = outcomes[*number] == Outcome::Refused(Why::Held)
                    && matches!(outcomes[1 - *number], Outcome::Refused(Why::Foreign | Why::ModeBusy))
                    && overlap(requests);
                if for_a_moment {
                    model = undisturbed;
                }
                for_a_moment || outcomes[*number] == expected
            });
            if !fits {
                continue;
            }
            let former = std::mem::replace(&mut self.model, model);
            let mut learn = requests.iter().zip(&outcomes);
            let learnt = learn.try_for_each(|(request, outcome)| self.learn(request, Some(outcome)));
            self.model.disown(&self.truth());
            match learnt.and_then(|()| self.check()) {
                Ok(()) => return Ok(()),
                Err(error) => why = error.to_string(),
            }
            self.model = former;
        }
        anyhow::bail!("in no order {requests:?} end with {outcomes:?}: {why}");
    }

    /// A call was cut off or failed for a reason that the model does not know.
    fn is_uncertain(&mut self, request: &Request) {
        let is_prepare = request.prepare.is_some();
        match (self.model.claims.get_mut(&request.uid), &request.prepare) {
            // What a container has it keeps.
            (Some(known), _) if is_prepare && known.on_gpu == OnGpu::Whole => {}
            (Some(known), _) => known.on_gpu = OnGpu::Part,
            (None, Some(devices)) => {
                let (journal, cdi, on_gpu) = (File::Absent, File::Absent, OnGpu::Part);
                let devices = devices.clone();
                let known = Known { devices, journal, cdi, on_gpu, condemned: None, kept: Vec::new() };
                self.model.claims.insert(request.uid.clone(), known);
            }
            (None, None) => {}
        }
        self.observe_foreign(request);
    }

    /// A Prepare that is refused or fails may have made room before, where the policy lets it.
    fn observe_foreign(&mut self, request: &Request) {
        if self.model.policy == ForeignPolicy::Keep {
            return;
        }
        let truth = self.truth();
        let Model { foreign, busy, .. } = &mut self.model;
        let is_idle = |foreign: &Instance| !busy.iter().any(|busy| busy.uses(foreign));
        let is_in_the_way = |foreign: &Instance| request.prepare.iter().flatten().any(|device| device.meets(foreign));
        let may_go = |foreign: &Instance| is_idle(foreign) && is_in_the_way(foreign);
        for foreign in foreign.iter_mut().filter(|foreign| may_go(foreign)) {
            // Its compute instances go first, and it may stay without.
            let left = truth.instances.iter().find(|it| it.is_same(foreign));
            foreign.compute.retain(|id| left.is_some_and(|left| left.compute.contains(id)));
        }
        foreign.retain(|foreign| truth.instances.iter().any(|left| left.is_same(foreign)) || !may_go(foreign));
    }

    /// Takes over what the model does not foresee, after a call with this outcome if any.
    fn learn(&mut self, request: &Request, outcome: Option<&Outcome>) -> anyhow::Result<()> {
        let is_known = self.model.claims.contains_key(&request.uid);
        self.observe(&request.uid);
        let known = self.model.claims.get_mut(&request.uid);
        match outcome {
            // One that is released right after it has none.
            Some(Outcome::Prepared(_)) if is_known => {
                let files = known.map(|known| (known.journal, known.cdi));
                ensure!(files == Some((File::Whole, File::Whole)), "{} is prepared and has {files:?}", request.uid);
            }
            Some(Outcome::Refused(_)) => self.observe_foreign(request),
            Some(_) => {}
            None => {
                // What is on the GPU and in no file is a leak, and no orphan.
                known.into_iter().filter(|known| !known.is_explained()).for_each(|it| it.on_gpu = OnGpu::Nothing);
            }
        }
        Ok(())
    }

    /// Takes over from the disk the files of a claim.
    fn observe(&mut self, uid: &str) {
        let read = |path: std::path::PathBuf, is_whole: &dyn Fn(&Value) -> bool| match fs::read(path) {
            Err(_) => (File::Absent, Value::Null),
            Ok(bytes) => match serde_json::from_slice(&bytes) {
                Ok(value) if is_whole(&value) => (File::Whole, value),
                _ => (File::Damaged, Value::Null),
            },
        };
        let (journal, record) = read(self.journal_dir().join(format!("{uid}.json")), &|value| value["version"] == 1);
        let (cdi, _) = read(self.cdi_path(uid), &|value| value["devices"].is_array());
        let aside = self.journal_dir().join(format!("{uid}.damaged")).exists();
        let is_told = self.node.settings().metadata.join(uid).exists();
        if (journal, cdi, aside || is_told) == (File::Absent, File::Absent, false) {
            self.model.forget(uid);
            return;
        }
        let Some(known) = self.model.claims.get_mut(uid) else { return };
        (known.journal, known.cdi) = (journal, cdi);
        if journal != File::Whole {
            known.condemned = None;
            return;
        }
        let partitions = record["partitions"].as_array().unwrap();
        let name = |partition: &Value| partition["device"].as_str().unwrap().to_owned();
        let left = partitions.iter().filter(|partition| partition["state"] != "Planned").map(name);
        // What is known by name only may be there.
        let is_placed = |it: &&Value| partitions.iter().any(|partition| partition["device"] == it["device"]);
        let results = record["results"].as_array().unwrap().iter();
        let unplaced = results.filter(|it| !is_placed(it)).map(name).filter(|name| name.contains("-mig-"));
        known.condemned = (record["condemned"] == true).then(|| left.chain(unplaced).collect());
        let (own, kept): (Vec<_>, Vec<_>) = partitions
            .iter()
            .filter(|partition| partition["state"] == "Carved")
            .partition(|partition| partition["kept"] != true);
        let [own, kept] = [own, kept].map(|partitions| partitions.into_iter().map(name).collect::<Vec<_>>());
        self.model.sync_taken(uid, &own, &kept);
    }

    fn retry(&mut self, number: usize) -> anyhow::Result<()> {
        let truth = self.truth();
        let condemned: Vec<_> = self.model.claims.iter().filter(|(_, known)| known.condemned.is_some()).collect();
        let (busy, free): (Vec<_>, Vec<_>) =
            condemned.into_iter().map(|(uid, _)| uid.clone()).partition(|uid| self.model.is_busy(uid, &truth));
        let retried = self.plugins[number].engine.retry_condemned()?;
        let removed: Vec<_> = retried.removed.iter().map(|claim| claim.uid.clone()).collect();
        ensure!(same(&removed, &free), "of {free:?} without users {removed:?} are removed");
        ensure!(retried.left == busy.len(), "{} are left of {busy:?}", retried.left);
        for uid in &free {
            self.counts.add_one("removed later");
            self.model.forget(uid);
        }
        busy.iter().for_each(|uid| self.observe(uid));
        Ok(())
    }

    /// A round of the reconciler.
    fn reconcile(&mut self, number: usize, minutes: u64, outage: bool) -> anyhow::Result<()> {
        self.minutes += minutes;
        let now = self.start + Duration::from_secs(60 * self.minutes);
        let known = self.plugins[number].engine.known_claims()?;
        let uids: Vec<_> = known.iter().map(|claim| claim.uid.clone()).collect();
        let expected: Vec<_> = self.model.claims.keys().cloned().collect();
        ensure!(same(&uids, &expected), "known are {uids:?} instead of {expected:?}");
        for claim in known {
            let standing = match (outage, self.vanished.contains(&claim.uid)) {
                (true, _) => Standing::Unknown,
                (false, true) => Standing::Gone,
                (false, false) => Standing::Here,
            };
            let since = self.gone_since.get(&claim.uid).copied();
            let decision = self.gone.judge(&claim.uid, standing, claim.earlier_boot, now);
            let is_due = since.is_some_and(|since| self.minutes >= since + 2) || claim.earlier_boot;
            let release = standing == Standing::Gone && is_due;
            ensure!((decision == Decision::Release) == release, "{claim:?} {standing:?} since {since:?}: {decision:?}");
            if standing == Standing::Gone {
                self.gone_since.entry(claim.uid.clone()).or_insert(self.minutes);
            }
            if release {
                self.release_left_behind(number, &claim.uid)?;
            }
        }
        if !outage {
            self.sweep(number)?;
        }
        let left: BTreeSet<_> = self.model.claims.keys().map(String::as_str).collect();
        self.gone.retain(&left);
        self.gone_since.retain(|uid, _| left.contains(uid.as_str()));
        Ok(())
    }

    fn release_left_behind(&mut self, number: usize, uid: &str) -> anyhow::Result<()> {
        let Plugin { engine, patient, .. } = &self.plugins[number];
        let mut expected = self.model.clone();
        let in_use = expected.uses_whole_gpu(uid);
        let is_of_now = expected.claims[uid].on_gpu != OnGpu::Nothing;
        let outcome = expected.unprepare(uid, *patient, &self.truth());
        let Some(left_behind) = engine.release_left_behind(uid, &|| true).transpose() else {
            ensure!(in_use, "{uid} is left behind and kept, though nothing uses a GPU that is its own");
            self.counts.add_one("left running");
            self.observe(uid);
            return Ok(());
        };
        ensure!(!(in_use && is_of_now), "{uid} is released, though something uses a GPU that is its own");
        let (actual, _) = released(left_behind);
        ensure!(actual == outcome, "{uid} is left behind and ends with {actual:?} instead of {outcome:?}");
        self.counts.add_one("left behind");
        self.model = expected;
        self.observe(uid);
        Ok(())
    }

    /// Idle instances of others go, where the policy says so; what else goes the check of the model finds.
    fn sweep(&mut self, number: usize) -> anyhow::Result<()> {
        let removed = self.plugins[number].engine.sweep_foreign();
        ensure!(removed.is_empty() || self.model.policy == ForeignPolicy::Delete, "{removed:?} are swept");
        for removed in removed {
            let part = (removed.instance.profile_id, removed.instance.placement);
            let id = removed.instance.id;
            let gpu = self.devices.iter().position(|it| it[0].name == DeviceName::whole(removed.gpu).to_string());
            let is_it = |it: &Instance| (Some(it.gpu), it.id, it.part) == (gpu, id, part);
            let is_idle = |it: &Instance| !self.model.busy.iter().any(|busy| busy.uses(it));
            ensure!(self.model.foreign.iter().any(|it| is_it(it) && is_idle(it)), "{removed:?} is swept");
            self.counts.add_one("swept");
            self.model.foreign.retain(|it| !is_it(it));
        }
        Ok(())
    }

    fn begin_anew(&mut self, reboot: bool) {
        self.client.clear_all().unwrap();
        self.model.begin_anew(reboot);
        let uids: Vec<_> = self.model.claims.keys().cloned().collect();
        uids.iter().for_each(|uid| self.observe(uid));
    }

    fn journal_dir(&self) -> std::path::PathBuf {
        self.node.settings().claims
    }

    fn cdi_dir(&self) -> std::path::PathBuf {
        self.node.settings().cdi
    }

    fn cdi_path(&self, uid: &str) -> std::path::PathBuf {
        self.cdi_dir().join(format!("k8s.gpu.nvidia.com-claim_{uid}.json"))
    }
}

/// Makes a call. Also tells the text of an error.
fn ask(engine: &Engine, request: &Request, deadline: Instant) -> (Outcome, Option<String>) {
    let Some(devices) = &request.prepare else { return released(engine.unprepare(&request.uid, deadline)) };
    let names: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
    let claim: Claim = claim(&request.uid, &names);
    match engine.prepare(&claim, deadline) {
        Ok(prepared) => (Outcome::Prepared(prepared), None),
        Err(error) => {
            let why = match &error {
                PrepareError::Held { .. } | PrepareError::Condemned { .. } => Some(Why::Held),
                PrepareError::Overlap { .. } => Some(Why::Overlap),
                PrepareError::Foreign { .. } | PrepareError::ForeignInUse { .. } => Some(Why::Foreign),
                PrepareError::MigModeBusy { .. } => Some(Why::ModeBusy),
                _ => None,
            };
            let text = error.to_string();
            (why.map_or_else(|| Outcome::Failed(text.clone()), Outcome::Refused), Some(text))
        }
    }
}

fn released(result: Result<Released, UnprepareError>) -> (Outcome, Option<String>) {
    match result {
        Ok(Released::Gone) => (Outcome::Released, None),
        Ok(Released::Condemned(_)) => (Outcome::Condemned, None),
        Err(error) => {
            let text = error.to_string();
            match error {
                UnprepareError::Release(ReleaseError::Busy { .. }) => (Outcome::Busy, Some(text)),
                _ => (Outcome::Failed(text.clone()), Some(text)),
            }
        }
    }
}

/// Whether both requests want a part of the same.
fn overlap([one, other]: &[Request; 2]) -> bool {
    let mut wanted = one.prepare.iter().flatten();
    wanted.any(|one| other.prepare.iter().flatten().any(|other| one.overlaps(other)))
}

/// Whether both are of the same, in any order.
fn same(one: &[String], other: &[String]) -> bool {
    one.iter().collect::<BTreeSet<_>>() == other.iter().collect::<BTreeSet<_>>() && one.len() == other.len()
}

fn pick<T>(from: &[T], number: usize) -> Option<&T> {
    (!from.is_empty()).then(|| &from[number % from.len()])
}
