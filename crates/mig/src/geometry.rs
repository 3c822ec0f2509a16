//! What one GPU can be cut into, and which cuts may coexist.

use crate::{Engine, Engines, Placement, Profile, limits, order};

/// Everything one GPU can be cut into: its GPU-instance profiles with their placements.
///
/// Profiles are kept in the order in which they should be offered, see [`Geometry::offers`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Geometry {
    profiles: Vec<Profile>,
}

/// One possible cut: a profile at a placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer<'a> {
    /// What is cut.
    pub profile: &'a Profile,
    /// Where.
    pub placement: Placement,
}

impl Geometry {
    /// Puts profiles and placements in order. An empty list is the geometry of a GPU without MIG.
    ///
    /// A placement without memory slices is left out, as nothing would limit its use. Of two profiles with one
    /// [label](Profile::label) the first is kept: devices are named by label and start, and two of one name cannot be
    /// told apart.
    pub fn new(profiles: Vec<Profile>) -> Geometry {
        let mut kept: Vec<Profile> = Vec::with_capacity(profiles.len());
        for mut profile in profiles {
            if kept.iter().any(|other| other.label() == profile.label()) {
                continue;
            }
            profile.placements.retain(|placement| placement.size > 0);
            profile.placements.sort_unstable();
            profile.placements.dedup();
            kept.push(profile);
        }
        kept.sort_by(order::profiles);
        Geometry { profiles: kept }
    }

    /// The profiles, small before large.
    pub fn profiles(&self) -> &[Profile] {
        &self.profiles
    }

    /// Whether there is nothing to cut: a GPU without MIG, or one that did not tell.
    pub fn is_empty(&self) -> bool {
        self.profiles.is_empty()
    }

    /// Number of memory slices: the end of the last placement. 8 on most products, 4 on an A30, 12 on an RTX PRO 6000;
    /// NVML has no call that tells it.
    pub fn memory_slices(&self) -> u32 {
        self.profiles.iter().flat_map(|profile| &profile.placements).map(|p| p.end()).max().unwrap_or(0)
    }

    /// Number of compute slices: the most that instances of one profile can hold together.
    pub fn compute_slices(&self) -> u32 {
        self.most(|profile| profile.compute_slices)
    }

    /// Memory of the largest profile in MiB: what the GPU has to share out in MIG mode. 0 without profiles.
    pub fn largest_memory_mib(&self) -> u64 {
        self.profiles.iter().map(|profile| profile.memory_mib).max().unwrap_or(0)
    }

    /// What the GPU has of each engine: the most that instances of one profile can hold together. On every known product
    /// that is what the profile over the whole GPU holds; NVML does not tell the number for MIG mode otherwise.
    pub fn totals(&self) -> Engines {
        let total = |engine| self.most(|profile| profile.engines.get(engine));
        Engines {
            multiprocessors: total(Engine::Multiprocessors),
            copy_engines: total(Engine::Copy),
            decoders: total(Engine::Decoder),
            encoders: total(Engine::Encoder),
            jpeg_engines: total(Engine::Jpeg),
            ofa_engines: total(Engine::Ofa),
        }
    }

    fn most(&self, count: impl Fn(&Profile) -> u32) -> u32 {
        let together = |profile: &Profile| count(profile).saturating_mul(profile.max_instances.max(1));
        self.profiles.iter().map(together).max().unwrap_or(0)
    }

    /// Every profile at every placement, in the order in which they should be offered to a scheduler that takes the
    /// first one that fits.
    ///
    /// * Small before large: fewer memory slices, then fewer compute slices (`1g.20gb` before `2g.20gb`: who asks for
    ///   20 GB asks for no second compute slice).
    /// * Plain before variants, and those with fewer media engines first (`-me`, `+gfx`, `+me`, `+me.all`): the one set
    ///   of media extensions is not given to who did not ask for it.
    /// * Of one profile, the placement that rules out the fewest larger cuts first, beyond those that the placements
    ///   before it have ruled out: `1g.10gb` at 6, where no `2g.20gb` could go and beside which a `4g.40gb` still fits,
    ///   then at 4 and 5 beside it. Larger means more compute slices, and cuts over the same memory slices count once.
    ///
    /// What it is worth depends on what is asked for. The test `fragmentation` counts refused requests on H100s: 6 to
    /// 20 % fewer than in ascending order for mixes of three profiles and more, or of `1g.10gb` and `2g.20gb`; about
    /// 12 % more where nobody ever asks for the `2g.20gb` and `4g.40gb` that room is kept for.
    pub fn offers(&self) -> Vec<Offer<'_>> {
        order::offers(self)
    }

    /// The cut that a device name speaks of: the profile with this [label](Profile::label) at this start.
    pub fn offer_by_label(&self, label: &str, start: u32) -> Option<Offer<'_>> {
        self.offer(start, |profile| profile.label() == label)
    }

    /// The cut that NVML speaks of: the profile with this hardware id at this start.
    pub fn offer_by_id(&self, profile_id: u32, start: u32) -> Option<Offer<'_>> {
        self.offer(start, |profile| profile.id == profile_id)
    }

    fn offer(&self, start: u32, wanted: impl Fn(&Profile) -> bool) -> Option<Offer<'_>> {
        self.profiles.iter().filter(|profile| wanted(profile)).find_map(|profile| {
            let placement = *profile.placements.iter().find(|placement| placement.start == start)?;
            Some(Offer { profile, placement })
        })
    }

    /// The smallest set of engines that have to be counted beside the memory slices, so that every set of cuts within
    /// those counters is [valid](Geometry::is_valid). In the order of [`Engine::ALL`].
    ///
    /// Where several sets are as small, optical flow accelerators and decoders are preferred. H100: only OFA, which
    /// keeps a second `+me` out. RTX PRO 6000: also decoders, of which `+me.all` takes every one.
    ///
    /// A limit that no engine can express (compute slices or `max_instances` without an engine behind it; no known
    /// product has one) is not covered: there the GPU itself refuses.
    ///
    /// Numbers that no GPU has can make the smallest set too long to find: then it is every engine, which is as safe.
    pub fn limited_engines(&self) -> Vec<Engine> {
        limits::limited_engines(self)
    }

    /// Whether `candidate` can be cut beside `occupied`, which is taken to be [valid](Geometry::is_valid) itself.
    ///
    /// The rules: the placement is one of the profile's, memory slices are not shared, and compute slices, every
    /// [engine](Geometry::totals) and the profile's `max_instances` suffice.
    pub fn fits(&self, occupied: &[Offer<'_>], candidate: Offer<'_>) -> bool {
        !occupied.iter().any(|other| other.placement.overlaps(candidate.placement))
            && self.has(candidate)
            && self.suffices_for(&occupied.iter().copied().chain([candidate]))
    }

    /// Whether these cuts can exist on one GPU at the same time; see [`Geometry::fits`] for the rules.
    pub fn is_valid(&self, cuts: &[Offer<'_>]) -> bool {
        let apart = |(index, cut): (usize, &Offer<'_>)| {
            !cuts[..index].iter().any(|other| other.placement.overlaps(cut.placement))
        };
        cuts.iter().enumerate().all(apart)
            && cuts.iter().all(|&cut| self.has(cut))
            && self.suffices_for(&cuts.iter().copied())
    }

    fn has(&self, cut: Offer<'_>) -> bool {
        self.offer_by_id(cut.profile.id, cut.placement.start) == Some(cut)
    }

    fn suffices_for<'a>(&self, cuts: &(impl Iterator<Item = Offer<'a>> + Clone)) -> bool {
        let sum = |count: &dyn Fn(&Profile) -> u32| cuts.clone().map(|cut| u64::from(count(cut.profile))).sum::<u64>();
        let totals = self.totals();
        let engine = |&engine: &Engine| sum(&|profile| profile.engines.get(engine)) <= u64::from(totals.get(engine));
        let instances = |cut: Offer<'_>| {
            sum(&|profile| u32::from(profile.id == cut.profile.id)) <= u64::from(cut.profile.max_instances)
        };
        sum(&|profile| profile.compute_slices) <= u64::from(self.compute_slices())
            && Engine::ALL.iter().all(engine)
            && cuts.clone().all(instances)
    }
}
