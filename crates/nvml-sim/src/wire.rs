//! What library and daemon say to each other.
//!
//! A message is a length (32 bits, little-endian) and that many bytes of JSON: a [`Request`], answered by
//! `{"ok": ...}` or `{"error": <nvmlReturn_t>}`. The type of an answer follows from the [`Op`] and is written there.
//!
//! Both sides come from one build (the daemon installs the library), so the version only has to tell a container that
//! still has the library of another build: it gets `NVML_ERROR_LIB_RM_VERSION_MISMATCH`, as with a real driver.

use std::io::{self, Read, Write};

use kerf_mig::Placement;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::code::Code;
use crate::fault::{Fault, ForeignInstance, GpuName};
use crate::handle::Handle;
use crate::view::GiProfileKey;

/// The protocol's version.
pub const VERSION: u32 = 1;

/// No message is longer.
const MAX_MESSAGE: u32 = 4 << 20;

/// One call of one NVML function.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Request {
    /// [`VERSION`] of the sender.
    pub version: u32,
    /// The NVML function that was called: latencies and faults go by it.
    pub function: String,
    /// Whether the calling process may administer MIG.
    pub privileged: bool,
    /// What is asked for.
    pub op: Op,
}

/// What can be asked, with the type of its answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Op {
    /// The node and its GPUs: [`crate::view::Node`].
    Node,
    /// A GPU or a MIG device: [`crate::view::Device`].
    Device(Handle),
    /// The MIG device with this UUID: [`Handle`].
    MigByUuid(String),
    /// The MIG devices of a GPU, in the order of their indexes: `Vec<`[`crate::view::MigDevice`]`>`.
    MigDevices(Handle),
    /// Switches MIG mode: the activation status, an `nvmlReturn_t`.
    SetMigMode(Handle, bool),
    /// Sets the compute mode (`nvmlComputeMode_t`): `()`.
    SetComputeMode(Handle, u32),
    /// Switches persistence mode: `()`.
    SetPersistence(Handle, bool),
    /// Sets the time slice of a GPU, 0 to 3: `()`. NVML has no public call for it.
    SetTimeslice(Handle, u32),
    /// A GPU-instance profile: [`crate::view::GiProfile`].
    GiProfile(Handle, GiProfileKey),
    /// All placements of a GPU-instance profile (hardware id): `Vec<Placement>`.
    GiPlacements(Handle, u32),
    /// How many more GPU instances of a profile (hardware id) could be created: `u32`.
    GiCapacity(Handle, u32),
    /// Creates a GPU instance of a profile (hardware id), at a placement or at the first that is free: [`crate::view::Gi`].
    CreateGi(Handle, u32, Option<Placement>),
    /// The GPU instances of a profile (hardware id): `Vec<`[`crate::view::Gi`]`>`.
    Gis(Handle, u32),
    /// The GPU instance with this id: [`crate::view::Gi`].
    GiById(Handle, u32),
    /// A GPU instance: [`crate::view::Gi`].
    Gi(Handle),
    /// Destroys a GPU instance: `()`.
    DestroyGi(Handle),
    /// A compute-instance profile of a GPU instance, by NVML's enum index and engine profile: [`crate::view::CiProfile`].
    CiProfile(Handle, u32, u32),
    /// All placements of a compute-instance profile (hardware id): `Vec<Placement>`, in compute slices.
    CiPlacements(Handle, u32),
    /// How many more compute instances of a profile (hardware id) could be created: `u32`.
    CiCapacity(Handle, u32),
    /// Creates a compute instance of a profile (hardware id), at a placement or at the first that is free: [`crate::view::Ci`].
    CreateCi(Handle, u32, Option<Placement>),
    /// The compute instances of a profile (hardware id) in a GPU instance: `Vec<`[`crate::view::Ci`]`>`.
    Cis(Handle, u32),
    /// The compute instance with this id in a GPU instance: [`crate::view::Ci`].
    CiById(Handle, u32),
    /// A compute instance: [`crate::view::Ci`].
    Ci(Handle),
    /// Destroys a compute instance: `()`.
    DestroyCi(Handle),
    /// The processes on a GPU or a MIG device: `Vec<`[`crate::view::Process`]`>`.
    Processes(Handle),
    /// The name of a process on any GPU: `Option<String>`.
    ProcessName(u32),
    /// Something from outside the node, see [`Control`].
    Control(Control),
}

/// What happens to a node from outside: the administrator's hand, and fate.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Control {
    /// The state of the whole node, for a person or a test: [`crate::daemon::NodeState`].
    State,
    /// Resets a GPU (its place in the node file): `()`.
    Reset(usize),
    /// Unloads and loads the driver: `()`.
    Reload,
    /// Sets the latency of one function, in milliseconds: `()`.
    Latency(String, u64),
    /// Makes a GPU unreadable (`true`) or readable again: `()`.
    Break(usize, bool),
    /// The node is booted: [`Control::Reload`], GPUs that were lost are back, device nodes and kernel files are made anew:
    /// `()`.
    Reboot,
    /// Arms a fault: its id, a `u64`.
    Arm(Fault),
    /// The faults that are armed: `Vec<`[`crate::fault::Armed`]`>`.
    Faults,
    /// Clears a fault: `()`.
    Clear(u64),
    /// Clears all: `()`.
    ClearAll,
    /// Somebody else creates an instance: [`crate::view::Created`].
    Create(ForeignInstance),
    /// Somebody else destroys the GPU instance with this id and what is in it: `()`.
    Destroy(GpuName, u32),
}

/// An answer on the wire.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Reply<T> {
    /// The call succeeded.
    Ok(T),
    /// It did not.
    Error(Code),
}

/// Writes one message.
///
/// # Errors
///
/// Those of the writer, and of a message that is too long.
pub fn write<T: Serialize>(mut to: impl Write, message: &T) -> io::Result<()> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, message)?;
    let length = u32::try_from(bytes.len() - 4).ok().filter(|length| *length <= MAX_MESSAGE);
    let length = length.ok_or_else(|| io::Error::other("message too long"))?;
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    to.write_all(&bytes)
}

/// Reads the bytes of one message; `None` when the other side has hung up between messages.
///
/// # Errors
///
/// Those of the reader, and of a message that is too long.
pub fn read_bytes(mut from: impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    match from.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let length = u32::from_le_bytes(length);
    if length > MAX_MESSAGE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "message too long"));
    }
    let mut bytes = vec![0; length as usize];
    from.read_exact(&mut bytes)?;
    Ok(Some(bytes))
}

/// Reads one message; an end of the stream is an error.
///
/// # Errors
///
/// Those of the reader, and of bytes that are no such message.
pub fn read<T: DeserializeOwned>(from: impl Read) -> io::Result<T> {
    let bytes = read_bytes(from)?.ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok(serde_json::from_slice(&bytes)?)
}
