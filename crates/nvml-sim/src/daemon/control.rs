//! What happens to the node from outside: the administrator's hand, other people's, and fate.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kerf_mig::product::GpuInstanceProfile;

use super::answer::{Answer, NodeAtWork, Slot, lock, value};
use super::layout::Instance;
use super::state::{NodeState, gpu_state};
use crate::code::Code;
use crate::fault::{Armed, Fault, ForeignInstance, GpuName, Step};
use crate::handle::Handle;
use crate::node::{Client, Gpu, Place, Process};
use crate::view;
use crate::wire::Control;

impl NodeAtWork {
    pub(super) fn control(self: &Arc<Self>, control: Control) -> Answer {
        match control {
            Control::State => {
                let gpus = self.slots.iter().map(|slot| gpu_state(&lock(&slot.gpu))).collect();
                value(NodeState { driver_version: self.driver_version.clone(), gpus })
            }
            Control::Reset(place) => {
                let slot = self.slots.get(place).ok_or(Code::NOT_FOUND)?;
                let _turn = lock(&slot.turn);
                let mut gpu = lock(&slot.gpu);
                gpu.reset()?;
                value(self.files(self.layout.remove_instances(gpu.spec().minor))?)
            }
            Control::Reload => value(self.reload()?),
            Control::Reboot => value(self.reboot()?),
            Control::Latency(function, ms) => {
                self.latencies.set(function, Duration::from_millis(ms));
                value(())
            }
            Control::Break(place, broken) => {
                lock(&self.slots.get(place).ok_or(Code::NOT_FOUND)?.gpu).set_broken(broken);
                value(())
            }
            Control::Arm(fault) => value(self.arm(fault)?),
            Control::Faults => {
                value(self.faults.all().into_iter().map(|armed| self.standing(armed)).collect::<Vec<_>>())
            }
            Control::Clear(id) => value(self.clear(id)?),
            Control::ClearAll => {
                let all = self.faults.all();
                // Somebody else may clear them at the same time.
                let clear =
                    |id| self.clear(id).or_else(|code| if code == Code::NOT_FOUND { Ok(()) } else { Err(code) });
                value(all.into_iter().try_for_each(|(armed, _)| clear(armed.id))?)
            }
            Control::Create(wanted) => value(self.create_foreign(&wanted)?),
            Control::Destroy(gpu, gi) => value(self.destroy_foreign(&gpu, gi)?),
        }
    }

    /// One entry of the node file's `faults`.
    pub(super) fn step(self: &Arc<Self>, step: Step) -> Result<(), Code> {
        let control = match Fault::try_from(step) {
            Ok(fault) => Control::Arm(fault),
            Err(create) => Control::Create(create),
        };
        self.control(control).map(drop)
    }

    /// The driver is unloaded and loaded again. Handles are stale from then on. What a client meets that was initialised
    /// before is not published, for a driver in use is not unloaded; here it goes on with new handles.
    fn reload(&self) -> Result<(), Code> {
        let _turns: Vec<_> = self.slots.iter().map(|slot| lock(&slot.turn)).collect();
        let generation = self.next_generation();
        for slot in &self.slots {
            let mut gpu = lock(&slot.gpu);
            gpu.reload(generation);
            self.files(self.layout.remove_instances(gpu.spec().minor))?;
        }
        self.files(self.layout.load_module())
    }

    fn reboot(&self) -> Result<(), Code> {
        let _hand = lock(&self.hand);
        let _turns: Vec<_> = self.slots.iter().map(|slot| lock(&slot.turn)).collect();
        let generation = self.next_generation();
        let mut gpus: Vec<_> = self.slots.iter().map(|slot| lock(&slot.gpu)).collect();
        gpus.iter_mut().for_each(|gpu| gpu.reboot(generation));
        self.faults.heal_lost();
        self.files(self.layout.boot(gpus.iter().map(|gpu| gpu.spec())))
    }

    fn next_generation(&self) -> u16 {
        let generation = self.generation.load(Ordering::Relaxed) % 0x7fff + 1;
        self.generation.store(generation, Ordering::Relaxed);
        generation
    }

    fn place(&self, name: &GpuName) -> Result<usize, Code> {
        let gpus: Vec<_> = self.names.iter().map(|(uuid, pci)| (uuid.as_str(), *pci)).collect();
        name.place(&gpus).ok_or(Code::NOT_FOUND)
    }

    fn named(&self, name: &GpuName) -> Result<&Slot, Code> {
        self.slots.get(self.place(name)?).ok_or(Code::NOT_FOUND)
    }

    fn arm(self: &Arc<Self>, fault: Fault) -> Result<u64, Code> {
        let _hand = lock(&self.hand);
        fault.check().map_err(|_| Code::INVALID_ARGUMENT)?;
        let gpu = fault.gpu().map(|name| self.place(name)).transpose()?;
        let id = self.faults.arm(fault.clone(), gpu);
        let Some(place) = gpu else { return Ok(id) };
        let (client, lasts) = match fault {
            Fault::Call(_) | Fault::Capabilities(_) => return Ok(id),
            Fault::Lost(_) => {
                lock(&self.slots[place].gpu).lose();
                return Ok(id);
            }
            Fault::Process(process) => {
                let memory = process.memory_mib.saturating_mul(1 << 20);
                let shown = Process { pid: process.pid, name: process.name, memory };
                let place = client_place(process.gi, process.ci);
                (Client { place, process: Some(shown), tries: None }, process.lasts)
            }
            Fault::Busy(busy) => {
                let place = client_place(busy.gi, busy.ci);
                (Client { place, process: None, tries: busy.tries }, busy.lasts)
            }
        };
        let added = lock(&self.slots[place].gpu).add_client(id, client);
        if let Err(code) = added {
            self.faults.clear(id);
            return Err(code);
        }
        if let Some(span) = lasts {
            let node = Arc::clone(self);
            std::thread::spawn(move || {
                node.faults.wait(id, span);
                lock(&node.slots[place].gpu).end_client(id);
            });
        }
        Ok(id)
    }

    fn clear(&self, id: u64) -> Result<(), Code> {
        let _hand = lock(&self.hand);
        let (armed, gpu) = self.faults.clear(id).ok_or(Code::NOT_FOUND)?;
        let Some(slot) = gpu.and_then(|place| self.slots.get(place)) else { return Ok(()) };
        match armed.fault {
            Fault::Call(_) | Fault::Capabilities(_) => Ok(()),
            Fault::Lost(_) if !armed.active => Ok(()),
            Fault::Lost(_) => {
                let _turn = lock(&slot.turn);
                let mut gpu = lock(&slot.gpu);
                gpu.recover();
                self.files(self.layout.remove_instances(gpu.spec().minor))
            }
            Fault::Process(_) | Fault::Busy(_) => {
                lock(&slot.gpu).remove_client(id);
                Ok(())
            }
        }
    }

    /// What the GPU knows of a fault that is one of its users.
    fn standing(&self, (armed, gpu): (Armed, Option<usize>)) -> Armed {
        let standing = gpu.and_then(|place| lock(&self.slots.get(place)?.gpu).standing(armed.id));
        standing.map_or(armed.clone(), |(met, active)| Armed { met, active, ..armed })
    }

    fn create_foreign(self: &Arc<Self>, wanted: &ForeignInstance) -> Result<view::Created, Code> {
        let slot = self.named(&wanted.gpu)?;
        let _turn = lock(&slot.turn);
        let mut gpu = lock(&slot.gpu);
        let profile = &profile(&gpu, &wanted.profile).ok_or(Code::INVALID_ARGUMENT)?.profile;
        let placement = profile.placements.iter().find(|placement| placement.start == wanted.start).copied();
        let placement = placement.ok_or(Code::INVALID_ARGUMENT)?;
        let device = gpu.handle();
        let gi = gpu.create_gi(device, profile.id, Some(placement))?;
        self.show(&gpu, gi.handle, gi.id, None)?;
        if !wanted.compute {
            return Ok(view::Created { gi: gi.id, ci: None });
        }
        let whole = gpu.whole_ci_profile(gi.handle)?;
        let ci = gpu.create_ci(gi.handle, whole, None)?;
        self.show(&gpu, ci.handle, gi.id, Some(ci.id))?;
        Ok(view::Created { gi: gi.id, ci: Some(ci.id) })
    }

    fn destroy_foreign(&self, name: &GpuName, id: u32) -> Result<(), Code> {
        let slot = self.named(name)?;
        let _turn = lock(&slot.turn);
        let mut gpu = lock(&slot.gpu);
        let device = gpu.handle();
        let gi = gpu.gi_by_id(device, id)?;
        let inside: Vec<Handle> =
            gpu.all_cis().into_iter().filter(|(ci, _)| ci.gi == id).map(|(ci, _)| ci.handle).collect();
        for ci in inside {
            let ci = gpu.destroy_ci(ci)?;
            self.files(self.layout.remove(Instance { gpu: gpu.spec().minor, gi: id, ci: Some(ci.id) }))?;
        }
        gpu.destroy_gi(gi.handle)?;
        self.files(self.layout.remove(Instance { gpu: gpu.spec().minor, gi: id, ci: None }))
    }
}

fn client_place(gi: Option<u32>, ci: Option<u32>) -> Place {
    match (gi, ci) {
        (Some(gi), Some(ci)) => Place::Ci(gi, ci),
        (Some(gi), None) => Place::Gi(gi),
        (None, _) => Place::Gpu,
    }
}

/// By name or by hardware id.
fn profile(gpu: &Gpu, name: &str) -> Option<&'static GpuInstanceProfile> {
    let product = gpu.spec().product;
    let id = name.parse().ok();
    let mut profiles = product.mig.iter().flat_map(|mig| &mig.profiles);
    profiles.find(|profile| profile.profile.name == name || Some(profile.profile.id) == id)
}
