//! Shared by the tests: geometries by key, offers by name, and every set of offers that shares no memory slice.

use kerf_mig::product::Product;
use kerf_mig::{Engine, Engines, Geometry, Offer, Placement, Profile};

pub(crate) fn geometry(key: &str) -> Geometry {
    Product::by_key(key).unwrap_or_else(|| panic!("no product {key}")).geometry()
}

pub(crate) fn mig_products() -> impl Iterator<Item = &'static Product> {
    Product::all().iter().filter(|product| product.mig.is_some())
}

/// `"4g.40gb@0 3g.40gb@4"`.
pub(crate) fn offers<'a>(geometry: &'a Geometry, text: &str) -> Vec<Offer<'a>> {
    text.split_whitespace()
        .map(|one| {
            let (name, start) = one.split_once('@').expect("profile@start");
            let profile = geometry.profiles().iter().find(|profile| profile.name == name);
            let profile = profile.unwrap_or_else(|| panic!("no profile {name}"));
            geometry
                .offer_by_label(&profile.label(), start.parse().expect("a start"))
                .unwrap_or_else(|| panic!("no offer {one}"))
        })
        .collect()
}

pub(crate) fn name(offer: Offer<'_>) -> String {
    format!("{}@{}", offer.profile.name, offer.placement.start)
}

/// Every set of offers that shares no memory slice, valid or not.
pub(crate) fn disjoint_sets(geometry: &Geometry) -> Vec<Vec<Offer<'_>>> {
    fn extend<'a>(offers: &[Offer<'a>], from: u32, set: &mut Vec<Offer<'a>>, sets: &mut Vec<Vec<Offer<'a>>>) {
        sets.push(set.clone());
        for &offer in offers.iter().filter(|offer| offer.placement.start >= from) {
            set.push(offer);
            extend(offers, offer.placement.end(), set, sets);
            set.pop();
        }
    }
    let mut sets = Vec::new();
    extend(&geometry.offers(), 0, &mut Vec::new(), &mut sets);
    sets
}

/// Whether a set keeps to these totals of these engines.
pub(crate) fn within(totals: &Engines, set: &[Offer<'_>], engines: &[Engine]) -> bool {
    let used = |engine| set.iter().map(|offer| offer.profile.engines.get(engine)).sum::<u32>();
    engines.iter().all(|&engine| used(engine) <= totals.get(engine))
}

/// A made-up profile.
pub(crate) fn profile(
    id: u32,
    name: &str,
    compute_slices: u32,
    max_instances: u32,
    starts: &[u32],
    size: u32,
) -> Profile {
    Profile {
        id,
        name: name.to_owned(),
        compute_slices,
        memory_mib: u64::from(size) * 1024,
        engines: Engines::default(),
        max_instances,
        placements: starts.iter().map(|&start| Placement { start, size }).collect(),
    }
}
