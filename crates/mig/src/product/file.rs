//! The form of a product's file, and what must hold in it.

use serde::Deserialize;

use super::{Architecture, Field, GpuInstanceProfile, Mig, ModeSwitch, Product};
use crate::{Engines, Placement, Profile};

/// Why a product's file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProductError {
    /// Not YAML, or not of the form of a product.
    #[error("product {key}: {reason}")]
    Form {
        /// The product's key.
        key: String,
        /// What is wrong and where.
        reason: Box<serde_saphyr::Error>,
    },
    /// Two values that cannot both be true.
    #[error("product {key}: {contradiction}; correct one of the two")]
    Contradiction {
        /// The product's key.
        key: String,
        /// Both values.
        contradiction: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProductFile {
    name: String,
    pci_device_ids: Vec<u16>,
    architecture: Architecture,
    brand: String,
    compute_capability: (u32, u32),
    memory_mib: u64,
    multiprocessors: u32,
    source: String,
    #[serde(default)]
    unknown: Vec<Field>,
    mig: Option<MigFile>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MigFile {
    minimum_driver: String,
    mode: ModeSwitch,
    compute_slices: u32,
    memory_slices: u32,
    source: String,
    profiles: Vec<ProfileFile>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProfileFile {
    name: String,
    id: u32,
    nvml_index: u32,
    compute_slices: u32,
    memory_mib: u64,
    engines: Engines,
    max_instances: u32,
    placements: PlacementsFile,
    #[serde(default)]
    unknown: Vec<Field>,
}

/// As `nvidia-smi mig -lgipp` prints them: `{0,2,4}:2`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlacementsFile {
    starts: Vec<u32>,
    size: u32,
}

pub(super) fn parse(key: &str, text: &str) -> Result<Product, ProductError> {
    let file: ProductFile = serde_saphyr::from_str(text)
        .map_err(|reason| ProductError::Form { key: key.to_owned(), reason: Box::new(reason) })?;
    let product = Product {
        key: key.to_owned(),
        name: file.name,
        pci_device_ids: file.pci_device_ids,
        architecture: file.architecture,
        brand: file.brand,
        compute_capability: file.compute_capability,
        memory_mib: file.memory_mib,
        multiprocessors: file.multiprocessors,
        source: file.source,
        unknown: file.unknown,
        mig: file.mig.map(mig),
    };
    match contradiction(&product) {
        None => Ok(product),
        Some(contradiction) => Err(ProductError::Contradiction { key: key.to_owned(), contradiction }),
    }
}

fn mig(file: MigFile) -> Mig {
    let profile = |file: ProfileFile| {
        let size = file.placements.size;
        GpuInstanceProfile {
            nvml_index: file.nvml_index,
            unknown: file.unknown,
            profile: Profile {
                id: file.id,
                name: file.name,
                compute_slices: file.compute_slices,
                memory_mib: file.memory_mib,
                engines: file.engines,
                max_instances: file.max_instances,
                placements: file.placements.starts.into_iter().map(|start| Placement { start, size }).collect(),
            },
        }
    };
    Mig {
        minimum_driver: file.minimum_driver,
        mode: file.mode,
        compute_slices: file.compute_slices,
        memory_slices: file.memory_slices,
        source: file.source,
        profiles: file.profiles.into_iter().map(profile).collect(),
    }
}

/// The first thing found that cannot be.
fn contradiction(product: &Product) -> Option<String> {
    let mig = product.mig.as_ref()?;
    let geometry = product.geometry();
    let differ = |what: &str, said: u32, found: u32| {
        (said != found).then(|| format!("{what} says {said}, but the profiles add up to {found}"))
    };
    let twice = |(index, one): (usize, &GpuInstanceProfile)| {
        let other = mig.profiles[..index].iter().find(|other| {
            other.nvml_index == one.nvml_index
                || other.profile.id == one.profile.id
                || other.profile.label() == one.profile.label()
        })?;
        Some(format!("profiles {} and {} share a name, an id or an nvml_index", other.profile.name, one.profile.name))
    };
    let impossible = |one: &GpuInstanceProfile| {
        let profile = &one.profile;
        if profile.placements.iter().any(|placement| placement.size == 0) || profile.placements.is_empty() {
            Some(format!("profile {} has a placement size of 0 or no placement", profile.name))
        } else if profile.memory_mib > product.memory_mib {
            let (part, whole) = (profile.memory_mib, product.memory_mib);
            Some(format!("profile {} has {part} MiB, more than the GPU's {whole}", profile.name))
        } else if profile.engines.multiprocessors > product.multiprocessors {
            let (part, whole) = (profile.engines.multiprocessors, product.multiprocessors);
            Some(format!("profile {} has {part} multiprocessors, more than the GPU's {whole}", profile.name))
        } else {
            None
        }
    };
    mig.profiles
        .iter()
        .find_map(impossible)
        .or_else(|| mig.profiles.iter().enumerate().find_map(twice))
        .or_else(|| differ("compute_slices", mig.compute_slices, geometry.compute_slices()))
        .or_else(|| differ("memory_slices", mig.memory_slices, geometry.memory_slices()))
}
