//! Which counters a scheduler needs beside the memory slices, proved by brute force.

use std::time::Instant;

use kerf_mig::{Engine, Engines, Geometry, Profile};
use proptest::prelude::*;

use crate::support::{disjoint_sets, geometry, mig_products, profile, within};

fn subsets() -> impl Iterator<Item = Vec<Engine>> {
    (0..1_u32 << Engine::ALL.len())
        .map(|bits| Engine::ALL.into_iter().enumerate().filter(|(i, _)| bits & 1 << i != 0).map(|(_, e)| e).collect())
}

/// Whether everything that keeps to the memory slices and these counters is valid.
fn sound(geometry: &Geometry, engines: &[Engine]) -> bool {
    let totals = geometry.totals();
    disjoint_sets(geometry).iter().all(|set| !within(&totals, set, engines) || geometry.is_valid(set))
}

#[test]
fn the_engines_of_each_family() {
    assert_eq!(geometry("h100-80gb").limited_engines(), [Engine::Ofa]);
    assert_eq!(geometry("a100-40gb").limited_engines(), [Engine::Ofa]);
    assert_eq!(geometry("a30").limited_engines(), [Engine::Ofa]);
    assert_eq!(geometry("b200").limited_engines(), [Engine::Ofa]);
    assert_eq!(geometry("rtx-pro-6000").limited_engines(), [Engine::Decoder, Engine::Ofa]);
}

/// Sound: what fits the counters is valid, `max_instances` included. Minimal: no smaller set of engines is sound.
#[test]
fn sound_and_minimal_on_every_product() {
    for product in mig_products() {
        let geometry = product.geometry();
        let engines = geometry.limited_engines();
        let totals = geometry.totals();
        let sets = disjoint_sets(&geometry);
        let invalid: Vec<_> = sets.into_iter().filter(|set| !geometry.is_valid(set)).collect();
        assert!(!invalid.is_empty(), "{}: nothing to keep out", product.key);
        for subset in subsets() {
            let sound = invalid.iter().all(|set| !within(&totals, set, &subset));
            if subset == engines {
                assert!(sound, "{}: {engines:?} lets something invalid through", product.key);
            } else if subset.len() < engines.len() {
                assert!(!sound, "{}: {subset:?} would do", product.key);
            }
        }
    }
}

/// It runs whenever a slice is rendered. The bound is loose enough for an unoptimised build on a busy machine.
#[test]
fn fast_on_every_product() {
    for product in mig_products() {
        let geometry = product.geometry();
        let fastest = (0..5).map(|_| {
            let start = Instant::now();
            geometry.limited_engines();
            start.elapsed()
        });
        let fastest = fastest.min().unwrap();
        println!("{}: {fastest:?}", product.key);
        assert!(fastest.as_millis() < 50, "{}: {fastest:?}", product.key);
    }
}

/// What a node says of its GPU decides how many sums of engines there are.
#[test]
fn a_search_without_end_is_given_up() {
    let starts: Vec<u32> = (0..32).collect();
    let profiles = (0..60_u32).map(|id| {
        let odd = |salt: u32| (id + 1).wrapping_mul(2_654_435_761).wrapping_add(salt.wrapping_mul(40_503)) >> 4;
        let engines = Engines {
            multiprocessors: odd(1),
            copy_engines: odd(2),
            decoders: odd(3),
            encoders: odd(4),
            jpeg_engines: odd(5),
            ofa_engines: odd(6),
        };
        Profile { engines, ..profile(id, &format!("p{id}"), 1, 7, &starts, 1) }
    });
    let geometry = Geometry::new(profiles.collect());
    let start = Instant::now();
    assert_eq!(geometry.limited_engines(), Engine::ALL, "all of them are as safe as any");
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}

#[test]
fn a_limit_that_no_engine_expresses_asks_for_no_engine() {
    let only_once = Geometry::new(vec![profile(1, "1g.1gb", 1, 1, &[0, 1], 1)]);
    assert_eq!(only_once.limited_engines(), []);
}

/// Two to four profiles over at most six memory slices, engines as they come.
fn geometries() -> impl Strategy<Value = Geometry> {
    let engines = (0..3_u32, 0..3_u32, 0..3_u32).prop_map(|(decoders, jpeg_engines, ofa_engines)| Engines {
        decoders,
        jpeg_engines,
        ofa_engines,
        ..Engines::default()
    });
    let profile = (engines, 1..4_u32, 1..4_u32, proptest::collection::btree_set(0..5_u32, 1..4), 1..3_u32).prop_map(
        |(engines, compute_slices, max_instances, starts, size)| {
            let starts: Vec<u32> = starts.into_iter().collect();
            Profile { engines, ..profile(0, "", compute_slices, max_instances, &starts, size) }
        },
    );
    proptest::collection::vec(profile, 2..5).prop_map(|profiles| {
        let named = profiles.into_iter().zip(1..).map(|(p, id)| Profile { id, name: format!("p{id}"), ..p });
        Geometry::new(named.collect())
    })
}

proptest! {
    /// Also on GPUs that do not exist: as good as counting every engine, and no smaller set is.
    #[test]
    fn as_good_as_every_engine_and_minimal(geometry in geometries()) {
        let engines = geometry.limited_engines();
        let totals = geometry.totals();
        let sets = disjoint_sets(&geometry);
        // What a scheduler can reach limit by limit: the counters may stay short of validity in the same limits only.
        let broken = |counted: &[Engine]| {
            let within: Vec<_> = sets.iter().filter(|set| within(&totals, set, counted)).collect();
            let compute = within.iter().any(|set| {
                set.iter().map(|offer| offer.profile.compute_slices).sum::<u32>() > geometry.compute_slices()
            });
            let instances: Vec<bool> = geometry.profiles().iter().map(|profile| {
                within.iter().any(|set| {
                    set.iter().filter(|offer| offer.profile.id == profile.id).count() > profile.max_instances as usize
                })
            }).collect();
            let engines = Engine::ALL.map(|engine| !within.iter().all(|set| crate::support::within(&totals, set, &[engine])));
            (compute, instances, engines)
        };
        let best = broken(&Engine::ALL);
        prop_assert_eq!(&broken(&engines), &best);
        for subset in subsets().filter(|subset| subset.len() < engines.len()) {
            prop_assert_ne!(&broken(&subset), &best);
        }
        let expressible = best.0 || best.1.contains(&true);
        prop_assert!(expressible || sound(&geometry, &engines));
    }
}
