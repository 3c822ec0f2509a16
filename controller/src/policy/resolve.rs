//! From policies, labels and layouts to what each GPU of a node shall offer. Pure.

use std::collections::{BTreeMap, BTreeSet};

use kerf_api::problem::nearest;
use kerf_api::{Gpu, GpuNodeStatus, GpuOffer, GpuPolicySpec, GpuSelector, PolicyOffer, names};
use kerf_mig::Geometry;
use kerf_mig::parted::{Arrangement, Ruling};
use kube::core::SelectorExt as _;

use super::{By, Cut, Forms, LayoutFile, Obstacle, Policy, Terms};
use crate::render::{MOST_GPUS, geometry};

/// What the policies come to on one node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resolution {
    /// By the GPU's name. A GPU of which nobody says anything is not here: it offers everything.
    pub terms: BTreeMap<String, Terms>,
    /// What each policy matches, by its name.
    pub matches: BTreeMap<String, Vec<Match>>,
    /// The layout that the node's label names, where the label is followed.
    pub label: Option<String>,
}

/// A GPU that a policy matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Match {
    /// Its name.
    pub gpu: String,
    /// The policy that overrides this one there.
    pub overridden_by: Option<String>,
}

/// What the admins say.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// In the order in which they are looked at, see [`Rules::sort`].
    pub policies: Vec<Policy>,
    /// The cluster's layouts.
    pub layouts: LayoutFile,
    /// Whether nodes choose a layout by their label.
    pub follow_label: bool,
}

/// What is said of one GPU.
enum Said {
    /// Nothing: it is as if nobody had asked.
    Nothing,
    /// This.
    Forms(Forms),
    /// Something that cannot be, for now or for good.
    Impossible(Forms, Obstacle),
}

impl Rules {
    /// Puts the policies in order: the one that comes first decides.
    pub fn sort(&mut self) {
        self.policies.sort_by(|a, b| {
            let key = |policy: &Policy| policy.spec.as_ref().map_or(0, |spec| i64::from(spec.priority));
            key(b).cmp(&key(a)).then_with(|| (&a.created, &a.name).cmp(&(&b.created, &b.name)))
        });
    }
}

/// What the GPUs of a node with these labels shall offer.
pub fn resolve(rules: &Rules, labels: &BTreeMap<String, String>, status: &GpuNodeStatus) -> Resolution {
    let label = labels.get(names::LABEL_MIG_CONFIG).filter(|name| rules.follow_label && !name.is_empty());
    // Without a layout file nobody has set this up: the label may be of a mig-manager that was here before.
    let label = label.filter(|_| rules.layouts != LayoutFile::Absent);
    let mut resolution = Resolution { label: label.cloned(), ..Resolution::default() };
    let here = |policy: &&Policy| policy.nodes.as_ref().is_some_and(|selector| selector.matches(labels));
    let policies: Vec<(&Policy, &GpuPolicySpec)> =
        rules.policies.iter().filter(here).filter_map(|policy| Some((policy, policy.spec.as_ref().ok()?))).collect();
    if policies.is_empty() && label.is_none() {
        return resolution;
    }
    for (position, gpu) in (0..).zip(status.gpus.iter().take(MOST_GPUS)) {
        if resolution.terms.contains_key(&gpu.name) {
            continue;
        }
        let subject = Subject { rules, gpu, position, geometry: geometry(gpu).unwrap_or_default() };
        let mut decided: Option<&str> = None;
        for (policy, spec) in &policies {
            if !spec.gpus.as_ref().is_none_or(|selector| subject.is_selected(selector)) {
                continue;
            }
            let said = subject.of_policy(policy, spec);
            if matches!(said, Said::Nothing) {
                continue;
            }
            let found = Match { gpu: gpu.name.clone(), overridden_by: decided.map(str::to_owned) };
            resolution.matches.entry(policy.name.clone()).or_default().push(found);
            if decided.is_none() {
                decided = Some(&policy.name);
                let terms = said.terms(By::Policy(policy.name.clone()), spec.foreign_instances);
                resolution.terms.extend(terms.map(|terms| (gpu.name.clone(), terms)));
            }
        }
        if let (None, Some(name)) = (decided, label) {
            let terms = subject.of_layout(name).terms(By::Label, None);
            resolution.terms.extend(terms.map(|terms| (gpu.name.clone(), terms)));
        }
    }
    resolution
}

impl Said {
    fn terms(self, by: By, foreign: Option<kerf_api::ForeignInstances>) -> Option<Terms> {
        let (forms, obstacle) = match self {
            Said::Nothing => return None,
            Said::Forms(forms) => (forms, None),
            Said::Impossible(forms, obstacle) => (forms, Some(obstacle)),
        };
        Some(Terms { forms, foreign, by, obstacle })
    }
}

/// A GPU of which something is to be said.
struct Subject<'a> {
    rules: &'a Rules,
    gpu: &'a Gpu,
    position: u32,
    geometry: Geometry,
}

impl Subject<'_> {
    fn is_selected(&self, selector: &GpuSelector) -> bool {
        let GpuSelector { products, indices, uuids, names } = selector;
        let gpu = self.gpu;
        (products.is_empty() || products.iter().any(|pattern| fits(pattern, &gpu.product)))
            && (indices.is_empty() || indices.contains(&self.position))
            && (uuids.is_empty() || uuids.contains(&gpu.uuid))
            && (names.is_empty() || names.contains(&gpu.name))
    }

    fn of_policy(&self, policy: &Policy, spec: &GpuPolicySpec) -> Said {
        let problems = policy.problems();
        if let Some(first) = problems.first() {
            return nothing("Invalid", format!("the policy is wrong, so nothing is offered: {first}"));
        }
        match (spec.offer, &spec.layout) {
            (PolicyOffer::Dynamic, _) => self.dynamic(spec),
            (PolicyOffer::WholeOnly, _) => self.whole(),
            (PolicyOffer::Nothing, _) => Said::Forms(Forms::Nothing),
            (PolicyOffer::Layout, Some(layout)) => match (&layout.name, &layout.mig_devices) {
                (Some(name), _) => self.of_layout(name),
                (None, Some(devices)) => self.partitions(devices),
                (None, None) => Said::Nothing,
            },
            (PolicyOffer::Layout, None) => Said::Nothing,
        }
    }

    fn dynamic(&self, spec: &GpuPolicySpec) -> Said {
        let whole = spec.whole.unwrap_or(true);
        let profiles: Option<BTreeSet<String>> = spec.profiles.clone().map(|profiles| profiles.into_iter().collect());
        let known = self.geometry.profiles();
        let lacking = |profiles: &BTreeSet<String>| known.iter().all(|profile| !profiles.contains(&profile.name));
        let obstacle = profiles.as_ref().filter(|profiles| !known.is_empty() && lacking(profiles)).map(|_| Obstacle {
            reason: "NoProfile".to_owned(),
            message: format!("the GPU has none of the allowed profiles; it has {}", self.profiles()),
        });
        let forms = Forms::Dynamic { profiles, whole };
        match obstacle {
            None => Said::Forms(forms),
            Some(obstacle) => Said::Impossible(forms, obstacle),
        }
    }

    fn of_layout(&self, name: &str) -> Said {
        let missing =
            |why| nothing("NoSuchLayout", format!("there is no layout {name:?}, so nothing is offered: {why}"));
        let layouts = match &self.rules.layouts {
            LayoutFile::Read(layouts) => layouts,
            LayoutFile::Absent => return missing("there is no layout file".to_owned()),
            LayoutFile::Broken(why) => return missing(format!("the layout file cannot be read: {why}")),
        };
        let model = self.gpu.pci_device_id.as_deref().and_then(|text| text.strip_prefix("0x"));
        let model = model.and_then(|digits| u32::from_str_radix(digits, 16).ok());
        match layouts.ruling(name, self.position, model) {
            None => match nearest(name, layouts.names()) {
                Some(meant) => missing(format!("did you mean {meant:?}?")),
                None => missing(format!("there are {}", layouts.names().collect::<Vec<_>>().join(", "))),
            },
            Some(Ruling::Silent) => Said::Nothing,
            Some(Ruling::Is(Arrangement::Whole)) => self.whole(),
            Some(Ruling::Is(Arrangement::Partitions(devices))) => self.partitions(devices),
            Some(Ruling::UnknownModel) => nothing(
                "UnknownModel",
                "the layout depends on the GPU's PCI device id, which the node does not tell, so nothing is offered"
                    .to_owned(),
            ),
        }
    }

    fn whole(&self) -> Said {
        if self.gpu.offer == GpuOffer::Partitions {
            let message = "MIG is on and only a reset of the GPU switches it off: stop everything that uses it and run \
                           nvidia-smi -mig 0, then nvidia-smi --gpu-reset, on the node";
            return Said::Impossible(Forms::Whole, reset_needed(message));
        }
        Said::Forms(Forms::Whole)
    }

    fn partitions(&self, devices: &BTreeMap<String, u32>) -> Said {
        let Some(mig) = &self.gpu.mig else {
            // Of a GPU that cannot be read nothing is known, and it offers nothing anyway.
            let unreadable = self.gpu.offer == GpuOffer::Nothing;
            let message = format!("the GPU ({}) has no MIG, so nothing is offered", self.gpu.product);
            return if unreadable { Said::Forms(Forms::Nothing) } else { nothing("NoMig", message) };
        };
        let placed = if self.geometry.is_empty() { Ok(Vec::new()) } else { self.geometry.place(devices) };
        let cuts = match placed {
            Ok(cuts) => cuts,
            Err(why) => {
                return nothing("DoesNotFit", format!("the layout is not possible, so nothing is offered: {why}"));
            }
        };
        let cut = |cut: kerf_mig::Offer<'_>| Cut { profile: cut.profile.name.clone(), placement: cut.placement };
        let forms = Forms::Fixed(cuts.into_iter().map(cut).collect());
        if self.gpu.offer == GpuOffer::Whole && !mig.switchable {
            let message = "MIG is off and only a reset of the GPU switches it on: stop everything that uses it and run \
                           nvidia-smi -mig 1, then nvidia-smi --gpu-reset, on the node";
            return Said::Impossible(forms, reset_needed(message));
        }
        Said::Forms(forms)
    }

    fn profiles(&self) -> String {
        let names: Vec<&str> = self.geometry.profiles().iter().map(|profile| profile.name.as_str()).collect();
        names.join(", ")
    }
}

fn nothing(reason: &str, message: String) -> Said {
    Said::Impossible(Forms::Nothing, Obstacle { reason: reason.to_owned(), message })
}

fn reset_needed(message: &str) -> Obstacle {
    Obstacle { reason: "ResetNeeded".to_owned(), message: message.to_owned() }
}

/// Whether `text` is what `pattern` says, in which `*` stands for any characters.
fn fits(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some((_, after)) = rest.split_once(part) else { return false };
        rest = after;
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::fits;

    #[test]
    fn patterns() {
        for (pattern, text, fit) in [
            ("NVIDIA H100", "NVIDIA H100", true),
            ("NVIDIA H100", "NVIDIA H100 PCIe", false),
            ("NVIDIA H100*", "NVIDIA H100 PCIe", true),
            ("*H100*", "NVIDIA H100 PCIe", true),
            ("*PCIe", "NVIDIA H100 PCIe", true),
            ("*A100*", "NVIDIA H100 PCIe", false),
            ("*", "", true),
            ("N*A*1*e", "NVIDIA H100 PCIe", true),
            ("ab*ba", "aba", false),
            ("a**a", "aa", true),
            ("*a*", "b", false),
        ] {
            assert_eq!(fits(pattern, text), fit, "{pattern} {text}");
        }
    }
}
