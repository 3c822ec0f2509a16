//! `kerf-controller`: see the library.

#![forbid(unsafe_code)]

use std::io::IsTerminal as _;

use anyhow::Context as _;
use clap::Parser as _;
use kerf_controller::args::{Args, LogFormat};
use tracing_subscriber::EnvFilter;

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    // The client logs each error that it also returns.
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info,kube_client=off"));
    let ansi = std::io::stderr().is_terminal();
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(ansi);
    match args.log_format {
        LogFormat::Text => logs.init(),
        LogFormat::Json => logs.json().init(),
    }
    // Two threads are plenty for what waits for the network, and each costs memory.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.context("cannot start the runtime")?.block_on(kerf_controller::run(args))?;
    Ok(())
}
