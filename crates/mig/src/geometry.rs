//! What one GPU can be cut into.

use crate::{Placement, Profile};

/// Everything one GPU can be cut into: its GPU-instance profiles with their placements.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Geometry {
    profiles: Vec<Profile>,
}

/// One possible cut: a profile at a placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer<'a> {
    /// What is cut.
    pub profile: &'a Profile,
    /// Where.
    pub placement: Placement,
}
