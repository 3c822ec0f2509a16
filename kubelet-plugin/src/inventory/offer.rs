//! What may be offered of a GPU. Pure.

use kerf_api::{GpuOffer, Withheld};
use kerf_nvml::{Error, MigMode, MigModes, PciAddress};

use super::{MIG_MODE_PENDING, PROFILES_UNREADABLE};

/// MIG of a GPU, as far as the offer depends on it.
#[derive(Clone, Debug)]
pub(super) struct Mig<'a> {
    pub(super) modes: MigModes,
    /// Whether the mode switches without a reset.
    pub(super) switchable: bool,
    /// How many profiles NVML tells, or why it does not.
    pub(super) profiles: Result<usize, &'a Error>,
}

/// What may be offered of the GPU at `address`, and why not more. `None`: it has no MIG.
pub(super) fn decide(address: PciAddress, mig: Option<&Mig<'_>>) -> (GpuOffer, Option<Withheld>) {
    let withheld = |reason: &str, message| Some(Withheld { reason: reason.to_owned(), message });
    let Some(mig) = mig else { return (GpuOffer::Whole, None) };
    if mig.modes.current != mig.modes.pending {
        // NVIDIA MIG user guide: from Hopper on the mode changes at once; before, only a reset makes it so.
        let (current, pending) = (name(mig.modes.current), name(mig.modes.pending));
        let message = format!(
            "MIG mode is {current} and will be {pending} after a reset: stop everything that uses the GPU, this plugin \
             included, and run nvidia-smi --gpu-reset -i {address}, or reboot the node"
        );
        return (GpuOffer::Nothing, withheld(MIG_MODE_PENDING, message));
    }
    let partitions_unknown = match mig.profiles {
        Ok(1..) => None,
        Ok(0) => withheld(
            PROFILES_UNREADABLE,
            format!(
                "no partitions are offered, because this driver tells no MIG profiles: if it tells them only while MIG mode \
                 is enabled, run nvidia-smi -i {address} -mig 1"
            ),
        ),
        Err(error) => withheld(
            PROFILES_UNREADABLE,
            format!("no partitions are offered, because MIG profiles cannot be read: {error}"),
        ),
    };
    match (mig.switchable, mig.modes.current, partitions_unknown) {
        (true, _, None) => (GpuOffer::WholeOrPartitions, None),
        (true, _, unknown) => (GpuOffer::Whole, unknown),
        (false, MigMode::Enabled, None) => (GpuOffer::Partitions, None),
        (false, MigMode::Enabled, unknown) => (GpuOffer::Nothing, unknown),
        (false, MigMode::Disabled, _) => (GpuOffer::Whole, None),
    }
}

fn name(mode: MigMode) -> &'static str {
    match mode {
        MigMode::Disabled => "disabled",
        MigMode::Enabled => "enabled",
    }
}
