//! NVML's numbers in NVIDIA's words.

/// `nvmlBrandType_t` (nvml.h), in the spelling that NVIDIA's Kubernetes components publish (go-nvlib).
pub(crate) fn brand(number: u32) -> &'static str {
    match number {
        1 => "Quadro",
        2 => "Tesla",
        3 => "NVS",
        4 => "Grid",
        5 => "GeForce",
        6 => "Titan",
        7 => "NvidiaVApps",
        8 => "NvidiaVPC",
        9 => "NvidiaVCS",
        10 => "NvidiaVWS",
        11 => "NvidiaCloudGaming",
        12 => "QuadroRTX",
        13 => "NvidiaRTX",
        14 => "Nvidia",
        15 => "GeForceRTX",
        16 => "TitanRTX",
        _ => "Unknown",
    }
}

/// `NVML_DEVICE_ARCH_HOPPER` (nvml.h).
pub(crate) const HOPPER: u32 = 9;

/// `NVML_DEVICE_ARCH_UNKNOWN` (nvml.h).
pub(crate) const ARCHITECTURE_UNKNOWN: u32 = 0xFFFF_FFFF;

/// `NVML_DEVICE_ARCH_*` (nvml.h).
pub(crate) fn architecture(number: u32) -> &'static str {
    match number {
        2 => "Kepler",
        3 => "Maxwell",
        4 => "Pascal",
        5 => "Volta",
        6 => "Turing",
        7 => "Ampere",
        8 => "Ada",
        HOPPER => "Hopper",
        10 => "Blackwell",
        _ => "Unknown",
    }
}

/// What a GPU-instance profile's name says beside its size, by NVML's enum index (nvml.h,
/// `NVML_GPU_INSTANCE_PROFILE_*`; the attributes as go-nvlib names them). `None` for an index newer than this table.
fn attributes(index: u32) -> Option<&'static str> {
    Some(match index {
        0x0..=0x6 => "",                  // 1_SLICE, 2_SLICE, 3_SLICE, 4_SLICE, 7_SLICE, 8_SLICE, 6_SLICE
        0x7 | 0x8 => "+me",               // 1_SLICE_REV1, 2_SLICE_REV1: with the media extensions
        0x9 => "",                        // 1_SLICE_REV2: double memory
        0xA | 0xB | 0xC | 0x11 => "+gfx", // 1_SLICE_GFX, 2_SLICE_GFX, 4_SLICE_GFX, 3_SLICE_GFX
        0xD | 0xE => "-me",               // 1_SLICE_NO_ME, 2_SLICE_NO_ME
        0xF | 0x10 => "+me.all",          // 1_SLICE_ALL_ME, 2_SLICE_ALL_ME
        _ => return None,
    })
}

/// A GPU-instance profile's name: `1g.10gb+me`.
///
/// Computed wherever the enum index is known, though the driver can be asked: nvml.h lets it answer only while MIG is
/// on, and a name must not depend on the mode. `driver` is asked about an index newer than this build; `None` when it
/// does not say either.
pub(crate) fn profile_name(
    index: u32,
    compute_slices: u32,
    memory_mib: u64,
    gpu_memory_mib: u64,
    driver: impl FnOnce() -> Option<String>,
) -> Option<String> {
    match attributes(index) {
        Some(attributes) => Some(kerf_mig::base_name(compute_slices, memory_mib, gpu_memory_mib) + attributes),
        None => {
            driver().map(|name| name.strip_prefix("MIG ").unwrap_or(&name).to_owned()).filter(|name| !name.is_empty())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_of_every_known_product_have_nvidias_names_without_asking_the_driver() {
        let asked = || panic!("the driver must not be asked");
        for product in kerf_mig::product::Product::all() {
            for known in product.mig.iter().flat_map(|mig| &mig.profiles) {
                let (index, profile) = (known.nvml_index, &known.profile);
                let name = profile_name(index, profile.compute_slices, profile.memory_mib, product.memory_mib, asked);
                assert_eq!(name.as_ref(), Some(&profile.name), "{}", product.key);
            }
        }
    }

    #[test]
    fn the_driver_names_profiles_that_are_newer_than_this_build() {
        let name = |driver: Option<&str>| profile_name(0x12, 1, 9984, 81559, || driver.map(str::to_owned));
        assert_eq!(name(Some("MIG 1g.10gb+new")).as_deref(), Some("1g.10gb+new"));
        assert_eq!(name(Some("")), None);
        assert_eq!(name(None), None);
    }

    #[test]
    fn a_gpu_without_memory_of_its_own_has_profiles_of_0gb() {
        assert_eq!(profile_name(0x0, 1, 0, 0, || None).as_deref(), Some("1g.0gb")); // Thor, NVIDIA MIG user guide
    }
}
