//! kerf's API: the [`GpuNode`] and [`GpuPolicy`] resources, the names that other software sees, and the opaque configurations.
//!
//! Architecture invariant: types only. No input or output, no clock, no knowledge of NVML, MIG arithmetic or CDI.

#![forbid(unsafe_code)]

mod gpu_node;
mod gpu_policy;
pub mod names;
pub mod opaque;
pub mod problem;
pub mod quantity;
mod schema;

pub use gpu_node::{
    Attribute, Blocked, ComputeInstanceStatus, ForeignInstances, Gpu, GpuInstanceStatus, GpuNode, GpuNodeSpec,
    GpuNodeStatus, GpuOffer, GpuSpec, MigMode, MigPlacement, MigProfile, MigStatus, Withheld,
};
pub use gpu_policy::{
    GpuPolicy, GpuPolicySpec, GpuPolicyStatus, GpuSelector, LayoutChoice, OverriddenGpu, PolicyGpus, PolicyNode,
    PolicyOffer, WaitingGpu,
};
pub use problem::Problem;
