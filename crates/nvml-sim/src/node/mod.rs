//! The state machine of a simulated GPU: modes, instances, ids and error codes, as NVIDIA's driver has them.
//!
//! Architecture invariant: pure. No clock, no file, no socket, no lock: what a call costs and who may see its result is
//! the daemon's business.

mod clients;
mod gpu;
mod ids;
mod instance;
mod mode;
mod spec;
#[cfg(test)]
mod tests;
mod uuid;

pub use clients::{Client, Place, Process};
pub use gpu::{Gpu, Settings};
pub use ids::{ci_minor, gi_minor};
pub use spec::{GpuSpec, Uuids, Virtualization};
pub use uuid::{gpu_serial, gpu_uuid};
