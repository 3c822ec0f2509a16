//! Profile names as parts of device names.

use proptest::prelude::*;

use crate::support::{mig_products, profile};

fn label(name: &str) -> String {
    profile(9, name, 1, 1, &[0], 1).label()
}

#[test]
fn known_names() {
    for (name, expected) in [
        ("1g.10gb", "1g10gb"),
        ("1g.10gb+me", "1g10gb-me"),
        ("1g.24gb+me.all", "1g24gb-meall"),
        ("1g.24gb+gfx", "1g24gb-gfx"),
        ("1g.24gb-me", "1g24gb-nome"),
        ("1c.3g.40gb", "1c3g40gb"),
        ("1G.10GB", "1g10gb"),
        ("", "id9"),
        ("+", "id9"),
    ] {
        assert_eq!(label(name), expected, "{name}");
    }
}

#[test]
fn no_two_profiles_of_a_product_share_a_label() {
    for product in mig_products() {
        let profiles = &product.mig.as_ref().unwrap().profiles;
        assert_eq!(product.geometry().profiles().len(), profiles.len(), "{}", product.key);
    }
}

proptest! {
    #[test]
    fn every_label_can_stand_in_a_dns_label(name in ".{0,40}") {
        let label = label(&name);
        prop_assert!(!label.is_empty() && !label.starts_with('-') && !label.ends_with('-') && !label.contains("--"));
        prop_assert!(label.chars().all(|c| matches!(c, 'a'..='z' | '0'..='9' | '-')), "{}", label);
    }
}
