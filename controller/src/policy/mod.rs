//! What each GPU shall offer: GpuPolicies, layouts and node labels, resolved to [`Terms`] for every GPU.
//!
//! [`resolve()`] and what is told of its outcome ([`Progress`], [`report`]) are pure. [`Steward`] alone talks to the API server: it
//! tells the nodes what the terms ask of them, and the policies' authors what has come of it.
//!
//! Architecture invariant: what cannot be followed offers nothing. A policy that is wrong, a layout that is missing or does not
//! fit: nobody gets what no admin meant to offer. What claims hold already stays theirs.

mod layouts;
mod progress;
pub mod report;
mod resolve;
mod seen;
mod steward;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kerf_api::{ForeignInstances, Gpu, GpuSpec, MigMode};
use kerf_mig::{Offer, Placement};

pub use layouts::LayoutFile;
pub use progress::{MigConfigState, NodeView, Progress};
pub use resolve::{Match, Resolution, Rules, resolve};
pub use seen::Policy;
pub use steward::Steward;

/// What one GPU shall offer, and who says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The forms that are offered.
    pub forms: Forms,
    /// What becomes of foreign instances; `None`: as the node's plugin was told at its start.
    pub foreign: Option<ForeignInstances>,
    /// Who says so.
    pub by: By,
    /// What stands in the way, as long as the GPU is as it is.
    pub obstacle: Option<Obstacle>,
}

/// Forms in which a GPU is offered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Forms {
    /// Whatever claims ask for.
    Dynamic {
        /// The profiles that are offered, by name; `None`: every one.
        profiles: Option<BTreeSet<String>>,
        /// Whether the GPU is offered whole, too.
        whole: bool,
    },
    /// These partitions, which exist beside each other.
    Fixed(Vec<Cut>),
    /// The whole GPU.
    Whole,
    /// None.
    Nothing,
}

/// A partition of a layout.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cut {
    /// Name of the profile.
    pub profile: String,
    /// Where.
    pub placement: Placement,
}

/// Who decides about a GPU.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum By {
    /// The GpuPolicy of this name.
    Policy(String),
    /// The node's label `nvidia.com/mig.config`.
    Label,
}

/// Why a GPU does not offer what it should.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// One CamelCase word for programs.
    pub reason: String,
    /// One sentence for a person: what was found and what to do.
    pub message: String,
}

/// What is to be published of a node, beside what its plugin found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Offering {
    /// What the GPUs shall offer.
    pub resolution: Arc<Resolution>,
    /// The devices that claims hold: they stay published.
    pub held: Arc<BTreeSet<String>>,
}

impl Forms {
    /// Whether the whole GPU is among them.
    pub fn wants_whole(&self) -> bool {
        matches!(self, Forms::Whole | Forms::Dynamic { whole: true, .. })
    }

    /// Whether `cut` is among them.
    pub fn wants(&self, cut: Offer<'_>) -> bool {
        match self {
            Forms::Dynamic { profiles, .. } => {
                profiles.as_ref().is_none_or(|profiles| profiles.contains(&cut.profile.name))
            }
            Forms::Fixed(cuts) => {
                cuts.iter().any(|wanted| wanted.profile == cut.profile.name && wanted.placement == cut.placement)
            }
            Forms::Whole | Forms::Nothing => false,
        }
    }

    /// Whether none of them excludes another.
    pub fn are_apart(&self) -> bool {
        !matches!(self, Forms::Dynamic { .. })
    }
}

/// Everything, as claims need it.
pub const EVERYTHING: &Forms = &Forms::Dynamic { profiles: None, whole: true };

impl Offering {
    /// The forms that `gpu` shall offer.
    pub fn forms(&self, gpu: &str) -> &Forms {
        self.resolution.terms.get(gpu).map_or(EVERYTHING, |terms| &terms.forms)
    }

    /// The names of the devices of `gpu` that claims hold: the GPU itself, partitions of it.
    pub fn held_of(&self, gpu: &str) -> impl Iterator<Item = &str> {
        let prefix = format!("{gpu}-mig-");
        let partitions = self.held.range(prefix.clone()..).take_while(move |name| name.starts_with(&prefix));
        self.held.get(gpu).into_iter().chain(partitions).map(String::as_str)
    }
}

impl Terms {
    /// What the node has to do about `gpu`.
    fn wish(&self, gpu: &Gpu) -> GpuSpec {
        let mig_mode = match self.forms {
            Forms::Fixed(_) => Some(MigMode::Enabled),
            Forms::Whole => Some(MigMode::Disabled),
            Forms::Dynamic { .. } | Forms::Nothing => None,
        };
        GpuSpec { mig_mode: mig_mode.filter(|_| gpu.mig.is_some()), foreign_instances: self.foreign }
    }
}

impl Resolution {
    /// What the node has to do about its GPUs, by their names: of each that could be read there is an entry, be it an empty one,
    /// which tells the node that this was decided. What another GPU is policies cannot know.
    pub fn wishes<'a>(&self, gpus: impl IntoIterator<Item = &'a Gpu>) -> BTreeMap<String, GpuSpec> {
        let wish =
            |gpu: &Gpu| (gpu.name.clone(), self.terms.get(&gpu.name).map(|terms| terms.wish(gpu)).unwrap_or_default());
        gpus.into_iter().filter(|gpu| !gpu.uuid.is_empty()).map(wish).collect()
    }
}
