//! kerf's own words for what NVML reports.

use std::fmt;
use std::str::FromStr;

use kerf_mig::Placement;
use serde::{Deserialize, Serialize};

/// Where a GPU is: its PCI address. The one name of a GPU that survives reboots, driver reloads and missing neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// PCI domain (segment).
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device (slot).
    pub device: u8,
    /// Function.
    pub function: u8,
}

/// A text that is not a PCI address.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a PCI address of the form 0000:3b:00.0")]
pub struct PciAddressError(String);

impl fmt::Display for PciAddress {
    /// The kernel's form: `0000:3b:00.0`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl FromStr for PciAddress {
    type Err = PciAddressError;

    /// Reads the kernel's form, NVML's form with an eight-digit domain, and either case.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // Digits only: `from_str_radix` would also take a sign.
        let hex = |digits: &str| {
            let plain = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
            u32::from_str_radix(digits, 16).ok().filter(|_| plain)
        };
        let parse = || {
            let (domain, rest) = text.split_once(':')?;
            let (bus, rest) = rest.split_once(':')?;
            let (device, function) = rest.split_once('.')?;
            Some(PciAddress {
                domain: hex(domain)?,
                bus: u8::try_from(hex(bus)?).ok()?,
                device: u8::try_from(hex(device)?).ok().filter(|device| *device < 32)?,
                function: u8::try_from(hex(function)?).ok().filter(|function| *function < 8)?,
            })
        };
        parse().ok_or_else(|| PciAddressError(text.to_owned()))
    }
}

impl Serialize for PciAddress {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PciAddress {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The CUDA version that the driver supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion {
    /// Major.
    pub major: u32,
    /// Minor.
    pub minor: u32,
}

/// What does not change about a GPU while its driver is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuFacts {
    /// `nvmlDeviceGetUUID`, `GPU-...`.
    pub uuid: String,
    /// `nvmlDeviceGetMinorNumber`: the N of `/dev/nvidiaN`.
    pub minor: u32,
    /// `nvmlDeviceGetName`.
    pub name: String,
    /// `nvmlDeviceGetBrand` in words, such as `Nvidia`, `Tesla`, `GeForce`.
    pub brand: String,
    /// `nvmlDeviceGetArchitecture` in words: `Turing`, `Ampere`, `Ada`, `Hopper`, `Blackwell`; a generation newer than
    /// this build is `Unknown`.
    pub architecture: String,
    /// `nvmlDeviceGetCudaComputeCapability`.
    pub compute_capability: (u32, u32),
    /// `nvmlDeviceGetMemoryInfo` in bytes; `None` where the GPU shares the host's memory (NOT_SUPPORTED).
    pub memory_bytes: Option<u64>,
    /// Whether MIG mode switches without a reset: Hopper and later.
    pub mig_mode_switchable: bool,
}

/// MIG mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MigMode {
    /// Off.
    Disabled,
    /// On.
    Enabled,
}

/// The MIG mode in force and the one after the next reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MigModes {
    /// In force.
    pub current: MigMode,
    /// After the next GPU reset.
    pub pending: MigMode,
}

/// A live GPU instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuInstance {
    /// GPU instance id, unique on its GPU while it lives.
    pub id: u32,
    /// Hardware profile id.
    pub profile_id: u32,
    /// The memory slices it covers.
    pub placement: Placement,
}

/// A live compute instance: a MIG device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputeInstance {
    /// Compute instance id, unique in its GPU instance.
    pub id: u32,
    /// MIG device UUID, `MIG-...`. May come again for another instance: never proof of identity.
    pub uuid: String,
}

/// A process that computes on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Process id in the host's namespace.
    pub pid: u32,
    /// The GPU instance it runs in; `None` on a GPU without MIG.
    pub gpu_instance: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses_are_read_in_the_kernels_and_in_nvmls_form() {
        let address = PciAddress { domain: 0, bus: 0x3b, device: 0, function: 0 };
        for text in ["0000:3b:00.0", "00000000:3B:00.0", "0:3b:0.0"] {
            assert_eq!(text.parse(), Ok(address), "{text}");
        }
        assert_eq!(address.to_string(), "0000:3b:00.0");

        let far = PciAddress { domain: 0x1_0001, bus: 0xff, device: 0x1f, function: 7 };
        assert_eq!("00010001:FF:1F.7".parse(), Ok(far));
        assert_eq!(far.to_string().parse(), Ok(far));
    }

    #[test]
    fn what_is_no_pci_address_is_refused_with_its_text() {
        for text in
            ["", "3b:00.0", "0000:3b:00", "0000:100:00.0", "0000:3b:20.0", "0000:3b:00.8", "0000:+b:00.0", "g:0:0.0"]
        {
            let error = text.parse::<PciAddress>().unwrap_err();
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
        }
    }
}
