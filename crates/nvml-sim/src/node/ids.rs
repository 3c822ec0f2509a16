//! Ids of instances, and the minor numbers of their capability files.

use kerf_mig::Placement;
use kerf_mig::product::Architecture;

/// The id of a GPU instance at a placement, on a GPU of `total` memory slices.
///
/// Ids follow the share of memory: the whole GPU is 0, halves are 1 and 2, quarters 3 to 6, eighths 7 to 14; within a
/// class they follow the position (the open kernel module's swizzle ids). On an A100 they start in the upper half, so that
/// seven `1g` are 7, 8, 9 and 11 to 14 and a `3g` at 4 is 1 (MIG user guide, and dumps of `nvidia-smi mig -lgi`); on the
/// H100 and the RTX PRO 6000 they start at 0 (dumps). Other products are taken to be like the latter.
pub(super) fn gpu_instance_id(placement: Placement, total: u32, architecture: Architecture) -> u32 {
    let upper_first = architecture == Architecture::Ampere && total == 8;
    let start = if upper_first { (placement.start + total / 2) % total } else { placement.start };
    let position = start / placement.size;
    match total / placement.size {
        0 | 1 => 0,
        2 | 3 => 1 + position,
        4..8 => 3 + position,
        _ => 7 + position,
    }
}

/// The minor number of the capability file of a GPU instance: the open kernel module's table of 32 GPUs, 15 GPU instances
/// and 8 compute instances, behind three entries for the whole driver.
pub fn gi_minor(gpu_minor: u32, gi: u32) -> u32 {
    3 + gpu_minor * 135 + gi * 9
}

/// The minor number of the capability file of a compute instance, see [`gi_minor`].
pub fn ci_minor(gpu_minor: u32, gi: u32, ci: u32) -> u32 {
    gi_minor(gpu_minor, gi) + 1 + ci
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids<const N: usize>(starts: [u32; N], size: u32, total: u32, architecture: Architecture) -> [u32; N] {
        starts.map(|start| gpu_instance_id(Placement { start, size }, total, architecture))
    }

    #[test]
    fn ids_follow_share_and_position() {
        use Architecture::{Blackwell, Hopper};
        assert_eq!(ids([0, 1, 6], 1, 8, Hopper), [7, 8, 13], "1g");
        assert_eq!(ids([0, 2, 4, 6], 2, 8, Hopper), [3, 4, 5, 6], "2g and 1g of double memory");
        assert_eq!(ids([0, 4], 4, 8, Hopper), [1, 2], "3g");
        assert_eq!(ids([0], 8, 8, Hopper), [0], "7g");
        assert_eq!(ids([0, 1, 2, 3], 1, 4, Architecture::Ampere), [3, 4, 5, 6], "1g on an A30");
        assert_eq!(ids([0, 3, 6, 9], 3, 12, Blackwell), [3, 4, 5, 6], "1g on an RTX PRO 6000");
    }

    #[test]
    fn ids_of_an_a100_start_in_the_upper_half() {
        let ids = |starts, size| ids::<2>(starts, size, 8, Architecture::Ampere);
        assert_eq!((ids([4, 6], 1), ids([0, 1], 1)), ([7, 9], [11, 12]));
        assert_eq!((ids([4, 6], 2), ids([0, 2], 2)), ([3, 4], [5, 6]));
        assert_eq!(ids([4, 0], 4), [1, 2]);
    }

    #[test]
    fn capability_minors_match_the_kernel_table() {
        assert_eq!((gi_minor(0, 0), ci_minor(0, 0, 0), gi_minor(0, 1)), (3, 4, 12));
        assert_eq!(ci_minor(31, 14, 7), 4322, "the last one");
    }
}
