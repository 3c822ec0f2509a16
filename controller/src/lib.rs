//! Turns every `GpuNode` into ResourceSlices, and is their only writer.
//!
//! ```text
//! watches ──▶ index ──▶ queue ──▶ writer ──▶ API server
//!              │ (is the plugin alive?)  │ render: GpuNode, owner, offering, server features -> slices
//!              │                         │ diff:   wanted, there             -> requests
//!              └─▶ policy: GpuPolicies, layouts, labels -> offering; steward ──▶ GpuNode.spec, GpuPolicy.status
//! ```
//!
//! [`render()`](render::render), [`diff()`](diff::diff), [`resolve()`](policy::resolve), [`classes::plan()`] and
//! [`labels::wanted()`] are pure, [`Index`](index::Index) and [`Queue`](queue::Queue) synchronous with the caller's clock. Only
//! [`watch`], [`probe`], [`leader`], [`events`], [`writer`], the policies' [`Steward`](policy::Steward) and the keepers of
//! [`classes`] and [`labels`], which [`upkeep`] runs, talk to the API server. [`metrics`] counts what they do, and [`remove`]
//! undoes what would stay. [`webhook`] stands beside: the API server asks it whether kerf would refuse what somebody writes.

#![forbid(unsafe_code)]

pub mod args;
pub mod classes;
pub mod diff;
pub mod events;
pub mod features;
pub mod held;
pub mod index;
pub mod labels;
pub mod leader;
pub mod liveness;
pub mod meaning;
pub mod metrics;
mod naming;
pub mod policy;
pub mod probe;
mod quantity;
pub mod queue;
pub mod remove;
pub mod render;
mod run;
pub mod upkeep;
pub mod watch;
pub mod webhook;
pub mod writer;

pub use run::{RunError, run};
