//! One GPU.

use std::collections::BTreeMap;

use kerf_mig::product::{Architecture, GpuInstanceProfile, Mig};
use kerf_mig::{Geometry, Offer, Placement};
use nvml_wrapper_sys::bindings as sys;

use super::GpuSpec;
use super::Virtualization;
use super::ids::gpu_instance_id;
use super::instance::{ComputeInstance, GpuInstance};
use super::mode::Mode;
use crate::code::Code;
use crate::handle::{Handle, Parts, Target};
use crate::view;

/// `NVML_GPU_INSTANCE_PROFILE_COUNT` of the newest header: an enum index from here on is invalid.
const GI_PROFILE_COUNT: u32 = 0x12;

/// Capability bit of `nvmlGpuInstanceProfileInfo_v3_t`: graphics.
const CAPABILITY_GRAPHICS: u32 = 2;

/// A GPU and what is on it. Every method is one NVML call or one event.
///
/// Codes: a stale handle is `INVALID_ARGUMENT`, a call about instances while MIG is off is `NOT_SUPPORTED`.
#[derive(Debug)]
pub struct Gpu {
    spec: GpuSpec,
    generation: u16,
    geometry: Geometry,
    mode: Option<Mode>,
    broken: bool,
    compute_mode: u32,
    persistence: bool,
    timeslice: u32,
    instances: BTreeMap<u32, GpuInstance>,
    last_serial: u16,
}

/// What can be set about a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Whether no handle can be had.
    pub broken: bool,
    /// `nvmlComputeMode_t`.
    pub compute_mode: u32,
    /// Time slice, 0 to 3.
    pub timeslice: u32,
    /// MIG mode, current and pending; absent on a GPU without MIG.
    pub mig: Option<(bool, bool)>,
}

impl Gpu {
    /// A GPU just after the driver was loaded. `generation` tells one loading of the driver from the next.
    pub fn new(spec: GpuSpec, generation: u16) -> Gpu {
        let vgpu = spec.virtualization == Virtualization::Vgpu;
        let mode = spec.product.mig.as_ref().filter(|_| !vgpu).map(|mig| Mode::new(mig.mode, spec.mig));
        Gpu {
            generation,
            geometry: spec.product.geometry(),
            mode,
            broken: spec.broken,
            compute_mode: sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_DEFAULT,
            persistence: false,
            timeslice: 0,
            instances: BTreeMap::new(),
            last_serial: 0,
            spec,
        }
    }

    /// What is fixed about it.
    pub fn spec(&self) -> &GpuSpec {
        &self.spec
    }

    /// Its handle.
    pub fn handle(&self) -> Handle {
        self.name(Target::Gpu, 0)
    }

    /// What can be set about it.
    pub fn settings(&self) -> Settings {
        Settings {
            broken: self.broken,
            compute_mode: self.compute_mode,
            timeslice: self.timeslice,
            mig: self.mode.map(|mode| (mode.current, mode.pending)),
        }
    }

    /// What must be known before it is looked at.
    pub fn listed(&self) -> view::NodeGpu {
        view::NodeGpu {
            handle: self.handle(),
            minor: self.spec.minor,
            uuid: self.spec.uuid.clone(),
            pci: self.spec.pci.to_string(),
            broken: self.broken,
        }
    }

    /// A GPU or a MIG device.
    pub fn device(&self, handle: Handle) -> Result<view::Device, Code> {
        let product = self.spec.product;
        let mut device = view::Device {
            gpu: self.handle(),
            minor: self.spec.minor,
            name: product.name.clone(),
            uuid: self.spec.uuid.clone(),
            serial: self.spec.serial.clone(),
            brand: brand(&product.brand),
            architecture: architecture(product.architecture),
            compute_capability: (product.compute_capability.0 as i32, product.compute_capability.1 as i32),
            pci: self.spec.pci,
            pci_device_id: u32::from(product.pci_device_ids.first().copied().unwrap_or(0)) << 16 | 0x10de,
            numa_node: self.spec.numa_node,
            memory_mib: product.memory_mib,
            virtualization: match self.spec.virtualization {
                Virtualization::None => sys::nvmlGpuVirtualizationMode_NVML_GPU_VIRTUALIZATION_MODE_NONE,
                Virtualization::Passthrough => sys::nvmlGpuVirtualizationMode_NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH,
                Virtualization::Vgpu => sys::nvmlGpuVirtualizationMode_NVML_GPU_VIRTUALIZATION_MODE_VGPU,
            },
            mig: self.mode.map(|mode| (mode.current, mode.pending)),
            mig_switchable: self.mode.is_some_and(Mode::switchable),
            max_mig_devices: if self.mig().is_ok() { self.geometry.compute_slices() } else { 0 },
            compute_mode: self.compute_mode,
            persistence: self.persistence,
            timeslice: self.timeslice,
            mig_device: None,
        };
        match self.target(handle)? {
            Target::Gpu => {}
            Target::Mig { gi, ci } | Target::MigOfCi { gi, ci } => {
                let (gi, ci) = self.compute_instance(gi, ci)?;
                device.name = format!("{} MIG {}", device.name, gi.name(&ci.profile));
                device.uuid.clone_from(&ci.uuid);
                device.memory_mib = gi.profile.profile.memory_mib;
                device.mig_device = Some(gi.attributes(ci));
            }
            Target::Gi { .. } | Target::Ci { .. } => return Err(Code::INVALID_ARGUMENT),
        }
        Ok(device)
    }

    /// `nvmlDeviceSetMigMode`: the activation status, `Ok` when the mode is in force.
    pub fn set_mig_mode(&mut self, handle: Handle, on: bool) -> Result<Result<(), Code>, Code> {
        self.this(handle)?;
        let mode = self.mode.as_mut().ok_or(Code::NOT_SUPPORTED)?;
        Ok(mode.set(on, !self.instances.is_empty(), self.spec.virtualization))
    }

    /// `nvmlDeviceSetComputeMode`. Prohibited on the GPU itself while MIG is on; a MIG device keeps none of its own here.
    pub fn set_compute_mode(&mut self, handle: Handle, mode: u32) -> Result<(), Code> {
        self.this(handle)?;
        if mode > sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_PROCESS {
            return Err(Code::INVALID_ARGUMENT);
        }
        if self.mig().is_ok() {
            return Err(Code::NOT_SUPPORTED);
        }
        self.compute_mode = mode;
        Ok(())
    }

    /// `nvmlDeviceSetPersistenceMode`.
    pub fn set_persistence(&mut self, handle: Handle, on: bool) -> Result<(), Code> {
        self.this(handle)?;
        self.persistence = on;
        Ok(())
    }

    /// `nvidia-smi compute-policy --set-timeslice`: 0 default, 1 short, 2 medium, 3 long.
    pub fn set_timeslice(&mut self, handle: Handle, timeslice: u32) -> Result<(), Code> {
        self.this(handle)?;
        if timeslice > 3 {
            return Err(Code::INVALID_ARGUMENT);
        }
        self.timeslice = timeslice;
        Ok(())
    }

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

    /// The MIG device with this UUID.
    pub fn mig_by_uuid(&self, uuid: &str) -> Option<Handle> {
        self.pairs().find(|(_, ci)| ci.uuid == uuid).map(|(gi, ci)| self.mig_view(gi, ci).handle)
    }

    /// A reset of the GPU: the pending mode is in force, no instance is left.
    pub fn reset(&mut self) {
        self.instances.clear();
        if let Some(mode) = &mut self.mode {
            mode.reset();
        }
    }

    /// The driver is unloaded and loaded again: no handle is valid any more, no instance is left, settings of the driver
    /// are lost.
    pub fn reload(&mut self, generation: u16) {
        self.generation = generation;
        self.instances.clear();
        self.compute_mode = sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_DEFAULT;
        self.persistence = false;
        self.timeslice = 0;
        if let Some(mode) = &mut self.mode {
            mode.reload();
        }
    }

    /// From now on no handle can be had (`true`), or again (`false`).
    pub fn set_broken(&mut self, broken: bool) {
        self.broken = broken;
    }

    /// What the product can do in MIG mode, while MIG mode is on.
    fn mig(&self) -> Result<&'static Mig, Code> {
        let on = self.mode.is_some_and(|mode| mode.current);
        self.spec.product.mig.as_ref().filter(|_| on).ok_or(Code::NOT_SUPPORTED)
    }

    fn next_serial(&mut self) -> u16 {
        self.last_serial = self.last_serial.checked_add(1).unwrap_or(1);
        self.last_serial
    }

    fn name(&self, target: Target, serial: u16) -> Handle {
        Handle::new(Parts { generation: self.generation, serial, gpu: self.spec.place, target })
    }

    /// What a handle stands for, provided that it still does.
    fn target(&self, handle: Handle) -> Result<Target, Code> {
        let parts = handle.parts().ok_or(Code::INVALID_ARGUMENT)?;
        let serial = match parts.target {
            Target::Gpu => Some(0),
            Target::Gi { gi } => self.instances.get(&gi).map(|gi| gi.serial),
            Target::Mig { gi, ci } | Target::MigOfCi { gi, ci } | Target::Ci { gi, ci } => {
                self.compute_instance(gi, ci).ok().map(|(_, ci)| ci.serial)
            }
        };
        if parts.generation != self.generation || parts.gpu != self.spec.place || serial != Some(parts.serial) {
            return Err(Code::INVALID_ARGUMENT);
        }
        if self.broken { Err(Code::GPU_IS_LOST) } else { Ok(parts.target) }
    }

    /// That a handle stands for this GPU.
    fn this(&self, handle: Handle) -> Result<(), Code> {
        match self.target(handle)? {
            Target::Gpu => Ok(()),
            // The header promises no code for a MIG handle where a GPU's is needed; the driver gives this one.
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    fn gpu_instance(&self, handle: Handle) -> Result<&GpuInstance, Code> {
        match self.target(handle)? {
            Target::Gi { gi } => self.instances.get(&gi).ok_or(Code::INVALID_ARGUMENT),
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    fn compute_instance(&self, gi: u32, ci: u32) -> Result<(&GpuInstance, &ComputeInstance), Code> {
        let gi = self.instances.get(&gi).ok_or(Code::INVALID_ARGUMENT)?;
        Ok((gi, gi.compute.get(&ci).ok_or(Code::INVALID_ARGUMENT)?))
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

fn architecture(architecture: Architecture) -> u32 {
    match architecture {
        Architecture::Turing => sys::NVML_DEVICE_ARCH_TURING,
        Architecture::Ampere => sys::NVML_DEVICE_ARCH_AMPERE,
        Architecture::Ada => sys::NVML_DEVICE_ARCH_ADA,
        Architecture::Hopper => sys::NVML_DEVICE_ARCH_HOPPER,
        Architecture::Blackwell => sys::NVML_DEVICE_ARCH_BLACKWELL,
    }
}

fn brand(brand: &str) -> u32 {
    match brand {
        "Nvidia" => sys::nvmlBrandType_enum_NVML_BRAND_NVIDIA,
        "GeForce" => sys::nvmlBrandType_enum_NVML_BRAND_GEFORCE,
        _ => sys::nvmlBrandType_enum_NVML_BRAND_UNKNOWN,
    }
}
