//! What a kerf program shows of itself: log lines, whether it is ready, and metrics.
//!
//! * [`log`] writes log lines, for people or one JSON object a line.
//! * [`Readiness`] is what a program still waits for.
//! * [`metrics`] holds what both programs' metrics have in common.
//! * [`http`] serves `/healthz`, `/readyz` and `/metrics`.
//!
//! Architecture invariant: this knows no other crate of kerf, and decides nothing. What is ready and what is counted is
//! said by the programs.

#![forbid(unsafe_code)]

mod args;
pub mod http;
pub mod log;
pub mod metrics;
mod one_line;
mod readiness;

pub use args::TelemetryArgs;
pub use one_line::OneLine;
pub use readiness::{Pending, Readiness};
