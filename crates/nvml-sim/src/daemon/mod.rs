//! The daemon: owns the state of a node's GPUs, lays out its driver root and answers on its socket.

mod answer;
mod control;
mod faults;
mod install;
mod latency;
mod layout;
mod serve;
mod shared_object;
mod state;
mod user_space;

pub use install::InstallError;
pub use latency::real_latencies;
pub use layout::{CAPS_MAJOR, LayoutError};
pub use serve::{Options, ServeError, Serving, serve};
pub use state::{ComputeInstanceState, GpuInstanceState, GpuState, MigState, NodeState};
