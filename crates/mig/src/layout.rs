//! Where the partitions of a static layout lie.

use std::collections::BTreeMap;

use crate::{Geometry, Offer, Profile, order};

/// The most cuts that a search looks at. No layout of a known product takes a fifth of it, see the test; a geometry that no GPU
/// has shall not hold up the others.
const MOST_STEPS: usize = 2_000;

/// Why a GPU cannot have a layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// The GPU has no such profile.
    #[error("the GPU has no profile {name:?}; it has {}", known.join(", "))]
    UnknownProfile {
        /// As the layout names it.
        name: String,
        /// What there is.
        known: Vec<String>,
    },
    /// The partitions have no room beside each other.
    #[error("{wanted} do not fit on the GPU together")]
    NoRoom {
        /// All of them: `2 x 3g.40gb and 1 x 1g.10gb`.
        wanted: String,
    },
}

impl Geometry {
    /// Places a layout, given as how many partitions of which profile (by name): larger ones first, each at the first
    /// place in the order of [`Geometry::offers`] that leaves room for the rest. The same layout has the same places
    /// always. In the order of the places.
    ///
    /// # Errors
    ///
    /// When the GPU lacks a profile, or when there is no room.
    pub fn place(&self, layout: &BTreeMap<String, u32>) -> Result<Vec<Offer<'_>>, LayoutError> {
        self.place_within(MOST_STEPS, layout)
    }

    fn place_within(&self, steps: usize, layout: &BTreeMap<String, u32>) -> Result<Vec<Offer<'_>>, LayoutError> {
        let mut groups = Vec::new();
        for (name, &count) in layout.iter().filter(|(_, count)| **count > 0) {
            let profile = self.profiles().iter().find(|profile| profile.name == *name);
            groups.push((profile.ok_or_else(|| self.unknown(name))?, count));
        }
        let no_room = || LayoutError::NoRoom { wanted: words(&groups) };
        // What needs no search to be seen. Also a bound on how deep one goes.
        let memory = |(profile, count): &(&Profile, u32)| u64::from(profile.memory_slices()) * u64::from(*count);
        if groups.iter().any(|(profile, count)| *count > profile.max_instances)
            || groups.iter().map(memory).sum::<u64>() > u64::from(self.memory_slices())
        {
            return Err(no_room());
        }
        let mut larger_first = groups.clone();
        larger_first.sort_by(|(a, _), (b, _)| order::profiles(b, a));
        let offers = self.offers();
        let each = |&(profile, count): &(&Profile, u32)| {
            let places: Vec<Offer<'_>> =
                offers.iter().filter(|offer| offer.profile.id == profile.id).copied().collect();
            (places, count)
        };
        let groups_with_places = larger_first.iter().map(each).collect();
        let mut search = Search { geometry: self, groups: groups_with_places, placed: Vec::new(), steps };
        if !search.place(0, 0, 0) {
            return Err(no_room());
        }
        let mut placed = search.placed;
        placed.sort_by_key(|cut| cut.placement);
        Ok(placed)
    }

    fn unknown(&self, name: &str) -> LayoutError {
        let known = self.profiles().iter().map(|profile| profile.name.clone()).collect();
        LayoutError::UnknownProfile { name: name.to_owned(), known }
    }
}

struct Search<'a> {
    geometry: &'a Geometry,
    /// Places of a profile, and how many partitions of it are wanted.
    groups: Vec<(Vec<Offer<'a>>, u32)>,
    placed: Vec<Offer<'a>>,
    steps: usize,
}

impl Search<'_> {
    /// Places what is left from partition `done` of `group` on, at its places from `first` on: partitions of one profile are
    /// alike, so that one order of them is enough.
    fn place(&mut self, group: usize, done: u32, first: usize) -> bool {
        let Some((places, count)) = self.groups.get(group) else { return true };
        if done == *count {
            return self.place(group + 1, 0, 0);
        }
        for index in first..places.len() {
            let Some(left) = self.steps.checked_sub(1) else { return false };
            self.steps = left;
            let cut = self.groups[group].0[index];
            if self.geometry.fits(&self.placed, cut) {
                self.placed.push(cut);
                if self.place(group, done + 1, index + 1) {
                    return true;
                }
                self.placed.pop();
            }
        }
        false
    }
}

fn words(groups: &[(&Profile, u32)]) -> String {
    let each: Vec<String> = groups.iter().map(|(profile, count)| format!("{count} x {}", profile.name)).collect();
    each.join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::product::Product;

    /// Counts of each profile, up to what a GPU holds of it.
    fn layouts(profiles: &[Profile]) -> Vec<BTreeMap<String, u32>> {
        let Some((profile, rest)) = profiles.split_first() else { return vec![BTreeMap::new()] };
        let with = |count: u32| {
            let mut all = layouts(rest);
            all.iter_mut().for_each(|layout| _ = layout.insert(profile.name.clone(), count));
            all
        };
        (0..=profile.max_instances).flat_map(with).collect()
    }

    #[test]
    fn every_layout_is_far_from_the_bound() {
        for product in Product::all().iter().filter(|product| product.mig.is_some()) {
            let geometry = product.geometry();
            // Variants take the places of the plain ones; all together would be too many to list.
            let plain: Vec<Profile> =
                geometry.profiles().iter().filter(|profile| !profile.is_variant()).cloned().collect();
            for layout in layouts(&plain) {
                let (near, far) = (geometry.place_within(MOST_STEPS / 5, &layout), geometry.place(&layout));
                assert_eq!(near, far, "{} {layout:?}", product.key);
            }
        }
    }
}
