//! kerf's API: the [`GpuNode`] resource, the names that other software sees, and the opaque configurations.
//!
//! Architecture invariant: types only. No input or output, no clock, no knowledge of NVML, MIG arithmetic or CDI.

#![forbid(unsafe_code)]

mod gpu_node;
pub mod names;
pub mod opaque;
pub mod problem;

pub use gpu_node::{
    Attribute, Blocked, ComputeInstanceStatus, ForeignInstances, Gpu, GpuInstanceStatus, GpuNode, GpuNodeSpec,
    GpuNodeStatus, GpuOffer, GpuSpec, MigMode, MigPlacement, MigProfile, MigStatus, Withheld,
};
pub use problem::Problem;
