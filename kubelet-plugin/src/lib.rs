//! The node's part of kerf: finds GPUs, carves MIG instances when claims are prepared, removes them when pods end.
//!
//! * [`engine`] does the work on the GPUs: prepare and unprepare, the journal, the locks.
//! * [`driver`] holds the NVIDIA driver's library and the engine over it, and opens both anew after a driver reload.
//! * [`inventory`] reads what the node has, and decides what may be offered of it.
//! * [`registration`], [`dra`] and [`health`] are the services the kubelet calls; [`claim`] checks what it asks for.
//! * [`reconcile`] releases what nobody else will, and goes on with what could not be released.
//! * [`hook`] is the program that container runtimes run for us.
//! * [`node_status`], [`lease`] and [`events`] are what the plugin tells the API server.
//! * [`neighbours`] are the other plugins of this driver on the node, during a rolling update (`HANDOVER.md`), and NVIDIA's DRA
//!   driver, which has the same name.
//! * [`metrics`] counts and measures; [`failure`] sorts what goes wrong.
//! * [`run()`] wires them.
//!
//! Architecture invariant: the plugin never writes a ResourceSlice or a claim. What it knows goes into its GpuNode, and
//! the controller alone publishes devices: a stolen node identity cannot offer devices elsewhere.

#![forbid(unsafe_code)]

mod args;
mod attributes;
mod backoff;
pub mod claim;
pub mod dra;
pub mod driver;
pub mod engine;
pub mod events;
pub mod failure;
pub mod health;
pub mod hook;
pub mod inventory;
pub mod lease;
pub mod metrics;
pub mod neighbours;
mod node;
pub mod node_status;
mod observe;
pub mod paths;
pub mod reconcile;
pub mod registration;
mod run;
pub mod socket;

pub use args::{Args, CdiPart};
pub use engine::ForeignPolicy;
pub use lease::AtExit;
pub use run::run;
