//! What kerf relies on NVML for, as assertions that run against any NVML library: a simulated one in every test run, a
//! real GPU's when somebody has one. Where the two disagree, the simulator is to be corrected, and kerf with it.
//!
//! * [`run`] reads a machine without changing it and judges what it said ([`reading`]).
//! * GPUs that are named to it, it also carves in every way and leaves as they were ([`carve`]).
//! * [`report`] puts all of it in one file that a person can send back.
//!
//! Architecture invariant: reading and carving only record, and assertions only judge: each is a pure function over the
//! record. So it can be shown of each that it fails where NVML lies.
//!
//! Architecture invariant: this crate knows no simulator and no Kubernetes, and nothing of how kerf carves. It says what
//! kerf relies on and not how.

#![forbid(unsafe_code)]

mod assertion;
pub mod carve;
mod geometry_checks;
mod gpu_checks;
mod instance_checks;
mod kernel;
#[cfg(test)]
mod machine;
mod node_checks;
pub mod reading;
pub mod report;
mod suite;
#[cfg(test)]
mod tests;
mod timing;

pub use assertion::{Assertion, Mismatch, Outcome, Verdict};
pub use kernel::{Capability, DeviceFile, Kernel};
pub use suite::{Results, Setup, Summary, run};
pub use timing::{Measured, Timed, Times};
