//! One journal file by itself: what the engine reads in it, and what it would write back.
//!
//! For who has a claim's file but not its node, and for the tests of the format. Nothing is locked, read or written on
//! disk.

use std::collections::BTreeSet;
use std::slice;

use kerf_mig::Placement;
use kerf_nvml::PciAddress;

use super::PreparedClaim;
use super::epoch::Epoch;
use super::holders::{self, Extent};
use super::journal::{self, Unusable};
use super::record::Record;

/// The content of a claim's journal file, with all that a newer version has added to it.
#[derive(Clone, Debug, PartialEq)]
pub struct JournalFile(Record);

impl JournalFile {
    /// Reads `file` as the journal of the claim `uid`.
    ///
    /// # Errors
    /// Why the engine would not use the file.
    pub fn read(uid: &str, file: &[u8]) -> Result<JournalFile, String> {
        journal::parse(uid, file).map(JournalFile).map_err(|unusable| match unusable {
            Unusable::Damaged(reason) => reason,
            Unusable::Newer(version) => format!("version {version} is newer than this build"),
        })
    }

    /// The file as the engine writes it.
    pub fn to_bytes(&self) -> Vec<u8> {
        journal::encode(&self.0).expect("strings, numbers and string keys always encode")
    }

    /// What the engine takes it for once the kernel's boot id is `boot_id`: instances of another boot are forgotten.
    #[must_use]
    pub fn at_boot(mut self, boot_id: &str) -> JournalFile {
        self.0.adapt_to(&Epoch { boot_id: boot_id.to_owned(), driver_load: None });
        self
    }

    /// What it says about the claim.
    pub fn claim(&self) -> PreparedClaim {
        self.0.clone().into_claim(false)
    }

    /// Every GPU that the claim holds or has touched.
    pub fn gpus(&self) -> BTreeSet<PciAddress> {
        self.0.gpus()
    }

    /// Whether the claim holds any of these memory slices of a GPU, or, without a placement, any part of it.
    pub fn holds(&self, gpu: PciAddress, placement: Option<Placement>) -> bool {
        let holds = holders::holds(slice::from_ref(&self.0));
        holders::in_the_way(&holds, gpu, placement.map_or(Extent::Whole, Extent::Slices)).is_some()
    }
}
