//! What must be true: the claims that a node knows, and what is on its GPUs for them and for others. Pure.

use std::collections::BTreeMap;

use kerf_kubelet_plugin::engine::{ForeignPolicy, PreparedDevice};
use kerf_mig::Placement;

/// A device as it is published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Device {
    pub(super) name: String,
    pub(super) gpu: usize,
    /// Profile and placement of a partition; `None` for the whole GPU.
    pub(super) part: Option<(u32, Placement)>,
}

/// A GPU instance that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Instance {
    pub(super) gpu: usize,
    pub(super) id: u32,
    pub(super) part: (u32, Placement),
    /// Ids of the compute instances in it.
    pub(super) compute: Vec<u32>,
}

/// What is on the GPUs.
#[derive(Clone, Debug)]
pub(super) struct Truth {
    /// Whether MIG is on, by GPU.
    pub(super) mig: Vec<bool>,
    pub(super) instances: Vec<Instance>,
}

/// What is in a file of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum File {
    Absent,
    Whole,
    Damaged,
}

/// How much of a claim is on the GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnGpu {
    /// All of it, and the kubelet was told so.
    Whole,
    /// Any part of it.
    Part,
    Nothing,
}

/// A claim that was seen and not yet released.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub(super) devices: Vec<Device>,
    pub(super) journal: File,
    pub(super) cdi: File,
    pub(super) on_gpu: OnGpu,
    /// The names of the devices that are left of it, if it was released all the same.
    pub(super) condemned: Option<Vec<String>>,
    /// Instances of others that it uses, as they were found.
    pub(super) kept: Vec<Instance>,
}

/// A process that uses a GPU, or one of its instances.
#[derive(Clone, Debug)]
pub(super) struct Busy {
    pub(super) id: u64,
    pub(super) gpu: usize,
    pub(super) instance: Option<u32>,
}

#[derive(Clone, Debug)]
pub(super) struct Model {
    pub(super) policy: ForeignPolicy,
    pub(super) claims: BTreeMap<String, Known>,
    /// Instances that no claim explains.
    pub(super) foreign: Vec<Instance>,
    pub(super) busy: Vec<Busy>,
}

/// What the kubelet is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Prepared(Vec<PreparedDevice>),
    Refused(Why),
    Released,
    /// Released as far as the kubelet is told.
    Condemned,
    /// Not released.
    Busy,
    /// An error that only a fault explains.
    Failed(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    Held,
    Overlap,
    Foreign,
    ModeBusy,
}

impl Device {
    pub(super) fn overlaps(&self, other: &Device) -> bool {
        self.gpu == other.gpu
            && match (self.part, other.part) {
                (Some((_, one)), Some((_, other))) => one.overlaps(other),
                _ => true,
            }
    }

    /// Whether an instance lies where it should be.
    pub(super) fn meets(&self, instance: &Instance) -> bool {
        self.gpu == instance.gpu && self.part.is_none_or(|(_, placement)| placement.overlaps(instance.part.1))
    }

    pub(super) fn is(&self, instance: &Instance) -> bool {
        self.gpu == instance.gpu && self.part == Some(instance.part)
    }
}

impl Known {
    /// Whether the node can know of it.
    pub(super) fn is_explained(&self) -> bool {
        self.journal == File::Whole || self.cdi == File::Whole
    }

    fn holds(&self) -> impl Iterator<Item = &Device> {
        let left = |device: &&Device| self.condemned.as_ref().is_none_or(|left| left.contains(&device.name));
        self.devices.iter().filter(|_| self.is_explained()).filter(left)
    }

    fn may_own(&self, instance: &Instance) -> bool {
        self.on_gpu != OnGpu::Nothing && self.holds().any(|device| device.is(instance))
    }
}

/// What the kubelet is told about a claim that is prepared.
fn prepared(uid: &str, devices: &[Device]) -> Vec<PreparedDevice> {
    let tell = |(number, device): (usize, &Device)| PreparedDevice {
        requests: vec![format!("request-{number}")],
        pool: "node-1".to_owned(),
        device: device.name.clone(),
        cdi_ids: vec![format!("k8s.gpu.nvidia.com/claim={uid}-{}", device.name)],
        share_id: None,
    };
    devices.iter().enumerate().map(tell).collect()
}

impl Model {
    /// Prepares a claim, and says what the kubelet must be told.
    pub(super) fn prepare(&mut self, uid: &str, devices: &[Device]) -> Outcome {
        for (number, device) in devices.iter().enumerate() {
            let earlier = &devices[..number];
            if earlier.iter().any(|earlier| earlier.name == device.name) {
                continue;
            }
            let mut others = self.claims.iter().filter(|(other, _)| *other != uid);
            if others.any(|(_, other)| other.holds().any(|held| held.overlaps(device))) {
                return Outcome::Refused(Why::Held);
            }
            if earlier.iter().any(|earlier| earlier.overlaps(device)) {
                return Outcome::Refused(Why::Overlap);
            }
        }
        let before = self.foreign.clone();
        // A new claim of nothing but whole GPUs is journalled last.
        let is_journalled = devices.iter().any(|device| device.part.is_some());
        let mut kept = self.claims.get(uid).map_or_else(Vec::new, |known| known.kept.clone());
        for device in devices {
            if let Some(why) = self.make_room(uid, is_journalled, device, &mut kept) {
                if self.policy == ForeignPolicy::Keep {
                    self.foreign = before;
                }
                if let Some(known) = self.claims.get_mut(uid).filter(|known| known.on_gpu == OnGpu::Whole) {
                    known.on_gpu = OnGpu::Part;
                }
                return Outcome::Refused(why);
            }
        }
        let (journal, cdi, on_gpu) = (File::Whole, File::Whole, OnGpu::Whole);
        let known = Known { devices: devices.to_vec(), journal, cdi, on_gpu, condemned: None, kept };
        self.claims.insert(uid.to_owned(), known);
        Outcome::Prepared(prepared(uid, devices))
    }

    /// What others have made in a device's place is taken, or destroyed, or why it is in the way.
    fn make_room(&mut self, uid: &str, is_journalled: bool, device: &Device, kept: &mut Vec<Instance>) -> Option<Why> {
        let is_told_apart =
            self.claims.iter().all(|(other, known)| known.is_explained() || is_journalled && other == uid);
        let in_place: Vec<_> = self.foreign.iter().filter(|instance| device.meets(instance)).cloned().collect();
        let is_used = |instance: &Instance| {
            self.busy.iter().any(|busy| busy.instance == Some(instance.id) && busy.gpu == instance.gpu)
        };
        match &in_place[..] {
            [] => {
                let mut whole = self.busy.iter().filter(|busy| busy.gpu == device.gpu && busy.instance.is_none());
                return (whole.next().is_some() && device.part.is_some()).then_some(Why::ModeBusy);
            }
            // It may be of a claim whose files cannot be read.
            _ if !is_told_apart => return Some(Why::Foreign),
            [only] if device.is(only) && !is_used(only) => {
                kept.extend((self.policy == ForeignPolicy::Keep).then(|| only.clone()));
            }
            others if self.policy == ForeignPolicy::Keep || others.iter().any(is_used) => return Some(Why::Foreign),
            _ => {}
        }
        self.foreign.retain(|instance| !device.meets(instance));
        None
    }

    /// Releases a claim, and says what the kubelet must be told.
    pub(super) fn unprepare(&mut self, uid: &str, patient: bool, truth: &Truth) -> Outcome {
        let is_busy = self.is_busy(uid, truth);
        match self.claims.get_mut(uid) {
            Some(known) if is_busy => {
                known.on_gpu = OnGpu::Part;
                if patient && known.condemned.is_none() { Outcome::Busy } else { Outcome::Condemned }
            }
            _ => {
                self.forget(uid);
                Outcome::Released
            }
        }
    }

    /// Nothing of a claim is there any more.
    pub(super) fn forget(&mut self, uid: &str) {
        self.foreign.extend(self.claims.remove(uid).into_iter().flat_map(|known| known.kept));
    }

    /// Whether a process is in the way of a claim's release.
    pub(super) fn is_busy(&self, uid: &str, truth: &Truth) -> bool {
        let Some(known) = self.claims.get(uid) else { return false };
        // A compute instance that was there before is not touched.
        let stays =
            |instance: &Instance| known.kept.iter().any(|kept| kept.is_same(instance) && !kept.compute.is_empty());
        let mut own = truth.instances.iter().filter(|instance| self.owns(known, instance) && !stays(instance));
        own.any(|instance| self.busy.iter().any(|busy| busy.uses(instance)))
    }

    /// Whether a process uses a whole GPU of a claim, which keeps the claim when its pod is gone without a word.
    pub(super) fn uses_whole_gpu(&self, uid: &str) -> bool {
        let whole = |known: &Known| {
            let mut gpus = known.devices.iter().filter(|device| device.part.is_none()).map(|device| device.gpu);
            known.is_explained() && gpus.any(|gpu| self.busy.iter().any(|busy| busy.gpu == gpu))
        };
        self.claims.get(uid).is_some_and(whole)
    }

    /// What a claim's journal says of instances that were there before it: names of the devices whose instance is its own by
    /// now, and of those whose instance it keeps.
    pub(super) fn sync_taken(&mut self, uid: &str, own: &[String], kept: &[String]) {
        let Some(known) = self.claims.get_mut(uid).filter(|known| known.on_gpu != OnGpu::Nothing) else { return };
        let is_of = |names: &[String], instance: &Instance| {
            known.devices.iter().any(|device| device.is(instance) && names.contains(&device.name))
        };
        self.foreign.retain(|instance| !is_of(own, instance));
        let is_kept = |instance: &Instance| is_of(kept, instance);
        let (kept, given_back): (Vec<_>, Vec<_>) = known.kept.drain(..).partition(is_kept);
        let (taken, foreign): (Vec<_>, Vec<_>) = self.foreign.drain(..).partition(is_kept);
        known.kept = kept.into_iter().chain(taken).collect();
        self.foreign = foreign.into_iter().chain(given_back).collect();
    }

    /// Everything on every GPU is gone; a reboot takes the CDI files as well.
    pub(super) fn begin_anew(&mut self, reboot: bool) {
        self.foreign.clear();
        self.busy.clear();
        for known in self.claims.values_mut() {
            known.on_gpu = OnGpu::Nothing;
            known.kept.clear();
            if reboot {
                known.cdi = File::Absent;
            }
        }
    }

    /// What nothing explains any more is nobody's.
    pub(super) fn disown(&mut self, truth: &Truth) {
        let explained = |instance: &&Instance| self.claims.values().any(|known| known.may_own(instance));
        let lost: Vec<_> = self.claims.values().filter(|known| !known.is_explained()).collect();
        let was_theirs = |instance: &&Instance| {
            lost.iter()
                .any(|known| known.on_gpu != OnGpu::Nothing && known.devices.iter().any(|device| device.is(instance)))
        };
        let orphans: Vec<_> = truth.instances.iter().filter(|it| !explained(it)).filter(was_theirs).cloned().collect();
        for known in self.claims.values_mut().filter(|known| !known.is_explained()) {
            known.on_gpu = OnGpu::Nothing;
            known.kept.clear();
        }
        for orphan in orphans {
            if !self.foreign.contains(&orphan) {
                self.foreign.push(orphan);
            }
        }
    }

    /// Whether an instance is a claim's: one of somebody else may lie where the claim's should be.
    pub(super) fn owns(&self, known: &Known, instance: &Instance) -> bool {
        known.may_own(instance) && !self.foreign.contains(instance)
    }

    /// Whether what is on the GPUs is what must be there.
    pub(super) fn check(&self, truth: &Truth) -> Result<(), String> {
        for instance in &truth.instances {
            let foreign = self.foreign.iter().filter(|foreign| *foreign == instance).count();
            let owners: Vec<_> =
                self.claims.iter().filter(|(_, known)| self.owns(known, instance)).map(|(uid, _)| uid).collect();
            if foreign + owners.len() != 1 {
                return Err(format!("{instance:?} is of {foreign} others and of {owners:?}"));
            }
        }
        let is_there = |part: &dyn Fn(&Instance) -> bool| truth.instances.iter().find(|instance| part(instance));
        let kept = self.claims.values().flat_map(|known| &known.kept);
        for foreign in self.foreign.iter().chain(kept) {
            if is_there(&|instance| foreign.is_same(instance)).is_none() {
                return Err(format!("somebody else's {foreign:?} is gone"));
            }
        }
        let live: Vec<_> = self.claims.iter().filter(|(_, known)| known.on_gpu == OnGpu::Whole).collect();
        for (number, (uid, known)) in live.iter().enumerate() {
            for device in &known.devices {
                match is_there(&|instance| device.is(instance)) {
                    Some(instance) if instance.compute.len() == 1 && !self.foreign.contains(instance) => {}
                    None if device.part.is_none() && !truth.mig[device.gpu] => {}
                    found => return Err(format!("{uid} has of {device:?}: {found:?}, MIG {:?}", truth.mig)),
                }
                let mut others = live[..number].iter();
                if let Some((other, _)) = others.find(|(_, it)| it.devices.iter().any(|it| it.overlaps(device))) {
                    return Err(format!("{uid} and {other} both have {device:?}"));
                }
            }
        }
        Ok(())
    }
}

impl Instance {
    /// The same, whatever was made in it.
    pub(super) fn is_same(&self, other: &Instance) -> bool {
        (self.gpu, self.id, self.part) == (other.gpu, other.id, other.part)
    }
}

impl Busy {
    pub(super) fn uses(&self, instance: &Instance) -> bool {
        self.gpu == instance.gpu && self.instance.is_none_or(|id| id == instance.id)
    }
}
