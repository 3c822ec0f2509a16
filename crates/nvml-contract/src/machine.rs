//! A machine for tests: honest, or lying in exactly one way.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use kerf_mig::product::Product;
use kerf_mig::{Geometry, Offer, Placement, Profile};
use kerf_nvml::{
    Code, ComputeInstance, CudaVersion, Error, Gpu, GpuFacts, GpuInstance, MigMode, MigModes, Nvml, PciAddress, Process,
};

use crate::kernel::{Capability, DeviceFile, Kernel};
use crate::reading::Answer;

macro_rules! lies {
    ($($lie:ident => $assertion:literal)*) => {
        /// How it lies.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Lie { $($lie),* }

        impl Lie {
            pub(crate) const ALL: &[Lie] = &[$(Lie::$lie),*];

            /// The assertion that must catch it.
            pub(crate) fn caught_by(self) -> &'static str {
                match self { $(Lie::$lie => $assertion),* }
            }
        }
    };
}

lies! {
    NoDriverVersion => "node.driver-version"
    CudaVersionZero => "node.cuda-version"
    BrokenGpuIsNoIndex => "node.handles"
    TwinUuids => "node.identities"
    NowhereIsInvalid => "node.unknown-address"
    NewHandleEachTime => "gpu.handle"
    NeighbourAtAddress => "gpu.address"
    UnknownToSysfs => "gpu.sysfs"
    NoName => "gpu.facts"
    FactsChange => "gpu.facts-stable"
    WrongGpuNode => "gpu.device-node"
    ProcessesFail => "gpu.processes"
    ProcessWithoutInstance => "gpu.processes"
    InstancesWithMigOff => "mig.modes"
    NoProfilesWithMigOff => "mig.profiles"
    ProfilesChange => "mig.profiles-stable"
    TwinProfiles => "mig.profile-ids"
    OddName => "mig.profile-names"
    UnevenPlacements => "mig.placements"
    NoWholePlacement => "mig.placements"
    TooManyAtOnce => "mig.max-instances"
    UnknownProfileLives => "mig.instances"
    InstancesFlicker => "mig.instances"
    LiveOverlap => "mig.instances-apart"
    TwinMigUuids => "carve.uuids"
    NoComputeList => "mig.compute-instances"
    NoAccessFiles => "carve.capability-files"
    WrongTable => "mig.capability-files"
    WrongCapabilityNodes => "carve.capability-nodes"
    UnknownInstanceIsInvalid => "mig.unknown-instance"
    SwitchIsIgnored => "carve.mig-on"
    CreatedElsewhere => "carve.created"
    CreateFails => "carve.created"
    CreatedUnlisted => "carve.listed"
    OverlapIsInvalid => "carve.overlap"
    OverlapAllowed => "carve.overlap"
    RefusedYetThere => "carve.refusal-changes-nothing"
    OddMigUuid => "carve.compute-instance"
    InUseIsIgnored => "carve.in-use"
    InUseIsInvalid => "carve.in-use"
    DestroyDoesNothing => "carve.destroyed"
    GoneIsInvalid => "carve.gone"
    StaleFiles => "carve.files-gone"
    OneFewer => "carve.max-instances"
    OneMore => "carve.one-more"
    MigOffWithInstances => "carve.mig-held"
    MigStaysOn => "carve.mig-off"
    ModeNotRestored => "carve.as-found"
}

/// The GPU that is carved: an H100, idle, MIG off.
pub(crate) const IDLE: &str = "0000:3b:00.0";
/// An H100 in MIG mode with two instances and a process.
pub(crate) const BUSY: &str = "0000:53:00.0";
/// An L40S.
pub(crate) const WITHOUT_MIG: &str = "0000:5f:00.0";

pub(crate) struct Machine {
    lie: Option<Lie>,
    gpus: Mutex<Vec<MachineGpu>>,
    asked: AtomicUsize,
}

struct MachineGpu {
    product: &'static Product,
    address: PciAddress,
    broken: bool,
    on: bool,
    switchable: bool,
    instances: BTreeMap<u32, Instance>,
    processes: Vec<Process>,
    /// Instances that were there once.
    ever: Vec<(u32, Option<u32>)>,
}

struct Instance {
    instance: GpuInstance,
    compute: Option<ComputeInstance>,
}

fn gpu(key: &str, address: &str) -> MachineGpu {
    MachineGpu {
        product: Product::by_key(key).unwrap(),
        address: address.parse().unwrap(),
        broken: false,
        on: false,
        switchable: true,
        instances: BTreeMap::new(),
        processes: Vec::new(),
        ever: Vec::new(),
    }
}

fn refuse<T>(call: &'static str, code: Code) -> Answer<T> {
    Err(Error { call, code })
}

impl MachineGpu {
    fn profiles(&self) -> Vec<Profile> {
        self.product.mig.iter().flat_map(|mig| &mig.profiles).map(|known| known.profile.clone()).collect()
    }

    fn put(&mut self, profile_id: u32, placement: Placement) -> GpuInstance {
        let id = (1..).find(|id| !self.instances.contains_key(id)).unwrap();
        let instance = GpuInstance { id, profile_id, placement };
        self.instances.insert(id, Instance { instance, compute: None });
        self.ever.push((id, None));
        instance
    }

    fn put_compute(&mut self, gpu_instance: u32) -> ComputeInstance {
        let address = self.address;
        let compute = ComputeInstance { id: 0, uuid: format!("MIG-{address}-{gpu_instance}") };
        self.instances.get_mut(&gpu_instance).unwrap().compute = Some(compute.clone());
        self.ever.push((gpu_instance, Some(0)));
        compute
    }
}

impl Machine {
    pub(crate) fn new(lie: Option<Lie>) -> Machine {
        let mut broken = gpu("h100-80gb", "0000:47:00.0");
        broken.broken = true;
        let mut busy = gpu("h100-80gb", BUSY);
        busy.on = true;
        for (profile, placement) in [(19, Placement { start: 0, size: 1 }), (9, Placement { start: 4, size: 4 })] {
            let id = busy.put(profile, placement).id;
            busy.put_compute(id);
        }
        busy.processes = vec![Process { pid: 4711, gpu_instance: Some(1) }];
        let gpus = vec![gpu("h100-80gb", IDLE), broken, busy, gpu("l40s", WITHOUT_MIG)];
        Machine { lie, gpus: Mutex::new(gpus), asked: AtomicUsize::new(0) }
    }

    /// As it is for the idle GPU: whether MIG is on, and what lives there.
    pub(crate) fn idle(&self) -> (bool, Vec<GpuInstance>) {
        let gpus = self.gpus();
        (gpus[0].on, gpus[0].instances.values().map(|live| live.instance).collect())
    }

    /// Something happens to the idle GPU that is no call: MIG mode, whether it switches, an instance, a process.
    pub(crate) fn idle_is(&self, on: bool, switchable: bool, occupied: bool, busy: bool) {
        let mut gpus = self.gpus();
        (gpus[0].on, gpus[0].switchable) = (on, switchable);
        if occupied {
            gpus[0].put(19, Placement { start: 3, size: 1 });
        }
        if busy {
            gpus[0].processes.push(Process { pid: 1, gpu_instance: None });
        }
    }

    fn lies(&self, lie: Lie) -> bool {
        self.lie == Some(lie)
    }

    /// Differs from call to call.
    fn number(&self) -> usize {
        self.asked.fetch_add(1, Ordering::Relaxed)
    }

    fn gpus(&self) -> MutexGuard<'_, Vec<MachineGpu>> {
        self.gpus.lock().unwrap()
    }

    fn with<T>(&self, gpu: Gpu, call: &'static str, answer: impl FnOnce(&mut MachineGpu) -> Answer<T>) -> Answer<T> {
        let mut gpus = self.gpus();
        let gpu = gpus.get_mut(gpu.key() % 100).filter(|gpu| !gpu.broken);
        gpu.map_or_else(|| refuse(call, Code::InvalidArgument), answer)
    }

    fn gone(&self) -> Code {
        if self.lies(Lie::GoneIsInvalid) { Code::InvalidArgument } else { Code::NotFound }
    }
}

impl Nvml for Machine {
    fn driver_version(&self) -> Answer<String> {
        Ok(if self.lies(Lie::NoDriverVersion) { "unknown" } else { "535.261.03" }.to_owned())
    }

    fn cuda_driver_version(&self) -> Answer<CudaVersion> {
        Ok(CudaVersion { major: if self.lies(Lie::CudaVersionZero) { 0 } else { 12 }, minor: 2 })
    }

    fn gpu_count(&self) -> Answer<u32> {
        Ok(self.gpus().len().try_into().unwrap())
    }

    fn gpu(&self, index: u32) -> Answer<Gpu> {
        let broken = if self.lies(Lie::BrokenGpuIsNoIndex) { Code::InvalidArgument } else { Code::GpuIsLost };
        match self.gpus().get(index as usize) {
            None => refuse("nvmlDeviceGetHandleByIndex_v2", Code::InvalidArgument),
            Some(gpu) if gpu.broken => refuse("nvmlDeviceGetHandleByIndex_v2", broken),
            Some(_) if self.lies(Lie::NewHandleEachTime) => Ok(Gpu::from_key(index as usize + 100 * self.number())),
            Some(_) => Ok(Gpu::from_key(index as usize)),
        }
    }

    fn gpu_at(&self, address: PciAddress) -> Answer<Gpu> {
        let nowhere = if self.lies(Lie::NowhereIsInvalid) { Code::InvalidArgument } else { Code::NotFound };
        let place = self.gpus().iter().position(|gpu| gpu.address == address);
        let place = place.map(|place| if place == 3 && self.lies(Lie::NeighbourAtAddress) { 2 } else { place });
        place.map(Gpu::from_key).map_or_else(|| refuse("nvmlDeviceGetHandleByPciBusId_v2", nowhere), Ok)
    }

    fn pci_address(&self, gpu: Gpu) -> Answer<PciAddress> {
        self.with(gpu, "nvmlDeviceGetPciInfo_v3", |gpu| Ok(gpu.address))
    }

    fn facts(&self, gpu: Gpu) -> Answer<GpuFacts> {
        let minor = (gpu.key() % 100).try_into().unwrap();
        self.with(gpu, "nvmlDeviceGetUUID", |gpu| {
            Ok(GpuFacts {
                uuid: if self.lies(Lie::TwinUuids) { "GPU-1".to_owned() } else { format!("GPU-{}", gpu.address) },
                minor,
                name: if self.lies(Lie::NoName) { String::new() } else { gpu.product.name.clone() },
                brand: gpu.product.brand.clone(),
                architecture: format!("{:?}", gpu.product.architecture),
                compute_capability: gpu.product.compute_capability,
                memory_bytes: Some(match self.lie {
                    Some(Lie::FactsChange) => self.number() as u64 + 1,
                    _ => gpu.product.memory_mib << 20,
                }),
                mig_mode_switchable: gpu.product.mig.is_some() && gpu.switchable,
            })
        })
    }

    fn mig_modes(&self, gpu: Gpu) -> Answer<Option<MigModes>> {
        self.with(gpu, "nvmlDeviceGetMigMode", |gpu| {
            let mode = if gpu.on { MigMode::Enabled } else { MigMode::Disabled };
            Ok(gpu.product.mig.as_ref().map(|_| MigModes { current: mode, pending: mode }))
        })
    }

    fn set_mig_mode(&self, gpu: Gpu, mode: MigMode) -> Answer<()> {
        self.with(gpu, "nvmlDeviceSetMigMode", |gpu| {
            let off = mode == MigMode::Disabled;
            if off && !gpu.instances.is_empty() {
                if !self.lies(Lie::MigOffWithInstances) {
                    return refuse("nvmlDeviceSetMigMode", Code::InUse);
                }
                gpu.instances.clear();
            }
            if off && self.lies(Lie::ModeNotRestored) {
                return refuse("nvmlDeviceSetMigMode", Code::Unknown);
            }
            let ignored = if off { self.lies(Lie::MigStaysOn) } else { self.lies(Lie::SwitchIsIgnored) };
            if !ignored {
                gpu.on = !off;
            }
            Ok(())
        })
    }

    fn gpu_instance_profiles(&self, gpu: Gpu) -> Answer<Vec<Profile>> {
        self.with(gpu, "nvmlDeviceGetGpuInstanceProfileInfo", |gpu| {
            let mut profiles = gpu.profiles();
            if !gpu.on && self.lies(Lie::NoProfilesWithMigOff) {
                profiles.clear();
            }
            let Some(first) = profiles.first_mut() else { return Ok(profiles) };
            match self.lie {
                Some(Lie::ProfilesChange) => first.memory_mib = self.number() as u64 + 1,
                Some(Lie::OddName) => "MIG 1g.10gb".clone_into(&mut first.name),
                Some(Lie::UnevenPlacements) => first.placements[1].size = 2,
                Some(Lie::TooManyAtOnce) => first.max_instances = 8,
                Some(Lie::NoWholePlacement) => profiles.retain(|profile| profile.id != 0),
                Some(Lie::TwinProfiles) => {
                    let twin = first.clone();
                    profiles.push(twin);
                }
                _ => {}
            }
            Ok(profiles)
        })
    }

    fn gpu_instances(&self, gpu: Gpu) -> Answer<Vec<GpuInstance>> {
        let busy = gpu.key() % 100 == 2;
        self.with(gpu, "nvmlDeviceGetGpuInstances", |gpu| {
            if !gpu.on && self.lies(Lie::InstancesWithMigOff) && gpu.product.mig.is_some() {
                let placement = Placement { start: 0, size: 1 };
                return Ok(vec![GpuInstance { id: 1, profile_id: 19, placement }]);
            }
            let mut listed: Vec<GpuInstance> = gpu.instances.values().map(|live| live.instance).collect();
            match self.lie {
                Some(Lie::UnknownProfileLives) if busy => listed[0].profile_id = 99,
                Some(Lie::LiveOverlap) if busy => listed[0].placement = Placement { start: 4, size: 1 },
                Some(Lie::InstancesFlicker) if busy && self.number().is_multiple_of(2) => listed.truncate(1),
                Some(Lie::CreatedUnlisted) if !busy && listed.len() == 1 => listed.clear(),
                _ => {}
            }
            Ok(listed)
        })
    }

    fn create_gpu_instance(&self, gpu: Gpu, profile_id: u32, placement: Placement) -> Answer<GpuInstance> {
        let call = "nvmlDeviceCreateGpuInstanceWithPlacement";
        self.with(gpu, call, |gpu| {
            if !gpu.on {
                return refuse(call, Code::NotSupported);
            }
            let profiles = gpu.profiles();
            let of = |id: u32| profiles.iter().find(|profile| profile.id == id);
            let Some(profile) = of(profile_id).filter(|profile| profile.placements.contains(&placement)) else {
                return refuse(call, Code::InvalidArgument);
            };
            let offer = |profile, placement| Offer { profile, placement };
            let taken: Vec<Offer<'_>> = gpu
                .instances
                .values()
                .map(|live| offer(of(live.instance.profile_id).unwrap(), live.instance.placement))
                .collect();
            let overlaps = taken.iter().any(|other| other.placement.overlaps(placement));
            let count = taken.iter().filter(|other| other.profile.id == profile_id).count();
            let fits = Geometry::new(profiles.clone()).fits(&taken, offer(profile, placement));
            let allowed = match self.lie {
                Some(Lie::OverlapAllowed) => fits || overlaps,
                Some(Lie::OneMore) => fits || !overlaps,
                Some(Lie::OneFewer) => fits && count + 1 < profile.max_instances.max(2) as usize,
                Some(Lie::CreateFails) => false,
                _ => fits,
            };
            match self.lie {
                Some(Lie::CreatedElsewhere) if allowed && placement.size == 1 => {
                    Ok(gpu.put(profile_id, Placement { start: 6 - placement.start, size: 1 }))
                }
                Some(Lie::RefusedYetThere) if overlaps => {
                    gpu.put(profile_id, placement);
                    refuse(call, Code::InsufficientResources)
                }
                Some(Lie::OverlapIsInvalid) if overlaps => refuse(call, Code::InvalidArgument),
                _ if allowed => Ok(gpu.put(profile_id, placement)),
                _ => refuse(call, Code::InsufficientResources),
            }
        })
    }

    fn destroy_gpu_instance(&self, gpu: Gpu, gpu_instance: u32) -> Answer<()> {
        let call = "nvmlGpuInstanceDestroy";
        self.with(gpu, call, |gpu| match gpu.instances.get(&gpu_instance) {
            None => refuse(call, self.gone()),
            Some(Instance { compute: Some(_), .. }) if !self.lies(Lie::InUseIsIgnored) => {
                refuse(call, if self.lies(Lie::InUseIsInvalid) { Code::InvalidArgument } else { Code::InUse })
            }
            Some(_) if self.lies(Lie::DestroyDoesNothing) => Ok(()),
            Some(_) => {
                gpu.instances.remove(&gpu_instance);
                Ok(())
            }
        })
    }

    fn compute_instances(&self, gpu: Gpu, gpu_instance: u32) -> Answer<Vec<ComputeInstance>> {
        let call = "nvmlGpuInstanceGetComputeInstances";
        self.with(gpu, call, |gpu| match gpu.instances.get(&gpu_instance) {
            Some(_) if self.lies(Lie::NoComputeList) => refuse(call, Code::Unknown),
            Some(live) => Ok(live.compute.iter().cloned().collect()),
            None if self.lies(Lie::UnknownInstanceIsInvalid) => refuse(call, Code::InvalidArgument),
            None if !gpu.on => refuse(call, Code::NotSupported),
            None => refuse(call, self.gone()),
        })
    }

    fn create_compute_instance(&self, gpu: Gpu, gpu_instance: u32, compute_slices: u32) -> Answer<ComputeInstance> {
        let call = "nvmlGpuInstanceCreateComputeInstance";
        self.with(gpu, call, |gpu| {
            let Some(live) = gpu.instances.get(&gpu_instance) else { return refuse(call, self.gone()) };
            let profile = gpu.profiles().into_iter().find(|profile| profile.id == live.instance.profile_id).unwrap();
            if live.compute.is_some() || profile.compute_slices != compute_slices {
                return refuse(call, Code::InsufficientResources);
            }
            let mut compute = gpu.put_compute(gpu_instance);
            match self.lie {
                Some(Lie::OddMigUuid) => compute.uuid = "GPU-1".to_owned(),
                Some(Lie::TwinMigUuids) => compute.uuid = "MIG-1".to_owned(),
                _ => {}
            }
            Ok(compute)
        })
    }

    fn destroy_compute_instance(&self, gpu: Gpu, gpu_instance: u32, compute_instance: u32) -> Answer<()> {
        let call = "nvmlComputeInstanceDestroy";
        self.with(gpu, call, |gpu| {
            let compute = gpu.instances.get_mut(&gpu_instance).and_then(|live| live.compute.take());
            match compute {
                Some(compute) if compute.id == compute_instance => Ok(()),
                _ => refuse(call, self.gone()),
            }
        })
    }

    fn processes(&self, gpu: Gpu) -> Answer<Vec<Process>> {
        if self.lies(Lie::ProcessesFail) {
            return refuse("nvmlDeviceGetComputeRunningProcesses_v3", Code::Unknown);
        }
        self.with(gpu, "nvmlDeviceGetComputeRunningProcesses_v3", |gpu| {
            let mut processes = gpu.processes.clone();
            if self.lies(Lie::ProcessWithoutInstance) {
                processes.iter_mut().for_each(|process| process.gpu_instance = None);
            }
            Ok(processes)
        })
    }
}

impl Kernel for Machine {
    fn gpu_node(&self, minor: u32) -> DeviceFile {
        DeviceFile::Device { major: 195, minor: if self.lies(Lie::WrongGpuNode) { minor + 1 } else { minor } }
    }

    fn capability(&self, gpu_minor: u32, gpu_instance: u32, compute_instance: Option<u32>) -> Capability {
        // The open kernel module's table.
        let minor = 3 + gpu_minor * 135 + gpu_instance * 9 + compute_instance.map_or(0, |id| id + 1);
        let gpus = self.gpus();
        let live = gpus[gpu_minor as usize].instances.get(&gpu_instance);
        let there = live.is_some_and(|live| compute_instance.is_none() || live.compute.is_some());
        let stale = gpus[gpu_minor as usize].ever.contains(&(gpu_instance, compute_instance));
        let access = there && !self.lies(Lie::NoAccessFiles) || stale && self.lies(Lie::StaleFiles);
        let node_minor = if self.lies(Lie::WrongCapabilityNodes) { minor + 1 } else { minor };
        Capability {
            access: access.then_some(minor),
            listed: Some(if self.lies(Lie::WrongTable) { minor + 9 } else { minor }),
            major: Some(509),
            node: if access { DeviceFile::Device { major: 509, minor: node_minor } } else { DeviceFile::Missing },
        }
    }

    fn has_pci_device(&self, _address: PciAddress) -> bool {
        !self.lies(Lie::UnknownToSysfs)
    }
}
