//! What cannot be given out now, as taints.
//!
//! Architecture invariant: a doubt holds devices back. A device that is offered although something lies in its place
//! draws pods that can never start; one that is held back too long costs a look at a remark.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::DeviceTaint;
use kerf_api::{Blocked, Gpu, names};
use kerf_mig::{Geometry, Offer, Placement};

use super::choice::Standing;

/// The most taints of one device that every server takes: 4 in Kubernetes 1.34, 16 later. One holds it back.
const MOST_TAINTS: usize = 4;

/// The most entries of one GPU that are told apart; the most instances that any GPU holds are a dozen.
const MOST_BLOCKS: usize = 64;

/// Keeps a device from being allocated, and leaves alone who has it.
const EFFECT: &str = "NoSchedule";

/// Everything that stands in the way on one GPU.
pub(super) struct Blocks<'a> {
    geometry: &'a Geometry,
    blocks: Vec<Block<'a>>,
}

struct Block<'a> {
    key: String,
    /// `None`: the GPU with all its partitions.
    placement: Option<Placement>,
    /// What lies exactly there, where that is known: it takes engines as well, which others would need.
    instance: Option<Offer<'a>>,
    usable: Option<&'a str>,
}

impl<'a> Blocks<'a> {
    /// What the plugin says of `gpu`, and what of it could not be taken at its word.
    pub(super) fn of(gpu: &'a Gpu, geometry: &'a Geometry) -> (Blocks<'a>, Vec<String>) {
        let count = gpu.blocked.len();
        if count > MOST_BLOCKS {
            let everything =
                Block { key: names::TAINT_BLOCKED.to_owned(), placement: None, instance: None, usable: None };
            let problem = format!("{count} things in the way are too many to tell apart: the whole GPU is held back");
            return (Blocks { geometry, blocks: vec![everything] }, vec![problem]);
        }
        let mut problems = Vec::new();
        let blocks = gpu.blocked.iter().map(|blocked| block(gpu, geometry, blocked, &mut problems)).collect();
        (Blocks { geometry, blocks }, problems)
    }

    /// The taints of `device`, which is `cut` or, without it, the whole GPU: one for each reason, in the order of the
    /// keys. That it is kept for a claim alone is a reason, too.
    ///
    /// They carry no value. An instance's id would say nothing to a scheduler, and write the slice again whenever
    /// another instance is the reason.
    pub(super) fn taints(&self, device: &str, cut: Option<Offer<'_>>, standing: Standing) -> Option<Vec<DeviceTaint>> {
        let in_the_way = self.blocks.iter().filter(|block| block.usable != Some(device) && self.excludes(block, cut));
        let not_offered = (standing == Standing::Kept).then(|| names::taint_key(names::NOT_OFFERED)).flatten();
        let mut keys: BTreeSet<&str> = in_the_way.map(|block| block.key.as_str()).collect();
        keys.extend(not_offered.as_deref());
        let taint =
            |key: &str| DeviceTaint { effect: EFFECT.to_owned(), key: key.to_owned(), ..DeviceTaint::default() };
        let taints: Vec<DeviceTaint> = keys.into_iter().take(MOST_TAINTS).map(taint).collect();
        (!taints.is_empty()).then_some(taints)
    }

    fn excludes(&self, block: &Block<'_>, cut: Option<Offer<'_>>) -> bool {
        let (Some(cut), Some(placement)) = (cut, block.placement) else { return true };
        placement.overlaps(cut.placement)
            || block.instance.is_some_and(|instance| !self.geometry.fits(&[instance], cut))
    }
}

fn block<'a>(gpu: &Gpu, geometry: &'a Geometry, blocked: &'a Blocked, problems: &mut Vec<String>) -> Block<'a> {
    let key = names::taint_key(&blocked.reason).unwrap_or_else(|| {
        problems.push(format!(
            "a reason that is no CamelCase word of at most 63 letters and digits is published as {}",
            names::TAINT_BLOCKED
        ));
        names::TAINT_BLOCKED.to_owned()
    });
    let slices = geometry.memory_slices();
    let mut placement = blocked.placement.map(|at| Placement { start: at.start, size: at.size });
    if let Some(Placement { start, size }) = placement
        && !geometry.is_empty()
        && (size == 0 || start >= slices)
    {
        problems.push(format!(
            "{size} memory slices from {start} on are no place on a GPU with {slices}: the whole GPU is held back"
        ));
        placement = None;
    }
    let there = gpu.mig.iter().flat_map(|mig| &mig.instances).find(|found| Some(found.placement) == blocked.placement);
    let instance = there.and_then(|found| geometry.offer_by_id(found.profile_id, found.placement.start));
    let instance = instance.filter(|offer| Some(offer.placement) == placement);
    Block { key, placement, instance, usable: blocked.usable.as_deref() }
}
