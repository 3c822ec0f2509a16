//! The vocabulary: engines, placements, profiles.

use serde::{Deserialize, Serialize};

/// A range of a GPU's memory slices, as NVML gives it (`nvmlGpuInstancePlacement_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Placement {
    /// First memory slice, from 0.
    pub start: u32,
    /// Number of memory slices.
    pub size: u32,
}

impl Placement {
    /// The first memory slice after this placement.
    pub fn end(self) -> u32 {
        self.start + self.size
    }

    /// Whether the two share a memory slice.
    pub fn overlaps(self, other: Placement) -> bool {
        self.start < other.end() && other.start < self.end()
    }

    /// The memory slices covered, ascending.
    pub fn slices(self) -> std::ops::Range<u32> {
        self.start..self.end()
    }
}

/// What a GPU instance holds beside memory. Counts as in NVML's `nvmlGpuInstanceProfileInfo_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Engines {
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Copy engines.
    pub copy_engines: u32,
    /// Video decoders (NVDEC).
    pub decoders: u32,
    /// Video encoders (NVENC).
    pub encoders: u32,
    /// JPEG engines (NVJPG).
    pub jpeg_engines: u32,
    /// Optical flow accelerators (OFA).
    pub ofa_engines: u32,
}

/// Names one of the counts in [`Engines`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Engine {
    /// Streaming multiprocessors.
    Multiprocessors,
    /// Copy engines.
    Copy,
    /// Video decoders.
    Decoder,
    /// Video encoders.
    Encoder,
    /// JPEG engines.
    Jpeg,
    /// Optical flow accelerators.
    Ofa,
}

/// A GPU-instance profile with every placement that the GPU allows for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// The hardware profile id (19 for `1g.10gb` on an H100): what NVML's create calls take and `nvidia-smi` prints.
    /// Not NVML's enum index.
    pub id: u32,
    /// The profile's name without the prefix `MIG `: `1g.10gb`, `1g.10gb+me`, `1g.24gb-me`.
    pub name: String,
    /// Compute slices.
    pub compute_slices: u32,
    /// Memory in MiB, as NVML reports it (less than the name says).
    pub memory_mib: u64,
    /// The other engines.
    pub engines: Engines,
    /// How many instances of this profile the GPU can hold at once.
    pub max_instances: u32,
    /// All placements, ascending by start.
    pub placements: Vec<Placement>,
}
