//! Prepare: makes the node match what a claim was allocated, whatever it finds.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use kerf_mig::Placement;
use kerf_nvml::PciAddress;
use serde_json::Map;

use super::carve::Carved;
use super::cdi_edits::{self, DeviceNodes, Kept};
use super::driver_files::{DriverFiles, Node};
use super::gpu::LiveGpu;
use super::holders::{self, Extent, Hold};
use super::metadata::Document;
use super::record::{AllocationResult, PartitionRecord, Phase, Record};
use super::{Claim, DeviceName, Engine, Ledger, PrepareError, PreparedDevice, SpecError, Step, busy, is_uid, spans};
use crate::attributes::{self, Attributes};

/// What the names of profiles with graphics have (NVIDIA MIG user guide).
const GRAPHICS: &str = "+gfx";

/// What has to be done for one device. A device that several results name is done once.
#[derive(Clone, Debug)]
struct Plan {
    device: DeviceName,
    work: Work,
    /// The name of a partition's profile.
    profile: Option<String>,
}

#[derive(Clone, Copy, Debug)]
enum Work {
    /// The GPU with MIG off.
    Whole,
    /// An instance.
    Partition(Cut),
    /// The GPU as it is, for admin access.
    LookAtGpu,
    /// An instance as it is, for admin access.
    LookAtPartition(Cut),
}

#[derive(Clone, Copy, Debug)]
struct Cut {
    profile_id: u32,
    compute_slices: u32,
    placement: Placement,
}

impl Cut {
    /// Whether a partition of the record is this one.
    fn is_of(self, device: &DeviceName, partition: &PartitionRecord) -> bool {
        partition.device == *device
            && partition.profile_id == self.profile_id
            && partition.placement() == self.placement
    }
}

/// A device that is in place, and what containers are told of it.
struct Established {
    nodes: DeviceNodes,
    gpu: LiveGpu,
    /// Profile and UUID of a partition.
    partition: Option<(String, String)>,
}

/// One call of Prepare, with the claim and its GPUs locked.
struct Preparation<'a> {
    engine: &'a Engine,
    ledger: Ledger<'a>,
    /// Whether nothing was known of the claim before this call.
    is_new: bool,
    /// Where MIG may have been switched on.
    mig_gpus: BTreeSet<PciAddress>,
}

impl Engine {
    /// Makes a claim's devices usable and tells their CDI names. A repeat gives the same names, repairs what is missing,
    /// and changes nothing where nothing is missing.
    ///
    /// # Errors
    /// What this call carved is undone. Where that fails too, the journal says what remains, for the next call or
    /// [`Engine::unprepare`].
    pub fn prepare(&self, claim: &Claim, deadline: Instant) -> Result<Vec<PreparedDevice>, PrepareError> {
        if !is_uid(&claim.uid) {
            return Err(PrepareError::ClaimUid(claim.uid.clone()));
        }
        let results = results(claim)?;
        let holder = format!("claim {}/{} ({})", claim.namespace, claim.name, claim.uid);
        let _claim = self.lock_claim(&claim.uid, &holder, deadline)?;
        self.waiting.ended(&claim.uid);
        let known = Ledger::load(self, &claim.uid)?;
        let is_new = known.is_none();
        let mut ledger = known.unwrap_or_else(|| Ledger::new(self, Record::new(claim, self.epoch())));
        if let Some(error) = ledger.missing.take() {
            return Err(error.into());
        }
        let mut gpus = ledger.record.gpus();
        gpus.extend(results.iter().map(|result| result.device.gpu()));
        let _gpus = self.lock_gpus(&gpus, &holder, deadline)?;

        let mut preparation = Preparation { engine: self, ledger, is_new, mig_gpus: BTreeSet::new() };
        let prepared = preparation.run(claim, results);
        if prepared.is_err() {
            preparation.undo();
            self.gpus.forget(&gpus);
        }
        prepared
    }

    /// See [`Engine::settle_mode`].
    pub(super) fn settle_modes(&self, gpus: BTreeSet<PciAddress>) {
        for gpu in gpus {
            match self.find_gpu_if_present(gpu) {
                Ok(gpu) => gpu.iter().for_each(|gpu| self.settle_mode(gpu)),
                Err(error) => tracing::warn!(gpu = %DeviceName::whole(gpu), %error, "MIG mode stays as it is"),
            }
        }
    }
}

impl Preparation<'_> {
    fn run(&mut self, claim: &Claim, results: Vec<AllocationResult>) -> Result<Vec<PreparedDevice>, PrepareError> {
        if self.is_new {
            self.engine.former_records()?;
        }
        let mut others = self.engine.records()?;
        others.retain(|other| other.claim.uid != claim.uid);
        let plans = self.plan(&results, &holders::holds(&others))?;

        let epoch = self.engine.epoch();
        let record = &mut self.ledger.record;
        record.adapt_to(&epoch);
        claim.namespace.clone_into(&mut record.claim.namespace);
        claim.name.clone_into(&mut record.claim.name);
        record.unstick();
        record.set_results(results);
        for Plan { device, work, .. } in &plans {
            if let Work::Partition(cut) = work
                && !record.partitions.iter().any(|partition| cut.is_of(device, partition))
            {
                record.partitions.push(PartitionRecord::planned(device.clone(), cut.profile_id, cut.placement));
            }
        }
        if self.needs_intent() && self.ledger.saved.as_ref() != Some(&self.ledger.record) {
            self.ledger.record.phase = Phase::Preparing;
            self.ledger.save()?;
        }
        self.release_former(&plans)?;
        let devices = plans.iter().map(|plan| self.establish(plan)).collect::<Result<Vec<_>, _>>()?;
        self.write_spec(claim, devices)?;
        self.ledger.record.phase = Phase::Prepared;
        self.ledger.save()?;
        Ok(claim.devices.iter().map(|device| self.prepared(device)).collect())
    }

    /// Whether the journal has to say what is intended before anything is done. Not so for a claim that is new here and has
    /// nothing but whole GPUs: all it gets is a CDI file, and that tells as much as the journal would (`STATES.md`). It saves
    /// such a claim half of the journal's writes, which are most of what it costs.
    fn needs_intent(&self) -> bool {
        let Record { partitions, results, .. } = &self.ledger.record;
        !self.is_new || !partitions.is_empty() || results.iter().any(|result| result.admin_access)
    }

    /// What to do for each device, after making sure that no other claim has any part of it.
    fn plan(&mut self, results: &[AllocationResult], holds: &[Hold]) -> Result<Vec<Plan>, PrepareError> {
        let mut plans: Vec<Plan> = Vec::new();
        let mut own: Vec<Hold> = Vec::new();
        for AllocationResult { device, .. } in results {
            if plans.iter().any(|plan| plan.device == *device) {
                continue;
            }
            let admin = results.iter().filter(|result| result.device == *device).all(|result| result.admin_access);
            let (work, profile) = match (device.as_partition(), admin) {
                (None, true) => (Work::LookAtGpu, None),
                (None, false) => (Work::Whole, None),
                (Some(_), true) => {
                    let (cut, profile) = self.cut(device, None)?;
                    (Work::LookAtPartition(cut), Some(profile))
                }
                (Some(_), false) => {
                    let (cut, profile) = self.cut(device, Some(holds))?;
                    (Work::Partition(cut), Some(profile))
                }
            };
            let extent = match work {
                Work::Whole => Some(Extent::Whole),
                Work::Partition(cut) => Some(Extent::Slices(cut.placement)),
                Work::LookAtGpu | Work::LookAtPartition(_) => None,
            };
            if let Some(extent) = extent {
                if let Some(hold) = holders::in_the_way(holds, device.gpu(), extent) {
                    return Err(self.held(device, hold));
                }
                if let Some(hold) = holders::in_the_way(&own, device.gpu(), extent) {
                    return Err(PrepareError::Overlap { one: device.clone(), other: hold.device.clone() });
                }
                own.push(Hold::own(device.clone(), extent));
            }
            plans.push(Plan { device: device.clone(), work, profile });
        }
        Ok(plans)
    }

    /// Profile and placement behind a partition's name, and the profile's own name. Some drivers tell them only while MIG is
    /// on: then it is switched on, if `holds` are given and nobody holds the whole GPU.
    fn cut(&mut self, device: &DeviceName, holds: Option<&[Hold]>) -> Result<(Cut, String), PrepareError> {
        let _span = spans::device_span(device).entered();
        let engine = self.engine;
        let mut gpu = engine.find_gpu(device.gpu())?;
        let mut geometry = engine.geometry(&gpu)?;
        if geometry.is_empty()
            && let Some(holds) = holds
        {
            let whole = |hold: &&Hold| hold.device.gpu() == device.gpu() && hold.extent == Extent::Whole;
            if let Some(hold) = holds.iter().find(whole) {
                return Err(self.held(device, hold));
            }
            self.mig_gpus.insert(gpu.address);
            gpu = engine.mig_on(gpu, device)?;
            geometry = engine.geometry(&gpu)?;
        }
        let offer = device
            .as_partition()
            .and_then(|partition| geometry.offer_by_label(&partition.label, partition.start))
            .ok_or_else(|| PrepareError::NoSuchPartition { device: device.clone() })?;
        let cut = Cut {
            profile_id: offer.profile.id,
            compute_slices: offer.profile.compute_slices,
            placement: offer.placement,
        };
        Ok((cut, offer.profile.name.clone()))
    }

    /// Removes what an earlier allocation of this claim had and this one has not.
    fn release_former(&mut self, plans: &[Plan]) -> Result<(), PrepareError> {
        let is_former = |partition: &PartitionRecord| {
            let wants = |plan: &Plan| matches!(plan.work, Work::Partition(cut) if cut.is_of(&plan.device, partition));
            !plans.iter().any(wants)
        };
        let former: Vec<_> = (0..self.ledger.record.partitions.len())
            .filter(|i| is_former(&self.ledger.record.partitions[*i]))
            .collect();
        if former.is_empty() {
            return Ok(());
        }
        self.ledger.record.phase = Phase::Preparing;
        self.ledger.save()?;
        let uid = &self.ledger.record.claim.uid;
        self.engine.step(Step::RemoveSpec, || self.engine.specs.remove(uid)).map_err(SpecError)?;
        for index in former.iter().rev() {
            self.engine.release_partition(&mut self.ledger, *index).map_err(PrepareError::Former)?;
            self.mig_gpus.insert(self.ledger.record.partitions[*index].device.gpu());
            self.ledger.record.partitions.remove(*index);
        }
        self.ledger.save()?;
        let in_use = |gpu: &PciAddress| plans.iter().any(|plan| plan.device.gpu() == *gpu);
        self.engine.settle_modes(self.mig_gpus.iter().copied().filter(|gpu| !in_use(gpu)).collect());
        Ok(())
    }

    /// Makes one device usable and tells what it is.
    fn establish(&mut self, plan: &Plan) -> Result<Established, PrepareError> {
        let engine = self.engine;
        let device = &plan.device;
        let _span = spans::device_span(device).entered();
        let mut gpu = engine.find_gpu(device.gpu())?;
        let carved = match plan.work {
            Work::LookAtGpu => None,
            Work::Whole => {
                gpu = engine.mig_off(gpu, device)?;
                None
            }
            Work::LookAtPartition(cut) => Some(engine.look(&gpu, device, cut.profile_id, cut.placement)?),
            Work::Partition(cut) => {
                self.mig_gpus.insert(gpu.address);
                gpu = engine.mig_on(gpu, device)?;
                let partitions = &self.ledger.record.partitions;
                let index = partitions
                    .iter()
                    .position(|partition| cut.is_of(device, partition))
                    .expect("every planned partition was put into the record");
                Some(engine.carve(&gpu, &mut self.ledger, index, cut.compute_slices)?)
            }
        };
        let nodes = self.nodes(&gpu, device, carved.as_ref())?;
        let own = self.ledger.record.partitions.iter().find(|partition| partition.device == *device);
        let kept = own.filter(|own| own.kept).map(|own| if own.kept_compute { Kept::Both } else { Kept::GpuInstance });
        let admin_access = matches!(plan.work, Work::LookAtGpu | Work::LookAtPartition(_));
        // A partition has no graphics unless its profile says so (NVIDIA MIG user guide, "Graphics support").
        let has_graphics = plan.profile.as_ref().is_none_or(|profile| profile.contains(GRAPHICS));
        let drm = if has_graphics { self.files().drm_nodes(device.gpu()) } else { Vec::new() };
        let partition = plan.profile.clone().zip(carved.map(|carved| carved.uuid));
        let device = device.clone();
        let nodes = DeviceNodes { device, nodes, drm, metadata: Vec::new(), kept, admin_access };
        Ok(Established { nodes, gpu, partition })
    }

    fn nodes(&self, gpu: &LiveGpu, device: &DeviceName, carved: Option<&Carved>) -> Result<Vec<Node>, PrepareError> {
        let files = self.files();
        let minor = gpu.minor;
        let no_node = |path| PrepareError::NoDeviceNode { device: device.clone(), path, minor };
        let mut nodes = vec![files.gpu_node(minor).map_err(no_node)?];
        if let Some(Carved { gpu_instance, compute_instance, .. }) = carved {
            for compute_instance in [None, Some(*compute_instance)] {
                let node = files.capability_node(minor, *gpu_instance, compute_instance);
                nodes.push(node.ok_or_else(|| PrepareError::NoCapability {
                    device: device.clone(),
                    instance: match compute_instance {
                        None => format!("GPU instance {gpu_instance}"),
                        Some(id) => format!("compute instance {id} of GPU instance {gpu_instance}"),
                    },
                    proc: self.engine.driver_root.proc(),
                })?);
            }
        }
        Ok(nodes)
    }

    /// Makes the CDI file, and the files that it mounts, say what is true now.
    fn write_spec(&mut self, claim: &Claim, devices: Vec<Established>) -> Result<(), PrepareError> {
        let engine = self.engine;
        let uid = &claim.uid;
        let version = engine.nvml.driver_version().map_err(PrepareError::DriverVersion)?;
        let documents = self.documents(claim, &devices, &version)?;
        let mut devices: Vec<_> = devices.into_iter().map(|device| device.nodes).collect();
        for DeviceNodes { device, metadata, .. } in &mut devices {
            let name = device.to_string();
            let serves = |request: &str| claim.devices.iter().any(|it| it.device == name && it.request == request);
            metadata.extend(documents.iter().map(|it| &it.file).filter(|file| serves(&file.request)).cloned());
        }
        let common = self.files().common(&version);
        let spec = cdi_edits::spec(engine.specs.kind(), uid, &devices, &common, &engine.injection);
        // A file that cannot be read is as good as none: it is replaced.
        let is_written = engine.specs.read(uid).ok().flatten().as_ref() == Some(&spec);
        let is_told = engine.metadata.says(uid, &documents);
        if !(is_written && is_told) && self.needs_intent() {
            self.ledger.record.phase = Phase::Preparing;
            self.ledger.save()?;
        }
        if !is_written {
            engine.step(Step::WriteSpec, || engine.specs.write(uid, &spec)).map_err(SpecError)?;
        }
        // After the CDI file, which stands for a journal that is not written yet: whoever finds these files knows the claim.
        if !is_told {
            engine.step(Step::WriteMetadata, || engine.metadata.write(uid, &documents))?;
        }
        Ok(())
    }

    /// What the claim's containers are to be told.
    fn documents(
        &self,
        claim: &Claim,
        devices: &[Established],
        driver_version: &str,
    ) -> Result<Vec<Document>, PrepareError> {
        let engine = self.engine;
        if !engine.injection.metadata {
            return Ok(Vec::new());
        }
        let mut told = BTreeMap::new();
        for Established { nodes, gpu, partition } in devices {
            let gpu = Attributes::clone(&*engine.attributes(gpu, driver_version)?);
            let own = match partition {
                None => attributes::of_whole(gpu),
                Some((profile, uuid)) => attributes::of_partition(gpu, profile, uuid),
            };
            told.insert(nodes.device.to_string(), own);
        }
        Ok(engine.metadata.documents(&engine.driver_name, claim, |device| told.get(device)))
    }

    fn prepared(&self, device: &super::AllocatedDevice) -> PreparedDevice {
        let name = cdi_edits::device_name(&self.ledger.record.claim.uid, &device.device);
        PreparedDevice {
            requests: vec![device.request.clone()],
            pool: device.pool.clone(),
            device: device.device.clone(),
            cdi_ids: vec![self.engine.specs.kind().qualified(&name)],
            share_id: device.share_id.clone(),
        }
    }

    fn held(&self, device: &DeviceName, hold: &Hold) -> PrepareError {
        let (device, holder, held) = (device.clone(), hold.claim.clone(), hold.device.clone());
        if !hold.condemned {
            return PrepareError::Held { device, holder, held };
        }
        let left = format!("{held} of claim {holder}");
        if hold.extent == Extent::Whole {
            return PrepareError::CondemnedUnseen { device, left };
        }
        let users = match self.engine.find_gpu(device.gpu()) {
            Ok(gpu) => busy::users(&*self.engine.nvml, gpu.handle, hold.gpu_instance),
            Err(error) => error.to_string(),
        };
        PrepareError::Condemned { device, left, users }
    }

    fn files(&self) -> DriverFiles<'_> {
        DriverFiles::new(&self.engine.driver_root)
    }

    /// Takes back, in reverse, what this call began. What cannot be taken back stays in the journal.
    fn undo(&mut self) {
        let engine = self.engine;
        let begun = std::mem::take(&mut self.ledger.begun);
        for device in begun.iter().rev() {
            let index = self.ledger.record.partitions.iter().position(|partition| partition.device == *device);
            if let Some(index) = index
                && let Err(error) = engine.release_partition(&mut self.ledger, index)
            {
                tracing::error!(%device, %error, "not undone; the journal keeps it for the next attempt");
            }
        }
        engine.settle_modes(std::mem::take(&mut self.mig_gpus));
        let is_written = self.ledger.saved.is_some();
        let is_bare = self.is_new && !self.ledger.record.may_be_on_gpu();
        if (is_written || !self.needs_intent()) && (is_bare || !begun.is_empty()) {
            let uid = &self.ledger.record.claim.uid;
            if let Err(error) = engine.step(Step::RemoveSpec, || engine.specs.remove(uid)) {
                tracing::error!(%error, "the CDI file stays until the claim is released");
                return;
            }
            engine.remove_metadata(uid);
        }
        if is_written
            && is_bare
            && let Err(error) = self.ledger.remove()
        {
            tracing::error!(%error, "the journal stays until the claim is released");
        }
    }
}

/// The claim's results with their device names read.
fn results(claim: &Claim) -> Result<Vec<AllocationResult>, PrepareError> {
    if claim.devices.is_empty() {
        return Err(PrepareError::NothingAllocated);
    }
    claim
        .devices
        .iter()
        .map(|device| {
            Ok(AllocationResult {
                request: device.request.clone(),
                pool: device.pool.clone(),
                device: device.device.parse()?,
                share_id: device.share_id.clone(),
                admin_access: device.admin_access,
                extra: Map::new(),
            })
        })
        .collect()
}
