//! UUIDs and serial numbers.

use sha1::{Digest, Sha1};
use uuid::Uuid;

/// The UUID of a GPU: the same for the same node, place and product, so that it survives a restart of the node.
pub fn gpu_uuid(node: &str, pci: &str, product: &str) -> String {
    format!("GPU-{}", digest(&["gpu", node, pci, product]))
}

/// The serial number of a GPU's board: 13 digits.
pub fn gpu_serial(node: &str, pci: &str, product: &str) -> String {
    let number = digest(&["serial", node, pci, product]).as_u128() % 10_u128.pow(12);
    format!("1{number:012}")
}

/// The UUID of a MIG device by what the open kernel module makes it of: GPU, GPU instance id and graphics engine, hashed
/// to a UUID of version 5.
pub(super) fn mig_uuid(gpu_uuid: &str, gi: u32, engine: u32) -> String {
    format!("MIG-{}", digest(&["mig", gpu_uuid, &gi.to_string(), &engine.to_string()]))
}

/// A UUID that never was before.
pub(super) fn fresh_mig_uuid() -> String {
    format!("MIG-{}", Uuid::new_v4())
}

fn digest(parts: &[&str]) -> Uuid {
    let mut hash = Sha1::new();
    for part in parts {
        hash.update(part.as_bytes());
        hash.update([0]);
    }
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash.finalize()[..16]);
    uuid::Builder::from_sha1_bytes(bytes).into_uuid()
}
