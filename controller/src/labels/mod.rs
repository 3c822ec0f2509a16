//! The labels of Nodes by which pods and tools choose among GPUs: those of NVIDIA's GPU feature discovery, with its values.
//!
//! Architecture invariant: a label that somebody else has put on a Node is left to them, key by key, whatever its value. Only
//! labels under `nvidia.com/` are ever written, by server-side apply without force, and a policy in the API server holds the
//! controller to that.

mod found;
mod keeper;
mod wanted;

pub use found::{Found, apply};
pub use keeper::Keeper;
pub(crate) use keeper::write;
pub use wanted::{Labels, Offered, wanted};
