//! Slices whose name somebody else has taken.
//!
//! A kubelet may create slices of its own node under any name, and so under one that a slice of another node has or will have.
//! That slice is published under a longer name, whose end nobody can foresee; its place in the order of names stays.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::ResourceSlice;

use crate::diff::Observed;

/// How much longer the name becomes: a dash and random hexadecimal digits.
pub(crate) const LONGER: usize = 9;

/// A name for a slice that cannot have `name`.
pub(crate) fn apart(name: &str) -> String {
    let random = uuid::Uuid::new_v4().simple().to_string();
    format!("{name}-{}", &random[..LONGER - 1])
}

/// Gives those of `desired` that exist under a name [`apart`] that name.
pub(crate) fn keep_names(desired: &mut [ResourceSlice], observed: &[Observed]) {
    let observed: BTreeSet<&str> = observed.iter().map(|slice| slice.name.as_str()).collect();
    for slice in desired {
        let Some(name) = &mut slice.metadata.name else { continue };
        let mut alike = observed.range(name.as_str()..).take_while(|found| found.starts_with(name.as_str()));
        if let Some(found) = alike.find(|found| **found == name || is_apart(found, name)) {
            *name = (*found).to_owned();
        }
    }
}

fn is_apart(name: &str, from: &str) -> bool {
    let end = name.strip_prefix(from).and_then(|rest| rest.strip_prefix('-'));
    end.is_some_and(|end| end.len() == LONGER - 1 && end.bytes().all(|b| b.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_apart_is_known_again() {
        let name = apart("n-gpu-0");
        assert!(is_apart(&name, "n-gpu-0"), "{name}");
        assert_ne!(name, apart("n-gpu-0"));
        for other in
            ["n-gpu-0", "n-gpu-0-", "n-gpu-0-1234567", "n-gpu-0-123456789", "n-gpu-0-1234567x", "n-gpu-1-12345678"]
        {
            assert!(!is_apart(other, "n-gpu-0"), "{other}");
        }
    }
}
