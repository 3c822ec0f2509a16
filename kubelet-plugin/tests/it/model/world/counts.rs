//! What came of the operations, so that a run in which nothing happens is seen.

use std::collections::BTreeMap;

use crate::model::state::{Outcome, Why};

/// How often what came of operations.
#[derive(Clone, Debug, Default)]
pub(in crate::model) struct Counts(BTreeMap<&'static str, usize>);

impl Counts {
    pub(super) fn add_one(&mut self, what: &'static str) {
        *self.0.entry(what).or_default() += 1;
    }

    pub(super) fn count(&mut self, outcome: &Outcome) {
        self.add_one(match outcome {
            Outcome::Prepared(_) => "prepared",
            Outcome::Refused(Why::Held) => "held",
            Outcome::Refused(Why::Overlap) => "overlap",
            Outcome::Refused(Why::Foreign) => "occupied",
            Outcome::Refused(Why::ModeBusy) => "mode in use",
            Outcome::Released => "released",
            Outcome::Condemned => "condemned",
            Outcome::Busy => "in use",
            Outcome::Failed(_) => "failed",
        });
    }

    pub(in crate::model) fn add(&mut self, other: &Counts) {
        other.0.iter().for_each(|(what, number)| *self.0.entry(what).or_default() += number);
    }

    /// A test in which nothing happens proves nothing.
    pub(in crate::model) fn assert_that_all_happened(&self, played: usize) {
        let often =
            ["prepared", "held", "released", "in use", "crash", "fault", "at the same time", "foreign", "spoilt"];
        let seldom = ["occupied", "condemned", "left behind", "overlap", "swept"];
        let expected = [(500, &often[..]), (5000, &seldom[..])].into_iter().filter(|(at_least, _)| played >= *at_least);
        for what in expected.flat_map(|(_, what)| what) {
            assert!(self.0.contains_key(what), "{what} never happened: {self:?}");
        }
    }
}
