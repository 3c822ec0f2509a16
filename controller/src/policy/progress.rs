//! How far a node is with what it shall offer. Pure.

use std::collections::{BTreeMap, BTreeSet};

use kerf_api::{Gpu, GpuNodeStatus, GpuOffer, Withheld};

use super::{By, EVERYTHING, Forms, Obstacle, Offering, Terms};
use crate::render::{cut_name, geometry};

/// Reasons that go away by themselves: everything else needs a person.
const IN_USE: &str = "InUse";
const NOT_READY: &str = "NodeNotReady";

/// One node as far as its progress depends on it.
#[derive(Clone, Copy, Debug)]
pub struct NodeView<'a> {
    /// What its plugin found.
    pub status: &'a GpuNodeStatus,
    /// What it shall offer, and what is held.
    pub offering: &'a Offering,
    /// Why nothing is published of it now; `None`: it is.
    pub unpublished: Option<&'a str>,
}

/// What its GPUs wait for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// By name; a GPU that offers what it should is not here.
    pub waiting: BTreeMap<String, Obstacle>,
}

/// The answer to the node label `nvidia.com/mig.config`, in mig-manager's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MigConfigState {
    /// Some GPU is not idle yet.
    Pending,
    /// The node offers what the layout says.
    Success,
    /// It cannot, until a person does something.
    Failed,
}

impl MigConfigState {
    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            MigConfigState::Pending => "pending",
            MigConfigState::Success => "success",
            MigConfigState::Failed => "failed",
        }
    }
}

impl NodeView<'_> {
    /// What the GPUs that somebody decides about wait for.
    pub fn progress(self) -> Progress {
        let terms = &self.offering.resolution.terms;
        let decided = self.status.gpus.iter().filter_map(|gpu| Some((gpu, terms.get(&gpu.name)?)));
        let waiting = decided.filter_map(|(gpu, terms)| Some((gpu.name.clone(), self.obstacle(gpu, terms)?)));
        Progress { waiting: waiting.collect() }
    }

    /// What to answer to the node's label; `None`: it is not there, or not followed.
    pub fn mig_config_state(self, progress: &Progress) -> Option<MigConfigState> {
        let resolution = &self.offering.resolution;
        resolution.label.as_ref()?;
        let by_label = |name: &String| resolution.terms.get(name).is_some_and(|terms| terms.by == By::Label);
        let mut waiting = progress.waiting.iter().filter(|(name, _)| by_label(name)).map(|(_, why)| why).peekable();
        if waiting.peek().is_none() {
            return Some(MigConfigState::Success);
        }
        let passes = |why: &Obstacle| [IN_USE, NOT_READY].contains(&why.reason.as_str());
        Some(if waiting.all(passes) { MigConfigState::Pending } else { MigConfigState::Failed })
    }

    fn obstacle(self, gpu: &Gpu, terms: &Terms) -> Option<Obstacle> {
        if terms.obstacle.is_some() {
            return terms.obstacle.clone();
        }
        if terms.forms != Forms::Nothing {
            if gpu.offer == GpuOffer::Nothing {
                let Withheld { reason, message } = gpu.withheld.clone().unwrap_or_default();
                return Some(Obstacle { reason, message });
            }
            if let Some(why) = self.unpublished {
                return Some(Obstacle { reason: NOT_READY.to_owned(), message: why.to_owned() });
            }
        }
        let leaving = leaving(gpu, &terms.forms, self.offering);
        (!leaving.is_empty()).then(|| Obstacle {
            reason: IN_USE.to_owned(),
            message: format!("claims hold {}, which is kept until they end", leaving.join(", ")),
        })
    }
}

/// The devices of `gpu` that claims hold although they are not among `forms`.
fn leaving<'a>(gpu: &Gpu, forms: &Forms, offering: &'a Offering) -> Vec<&'a str> {
    let mut held = offering.held_of(&gpu.name).peekable();
    if forms == EVERYTHING || held.peek().is_none() {
        return Vec::new();
    }
    let geometry = geometry(gpu).unwrap_or_default();
    let wanted = geometry.offers().into_iter().filter(|cut| forms.wants(*cut)).map(|cut| cut_name(gpu, cut));
    let wanted: BTreeSet<String> = wanted.collect();
    held.filter(|name| !(wanted.contains(*name) || *name == gpu.name && forms.wants_whole())).collect()
}
