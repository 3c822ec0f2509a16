//! What the cluster's controller wants of the GPUs, beyond what claims need.
//!
//! It is told again after each start and kept nowhere: a plugin that has not heard of it yet removes nothing that it did not make.

use std::collections::BTreeMap;

use kerf_nvml::{MigMode, PciAddress};
use tokio::sync::watch;

use super::ForeignPolicy;

/// What is wanted of one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// What to do about instances that no claim explains; `None`: what holds for all GPUs.
    pub foreign: Option<ForeignPolicy>,
    /// The MIG mode while nothing uses the GPU; `None`: off.
    pub mig_mode: Option<MigMode>,
}

/// What is wanted of each GPU, shared by all who act on it.
#[derive(Clone, Debug)]
pub struct Wishes {
    otherwise: ForeignPolicy,
    told: watch::Sender<Option<BTreeMap<PciAddress, Wish>>>,
}

impl Wishes {
    /// Nothing is told yet: until something is told of a GPU its foreign instances are kept. `otherwise` holds where a wish leaves
    /// it open.
    pub fn new(otherwise: ForeignPolicy) -> Wishes {
        Wishes { otherwise, told: watch::Sender::default() }
    }

    /// From now on these are the wishes, and no others. True if they are others than before.
    pub fn tell(&self, wishes: BTreeMap<PciAddress, Wish>) -> bool {
        self.told.send_if_modified(|told| {
            if told.as_ref() == Some(&wishes) {
                return false;
            }
            tracing::info!(?wishes, "what is wanted of the GPUs");
            *told = Some(wishes);
            true
        })
    }

    /// Changes each time the wishes are others than before.
    pub fn changes(&self) -> watch::Receiver<Option<BTreeMap<PciAddress, Wish>>> {
        self.told.subscribe()
    }

    /// What to say about instances on a GPU that no claim explains. As long as nothing is told of it that is what most likely will be
    /// told: what is published shall not change twice at every start.
    pub fn foreign(&self, gpu: PciAddress) -> ForeignPolicy {
        let told = self.told.borrow();
        told.as_ref().and_then(|wishes| wishes.get(&gpu)?.foreign).unwrap_or(self.otherwise)
    }

    /// What to do about them: nothing on a GPU of which the controller has not spoken, as it may be about to say so.
    pub(super) fn foreign_for_sure(&self, gpu: PciAddress) -> ForeignPolicy {
        let is_told = self.told.borrow().as_ref().is_some_and(|wishes| wishes.contains_key(&gpu));
        if is_told { self.foreign(gpu) } else { ForeignPolicy::Keep }
    }

    /// The MIG mode of a GPU that nothing uses, if anything is said of it.
    pub(super) fn mig_mode(&self, gpu: PciAddress) -> Option<MigMode> {
        self.mig_modes().get(&gpu).copied()
    }

    /// The same of all GPUs.
    pub(super) fn mig_modes(&self) -> BTreeMap<PciAddress, MigMode> {
        let told = self.told.borrow();
        told.iter().flatten().filter_map(|(gpu, wish)| Some((*gpu, wish.mig_mode?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_yet_destroys_nothing() {
        let (one, other): (PciAddress, PciAddress) = ("0000:3b:00.0".parse().unwrap(), "0000:5e:00.0".parse().unwrap());
        let wishes = Wishes::new(ForeignPolicy::Delete);
        assert_eq!((wishes.foreign(one), wishes.foreign_for_sure(one)), (ForeignPolicy::Delete, ForeignPolicy::Keep));
        assert_eq!(wishes.mig_mode(one), None);

        let wish = Wish { foreign: Some(ForeignPolicy::Adopt), mig_mode: Some(MigMode::Enabled) };
        assert!(wishes.clone().tell([(one, wish)].into()));
        assert!(!wishes.tell([(one, wish)].into()), "no news");
        assert_eq!(wishes.foreign_for_sure(one), ForeignPolicy::Adopt);
        assert_eq!((wishes.foreign(one), wishes.foreign(other)), (ForeignPolicy::Adopt, ForeignPolicy::Delete));
        assert_eq!(wishes.foreign_for_sure(other), ForeignPolicy::Keep, "nothing was said of it");
        assert_eq!((wishes.mig_mode(one), wishes.mig_mode(other)), (Some(MigMode::Enabled), None));

        wishes.tell([(one, Wish::default())].into());
        assert_eq!((wishes.foreign_for_sure(one), wishes.mig_mode(one)), (ForeignPolicy::Delete, None));
        wishes.tell(BTreeMap::new());
        assert_eq!(wishes.foreign_for_sure(one), ForeignPolicy::Keep, "the controller could not read the GPU");
    }
}
