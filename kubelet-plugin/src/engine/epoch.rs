//! How long what is on a GPU lives: one boot of the node and, within it, one loading of the driver. Pure.
//!
//! No instance survives a reboot or a reload of the kernel module, and on Hopper and later MIG mode does neither (NVIDIA
//! MIG user guide). Ids start anew, and they follow the placement: what looks like a claim's instance in another epoch is
//! somebody else's.

/// A boot and a loading of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Epoch {
    /// The kernel's boot id.
    pub(super) boot_id: String,
    /// See [`kerf_nvml::DriverRoot::driver_load`]. One that is not known is taken for any other.
    pub(super) driver_load: Option<u64>,
}

impl Epoch {
    /// Whether instances of `other` may be live in this one.
    pub(super) fn may_be(&self, other: &Epoch) -> bool {
        let same_load = match (self.driver_load, other.driver_load) {
            (Some(one), Some(other)) => one == other,
            _ => true,
        };
        self.boot_id == other.boot_id && same_load
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_load_is_any() {
        let epoch = |boot_id: &str, driver_load| Epoch { boot_id: boot_id.into(), driver_load };
        for (one, other, same) in [
            (epoch("a", Some(1)), epoch("a", Some(1)), true),
            (epoch("a", Some(1)), epoch("a", Some(2)), false),
            (epoch("a", Some(1)), epoch("a", None), true),
            (epoch("a", None), epoch("a", None), true),
            (epoch("a", Some(1)), epoch("b", Some(1)), false),
            (epoch("a", None), epoch("b", None), false),
        ] {
            assert_eq!((one.may_be(&other), other.may_be(&one)), (same, same), "{one:?} {other:?}");
        }
    }
}
