//! Which devices of a GPU are published.
//!
//! Architecture invariant: what a claim holds is published for as long as it does, whatever is wanted: the scheduler forgets what
//! an allocated device takes when it is not there. Without counters it takes nothing, and nothing is published that overlaps it or
//! something else that is published.

use std::collections::BTreeSet;

use kerf_api::{Gpu, GpuOffer, MigMode};
use kerf_mig::{Geometry, Offer};

use super::device::cut_name;
use crate::policy::Offering;

/// Why a device is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// It is to be given out.
    Offered,
    /// A claim holds it, and nobody else shall have it after that.
    Kept,
}

/// The devices of one GPU.
#[derive(Clone, Debug, Default)]
pub(super) struct Choice<'a> {
    /// Partitions, in the order in which they shall be tried.
    pub(super) cuts: Vec<(Offer<'a>, Standing)>,
    pub(super) whole: Option<Standing>,
}

impl<'a> Choice<'a> {
    /// What is wanted or held of `gpu`. Devices may overlap: they need counters.
    pub(super) fn of(gpu: &Gpu, geometry: &'a Geometry, offering: &Offering) -> Choice<'a> {
        let forms = offering.forms(&gpu.name);
        let held: BTreeSet<&str> = offering.held_of(&gpu.name).collect();
        let partitions = matches!(gpu.offer, GpuOffer::Partitions | GpuOffer::WholeOrPartitions);
        let whole = matches!(gpu.offer, GpuOffer::Whole | GpuOffer::WholeOrPartitions);
        let standing = |wanted, held| match (wanted, held) {
            (true, _) => Some(Standing::Offered),
            (false, true) => Some(Standing::Kept),
            (false, false) => None,
        };
        let cut = |cut: Offer<'a>| {
            let wanted = partitions && forms.wants(cut);
            let held = !wanted && !held.is_empty() && held.contains(cut_name(gpu, cut).as_str());
            Some((cut, standing(wanted, held)?))
        };
        // Of a GPU that cannot be read nothing is known that a device could say.
        let whole_held = held.contains(gpu.name.as_str()) && !gpu.uuid.is_empty();
        Choice {
            cuts: geometry.offers().into_iter().filter_map(cut).collect(),
            whole: standing(whole && forms.wants_whole(), whole_held),
        }
    }

    /// Whether it cannot be published without counters.
    pub(super) fn needs_counters(&self, gpu: &Gpu, offering: &Offering) -> bool {
        let offered = self.cuts.iter().any(|(_, standing)| *standing == Standing::Offered);
        offered && !offering.forms(&gpu.name).are_apart()
    }

    /// As much of it as can be published without counters: what is held, then what overlaps nothing.
    pub(super) fn without_counters(self, gpu: &Gpu, geometry: &Geometry, offering: &Offering) -> Choice<'a> {
        let held: BTreeSet<&str> = offering.held_of(&gpu.name).collect();
        let holds = |cut: Offer<'_>| !held.is_empty() && held.contains(cut_name(gpu, cut).as_str());
        let mut beside: Vec<Offer<'a>> = self.cuts.iter().map(|(cut, _)| *cut).filter(|cut| holds(*cut)).collect();
        let whole_held = held.contains(gpu.name.as_str());
        let whole = self.whole.filter(|_| whole_held || beside.is_empty() && is_uncut(gpu));
        let apart = offering.forms(&gpu.name).are_apart();
        let mut cut = |(cut, standing): (Offer<'a>, Standing)| {
            if holds(cut) {
                // Of forms that overlap none is offered: when the claim ends, this one goes.
                return Some((cut, if apart { standing } else { Standing::Kept }));
            }
            let free = apart && whole.is_none() && geometry.fits(&beside, cut);
            free.then(|| {
                beside.push(cut);
                (cut, standing)
            })
        };
        let cuts = self.cuts.into_iter().filter_map(&mut cut).collect();
        Choice { cuts, whole }
    }
}

/// Whether nothing is cut on the GPU now, by whomever, so that it is whole.
fn is_uncut(gpu: &Gpu) -> bool {
    let uncut =
        |mig: &kerf_api::MigStatus| mig.instances.is_empty() && (mig.switchable || mig.current == MigMode::Disabled);
    gpu.offer == GpuOffer::Whole || gpu.mig.as_ref().is_none_or(uncut)
}
