//! What a line in the log is about: the claim, the GPU and its device, the step. Everything that is logged while one of
//! them is worked on carries these fields, under the same names in the whole program.

use kerf_nvml::PciAddress;
use tracing::{Span, info_span};

use super::record::Record;
use super::{DeviceName, PreparedClaim, Step};

/// Work on a claim. Where only its UID is known, the names are empty.
pub fn claim_span(uid: &str, namespace: &str, name: &str) -> Span {
    info_span!("claim", claim.uid = uid, claim.namespace = namespace, claim.name = name)
}

/// Work on one device of a GPU.
pub(super) fn device_span(device: &DeviceName) -> Span {
    info_span!("device", gpu = %DeviceName::whole(device.gpu()), %device)
}

/// Work on a GPU.
pub(super) fn gpu_span(gpu: PciAddress) -> Span {
    info_span!("gpu", gpu = %DeviceName::whole(gpu))
}

/// A step.
pub(super) fn step_span(step: Step) -> Span {
    info_span!("step", step = step.name())
}

impl Record {
    pub(super) fn span(&self) -> Span {
        claim_span(&self.claim.uid, &self.claim.namespace, &self.claim.name)
    }
}

impl PreparedClaim {
    /// Work on this claim, for the log.
    pub fn span(&self) -> Span {
        claim_span(&self.uid, &self.namespace, &self.name)
    }
}
