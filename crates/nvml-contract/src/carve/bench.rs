//! The workbench: a GPU, what was made on it, and the one way to have it clean again.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::{Duration, Instant};

use kerf_mig::Placement;
use kerf_nvml::{Code, ComputeInstance, Gpu, GpuInstance, MigMode, MigModes, Nvml, PciAddress};

use super::record::{Halt, State, Switch, Waits};
use crate::kernel::{Capability, DeviceFile, Kernel};
use crate::reading::{Answer, by_id};

/// How long to wait for what does not happen at once.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For capability files to appear, and to go.
    pub files: Duration,
    /// For device nodes, after the files. Once one did not appear, no other is waited for.
    pub nodes: Duration,
    /// For instances and the GPU to be no longer in use during clean-up.
    pub in_use: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience { files: Duration::from_secs(5), nodes: Duration::from_secs(1), in_use: Duration::from_secs(10) }
    }
}

/// Between two looks at something that is waited for.
const LOOK: Duration = Duration::from_millis(2);

/// Between two tries of what is in use.
const RETRY: Duration = Duration::from_millis(250);

/// A GPU that is being carved. Whatever way it is left, also by a panic, it is cleaned up.
pub(super) struct Bench<'a> {
    pub(super) nvml: &'a dyn Nvml,
    kernel: &'a dyn Kernel,
    patience: Patience,
    address: PciAddress,
    pub(super) gpu: Gpu,
    minor: u32,
    found: State,
    /// Ids of GPU instances that were made here and may still be there, with those of compute instances made in them.
    made: BTreeMap<u32, BTreeSet<u32>>,
    nodes_appear: bool,
    pub(super) waits: Waits,
    restored: bool,
}

impl<'a> Bench<'a> {
    pub(super) fn new(
        nvml: &'a dyn Nvml,
        kernel: &'a dyn Kernel,
        patience: Patience,
        (address, gpu, minor): (PciAddress, Gpu, u32),
        found: State,
    ) -> Bench<'a> {
        Bench {
            nvml,
            kernel,
            patience,
            address,
            gpu,
            minor,
            found,
            made: BTreeMap::new(),
            nodes_appear: true,
            waits: Waits::default(),
            restored: false,
        }
    }

    pub(super) fn instances(&self) -> Answer<Vec<GpuInstance>> {
        self.nvml.gpu_instances(self.gpu).map(by_id)
    }

    /// Creates a GPU instance and remembers it, also one that is there although the call failed.
    pub(super) fn create(&mut self, profile_id: u32, placement: Placement) -> Answer<GpuInstance> {
        let before = self.instances().unwrap_or_default();
        let answer = self.nvml.create_gpu_instance(self.gpu, profile_id, placement);
        let after = self.instances().unwrap_or_default().into_iter();
        let asked = after.filter(|live| live.profile_id == profile_id && live.placement == placement);
        let new = asked.chain(answer.clone().ok()).map(|live| live.id);
        for id in new.filter(|id| !before.iter().any(|live| live.id == *id)) {
            self.made.entry(id).or_default();
        }
        answer
    }

    pub(super) fn create_compute(&mut self, gpu_instance: u32, compute_slices: u32) -> Answer<ComputeInstance> {
        let answer = self.nvml.create_compute_instance(self.gpu, gpu_instance, compute_slices);
        if let (Ok(compute), Some(made)) = (&answer, self.made.get_mut(&gpu_instance)) {
            made.insert(compute.id);
        }
        answer
    }

    /// A GPU instance that was made here was destroyed. Its id may be another client's next.
    pub(super) fn forget(&mut self, gpu_instance: u32) {
        self.made.remove(&gpu_instance);
    }

    /// Switches MIG mode, finds the GPU again (nvml.h: the switch may reset it) and reads the mode back.
    pub(super) fn switch(&mut self, wanted: MigMode) -> Switch {
        let answer = self.nvml.set_mig_mode(self.gpu, wanted);
        let found_again = self.nvml.gpu_at(self.address).and_then(|gpu| Ok((gpu, self.nvml.facts(gpu)?)));
        let found_again = found_again.map(|(gpu, facts)| (self.gpu, self.minor) = (gpu, facts.minor));
        Switch { wanted, answer, found_again, modes: self.nvml.mig_modes(self.gpu) }
    }

    /// The capability of a new instance, as soon as its files and nodes are there.
    pub(super) fn await_capability(&mut self, gpu_instance: u32, compute_instance: Option<u32>) -> Capability {
        let start = Instant::now();
        let mut files = None;
        loop {
            let capability = self.kernel.capability(self.minor, gpu_instance, compute_instance);
            let waited = start.elapsed();
            if capability.access.is_some() && files.is_none() {
                files = Some(waited);
                self.waits.files.push(waited);
            }
            let node = capability.node != DeviceFile::Missing;
            if node && files.is_some() {
                self.waits.nodes.push(waited);
                return capability;
            }
            let in_vain = match files {
                Some(files) => !self.nodes_appear || waited > files + self.patience.nodes,
                None => waited > self.patience.files,
            };
            if in_vain {
                self.nodes_appear = node;
                return capability;
            }
            thread::sleep(LOOK);
        }
    }

    /// Whether an instance's own capability file goes.
    pub(super) fn file_goes(&self, gpu_instance: u32, compute_instance: Option<u32>) -> bool {
        let end = Instant::now() + self.patience.files;
        while self.kernel.capability(self.minor, gpu_instance, compute_instance).access.is_some() {
            if Instant::now() > end {
                return false;
            }
            thread::sleep(LOOK);
        }
        true
    }

    /// Destroys what was made here. What cannot be is tried again for a while: it may be in use.
    pub(super) fn clear(&mut self) -> Result<(), Halt> {
        let end = Instant::now() + self.patience.in_use;
        let mut failure = "destroying succeeds, and the instance is still listed".to_owned();
        while !self.made.is_empty() {
            let made: Vec<u32> = self.made.keys().copied().collect();
            for id in made {
                match self.destroy(id).and_then(|()| self.instances()) {
                    Ok(live) if live.iter().any(|live| live.id == id) => {}
                    Ok(_) => self.forget(id),
                    Err(error) => failure = error.to_string(),
                }
            }
            if !self.made.is_empty() {
                if Instant::now() > end {
                    return Err(Halt::Stuck(format!("what was made cannot be removed: {failure}")));
                }
                thread::sleep(RETRY.min(self.patience.in_use));
            }
        }
        Ok(())
    }

    fn destroy(&self, gpu_instance: u32) -> Answer<()> {
        let made = self.made.get(&gpu_instance).into_iter().flatten().copied();
        let listed = self.nvml.compute_instances(self.gpu, gpu_instance).unwrap_or_default();
        for id in listed.iter().map(|listed| listed.id).chain(made).collect::<BTreeSet<u32>>() {
            unless_gone(self.nvml.destroy_compute_instance(self.gpu, gpu_instance, id))?;
        }
        unless_gone(self.nvml.destroy_gpu_instance(self.gpu, gpu_instance))
    }

    /// Makes the GPU as it was found, as far as possible, and reads how it is then.
    pub(super) fn restore(&mut self) -> (Result<(), Halt>, Answer<State>) {
        self.restored = true;
        let cleared = self.clear();
        if let (Ok(()), Some(found)) = (&cleared, self.found.modes) {
            self.restore_mode(found);
        }
        (cleared, read_state(self.nvml, self.gpu))
    }

    fn restore_mode(&mut self, found: MigModes) {
        let end = Instant::now() + self.patience.in_use;
        while self.nvml.mig_modes(self.gpu) != Ok(Some(found)) {
            let answer = self.switch(found.current).answer;
            let again = matches!(&answer, Err(error) if error.code == Code::InUse) && Instant::now() < end;
            if !again {
                return; // how the GPU is left is read next, and told
            }
            thread::sleep(RETRY.min(self.patience.in_use));
        }
    }
}

fn unless_gone(answer: Answer<()>) -> Answer<()> {
    match answer {
        Err(error) if error.is_gone() => Ok(()),
        answer => answer,
    }
}

/// How a GPU is.
pub(super) fn read_state(nvml: &dyn Nvml, gpu: Gpu) -> Answer<State> {
    Ok(State { modes: nvml.mig_modes(gpu)?, instances: nvml.gpu_instances(gpu).map(by_id)? })
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        if !self.restored {
            let _ = self.restore(); // only a panic comes here, and has its own message
        }
    }
}
