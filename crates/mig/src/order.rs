//! The order in which cuts are offered. The scheduler takes the first that fits, so the order is the placement policy.

use std::cmp::Ordering;

use crate::{Geometry, Offer, Profile};

/// Small before large, plain before variants, few media engines before many.
pub(crate) fn profiles(a: &Profile, b: &Profile) -> Ordering {
    let key = |profile: &Profile| {
        (size(profile), profile.is_variant(), profile.engines.media(), profile.memory_mib, profile.id)
    };
    key(a).cmp(&key(b))
}

/// See [`Geometry::offers`].
pub(crate) fn offers(geometry: &Geometry) -> Vec<Offer<'_>> {
    let mut offers = Vec::new();
    for profile in geometry.profiles() {
        let of_profile = profile.placements.iter().map(|&placement| Offer { profile, placement });
        let mut of_profile: Vec<_> = of_profile.map(|offer| (ruled_out(geometry, offer), offer)).collect();
        of_profile.sort_by_key(|(ruled_out, offer)| (*ruled_out, offer.placement));
        offers.extend(of_profile.into_iter().map(|(_, offer)| offer));
    }
    offers
}

/// Memory first: it is what runs out.
fn size(profile: &Profile) -> (u32, u32) {
    (profile.memory_slices(), profile.compute_slices)
}

/// How many larger cuts this one makes impossible.
fn ruled_out(geometry: &Geometry, offer: Offer<'_>) -> usize {
    let larger = geometry.profiles().iter().filter(|profile| size(profile) > size(offer.profile));
    larger.flat_map(|profile| &profile.placements).filter(|placement| placement.overlaps(offer.placement)).count()
}
