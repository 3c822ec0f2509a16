//! The order of offers: golden files for two products, and the rules behind them for all.

use crate::support::{geometry, mig_products, name};

fn listed(key: &str) -> String {
    geometry(key).offers().into_iter().map(|offer| format!("{}\n", name(offer))).collect()
}

#[test]
fn h100() {
    insta::assert_snapshot!(listed("h100-80gb"));
}

#[test]
fn rtx_pro_6000() {
    insta::assert_snapshot!(listed("rtx-pro-6000"));
}

#[test]
fn every_profile_at_every_placement_once() {
    for product in mig_products() {
        let geometry = product.geometry();
        let mut names: Vec<String> = geometry.offers().into_iter().map(name).collect();
        let count: usize = geometry.profiles().iter().map(|profile| profile.placements.len()).sum();
        assert_eq!(names.len(), count, "{}", product.key);
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count, "{}", product.key);
    }
}

#[test]
fn small_before_large_and_plain_before_variants() {
    for product in mig_products() {
        let geometry = product.geometry();
        let offers = geometry.offers();
        for pair in offers.windows(2) {
            let [a, b] = [pair[0], pair[1]];
            let size = |offer: kerf_mig::Offer<'_>| (offer.placement.size, offer.profile.compute_slices);
            assert!(size(a) <= size(b), "{}: {} before {}", product.key, name(a), name(b));
            if size(a) == size(b) {
                let variant = |offer: kerf_mig::Offer<'_>| offer.profile.name.contains(['+', '-']);
                assert!(variant(a) <= variant(b), "{}: {} before {}", product.key, name(a), name(b));
            }
        }
    }
}

#[test]
fn the_order_does_not_depend_on_the_drivers() {
    for product in mig_products() {
        let geometry = product.geometry();
        let mut profiles = geometry.profiles().to_vec();
        profiles.reverse();
        for profile in &mut profiles {
            profile.placements.reverse();
        }
        assert_eq!(kerf_mig::Geometry::new(profiles), geometry, "{}", product.key);
    }
}
