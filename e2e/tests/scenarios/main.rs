//! Scenarios on a real Kubernetes, one test each. `make e2e` starts the cluster and runs them one after the other.
//!
//! Each builds its own simulated GPUs and its own kerf, and ends with the check that the node holds nothing any more.

mod architecture;
mod bad_claims;
mod carve;
mod chart;
mod claims;
mod exclusion;
mod faults;
mod handover;
mod life;
mod nodes;
mod policy;
mod restarts;
mod rights;
mod server;
mod simulated;
mod torture;
