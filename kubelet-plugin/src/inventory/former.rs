//! What the claims of the driver that was here before keep from being given out. Pure.

use kerf_api::{Blocked, MigPlacement, names};
use kerf_nvml::PciAddress;

use crate::engine::PreparedClaim;

/// What they hold of one GPU, and that nobody can tell it, if there is a `doubt`.
pub(super) fn find(address: PciAddress, claims: &[PreparedClaim], doubt: Option<&str>) -> Vec<Blocked> {
    let blocked =
        |placement, message| Blocked { placement, reason: names::FORMER_DRIVER.to_owned(), message, usable: None };
    let holds = claims.iter().flat_map(|claim| {
        let here = claim.former.iter().filter(|hold| hold.gpu == address);
        here.map(move |hold| {
            let placement = hold.placement.map(|at| MigPlacement { start: at.start, size: at.size });
            let part = placement.map_or_else(|| "the GPU".to_owned(), |at| format!("placement {}:{}", at.start, at.size));
            let message = format!(
                "{part} is held by {}, which NVIDIA's DRA driver has prepared: it is free once the claim's pods have ended",
                claim.whose()
            );
            blocked(placement, message)
        })
    });
    let mut found: Vec<_> = holds.collect();
    found.sort_by_key(|blocked| blocked.placement.map(|placement| (placement.start, placement.size)));
    // One tells as much as several: claims may share a device.
    found.dedup_by_key(|blocked| blocked.placement);
    found.extend(doubt.map(|doubt| blocked(None, doubt.to_owned())));
    found
}

#[cfg(test)]
mod tests {
    use kerf_mig::Placement;

    use super::*;
    use crate::engine::FormerHold;

    fn claim(uid: &str, name: &str, former: Vec<FormerHold>) -> PreparedClaim {
        PreparedClaim {
            uid: uid.into(),
            namespace: "team".into(),
            name: name.into(),
            complete: true,
            former,
            ..PreparedClaim::default()
        }
    }

    #[test]
    fn each_place_is_told_once_with_who_has_it() {
        let (gpu, other): (PciAddress, PciAddress) = ("0000:3b:00.0".parse().unwrap(), "0000:47:00.0".parse().unwrap());
        let slice = |start| FormerHold { gpu, placement: Some(Placement { start, size: 1 }) };
        let whole = FormerHold { gpu: other, placement: None };
        let claims = [claim("a", "", vec![slice(4), slice(1)]), claim("b", "shared", vec![slice(4), whole])];
        let messages: Vec<_> = find(gpu, &claims, None).into_iter().map(|blocked| blocked.message).collect();
        assert_eq!(messages.len(), 2);
        assert!(messages[0].starts_with("placement 1:1 is held by claim a, which NVIDIA's DRA driver"), "{messages:?}");
        let blocked = find(other, &claims, Some("nobody knows"));
        let said: Vec<_> = blocked.iter().map(|blocked| (blocked.placement, &blocked.reason[..])).collect();
        assert_eq!(said, [(None, "FormerDriver"), (None, "FormerDriver")]);
        assert!(blocked[0].message.starts_with("the GPU is held by claim team/shared (b), "), "{blocked:?}");
        assert_eq!(blocked[1].message, "nobody knows");
        assert_eq!(find(gpu, &[], None), []);
    }
}
