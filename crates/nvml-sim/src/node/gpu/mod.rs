//! One GPU: what it is, its settings, and what happens to it as a whole.

mod instances;
mod users;

use std::collections::BTreeMap;

use kerf_mig::Geometry;
use kerf_mig::product::{Architecture, Mig};
use nvml_wrapper_sys::bindings as sys;

use super::clients::{Clients, Place};
use super::instance::{ComputeInstance, GpuInstance};
use super::mode::Mode;
use super::{GpuSpec, Virtualization};
use crate::code::Code;
use crate::handle::{Handle, Parts, Target};
use crate::view;

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
    lost: bool,
    clients: Clients,
    compute_mode: u32,
    persistence: bool,
    timeslice: u32,
    instances: BTreeMap<u32, GpuInstance>,
    last_serial: u16,
}

/// What can be set about a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Whether no handle can be had, for whatever reason.
    pub broken: bool,
    /// Whether that is because it fell off the bus.
    pub lost: bool,
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
            lost: false,
            clients: Clients::default(),
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
            broken: self.unreachable(),
            lost: self.lost,
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
            broken: self.unreachable(),
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
            pcie_root: self.spec.pcie_root.clone(),
            pci_device_id: u32::from(product.pci_device_ids.first().copied().unwrap_or(0)) << 16 | 0x10de,
            numa_node: self.spec.numa_node,
            memory_mib: product.memory_mib,
            memory_used: 0,
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
        let target = self.target(handle)?;
        device.memory_used = self.memory_used(target);
        match target {
            Target::Gpu => {}
            Target::Mig { gi, ci } | Target::MigOfCi { gi, ci } => {
                let (gi, ci) = self.compute_instance(gi, ci)?;
                device.name = format!("{} MIG {}", device.name, gi.name(&ci.profile));
                device.uuid.clone_from(&ci.uuid);
                device.memory_mib = gi.profile.profile.memory_mib;
                device.compute_mode = ci.compute_mode;
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
        let clients = !mode.is(on) && self.clients.free(Place::Gpu).is_err();
        Ok(mode.set(on, !self.instances.is_empty(), clients, self.spec.virtualization))
    }

    /// `nvmlDeviceSetMigMode` as it goes when the driver ends it with this activation status.
    pub fn refuse_mig_mode(&mut self, handle: Handle, on: bool, status: Code) -> Result<(), Code> {
        self.this(handle)?;
        self.mode.as_mut().ok_or(Code::NOT_SUPPORTED)?.refuse(on, status);
        Ok(())
    }

    /// `nvmlDeviceSetComputeMode`. While MIG is on, each MIG device has a mode of its own and the GPU none.
    pub fn set_compute_mode(&mut self, handle: Handle, mode: u32) -> Result<(), Code> {
        let target = self.target(handle)?;
        if mode > sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_PROCESS {
            return Err(Code::INVALID_ARGUMENT);
        }
        match target {
            Target::Gpu if self.mig().is_ok() => return Err(Code::NOT_SUPPORTED),
            Target::Gpu => self.compute_mode = mode,
            Target::Mig { gi, ci } | Target::MigOfCi { gi, ci } => {
                let instance = self.instances.get_mut(&gi).and_then(|gi| gi.compute.get_mut(&ci));
                instance.ok_or(Code::INVALID_ARGUMENT)?.compute_mode = mode;
            }
            Target::Gi { .. } | Target::Ci { .. } => return Err(Code::INVALID_ARGUMENT),
        }
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

    /// A reset of the GPU: the pending mode is in force, no instance is left. The driver resets no GPU that is in use.
    pub fn reset(&mut self) -> Result<(), Code> {
        if self.unreachable() {
            return Err(Code::GPU_IS_LOST);
        }
        self.clients.free(Place::Gpu)?;
        self.begin_anew();
        Ok(())
    }

    /// The GPU falls off the bus.
    pub fn lose(&mut self) {
        self.lost = true;
    }

    /// It is brought back without a reboot: as after a reset. Whether a mode that lives in the driver only would survive
    /// that is not published; here it does.
    pub fn recover(&mut self) {
        self.lost = false;
        self.begin_anew();
    }

    /// The node is booted: the driver is loaded, onto a GPU that is back on the bus.
    pub fn reboot(&mut self, generation: u16) {
        self.lost = false;
        self.reload(generation);
    }

    fn begin_anew(&mut self) {
        self.instances.clear();
        self.clients.end_all();
        if let Some(mode) = &mut self.mode {
            mode.reset();
        }
    }

    fn unreachable(&self) -> bool {
        self.broken || self.lost
    }

    /// The driver is unloaded and loaded again: no handle is valid any more, no instance is left, settings of the driver
    /// are lost. Nobody uses the GPU: a driver in use is not unloaded.
    pub fn reload(&mut self, generation: u16) {
        self.generation = generation;
        self.instances.clear();
        self.clients.end_all();
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

    /// Whether a handle still stands for something, be it out of reach.
    pub fn holds(&self, handle: Handle) -> bool {
        self.known(handle).is_ok()
    }

    /// What a handle stands for, provided that it still does and can be reached.
    fn target(&self, handle: Handle) -> Result<Target, Code> {
        let target = self.known(handle)?;
        if self.unreachable() { Err(Code::GPU_IS_LOST) } else { Ok(target) }
    }

    fn known(&self, handle: Handle) -> Result<Target, Code> {
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
        Ok(parts.target)
    }

    /// That a handle stands for this GPU.
    fn this(&self, handle: Handle) -> Result<(), Code> {
        match self.target(handle)? {
            Target::Gpu => Ok(()),
            // The header promises no code for a MIG handle where a GPU's is needed; the driver gives this one.
            _ => Err(Code::INVALID_ARGUMENT),
        }
    }

    fn compute_instance(&self, gi: u32, ci: u32) -> Result<(&GpuInstance, &ComputeInstance), Code> {
        let gi = self.instances.get(&gi).ok_or(Code::INVALID_ARGUMENT)?;
        Ok((gi, gi.compute.get(&ci).ok_or(Code::INVALID_ARGUMENT)?))
    }
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
