//! What a test does to a node: `nvml-sim ctl` without the program.

use crate::client::Client;
use crate::code::Code;
use crate::daemon::NodeState;
use crate::fault::{Armed, Fault, ForeignInstance, GpuName, LostGpu};
use crate::view::Created;
use crate::wire::{Control, Op};

/// GPUs are named by their number in the order of PCI addresses, by PCI address or by UUID; one that the node does not
/// have is [`Code::NOT_FOUND`].
impl Client {
    fn control<T: serde::de::DeserializeOwned>(&self, control: Control) -> Result<T, Code> {
        self.ask("", Op::Control(control))
    }

    /// The state of the whole node.
    ///
    /// # Errors
    ///
    /// When no daemon answers, as with all that follow.
    pub fn state(&self) -> Result<NodeState, Code> {
        self.control(Control::State)
    }

    /// Arms a fault: its id.
    ///
    /// # Errors
    ///
    /// [`Code::INVALID_ARGUMENT`] when it could be on no node (see [`Fault::check`]), [`Code::NOT_FOUND`] when the node has
    /// no such GPU or instance, [`Code::GPU_IS_LOST`] for a user of a GPU that is lost.
    pub fn arm(&self, fault: impl Into<Fault>) -> Result<u64, Code> {
        self.control(Control::Arm(fault.into()))
    }

    /// A GPU falls off the bus: the id of the fault.
    ///
    /// # Errors
    ///
    /// As [`Client::arm`].
    pub fn lose(&self, gpu: impl Into<GpuName>) -> Result<u64, Code> {
        self.arm(Fault::Lost(LostGpu { gpu: gpu.into() }))
    }

    /// The faults that are armed, and those that are over and not cleared, in the order in which they were armed.
    ///
    /// # Errors
    ///
    /// See [`Client::state`].
    pub fn faults(&self) -> Result<Vec<Armed>, Code> {
        self.control(Control::Faults)
    }

    /// How often a fault was met.
    ///
    /// # Errors
    ///
    /// [`Code::NOT_FOUND`] for one that was cleared.
    pub fn met(&self, fault: u64) -> Result<u32, Code> {
        self.faults()?.iter().find(|armed| armed.id == fault).map(|armed| armed.met).ok_or(Code::NOT_FOUND)
    }

    /// Clears a fault: calls that hang go on, users are gone, a lost GPU is back, what is missing appears.
    ///
    /// # Errors
    ///
    /// [`Code::NOT_FOUND`] for one that is not armed.
    pub fn clear(&self, fault: u64) -> Result<(), Code> {
        self.control(Control::Clear(fault))
    }

    /// Clears all faults.
    ///
    /// # Errors
    ///
    /// See [`Client::state`].
    pub fn clear_all(&self) -> Result<(), Code> {
        self.control(Control::ClearAll)
    }

    /// Unloads and loads the driver.
    ///
    /// # Errors
    ///
    /// See [`Client::state`].
    pub fn reload(&self) -> Result<(), Code> {
        self.control(Control::Reload)
    }

    /// Boots the node: what it means for GPUs, driver and kernel files. The daemon and its clients stay.
    ///
    /// # Errors
    ///
    /// See [`Client::state`].
    pub fn reboot(&self) -> Result<(), Code> {
        self.control(Control::Reboot)
    }

    /// Creates a GPU instance as somebody else would.
    ///
    /// # Errors
    ///
    /// Those of NVML, and [`Code::INVALID_ARGUMENT`] for a profile that the GPU does not have there.
    pub fn create(&self, instance: ForeignInstance) -> Result<Created, Code> {
        self.control(Control::Create(instance))
    }

    /// Destroys a GPU instance and what is in it as somebody else would.
    ///
    /// # Errors
    ///
    /// Those of NVML.
    pub fn destroy(&self, gpu: impl Into<GpuName>, gi: u32) -> Result<(), Code> {
        self.control(Control::Destroy(gpu.into(), gi))
    }
}
