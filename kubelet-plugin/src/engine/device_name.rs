//! Device names: a GPU's PCI address, and for a partition its profile and first memory slice.
//!
//! A name says where the device is and nothing about the moment, so it survives reboots, driver reloads and missing
//! neighbours.

use std::fmt;
use std::str::FromStr;

use kerf_mig::{Placement, Profile};
use kerf_nvml::{GpuInstance, PciAddress};
use serde::{Deserialize, Serialize};

/// The longest name the DRA API takes: a DNS label.
const MAX_LENGTH: usize = 63;

/// The name of a device: `gpu-3b-00-0`, `gpu-0001-3b-00-0` (PCI domain 1), `gpu-3b-00-0-mig-1g10gb-me-4`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceName {
    gpu: PciAddress,
    partition: Option<Partition>,
}

/// The part of a device's name that says which partition.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Partition {
    /// The profile's label, see [`Profile::label`].
    pub label: String,
    /// First memory slice.
    pub start: u32,
}

/// A text that is not a device name of this driver.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a device name of the form gpu-3b-00-0 or gpu-3b-00-0-mig-1g10gb-4")]
pub struct DeviceNameError(String);

impl DeviceName {
    /// A whole GPU.
    pub fn whole(gpu: PciAddress) -> DeviceName {
        DeviceName { gpu, partition: None }
    }

    /// A partition of a GPU.
    pub fn partition(gpu: PciAddress, profile: &Profile, placement: Placement) -> DeviceName {
        DeviceName { gpu, partition: Some(Partition { label: profile.label(), start: placement.start }) }
    }

    /// The partition that is exactly a live instance; `None` for a profile that is none of `profiles`.
    pub fn of_instance(gpu: PciAddress, profiles: &[Profile], live: &GpuInstance) -> Option<DeviceName> {
        let profile = profiles.iter().find(|profile| profile.id == live.profile_id)?;
        Some(DeviceName::partition(gpu, profile, live.placement))
    }

    /// Where the GPU is.
    pub fn gpu(&self) -> PciAddress {
        self.gpu
    }

    /// Which partition; `None` for the whole GPU.
    pub fn as_partition(&self) -> Option<&Partition> {
        self.partition.as_ref()
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PciAddress { domain, bus, device, function } = self.gpu;
        f.write_str("gpu-")?;
        if domain != 0 {
            write!(f, "{domain:04x}-")?;
        }
        write!(f, "{bus:02x}-{device:02x}-{function:x}")?;
        if let Some(Partition { label, start }) = &self.partition {
            write!(f, "-mig-{label}-{start}")?;
        }
        Ok(())
    }
}

impl FromStr for DeviceName {
    type Err = DeviceNameError;

    /// Reads exactly what `Display` writes: one device has one name.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text)
            .filter(|name| text.len() <= MAX_LENGTH && name.to_string() == text)
            .ok_or_else(|| DeviceNameError(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<DeviceName> {
    let rest = text.strip_prefix("gpu-")?;
    let (address, partition) = match rest.split_once("-mig-") {
        Some((address, partition)) => (address, Some(partition)),
        None => (rest, None),
    };
    let fields: Vec<&str> = address.split('-').collect();
    let kernel_form = match fields[..] {
        [bus, device, function] => format!("0000:{bus}:{device}.{function}"),
        [domain, bus, device, function] => format!("{domain}:{bus}:{device}.{function}"),
        _ => return None,
    };
    let gpu = kernel_form.parse().ok()?;
    let partition = match partition {
        None => None,
        Some(partition) => {
            let (label, start) = partition.rsplit_once('-')?;
            let is_label = |label: &str| {
                !label.is_empty() && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            };
            Some(Partition {
                label: Some(label).filter(|label| is_label(label))?.to_owned(),
                start: start.parse().ok()?,
            })
        }
    };
    Some(DeviceName { gpu, partition })
}

impl Serialize for DeviceName {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for DeviceName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for (text, address, partition) in [
            ("gpu-3b-00-0", "0000:3b:00.0", None),
            ("gpu-0001-3b-00-0", "0001:3b:00.0", None),
            ("gpu-10000-c1-1f-7", "10000:c1:1f.7", None),
            ("gpu-3b-00-0-mig-1g10gb-4", "0000:3b:00.0", Some(("1g10gb", 4))),
            ("gpu-3b-00-0-mig-1g10gb-me-4", "0000:3b:00.0", Some(("1g10gb-me", 4))),
            ("gpu-ffff-ff-1f-7-mig-4g96gb-meall-11", "ffff:ff:1f.7", Some(("4g96gb-meall", 11))),
        ] {
            let name: DeviceName = text.parse().unwrap();
            assert_eq!(name.to_string(), text);
            assert_eq!(name.gpu(), address.parse().unwrap());
            assert_eq!(
                name.as_partition().map(|partition| (partition.label.as_str(), partition.start)),
                partition,
                "{text}"
            );
        }
    }

    #[test]
    fn profiles_make_names() {
        let gpu = "0000:3b:00.0".parse().unwrap();
        let profile = Profile {
            id: 20,
            name: "1g.10gb+me".into(),
            compute_slices: 1,
            memory_mib: 9984,
            engines: kerf_mig::Engines::default(),
            max_instances: 1,
            placements: Vec::new(),
        };
        let name = DeviceName::partition(gpu, &profile, Placement { start: 4, size: 1 });
        assert_eq!(name.to_string(), "gpu-3b-00-0-mig-1g10gb-me-4");
        assert_eq!(name.to_string().parse(), Ok(name));
        assert_eq!(DeviceName::whole(gpu).to_string(), "gpu-3b-00-0");
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "gpu-",
            "gpu-0",
            "GPU-3b-00-0",
            "gpu-3B-00-0",
            "gpu-3b-0-0",
            "gpu-3b-00-8",
            "gpu-3b-20-0",
            "gpu-0000-3b-00-0",
            "gpu-1-3b-00-0",
            "gpu-3b-00-0-mig-",
            "gpu-3b-00-0-mig-4",
            "gpu-3b-00-0-mig--4",
            "gpu-3b-00-0-mig-1g10gb-",
            "gpu-3b-00-0-mig-1g10gb-04",
            "gpu-3b-00-0-mig-1g10gb-+4",
            "gpu-3b-00-0-mig-1g.10gb-4",
            "gpu-3b-00-0-mig-../../x-4",
            "gpu-3b-00-0-mig-1g10gb-me-1g10gb-me-1g10gb-me-1g10gb-me-1g10gb-4",
        ] {
            assert_eq!(text.parse::<DeviceName>(), Err(DeviceNameError(text.to_owned())), "{text}");
        }
    }
}
