//! A GPU instance and the compute instances in it.

use std::collections::BTreeMap;

use kerf_mig::product::{ComputeInstanceProfile, GpuInstanceProfile, Product};
use kerf_mig::{Offer, Placement};
use nvml_wrapper_sys::bindings::nvmlComputeMode_enum_NVML_COMPUTEMODE_DEFAULT as NVML_COMPUTEMODE_DEFAULT;

use super::uuid::{fresh_mig_uuid, mig_uuid};
use super::{GpuSpec, Uuids};
use crate::code::Code;
use crate::view;

/// A live GPU instance.
#[derive(Clone, Debug)]
pub(super) struct GpuInstance {
    pub(super) id: u32,
    pub(super) serial: u16,
    pub(super) profile: &'static GpuInstanceProfile,
    pub(super) placement: Placement,
    pub(super) compute: BTreeMap<u32, ComputeInstance>,
}

/// A live compute instance.
#[derive(Clone, Debug)]
pub(super) struct ComputeInstance {
    pub(super) id: u32,
    pub(super) serial: u16,
    pub(super) profile: ComputeInstanceProfile,
    pub(super) placement: Placement,
    pub(super) uuid: String,
    pub(super) compute_mode: u32,
}

/// NVML's only engine profile of compute instances: all engines are shared.
const ENGINES_SHARED: u32 = 0;

/// The most compute instances of a GPU instance (the open kernel module's table).
const MAX_COMPUTE_INSTANCES: u32 = 8;

impl GpuInstance {
    pub(super) fn offer(&self) -> Offer<'static> {
        Offer { profile: &self.profile.profile, placement: self.placement }
    }

    pub(super) fn profiles(&self, product: &Product) -> Vec<ComputeInstanceProfile> {
        product.compute_instances(self.profile)
    }

    /// By NVML's enum index. An index that nvml.h does not know is an invalid argument, one that does not exist in this
    /// GPU instance is not supported.
    pub(super) fn profile_by_index(
        &self,
        product: &Product,
        index: u32,
        engines: u32,
    ) -> Result<ComputeInstanceProfile, Code> {
        /// `NVML_COMPUTE_INSTANCE_PROFILE_COUNT` of the 535 driver's header.
        const COUNT: u32 = 8;
        if index >= COUNT || engines != ENGINES_SHARED {
            return Err(Code::INVALID_ARGUMENT);
        }
        self.profiles(product).into_iter().find(|profile| profile.nvml_index == index).ok_or(Code::NOT_SUPPORTED)
    }

    /// By hardware id.
    pub(super) fn profile_by_id(&self, product: &Product, id: u32) -> Result<ComputeInstanceProfile, Code> {
        self.profiles(product).into_iter().find(|profile| profile.id == id).ok_or(Code::INVALID_ARGUMENT)
    }

    /// Where a compute instance of this profile may lie, in compute slices of the GPU instance: end to end from the
    /// first. `nvidia-smi mig -lcipp` output is not published for all profiles; this agrees with their counts.
    pub(super) fn placements(&self, profile: &ComputeInstanceProfile) -> Vec<Placement> {
        let size = profile.compute_slices;
        (0..profile.max_instances).map(|n| Placement { start: n * size, size }).collect()
    }

    fn is_free(&self, placement: Placement) -> bool {
        !self.compute.values().any(|other| other.placement.overlaps(placement))
    }

    pub(super) fn remaining(&self, profile: &ComputeInstanceProfile) -> u32 {
        let free = |placement: &Placement| self.is_free(*placement);
        self.placements(profile).into_iter().filter(free).count() as u32
    }

    /// Creates a compute instance, at the first free placement unless one is asked for.
    pub(super) fn create(
        &mut self,
        gpu: &GpuSpec,
        profile_id: u32,
        wanted: Option<Placement>,
        serial: u16,
    ) -> Result<&ComputeInstance, Code> {
        let profile = self.profile_by_id(gpu.product, profile_id)?;
        let placements = self.placements(&profile);
        if wanted.is_some_and(|wanted| !placements.contains(&wanted)) {
            return Err(Code::INVALID_ARGUMENT);
        }
        let mut candidates = placements.into_iter().filter(|place| wanted.is_none_or(|wanted| wanted == *place));
        let placement = candidates.find(|place| self.is_free(*place)).ok_or(Code::INSUFFICIENT_RESOURCES)?;
        let id = (0..MAX_COMPUTE_INSTANCES).find(|id| !self.compute.contains_key(id));
        let id = id.ok_or(Code::INSUFFICIENT_RESOURCES)?;
        let uuid = match gpu.uuids {
            // Each compute slice has a graphics engine of its own; a compute instance is known by its first.
            Uuids::Deterministic => mig_uuid(&gpu.uuid, self.id, self.placement.start + placement.start),
            Uuids::Fresh => fresh_mig_uuid(),
        };
        Ok(self.compute.entry(id).or_insert(ComputeInstance {
            id,
            serial,
            profile,
            placement,
            uuid,
            compute_mode: NVML_COMPUTEMODE_DEFAULT,
        }))
    }

    /// What NVML tells of a compute-instance profile here.
    pub(super) fn profile_view(&self, profile: &ComputeInstanceProfile) -> view::CiProfile {
        view::CiProfile {
            id: profile.id,
            name: self.name(profile),
            slices: profile.compute_slices,
            max_instances: profile.max_instances,
            multiprocessors: profile.multiprocessors,
            shared: self.profile.profile.engines,
        }
    }

    /// The name of a MIG device: with a `Xc.` in front when it is not all of the GPU instance.
    pub(super) fn name(&self, profile: &ComputeInstanceProfile) -> String {
        let whole = &self.profile.profile;
        match profile.compute_slices {
            slices if slices == whole.compute_slices => whole.name.clone(),
            slices => format!("{slices}c.{}", whole.name),
        }
    }

    /// What NVML tells of a MIG device here.
    pub(super) fn attributes(&self, instance: &ComputeInstance) -> view::MigAttributes {
        let whole = &self.profile.profile;
        view::MigAttributes {
            gi: self.id,
            ci: instance.id,
            multiprocessors: instance.profile.multiprocessors,
            copy_engines: whole.engines.copy_engines,
            decoders: whole.engines.decoders,
            encoders: whole.engines.encoders,
            jpeg_engines: whole.engines.jpeg_engines,
            ofa_engines: whole.engines.ofa_engines,
            gi_slices: whole.compute_slices,
            ci_slices: instance.profile.compute_slices,
        }
    }
}
