//! Turns every `GpuNode` into ResourceSlices, and is their only writer.
//!
//! ```text
//! watches ──▶ index ──▶ queue ──▶ writer ──▶ API server
//!              │ (is the plugin alive?)  │ render: GpuNode, owner, offering, server features -> slices
//!              │                         │ diff:   wanted, there             -> requests
//!              └─▶ policy: GpuPolicies, layouts, labels -> offering; steward ──▶ GpuNode.spec, GpuPolicy.status
//! ```
//!
//! [`render()`](render::render), [`diff()`](diff::diff) and [`resolve()`](policy::resolve) are pure, [`Index`](index::Index) and
//! [`Queue`](queue::Queue) synchronous with the caller's clock. Only [`watch`], [`probe`], [`leader`], [`events`],
//! [`writer`] and the policies' [`Steward`](policy::Steward) talk to the API server. [`metrics`] counts what they do.

#![forbid(unsafe_code)]

pub mod args;
pub mod diff;
pub mod events;
pub mod features;
pub mod held;
pub mod index;
pub mod leader;
pub mod liveness;
pub mod meaning;
pub mod metrics;
pub mod policy;
pub mod probe;
pub mod quantity;
pub mod queue;
pub mod render;
mod run;
pub mod watch;
pub mod writer;

pub use run::{RunError, run};
