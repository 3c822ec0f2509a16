//! Whether a fault could be: what no client could meet is refused when it is written, not when a test waits for it.

use super::words::names;
use super::{CallFault, Fault, GpuName, Step, Times};
use crate::view::PciAddress;

/// Why a fault cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultError {
    /// No client could meet it.
    #[error("{0:?} is no NVML function that the simulated driver answers")]
    Function(String),
    /// It would change nothing.
    #[error("a fault of a call needs a code, an activation status, or a time to hang")]
    NoEffect,
    /// Both at once.
    #[error("a call either fails with a code or succeeds with an activation status; arm two faults")]
    TwoCodes,
    /// Only one function has it.
    #[error("only nvmlDeviceSetMigMode has an activation status")]
    Activation,
    /// Nothing to report after the work.
    #[error("`after` needs a code or an activation status to report")]
    After,
    /// What is counted from 1.
    #[error("`{0}` counts from 1")]
    Zero(&'static str),
    /// A compute instance alone says nothing.
    #[error("a compute instance is named together with its GPU instance (`gi`)")]
    NoGpuInstance,
    /// No such GPU.
    #[error("the node has no GPU {0}; expected a number, a PCI address or a UUID")]
    NoGpu(GpuName),
}

impl Fault {
    /// That it could be, on some node.
    ///
    /// # Errors
    ///
    /// When it could not.
    pub fn check(&self) -> Result<(), FaultError> {
        match self {
            Fault::Call(call) => check_call(call),
            Fault::Lost(_) => Ok(()),
            Fault::Process(process) => check_place(process.gi, process.ci),
            Fault::Busy(busy) if busy.tries == Some(0) => Err(FaultError::Zero("tries")),
            Fault::Busy(busy) => check_place(busy.gi, busy.ci),
            Fault::Capabilities(late) => check_count(late.nth, late.times),
        }
    }
}

impl Step {
    /// That it could be on a node of these GPUs, given by UUID and PCI address.
    pub(crate) fn check(&self, gpus: &[(&str, PciAddress)]) -> Result<(), FaultError> {
        let fault = Fault::try_from(self.clone());
        let gpu = match &fault {
            Ok(fault) => {
                fault.check()?;
                fault.gpu()
            }
            Err(create) => Some(&create.gpu),
        };
        match gpu {
            Some(name) if name.place(gpus).is_none() => Err(FaultError::NoGpu(name.clone())),
            _ => Ok(()),
        }
    }
}

fn check_call(call: &CallFault) -> Result<(), FaultError> {
    if !crate::abi::answers(|exported| names(&call.function, exported)) {
        return Err(FaultError::Function(call.function.clone()));
    }
    match (call.code, call.activation, call.hang) {
        (Some(_), Some(_), _) => return Err(FaultError::TwoCodes),
        (None, None, None) => return Err(FaultError::NoEffect),
        (None, None, Some(_)) if call.after => return Err(FaultError::After),
        (_, Some(_), _) if call.function != "nvmlDeviceSetMigMode" => return Err(FaultError::Activation),
        _ => {}
    }
    check_count(call.nth, call.times)
}

fn check_count(nth: u32, times: Times) -> Result<(), FaultError> {
    match (nth, times) {
        (0, _) => Err(FaultError::Zero("nth")),
        (_, Times::Number(0)) => Err(FaultError::Zero("times")),
        _ => Ok(()),
    }
}

fn check_place(gi: Option<u32>, ci: Option<u32>) -> Result<(), FaultError> {
    if gi.is_none() && ci.is_some() { Err(FaultError::NoGpuInstance) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::super::{Busy, Process, Span};
    use super::*;
    use crate::code::Code;

    #[test]
    fn what_no_client_could_meet_is_refused() {
        let call = CallFault::new;
        for (fault, expected) in [
            (call("nvmlGpuInstanceDestroi").fails(Code::IN_USE), "no NVML function"),
            (call("nvmlDeviceGetCount_v7").fails(Code::IN_USE), "no NVML function"),
            (call("nvmlErrorString").fails(Code::IN_USE), "no NVML function"),
            (call("nvmlInit_v2"), "needs a code"),
            (call("nvmlInit_v2").activation(Code::IN_USE), "only nvmlDeviceSetMigMode"),
            (call("nvmlDeviceSetMigMode").activation(Code::IN_USE).fails(Code::IN_USE), "arm two"),
            (CallFault { after: true, ..call("nvmlInit_v2").hangs(Span::Forever) }, "`after` needs"),
            (call("nvmlInit_v2").fails(Code::IN_USE).nth(0), "`nth` counts"),
            (call("nvmlInit_v2").fails(Code::IN_USE).times(0), "`times` counts"),
        ] {
            let error = Fault::from(fault.clone()).check().expect_err(&format!("{fault:?}")).to_string();
            assert!(error.contains(expected), "{fault:?}: {error}");
        }
        let nowhere = Process { ci: Some(0), ..Process::new(0, 1) };
        assert_eq!(Fault::from(nowhere).check(), Err(FaultError::NoGpuInstance));
        let never = Busy { tries: Some(0), ..Busy::new(0) };
        assert_eq!(Fault::from(never).check(), Err(FaultError::Zero("tries")));
    }

    #[test]
    fn every_version_of_a_function_can_be_named() {
        for function in
            ["nvmlDeviceGetCount", "nvmlDeviceGetCount_v2", "nvmlInit_v2", "nvmlShutdown", "nvmlEventSetFree"]
        {
            assert_eq!(Fault::from(CallFault::new(function).fails(Code::UNKNOWN)).check(), Ok(()), "{function}");
        }
    }
}
