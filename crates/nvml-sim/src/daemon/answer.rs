//! Answers requests: finds the GPU, waits its turn, lets the time pass, asks the state machine, keeps the kernel files in
//! step.

use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use serde_json::Value;

use super::latency::Latencies;
use super::layout::Layout;
use super::state::{NodeState, gpu_state};
use crate::code::Code;
use crate::handle::Handle;
use crate::node::Gpu;
use crate::node_file::NodeSpec;
use crate::view;
use crate::wire::{Control, Op, Request, VERSION};

/// A node at work.
#[derive(Debug)]
pub(super) struct NodeAtWork {
    driver_version: String,
    cuda_driver_version: i32,
    slots: Vec<Slot>,
    latencies: Latencies,
    layout: Layout,
    generation: AtomicU16,
}

/// One GPU. What changes it waits for its turn and then takes its time, as calls do that hold the driver's lock of one
/// GPU; the state itself is locked for a moment only, so looking never waits for a change that takes long.
///
/// Architecture invariant: nothing locks two GPUs' turns but a driver reload, which takes all in their order.
#[derive(Debug)]
struct Slot {
    turn: Mutex<()>,
    gpu: Mutex<Gpu>,
}

type Answer = Result<Value, Code>;

/// Panics while a lock is held would be bugs of the state machine; the daemon goes on with the other GPUs.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn value(answer: impl Serialize) -> Answer {
    serde_json::to_value(answer).map_err(|_| Code::UNKNOWN)
}

impl NodeAtWork {
    pub(super) fn new(spec: NodeSpec, layout: Layout, generation: u16) -> NodeAtWork {
        let slot = |spec| Slot { turn: Mutex::default(), gpu: Mutex::new(Gpu::new(spec, generation)) };
        NodeAtWork {
            driver_version: spec.driver_version,
            cuda_driver_version: spec.cuda_driver_version,
            slots: spec.gpus.into_iter().map(slot).collect(),
            latencies: Latencies::new(spec.latency),
            layout,
            generation: AtomicU16::new(generation),
        }
    }

    /// The answer to one request.
    pub(super) fn answer(&self, request: Request) -> Answer {
        if request.version != VERSION {
            return Err(Code::LIB_RM_VERSION_MISMATCH);
        }
        if !request.privileged && is_privileged(&request.op) {
            return Err(Code::NO_PERMISSION);
        }
        let function = request.function.as_str();
        match request.op {
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
            Op::SetMigMode(handle, on) => self.change(function, handle, |gpu| {
                let activation = gpu.set_mig_mode(handle, on)?;
                Ok(activation.err().map_or(0, |code| code.0))
            }),
            Op::SetComputeMode(handle, mode) => self.change(function, handle, |gpu| gpu.set_compute_mode(handle, mode)),
            Op::SetPersistence(handle, on) => self.change(function, handle, |gpu| gpu.set_persistence(handle, on)),
            Op::SetTimeslice(handle, slice) => self.change(function, handle, |gpu| gpu.set_timeslice(handle, slice)),
            Op::CreateGi(handle, profile, placement) => self.change(function, handle, |gpu| {
                let gi = gpu.create_gi(handle, profile, placement)?;
                self.files(self.layout.add_gi(gpu.spec().minor, gi.id))?;
                Ok(gi)
            }),
            Op::DestroyGi(handle) => self.change(function, handle, |gpu| {
                let gi = gpu.destroy_gi(handle)?;
                self.files(self.layout.remove_gi(gpu.spec().minor, gi.id))
            }),
            Op::CreateCi(handle, profile, placement) => self.change(function, handle, |gpu| {
                let ci = gpu.create_ci(handle, profile, placement)?;
                self.files(self.layout.add_ci(gpu.spec().minor, ci.gi, ci.id))?;
                Ok(ci)
            }),
            Op::DestroyCi(handle) => self.change(function, handle, |gpu| {
                let ci = gpu.destroy_ci(handle)?;
                self.files(self.layout.remove_ci(gpu.spec().minor, ci.gi, ci.id))
            }),
            Op::Control(control) => self.control(control),
        }
    }

    fn control(&self, control: Control) -> Answer {
        match control {
            Control::State => {
                let gpus = self.slots.iter().map(|slot| gpu_state(&lock(&slot.gpu))).collect();
                value(NodeState { driver_version: self.driver_version.clone(), gpus })
            }
            Control::Reset(place) => {
                let slot = self.slots.get(place).ok_or(Code::NOT_FOUND)?;
                let _turn = lock(&slot.turn);
                let mut gpu = lock(&slot.gpu);
                gpu.reset();
                value(self.files(self.layout.remove_instances(gpu.spec().minor))?)
            }
            Control::Reload => {
                let _turns: Vec<_> = self.slots.iter().map(|slot| lock(&slot.turn)).collect();
                let generation = self.generation.load(Ordering::Relaxed) % 0x7fff + 1;
                self.generation.store(generation, Ordering::Relaxed);
                for slot in &self.slots {
                    let mut gpu = lock(&slot.gpu);
                    gpu.reload(generation);
                    self.files(self.layout.remove_instances(gpu.spec().minor))?;
                }
                value(())
            }
            Control::Latency(function, ms) => {
                self.latencies.set(function, std::time::Duration::from_millis(ms));
                value(())
            }
            Control::Break(place, broken) => {
                lock(&self.slots.get(place).ok_or(Code::NOT_FOUND)?.gpu).set_broken(broken);
                value(())
            }
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

    /// A kernel file that cannot be written is nothing a client could act on: it goes to the daemon's own log.
    fn files(&self, result: std::io::Result<()>) -> Result<(), Code> {
        result.map_err(|error| {
            eprintln!("nvml-sim: cannot update the capability files: {error}");
            Code::UNKNOWN
        })
    }
}

/// What only a privileged process may do (nvml.h: "Requires privileged user").
fn is_privileged(op: &Op) -> bool {
    match op {
        Op::Node
        | Op::Device(_)
        | Op::MigByUuid(_)
        | Op::MigDevices(_)
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
