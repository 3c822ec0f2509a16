//! Which counters are needed beside the memory slices.
//!
//! A set of cuts that share no memory slice is a path through the memory slices from the first to the last. The most
//! that any such path can hold of an engine is found slice by slice, without listing the paths.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use crate::{Engine, Engines, Geometry, Offer};

/// Which engine is counted when several would do: media engines first, as those are what profiles differ in.
const PREFERENCE: [Engine; 6] =
    [Engine::Ofa, Engine::Decoder, Engine::Jpeg, Engine::Encoder, Engine::Copy, Engine::Multiprocessors];

/// The most that a search may cost, in offers looked at. Known products take less than a fifth of it, see the test; a geometry
/// that no GPU has can have so many different sums of engines that a search would never end, and whoever describes a node may
/// describe a hundred of those.
const MOST_STEPS: usize = 20_000;

/// Something that cuts beside each other have to share.
struct Limit {
    /// The engine whose counter would express it; none for compute slices and `max_instances`.
    engine: Option<Engine>,
    /// What each offer takes, in the order of the offers.
    taken: Vec<u64>,
    total: u64,
}

/// See [`Geometry::limited_engines`].
pub(crate) fn limited_engines(geometry: &Geometry) -> Vec<Engine> {
    // All of them keep apart whatever some of them would.
    smallest_set(geometry, MOST_STEPS).unwrap_or_else(|| Engine::ALL.to_vec())
}

/// `None` when it would take more steps to find.
fn smallest_set(geometry: &Geometry, most_steps: usize) -> Option<Vec<Engine>> {
    let offers = geometry.offers();
    let paths = Paths::new(geometry, &offers, most_steps);

    // Most limits can never be exceeded, as memory runs out before: only the others matter from here on.
    let all = limits(geometry, &offers);
    let exceeded = paths.exceeded(&all, &[])?;
    let limits = all.into_iter().enumerate().filter(|(index, _)| exceeded.contains(index));
    let limits: Vec<Limit> = limits.map(|(_, limit)| limit).collect();

    let engines: Vec<Engine> =
        PREFERENCE.into_iter().filter(|engine| limits.iter().any(|limit| limit.engine == Some(*engine))).collect();
    let beyond_engines = paths.exceeded(&limits, &engines)?;
    let mut sets: Vec<Vec<Engine>> = (0..1_u32 << engines.len())
        .map(|bits| (0..engines.len()).filter(|i| bits & 1 << i != 0).map(|i| engines[i]).collect())
        .collect();
    sets.sort_by_key(Vec::len); // stable: preferred engines stay first
    for mut set in sets {
        if paths.exceeded(&limits, &set)? == beyond_engines {
            set.sort_unstable();
            return Some(set);
        }
    }
    None
}

fn limits(geometry: &Geometry, offers: &[Offer<'_>]) -> Vec<Limit> {
    let limit = |engine, total: u32, taken: &dyn Fn(&Offer<'_>) -> u32| Limit {
        engine,
        taken: offers.iter().map(|offer| u64::from(taken(offer))).collect(),
        total: u64::from(total),
    };
    let totals = geometry.totals();
    let engines = Engine::ALL
        .iter()
        .map(|&engine| limit(Some(engine), totals.get(engine), &|offer| offer.profile.engines.get(engine)));
    let compute = limit(None, geometry.compute_slices(), &|offer| offer.profile.compute_slices);
    let instances = geometry
        .profiles()
        .iter()
        .map(|profile| limit(None, profile.max_instances, &|offer| u32::from(offer.profile.id == profile.id)));
    engines.chain([compute]).chain(instances).collect()
}

/// All sets of offers that share no memory slice.
struct Paths<'a> {
    offers: &'a [Offer<'a>],
    totals: Engines,
    /// Every memory slice at which an offer starts or that it ends before, ascending.
    stops: Vec<u32>,
    /// Steps that are left.
    steps: Cell<usize>,
}

impl<'a> Paths<'a> {
    fn new(geometry: &Geometry, offers: &'a [Offer<'a>], most_steps: usize) -> Self {
        let stops = offers.iter().flat_map(|offer| [offer.placement.start, offer.placement.end()]);
        let stops: BTreeSet<u32> = stops.collect();
        Paths { offers, totals: geometry.totals(), stops: stops.into_iter().collect(), steps: Cell::new(most_steps) }
    }

    /// Which limits (by index) some path exceeds, although it keeps to the totals of the counted engines. `None` when no
    /// steps are left.
    fn exceeded(&self, limits: &[Limit], counted: &[Engine]) -> Option<Vec<usize>> {
        // Per stop reached: the use of the counted engines so far, and with it the most used of each limit.
        let mut reached: BTreeMap<u32, BTreeMap<Vec<u32>, Vec<u64>>> = BTreeMap::new();
        let start = self.stops.first().copied().unwrap_or(0);
        merge(reached.entry(start).or_default(), vec![0; counted.len()], vec![0; limits.len()]);
        for (&stop, &next) in self.stops.iter().zip(self.stops.iter().skip(1)) {
            for (used, most) in reached.remove(&stop).unwrap_or_default() {
                self.steps.set(self.steps.get().checked_sub(self.offers.len() + 1)?);
                for (index, offer) in self.offers.iter().enumerate().filter(|(_, o)| o.placement.start == stop) {
                    let add = |(&engine, used): (&Engine, &u32)| used.saturating_add(offer.profile.engines.get(engine));
                    let used: Vec<u32> = counted.iter().zip(&used).map(add).collect();
                    if counted.iter().zip(&used).all(|(&engine, used)| *used <= self.totals.get(engine)) {
                        let most = limits.iter().zip(&most).map(|(limit, most)| most + limit.taken[index]).collect();
                        merge(reached.entry(offer.placement.end()).or_default(), used, most);
                    }
                }
                merge(reached.entry(next).or_default(), used, most);
            }
        }
        let ends: Vec<&Vec<u64>> = reached.values().flat_map(BTreeMap::values).collect();
        let exceeded = |&index: &usize| ends.iter().any(|most| most[index] > limits[index].total);
        Some((0..limits.len()).filter(exceeded).collect())
    }
}

/// Keeps the larger value for each limit.
fn merge(reached: &mut BTreeMap<Vec<u32>, Vec<u64>>, used: Vec<u32>, most: Vec<u64>) {
    match reached.get_mut(&used) {
        Some(known) => known.iter_mut().zip(most).for_each(|(known, most)| *known = most.max(*known)),
        None => {
            reached.insert(used, most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::product::Product;

    #[test]
    fn every_product_is_far_from_the_bound() {
        for product in Product::all() {
            assert!(smallest_set(&product.geometry(), MOST_STEPS / 5).is_some(), "{}", product.key);
        }
    }
}
