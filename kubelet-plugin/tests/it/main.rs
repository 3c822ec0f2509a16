//! Tests of the plugin without a kubelet and without a cluster: real sockets, real gRPC, an API server in memory.

#![expect(clippy::unwrap_used, reason = "what a test cannot go on without fails it")]

mod api_server;
mod disk;
mod dra;
mod driver;
mod engine;
mod engine_crash;
mod engine_node;
mod health;
mod kill;
mod program;
mod registration;
mod reports;
mod rpc;
mod tracer;
