//! The harness of kerf's end-to-end tests, demo and benchmarks.
//!
//! Everything here acts on a real Kubernetes: `kerf-cluster` (the Go module beside this crate) starts it, [`Installation`]
//! runs kerf's two programs on it under their own ServiceAccounts, [`Simulation`] stands in for the GPUs, [`Tenant`] is a user's
//! namespace, and [`World`] puts them together for one scenario. [`Account`] is one who acts on its own; [`render`] and what belongs to it look at
//! the chart, without a cluster.
//!
//! Architecture invariant: no part of Kubernetes is replaced here. What a scenario sees, a user's cluster would show.

#![forbid(unsafe_code)]

mod account;
mod chart;
mod cluster;
mod installation;
mod kubelet;
mod manifest;
mod neighbours;
mod program;
mod setting;
mod simulation;
mod tenant;
mod wait;
mod world;

pub use account::Account;
pub use chart::{deploy, helm, manifests, render, situations};
pub use cluster::{Cluster, NodePaths};
pub use installation::{Installation, Part};
pub use kubelet::{Kubelet, claim_ref};
pub use manifest::{Claim, Pod, Request};
pub use neighbours::{Neighbours, neighbour};
pub use program::{Program, built};
pub use setting::setting;
pub use simulation::{GpuState, InstanceState, NodeFile, Simulation};
pub use tenant::{Tenant, seconds_to_ready};
pub use wait::{HEARS_AGAIN, RETRIED, eventually, never};
pub use world::{World, scenario};
