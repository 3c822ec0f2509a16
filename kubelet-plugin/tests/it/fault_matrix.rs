//! Every NVML call fails once, with every code that NVML has for it: whoever asked is told what to do, nothing is left that
//! the journal does not explain, and the next try works.
//!
//! Once between the engine and NVML, where a whole function of the trait fails, and once in the driver, where any of the C
//! calls behind it does.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use kerf_kubelet_plugin::engine::{Claim, Engine, PreparedDevice};
use kerf_mig::Placement;
use kerf_nvml::{Code, MigMode};
use kerf_nvml_sim::client::Client;
use kerf_nvml_sim::fault::CallFault;

use crate::engine_node::{Fault, Faulty, GPU, H100, MIG_1G, MIG_3G, Node, claim};
use crate::settings;

/// Longer than any call here takes; no fault makes one wait longer.
const DEADLINE: Duration = Duration::from_secs(10);

/// What NVML may say of a failure (nvml.h). First those that mean something to the engine, and one for all that do not.
const CODES: [Code; 13] = [
    Code::Unknown,
    Code::InUse,
    Code::NotFound,
    Code::NotSupported,
    Code::GpuIsLost,
    Code::ResetRequired,
    Code::InsufficientResources,
    Code::InvalidArgument,
    Code::NoPermission,
    Code::InsufficientSize,
    Code::Timeout,
    Code::DriverNotLoaded,
    Code::Uninitialized,
];

/// So many of them tell something apart.
const TOLD_APART: usize = 4;

/// The functions of the trait that the engine calls, and whether they change the GPU.
const TRAIT: [(&str, bool); 13] = [
    ("gpu_at", false),
    ("facts", false),
    ("mig_modes", false),
    ("set_mig_mode", true),
    ("gpu_instance_profiles", false),
    ("gpu_instances", false),
    ("create_gpu_instance", true),
    ("destroy_gpu_instance", true),
    ("compute_instances", false),
    ("create_compute_instance", true),
    ("destroy_compute_instance", true),
    ("driver_version", false),
    ("processes", false),
];

/// The C functions behind them.
const DRIVER: [(&str, bool); 24] = [
    ("nvmlSystemGetDriverVersion", false),
    ("nvmlDeviceGetHandleByPciBusId", false),
    ("nvmlDeviceGetUUID", false),
    ("nvmlDeviceGetMinorNumber", false),
    ("nvmlDeviceGetName", false),
    ("nvmlDeviceGetBrand", false),
    ("nvmlDeviceGetArchitecture", false),
    ("nvmlDeviceGetCudaComputeCapability", false),
    ("nvmlDeviceGetMemoryInfo", false),
    ("nvmlDeviceGetMigMode", false),
    ("nvmlDeviceSetMigMode", true),
    ("nvmlDeviceGetGpuInstanceProfileInfo", false),
    ("nvmlDeviceGetGpuInstanceProfileInfoV", false),
    ("nvmlDeviceGetGpuInstancePossiblePlacements", false),
    ("nvmlDeviceGetGpuInstances", false),
    ("nvmlDeviceGetGpuInstanceById", false),
    ("nvmlGpuInstanceGetInfo", false),
    ("nvmlDeviceCreateGpuInstanceWithPlacement", true),
    ("nvmlGpuInstanceDestroy", true),
    ("nvmlGpuInstanceGetComputeInstanceProfileInfo", false),
    ("nvmlGpuInstanceGetComputeInstances", false),
    ("nvmlGpuInstanceCreateComputeInstance", true),
    ("nvmlComputeInstanceGetInfo", false),
    ("nvmlComputeInstanceDestroy", true),
];

/// Which of these calls meets the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum During {
    /// Of a claim that is new.
    Prepare,
    /// Of a claim that is prepared: a container may run in it.
    Repeat,
    /// After a driver reload has taken what was carved.
    Remake,
    Unprepare,
    /// Unprepare of a claim whose journal was damaged: the CDI file stands for it.
    Rescue,
}

impl During {
    fn is_release(self) -> bool {
        matches!(self, During::Unprepare | During::Rescue)
    }
}

/// The `nth` call of a function fails, before or after it has done its work.
#[derive(Clone, Copy, Debug)]
struct Case {
    during: During,
    function: &'static str,
    nth: u32,
    code: Code,
    after: bool,
}

/// Where the fault is put.
enum Layer {
    Trait(Arc<Faulty>),
    Driver(Client),
}

impl Layer {
    fn arm(&self, case: Case) {
        match self {
            Layer::Trait(faulty) => {
                (1..case.nth).for_each(|_| faulty.next(case.function, Fault::Pass));
                let fault = if case.after { Fault::FailAfterwards } else { Fault::Fail };
                faulty.next(case.function, fault(case.code));
            }
            Layer::Driver(client) => {
                let fault = CallFault::new(case.function).nth(case.nth);
                let code = kerf_nvml_sim::code::Code(case.code.number());
                client.arm(if case.after { fault.fails_after(code) } else { fault.fails(code) }).unwrap();
            }
        }
    }

    /// Whether the fault was met. Later calls work.
    fn disarm(&self) -> bool {
        match self {
            Layer::Trait(faulty) => {
                let met = faulty.is_done();
                faulty.clear();
                met
            }
            Layer::Driver(client) => {
                let met = client.faults().unwrap().iter().any(|armed| armed.met > 0);
                client.clear_all().unwrap();
                met
            }
        }
    }
}

/// Everything that a claim leaves on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sight {
    mig: bool,
    /// Profile, placement and number of compute instances.
    instances: Vec<(u32, Placement, usize)>,
    journal: Vec<String>,
    cdi: Vec<(String, String)>,
}

/// A node with one claim on it, and what it looks like when that is prepared.
struct Bench {
    node: Node,
    client: Client,
    claim: Claim,
    in_driver: bool,
    prepared: Vec<PreparedDevice>,
    whole: Sight,
}

/// What came of the cases.
#[derive(Debug, Default)]
struct Tally {
    /// By what the fault was met in: how many were told, and how many did no harm.
    met: BTreeMap<During, (u32, u32)>,
    /// Releases after which MIG was still on, for the next claim to mend.
    mig_stayed: u32,
    failed: Vec<String>,
}

impl Bench {
    fn new(gpus: &str, devices: &[&str], in_driver: bool) -> Bench {
        let node = Node::start(gpus);
        let client = Client::new(node.root());
        let claim = claim("a", devices);
        let prepared = node.engine().prepare(&claim, deadline()).unwrap();
        let mut bench = Bench { node, client, claim, in_driver, prepared, whole: nothing() };
        bench.whole = bench.sight();
        assert_eq!(bench.whole.mig, !bench.is_whole_gpu());
        assert_eq!(bench.whole.journal, ["a.json"]);
        assert_eq!(bench.whole.cdi.len(), 1);
        bench.node.engine().unprepare("a", deadline()).unwrap();
        bench
    }

    fn is_whole_gpu(&self) -> bool {
        self.claim.devices.iter().any(|device| device.device == GPU)
    }

    fn sight(&self) -> Sight {
        let state = self.client.state().unwrap();
        let mig = state.gpus[0].mig.as_ref().unwrap();
        let instances = mig.instances.iter();
        let cdi = |name: String| {
            let content = std::fs::read_to_string(self.node.settings().cdi.join(&name)).unwrap();
            (name, content)
        };
        Sight {
            mig: mig.current,
            instances: instances.map(|gi| (gi.profile_id, gi.placement, gi.compute_instances.len())).collect(),
            journal: self.node.journal_files(),
            cdi: self.node.cdi_files().into_iter().map(cdi).collect(),
        }
    }

    /// What is there is what belongs there.
    fn is_whole(&self) -> anyhow::Result<()> {
        let sight = self.sight();
        ensure!(sight == self.whole, "it is not as it should be: {sight:?}");
        Ok(())
    }

    /// Nothing is there. MIG may be on where it was so from the start.
    fn is_gone(&self) -> anyhow::Result<()> {
        let Sight { mig, instances, journal, cdi } = self.sight();
        ensure!(instances.is_empty(), "instances are left: {instances:?}");
        ensure!(journal.is_empty() && cdi.is_empty(), "files are left: {journal:?} {cdi:?}");
        ensure!(!mig || self.is_whole_gpu(), "MIG is still on");
        Ok(())
    }

    fn engine(&self) -> (Engine, Layer) {
        if self.in_driver {
            (self.node.engine(), Layer::Driver(Client::new(self.node.root())))
        } else {
            let (engine, faulty) = self.node.faulty_engine();
            (engine, Layer::Trait(faulty))
        }
    }

    fn prepare(&self, engine: &Engine) -> anyhow::Result<()> {
        let prepared = engine.prepare(&self.claim, deadline()).context("it is not prepared")?;
        ensure!(prepared == self.prepared, "other ids are told: {prepared:?}");
        self.is_whole()
    }

    fn unprepare(&self, engine: &Engine) -> anyhow::Result<()> {
        engine.unprepare("a", deadline()).context("it is not released")?;
        self.is_gone()
    }

    /// The claim once more without a fault, to the end.
    fn again(&self, engine: &Engine) -> anyhow::Result<()> {
        self.prepare(engine)?;
        self.unprepare(engine)
    }

    /// Plays a case. Returns `None` when the function is not called so often, else whether the call failed.
    fn play(&self, case: Case, tally: &mut Tally) -> anyhow::Result<Option<bool>> {
        if self.is_whole_gpu() {
            self.node.nvml.set_mig_mode(self.node.gpu(GPU), MigMode::Enabled).unwrap();
        }
        if case.during != During::Prepare {
            self.prepare(&self.node.engine())?;
        }
        if case.during == During::Remake {
            self.client.reload().unwrap();
        }
        if case.during == During::Rescue {
            std::fs::write(self.node.settings().claims.join("a.json"), "{").unwrap();
        }
        let before = self.sight();
        let (engine, layer) = self.engine();
        layer.arm(case);
        let started = Instant::now();
        let call = AssertUnwindSafe(|| match case.during {
            During::Unprepare | During::Rescue => {
                engine.unprepare("a", deadline()).map(drop).map_err(|error| error.to_string())
            }
            _ => engine.prepare(&self.claim, deadline()).map(drop).map_err(|error| error.to_string()),
        });
        let Ok(result) = catch_unwind(call) else { bail!("it panics") };
        let met = layer.disarm();
        ensure!(started.elapsed() < DEADLINE + Duration::from_secs(5), "it takes {:?}", started.elapsed());
        if let Err(error) = &result {
            ensure!(met, "it fails without a fault: {error}");
            is_clear(error).with_context(|| format!("the error is {error:?}"))?;
        }
        match (case.during, &result) {
            (During::Unprepare | During::Rescue, Ok(())) => {
                if is_gone_for_good(case) && !self.sight().instances.is_empty() {
                    // Nothing on the GPU survives what brings it back.
                    self.client.reload().unwrap();
                }
                if self.sight().mig && !self.is_whole_gpu() {
                    tally.mig_stayed += 1;
                    ensure!(self.sight() == Sight { mig: true, ..nothing() }, "more than MIG is left");
                    self.again(&engine)?;
                }
                self.is_gone()?;
            }
            (During::Unprepare | During::Rescue, Err(_)) => self.unprepare(&engine)?,
            (_, Ok(())) => self.is_whole().context("it succeeds")?,
            (During::Prepare, Err(_)) => self.is_gone()?,
            (During::Repeat, Err(_)) => {
                let sight = self.sight();
                ensure!(
                    (&sight.instances, &sight.cdi) == (&before.instances, &before.cdi),
                    "a container loses what it has: {sight:?}"
                );
            }
            (During::Remake, Err(_)) => {
                let known = engine.prepared_claims().unwrap();
                ensure!(known.len() == 1, "the claim is not known any more: {known:?}");
            }
        }
        if !case.during.is_release() {
            self.again(&engine).context("afterwards")?;
        }
        Ok(met.then_some(result.is_err()))
    }
}

fn nothing() -> Sight {
    Sight { mig: false, instances: Vec::new(), journal: Vec::new(), cdi: Vec::new() }
}

fn deadline() -> Instant {
    Instant::now() + DEADLINE
}

/// The GPU is not on the bus, or has fallen off it: what the engine then takes for granted is true.
fn is_gone_for_good(case: Case) -> bool {
    let finds_it = matches!(case.function, "gpu_at" | "nvmlDeviceGetHandleByPciBusId");
    case.code == Code::GpuIsLost || (case.code == Code::NotFound && finds_it)
}

/// One sentence for a person: what it is about, and what to do.
pub(crate) fn is_clear(error: &str) -> anyhow::Result<()> {
    ensure!(!error.contains('\n') && !error.ends_with('.') && error.len() < 600, "it is not one sentence");
    for debug in ["Some(", "None", "Ok(", "Err(", " { ", "::", "\\"] {
        ensure!(!error.contains(debug), "it was made for programmers: {debug}");
    }
    let names = ["0000:", "gpu-", "driver's version"];
    ensure!(names.iter().any(|name| error.contains(name)), "it does not say what it is about");
    let (_, advice) = error.rsplit_once("; ").context("it does not say what to do")?;
    let todo = ["see nvidia-smi", "end them, or wait", "reset ", "recreate", "check ", "remove it", "tries again"];
    ensure!(todo.iter().any(|todo| advice.contains(todo)), "it does not say what to do");
    Ok(())
}

/// Plays the cases of a layer for one claim, with so many codes for the first calls. At least so many are met.
///
/// With `KERF_TORTURE=all` every code in every place; without it what differs least from others is left out.
fn play_all(gpus: &str, devices: &[&str], in_driver: bool, codes: usize, at_least: u32) {
    let all = settings::plays_all();
    let functions = if in_driver { &DRIVER[..] } else { &TRAIT[..] };
    let mut bench = Bench::new(gpus, devices, in_driver);
    let mut tally = Tally::default();
    let started = Instant::now();
    for during in [During::Prepare, During::Repeat, During::Remake, During::Unprepare, During::Rescue] {
        if in_driver && during == During::Remake && !all {
            continue;
        }
        for (function, changes) in functions {
            for nth in 1..=3 {
                let number = match (during, nth) {
                    _ if all => CODES.len(),
                    (During::Prepare | During::Unprepare, 1) => codes,
                    (_, 1) => TOLD_APART,
                    _ => 1,
                };
                let codes = &CODES[..number];
                let afters = if *changes { &[false, true][..] } else { &[false][..] };
                let cases = codes.iter().flat_map(|code| afters.iter().map(|after| (*code, *after)));
                let mut is_called = false;
                for (code, after) in cases {
                    let case = Case { during, function, nth, code, after };
                    match bench.play(case, &mut tally) {
                        Ok(None) => break,
                        Ok(Some(told)) => {
                            let (told_so_far, harmless) = tally.met.entry(during).or_default();
                            *if told { told_so_far } else { harmless } += 1;
                            is_called = true;
                        }
                        Err(error) => {
                            tally.failed.push(format!("{case:?}: {error:#}"));
                            is_called = true;
                            bench = Bench::new(gpus, devices, in_driver);
                        }
                    }
                }
                if !is_called {
                    break;
                }
            }
        }
    }
    let met: u32 = tally.met.values().map(|(told, harmless)| told + harmless).sum();
    println!("{devices:?}: {met} cases in {:?}: {:?}; MIG stayed {}", started.elapsed(), tally.met, tally.mig_stayed);
    assert!(tally.failed.is_empty(), "{} of {met} cases:\n{}", tally.failed.len(), tally.failed.join("\n"));
    assert!(met >= at_least, "only {met} cases");
}

#[test]
fn a_fault_with_one_partition() {
    play_all(H100, &[MIG_1G], false, 13, 350);
}

#[test]
fn a_fault_with_two_partitions() {
    play_all(H100, &[MIG_3G, MIG_1G], false, TOLD_APART, 200);
}

#[test]
fn a_fault_with_a_whole_gpu() {
    play_all(H100, &[GPU], false, 13, 100);
}

#[test]
fn a_fault_in_the_driver_with_two_partitions() {
    play_all(H100, &[MIG_3G, MIG_1G], true, TOLD_APART, 300);
}

#[test]
fn a_fault_in_the_driver_with_a_whole_gpu() {
    play_all(H100, &[GPU], true, TOLD_APART, 80);
}

/// What a second fault meets.
enum Second {
    /// It comes before the first, which then does not come.
    Early,
    /// The undoing of what the first has broken off. Whether something was left on the GPU.
    Undoing { left: bool },
    /// The function is not called so often.
    Nothing,
}

impl Bench {
    /// The last step of Prepare fails, and then the `nth` call of a function.
    fn play_twice(&self, function: &'static str, nth: u32, code: Code, wanted: bool) -> anyhow::Result<Second> {
        let (engine, faulty) = self.node.faulty_engine();
        let layer = Layer::Trait(faulty);
        let (during, after) = (During::Prepare, false);
        layer.arm(Case { during, function: LAST_STEP, nth: 2, code: Code::Timeout, after });
        layer.arm(Case { during, function, nth, code, after });
        let result = engine.prepare(&self.claim, deadline());
        let met = layer.disarm();
        let error = result.err().context("it succeeds")?.to_string();
        is_clear(&error).with_context(|| format!("the error is {error:?}"))?;
        let Sight { instances, journal, .. } = self.sight();
        ensure!(instances.is_empty() || journal == ["a.json"], "nothing explains {instances:?}: {journal:?}");
        if wanted {
            self.prepare(&engine)?;
        } else {
            // Where nothing is known of the claim any more, MIG may have stayed on for the next claim to mend.
            engine.unprepare("a", deadline())?;
            let sight = self.sight();
            ensure!(Sight { mig: false, ..sight.clone() } == nothing(), "more than MIG is left: {sight:?}");
            self.prepare(&engine)?;
        }
        self.unprepare(&engine)?;
        Ok(match (error.contains("timed out"), met) {
            (false, _) => Second::Early,
            (true, true) => Second::Undoing { left: !instances.is_empty() },
            (true, false) => Second::Nothing,
        })
    }
}

const LAST_STEP: &str = "create_compute_instance";

/// Undoing a failed Prepare fails as well: the journal explains what is left, and either way out mends it.
#[test]
fn a_fault_while_another_is_undone() {
    let mut bench = Bench::new(H100, &[MIG_3G, MIG_1G], false);
    let (mut met, mut with_rest, mut failed) = (0, 0, Vec::new());
    for (function, _) in TRAIT.into_iter().filter(|(function, _)| *function != LAST_STEP) {
        for (code, wanted) in [(Code::Unknown, true), (Code::Unknown, false), (Code::InUse, true), (Code::InUse, false)]
        {
            for nth in 1.. {
                match bench.play_twice(function, nth, code, wanted) {
                    Ok(Second::Early) => {}
                    Ok(Second::Nothing) => break,
                    Ok(Second::Undoing { left }) => {
                        met += 1;
                        with_rest += u32::from(left);
                    }
                    Err(error) => {
                        failed.push(format!("{function} {nth} {code:?}, wanted again {wanted}: {error:#}"));
                        bench = Bench::new(H100, &[MIG_3G, MIG_1G], false);
                    }
                }
            }
        }
    }
    println!("{met} faults met the undoing, {with_rest} of them left something on the GPU");
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    assert!(met >= 20 && with_rest >= 4, "only {met} cases, {with_rest} with a rest");
}
