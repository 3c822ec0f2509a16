//! `kerf-controller`: see the library.

#![forbid(unsafe_code)]

use anyhow::Context as _;
use clap::Parser as _;
use kerf_controller::args::Args;

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    kerf_telemetry::log::init(args.telemetry.log_format);
    // Two threads are plenty for what waits for the network, and each costs memory.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.context("cannot start the runtime")?.block_on(kerf_controller::run(args))?;
    Ok(())
}
