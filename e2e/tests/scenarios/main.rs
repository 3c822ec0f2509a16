//! Scenarios on a real Kubernetes, one test each. `make e2e` starts the cluster and runs them one after the other.
//!
//! Each builds its own simulated GPUs and its own kerf, and ends with the check that the node holds nothing any more.

mod architecture;
mod bad_claims;
mod carve;
mod cdi;
mod chart;
mod claims;
mod exclusion;
mod extended;
mod faults;
mod handover;
mod labels;
mod life;
mod moving;
mod nodes;
mod peer;
mod policy;
mod quota;
mod restarts;
mod rights;
mod server;
mod simulated;
mod takeover;
mod toolkit;
mod torture;
mod webhook;
