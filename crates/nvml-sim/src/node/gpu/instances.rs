//! The calls about what a GPU is divided into.

use std::collections::BTreeMap;

use kerf_mig::product::{GpuInstanceProfile, Mig};
use kerf_mig::{Offer, Placement};

use super::Gpu;
use crate::code::Code;
use crate::handle::{Handle, Target};
use crate::node::clients::Place;
use crate::node::ids::gpu_instance_id;
use crate::node::instance::{ComputeInstance, GpuInstance};
use crate::view;

/// `NVML_GPU_INSTANCE_PROFILE_COUNT` of the newest header: an enum index from here on is invalid.
const GI_PROFILE_COUNT: u32 = 0x12;

/// Capability bit of `nvmlGpuInstanceProfileInfo_v3_t`: graphics.
const CAPABILITY_GRAPHICS: u32 = 2;

impl Gpu {
    /// `nvmlDeviceGetGpuInstanceProfileInfo` and its versioned successors.
    pub fn gi_profile(&self, handle: Handle, key: view::GiProfileKey) -> Result<view::GiProfile, Code> {
        self.this(handle)?;
        // Arguments are looked at before the GPU is: so callers that count up to here come to an end on every GPU.
        if let view::GiProfileKey::Index(GI_PROFILE_COUNT..) | view::GiProfileKey::IndexMigOn(GI_PROFILE_COUNT..) = key
        {
            return Err(Code::INVALID_ARGUMENT);
        }
        let (mig, mode) = (self.spec.product.mig.as_ref(), self.mode);
        let (Some(mig), Some(mode)) = (mig, mode) else { return Err(Code::NOT_SUPPORTED) };
        // NVML_FI_DEV_IS_MIG_MODE_INDEPENDENT_MIG_QUERY_CAPABLE: since Hopper the first version of the call tells profiles
        // with MIG off too (seen on H100 and B200 nodes). That Ampere refuses is inferred from the existence of that field;
        // the versioned calls need MIG on (nvml.h).
        let any_mode = matches!(key, view::GiProfileKey::Index(_)) && mode.switchable();
        if !mode.current && !any_mode {
            return Err(Code::NOT_SUPPORTED);
        }
        let found = match key {
            view::GiProfileKey::Index(index) | view::GiProfileKey::IndexMigOn(index) => {
                mig.profiles.iter().find(|profile| profile.nvml_index == index).ok_or(Code::NOT_SUPPORTED)?
            }
            view::GiProfileKey::IdMigOn(id) => profile_by_id(mig, id)?,
        };
        let graphics = found.profile.name.ends_with("+gfx");
        Ok(view::GiProfile {
            profile: found.profile.clone(),
            capabilities: if graphics { CAPABILITY_GRAPHICS } else { 0 },
        })
    }

    /// `nvmlDeviceGetGpuInstancePossiblePlacements`: all placements, not only free ones, whatever the mode.
    pub fn gi_placements(&self, handle: Handle, profile: u32) -> Result<Vec<Placement>, Code> {
        self.this(handle)?;
        let mig = self.spec.product.mig.as_ref().filter(|_| self.mode.is_some()).ok_or(Code::NOT_SUPPORTED)?;
        Ok(profile_by_id(mig, profile)?.profile.placements.clone())
    }

    /// `nvmlDeviceGetGpuInstanceRemainingCapacity`: how many more could be created one after the other.
    pub fn gi_capacity(&self, handle: Handle, profile: u32) -> Result<u32, Code> {
        self.this(handle)?;
        let profile = &profile_by_id(self.mig()?, profile)?.profile;
        let mut cuts: Vec<Offer<'_>> = self.instances.values().map(GpuInstance::offer).collect();
        let before = cuts.len();
        for &placement in &profile.placements {
            let offer = Offer { profile, placement };
            if self.geometry.fits(&cuts, offer) {
                cuts.push(offer);
            }
        }
        Ok((cuts.len() - before) as u32)
    }

    /// `nvmlDeviceCreateGpuInstance` and `...WithPlacement`. Without a placement, the last one that fits is taken: that is
    /// inferred from published dumps, and explains why an A100 has no room for a `3g` after `1g`, `1g` and `2g`.
    pub fn create_gi(&mut self, handle: Handle, profile: u32, wanted: Option<Placement>) -> Result<view::Gi, Code> {
        self.this(handle)?;
        let found = profile_by_id(self.mig()?, profile)?;
        if wanted.is_some_and(|wanted| !found.profile.placements.contains(&wanted)) {
            return Err(Code::INVALID_ARGUMENT);
        }
        let cuts: Vec<Offer<'_>> = self.instances.values().map(GpuInstance::offer).collect();
        let places = found.profile.placements.iter().rev().copied();
        let placement = places
            .filter(|place| wanted.is_none_or(|wanted| wanted == *place))
            .find(|place| self.geometry.fits(&cuts, Offer { profile: &found.profile, placement: *place }))
            .ok_or(Code::INSUFFICIENT_RESOURCES)?;
        let slices = self.geometry.memory_slices();
        let id = gpu_instance_id(placement, slices, self.spec.product.architecture);
        let serial = self.next_serial();
        let instance = GpuInstance { id, serial, profile: found, placement, compute: BTreeMap::new() };
        let created = self.gi_view(&instance);
        self.instances.insert(id, instance);
        Ok(created)
    }

    /// `nvmlDeviceGetGpuInstances`: those of one profile.
    pub fn gis(&self, handle: Handle, profile: u32) -> Result<Vec<view::Gi>, Code> {
        self.this(handle)?;
        profile_by_id(self.mig()?, profile)?;
        let of_profile = self.instances.values().filter(|gi| gi.profile.profile.id == profile);
        Ok(of_profile.map(|gi| self.gi_view(gi)).collect())
    }

    /// Every GPU instance, by id.
    pub fn all_gis(&self) -> Vec<view::Gi> {
        self.instances.values().map(|gi| self.gi_view(gi)).collect()
    }

    /// `nvmlDeviceGetGpuInstanceById`.
    pub fn gi_by_id(&self, handle: Handle, id: u32) -> Result<view::Gi, Code> {
        self.this(handle)?;
        self.mig()?;
        self.instances.get(&id).map(|gi| self.gi_view(gi)).ok_or(Code::NOT_FOUND)
    }

    /// `nvmlGpuInstanceGetInfo`.
    pub fn gi(&self, handle: Handle) -> Result<view::Gi, Code> {
        Ok(self.gi_view(self.gpu_instance(handle)?))
    }

    /// `nvmlGpuInstanceDestroy`.
    pub fn destroy_gi(&mut self, handle: Handle) -> Result<view::Gi, Code> {
        let instance = self.gpu_instance(handle)?;
        if !instance.compute.is_empty() {
            return Err(Code::IN_USE);
        }
        let (id, destroyed) = (instance.id, self.gi_view(instance));
        self.clients.free(Place::Gi(id))?;
        self.instances.remove(&id);
        Ok(destroyed)
    }

    /// `nvmlGpuInstanceGetComputeInstanceProfileInfo` and its versioned successor.
    pub fn ci_profile(&self, gi: Handle, index: u32, engines: u32) -> Result<view::CiProfile, Code> {
        let gi = self.gpu_instance(gi)?;
        Ok(gi.profile_view(&gi.profile_by_index(self.spec.product, index, engines)?))
    }

    /// `nvmlGpuInstanceGetComputeInstancePossiblePlacements`.
    pub fn ci_placements(&self, gi: Handle, profile: u32) -> Result<Vec<Placement>, Code> {
        let gi = self.gpu_instance(gi)?;
        Ok(gi.placements(&gi.profile_by_id(self.spec.product, profile)?))
    }

    /// `nvmlGpuInstanceGetComputeInstanceRemainingCapacity`.
    pub fn ci_capacity(&self, gi: Handle, profile: u32) -> Result<u32, Code> {
        let gi = self.gpu_instance(gi)?;
        Ok(gi.remaining(&gi.profile_by_id(self.spec.product, profile)?))
    }

    /// Hardware id of the compute-instance profile that is all of a GPU instance.
    pub fn whole_ci_profile(&self, gi: Handle) -> Result<u32, Code> {
        let profiles = self.gpu_instance(gi)?.profiles(self.spec.product);
        profiles
            .iter()
            .max_by_key(|profile| profile.compute_slices)
            .map(|profile| profile.id)
            .ok_or(Code::NOT_SUPPORTED)
    }

    /// `nvmlGpuInstanceCreateComputeInstance` and `...WithPlacement`.
    pub fn create_ci(&mut self, gi: Handle, profile: u32, wanted: Option<Placement>) -> Result<view::Ci, Code> {
        let gi = self.gpu_instance(gi)?.id;
        let serial = self.next_serial();
        let instance = self.instances.get_mut(&gi).ok_or(Code::INVALID_ARGUMENT)?;
        let ci = instance.create(&self.spec, profile, wanted, serial)?.id;
        let (gi, ci) = self.compute_instance(gi, ci)?;
        Ok(self.ci_view(gi, ci))
    }

    /// `nvmlGpuInstanceGetComputeInstances`: those of one profile.
    pub fn cis(&self, gi: Handle, profile: u32) -> Result<Vec<view::Ci>, Code> {
        let gi = self.gpu_instance(gi)?;
        gi.profile_by_id(self.spec.product, profile)?;
        let of_profile = gi.compute.values().filter(|ci| ci.profile.id == profile);
        Ok(of_profile.map(|ci| self.ci_view(gi, ci)).collect())
    }

    /// Every compute instance of the GPU with its UUID, in the order of the MIG device index: by GPU instance id, then by
    /// compute instance id.
    pub fn all_cis(&self) -> Vec<(view::Ci, String)> {
        self.pairs().map(|(gi, ci)| (self.ci_view(gi, ci), ci.uuid.clone())).collect()
    }

    /// `nvmlGpuInstanceGetComputeInstanceById`.
    pub fn ci_by_id(&self, gi: Handle, id: u32) -> Result<view::Ci, Code> {
        let gi = self.gpu_instance(gi)?;
        gi.compute.get(&id).map(|ci| self.ci_view(gi, ci)).ok_or(Code::NOT_FOUND)
    }

    /// `nvmlComputeInstanceGetInfo`.
    pub fn ci(&self, handle: Handle) -> Result<view::Ci, Code> {
        let Target::Ci { gi, ci } = self.target(handle)? else { return Err(Code::INVALID_ARGUMENT) };
        let (gi, ci) = self.compute_instance(gi, ci)?;
        Ok(self.ci_view(gi, ci))
    }

    /// `nvmlComputeInstanceDestroy`.
    pub fn destroy_ci(&mut self, handle: Handle) -> Result<view::Ci, Code> {
        let destroyed = self.ci(handle)?;
        self.clients.free(Place::Ci(destroyed.gi, destroyed.id))?;
        if let Target::Ci { gi, ci } = self.target(handle)?
            && let Some(instance) = self.instances.get_mut(&gi)
        {
            instance.compute.remove(&ci);
        }
        Ok(destroyed)
    }

    /// The MIG devices, in the order of their indexes.
    pub fn mig_devices(&self, handle: Handle) -> Result<Vec<view::MigDevice>, Code> {
        self.this(handle)?;
        self.mig()?;
        Ok(self.pairs().map(|(gi, ci)| self.mig_view(gi, ci)).collect())
    }

    /// The MIG device with this UUID, or with this name of drivers before R470: `MIG-<GPU UUID>/<GI>/<CI>`.
    pub fn mig_by_uuid(&self, uuid: &str) -> Option<Handle> {
        let old = |gi: &GpuInstance, ci: &ComputeInstance| format!("MIG-{}/{}/{}", self.spec.uuid, gi.id, ci.id);
        let found = self.pairs().find(|(gi, ci)| ci.uuid == uuid || old(gi, ci) == uuid);
        found.map(|(gi, ci)| self.mig_view(gi, ci).handle)
    }

    fn gpu_instance(&self, handle: Handle) -> Result<&GpuInstance, Code> {
        match self.target(handle)? {
            Target::Gi { gi } => self.instances.get(&gi).ok_or(Code::INVALID_ARGUMENT),
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    /// Every compute instance with its GPU instance, by ids.
    fn pairs(&self) -> impl Iterator<Item = (&GpuInstance, &ComputeInstance)> {
        self.instances.values().flat_map(|gi| gi.compute.values().map(move |ci| (gi, ci)))
    }

    fn mig_view(&self, gi: &GpuInstance, ci: &ComputeInstance) -> view::MigDevice {
        view::MigDevice { handle: self.name(Target::Mig { gi: gi.id, ci: ci.id }, ci.serial), gi: gi.id, ci: ci.id }
    }

    fn gi_view(&self, gi: &GpuInstance) -> view::Gi {
        view::Gi {
            handle: self.name(Target::Gi { gi: gi.id }, gi.serial),
            gpu: self.handle(),
            id: gi.id,
            profile: gi.profile.profile.id,
            placement: gi.placement,
        }
    }

    fn ci_view(&self, gi: &GpuInstance, ci: &ComputeInstance) -> view::Ci {
        view::Ci {
            handle: self.name(Target::Ci { gi: gi.id, ci: ci.id }, ci.serial),
            device: self.name(Target::MigOfCi { gi: gi.id, ci: ci.id }, ci.serial),
            gpu: self.handle(),
            gpu_instance: self.name(Target::Gi { gi: gi.id }, gi.serial),
            gi: gi.id,
            id: ci.id,
            profile: ci.profile.id,
            placement: ci.placement,
        }
    }
}

/// By hardware id; one that the product does not have is an invalid argument.
fn profile_by_id(mig: &'static Mig, id: u32) -> Result<&'static GpuInstanceProfile, Code> {
    mig.profiles.iter().find(|profile| profile.profile.id == id).ok_or(Code::INVALID_ARGUMENT)
}
