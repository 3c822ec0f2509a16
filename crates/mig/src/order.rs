//! The order in which cuts are offered. The scheduler takes the first that fits, so the order is the placement policy.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use crate::{Geometry, Offer, Placement, Profile};

/// Small before large, plain before variants, few media engines before many.
pub(crate) fn profiles(a: &Profile, b: &Profile) -> Ordering {
    let key = |profile: &Profile| {
        (size(profile), profile.is_variant(), profile.engines.media(), profile.memory_mib, profile.id)
    };
    key(a).cmp(&key(b))
}

/// See [`Geometry::offers`].
pub(crate) fn offers(geometry: &Geometry) -> Vec<Offer<'_>> {
    let in_order =
        |profile| placements(geometry, profile).into_iter().map(move |placement| Offer { profile, placement });
    geometry.profiles().iter().flat_map(in_order).collect()
}

/// Memory first: it is what runs out.
fn size(profile: &Profile) -> (u32, u32) {
    (profile.memory_slices(), profile.compute_slices)
}

/// The placements of a profile: always the one next that rules out the fewest larger cuts beyond those that the earlier
/// ones have ruled out, as a scheduler comes to it when the earlier ones are taken. The lowest start where that is even.
///
/// Larger means more compute slices. Cuts over the same memory slices (a `3g.40gb` and a `4g.40gb` at 0) are one chance
/// and count once; counted apart they would drive `2g.20gb` to 4, where a `3g.40gb` wastes no compute slice.
fn placements(geometry: &Geometry, profile: &Profile) -> Vec<Placement> {
    let larger = geometry.profiles().iter().filter(|other| other.compute_slices > profile.compute_slices);
    let mut open: BTreeSet<Placement> = larger.flat_map(|other| other.placements.iter().copied()).collect();
    let mut left: BTreeSet<Placement> = profile.placements.iter().copied().collect();
    let mut ordered = Vec::with_capacity(left.len());
    let ruled_out = |open: &BTreeSet<Placement>, by: Placement| open.iter().filter(|cut| cut.overlaps(by)).count();
    while let Some(next) = left.iter().copied().min_by_key(|&placement| (ruled_out(&open, placement), placement)) {
        left.remove(&next);
        open.retain(|cut| !cut.overlaps(next));
        ordered.push(next);
    }
    ordered
}
