//! Names of devices: each device has one, and it is a DNS label.

use kerf_kubelet_plugin::engine::DeviceName;
use kerf_mig::{Engines, Placement, Profile};
use kerf_nvml::PciAddress;

use crate::dns;

/// A text that is a device name is read and written alike. A device, whatever its profile is called, has a name that is
/// read as this device.
pub fn device_name(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data)
        && let Ok(name) = text.parse::<DeviceName>()
    {
        assert_eq!(name.to_string(), text);
        assert!(dns::is_label(text), "{text:?}");
        assert_eq!(serde_json::to_value(&name).expect("a name is a string"), text);
        let whole = DeviceName::whole(name.gpu());
        assert!(text.starts_with(&whole.to_string()), "a partition is named after its GPU");
        assert_eq!(name == whole, name.as_partition().is_none());
    }

    let Some((numbers, profile)) = data.split_first_chunk::<16>() else { return };
    let number = |at: usize| u32::from_le_bytes([numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3]]);
    let [bus, device, function, bits] = number(4).to_le_bytes();
    // Domains beyond 16 bits exist (VMD), but not on every input.
    let domain = if bits & 1 == 0 { number(0) & 0xffff } else { number(0) };
    let gpu = PciAddress { domain, bus, device: device % 32, function: function % 8 };
    let profile = Profile {
        id: number(8),
        name: String::from_utf8_lossy(profile).into_owned(),
        compute_slices: 1,
        memory_mib: 1,
        engines: Engines::default(),
        max_instances: 1,
        placements: Vec::new(),
    };
    let start = if bits & 2 == 0 { number(12) % 16 } else { number(12) };
    let partition = DeviceName::partition(gpu, &profile, Placement { start, size: 1 });
    for name in [DeviceName::whole(gpu), partition] {
        let text = name.to_string();
        // A longer one is not offered by the controller and is refused here.
        assert_eq!(text.parse().ok(), (text.len() <= 63).then_some(name));
    }
}
