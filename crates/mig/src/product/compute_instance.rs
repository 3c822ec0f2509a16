//! How a GPU instance is divided further into compute instances.

use super::{GpuInstanceProfile, Product};

/// A compute-instance profile within a GPU instance. Compute instances share the GPU instance's memory and engines and
/// divide its streaming multiprocessors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComputeInstanceProfile {
    /// NVML's enum index (`NVML_COMPUTE_INSTANCE_PROFILE_*`).
    pub nvml_index: u32,
    /// The hardware profile id, as `nvidia-smi mig -lcip` prints it.
    pub id: u32,
    /// Compute slices.
    pub compute_slices: u32,
    /// How many of them the GPU instance can hold at once.
    pub max_instances: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
}

/// Enum index, id and compute slices. Index: nvml.h. Id: `nvidia-smi mig -lcip` on A100 and H100; other products are
/// taken to be the same.
const PROFILES: [(u32, u32, u32); 5] = [(0, 0, 1), (1, 1, 2), (2, 2, 3), (3, 3, 4), (4, 4, 7)];

impl Product {
    /// The compute-instance profiles that exist within a GPU instance of this product, small before large. The last one
    /// spans the GPU instance.
    ///
    /// Counts are those of the MIG user guide's tables (a 7g holds seven 1c, three 2c, two 3c, one 4c or one 7c; a 4g
    /// no 3c). The multiprocessors of one that does not span the GPU instance are a multiple of the smallest GPU
    /// instance's: so it is on the A100 (14, 28, 42); for other products that is an estimate.
    pub fn compute_instances(&self, gpu_instance: &GpuInstanceProfile) -> Vec<ComputeInstanceProfile> {
        let whole = &gpu_instance.profile;
        let profiles = self.mig.iter().flat_map(|mig| &mig.profiles);
        let per_slice = profiles
            .filter(|profile| profile.profile.compute_slices == 1)
            .map(|profile| profile.profile.engines.multiprocessors)
            .min();
        let exists = |slices| slices <= whole.compute_slices && (slices, whole.compute_slices) != (3, 4);
        let profile = |(nvml_index, id, compute_slices)| ComputeInstanceProfile {
            nvml_index,
            id,
            compute_slices,
            max_instances: whole.compute_slices / compute_slices,
            multiprocessors: match per_slice {
                Some(per_slice) if compute_slices < whole.compute_slices => per_slice.saturating_mul(compute_slices),
                _ => whole.engines.multiprocessors,
            },
        };
        PROFILES.into_iter().filter(|(_, _, slices)| exists(*slices)).map(profile).collect()
    }
}
