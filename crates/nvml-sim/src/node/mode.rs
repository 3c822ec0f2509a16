//! MIG mode: when a switch takes effect, and what it survives (NVIDIA MIG user guide, "Enable MIG Mode").

use kerf_mig::product::ModeSwitch;

use super::Virtualization;
use crate::code::Code;

/// MIG mode of a GPU that has MIG.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mode {
    /// In force.
    pub(super) current: bool,
    /// After the next reset.
    pub(super) pending: bool,
    switch: ModeSwitch,
}

impl Mode {
    pub(super) fn new(switch: ModeSwitch, (current, pending): (bool, bool)) -> Mode {
        Mode { current, pending, switch }
    }

    /// Whether the mode switches without a reset.
    pub(super) fn switchable(self) -> bool {
        self.switch == ModeSwitch::Switchable
    }

    /// Whether a mode is in force and nothing else pending.
    pub(super) fn is(self, wanted: bool) -> bool {
        (self.current, self.pending) == (wanted, wanted)
    }

    /// `nvmlDeviceSetMigMode`: the activation status, `Ok` when the mode is in force. `clients` use the GPU.
    pub(super) fn set(
        &mut self,
        wanted: bool,
        instances: bool,
        clients: bool,
        machine: Virtualization,
    ) -> Result<(), Code> {
        if self.is(wanted) {
            return Ok(());
        }
        // Whether a switch that finds the GPU in use is left pending where no reset is needed is not published.
        if instances || (clients && self.switchable()) {
            return Err(Code::IN_USE);
        }
        self.pending = wanted;
        match self.switch {
            ModeSwitch::Switchable => self.current = wanted,
            ModeSwitch::NeedsReset if wanted == self.current => {}
            // A virtual machine cannot reset a GPU passed through to it.
            ModeSwitch::NeedsReset if machine == Virtualization::Passthrough => return Err(Code::RESET_REQUIRED),
            // On bare metal the driver would reset an idle GPU by itself. On a node that runs Kubernetes something always
            // holds it open (monitoring, the persistence daemon), and that is the node simulated here.
            ModeSwitch::NeedsReset => return Err(Code::IN_USE),
        }
        Ok(())
    }

    /// A switch that ends with this activation status, for a reason of its own: it is pending where it waits for a reset.
    pub(super) fn refuse(&mut self, wanted: bool, status: Code) {
        if status == Code::RESET_REQUIRED || !self.switchable() {
            self.pending = wanted;
        }
    }

    /// A reset of the GPU: what was pending is in force.
    pub(super) fn reset(&mut self) {
        self.current = self.pending;
    }

    /// A reload of the driver, which resets the GPU. Ampere keeps its mode in the InfoROM; since Hopper it lives in the
    /// driver only.
    pub(super) fn reload(&mut self) {
        if self.switchable() {
            self.pending = false;
        }
        self.reset();
    }
}
