//! The whole run: read, judge, carve, judge.

use kerf_nvml::{Nvml, PciAddress};

use crate::assertion::{Assertion, Outcome, Verdict};
use crate::carve::checks::CARVE;
use crate::carve::{Carving, Halt, Patience, Refusal, Tools, carve};
use crate::geometry_checks::GEOMETRY;
use crate::gpu_checks::GPU;
use crate::instance_checks::INSTANCES;
use crate::kernel::Kernel;
use crate::node_checks::NODE;
use crate::reading::{GpuReading, NodeReading, read};
use crate::timing::{Measured, Timed, Times};

/// What is run against, and how.
pub struct Setup<'a> {
    /// The library.
    pub nvml: &'a dyn Nvml,
    /// The kernel's side of the same driver.
    pub kernel: &'a dyn Kernel,
    /// GPUs to carve. They must be idle.
    pub carve: &'a [PciAddress],
    /// How long carving waits for what does not happen at once.
    pub patience: Patience,
    /// Whether the user wishes to end.
    pub stop: &'a dyn Fn() -> bool,
    /// Told each verdict as soon as there is one.
    pub judged: &'a dyn Fn(&Verdict),
    /// Told what is done now, by GPU: carving takes minutes.
    pub doing: &'a dyn Fn(PciAddress, &str),
}

/// Everything that came out.
#[derive(Clone, Debug)]
pub struct Results {
    /// What the machine said.
    pub reading: NodeReading,
    /// What happened on each GPU that was to be carved, or why it was not.
    pub carvings: Vec<(PciAddress, Result<Carving, Refusal>)>,
    /// Every assertion on everything that it applies to.
    pub verdicts: Vec<Verdict>,
    /// How long calls took.
    pub times: Vec<(Measured, Times)>,
}

/// Verdicts, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Assertions that hold.
    pub held: usize,
    /// Assertions that do not.
    pub failed: usize,
    /// Assertions that there was nothing to check on.
    pub skipped: usize,
}

impl Results {
    /// The verdicts, counted.
    pub fn summary(&self) -> Summary {
        let mut summary = Summary::default();
        for verdict in &self.verdicts {
            *match verdict.outcome {
                Outcome::Held => &mut summary.held,
                Outcome::Failed(_) => &mut summary.failed,
                Outcome::Skipped(_) => &mut summary.skipped,
            } += 1;
        }
        summary
    }

    /// Whether a GPU that was to be carved was refused.
    pub fn refused(&self) -> bool {
        self.carvings.iter().any(|(_, carving)| carving.is_err())
    }

    /// Whether the user ended it early.
    pub fn interrupted(&self) -> bool {
        let halts = self.carvings.iter().flat_map(|(_, carving)| carving).map(|carving| &carving.halted);
        halts.into_iter().any(|halted| *halted == Some(Halt::Interrupted))
    }
}

/// Verdicts, told as they come.
struct Verdicts<'a> {
    told: &'a dyn Fn(&Verdict),
    all: Vec<Verdict>,
}

impl Verdicts<'_> {
    fn add(&mut self, verdict: Verdict) {
        (self.told)(&verdict);
        self.all.push(verdict);
    }

    fn judge<R>(&mut self, assertions: &[Assertion<R>], gpu: Option<&str>, reading: &R) {
        for assertion in assertions {
            self.add(assertion.judge(gpu, reading));
        }
    }

    /// Nothing can be said about any of these.
    fn skip<R>(&mut self, assertions: &[Assertion<R>], gpu: &str, why: &str) {
        for &Assertion { name, relied_on_for, .. } in assertions {
            let outcome = Outcome::Skipped(why.to_owned());
            self.add(Verdict { name, relied_on_for, gpu: Some(gpu.to_owned()), outcome });
        }
    }
}

/// The assertions about a GPU that is only read.
const READ: [&[Assertion<GpuReading>]; 3] = [GPU, GEOMETRY, INSTANCES];

/// Runs every assertion.
pub fn run(setup: &Setup<'_>) -> Results {
    let nvml = Timed::new(setup.nvml);
    let mut verdicts = Verdicts { told: setup.judged, all: Vec::new() };

    let reading = read(&nvml, setup.kernel);
    verdicts.judge(NODE, None, &reading);
    for (index, gpu) in reading.gpus.iter().enumerate() {
        for assertions in READ {
            match gpu {
                Ok(gpu) => verdicts.judge(assertions, Some(&gpu.name()), gpu),
                Err(error) => verdicts.skip(assertions, &format!("index {index}"), &format!("no handle: {error}")),
            }
        }
    }

    let mut carvings = Vec::new();
    for &address in setup.carve {
        let doing = |what: &str| (setup.doing)(address, what);
        let Setup { kernel, patience, stop, .. } = *setup;
        let carving = carve(Tools { nvml: &nvml, kernel, patience, stop, doing: &doing }, address);
        let gpu = address.to_string();
        match &carving {
            Ok(carving) => verdicts.judge(CARVE, Some(&gpu), carving),
            Err(refusal) => verdicts.skip(CARVE, &gpu, &format!("not carved: {refusal}")),
        }
        carvings.push((address, carving));
    }
    Results { reading, carvings, verdicts: verdicts.all, times: nvml.times() }
}
