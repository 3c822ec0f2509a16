//! The vocabulary: engines, placements, profiles and their names.

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
        self.start.saturating_add(self.size)
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

impl Engines {
    /// How many of one kind.
    pub fn get(&self, engine: Engine) -> u32 {
        match engine {
            Engine::Multiprocessors => self.multiprocessors,
            Engine::Copy => self.copy_engines,
            Engine::Decoder => self.decoders,
            Engine::Encoder => self.encoders,
            Engine::Jpeg => self.jpeg_engines,
            Engine::Ofa => self.ofa_engines,
        }
    }

    /// Decoders, encoders, JPEG engines and optical flow accelerators together: the "media extensions" of `+me`.
    pub(crate) fn media(&self) -> u32 {
        [Engine::Decoder, Engine::Encoder, Engine::Jpeg, Engine::Ofa]
            .into_iter()
            .fold(0, |sum, engine| self.get(engine).saturating_add(sum))
    }
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

impl Engine {
    /// Every engine, in the order of [`Engines`]' fields.
    pub const ALL: [Engine; 6] =
        [Engine::Multiprocessors, Engine::Copy, Engine::Decoder, Engine::Encoder, Engine::Jpeg, Engine::Ofa];
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

impl Profile {
    /// The name as a part of a DNS label: `1g.10gb` is `1g10gb`, `1g.10gb+me` is `1g10gb-me`, `+me.all` is `-meall`,
    /// and the negative `1g.24gb-me` is `1g24gb-nome`, which keeps it apart from `+me`.
    ///
    /// Lower-case letters, digits and single dashes between them, whatever the driver calls the profile; a name that
    /// leaves nothing becomes `id<profile id>`.
    pub fn label(&self) -> String {
        let mut label = String::with_capacity(self.name.len() + 2);
        for c in self.name.chars() {
            match c.to_ascii_lowercase() {
                c @ ('a'..='z' | '0'..='9') => label.push(c),
                '+' if !label.is_empty() && !label.ends_with('-') => label.push('-'),
                '-' if !label.is_empty() && !label.ends_with('-') => label.push_str("-no"),
                _ => {}
            }
        }
        let label = label.trim_end_matches('-');
        if label.is_empty() { format!("id{}", self.id) } else { label.to_owned() }
    }

    /// Whether the name carries an attribute: `+me`, `+gfx`, `-me`, ...
    pub(crate) fn is_variant(&self) -> bool {
        self.name.contains(['+', '-'])
    }

    /// The most memory slices that one instance covers. 0 without placements.
    pub(crate) fn memory_slices(&self) -> u32 {
        self.placements.iter().map(|placement| placement.size).max().unwrap_or(0)
    }
}

/// The name without attributes that NVIDIA's own library computes for a profile (go-nvlib, `pkg/nvlib/device`): the
/// profile's share of the GPU's memory, rounded up to eighths, of the GPU's memory in whole GB.
///
/// For drivers whose profile calls carry no name (NVML's first `nvmlGpuInstanceProfileInfo_t`).
///
/// ```
/// assert_eq!(kerf_mig::base_name(3, 40448, 81559), "3g.40gb"); // H100 80GB
/// ```
pub fn base_name(compute_slices: u32, profile_memory_mib: u64, gpu_memory_mib: u64) -> String {
    let eighths = (u128::from(profile_memory_mib) * 8).div_ceil(u128::from(gpu_memory_mib.max(1)));
    let gpu_gb = u128::from(gpu_memory_mib.div_ceil(1024));
    format!("{compute_slices}g.{}gb", (eighths * gpu_gb + 4) / 8)
}
