//! An assertion: one thing kerf relies on, and a pure check of it over what was read.

/// One thing kerf relies on.
#[derive(Clone, Copy, Debug)]
pub struct Assertion<R: 'static> {
    /// Its name, stable across versions of this suite: `mig.placements`.
    pub name: &'static str,
    /// What goes wrong in kerf where it does not hold.
    pub relied_on_for: &'static str,
    /// Whether it holds in a reading. Pure.
    pub check: fn(&R) -> Outcome,
}

/// What became of an assertion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It holds.
    Held,
    /// It does not: at least one mismatch.
    Failed(Vec<Mismatch>),
    /// There was nothing to check it on, and why.
    Skipped(String),
}

/// What was expected and what was found instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// What kerf expects.
    pub expected: String,
    /// What NVML or the kernel said.
    pub found: String,
}

/// An assertion's outcome on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The assertion's name.
    pub name: &'static str,
    /// What kerf relies on it for.
    pub relied_on_for: &'static str,
    /// The GPU it was checked on: its PCI address, `index 2` where that is not known, nothing for the whole machine.
    pub gpu: Option<String>,
    /// What became of it.
    pub outcome: Outcome,
}

impl<R> Assertion<R> {
    /// Checks it.
    pub(crate) fn judge(&self, gpu: Option<&str>, reading: &R) -> Verdict {
        Verdict {
            name: self.name,
            relied_on_for: self.relied_on_for,
            gpu: gpu.map(str::to_owned),
            outcome: (self.check)(reading),
        }
    }
}

/// Collects mismatches.
#[derive(Debug, Default)]
pub(crate) struct Findings(Vec<Mismatch>);

impl Findings {
    /// Notes a mismatch unless `holds`.
    pub(crate) fn expect(&mut self, holds: bool, expected: impl Into<String>, found: impl FnOnce() -> String) {
        if !holds {
            self.0.push(Mismatch { expected: expected.into(), found: found() });
        }
    }

    /// The value of a call that should have succeeded; notes a mismatch if it did not.
    pub(crate) fn value<'a, T, E: std::fmt::Display>(
        &mut self,
        answer: &'a Result<T, E>,
        expected: impl Into<String>,
    ) -> Option<&'a T> {
        match answer {
            Ok(value) => Some(value),
            Err(error) => {
                self.expect(false, expected, || error.to_string());
                None
            }
        }
    }

    /// Held when nothing was noted.
    pub(crate) fn outcome(self) -> Outcome {
        if self.0.is_empty() { Outcome::Held } else { Outcome::Failed(self.0) }
    }
}
