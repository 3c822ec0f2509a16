//! kerf's NVML code against libraries that are loaded as a driver's is.
//!
//! The simulator's programs must have been built: `cargo build -p kerf-nvml-sim`.

mod old_driver;
mod simulation;
mod simulator;
