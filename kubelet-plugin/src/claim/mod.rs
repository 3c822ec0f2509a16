//! From a claim of the API to what the engine is to make of it.
//!
//! [`check`] is pure: everything that can be wrong with a claim is found here, before anything on the node changes.

mod config;
mod source;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_api::Problem;
use kerf_api::problem::joined;

pub use source::{ApiClaims, ClaimSource, SourceError};

use crate::engine::{self, AllocatedDevice, Claim, DeviceName, DeviceNameError};

/// Annotation of a claim that was made from a pod's template: what the pod calls it (`k8s.io/api/resource/v1`).
const POD_CLAIM_NAME: &str = "resource.kubernetes.io/pod-claim-name";

/// What the kubelet says about a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRef {
    /// UID of the ResourceClaim.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// Why a claim cannot be prepared here. Each is one sentence: what was found, and what to do where there is something.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// The claim is gone.
    #[error("the claim does not exist any more: delete the pod, it cannot start")]
    NotFound,
    /// Another claim has the name now.
    #[error("the claim was replaced by another of the same name (UID {found}): delete the pod, it cannot start")]
    Replaced {
        /// UID of the claim that has the name.
        found: String,
    },
    /// The scheduler has not decided, or has taken it back.
    #[error("the claim is not allocated: the kubelet will retry when it is")]
    NotAllocated,
    /// No device of this driver.
    #[error("the claim is allocated no device of {driver}: the kubelet should not have asked")]
    NoDevice {
        /// This driver.
        driver: String,
    },
    /// A device of another node.
    #[error("the claim is allocated device {device} of node {pool}, and this is node {node}: delete the pod")]
    OtherNode {
        /// The device.
        device: String,
        /// Its pool.
        pool: String,
        /// This node.
        node: String,
    },
    /// A device that this version of kerf would not have published.
    #[error("the claim is allocated a device that kerf does not know: {0}: recreate the claim")]
    UnknownDevice(DeviceNameError),
    /// A device of the driver that was here before, see [`FormerDriver`](crate::engine::FormerDriver).
    #[error(
        "the claim is allocated {0}, which NVIDIA's DRA driver has published under that name before kerf served this node: pods \
         that run go on, but nothing can be prepared anew; delete the pod, and a claim that it does not own, so that they \
         are made and allocated again"
    )]
    FormerDevice(String),
    /// The configuration is of a kind that the Kubernetes API did not have when this was built.
    #[error("the claim has a configuration that is not opaque, which this version of kerf cannot read")]
    NotOpaque,
    /// The opaque configuration is wrong, or asks for what kerf does not do.
    #[error("the configuration {source_of} cannot be used: {}", joined(problems, "; also "))]
    Config {
        /// Where it was written.
        source_of: ConfigSource,
        /// Why, each with the field.
        problems: Vec<Problem>,
    },
    /// A configuration that names a request fits no device of it.
    #[error(
        "the configuration {source_of} gives a {kind} to request {request}, whose device {device} takes a {wanted}"
    )]
    WrongKind {
        /// Where it was written.
        source_of: ConfigSource,
        /// Kind of the configuration.
        kind: &'static str,
        /// The request.
        request: String,
        /// Its device.
        device: String,
        /// Kind that the device takes.
        wanted: &'static str,
    },
}

/// Where a configuration was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigSource {
    /// In the DeviceClass: only an admin can mend it.
    Class,
    /// In the claim itself.
    Claim,
}

impl ClaimError {
    /// Whether it stays until a person changes something: waiting and retrying cannot help.
    pub fn needs_a_person(&self) -> bool {
        !matches!(self, ClaimError::NotFound | ClaimError::NotAllocated | ClaimError::NoDevice { .. })
    }
}

impl std::fmt::Display for ConfigSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ConfigSource::Class => "of the DeviceClass",
            ConfigSource::Claim => "of the claim",
        })
    }
}

/// Checks that `found`, which has the name of `asked`, is the claim the kubelet means and allocated on this node, and
/// reduces it to this driver's part.
pub fn check(asked: &ClaimRef, found: Option<&ResourceClaim>, driver: &str, node: &str) -> Result<Claim, ClaimError> {
    let found = found.ok_or(ClaimError::NotFound)?;
    let uid = found.metadata.uid.as_deref().unwrap_or_default();
    if uid != asked.uid {
        return Err(ClaimError::Replaced { found: uid.to_owned() });
    }
    let allocation = found.status.as_ref().and_then(|status| status.allocation.as_ref());
    let allocation = allocation.and_then(|allocation| allocation.devices.as_ref()).ok_or(ClaimError::NotAllocated)?;
    let results: Vec<_> = allocation.results.iter().flatten().filter(|result| result.driver == driver).collect();
    if results.is_empty() {
        return Err(ClaimError::NoDevice { driver: driver.to_owned() });
    }
    let written =
        found.spec.as_ref().and_then(|spec| spec.devices.as_ref()).and_then(|devices| devices.config.as_deref());
    let allocated = allocation.config.as_deref().unwrap_or_default();
    let configs = config::decode(allocated, written.unwrap_or_default(), driver)?;
    let mut devices = Vec::with_capacity(results.len());
    for result in results {
        if result.pool != node {
            return Err(ClaimError::OtherNode {
                device: result.device.clone(),
                pool: result.pool.clone(),
                node: node.to_owned(),
            });
        }
        let device: DeviceName = result.device.parse().map_err(|error| {
            let is_former = engine::is_former_name(&result.device);
            if is_former { ClaimError::FormerDevice(result.device.clone()) } else { ClaimError::UnknownDevice(error) }
        })?;
        if let Some(config) = config::applying(&configs, &result.request, &device)? {
            config.check_supported()?;
        }
        devices.push(AllocatedDevice {
            request: base_request(&result.request).to_owned(),
            subrequest: result.request.split_once('/').map(|(_, subrequest)| subrequest.to_owned()),
            pool: result.pool.clone(),
            device: result.device.clone(),
            share_id: result.share_id.clone(),
            admin_access: result.admin_access.unwrap_or(false),
        });
    }
    let annotations = found.metadata.annotations.as_ref();
    Ok(Claim {
        uid: asked.uid.clone(),
        namespace: asked.namespace.clone(),
        name: asked.name.clone(),
        pod_claim_name: annotations.and_then(|annotations| annotations.get(POD_CLAIM_NAME)).cloned(),
        devices,
    })
}

/// Whether `found`, which has the name of `asked`, is that very claim and has a device of this driver on this node.
pub fn stands_here(asked: &ClaimRef, found: Option<&ResourceClaim>, driver: &str, node: &str) -> bool {
    let Some(found) = found.filter(|found| found.metadata.uid.as_deref() == Some(&asked.uid)) else { return false };
    let allocation = found.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_ref());
    results.into_iter().flatten().any(|result| result.driver == driver && result.pool == node)
}

/// The request without the subrequest that was chosen for it: `gpu` of `gpu/large`. The kubelet knows base names only.
fn base_request(request: &str) -> &str {
    request.split_once('/').map_or(request, |(base, _)| base)
}

#[cfg(test)]
mod tests;
