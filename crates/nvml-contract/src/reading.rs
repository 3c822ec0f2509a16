//! What a machine says when nothing is changed: every answer, also those that are errors.

use std::thread;

use kerf_mig::Profile;
use kerf_nvml::{ComputeInstance, CudaVersion, Error, Gpu, GpuFacts, GpuInstance, MigModes, Nvml, PciAddress, Process};

use crate::kernel::{Capability, DeviceFile, Kernel};
use crate::timing::Timed;

/// An answer of NVML.
pub type Answer<T> = Result<T, Error>;

/// GPU instance ids are below this (the open kernel module's table of capabilities).
const GPU_INSTANCE_IDS: u32 = 15;

/// How often the instances are listed until two listings in a row agree: somebody else may be carving.
const LISTINGS: usize = 3;

/// What the machine says.
#[derive(Clone, Debug)]
pub struct NodeReading {
    /// Driver version.
    pub driver_version: Answer<String>,
    /// CUDA version.
    pub cuda_version: Answer<CudaVersion>,
    /// Number of GPUs.
    pub count: Answer<u32>,
    /// By index: the GPU, or why there is no handle.
    pub gpus: Vec<Answer<GpuReading>>,
    /// A PCI address at which there is no GPU.
    pub nowhere: PciAddress,
    /// What NVML says to it.
    pub at_nowhere: Answer<Gpu>,
}

/// What is said about one GPU.
#[derive(Clone, Debug)]
pub struct GpuReading {
    /// NVML's index.
    pub index: u32,
    /// Its handle.
    pub handle: Gpu,
    /// The handle when asked for by index a second time.
    pub handle_again: Answer<Gpu>,
    /// PCI address.
    pub address: Answer<PciAddress>,
    /// The handle at this address.
    pub at_address: Option<Answer<Gpu>>,
    /// Whether the kernel has a PCI device at this address.
    pub in_sysfs: bool,
    /// What does not change.
    pub facts: Answer<GpuFacts>,
    /// The device node of its minor number.
    pub device_node: DeviceFile,
    /// MIG mode.
    pub modes: Answer<Option<MigModes>>,
    /// What it can be cut into.
    pub profiles: Answer<Vec<Profile>>,
    /// Facts and profiles read a second time, by a thread a GPU at once.
    pub again: (Answer<GpuFacts>, Answer<Vec<Profile>>),
    /// Its GPU instances.
    pub instances: Answer<Vec<LiveInstance>>,
    /// Whether the list of instances stayed the same while they were looked at, or came to.
    pub instances_stable: bool,
    /// The id of no live instance.
    pub unknown_instance: u32,
    /// What NVML says to it.
    pub in_unknown_instance: Answer<Vec<ComputeInstance>>,
    /// Processes.
    pub processes: Answer<Vec<Process>>,
}

/// A live GPU instance and what belongs to it.
#[derive(Clone, Debug)]
pub struct LiveInstance {
    /// The instance.
    pub instance: GpuInstance,
    /// Compute instances in it.
    pub compute: Answer<Vec<ComputeInstance>>,
    /// Its capability, and those of its compute instances, with what to call them.
    pub capabilities: Vec<(String, Capability)>,
}

impl NodeReading {
    /// The GPUs that have a handle.
    pub fn reachable(&self) -> impl Iterator<Item = &GpuReading> {
        self.gpus.iter().filter_map(|gpu| gpu.as_ref().ok())
    }
}

impl GpuReading {
    /// What to call it: its PCI address where it is known.
    pub fn name(&self) -> String {
        self.address.as_ref().map_or_else(|_| format!("index {}", self.index), ToString::to_string)
    }
}

/// Asks a machine everything that can be asked without changing it.
pub(crate) fn read(nvml: &Timed<'_>, kernel: &dyn Kernel) -> NodeReading {
    let driver_version = nvml.driver_version();
    let cuda_version = nvml.cuda_driver_version();
    let count = nvml.gpu_count();
    let indexes = 0..count.clone().unwrap_or(0);
    let mut gpus: Vec<Answer<GpuReading>> =
        indexes.map(|index| Ok(read_gpu(nvml, kernel, index, nvml.gpu(index)?))).collect();

    // Not measured: these calls wait for each other.
    let plain = nvml.unmeasured();
    thread::scope(|scope| {
        for gpu in gpus.iter_mut().flatten() {
            scope.spawn(|| gpu.again = (plain.facts(gpu.handle), plain.gpu_instance_profiles(gpu.handle)));
        }
    });

    let nowhere = nowhere(&gpus);
    NodeReading { driver_version, cuda_version, count, gpus, nowhere, at_nowhere: nvml.gpu_at(nowhere) }
}

/// An address on the bus of the first GPU, else of some bus, at which there is no GPU.
fn nowhere(gpus: &[Answer<GpuReading>]) -> PciAddress {
    let taken: Vec<_> = gpus.iter().flatten().filter_map(|gpu| gpu.address.clone().ok()).collect();
    let (domain, bus) = taken.first().map_or((0, 0xff), |first| (first.domain, first.bus));
    // A bus has 32 devices; if all were GPUs, the last would do no harm but fail its assertion.
    let at = |device| PciAddress { domain, bus, device, function: 0 };
    (1..=0x1f).rev().map(at).find(|address| !taken.contains(address)).unwrap_or(at(0x1f))
}

fn read_gpu(nvml: &dyn Nvml, kernel: &dyn Kernel, index: u32, handle: Gpu) -> GpuReading {
    let address = nvml.pci_address(handle);
    let facts = nvml.facts(handle);
    let minor = facts.as_ref().ok().map(|facts| facts.minor);
    let profiles = nvml.gpu_instance_profiles(handle);
    let (instances, instances_stable) = read_instances(nvml, kernel, handle, minor);
    let live = |id: &u32| instances.iter().flatten().any(|live| live.instance.id == *id);
    let unknown_instance = (0..GPU_INSTANCE_IDS).rev().find(|id| !live(id)).unwrap_or(GPU_INSTANCE_IDS);
    GpuReading {
        index,
        handle,
        handle_again: nvml.gpu(index),
        at_address: address.as_ref().ok().map(|address| nvml.gpu_at(*address)),
        in_sysfs: address.as_ref().is_ok_and(|address| kernel.has_pci_device(*address)),
        address,
        device_node: minor.map_or(DeviceFile::Missing, |minor| kernel.gpu_node(minor)),
        again: (facts.clone(), profiles.clone()),
        facts,
        modes: nvml.mig_modes(handle),
        profiles,
        instances,
        instances_stable,
        unknown_instance,
        in_unknown_instance: nvml.compute_instances(handle, unknown_instance),
        processes: nvml.processes(handle),
    }
}

fn read_instances(
    nvml: &dyn Nvml,
    kernel: &dyn Kernel,
    gpu: Gpu,
    gpu_minor: Option<u32>,
) -> (Answer<Vec<LiveInstance>>, bool) {
    let list = || nvml.gpu_instances(gpu).map(by_id);
    let mut before = list();
    for _ in 0..LISTINGS {
        let live = before.clone().map(|listed| {
            listed.into_iter().map(|instance| look_into(nvml, kernel, gpu, gpu_minor, instance)).collect()
        });
        let after = list();
        if before == after {
            return (live, true);
        }
        before = after;
    }
    (before.map(|_| Vec::new()), false)
}

fn look_into(
    nvml: &dyn Nvml,
    kernel: &dyn Kernel,
    gpu: Gpu,
    gpu_minor: Option<u32>,
    instance: GpuInstance,
) -> LiveInstance {
    let compute = nvml.compute_instances(gpu, instance.id);
    let mut capabilities = Vec::new();
    if let Some(minor) = gpu_minor {
        capabilities.push((format!("GPU instance {}", instance.id), kernel.capability(minor, instance.id, None)));
        for ComputeInstance { id, .. } in compute.iter().flatten() {
            let name = format!("compute instance {id} of GPU instance {}", instance.id);
            capabilities.push((name, kernel.capability(minor, instance.id, Some(*id))));
        }
    }
    LiveInstance { instance, compute, capabilities }
}

/// In the order of ids: NVML promises none.
pub(crate) fn by_id(mut instances: Vec<GpuInstance>) -> Vec<GpuInstance> {
    instances.sort_by_key(|instance| instance.id);
    instances
}
