//! What can be made to go wrong on a node, in one vocabulary: the keys of a node file's `faults`, the options of
//! `nvml-sim ctl fault` and the fields that a test fills in are these.

mod check;
mod table;
mod words;

use clap::{Args, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::code::Code;

pub use check::FaultError;
pub use table::{Armed, Effect, Late, Met, Table};
pub use words::{Failure, GpuName, Span, Times};

/// Something that goes wrong. It is armed until it is cleared, and counts how often it was met.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Subcommand)]
#[serde(rename_all = "camelCase")]
pub enum Fault {
    /// Calls of one NVML function fail, or hang.
    Call(CallFault),
    /// A GPU falls off the bus (XID 79): every call about it is GPU_IS_LOST. A reboot heals it; so does clearing the
    /// fault. Both lose its instances.
    Lost(LostGpu),
    /// A process uses a GPU or an instance: it is listed, and what it uses is IN_USE.
    Process(Process),
    /// Something uses a GPU or an instance and is listed nowhere, as monitoring agents do: what it uses is IN_USE.
    Busy(Busy),
    /// The kernel's files for the next new instances come late, or never.
    Capabilities(LateCapabilities),
}

/// Calls of one NVML function that fail, or hang.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Args)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CallFault {
    /// Its exported name. Without `_v2`, `_v3` at its end: all of its versions.
    pub function: String,
    /// Only calls about this GPU or what is on it: its number, PCI address or UUID. Default: all calls.
    #[arg(long)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuName>,
    /// The first call that is met, counted from 1, the next.
    #[arg(long, default_value_t = 1)]
    #[serde(default = "first")]
    pub nth: u32,
    /// How many calls are met from there on: a number, or `always`.
    #[arg(long, default_value_t = Times::Number(1))]
    #[serde(default = "once")]
    pub times: Times,
    /// The call fails with this code: a name such as IN_USE or NVML_ERROR_IN_USE, or a number.
    #[arg(long)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<Failure>,
    /// The call of nvmlDeviceSetMigMode succeeds and has this activation status.
    #[arg(long)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activation: Option<Failure>,
    /// The call does its work and reports the failure all the same.
    #[arg(long)]
    #[serde(default)]
    pub after: bool,
    /// The call waits first, holding no lock: a time, or `forever`. Clearing the fault ends the wait.
    #[arg(long)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hang: Option<Span>,
}

/// A GPU that falls off the bus.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Args)]
#[serde(deny_unknown_fields)]
pub struct LostGpu {
    /// Its number, PCI address or UUID.
    pub gpu: GpuName,
}

/// A process that uses a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Args)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Process {
    /// The GPU's number, PCI address or UUID.
    pub gpu: GpuName,
    /// Its process id. It need not exist.
    pub pid: u32,
    /// Id of the GPU instance that it uses. Default: the GPU as a whole, and all that is on it.
    #[arg(long)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gi: Option<u32>,
    /// Id of the compute instance that it uses. Default: all in the GPU instance.
    #[arg(long, requires = "gi")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ci: Option<u32>,
    /// What nvmlSystemGetProcessName answers.
    #[arg(long, default_value = "python3")]
    #[serde(default = "python")]
    pub name: String,
    /// GPU memory that it uses, in MiB.
    #[arg(long, default_value_t = 256)]
    #[serde(default = "some_memory")]
    pub memory_mib: u64,
    /// It ends after this time. Default: when the fault is cleared.
    #[arg(long = "for")]
    #[serde(rename = "for", default, skip_serializing_if = "Option::is_none")]
    pub lasts: Option<Span>,
}

/// A user of a GPU that no list shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Args)]
#[serde(deny_unknown_fields)]
pub struct Busy {
    /// The GPU's number, PCI address or UUID.
    pub gpu: GpuName,
    /// Id of the GPU instance that it uses. Default: the GPU as a whole, and all that is on it.
    #[arg(long)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gi: Option<u32>,
    /// Id of the compute instance that it uses. Default: all in the GPU instance.
    #[arg(long, requires = "gi")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ci: Option<u32>,
    /// It ends after this time. Default: when the fault is cleared.
    #[arg(long = "for")]
    #[serde(rename = "for", default, skip_serializing_if = "Option::is_none")]
    pub lasts: Option<Span>,
    /// It ends when this many calls have found what they wanted IN_USE.
    #[arg(long)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tries: Option<u32>,
}

/// Files of new instances that come late.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Args)]
#[serde(deny_unknown_fields)]
pub struct LateCapabilities {
    /// Only of instances on this GPU: its number, PCI address or UUID. Default: on all.
    #[arg(long)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuName>,
    /// Which of them. Default: all.
    #[arg(long = "parts", value_delimiter = ',')]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Part>,
    /// How long after the instance: a time, or `forever`. When the fault is cleared, what is missing comes.
    #[arg(long, default_value_t = Span::Forever)]
    #[serde(default = "forever")]
    pub late: Span,
    /// The first new instance that is met, counted from 1, the next; GPU instances and compute instances alike.
    #[arg(long, default_value_t = 1)]
    #[serde(default = "first")]
    pub nth: u32,
    /// How many new instances are met from there on: a number, or `always`.
    #[arg(long, default_value_t = Times::Always)]
    #[serde(default = "always")]
    pub times: Times,
}

/// What the kernel module shows of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "camelCase")]
pub enum Part {
    /// The file `access` below `/proc/driver/nvidia/capabilities`.
    Files,
    /// The line in `/proc/driver/nvidia-caps/mig-minors`. The module lists every instance that could be, from the start;
    /// no driver is known to leave one out.
    Minors,
    /// The device node below `/dev/nvidia-caps`, which nvidia-modprobe makes and not the module.
    Nodes,
}

/// An instance that somebody else creates: another administrator's hand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Args)]
#[serde(deny_unknown_fields)]
pub struct ForeignInstance {
    /// The GPU's number, PCI address or UUID.
    pub gpu: GpuName,
    /// The profile's name, such as 1g.10gb, or its hardware id.
    pub profile: String,
    /// The memory slice that it begins at.
    pub start: u32,
    /// With a compute instance that is all of it.
    #[arg(long)]
    #[serde(default)]
    pub compute: bool,
}

/// One entry of a node file's `faults`, done at the start in their order.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Step {
    /// [`Fault::Call`].
    Call(CallFault),
    /// [`Fault::Lost`].
    Lost(LostGpu),
    /// [`Fault::Process`].
    Process(Process),
    /// [`Fault::Busy`].
    Busy(Busy),
    /// [`Fault::Capabilities`].
    Capabilities(LateCapabilities),
    /// An instance of somebody else's.
    Create(ForeignInstance),
}

impl CallFault {
    /// The next call of this function, which so far passes.
    pub fn new(function: impl Into<String>) -> CallFault {
        CallFault {
            function: function.into(),
            gpu: None,
            nth: first(),
            times: once(),
            code: None,
            activation: None,
            after: false,
            hang: None,
        }
    }

    /// Only calls about this GPU.
    #[must_use]
    pub fn on(self, gpu: impl Into<GpuName>) -> CallFault {
        CallFault { gpu: Some(gpu.into()), ..self }
    }

    /// Not the next call, but the `nth`.
    #[must_use]
    pub fn nth(self, nth: u32) -> CallFault {
        CallFault { nth, ..self }
    }

    /// So many calls.
    #[must_use]
    pub fn times(self, times: u32) -> CallFault {
        CallFault { times: Times::Number(times), ..self }
    }

    /// Every call until the fault is cleared.
    #[must_use]
    pub fn always(self) -> CallFault {
        CallFault { times: Times::Always, ..self }
    }

    /// The call fails.
    #[must_use]
    pub fn fails(self, code: Code) -> CallFault {
        CallFault { code: Some(Failure(code)), ..self }
    }

    /// The call does its work and reports a failure.
    #[must_use]
    pub fn fails_after(self, code: Code) -> CallFault {
        CallFault { code: Some(Failure(code)), after: true, ..self }
    }

    /// The call succeeds with this activation status.
    #[must_use]
    pub fn activation(self, code: Code) -> CallFault {
        CallFault { activation: Some(Failure(code)), ..self }
    }

    /// The call waits first.
    #[must_use]
    pub fn hangs(self, span: impl Into<Span>) -> CallFault {
        CallFault { hang: Some(span.into()), ..self }
    }
}

impl Process {
    /// A process on a GPU as a whole, until it is cleared.
    pub fn new(gpu: impl Into<GpuName>, pid: u32) -> Process {
        Process { gpu: gpu.into(), pid, gi: None, ci: None, name: python(), memory_mib: some_memory(), lasts: None }
    }
}

impl Busy {
    /// A user of a GPU as a whole, until it is cleared.
    pub fn new(gpu: impl Into<GpuName>) -> Busy {
        Busy { gpu: gpu.into(), gi: None, ci: None, lasts: None, tries: None }
    }
}

impl LateCapabilities {
    /// Everything of every new instance, late by this time.
    pub fn new(late: impl Into<Span>) -> LateCapabilities {
        LateCapabilities { gpu: None, parts: Vec::new(), late: late.into(), nth: first(), times: always() }
    }

    pub(crate) fn withholds(&self, part: Part) -> bool {
        self.parts.is_empty() || self.parts.contains(&part)
    }
}

impl Fault {
    /// The GPU that it is about; `None` for all.
    pub fn gpu(&self) -> Option<&GpuName> {
        match self {
            Fault::Call(call) => call.gpu.as_ref(),
            Fault::Lost(lost) => Some(&lost.gpu),
            Fault::Process(process) => Some(&process.gpu),
            Fault::Busy(busy) => Some(&busy.gpu),
            Fault::Capabilities(late) => late.gpu.as_ref(),
        }
    }
}

impl TryFrom<Step> for Fault {
    type Error = ForeignInstance;

    fn try_from(step: Step) -> Result<Fault, ForeignInstance> {
        Ok(match step {
            Step::Call(call) => Fault::Call(call),
            Step::Lost(lost) => Fault::Lost(lost),
            Step::Process(process) => Fault::Process(process),
            Step::Busy(busy) => Fault::Busy(busy),
            Step::Capabilities(late) => Fault::Capabilities(late),
            Step::Create(create) => return Err(create),
        })
    }
}

impl From<CallFault> for Fault {
    fn from(call: CallFault) -> Fault {
        Fault::Call(call)
    }
}

impl From<Process> for Fault {
    fn from(process: Process) -> Fault {
        Fault::Process(process)
    }
}

impl From<Busy> for Fault {
    fn from(busy: Busy) -> Fault {
        Fault::Busy(busy)
    }
}

impl From<LateCapabilities> for Fault {
    fn from(late: LateCapabilities) -> Fault {
        Fault::Capabilities(late)
    }
}

fn first() -> u32 {
    1
}

fn once() -> Times {
    Times::Number(1)
}

fn always() -> Times {
    Times::Always
}

fn forever() -> Span {
    Span::Forever
}

fn python() -> String {
    "python3".to_owned()
}

fn some_memory() -> u64 {
    256
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_reads_back_as_it_was_written() {
        for fault in [
            CallFault::new("nvmlInit_v2").fails(Code(77)).hangs(std::time::Duration::from_millis(1500)).into(),
            CallFault::new("nvmlDeviceSetMigMode").activation(Code::IN_USE).always().on("0000:3b:00.0").into(),
            Fault::Lost(LostGpu { gpu: 1.into() }),
            Process { gi: Some(7), ..Process::new(0, 4242) }.into(),
            Busy { tries: Some(2), lasts: Some(Span::Forever), ..Busy::new(0) }.into(),
            Fault::from(LateCapabilities { parts: vec![Part::Nodes], ..LateCapabilities::new(Span::Forever) }),
        ] {
            let text = serde_json::to_string(&fault).unwrap();
            assert_eq!(serde_json::from_str::<Fault>(&text).unwrap(), fault, "{text}");
        }
    }
}
