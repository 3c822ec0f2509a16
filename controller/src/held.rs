//! The devices that claims hold, from the watch on ResourceClaims.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::ResourceClaim;

/// What one claim holds, by node. Our pools are named like their nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holding {
    /// The claim's UID.
    pub claim: String,
    /// Names of devices.
    pub devices: BTreeMap<String, BTreeSet<String>>,
}

impl Holding {
    /// What `claim` was allocated of `driver`. Who looks with admin access holds nothing: others get the device as well.
    pub fn of(driver: &str, claim: &ResourceClaim) -> Holding {
        let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
        let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_ref());
        let ours = results.into_iter().flatten().filter(|one| one.driver == driver && one.admin_access != Some(true));
        let mut devices: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for one in ours {
            devices.entry(one.pool.clone()).or_default().insert(one.device.clone());
        }
        Holding { claim: claim.metadata.uid.clone().unwrap_or_default(), devices }
    }
}
