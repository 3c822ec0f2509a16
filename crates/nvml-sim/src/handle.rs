//! Handles: what NVML's opaque pointers are made of here.
//!
//! A handle is a number that says what it stands for, so nothing is ever dereferenced, it means the same in every
//! process, and one that has gone stale is recognised: by the generation of the driver, or by the serial number of the
//! instance, both of which never come back while the daemon runs (they wrap around after 32,767 and 65,535).

use serde::{Deserialize, Serialize};

/// What a handle stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A GPU (`nvmlDevice_t`).
    Gpu,
    /// A MIG device (`nvmlDevice_t`): a compute instance as a device.
    Mig {
        /// GPU instance id.
        gi: u32,
        /// Compute instance id.
        ci: u32,
    },
    /// The same MIG device, as the information about a compute instance names it.
    ///
    /// Dumps of `nvidia-smi mig -lci`, which prints `nvmlDeviceGetIndex` of this handle, show the GPU's index in every
    /// row, while NVIDIA's DRA driver takes the UUID of this handle for the MIG device's. A handle of a kind of its own
    /// is both.
    MigOfCi {
        /// GPU instance id.
        gi: u32,
        /// Compute instance id.
        ci: u32,
    },
    /// A GPU instance (`nvmlGpuInstance_t`).
    Gi {
        /// GPU instance id.
        gi: u32,
    },
    /// A compute instance (`nvmlComputeInstance_t`).
    Ci {
        /// GPU instance id.
        gi: u32,
        /// Compute instance id.
        ci: u32,
    },
}

/// An opaque NVML handle. Its C form is a pointer of the same size; null is never a valid one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
#[repr(transparent)]
pub struct Handle(u64);

/// A handle taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Which loading of the driver it belongs to, 1 to 32,767.
    pub generation: u16,
    /// Serial number of the instance; 0 for a GPU.
    pub serial: u16,
    /// The GPU's place in the node file.
    pub gpu: u8,
    /// What it stands for.
    pub target: Target,
}

// Bits: 0-7 kind, 8-15 GPU, 16-23 GPU instance, 24-31 compute instance, 32-47 serial, 48-62 generation.
const GPU: u64 = 1;
const MIG: u64 = 2;
const GI: u64 = 3;
const CI: u64 = 4;
const MIG_OF_CI: u64 = 5;

impl Handle {
    /// Its C form.
    pub fn as_ptr<T>(self) -> *mut T {
        std::ptr::without_provenance_mut(self.0 as usize)
    }

    /// Makes a handle. Instance ids are below 256 (the kernel module allows 15 GPU and 8 compute instances).
    pub fn new(parts: Parts) -> Handle {
        let (kind, gi, ci) = match parts.target {
            Target::Gpu => (GPU, 0, 0),
            Target::Mig { gi, ci } => (MIG, gi, ci),
            Target::MigOfCi { gi, ci } => (MIG_OF_CI, gi, ci),
            Target::Gi { gi } => (GI, gi, 0),
            Target::Ci { gi, ci } => (CI, gi, ci),
        };
        let byte = |value: u32| u64::from(value) & 0xff;
        Handle(
            kind | u64::from(parts.gpu) << 8
                | byte(gi) << 16
                | byte(ci) << 24
                | u64::from(parts.serial) << 32
                | (u64::from(parts.generation) & 0x7fff) << 48,
        )
    }

    /// Takes it apart; `None` for what was never a handle.
    pub fn parts(self) -> Option<Parts> {
        let byte = |shift: u32| (self.0 >> shift & 0xff) as u32;
        let (gi, ci) = (byte(16), byte(24));
        let target = match u64::from(byte(0)) {
            GPU => Target::Gpu,
            MIG => Target::Mig { gi, ci },
            MIG_OF_CI => Target::MigOfCi { gi, ci },
            GI => Target::Gi { gi },
            CI => Target::Ci { gi, ci },
            _ => return None,
        };
        let generation = (self.0 >> 48) as u16;
        Some(Parts { generation, serial: (self.0 >> 32 & 0xffff) as u16, gpu: byte(8) as u8, target })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_comes_back_in_parts() {
        for target in [
            Target::Gpu,
            Target::Mig { gi: 14, ci: 7 },
            Target::MigOfCi { gi: 0, ci: 3 },
            Target::Gi { gi: 13 },
            Target::Ci { gi: 1, ci: 0 },
        ] {
            let parts = Parts { generation: 0x7fff, serial: 0xfffe, gpu: 15, target };
            assert_eq!(Handle::new(parts).parts(), Some(parts));
        }
    }

    #[test]
    fn null_is_no_handle() {
        assert_eq!(Handle(0).parts(), None);
    }
}
