//! One node after another, as NVML would tell of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kerf_api::{Attribute, Gpu, GpuOffer, MigMode as ApiMigMode, MigPlacement};
use kerf_mig::{Engines, Placement, Profile};
use kerf_nvml::{
    Code, ComputeInstance, CudaVersion, DriverRoot, Error, GpuFacts, GpuInstance, MigMode, MigModes, Nvml, PciAddress,
    Process,
};

use super::*;
use crate::engine::{ForeignPolicy, PreparedPartition, Wishes};

/// An NVML that says what it is given.
struct Fake {
    system: Result<(), Error>,
    gpus: Vec<FakeGpu>,
}

#[derive(Clone)]
struct FakeGpu {
    address: PciAddress,
    opens: Result<(), Error>,
    facts: Result<GpuFacts, Error>,
    modes: Result<Option<MigModes>, Error>,
    profiles: Result<Vec<Profile>, Error>,
    instances: Result<Vec<GpuInstance>, Error>,
    /// Why compute instances cannot be listed, and how often GPU instances are listed before they are gone.
    broken: Option<(Error, u32)>,
    listings: Arc<AtomicU32>,
    processes: Result<Vec<Process>, Error>,
}

const LOST: Error = Error { call: "nvmlDeviceGetX", code: Code::GpuIsLost };

impl Fake {
    fn at(&self, gpu: kerf_nvml::Gpu) -> &FakeGpu {
        &self.gpus[gpu.key()]
    }
}

impl Nvml for Fake {
    fn driver_version(&self) -> Result<String, Error> {
        self.system.clone().map(|()| "535.261.03".into())
    }

    fn cuda_driver_version(&self) -> Result<CudaVersion, Error> {
        Ok(CudaVersion { major: 12, minor: 2 })
    }

    fn gpu_count(&self) -> Result<u32, Error> {
        Ok(self.gpus.len() as u32)
    }

    fn gpu(&self, index: u32) -> Result<kerf_nvml::Gpu, Error> {
        let key = index as usize;
        self.gpus[key].opens.clone().map(|()| kerf_nvml::Gpu::from_key(key))
    }

    fn gpu_at(&self, _: PciAddress) -> Result<kerf_nvml::Gpu, Error> {
        unreachable!("the inventory goes through all indexes")
    }

    fn pci_address(&self, gpu: kerf_nvml::Gpu) -> Result<PciAddress, Error> {
        Ok(self.at(gpu).address)
    }

    fn facts(&self, gpu: kerf_nvml::Gpu) -> Result<GpuFacts, Error> {
        self.at(gpu).facts.clone()
    }

    fn mig_modes(&self, gpu: kerf_nvml::Gpu) -> Result<Option<MigModes>, Error> {
        self.at(gpu).modes.clone()
    }

    fn gpu_instance_profiles(&self, gpu: kerf_nvml::Gpu) -> Result<Vec<Profile>, Error> {
        self.at(gpu).profiles.clone()
    }

    fn gpu_instances(&self, gpu: kerf_nvml::Gpu) -> Result<Vec<GpuInstance>, Error> {
        let gpu = self.at(gpu);
        let listings = gpu.listings.fetch_add(1, Ordering::Relaxed);
        match gpu.broken {
            Some((_, listed)) if listings >= listed => Ok(Vec::new()),
            _ => gpu.instances.clone(),
        }
    }

    fn compute_instances(&self, gpu: kerf_nvml::Gpu, gpu_instance: u32) -> Result<Vec<ComputeInstance>, Error> {
        if let Some((error, _)) = &self.at(gpu).broken {
            return Err(error.clone());
        }
        Ok(vec![ComputeInstance { id: 0, uuid: format!("MIG-{gpu_instance}") }])
    }

    fn set_mig_mode(&self, _: kerf_nvml::Gpu, _: MigMode) -> Result<(), Error> {
        unreachable!("the inventory changes nothing")
    }

    fn create_gpu_instance(&self, _: kerf_nvml::Gpu, _: u32, _: Placement) -> Result<GpuInstance, Error> {
        unreachable!("the inventory changes nothing")
    }

    fn destroy_gpu_instance(&self, _: kerf_nvml::Gpu, _: u32) -> Result<(), Error> {
        unreachable!("the inventory changes nothing")
    }

    fn create_compute_instance(&self, _: kerf_nvml::Gpu, _: u32, _: u32) -> Result<ComputeInstance, Error> {
        unreachable!("the inventory changes nothing")
    }

    fn destroy_compute_instance(&self, _: kerf_nvml::Gpu, _: u32, _: u32) -> Result<(), Error> {
        unreachable!("the inventory changes nothing")
    }

    fn processes(&self, gpu: kerf_nvml::Gpu) -> Result<Vec<Process>, Error> {
        self.at(gpu).processes.clone()
    }
}

fn gpu(bus: u8, architecture: &str) -> FakeGpu {
    let facts = GpuFacts {
        uuid: format!("GPU-{bus:02x}"),
        minor: bus.into(),
        name: format!("NVIDIA {architecture}"),
        brand: "Nvidia".into(),
        architecture: architecture.into(),
        compute_capability: (9, 0),
        memory_bytes: Some(81559 << 20),
        mig_mode_switchable: architecture == "Hopper",
    };
    FakeGpu {
        address: PciAddress { domain: 0, bus, device: 0, function: 0 },
        opens: Ok(()),
        facts: Ok(facts),
        modes: Ok(None),
        profiles: Ok(Vec::new()),
        instances: Ok(Vec::new()),
        broken: None,
        listings: Arc::default(),
        processes: Err(Error { call: "the inventory asks only where it has to", code: Code::Unknown }),
    }
}

/// A GPU with MIG and one profile, `1g.10gb`.
fn mig_gpu(bus: u8, architecture: &str, current: MigMode, pending: MigMode) -> FakeGpu {
    let profile = Profile {
        id: 19,
        name: "1g.10gb".into(),
        compute_slices: 1,
        memory_mib: 9728,
        engines: Engines { multiprocessors: 16, copy_engines: 1, ..Engines::default() },
        max_instances: 7,
        placements: (0..7).map(|start| Placement { start, size: 1 }).collect(),
    };
    FakeGpu { modes: Ok(Some(MigModes { current, pending })), profiles: Ok(vec![profile]), ..gpu(bus, architecture) }
}

fn instance(id: u32, start: u32) -> GpuInstance {
    GpuInstance { id, profile_id: 19, placement: Placement { start, size: 1 } }
}

fn claim(uid: &str, devices: &[&str], partitions: Vec<PreparedPartition>) -> PreparedClaim {
    PreparedClaim {
        uid: uid.into(),
        namespace: "default".into(),
        name: uid.into(),
        complete: true,
        devices: devices.iter().map(|device| (*device).to_owned()).collect(),
        held: devices.iter().map(|device| (*device).to_owned()).collect(),
        partitions,
        ..PreparedClaim::default()
    }
}

fn wishes(policy: ForeignPolicy) -> Wishes {
    let wishes = Wishes::new(policy);
    wishes.tell(BTreeMap::new());
    wishes
}

fn host() -> Host {
    Host {
        driver_name: "gpu.nvidia.com".into(),
        boot_id: "boot".into(),
        wishes: wishes(ForeignPolicy::Keep),
        driver_root: None,
        former_doubt: None,
    }
}

fn read_node(gpus: Vec<FakeGpu>, claims: Vec<PreparedClaim>) -> Inventory {
    read(&Fake { system: Ok(()), gpus }, &host(), &move || Ok(claims.clone()))
}

fn reason(gpu: &Gpu) -> Option<&str> {
    gpu.withheld.as_ref().map(|withheld| withheld.reason.as_str())
}

fn message(gpu: &Gpu) -> &str {
    gpu.withheld.as_ref().map_or("", |withheld| &withheld.message)
}

#[test]
fn what_is_offered_depends_on_mode_and_architecture() {
    use MigMode::{Disabled, Enabled};
    let no_profiles = |gpu: FakeGpu| FakeGpu { profiles: Ok(Vec::new()), ..gpu };
    let failing = |gpu: FakeGpu| FakeGpu { profiles: Err(LOST), ..gpu };
    for (what, gpu, offer, why) in [
        ("no MIG", gpu(0x3b, "Ada"), GpuOffer::Whole, None),
        ("Hopper, off", mig_gpu(0x3b, "Hopper", Disabled, Disabled), GpuOffer::WholeOrPartitions, None),
        ("Hopper, on", mig_gpu(0x3b, "Hopper", Enabled, Enabled), GpuOffer::WholeOrPartitions, None),
        ("Ampere, off", mig_gpu(0x3b, "Ampere", Disabled, Disabled), GpuOffer::Whole, None),
        ("Ampere, on", mig_gpu(0x3b, "Ampere", Enabled, Enabled), GpuOffer::Partitions, None),
        (
            "Ampere, on after a reset",
            mig_gpu(0x3b, "Ampere", Disabled, Enabled),
            GpuOffer::Nothing,
            Some(MIG_MODE_PENDING),
        ),
        (
            "Ampere, off after a reset",
            mig_gpu(0x3b, "Ampere", Enabled, Disabled),
            GpuOffer::Nothing,
            Some(MIG_MODE_PENDING),
        ),
        (
            "Hopper, profiles fail",
            failing(mig_gpu(0x3b, "Hopper", Enabled, Enabled)),
            GpuOffer::Whole,
            Some(PROFILES_UNREADABLE),
        ),
        (
            "Hopper, no profiles while off",
            no_profiles(mig_gpu(0x3b, "Hopper", Disabled, Disabled)),
            GpuOffer::Whole,
            Some(PROFILES_UNREADABLE),
        ),
        (
            "Ampere on, profiles fail",
            failing(mig_gpu(0x3b, "Ampere", Enabled, Enabled)),
            GpuOffer::Nothing,
            Some(PROFILES_UNREADABLE),
        ),
        (
            "Ampere off, profiles not told",
            no_profiles(mig_gpu(0x3b, "Ampere", Disabled, Disabled)),
            GpuOffer::Whole,
            None,
        ),
    ] {
        let inventory = read_node(vec![gpu], Vec::new());
        let [gpu] = &inventory.status.gpus[..] else { panic!("{inventory:?}") };
        assert_eq!((gpu.offer, reason(gpu)), (offer, why), "{what}");
        assert!(!inventory.suspect, "{what}");
    }
}

#[test]
fn a_pending_mode_names_the_way_out() {
    let inventory = read_node(vec![mig_gpu(0x3b, "Ampere", MigMode::Disabled, MigMode::Enabled)], Vec::new());
    let gpu = &inventory.status.gpus[0];
    assert!(message(gpu).contains("nvidia-smi --gpu-reset -i 0000:3b:00.0"), "{}", message(gpu));
    let mig = gpu.mig.as_ref().unwrap();
    assert_eq!((mig.current, mig.pending, mig.switchable), (ApiMigMode::Disabled, ApiMigMode::Enabled, false));
}

/// The point of it all: one strange GPU never hides its neighbours.
#[test]
fn a_broken_gpu_is_an_entry_among_good_ones() {
    let directory = tempfile::tempdir().unwrap();
    for address in ["0000:3b:00.0", "0000:5e:00.0", "0000:af:00.0", "0000:d8:00.0", "0000:ff:00.0"] {
        let device = directory.path().join("sys/bus/pci/devices").join(address);
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("vendor"), "0x10de").unwrap();
        std::fs::write(device.join("class"), "0x030200").unwrap();
    }
    let host = Host { driver_root: Some(DriverRoot::at(directory.path())), ..host() };
    let hopper = |bus| mig_gpu(bus, "Hopper", MigMode::Disabled, MigMode::Disabled);
    let gpus = vec![
        FakeGpu { facts: Err(LOST), ..hopper(0xff) },
        FakeGpu { opens: Err(LOST), ..hopper(0x5e) },
        FakeGpu { modes: Err(LOST), ..hopper(0xaf) },
        FakeGpu { instances: Err(LOST), ..hopper(0xd8) },
        hopper(0x3b),
    ];

    let inventory = read(&Fake { system: Ok(()), gpus }, &host, &|| Ok(Vec::new()));

    let found: Vec<_> = inventory.status.gpus.iter().map(|gpu| (gpu.name.as_str(), gpu.offer, reason(gpu))).collect();
    assert_eq!(
        found,
        [
            ("gpu-3b-00-0", GpuOffer::WholeOrPartitions, None),
            ("gpu-5e-00-0", GpuOffer::Nothing, Some(UNREADABLE)),
            ("gpu-af-00-0", GpuOffer::Nothing, Some(UNREADABLE)),
            ("gpu-d8-00-0", GpuOffer::Nothing, Some(UNREADABLE)),
            ("gpu-ff-00-0", GpuOffer::Nothing, Some(UNREADABLE)),
        ]
    );
    for gpu in &inventory.status.gpus[1..] {
        assert!(message(gpu).contains("nvmlDeviceGetX failed"), "{}: {}", gpu.name, message(gpu));
    }
    assert_eq!(inventory.status.message, None);
    assert!(inventory.suspect, "NVML is to be opened anew");
}

#[test]
fn a_gpu_without_a_name_is_in_the_nodes_message() {
    let broken = FakeGpu { opens: Err(LOST), ..gpu(0x5e, "Hopper") };
    let inventory = read_node(vec![gpu(0x3b, "Ada"), broken], Vec::new());
    assert_eq!(inventory.status.gpus.len(), 1);
    let message = inventory.status.message.unwrap();
    assert!(message.starts_with("GPU index 1 cannot be opened: nvmlDeviceGetX failed"), "{message}");
    assert!(inventory.suspect);
}

#[test]
fn nothing_to_offer_is_said() {
    let none = read_node(Vec::new(), Vec::new());
    assert_eq!(none.status.message.as_deref(), Some("the NVIDIA driver finds no GPU on this node"));
    assert_eq!(none.status.driver_version.as_deref(), Some("535.261.03"));

    let unloaded = Error { call: "nvmlSystemGetDriverVersion", code: Code::Uninitialized };
    let dead = read(&Fake { system: Err(unloaded), gpus: vec![gpu(0x3b, "Ada")] }, &host(), &|| Ok(Vec::new()));
    assert_eq!(dead.status.driver_version, None);
    assert!(dead.status.gpus.is_empty() && dead.suspect);
    let message = dead.status.message.unwrap();
    assert!(message.contains("nvmlSystemGetDriverVersion failed"), "{message}");

    let lost = read(&Fake { system: Ok(()), gpus: vec![gpu(0x3b, "Ada")] }, &host(), &|| Err("disk is gone".into()));
    assert!(lost.status.gpus.is_empty(), "without the journal nobody knows what is free");
    assert_eq!(lost.status.message.as_deref(), Some("nothing is offered: disk is gone"));
}

#[test]
fn instances_are_explained_by_claims_or_block_their_place() {
    let carved = |instances: Vec<GpuInstance>| FakeGpu {
        instances: Ok(instances),
        ..mig_gpu(0x3b, "Hopper", MigMode::Enabled, MigMode::Enabled)
    };
    let device = "gpu-3b-00-0-mig-1g10gb-4";
    let by_name = claim("by-name", &[device], Vec::new());
    let partition = PreparedPartition {
        device: device.parse().unwrap(),
        gpu: "0000:3b:00.0".parse().unwrap(),
        placement: Placement { start: 4, size: 1 },
        gpu_instance: 9,
        kept: false,
    };
    let by_id = claim("by-id", &[device], vec![partition]);

    let ours = read_node(vec![carved(vec![instance(9, 4)])], vec![by_name.clone()]);
    let gpu = &ours.status.gpus[0];
    assert_eq!((gpu.offer, reason(gpu)), (GpuOffer::WholeOrPartitions, None));
    let [live] = &gpu.mig.as_ref().unwrap().instances[..] else { panic!("{gpu:?}") };
    assert_eq!((live.id, live.profile_id, live.claim_uid.as_deref()), (9, 19, Some("by-name")));
    assert_eq!(live.compute_instances[0].uuid, "MIG-9");
    assert_eq!(ours.held, [HeldDevice { name: device.into(), gpu: "gpu-3b-00-0".into() }]);

    let both = read_node(vec![carved(vec![instance(9, 4)])], vec![by_name.clone(), by_id]);
    let live = &both.status.gpus[0].mig.as_ref().unwrap().instances[0];
    assert_eq!(live.claim_uid.as_deref(), Some("by-id"), "the claim it was carved for, not one that looks at it");

    assert_eq!(gpu.blocked, [], "nothing is in the way");
    let looks = PreparedClaim { held: Vec::new(), ..by_name.clone() };
    let looked_at = FakeGpu { processes: Ok(Vec::new()), ..carved(vec![instance(9, 4)]) };
    assert_eq!(
        read_node(vec![looked_at], vec![looks]).status.gpus[0].blocked.len(),
        1,
        "admin access explains nothing"
    );

    let both = FakeGpu { processes: Ok(Vec::new()), ..carved(vec![instance(9, 4), instance(3, 5)]) };
    let foreign = read_node(vec![both], vec![by_name]);
    let gpu = &foreign.status.gpus[0];
    assert_eq!((gpu.offer, reason(gpu)), (GpuOffer::WholeOrPartitions, None), "the rest is offered");
    let [blocked] = &gpu.blocked[..] else { panic!("{gpu:?}") };
    assert_eq!(blocked.placement, Some(MigPlacement { start: 5, size: 1 }));
    assert_eq!(blocked.reason, "ForeignInstance");
    for part in ["GPU instance 3 ", "5:1", "nvidia-smi mig -i 0000:3b:00.0 -gi 3 -dci", "-gi 3 -dgi"] {
        assert!(blocked.message.contains(part), "{}", blocked.message);
    }
    assert_eq!(gpu.mig.as_ref().unwrap().instances.len(), 2, "it is reported all the same");
    assert!(!foreign.suspect);
}

/// It stays when the claim ends, so what overlaps it is never free: not for a moment between two readings.
#[test]
fn an_instance_that_is_kept_blocks_its_place_while_a_claim_uses_it() {
    let device = "gpu-3b-00-0-mig-1g10gb-4";
    let partition = PreparedPartition {
        device: device.parse().unwrap(),
        gpu: "0000:3b:00.0".parse().unwrap(),
        placement: Placement { start: 4, size: 1 },
        gpu_instance: 9,
        kept: true,
    };
    let gpu = FakeGpu {
        instances: Ok(vec![instance(9, 4)]),
        processes: Ok(vec![Process { pid: std::process::id(), gpu_instance: Some(9) }]),
        ..mig_gpu(0x3b, "Hopper", MigMode::Enabled, MigMode::Enabled)
    };
    let inventory = read_node(vec![gpu], vec![claim("user", &[device], vec![partition])]);
    let gpu = &inventory.status.gpus[0];
    let [blocked] = &gpu.blocked[..] else { panic!("{gpu:?}") };
    assert_eq!((blocked.reason.as_str(), blocked.usable.as_deref()), ("ForeignInstance", Some(device)));
    assert_eq!(blocked.placement, Some(MigPlacement { start: 4, size: 1 }));
    assert!(blocked.message.contains("was there before claim default/user (user)"), "{}", blocked.message);
}

/// It says nothing about the GPU that one of its instances was destroyed while they were read.
#[test]
fn an_instance_that_goes_meanwhile_is_gone() {
    let error = Error { call: "nvmlGpuInstanceGetComputeInstances", code: Code::InvalidArgument };
    for (listed, withheld) in [(1, None), (9, Some(UNREADABLE))] {
        let gpu = FakeGpu {
            instances: Ok(vec![instance(3, 5)]),
            broken: Some((error.clone(), listed)),
            processes: Ok(Vec::new()),
            ..mig_gpu(0x3b, "Hopper", MigMode::Enabled, MigMode::Enabled)
        };
        let inventory = read_node(vec![gpu], Vec::new());
        assert_eq!(reason(&inventory.status.gpus[0]), withheld, "listed {listed} times");
    }
}

/// Under each policy, idle, in use, and where nobody knows.
#[test]
fn what_a_foreign_instance_blocks_depends_on_the_policy() {
    let used = Process { pid: std::process::id(), gpu_instance: Some(3) };
    let elsewhere = Process { pid: 1, gpu_instance: Some(4) };
    let exact = Some("gpu-3b-00-0-mig-1g10gb-5");
    for (policy, processes, blocked) in [
        (ForeignPolicy::Keep, Ok(vec![elsewhere]), Some((exact, "it can be claimed as gpu-3b-00-0-mig-1g10gb-5"))),
        (ForeignPolicy::Keep, Ok(vec![used]), Some((None, "it is in use by process "))),
        (ForeignPolicy::Keep, Err(LOST), Some((None, "it is in use by unknown processes"))),
        (ForeignPolicy::Adopt, Ok(vec![elsewhere]), None),
        (ForeignPolicy::Adopt, Ok(vec![used]), Some((None, "it is in use by process "))),
        (ForeignPolicy::Delete, Ok(vec![elsewhere]), None),
        (ForeignPolicy::Delete, Ok(vec![used]), Some((None, "it is in use by process "))),
    ] {
        let gpu = FakeGpu {
            instances: Ok(vec![instance(3, 5)]),
            processes: processes.clone(),
            ..mig_gpu(0x3b, "Hopper", MigMode::Enabled, MigMode::Enabled)
        };
        let host = Host { wishes: wishes(policy), ..host() };
        let inventory = read(&Fake { system: Ok(()), gpus: vec![gpu] }, &host, &|| Ok(Vec::new()));
        let found = inventory.status.gpus[0].blocked.first();
        let found_usable = found.map(|blocked| blocked.usable.as_deref());
        assert_eq!(found_usable, blocked.map(|(usable, _)| usable), "{policy:?} {processes:?}");
        if let (Some(found), Some((_, message))) = (found, blocked) {
            assert!(found.message.contains(message), "{policy:?} {processes:?}: {}", found.message);
        }
    }
}

#[test]
fn what_a_condemned_claim_has_left_is_blocked() {
    let left = PreparedPartition {
        device: "gpu-3b-00-0-mig-1g10gb-5".parse().unwrap(),
        gpu: "0000:3b:00.0".parse().unwrap(),
        placement: Placement { start: 5, size: 1 },
        gpu_instance: 3,
        kept: false,
    };
    let ended = claim("ended", &["gpu-3b-00-0-mig-1g10gb-5", "gpu-5e-00-0"], vec![left]);
    let stuck = PreparedClaim { stuck: true, ..ended };
    let ended = PreparedClaim { condemned: true, ..stuck.clone() };
    for (claim, instances, blocked, held) in [
        (&ended, vec![instance(3, 5)], 1, 0),
        (&ended, Vec::new(), 0, 0),
        // It is blocked before it is condemned: in between the scheduler could give it out.
        (&stuck, vec![instance(3, 5)], 1, 2),
    ] {
        let gpu = FakeGpu {
            instances: Ok(instances),
            processes: Ok(vec![Process { pid: std::process::id(), gpu_instance: Some(3) }]),
            ..mig_gpu(0x3b, "Hopper", MigMode::Enabled, MigMode::Enabled)
        };
        let inventory = read_node(vec![gpu], vec![claim.clone()]);
        let gpu = &inventory.status.gpus[0];
        assert_eq!((gpu.offer, reason(gpu)), (GpuOffer::WholeOrPartitions, None));
        assert_eq!(gpu.blocked.len(), blocked);
        for found in &gpu.blocked {
            assert_eq!((found.reason.as_str(), &found.usable), ("Condemned", &None));
            assert_eq!(found.placement, Some(MigPlacement { start: 5, size: 1 }));
            let users = format!("in use by process {} (", std::process::id());
            assert!(
                found.message.contains("claim default/ended") && found.message.contains(&users),
                "{}",
                found.message
            );
        }
        assert_eq!(inventory.held.len(), held, "a pod has it until it is condemned");
    }
}

/// It may be anywhere on the GPU, so all of that is held back. Only once the claim has ended: until then it has it.
#[test]
fn what_nobody_can_tell_of_a_condemned_claim_blocks_its_gpu() {
    let device = "gpu-3b-00-0-mig-1g10gb-5";
    let holder = claim("ended", &[device], Vec::new());
    let stuck = PreparedClaim { stuck: true, unplaced: vec![device.parse().unwrap()], ..holder };
    let prepared = PreparedClaim { stuck: false, ..stuck.clone() };
    for (claim, blocks) in [(stuck, [1, 0]), (prepared, [0, 0])] {
        let gpus = [0x3b, 0x5e].map(|bus| mig_gpu(bus, "Hopper", MigMode::Disabled, MigMode::Disabled));
        let inventory = read_node(gpus.into(), vec![claim]);
        let gpus = &inventory.status.gpus;
        assert_eq!([gpus[0].blocked.len(), gpus[1].blocked.len()], blocks);
        for found in &gpus[0].blocked {
            assert_eq!((found.reason.as_str(), &found.placement, &found.usable), ("Condemned", &None, &None));
            assert!(
                found.message.contains(device) && found.message.contains("claim default/ended"),
                "{}",
                found.message
            );
        }
    }
}

/// The journal was read before the claim came, the instance after.
#[test]
fn an_instance_that_is_carved_meanwhile_is_no_strangers() {
    let gpu =
        FakeGpu { instances: Ok(vec![instance(9, 4)]), ..mig_gpu(0x3b, "Hopper", MigMode::Enabled, MigMode::Enabled) };
    let asked = std::cell::Cell::new(0);
    let holding = || {
        asked.set(asked.get() + 1);
        Ok(if asked.get() == 1 { Vec::new() } else { vec![claim("late", &["gpu-3b-00-0-mig-1g10gb-4"], Vec::new())] })
    };
    let inventory = read(&Fake { system: Ok(()), gpus: vec![gpu] }, &host(), &holding);
    assert_eq!(inventory.status.gpus[0].offer, GpuOffer::WholeOrPartitions);
}

#[test]
fn a_gpu_is_described_in_full() {
    let node = read_node(vec![mig_gpu(0x3b, "Hopper", MigMode::Disabled, MigMode::Disabled)], Vec::new());
    let status = &node.status;
    assert_eq!((status.driver_name.as_str(), status.boot_id.as_str()), ("gpu.nvidia.com", "boot"));
    assert_eq!(status.driver_version.as_deref(), Some("535.261.03"));
    assert_eq!(status.cuda_driver_version.as_deref(), Some("12.2"));
    let gpu = &status.gpus[0];
    assert_eq!((gpu.pci_bus_id.as_str(), gpu.uuid.as_str(), gpu.minor), ("0000:3b:00.0", "GPU-3b", 0x3b));
    assert_eq!((gpu.product.as_str(), gpu.memory_mib), ("NVIDIA Hopper", 81559));
    let expected = [
        ("architecture", Attribute::string("Hopper")),
        ("brand", Attribute::string("Nvidia")),
        ("cudaComputeCapability", Attribute::version("9.0.0")),
        ("cudaDriverVersion", Attribute::version("12.2.0")),
        ("driverVersion", Attribute::version("535.261.3")),
        ("productName", Attribute::string("NVIDIA Hopper")),
        ("resource.kubernetes.io/pciBusID", Attribute::string("0000:3b:00.0")),
        ("uuid", Attribute::string("GPU-3b")),
    ];
    let found: Vec<_> = gpu.attributes.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    assert_eq!(found, expected);
    let profile = &gpu.mig.as_ref().unwrap().profiles[0];
    assert_eq!((profile.id, profile.name.as_str(), profile.memory_mib), (19, "1g.10gb", 9728));
    assert_eq!((profile.multiprocessors, profile.copy_engines, profile.max_instances), (16, 1, 7));
    assert_eq!(profile.placements.len(), 7);
}
