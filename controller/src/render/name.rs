//! Names of ResourceSlice objects.

use std::fmt::Write as _;

use sha1::{Digest, Sha1};

use crate::naming;

/// The longest name: of an object, a DNS subdomain, less what a name has more that had to give way to another's.
const LONGEST: usize = 253 - naming::LONGER;

/// The longest `part`: a DNS label, a dash and two digits.
const LONGEST_PART: usize = 63 + 3;

/// The name of one slice: `<node>-<driver>-<rank>-<part>`.
///
/// The scheduler tries the slices of a pool in the order of their names (Kubernetes 1.36 and later), so `rank` and
/// `part` decide which GPU is tried first. The name depends on nothing but what the slice holds: a neighbour that
/// appears or vanishes renames no slice, and a create that is repeated meets the object of the first try.
///
/// A node's name for which names could become too long is cut in all of them alike, and a hash of it is added.
pub(super) fn slice(node: &str, driver: &str, rank: u8, part: &str) -> String {
    let rest = format!("-{driver}-{rank:03}-{part}");
    let room = LONGEST.saturating_sub(rest.len() - part.len() + LONGEST_PART);
    if node.len() <= room {
        return format!("{node}{rest}");
    }
    let hash = Sha1::digest(node).iter().take(8).fold(String::from("-"), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    });
    let kept = node.get(..room.saturating_sub(hash.len())).unwrap_or_default().trim_end_matches(['-', '.']);
    format!("{kept}{hash}{rest}")
}

/// Whether `name` is a DNS label: lower-case letters, digits and dashes inside, at most 63 characters.
pub(crate) fn is_dns_label(name: &str) -> bool {
    name.len() <= 63
        && !name.starts_with('-')
        && !name.ends_with('-')
        && !name.is_empty()
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_node_names_stay_apart() {
        let driver = "gpu.nvidia.com";
        let name = |node: &str| slice(node, driver, 2, "gpu-0001-3b-00-0");
        assert_eq!(name("n"), "n-gpu.nvidia.com-002-gpu-0001-3b-00-0");
        let longest_kept = 244 - "-gpu.nvidia.com-002-".len() - 66;
        for length in [longest_kept, longest_kept + 1, 253] {
            let [a, b] = ["a", "b"].map(|end| name(&format!("{}{end}", "x.".repeat(127)[..length - 1].to_owned())));
            assert!(a.len() <= 244, "{a}");
            assert_ne!(a, b);
            assert!(!a.contains("..") && !a.contains(".-") && !a.contains("-."), "every part is a DNS label: {a}");
            assert!(a.ends_with("-gpu.nvidia.com-002-gpu-0001-3b-00-0"));
            let node = "x.".repeat(126);
            let ordered = [(0, "z".repeat(66)), (1, "g".repeat(66)), (1, "h".into()), (2, "a".into())];
            let names = ordered.map(|(rank, part)| slice(&node, driver, rank, &part));
            assert!(names.is_sorted() && names.iter().all(|name| name.len() <= 244), "{names:?}");
        }
    }

    #[test]
    fn labels() {
        for good in ["a", "gpu-3b-00-0", "0", &"a".repeat(63)] {
            assert!(is_dns_label(good), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a.b", "a_b", "ä", &"a".repeat(64)] {
            assert!(!is_dns_label(bad), "{bad}");
        }
    }
}
