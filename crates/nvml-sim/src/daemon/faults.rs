//! The faults that are armed, and waiting for them: the one place where a fault costs time.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::fault::{Armed, Effect, Fault, Late, Span, Table};

/// The table of faults, with a bell that rings when one is cleared.
#[derive(Debug, Default)]
pub(super) struct Faults {
    table: Mutex<Table>,
    cleared: Condvar,
}

impl Faults {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn arm(&self, fault: Fault, gpu: Option<usize>) -> u64 {
        self.table().arm(fault, gpu)
    }

    /// Clears a fault, which ends all that waits for it.
    pub(super) fn clear(&self, id: u64) -> Option<(Armed, Option<usize>)> {
        let cleared = self.table().clear(id);
        self.cleared.notify_all();
        cleared
    }

    pub(super) fn all(&self) -> Vec<(Armed, Option<usize>)> {
        self.table().all()
    }

    /// What a call meets. If that is to hang, it has hung when this returns; the caller holds no lock meanwhile, so nobody
    /// else waits.
    ///
    /// A client that is killed while its call hangs does not take the call back: as on hardware, where the driver goes on
    /// with what it was told.
    pub(super) fn meet_call(&self, function: &str, gpu: Option<usize>) -> Effect {
        let Some(met) = self.table().meet_call(function, gpu) else { return Effect::Pass };
        if let Some(span) = met.hang {
            self.wait(met.id, span);
        }
        met.effect
    }

    pub(super) fn meet_instance(&self, gpu: usize) -> Option<Late> {
        self.table().meet_instance(gpu)
    }

    pub(super) fn meet_lost(&self, gpu: usize) {
        self.table().meet_lost(gpu);
    }

    pub(super) fn heal_lost(&self) {
        self.table().heal_lost();
    }

    /// Waits so long, or until the fault is cleared.
    pub(super) fn wait(&self, id: u64, span: Span) {
        let table = self.table();
        match span {
            Span::Time(time) => drop(self.cleared.wait_timeout_while(table, time, |table| table.holds(id))),
            Span::Forever => drop(self.cleared.wait_while(table, |table| table.holds(id))),
        }
    }
}
