//! What holds for any input that comes from outside: the bodies of the fuzz targets.
//!
//! Each check takes bytes as an enemy would choose them and panics where a promise is broken. `cargo test` replays the
//! inputs under `fuzz/corpus/`, one directory a target; `make fuzz` has libFuzzer look for others. An input that broke
//! something goes into the corpus with the fix and stays there.
//!
//! Where a rule is checked, it is written down here a second time, from the same sources but apart from the code that it
//! judges.

#![forbid(unsafe_code)]

mod cdi;
mod device_name;
mod dns;
mod gpu_node;
mod journal;
mod json;
mod opaque;
mod policy;
mod review;

pub use cdi::{cdi_name, cdi_spec};
pub use device_name::device_name;
pub use gpu_node::gpu_node;
pub use journal::journal;
pub use opaque::opaque_config;
pub use policy::{gpu_policy, layout_file};
pub use review::admission_review;

/// What must hold for any bytes; a panic where it does not.
pub type Check = fn(&[u8]);

/// Every check by the name of its target.
pub const TARGETS: [(&str, Check); 9] = [
    ("admission_review", admission_review),
    ("cdi_name", cdi_name),
    ("cdi_spec", cdi_spec),
    ("device_name", device_name),
    ("gpu_node", gpu_node),
    ("gpu_policy", gpu_policy),
    ("journal", journal),
    ("layout_file", layout_file),
    ("opaque_config", opaque_config),
];

#[cfg(test)]
mod tests {
    use std::fs;
    use std::panic;
    use std::path::Path;

    use super::TARGETS;

    /// Every input that is known holds, and every target has some.
    #[test]
    fn corpus() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus");
        let mut broken = Vec::new();
        for (target, check) in TARGETS {
            let mut inputs = 0;
            for entry in fs::read_dir(corpus.join(target)).unwrap() {
                let path = entry.unwrap().path();
                let data = fs::read(&path).unwrap();
                inputs += 1;
                if panic::catch_unwind(|| check(&data)).is_err() {
                    broken.push(path);
                }
            }
            assert!(inputs > 0, "{target} has no inputs");
        }
        assert!(broken.is_empty(), "these inputs break a promise, see the panics above: {broken:#?}");
    }

    /// A corpus that nobody replays would rot.
    #[test]
    fn every_directory_has_a_target() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus");
        for entry in fs::read_dir(corpus).unwrap() {
            let name = entry.unwrap().file_name();
            assert!(TARGETS.iter().any(|(target, _)| name == *target), "{}", name.display());
        }
    }
}
