//! MIG geometry, pure: what a GPU can be cut into, what excludes what, and in which order cuts should be offered.
//!
//! * [`Profile`] and [`Placement`] are NVIDIA's terms: a GPU-instance profile (`1g.10gb`) and the memory slices it
//!   covers (`start:size`).
//! * [`Geometry`] is everything one GPU can be cut into. The driver learns it from NVML; [`product`] holds the known
//!   products as data for the simulator and for tests.
//! * A static layout is how many partitions of which profile a GPU has: [`Geometry::place`] finds the places, [`parted`] reads
//!   the file in which NVIDIA's mig-parted has them.
//!
//! Architecture invariant: this crate does no input or output (its data files are compiled in), and nothing in it knows
//! Kubernetes, NVML or the simulator.

#![forbid(unsafe_code)]

mod geometry;
mod layout;
mod limits;
mod order;
pub mod parted;
pub mod product;
mod profile;

pub use geometry::{Geometry, Offer};
pub use layout::LayoutError;
pub use profile::{Engine, Engines, Placement, Profile, base_name};
