//! Answers requests: lets faults have their way, finds the GPU, waits its turn, lets the time pass, asks the state machine,
//! keeps the kernel files in step.

use std::sync::atomic::AtomicU16;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use serde_json::Value;

use super::faults::Faults;
use super::latency::Latencies;
use super::layout::{Instance, Layout};
use crate::code::Code;
use crate::fault::Effect;
use crate::handle::Handle;
use crate::node::Gpu;
use crate::node_file::NodeSpec;
use crate::view::{self, PciAddress};
use crate::wire::{Op, Request, VERSION};

/// A node at work.
#[derive(Debug)]
pub(super) struct NodeAtWork {
    pub(super) driver_version: String,
    cuda_driver_version: i32,
    pub(super) slots: Vec<Slot>,
    /// UUID and PCI address of each.
    pub(super) names: Vec<(String, PciAddress)>,
    pub(super) latencies: Latencies,
    pub(super) faults: Faults,
    /// Held while a fault is armed or cleared, or the node boots, which takes several steps.
    pub(super) hand: Mutex<()>,
    pub(super) layout: Layout,
    pub(super) generation: AtomicU16,
}

/// One GPU. What changes it waits for its turn and then takes its time, as calls do that hold the driver's lock of one
/// GPU; the state itself is locked for a moment only, so looking never waits for a change that takes long.
///
/// Architecture invariant: nothing locks two GPUs' turns but a driver reload and a reboot, which take all in their order. Locks
/// are taken in the order hand, turn, GPU, faults.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) turn: Mutex<()>,
    pub(super) gpu: Mutex<Gpu>,
}

pub(super) type Answer = Result<Value, Code>;

/// Panics while a lock is held would be bugs of the state machine; the daemon goes on with the other GPUs.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn value(answer: impl Serialize) -> Answer {
    serde_json::to_value(answer).map_err(|_| Code::UNKNOWN)
}

impl NodeAtWork {
    pub(super) fn new(spec: NodeSpec, layout: Layout, generation: u16) -> NodeAtWork {
        let slot = |spec| Slot { turn: Mutex::default(), gpu: Mutex::new(Gpu::new(spec, generation)) };
        NodeAtWork {
            driver_version: spec.driver_version,
            cuda_driver_version: spec.cuda_driver_version,
            names: spec.gpus.iter().map(|gpu| (gpu.uuid.clone(), gpu.pci)).collect(),
            slots: spec.gpus.into_iter().map(slot).collect(),
            latencies: Latencies::new(spec.latency),
            faults: Faults::default(),
            hand: Mutex::default(),
            layout,
            generation: AtomicU16::new(generation),
        }
    }

    /// The answer to one request.
    pub(super) fn answer(self: &Arc<Self>, request: Request) -> Answer {
        if request.version != VERSION {
            return Err(Code::LIB_RM_VERSION_MISMATCH);
        }
        if !request.privileged && is_privileged(&request.op) {
            return Err(Code::NO_PERMISSION);
        }
        let Request { function, op, .. } = request;
        if let Op::Control(control) = op {
            return self.control(control);
        }
        let gpu = gpu_of(&op);
        let answer = self.disturbed(&function, gpu, op);
        if let (Err(Code::GPU_IS_LOST), Some(gpu)) = (&answer, gpu) {
            self.faults.meet_lost(gpu);
        }
        answer
    }

    /// A call, with the fault that it meets.
    fn disturbed(self: &Arc<Self>, function: &str, gpu: Option<usize>, op: Op) -> Answer {
        match self.faults.meet_call(function, gpu) {
            Effect::Pass => self.carry_out(function, op),
            Effect::Fail(code) => Err(code),
            Effect::FailAfter(code) => self.carry_out(function, op).and(Err(code)),
            Effect::Activation(status) => match op {
                Op::SetMigMode(handle, on) => self.change(function, handle, |gpu| {
                    gpu.refuse_mig_mode(handle, on, status)?;
                    Ok(status.0)
                }),
                op => self.carry_out(function, op),
            },
            Effect::ActivationAfter(status) => self.carry_out(function, op).and(value(status.0)),
        }
    }

    fn carry_out(self: &Arc<Self>, function: &str, op: Op) -> Answer {
        match op {
            Op::Node => {
                self.latencies.pass(function);
                value(self.node())
            }
            Op::MigByUuid(uuid) => {
                self.latencies.pass(function);
                let found = self.slots.iter().find_map(|slot| lock(&slot.gpu).mig_by_uuid(&uuid));
                value(found.ok_or(Code::NOT_FOUND)?)
            }
            Op::Device(handle) => self.look(function, handle, |gpu| gpu.device(handle)),
            Op::MigDevices(handle) => self.look(function, handle, |gpu| gpu.mig_devices(handle)),
            Op::GiProfile(handle, key) => self.look(function, handle, |gpu| gpu.gi_profile(handle, key)),
            Op::GiPlacements(handle, profile) => self.look(function, handle, |gpu| gpu.gi_placements(handle, profile)),
            Op::GiCapacity(handle, profile) => self.look(function, handle, |gpu| gpu.gi_capacity(handle, profile)),
            Op::Gis(handle, profile) => self.look(function, handle, |gpu| gpu.gis(handle, profile)),
            Op::GiById(handle, id) => self.look(function, handle, |gpu| gpu.gi_by_id(handle, id)),
            Op::Gi(handle) => self.look(function, handle, |gpu| gpu.gi(handle)),
            Op::CiProfile(handle, index, engines) => {
                self.look(function, handle, |gpu| gpu.ci_profile(handle, index, engines))
            }
            Op::CiPlacements(handle, profile) => self.look(function, handle, |gpu| gpu.ci_placements(handle, profile)),
            Op::CiCapacity(handle, profile) => self.look(function, handle, |gpu| gpu.ci_capacity(handle, profile)),
            Op::Cis(handle, profile) => self.look(function, handle, |gpu| gpu.cis(handle, profile)),
            Op::CiById(handle, id) => self.look(function, handle, |gpu| gpu.ci_by_id(handle, id)),
            Op::Ci(handle) => self.look(function, handle, |gpu| gpu.ci(handle)),
            Op::Processes(handle) => self.look(function, handle, |gpu| gpu.processes(handle)),
            Op::ProcessName(pid) => {
                self.latencies.pass(function);
                value(self.slots.iter().find_map(|slot| lock(&slot.gpu).process_name(pid)))
            }
            Op::SetMigMode(handle, on) => self.change(function, handle, |gpu| {
                let activation = gpu.set_mig_mode(handle, on)?;
                Ok(activation.err().map_or(0, |code| code.0))
            }),
            Op::SetComputeMode(handle, mode) => self.change(function, handle, |gpu| gpu.set_compute_mode(handle, mode)),
            Op::SetPersistence(handle, on) => self.change(function, handle, |gpu| gpu.set_persistence(handle, on)),
            Op::SetTimeslice(handle, slice) => self.change(function, handle, |gpu| gpu.set_timeslice(handle, slice)),
            Op::CreateGi(handle, profile, placement) => self.change(function, handle, |gpu| {
                let gi = gpu.create_gi(handle, profile, placement)?;
                self.show(gpu, gi.handle, gi.id, None)?;
                Ok(gi)
            }),
            Op::DestroyGi(handle) => self.change(function, handle, |gpu| {
                let gi = gpu.destroy_gi(handle)?;
                self.files(self.layout.remove(Instance { gpu: gpu.spec().minor, gi: gi.id, ci: None }))
            }),
            Op::CreateCi(handle, profile, placement) => self.change(function, handle, |gpu| {
                let ci = gpu.create_ci(handle, profile, placement)?;
                self.show(gpu, ci.handle, ci.gi, Some(ci.id))?;
                Ok(ci)
            }),
            Op::DestroyCi(handle) => self.change(function, handle, |gpu| {
                let ci = gpu.destroy_ci(handle)?;
                self.files(self.layout.remove(Instance { gpu: gpu.spec().minor, gi: ci.gi, ci: Some(ci.id) }))
            }),
            Op::Control(_) => Err(Code::INVALID_ARGUMENT),
        }
    }

    fn node(&self) -> view::Node {
        view::Node {
            driver_version: self.driver_version.clone(),
            cuda_driver_version: self.cuda_driver_version,
            gpus: self.slots.iter().map(|slot| lock(&slot.gpu).listed()).collect(),
        }
    }

    fn slot(&self, handle: Handle) -> Result<&Slot, Code> {
        let place = handle.parts().ok_or(Code::INVALID_ARGUMENT)?.gpu;
        self.slots.get(usize::from(place)).ok_or(Code::INVALID_ARGUMENT)
    }

    fn look<T: Serialize>(&self, function: &str, handle: Handle, look: impl FnOnce(&Gpu) -> Result<T, Code>) -> Answer {
        let slot = self.slot(handle)?;
        self.latencies.pass(function);
        value(look(&lock(&slot.gpu))?)
    }

    fn change<T: Serialize>(
        &self,
        function: &str,
        handle: Handle,
        change: impl FnOnce(&mut Gpu) -> Result<T, Code>,
    ) -> Answer {
        let slot = self.slot(handle)?;
        let _turn = lock(&slot.turn);
        self.latencies.pass(function);
        value(change(&mut lock(&slot.gpu))?)
    }

    /// The kernel shows a new instance: at once, unless a fault withholds a part of it.
    pub(super) fn show(self: &Arc<Self>, gpu: &Gpu, handle: Handle, gi: u32, ci: Option<u32>) -> Result<(), Code> {
        let place = usize::from(gpu.spec().place);
        let instance = Instance { gpu: gpu.spec().minor, gi, ci };
        let Some(late) = self.faults.meet_instance(place) else {
            return self.files(self.layout.add(instance, |_| false));
        };
        self.files(self.layout.add(instance, |part| late.what.withholds(part)))?;
        let node = Arc::clone(self);
        std::thread::spawn(move || {
            node.faults.wait(late.id, late.what.late);
            let gpu = lock(&node.slots[place].gpu);
            if gpu.holds(handle) {
                // The log has it; there is nobody to tell.
                let _ = node.files(node.layout.add(instance, |_| false));
            }
        });
        Ok(())
    }

    /// A kernel file that cannot be written is nothing a client could act on: it goes to the daemon's own log.
    pub(super) fn files(&self, result: std::io::Result<()>) -> Result<(), Code> {
        result.map_err(|error| {
            eprintln!("nvml-sim: cannot update the capability files: {error}");
            Code::UNKNOWN
        })
    }
}

/// The GPU that a call is about, if it is about one.
fn gpu_of(op: &Op) -> Option<usize> {
    let handle = match op {
        Op::Node | Op::MigByUuid(_) | Op::ProcessName(_) | Op::Control(_) => return None,
        Op::Device(handle)
        | Op::MigDevices(handle)
        | Op::SetMigMode(handle, _)
        | Op::SetComputeMode(handle, _)
        | Op::SetPersistence(handle, _)
        | Op::SetTimeslice(handle, _)
        | Op::GiProfile(handle, _)
        | Op::GiPlacements(handle, _)
        | Op::GiCapacity(handle, _)
        | Op::CreateGi(handle, ..)
        | Op::Gis(handle, _)
        | Op::GiById(handle, _)
        | Op::Gi(handle)
        | Op::DestroyGi(handle)
        | Op::CiProfile(handle, ..)
        | Op::CiPlacements(handle, _)
        | Op::CiCapacity(handle, _)
        | Op::CreateCi(handle, ..)
        | Op::Cis(handle, _)
        | Op::CiById(handle, _)
        | Op::Ci(handle)
        | Op::DestroyCi(handle)
        | Op::Processes(handle) => handle,
    };
    handle.parts().map(|parts| usize::from(parts.gpu))
}

/// What only a privileged process may do (nvml.h: "Requires privileged user").
fn is_privileged(op: &Op) -> bool {
    match op {
        Op::Node
        | Op::Device(_)
        | Op::MigByUuid(_)
        | Op::MigDevices(_)
        | Op::Processes(_)
        | Op::ProcessName(_)
        | Op::GiProfile(..)
        | Op::Gi(_)
        | Op::CiProfile(..)
        | Op::Ci(_) => false,
        Op::SetMigMode(..)
        | Op::SetComputeMode(..)
        | Op::SetPersistence(..)
        | Op::SetTimeslice(..)
        | Op::GiPlacements(..)
        | Op::GiCapacity(..)
        | Op::CreateGi(..)
        | Op::Gis(..)
        | Op::GiById(..)
        | Op::DestroyGi(_)
        | Op::CiPlacements(..)
        | Op::CiCapacity(..)
        | Op::CreateCi(..)
        | Op::Cis(..)
        | Op::CiById(..)
        | Op::DestroyCi(_)
        | Op::Control(_) => true,
    }
}
