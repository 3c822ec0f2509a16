//! Static layouts find their places.

use std::collections::BTreeMap;

use kerf_mig::LayoutError;

use crate::support::{disjoint_sets, geometry, mig_products, name};

fn layout(text: &str) -> BTreeMap<String, u32> {
    let one = |one: &str| {
        let (count, name) = one.split_once('x').expect("countxprofile");
        (name.to_owned(), count.parse().expect("a count"))
    };
    text.split_whitespace().map(one).collect()
}

fn placed(product: &str, text: &str) -> Result<String, LayoutError> {
    let geometry = geometry(product);
    let places: Vec<String> = geometry.place(&layout(text))?.into_iter().map(name).collect();
    Ok(places.join(" "))
}

/// What people write into layout files, and the places that are the device names.
#[test]
fn layouts_of_the_usual_files() {
    for (product, text, places) in [
        ("a100-80gb", "2x3g.40gb", "3g.40gb@0 3g.40gb@4"),
        ("a100-80gb", "7x1g.10gb", "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5 1g.10gb@6"),
        ("a100-80gb", "3x2g.20gb", "2g.20gb@0 2g.20gb@2 2g.20gb@4"),
        ("a100-80gb", "2x1g.10gb 1x2g.20gb 1x3g.40gb", "2g.20gb@0 1g.10gb@2 1g.10gb@3 3g.40gb@4"),
        ("a100-80gb", "1x4g.40gb 1x3g.40gb", "4g.40gb@0 3g.40gb@4"),
        ("a100-80gb", "1x3g.40gb 4x1g.10gb", "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 3g.40gb@4"),
        ("a100-80gb", "1x7g.80gb", "7g.80gb@0"),
        ("a100-80gb", "0x7g.80gb", ""),
    ] {
        assert_eq!(placed(product, text).unwrap(), places, "{product} {text}");
    }
}

#[test]
fn what_no_gpu_can_be_is_said() {
    for (product, text, words) in [
        ("a100-80gb", "3x3g.40gb", "3 x 3g.40gb do not fit on the GPU together"),
        ("a100-80gb", "1x1g.10gb 2x3g.40gb", "1 x 1g.10gb and 2 x 3g.40gb do not fit on the GPU together"),
        ("h100-80gb", "2x1g.10gb+me", "2 x 1g.10gb+me do not fit on the GPU together"),
        ("h100-80gb", "4000000000x1g.10gb", "4000000000 x 1g.10gb do not fit on the GPU together"),
        ("a100-40gb", "1x3g.40gb", "the GPU has no profile \"3g.40gb\"; it has 1g.5gb, "),
        ("l40s", "1x1g.10gb", "the GPU has no profile \"1g.10gb\"; it has "),
    ] {
        let error = placed(product, text).unwrap_err().to_string();
        assert!(error.starts_with(words), "{product} {text}: {error}");
    }
}

/// Whatever can exist on a GPU can be a layout of it, and what is placed can exist.
#[test]
fn every_valid_set_of_cuts_is_a_layout() {
    for product in mig_products() {
        let geometry = product.geometry();
        let mut layouts = BTreeMap::new();
        for set in disjoint_sets(&geometry) {
            let mut counts = BTreeMap::new();
            set.iter().for_each(|cut| *counts.entry(cut.profile.name.clone()).or_insert(0) += 1);
            *layouts.entry(counts).or_insert(false) |= geometry.is_valid(&set);
        }
        for (layout, possible) in layouts {
            let placed = geometry.place(&layout);
            assert_eq!(placed.is_ok(), possible, "{} {layout:?}: {placed:?}", product.key);
            assert!(placed.is_ok_and(|cuts| geometry.is_valid(&cuts)) || !possible, "{} {layout:?}", product.key);
        }
    }
}
