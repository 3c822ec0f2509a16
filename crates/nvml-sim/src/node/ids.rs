//! Ids of instances, and the minor numbers of their capability files.

use kerf_mig::Placement;

/// The id of a GPU instance at a placement, on a GPU of `total` memory slices of which `taken` ids are in use.
///
/// Ids follow the share of memory: the whole GPU is 0, halves are 1 and 2, quarters 3 to 6, eighths 7 to 14. Quarters
/// and eighths are numbered by position. Halves are given the first free id: a `3g` in the upper half has been seen with
/// id 1 (MIG user guide) and with id 2, beside another one in the lower half. Source of the classes: the open kernel
/// module, swizzle ids.
pub(super) fn gpu_instance_id(placement: Placement, total: u32, taken: impl Fn(u32) -> bool) -> u32 {
    let position = placement.start / placement.size;
    match total / placement.size {
        0 | 1 => 0,
        2 | 3 if taken(1) => 2,
        2 | 3 => 1,
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

    fn id(start: u32, size: u32, total: u32) -> u32 {
        gpu_instance_id(Placement { start, size }, total, |_| false)
    }

    #[test]
    fn ids_follow_share_and_position() {
        assert_eq!([0, 1, 6].map(|start| id(start, 1, 8)), [7, 8, 13], "1g on eight slices");
        assert_eq!([0, 2, 4, 6].map(|start| id(start, 2, 8)), [3, 4, 5, 6], "2g on eight slices");
        assert_eq!(id(0, 8, 8), 0, "7g");
        assert_eq!([0, 1, 2, 3].map(|start| id(start, 1, 4)), [3, 4, 5, 6], "1g on an A30");
        assert_eq!([0, 3, 6, 9].map(|start| id(start, 3, 12)), [3, 4, 5, 6], "1g on an RTX PRO 6000");
    }

    #[test]
    fn halves_take_the_first_free_id() {
        let upper = Placement { start: 4, size: 4 };
        assert_eq!(gpu_instance_id(upper, 8, |_| false), 1);
        assert_eq!(gpu_instance_id(upper, 8, |id| id == 1), 2);
    }

    #[test]
    fn capability_minors_match_the_kernel_table() {
        assert_eq!((gi_minor(0, 0), ci_minor(0, 0, 0), gi_minor(0, 1)), (3, 4, 12));
        assert_eq!(ci_minor(31, 14, 7), 4322, "the last one");
    }
}
