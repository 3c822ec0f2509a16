//! Which profiles the cluster has, and what they are called where a `+` may not be.

use std::collections::{BTreeMap, BTreeSet};

use kerf_api::{GpuNode, GpuOffer, names};

use crate::render::is_dns_label;

/// The longest name of a profile that is looked at. NVIDIA's longest have a dozen characters.
const LONGEST: usize = 32;

/// The most classes. A cluster of every product there is has two dozen profiles; a node's word makes no more than this.
const MOST: usize = 128;

/// The most profiles of one node that are looked at: a node of several products has a dozen. Nobody's invented names fill
/// [`MOST`] and push out those of other nodes.
const MOST_OF_A_NODE: usize = 32;

/// The profiles that some node's GPUs can be cut into now; where a cluster claims more than a sane number, those that most
/// nodes have.
///
/// What a node reports becomes names and a CEL expression, so what is no profile's name is passed over, and of two that would
/// have the same class one is.
pub fn offered<'a>(gpu_nodes: impl IntoIterator<Item = &'a GpuNode>) -> BTreeSet<String> {
    let mut nodes: BTreeMap<&str, usize> = BTreeMap::new();
    for gpu_node in gpu_nodes {
        let gpus = gpu_node.status.iter().flat_map(|status| &status.gpus);
        let cut = gpus.filter(|gpu| matches!(gpu.offer, GpuOffer::Partitions | GpuOffer::WholeOrPartitions));
        let profiles = cut.filter_map(|gpu| gpu.mig.as_ref()).flat_map(|mig| &mig.profiles);
        let placed = profiles.filter(|profile| !profile.placements.is_empty() && is_profile(&profile.name));
        let mut names = BTreeSet::new();
        for name in placed.map(|profile| profile.name.as_str()) {
            if names.len() < MOST_OF_A_NODE {
                names.insert(name);
            }
        }
        for name in names {
            *nodes.entry(name).or_default() += 1;
        }
    }
    let mut names: Vec<(&str, usize)> = nodes.into_iter().collect();
    names.sort_by(|(a, many), (b, more)| more.cmp(many).then(a.cmp(b)));
    let mut kinds = BTreeSet::new();
    names.retain(|(name, _)| kinds.insert(kind(name)));
    names.into_iter().take(MOST).map(|(name, _)| name.to_owned()).collect()
}

/// `mig-1g.10gb.nvidia.com`.
pub fn class_name(driver: &str, profile: &str) -> String {
    format!("{}.{}", kind(profile), names::domain(driver))
}

/// `nvidia.com/mig-1g.10gb`, as NVIDIA's device plugin names what it finds of a profile; `None` where Kubernetes keeps the
/// driver's domain for itself.
pub fn extended_resource(driver: &str, profile: &str) -> Option<String> {
    let domain = names::domain(driver);
    // The API server looks for kubernetes.io/ anywhere.
    (!domain.ends_with("kubernetes.io")).then(|| format!("{domain}/{}", kind(profile)))
}

/// `mig-1g.10gb.me`: a `+` becomes a dot, everything else stays (`internal/rm/rm.go` of NVIDIA's device plugin).
pub(crate) fn kind(profile: &str) -> String {
    format!("mig-{}", profile.replace('+', "."))
}

/// Whether this can be the name of a profile: `1g.10gb`, `1g.10gb+me.all`, `1g.24gb-me`. It has one dot before what follows the
/// sizes: `1g.10gb.me` would have the class of `1g.10gb+me`.
pub(crate) fn is_profile(name: &str) -> bool {
    let sizes = name.split(['+', '-']).next().unwrap_or_default();
    name.len() <= LONGEST
        && name.starts_with(|c: char| c.is_ascii_digit())
        && sizes.matches('.').count() == 1
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'+' | b'-'))
        && kind(name).split('.').all(is_dns_label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_device_plugin() {
        for (profile, class, resource) in [
            ("1g.10gb", "mig-1g.10gb.nvidia.com", "nvidia.com/mig-1g.10gb"),
            ("1g.10gb+me", "mig-1g.10gb.me.nvidia.com", "nvidia.com/mig-1g.10gb.me"),
            ("1g.24gb+me.all", "mig-1g.24gb.me.all.nvidia.com", "nvidia.com/mig-1g.24gb.me.all"),
            ("1g.24gb-me", "mig-1g.24gb-me.nvidia.com", "nvidia.com/mig-1g.24gb-me"),
        ] {
            assert!(is_profile(profile), "{profile}");
            assert_eq!(class_name(names::DRIVER_NAME, profile), class);
            assert_eq!(extended_resource(names::DRIVER_NAME, profile).as_deref(), Some(resource));
        }
        assert_eq!(class_name("gpu", "1g.10gb"), "mig-1g.10gb.gpu", "a driver's name of one label is its own domain");
        assert_eq!(extended_resource("gpu.test.example", "1g.10gb").as_deref(), Some("test.example/mig-1g.10gb"));
        for driver in ["gpu.kubernetes.io", "gpu.x.kubernetes.io", "gpu.mykubernetes.io"] {
            assert_eq!(extended_resource(driver, "1g.10gb"), None, "{driver}: these names are Kubernetes' own");
        }
    }

    #[test]
    fn what_is_no_name_of_a_profile_is_passed_over() {
        let long = format!("1g.{}gb", "0".repeat(LONGEST));
        for name in [
            "",
            "MIG 1g.10gb",
            "1G.10GB",
            "1g.10gb\" || true",
            "1g..10gb",
            "1g.10gb+",
            "1g.10gb.me",
            "-1g",
            "g.10gb",
            &long,
        ] {
            assert!(!is_profile(name), "{name}");
        }
    }
}
