//! The calls about who uses a GPU.

use super::Gpu;
use crate::code::Code;
use crate::handle::{Handle, Target};
use crate::node::clients::{Client, Place};
use crate::view;

impl Gpu {
    /// Somebody uses the GPU or an instance from now on, known by an id of the caller's.
    pub fn add_client(&mut self, id: u64, client: Client) -> Result<(), Code> {
        if self.unreachable() {
            return Err(Code::GPU_IS_LOST);
        }
        let exists = match client.place {
            Place::Gpu => true,
            Place::Gi(gi) => self.instances.contains_key(&gi),
            Place::Ci(gi, ci) => self.compute_instance(gi, ci).is_ok(),
        };
        if !exists {
            return Err(Code::NOT_FOUND);
        }
        self.clients.add(id, client);
        Ok(())
    }

    /// It uses nothing any more, and is still told of by [`Gpu::standing`].
    pub fn end_client(&mut self, id: u64) {
        self.clients.end(id);
    }

    /// It is forgotten.
    pub fn remove_client(&mut self, id: u64) {
        self.clients.remove(id);
    }

    /// How many calls found what they wanted in use by it, and whether it is still there.
    pub fn standing(&self, id: u64) -> Option<(u32, bool)> {
        self.clients.standing(id)
    }

    /// `nvmlDeviceGetComputeRunningProcesses`: of a MIG device its own, of the GPU all.
    pub fn processes(&self, handle: Handle) -> Result<Vec<view::Process>, Code> {
        let processes = self.clients.processes(place(self.target(handle)?));
        Ok(processes
            .map(|(place, process)| {
                let (gi, ci) = match place {
                    Place::Gpu => (None, None),
                    Place::Gi(gi) => (Some(gi), None),
                    Place::Ci(gi, ci) => (Some(gi), Some(ci)),
                };
                view::Process { pid: process.pid, memory: process.memory, gi, ci }
            })
            .collect())
    }

    /// `nvmlSystemGetProcessName`, of a process on this GPU.
    pub fn process_name(&self, pid: u32) -> Option<String> {
        let mut processes = self.clients.processes(Place::Gpu);
        processes.find(|(_, process)| process.pid == pid).map(|(_, process)| process.name.clone())
    }

    /// Memory in use there, in bytes. Compute instances share the memory of their GPU instance.
    pub(super) fn memory_used(&self, target: Target) -> u64 {
        let within = match place(target) {
            Place::Ci(gi, _) => Place::Gi(gi),
            place => place,
        };
        self.clients.processes(within).map(|(_, process)| process.memory).sum()
    }
}

fn place(target: Target) -> Place {
    match target {
        Target::Gpu => Place::Gpu,
        Target::Gi { gi } => Place::Gi(gi),
        Target::Mig { gi, ci } | Target::MigOfCi { gi, ci } | Target::Ci { gi, ci } => Place::Ci(gi, ci),
    }
}
