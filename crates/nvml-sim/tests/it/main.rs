//! The simulated node as its clients see it: through NVIDIA's own programs, through NVIDIA's Python bindings, through
//! the C ABI, and from the file system. Needs root, for device nodes.
#![expect(clippy::unwrap_used, reason = "a test fails by it")]

mod abi;
mod faults;
mod layout;
mod life;
mod mps;
mod nvidia_smi;
mod python;
mod sim;
mod users;
mod visibility;
