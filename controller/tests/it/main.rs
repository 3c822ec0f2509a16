//! Tests of the controller without a cluster: golden files, properties, simulated time, and an API server in memory.

#![expect(clippy::unwrap_used, reason = "in a test that is how to say what must hold")]

mod api_server;
mod classes;
mod diff;
mod fixtures;
mod golden;
mod index;
mod labels;
mod leader;
mod observe;
mod offering;
mod policy;
mod probe;
mod program;
mod remove;
mod steward;
#[path = "../../../crates/telemetry/testing.rs"]
mod testing;
mod watch;
mod webhook;
mod writer;
