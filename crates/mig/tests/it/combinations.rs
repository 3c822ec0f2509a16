//! What may exist at the same time on one GPU.

use kerf_mig::{Geometry, Placement};
use proptest::prelude::*;

use crate::support::{disjoint_sets, geometry, mig_products, offers, profile};

fn assert_valid(geometry: &Geometry, sets: &[&str]) {
    for set in sets {
        let set = offers(geometry, set);
        assert!(geometry.is_valid(&set), "{set:?}");
    }
}

fn assert_invalid(geometry: &Geometry, sets: &[&str]) {
    for set in sets {
        assert!(!geometry.is_valid(&offers(geometry, set)), "{set}");
    }
}

/// The combinations of the NVIDIA MIG user guide.
#[test]
fn seven_compute_slices() {
    let h100 = geometry("h100-80gb");
    assert_valid(
        &h100,
        &[
            "",
            "7g.80gb@0",
            "4g.40gb@0 3g.40gb@4",
            "3g.40gb@0 3g.40gb@4",
            "4g.40gb@0 2g.20gb@4 1g.10gb@6",
            "3g.40gb@4 2g.20gb@0 1g.10gb@2 1g.10gb@3",
            "3g.40gb@4 2g.20gb@0 2g.20gb@2",
            "2g.20gb@0 2g.20gb@2 2g.20gb@4 1g.10gb@6",
            "2g.20gb@0 2g.20gb@2 2g.20gb@4 1g.20gb@6",
            "1g.20gb@0 1g.20gb@2 1g.20gb@4 1g.20gb@6",
            "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5 1g.10gb@6",
            "1g.10gb+me@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5 1g.10gb@6",
        ],
    );
    assert_invalid(
        &h100,
        &[
            "7g.80gb@0 1g.10gb@6",
            "4g.40gb@0 3g.40gb@0",
            "3g.40gb@4 1g.10gb@6",
            "2g.20gb@2 1g.10gb@3",
            "1g.20gb@6 1g.10gb@6",
            "1g.10gb@0 1g.10gb@0",
        ],
    );
}

#[test]
fn two_3g_leave_a_compute_slice_that_nothing_can_use() {
    let h100 = geometry("h100-80gb");
    let two = offers(&h100, "3g.40gb@0 3g.40gb@4");
    assert!(h100.offers().into_iter().all(|more| !h100.fits(&two, more)));
}

#[test]
fn media_extensions_exist_once() {
    for key in ["a30", "a100-40gb", "h100-80gb", "b200", "rtx-pro-6000"] {
        let geometry = geometry(key);
        let with_me: Vec<_> =
            geometry.offers().into_iter().filter(|offer| offer.profile.name.ends_with("+me")).collect();
        for &one in &with_me {
            assert!(geometry.fits(&[], one));
            assert!(with_me.iter().all(|&other| !geometry.fits(&[one], other)), "{key}");
        }
    }
}

#[test]
fn whoever_takes_every_media_engine_leaves_room_only_for_none() {
    let rtx = geometry("rtx-pro-6000");
    let all = offers(&rtx, "1g.24gb+me.all@0");
    let beside: Vec<String> = rtx
        .offers()
        .into_iter()
        .filter(|&offer| rtx.fits(&all, offer))
        .map(|offer| offer.profile.name.clone())
        .collect();
    assert_eq!(beside, ["1g.24gb-me", "1g.24gb-me", "1g.24gb-me", "2g.48gb-me"]);
    assert_valid(&rtx, &["2g.48gb+me.all@6 1g.24gb-me@0 1g.24gb-me@3"]);
}

#[test]
fn four_compute_slices() {
    assert_valid(
        &geometry("a30"),
        &[
            "4g.24gb@0",
            "2g.12gb@0 2g.12gb@2",
            "2g.12gb+me@0 2g.12gb@2",
            "2g.12gb@2 1g.6gb@0 1g.6gb+me@1",
            "1g.6gb@0 1g.6gb@1 1g.6gb@2 1g.6gb@3",
        ],
    );
    assert_invalid(&geometry("a30"), &["4g.24gb@0 1g.6gb@3", "2g.12gb+me@0 1g.6gb+me@2", "2g.12gb@0 1g.6gb@1"]);
    assert_valid(
        &geometry("rtx-pro-6000"),
        &[
            "4g.96gb@0",
            "4g.96gb+gfx@0",
            "2g.48gb@0 2g.48gb+gfx@6",
            "2g.48gb@0 1g.24gb@6 1g.24gb@9",
            "1g.24gb@0 1g.24gb+me@3 1g.24gb+gfx@6 1g.24gb-me@9",
            "1g.24gb@0 1g.24gb@3 1g.24gb@6 1g.24gb@9",
        ],
    );
    assert_invalid(&geometry("rtx-pro-6000"), &["2g.48gb@0 1g.24gb@3", "4g.96gb@0 1g.24gb-me@9"]);
}

#[test]
fn a_placement_must_be_one_of_the_profiles() {
    let h100 = geometry("h100-80gb");
    let mut offer = offers(&h100, "2g.20gb@4")[0];
    offer.placement = Placement { start: 6, size: 2 };
    assert!(!h100.fits(&[], offer));
    offer.placement = Placement { start: 4, size: 1 };
    assert!(!h100.fits(&[], offer));
}

#[test]
fn compute_slices_and_counts_limit_where_memory_does_not() {
    let geometry =
        Geometry::new(vec![profile(1, "2g.2gb", 2, 1, &[0, 1], 1), profile(2, "1g.1gb", 1, 3, &[0, 1, 2, 3], 1)]);
    assert_eq!(geometry.compute_slices(), 3);
    assert_valid(&geometry, &["2g.2gb@0 1g.1gb@1", "1g.1gb@0 1g.1gb@1 1g.1gb@2"]);
    assert_invalid(
        &geometry,
        &["2g.2gb@0 2g.2gb@1", "2g.2gb@0 1g.1gb@1 1g.1gb@2", "1g.1gb@0 1g.1gb@1 1g.1gb@2 1g.1gb@3"],
    );
}

#[test]
fn a_gpu_without_mig_has_an_empty_geometry() {
    let none = Geometry::new(Vec::new());
    assert!(none.is_empty() && none.offers().is_empty() && none.limited_engines().is_empty());
    assert_eq!((none.memory_slices(), none.largest_memory_mib()), (0, 0));
    assert!(none.is_valid(&[]));
    assert_eq!(none.offer_by_label("1g10gb", 0), None);
}

#[test]
fn cuts_are_found_by_label_and_by_id() {
    let h100 = geometry("h100-80gb");
    let offer = h100.offer_by_label("1g10gb-me", 4).unwrap();
    assert_eq!((offer.profile.id, offer.placement), (20, Placement { start: 4, size: 1 }));
    assert_eq!(h100.offer_by_id(20, 4), Some(offer));
    assert_eq!(h100.offer_by_label("1g.10gb+me", 4), None);
    assert_eq!(h100.offer_by_label("2g20gb", 6), None);
    assert_eq!(h100.offer_by_id(7, 0), None, "an enum index is no id");
}

#[test]
fn what_cannot_be_told_apart_or_limited_is_left_out() {
    let geometry = Geometry::new(vec![
        profile(1, "1g.1gb", 1, 2, &[1, 0, 1], 1),
        profile(2, "1g.1GB", 1, 2, &[2], 1),
        profile(3, "2g.0gb", 2, 1, &[0], 0),
    ]);
    let names: Vec<_> = geometry.offers().into_iter().map(|o| (o.profile.id, o.placement.start)).collect();
    assert_eq!(names, [(1, 0), (1, 1)]);
}

/// No product's media engines or compute slices run out among cuts that share no memory, except by `+me` and `+me.all`.
#[test]
fn disjoint_cuts_without_media_extensions_are_valid() {
    for product in mig_products() {
        let geometry = product.geometry();
        for set in disjoint_sets(&geometry) {
            if !set.iter().any(|offer| offer.profile.name.contains("+me")) {
                assert!(geometry.is_valid(&set), "{} {set:?}", product.key);
            }
        }
    }
}

proptest! {
    /// Cuts go one by one; taking one away never makes the rest invalid, and their order does not matter.
    #[test]
    fn validity_is_closed_under_removal_and_order(
        product in 0..mig_products().count(),
        picks in proptest::collection::vec(any::<prop::sample::Index>(), 0..12),
        shuffle in any::<prop::sample::Index>(),
    ) {
        let geometry = mig_products().nth(product).unwrap().geometry();
        let all = geometry.offers();
        let mut cuts = Vec::new();
        for pick in picks {
            let offer = all[pick.index(all.len())];
            let fits = geometry.fits(&cuts, offer);
            let mut more = cuts.clone();
            more.push(offer);
            prop_assert_eq!(fits, geometry.is_valid(&more));
            if fits {
                cuts = more;
            }
        }
        if !cuts.is_empty() {
            let at = shuffle.index(cuts.len());
            cuts.rotate_left(at);
            prop_assert!(geometry.is_valid(&cuts));
            let removed = cuts.remove(at);
            prop_assert!(geometry.is_valid(&cuts));
            prop_assert!(geometry.fits(&cuts, removed));
        }
    }
}
