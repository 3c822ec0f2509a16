//! The faults that are armed: which call meets which, and how often.
//!
//! Architecture invariant: pure. It neither waits nor fails anybody; the daemon does, as it is told here.

use serde::{Deserialize, Serialize};

use super::words::names;
use super::{Fault, LateCapabilities, Span, Times};
use crate::code::Code;

/// A fault with what became of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Armed {
    /// Its id, never given out again.
    pub id: u64,
    /// The fault.
    #[serde(flatten)]
    pub fault: Fault,
    /// How often it was met: of calls, those that failed or hung; of a lost GPU, calls that found it lost; of processes
    /// and invisible users, calls that were IN_USE because of them; of late files, instances without them.
    pub met: u32,
    /// Whether it can still be met. One that cannot stays in the list until it is cleared.
    pub active: bool,
}

/// What a call meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Met {
    /// The fault.
    pub id: u64,
    /// It waits first.
    pub hang: Option<Span>,
    /// Then this.
    pub effect: Effect,
}

/// How a call that meets a fault goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// As always.
    Pass,
    /// It does nothing and fails.
    Fail(Code),
    /// It does its work and fails.
    FailAfter(Code),
    /// It leaves the mode as it is and has this activation status.
    Activation(Code),
    /// It switches the mode and has this activation status.
    ActivationAfter(Code),
}

/// What a new instance meets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Late {
    /// The fault.
    pub id: u64,
    /// What is late, and by how much.
    pub what: LateCapabilities,
}

/// Every fault that was armed and not cleared.
#[derive(Debug, Default)]
pub struct Table {
    last: u64,
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    id: u64,
    fault: Fault,
    gpu: Option<usize>,
    seen: u32,
    met: u32,
    ended: bool,
}

impl Entry {
    fn is_about(&self, gpu: Option<usize>) -> bool {
        self.gpu.is_none() || self.gpu == gpu
    }

    fn is_over(&self) -> bool {
        let times = match &self.fault {
            Fault::Call(call) => call.times,
            Fault::Capabilities(late) => late.times,
            Fault::Lost(_) | Fault::Process(_) | Fault::Busy(_) => Times::Always,
        };
        self.ended || times.is_over(self.met)
    }

    fn armed(&self) -> Armed {
        Armed { id: self.id, fault: self.fault.clone(), met: self.met, active: !self.is_over() }
    }
}

impl Table {
    /// Arms a fault about a GPU, given by its place, or about all.
    pub fn arm(&mut self, fault: Fault, gpu: Option<usize>) -> u64 {
        self.last += 1;
        self.entries.push(Entry { id: self.last, fault, gpu, seen: 0, met: 0, ended: false });
        self.last
    }

    /// Whether a fault was armed and is not cleared.
    pub fn holds(&self, id: u64) -> bool {
        self.entries.iter().any(|entry| entry.id == id)
    }

    /// Clears a fault: it, with the place of its GPU.
    pub fn clear(&mut self, id: u64) -> Option<(Armed, Option<usize>)> {
        let index = self.entries.iter().position(|entry| entry.id == id)?;
        let entry = self.entries.remove(index);
        Some((entry.armed(), entry.gpu))
    }

    /// Every fault with the place of its GPU, in the order in which they were armed.
    pub fn all(&self) -> Vec<(Armed, Option<usize>)> {
        self.entries.iter().map(|entry| (entry.armed(), entry.gpu)).collect()
    }

    /// A call of an exported function, about a GPU or about none: the fault that it meets. Every fault that could be met
    /// counts the call; it meets the one that was armed first of those whose turn has come.
    pub fn meet_call(&mut self, function: &str, gpu: Option<usize>) -> Option<Met> {
        let mut met = None;
        for entry in self.entries.iter_mut().filter(|entry| entry.is_about(gpu) && !entry.is_over()) {
            let Fault::Call(call) = &entry.fault else { continue };
            if !names(&call.function, function) {
                continue;
            }
            entry.seen = entry.seen.saturating_add(1);
            if met.is_some() || entry.seen < call.nth {
                continue;
            }
            let effect = match (call.code, call.activation, call.after) {
                (Some(code), _, false) => Effect::Fail(code.0),
                (Some(code), _, true) => Effect::FailAfter(code.0),
                (None, Some(code), false) => Effect::Activation(code.0),
                (None, Some(code), true) => Effect::ActivationAfter(code.0),
                (None, None, _) => Effect::Pass,
            };
            met = Some(Met { id: entry.id, hang: call.hang, effect });
            entry.met = entry.met.saturating_add(1);
        }
        met
    }

    /// A new instance on a GPU: the fault that it meets, by the same rules.
    pub fn meet_instance(&mut self, gpu: usize) -> Option<Late> {
        let mut met = None;
        for entry in self.entries.iter_mut().filter(|entry| entry.is_about(Some(gpu)) && !entry.is_over()) {
            let Fault::Capabilities(late) = &entry.fault else { continue };
            entry.seen = entry.seen.saturating_add(1);
            if met.is_some() || entry.seen < late.nth {
                continue;
            }
            met = Some(Late { id: entry.id, what: late.clone() });
            entry.met = entry.met.saturating_add(1);
        }
        met
    }

    /// A call found a GPU lost.
    pub fn meet_lost(&mut self, gpu: usize) {
        let lost = |entry: &&mut Entry| matches!(entry.fault, Fault::Lost(_)) && entry.gpu == Some(gpu);
        self.entries
            .iter_mut()
            .filter(lost)
            .filter(|entry| !entry.ended)
            .for_each(|entry| entry.met = entry.met.saturating_add(1));
    }

    /// The node was rebooted: GPUs are back on the bus.
    pub fn heal_lost(&mut self) {
        self.entries
            .iter_mut()
            .filter(|entry| matches!(entry.fault, Fault::Lost(_)))
            .for_each(|entry| entry.ended = true);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CallFault, GpuName, LostGpu};
    use super::*;

    const F: &str = "nvmlGpuInstanceDestroy";

    fn in_use() -> CallFault {
        CallFault::new(F).fails(Code::IN_USE)
    }

    fn table<const N: usize>(calls: [CallFault; N]) -> Table {
        let mut table = Table::default();
        for call in calls {
            let gpu = call.gpu.as_ref().and_then(|name| name.to_string().parse().ok());
            table.arm(call.into(), gpu);
        }
        table
    }

    /// The ids that calls of the function on these GPUs meet; 0 for none.
    fn meets(table: &mut Table, gpus: &[Option<usize>]) -> Vec<u64> {
        gpus.iter().map(|gpu| table.meet_call(F, *gpu).map_or(0, |met| met.id)).collect()
    }

    #[test]
    fn calls_are_counted_from_when_the_fault_was_armed() {
        for (fault, expected) in [
            (in_use(), [1, 0, 0, 0, 0]),
            (in_use().nth(3), [0, 0, 1, 0, 0]),
            (in_use().times(2), [1, 1, 0, 0, 0]),
            (in_use().nth(2).times(2), [0, 1, 1, 0, 0]),
            (in_use().nth(4).always(), [0, 0, 0, 1, 1]),
        ] {
            let mut table = table([fault.clone()]);
            assert_eq!(meets(&mut table, &[Some(0); 5]), expected, "{fault:?}");
        }
    }

    #[test]
    fn a_fault_of_one_gpu_counts_the_calls_on_that() {
        let mut table = table([in_use().on(1).nth(2)]);
        assert_eq!(meets(&mut table, &[Some(0), Some(1), None, Some(0), Some(1), Some(1)]), [0, 0, 0, 0, 1, 0]);
    }

    #[test]
    fn a_call_meets_the_older_of_two_and_the_next_call_the_other() {
        let mut two = table([in_use(), in_use()]);
        assert_eq!(meets(&mut two, &[Some(0); 3]), [1, 2, 0]);
        let mut one_later = table([in_use().nth(2), in_use().nth(1)]);
        assert_eq!(meets(&mut one_later, &[Some(0); 3]), [2, 1, 0], "both counted the first call");
    }

    #[test]
    fn other_functions_are_not_counted() {
        let mut table = table([in_use()]);
        assert_eq!(table.meet_call("nvmlDeviceCreateGpuInstance", Some(0)), None);
        assert_eq!(table.meet_call("", Some(0)), None);
        assert_eq!(table.all()[0].0.met, 0);
        assert!(table.meet_call(F, Some(0)).is_some());
    }

    #[test]
    fn what_is_over_stays_in_the_list_until_it_is_cleared() {
        let mut table = table([in_use().times(2), in_use().always()]);
        meets(&mut table, &[Some(0); 3]);
        let seen: Vec<_> = table.all().into_iter().map(|(armed, _)| (armed.id, armed.met, armed.active)).collect();
        assert_eq!(seen, [(1, 2, false), (2, 1, true)]);
        assert!(table.clear(2).is_some() && table.clear(2).is_none());
        assert!(table.holds(1) && !table.holds(2));
        assert_eq!(meets(&mut table, &[Some(0)]), [0]);
        assert_eq!(table.arm(in_use().into(), None), 3, "an id is not given out again");
    }

    #[test]
    fn effects_are_as_described() {
        let set = CallFault::new("nvmlDeviceSetMigMode");
        for (fault, effect) in [
            (set.clone().fails(Code::UNKNOWN), Effect::Fail(Code::UNKNOWN)),
            (set.clone().fails_after(Code::UNKNOWN), Effect::FailAfter(Code::UNKNOWN)),
            (set.clone().activation(Code::IN_USE), Effect::Activation(Code::IN_USE)),
            (CallFault { after: true, ..set.clone().activation(Code::IN_USE) }, Effect::ActivationAfter(Code::IN_USE)),
            (set.clone().hangs(Span::Forever), Effect::Pass),
        ] {
            let hang = fault.hang;
            let met = table([fault]).meet_call("nvmlDeviceSetMigMode", Some(0));
            assert_eq!(met, Some(Met { id: 1, hang, effect }));
        }
    }

    #[test]
    fn new_instances_are_counted_as_calls_are() {
        let mut table = Table::default();
        let late = LateCapabilities { nth: 2, times: Times::Number(1), ..LateCapabilities::new(Span::Forever) };
        table.arm(late.into(), Some(0));
        let met: Vec<_> = [0, 1, 0, 0].map(|gpu| table.meet_instance(gpu).is_some()).into();
        assert_eq!(met, [false, false, true, false]);
    }

    #[test]
    fn a_reboot_heals_lost_gpus_and_nothing_else() {
        let mut table = table([in_use()]);
        table.arm(Fault::Lost(LostGpu { gpu: GpuName::from(1) }), Some(1));
        table.meet_lost(0);
        table.meet_lost(1);
        table.heal_lost();
        table.meet_lost(1);
        let seen: Vec<_> = table.all().into_iter().map(|(armed, _)| (armed.met, armed.active)).collect();
        assert_eq!(seen, [(0, true), (1, false)]);
    }
}
