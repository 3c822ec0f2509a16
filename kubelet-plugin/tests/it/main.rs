//! Tests of the plugin without a kubelet and without a cluster: real sockets, real gRPC, an API server in memory.

#![expect(clippy::unwrap_used, reason = "what a test cannot go on without fails it")]

mod api_server;
mod cdi;
mod disk;
mod dra;
mod driver;
mod engine;
mod engine_crash;
mod engine_failures;
mod engine_foreign;
mod engine_former;
mod engine_mode;
mod engine_node;
mod engine_reconcile;
mod engine_stuck;
mod engine_wishes;
mod fault_matrix;
mod handover;
mod health;
mod kill;
mod model;
mod observe;
mod program;
mod reconcile;
mod registration;
mod reports;
mod rpc;
mod settings;
mod stored;
#[path = "../../../crates/telemetry/testing.rs"]
mod testing;
mod tracer;
mod troubleshooting;
