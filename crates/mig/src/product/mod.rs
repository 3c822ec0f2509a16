//! Known products, as data: what the simulator simulates and the tests are run over. The driver never looks here; it
//! learns a GPU's geometry from NVML.
//!
//! **To add a product**: write `products/<key>.yaml` and add the key to `KEYS` below.
//!
//! Every file says where its values come from (`source`) and which of them nobody has published (`unknown`). An unknown
//! value still stands in the file, as a plausible estimate explained beside it, and is used like a known one.
//!
//! Left out, because their placements are not known: RTX PRO 5000 and RTX PRO 4500 Blackwell (for the former, two
//! editions of NVIDIA's MIG user guide contradict each other), and Thor (integrated; NVML reports its memory as 0). A
//! B200 with 192 GB is not known as a product of its own.

mod compute_instance;
mod file;

use std::sync::LazyLock;

use serde::Deserialize;

pub use compute_instance::ComputeInstanceProfile;
pub use file::ProductError;

use crate::{Geometry, Profile};

macro_rules! files {
    ($($key:literal)*) => { &[$(($key, include_str!(concat!("../../products/", $key, ".yaml")))),*] };
}

/// Key and text of each product's file, oldest generation first.
const KEYS: &[(&str, &str)] = files! {
    "t4"
    "a30"
    "a100-40gb"
    "a100-80gb"
    "l4"
    "l40s"
    "rtx-4090"
    "h100-80gb"
    "h100-pcie"
    "h100-nvl"
    "h20"
    "gh200-96gb"
    "gh200-144gb"
    "h200"
    "b200"
    "gb200-186gb"
    "gb200-189gb"
    "b300"
    "gb300"
    "rtx-pro-6000"
};

/// A GPU as NVIDIA sells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Product {
    /// The name of its file without the extension, such as `h100-80gb`: what a person writes to choose it.
    pub key: String,
    /// The name as NVML gives it, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// PCI device ids (vendor 0x10de), most common first. Sister products of one geometry share a file, and two
    /// products can share an id: an id does not name a product.
    pub pci_device_ids: Vec<u16>,
    /// The generation.
    pub architecture: Architecture,
    /// NVML's brand in words: `Nvidia`, `GeForce`.
    pub brand: String,
    /// CUDA compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Memory of the whole GPU in MiB, as NVML reports it with MIG off.
    pub memory_mib: u64,
    /// Streaming multiprocessors of the whole GPU with MIG off (an A100 gives up 10 of 108 in MIG mode).
    pub multiprocessors: u32,
    /// Where the values of the whole GPU come from.
    pub source: String,
    /// Values of the whole GPU, and [`Mig::minimum_driver`], that are estimates.
    pub unknown: Vec<Field>,
    /// What it can be cut into; `None` where the product has no MIG.
    pub mig: Option<Mig>,
}

/// A generation of GPUs, in the words that NVML's clients use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
pub enum Architecture {
    /// T4.
    Turing,
    /// A100, A30.
    Ampere,
    /// L4, L40S, RTX 4090.
    Ada,
    /// H100, H200, GH200.
    Hopper,
    /// B200, GB200, B300, RTX PRO 6000.
    Blackwell,
}

/// The MIG side of a product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mig {
    /// The oldest driver with MIG on this product.
    pub minimum_driver: String,
    /// What switching MIG mode takes.
    pub mode: ModeSwitch,
    /// Compute slices of the GPU.
    pub compute_slices: u32,
    /// Memory slices of the GPU: the unit of placements.
    pub memory_slices: u32,
    /// Where the profiles' values come from.
    pub source: String,
    /// The GPU-instance profiles, in the file's order.
    pub profiles: Vec<GpuInstanceProfile>,
}

/// What switching MIG mode on or off takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModeSwitch {
    /// A reset of the GPU; until then the mode is pending. The mode survives a reboot. Ampere.
    NeedsReset,
    /// Takes effect at once on an idle GPU, and is lost when the driver is unloaded. Hopper and later.
    Switchable,
}

/// A GPU-instance profile as NVML gives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInstanceProfile {
    /// NVML's enum index (`NVML_GPU_INSTANCE_PROFILE_*`): what `nvmlDeviceGetGpuInstanceProfileInfo` takes. Not the
    /// hardware id, which is [`Profile::id`].
    pub nvml_index: u32,
    /// Everything else.
    pub profile: Profile,
    /// Values that are estimates.
    pub unknown: Vec<Field>,
}

/// A value that a product's file can declare unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Field {
    /// NVML's brand.
    Brand,
    /// Memory of the GPU or of the profile.
    MemoryMib,
    /// Oldest driver with MIG.
    MinimumDriver,
    /// Hardware id of the profile.
    Id,
    /// Streaming multiprocessors of the profile.
    Multiprocessors,
    /// Every count of [`crate::Engines`], streaming multiprocessors included.
    Engines,
    /// Placements of the profile.
    Placements,
}

impl Product {
    /// Every known product, oldest generation first.
    pub fn all() -> &'static [Product] {
        static ALL: LazyLock<Vec<Product>> = LazyLock::new(|| {
            let parse = |(key, text): &(&str, &str)| Product::parse(key, text);
            KEYS.iter()
                .map(parse)
                .collect::<Result<_, _>>()
                .expect("the files are compiled in, and a test reads them all")
        });
        &ALL
    }

    /// The product with this key.
    pub fn by_key(key: &str) -> Option<&'static Product> {
        Product::all().iter().find(|product| product.key == key)
    }

    /// Reads a product from the text of a file such as those in `products/`.
    ///
    /// # Errors
    ///
    /// When the text is not YAML of that form, or when its values contradict each other.
    pub fn parse(key: &str, text: &str) -> Result<Product, ProductError> {
        file::parse(key, text)
    }

    /// What it can be cut into; empty without MIG.
    pub fn geometry(&self) -> Geometry {
        let profiles = self.mig.iter().flat_map(|mig| &mig.profiles);
        Geometry::new(profiles.map(|profile| profile.profile.clone()).collect())
    }
}
