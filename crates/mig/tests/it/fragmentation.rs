//! The order of offers, measured: requests arrive and leave, each takes the first offer that fits on the first GPU that
//! has one, as the Kubernetes scheduler does. How many find no place?

use kerf_mig::{Geometry, Offer};

use crate::support::geometry;

const GPUS: u64 = 4;
const ARRIVALS: u64 = 3_000;
const SEEDS: std::ops::Range<u64> = 0..4;

/// What the requests ask for: profiles by name, and how often each is asked for.
type Mix = &'static [(&'static str, u64)];

/// Everything an H100 offers.
const MIXED: Mix = &[("1g.10gb", 40), ("1g.20gb", 8), ("2g.20gb", 25), ("3g.40gb", 15), ("4g.40gb", 7), ("7g.80gb", 5)];

/// SplitMix64 (Steele, Lea, Flood 2014): the same arrivals on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// How many requests are refused when offers are tried in this order and the requests would, on average, fill `load`
/// percent of the memory slices.
fn refused(geometry: &Geometry, order: &[Offer<'_>], mix: Mix, load: u64, seed: u64) -> u32 {
    let weights: u64 = mix.iter().map(|(_, weight)| weight).sum();
    let size = |name: &str| {
        let offer = order.iter().find(|offer| offer.profile.name == name);
        u64::from(offer.unwrap_or_else(|| panic!("no profile {name}")).placement.size)
    };
    let mean_size_times_weights: u64 = mix.iter().map(|(name, weight)| size(name) * weight).sum();
    let capacity = GPUS * u64::from(geometry.memory_slices());
    let mean_stay = load * capacity * weights / (100 * mean_size_times_weights);

    let mut random = Random(seed);
    let mut gpus: Vec<Vec<(Offer<'_>, u64)>> = (0..GPUS).map(|_| Vec::new()).collect();
    let mut refused = 0;
    for now in 0..ARRIVALS {
        for gpu in &mut gpus {
            gpu.retain(|(_, until)| *until > now);
        }
        // Both draws happen for every arrival, so that every order sees the same arrivals.
        let mut draw = random.below(weights);
        let until = now + 1 + random.below(2 * mean_stay);
        let mut kinds = mix.iter();
        let name = loop {
            let (name, weight) = kinds.next().expect("the draw is below the sum of the weights");
            if draw < *weight {
                break *name;
            }
            draw -= weight;
        };
        let place = gpus.iter().enumerate().find_map(|(gpu, live)| {
            let occupied: Vec<Offer<'_>> = live.iter().map(|(offer, _)| *offer).collect();
            let mut asked = order.iter().copied().filter(|offer| offer.profile.name == name);
            asked.find(|offer| geometry.fits(&occupied, *offer)).map(|offer| (gpu, offer))
        });
        match place {
            Some((gpu, offer)) => gpus[gpu].push((offer, until)),
            None => refused += 1,
        }
    }
    refused
}

/// As a driver that sorts its devices by name offers them.
fn ascending(geometry: &Geometry) -> Vec<Offer<'_>> {
    let mut offers = geometry.offers();
    offers.sort_by_key(|offer| (offer.profile.label(), offer.profile.id, offer.placement.start));
    offers
}

/// Refused requests in our order and in ascending order, over several loads and all seeds.
fn compare(key: &str, what: &str, mix: Mix) -> (u32, u32) {
    let geometry = geometry(key);
    let [ours, ascending] = [geometry.offers(), ascending(&geometry)].map(|order| {
        let at = |load| SEEDS.map(|seed| refused(&geometry, &order, mix, load, seed)).sum::<u32>();
        [45, 60, 75].map(at).into_iter().sum::<u32>()
    });
    let requests = 3 * ARRIVALS * (SEEDS.end - SEEDS.start);
    println!(
        "{key}, {what}: of {requests} requests {ours} refused, {ascending} in ascending order ({:+.1} %)",
        100.0 * (f64::from(ours) / f64::from(ascending) - 1.0)
    );
    (ours, ascending)
}

#[test]
fn mixed_use_of_an_h100_refuses_clearly_fewer() {
    let partitions: Mix = &[("1g.10gb", 40), ("2g.20gb", 30), ("3g.40gb", 20), ("4g.40gb", 10)];
    let small: Mix = &[("1g.10gb", 65), ("2g.20gb", 35)];
    let with_whole: Mix = &[("1g.10gb", 50), ("2g.20gb", 30), ("7g.80gb", 20)];
    let cases = [
        ("everything", MIXED, 90),
        ("1g to 4g", partitions, 87),
        ("1g and 2g", small, 82),
        ("1g, 2g, 7g", with_whole, 97),
    ];
    for (what, mix, at_most_percent) in cases {
        let (ours, ascending) = compare("h100-80gb", what, mix);
        assert!(ours * 100 <= ascending * at_most_percent, "{what}: {ours} against {ascending}");
    }
}

#[test]
fn without_4g_it_still_refuses_fewer() {
    let balanced: Mix = &[("1g.10gb", 60), ("2g.20gb", 25), ("3g.40gb", 15)];
    let large: Mix = &[("2g.20gb", 60), ("3g.40gb", 40)];
    for (what, mix) in [("1g to 3g", balanced), ("2g and 3g", large)] {
        let (ours, ascending) = compare("h100-80gb", what, mix);
        assert!(ours < ascending, "{what}: {ours} against {ascending}");
    }
}

/// Where the room that the order keeps is never asked for, keeping it has a price. It stays small.
#[test]
fn one_sided_use_costs_little() {
    let one_and_three: Mix = &[("1g.10gb", 75), ("3g.40gb", 25)];
    let double: Mix = &[("1g.10gb", 60), ("1g.20gb", 30), ("3g.40gb", 10)];
    for (what, mix) in [("1g and 3g", one_and_three), ("1g, double memory, 3g", double)] {
        let (ours, ascending) = compare("h100-80gb", what, mix);
        assert!(ours * 100 <= ascending * 120, "{what}: {ours} against {ascending}");
    }
}

/// Four equal quarters leave nothing to choose: both orders fill one half before the other.
#[test]
fn on_four_slices_both_orders_are_the_same() {
    let a30: Mix = &[("1g.6gb", 60), ("2g.12gb", 30), ("4g.24gb", 10)];
    let rtx: Mix = &[
        ("1g.24gb", 50),
        ("1g.24gb+me", 5),
        ("1g.24gb+me.all", 5),
        ("1g.24gb-me", 10),
        ("2g.48gb", 20),
        ("4g.96gb", 10),
    ];
    for (key, mix) in [("a30", a30), ("rtx-pro-6000", rtx)] {
        let (ours, ascending) = compare(key, "everything", mix);
        assert_eq!(ours, ascending, "{key}");
    }
}
