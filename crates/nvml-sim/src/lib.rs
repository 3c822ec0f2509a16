//! A simulated GPU node, below NVML.
//!
//! Built as a shared library this crate *is* `libnvidia-ml.so.1`: NVML's C ABI (`abi`), a thin client of the [`daemon`] that owns the node's state. So every process and every container of a node sees one truth, which
//! outlives its clients, and nothing that uses NVML has to know that the GPUs are simulated.
//!
//! * [`node`] is the state machine of a GPU, pure: modes, instances, ids, error codes.
//! * [`daemon`] keeps one of those per GPU, lays out the driver root and answers on a unix socket.
//! * [`view`] is what NVML shows of a node, [`handle`] and [`code`] are its vocabulary; [`wire`] is how that goes over the
//!   socket, [`client`] the other end of it.
//! * [`fault`] is what can be made to go wrong: the vocabulary, and the table of what is armed.
//! * [`node_file`] is the description of a node that the daemon starts from.
//!
//! Architecture invariant: the library side (`abi`, `client`) reads and changes nothing but through the daemon, and
//! keeps no state of the node. What it decides by itself is only what a process may see ([`visibility`]): that is a
//! property of the process, of its device cgroup and its capabilities.

mod abi;
pub mod client;
pub mod code;
mod control;
pub mod daemon;
pub mod fault;
pub mod handle;
pub mod node;
pub mod node_file;
pub mod payload;
pub mod signals;
pub mod view;
pub mod visibility;
pub mod wire;

/// The socket of the daemon, seen from the driver root. It is the persistence daemon's, which a driver hands to
/// containers that get a GPU: so the simulated driver works in them too.
pub const SOCKET: &str = "run/nvidia-persistenced/socket";
