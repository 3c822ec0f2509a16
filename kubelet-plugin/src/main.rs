//! The program: reads its arguments and runs the library.

#![forbid(unsafe_code)]

use clap::Parser as _;
use kerf_kubelet_plugin::{Args, run};

fn main() -> anyhow::Result<()> {
    Ok(run(Args::parse())?)
}
