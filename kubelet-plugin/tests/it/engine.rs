//! The carve engine over the real NVML code and a simulated node: the way of claims, and what stands in it.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::sync::Arc;

use kerf_kubelet_plugin::engine::{
    Claim, DeviceName, Engine, LockError, PrepareError, PreparedDevice, ReleaseError, Settings, Step, UnprepareError,
};
use kerf_mig::{Geometry, Placement};
use kerf_nvml::{Code, DriverRoot, Library, MigMode, Process};

use crate::engine_node::{self, Crash, Fault, GPU, Node, SECOND, address, claim, late, soon};

const H100: &str = "[{product: h100-80gb}]";
const TWO_H100: &str = "[{product: h100-80gb, count: 2}]";

const MIG_1G: &str = "gpu-3b-00-0-mig-1g10gb-4";
const MIG_2G: &str = "gpu-3b-00-0-mig-2g20gb-4";
const MIG_3G: &str = "gpu-3b-00-0-mig-3g40gb-0";
const SECOND_1G: &str = "gpu-47-00-0-mig-1g10gb-0";

fn prepare(engine: &Engine, claim: &Claim) -> Result<Vec<PreparedDevice>, PrepareError> {
    engine.prepare(claim, late())
}

fn refused(engine: &Engine, claim: &Claim) -> String {
    prepare(engine, claim).expect_err("it is refused").to_string()
}

fn unprepare(engine: &Engine, claim: &Claim) {
    engine.unprepare(&claim.uid, late()).unwrap();
}

/// Every profile at every placement: exactly that on the GPU, a repeat that changes nothing, and nothing afterwards.
#[test]
fn every_cut_comes_and_goes() {
    let node = Node::start(H100);
    let watch = Crash::never();
    let engine = node.watched_engine(watch.clone());
    let geometry = Geometry::new(node.nvml.gpu_instance_profiles(node.gpu(GPU)).unwrap());
    assert!(geometry.offers().len() > 20, "an H100 has more cuts than these: {geometry:?}");
    for offer in geometry.offers() {
        let device = DeviceName::partition(address(GPU), offer.profile, offer.placement).to_string();
        let claim = claim("a", &[&device]);
        let prepared = prepare(&engine, &claim).unwrap();

        let Placement { start, size } = offer.placement;
        assert_eq!(node.live(GPU), [(offer.profile.id, start, size, 1)], "{device}");
        assert_eq!(
            prepared,
            [PreparedDevice {
                requests: vec!["request-0".into()],
                pool: "node-1".into(),
                device: device.clone(),
                cdi_ids: vec![format!("k8s.gpu.nvidia.com/claim=a-{device}")],
                share_id: None,
            }]
        );
        let nodes = node.nodes(&claim, &device);
        assert_eq!(nodes[0], "/dev/nvidia0");
        assert_eq!(nodes.len(), 3);
        assert_ne!(nodes[1], nodes[2]);
        assert!(nodes[1..].iter().all(|node| node.starts_with("/dev/nvidia-caps/nvidia-cap")), "{nodes:?}");

        let steps = watch.steps().len();
        assert_eq!(prepare(&engine, &claim).unwrap(), prepared, "a repeat answers the same");
        assert_eq!(watch.steps().len(), steps, "a repeat changes nothing");

        unprepare(&engine, &claim);
        node.assert_clean(GPU, &device);
    }
}

/// What a container gets: the GPU's own node and everything that is common, by the host's paths.
#[test]
fn a_whole_gpu_comes_and_goes() {
    let node = Node::start("[{product: h100-80gb}, {product: l40s}]");
    let engine = node.engine();
    for (gpu, minor) in [(GPU, 0), (SECOND, 1)] {
        let claim = claim("a", &[gpu]);
        let prepared = prepare(&engine, &claim).unwrap();
        assert_eq!(prepared[0].cdi_ids, [format!("k8s.gpu.nvidia.com/claim=a-{gpu}")]);
        assert_eq!(prepare(&engine, &claim).unwrap(), prepared);
        assert_eq!(node.nodes(&claim, gpu), [format!("/dev/nvidia{minor}")]);

        let spec = node.cdi(&claim);
        let device_node = &spec["devices"][0]["containerEdits"]["deviceNodes"][0];
        assert_eq!(device_node["hostPath"], format!("/host/driver/dev/nvidia{minor}"));
        assert_eq!((&device_node["major"], &device_node["minor"]), (&195.into(), &minor.into()));
        let common = &spec["containerEdits"];
        let mounts: BTreeSet<_> = common["mounts"]
            .as_array()
            .unwrap()
            .iter()
            .map(|mount| (mount["hostPath"].as_str().unwrap(), mount["containerPath"].as_str().unwrap()))
            .collect();
        let lib = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
        let library = format!("/host/driver{lib}/libnvidia-ml.so.535.261.03");
        for expected in [
            (library.as_str(), format!("{lib}/libnvidia-ml.so.1")),
            (library.as_str(), format!("{lib}/libnvidia-ml.so.535.261.03")),
            ("/host/driver/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi".to_owned()),
            ("/host/driver/run/nvidia-persistenced/socket", "/run/nvidia-persistenced/socket".to_owned()),
        ] {
            assert!(mounts.contains(&(expected.0, expected.1.as_str())), "{expected:?} not in {mounts:?}");
        }
        let control: BTreeSet<_> =
            common["deviceNodes"].as_array().unwrap().iter().map(|node| node["path"].as_str().unwrap()).collect();
        let expected = ["/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidiactl"];
        assert_eq!(control, BTreeSet::from(expected));
        unprepare(&engine, &claim);
        node.assert_clean(GPU, gpu);
    }
}

#[test]
fn whole_gpus_and_partitions_exclude_each_other() {
    let node = Node::start(H100);
    let engine = node.engine();
    let (whole, part) = (claim("whole", &[GPU]), claim("part", &[MIG_1G]));
    for (first, second, held) in [(&whole, &part, GPU), (&part, &whole, MIG_1G)] {
        prepare(&engine, first).unwrap();
        let live = node.live(GPU);
        let error = refused(&engine, second);
        assert!(
            error.contains(&format!("held by claim team/{} ({}) through {held}", first.name, first.uid)),
            "{error}"
        );
        assert_eq!(node.live(GPU), live, "nothing is touched");
        unprepare(&engine, second);
        unprepare(&engine, first);
        prepare(&engine, second).unwrap();
        unprepare(&engine, second);
        node.assert_clean(GPU, "both are gone");
    }
}

#[test]
fn partitions_share_a_gpu_unless_they_overlap() {
    let node = Node::start(H100);
    let engine = node.engine();
    let (one, two, three) = (claim("one", &[MIG_3G]), claim("two", &[MIG_2G]), claim("three", &[MIG_1G]));
    prepare(&engine, &one).unwrap();
    prepare(&engine, &two).unwrap();
    assert_eq!(node.live(GPU).len(), 2);
    let error = refused(&engine, &three);
    assert!(error.contains("held by claim team/claim-two (two)"), "{error}");
    assert_ne!(node.nodes(&one, MIG_3G), node.nodes(&two, MIG_2G), "each has its own capabilities");

    unprepare(&engine, &two);
    prepare(&engine, &three).unwrap();
    unprepare(&engine, &one);
    assert!(node.mig_is_on(GPU), "an instance is left");
    unprepare(&engine, &three);
    node.assert_clean(GPU, "all are gone");
}

#[test]
fn one_claim_has_several_devices_on_several_gpus() {
    let node = Node::start(TWO_H100);
    let engine = node.engine();
    let claim = claim("a", &[MIG_2G, SECOND_1G, MIG_3G]);
    let prepared = prepare(&engine, &claim).unwrap();
    let devices: Vec<_> = prepared.iter().map(|device| device.device.as_str()).collect();
    assert_eq!(devices, [MIG_2G, SECOND_1G, MIG_3G], "in the order of the allocation");
    assert_eq!((node.live(GPU).len(), node.live(SECOND).len()), (2, 1));
    let known = engine.prepared_claims().unwrap();
    assert_eq!(known.len(), 1);
    assert!(known[0].complete);
    assert_eq!((known[0].name.as_str(), known[0].partitions.len()), ("claim-a", 3));
    unprepare(&engine, &claim);
    node.assert_clean(GPU, "gone");
    node.assert_clean(SECOND, "gone");
}

#[test]
fn an_allocation_that_contradicts_itself_is_refused() {
    let node = Node::start(H100);
    let engine = node.engine();
    for devices in [[GPU, MIG_1G], [MIG_1G, GPU], [MIG_2G, MIG_1G]] {
        let error = refused(&engine, &claim("a", &devices));
        assert!(error.contains("overlap"), "{error}");
    }
    for (device, reason) in [
        ("gpu-0", "not a device name"),
        ("gpu-3b-00-0-mig-9g99gb-0", "has no partition"),
        ("gpu-3b-00-0-mig-1g10gb-7", "has no partition"),
        ("gpu-fe-00-0", "cannot be reached"),
    ] {
        let error = refused(&engine, &claim("a", &[device]));
        assert!(error.contains(reason), "{error}");
    }
    assert!(refused(&engine, &claim("a", &[])).contains("no device"));
    assert!(refused(&engine, &claim("../a", &[GPU])).contains("not the UID"));
    engine.unprepare("../a", late()).unwrap();
    engine.unprepare("never-seen", late()).unwrap();
    node.assert_clean(GPU, "nothing was begun");
}

/// Each call that changes the GPU fails once, with and without having done its work.
#[test]
fn a_failed_step_is_undone() {
    let node = Node::start(H100);
    let (engine, faulty) = node.faulty_engine();
    let claim = claim("a", &[MIG_3G, MIG_1G]);
    for function in ["set_mig_mode", "create_gpu_instance", "create_compute_instance"] {
        for fault in [Fault::Fail(Code::Other(999)), Fault::FailAfterwards(Code::Other(999))] {
            for earlier in 0..2 {
                if function == "set_mig_mode" && earlier > 0 {
                    continue;
                }
                // The first call may succeed, so that there is something to undo from an earlier device.
                (0..earlier).for_each(|_| faulty.next(function, Fault::Pass));
                faulty.next(function, fault.clone());
                let error = refused(&engine, &claim);
                assert!(faulty.is_done(), "{function} {earlier}");
                assert!(error.contains("failed"), "{error}");
                node.assert_clean(GPU, &format!("{function} {earlier}"));
            }
        }
    }
    prepare(&engine, &claim).unwrap();
    assert_eq!(node.live(GPU).len(), 2);
    unprepare(&engine, &claim);
    node.assert_clean(GPU, "the next try works");
}

/// Reading calls fail too: an error, and nothing left.
#[test]
fn a_failed_look_is_undone() {
    let node = Node::start(H100);
    let (engine, faulty) = node.faulty_engine();
    let claim = claim("a", &[MIG_1G]);
    for function in [
        "gpu_at",
        "facts",
        "mig_modes",
        "gpu_instances",
        "compute_instances",
        "driver_version",
        "gpu_instance_profiles",
    ] {
        for earlier in 0..3 {
            (0..earlier).for_each(|_| faulty.next(function, Fault::Pass));
            faulty.next(function, Fault::Fail(Code::Other(999)));
            let prepared = prepare(&engine, &claim);
            if faulty.is_done() && prepared.is_err() {
                node.assert_clean(GPU, &format!("{function} {earlier}"));
            }
            faulty.clear();
            unprepare(&engine, &claim);
            node.assert_clean(GPU, &format!("{function} {earlier}"));
        }
    }
}

#[test]
fn what_could_not_be_undone_is_journalled() {
    let node = Node::start(H100);
    let (engine, faulty) = node.faulty_engine();
    let claim = claim("a", &[MIG_1G]);
    for finish in ["prepare", "unprepare"] {
        faulty.next("create_compute_instance", Fault::Fail(Code::Other(999)));
        faulty.next("destroy_gpu_instance", Fault::Fail(Code::Other(999)));
        refused(&engine, &claim);
        assert_eq!(node.live(GPU).len(), 1, "it is still there");
        let known = &engine.prepared_claims().unwrap()[0];
        assert!(!known.complete);
        assert_eq!(known.partitions.len(), 1, "the journal knows it");
        if finish == "prepare" {
            prepare(&engine, &claim).unwrap();
            assert_eq!(node.live(GPU).len(), 1);
        }
        unprepare(&engine, &claim);
        node.assert_clean(GPU, finish);
    }
}

/// Both claims are inside their carving at the same time: neither waited for the other.
#[test]
fn claims_on_different_gpus_do_not_wait_for_each_other() {
    let node = Node::start(TWO_H100);
    let (engine, faulty) = node.faulty_engine();
    let (one, two) = (claim("one", &[MIG_1G]), claim("two", &[SECOND_1G]));
    let (first_came, first) = faulty.hold("create_gpu_instance");
    let (second_came, second) = faulty.hold("create_gpu_instance");
    std::thread::scope(|scope| {
        let workers = [&one, &two].map(|claim| scope.spawn(|| prepare(&engine, claim).map(drop)));
        let wait = late() - std::time::Instant::now();
        first_came.recv_timeout(wait).expect("one claim is carving");
        second_came.recv_timeout(wait).expect("and so is the other");
        first.send(()).unwrap();
        second.send(()).unwrap();
        workers.into_iter().for_each(|worker| worker.join().unwrap().unwrap());
    });
    unprepare(&engine, &one);
    unprepare(&engine, &two);
    node.assert_clean(GPU, "gone");
    node.assert_clean(SECOND, "gone");
}

/// Seven pods come and go on one GPU, served by two plugin processes, while MIG mode goes on and off under them.
#[test]
fn a_gpu_shared_by_two_processes_stays_consistent() {
    let node = Node::start(H100);
    let engines = [node.engine(), node.engine()];
    std::thread::scope(|scope| {
        for slice in 0..7 {
            let engines = &engines;
            scope.spawn(move || {
                let claim = claim(&format!("claim-{slice}"), &[&format!("{GPU}-mig-1g10gb-{slice}")]);
                for round in 0..4 {
                    let prepared = prepare(&engines[(slice + round) % 2], &claim).unwrap();
                    assert_eq!(prepare(&engines[(slice + round + 1) % 2], &claim).unwrap(), prepared);
                    unprepare(&engines[round % 2], &claim);
                }
            });
        }
    });
    node.assert_clean(GPU, "all are gone");
}

/// The same within one process and from another one: whoever waits in vain is told for whom.
#[test]
fn a_waiter_is_told_who_holds_the_gpu() {
    let node = Node::start(H100);
    let (engine, faulty) = node.faulty_engine();
    let other_process = node.engine();
    let (one, two) = (claim("one", &[MIG_1G]), claim("two", &[MIG_3G]));
    let (came, go) = faulty.hold("create_gpu_instance");
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| prepare(&engine, &one).map(drop));
        came.recv_timeout(late() - std::time::Instant::now()).unwrap();
        for waiter in [&engine, &other_process] {
            let error = waiter.prepare(&two, soon()).unwrap_err();
            assert!(matches!(error, PrepareError::Lock(LockError::Timeout { .. })), "{error}");
            let error = error.to_string();
            assert!(error.contains("gpu-3b-00-0 is still in use by claim team/claim-one (one) in process"), "{error}");

            let error = waiter.unprepare("one", soon()).unwrap_err().to_string();
            assert!(error.contains("claim-one is still in use by claim team/claim-one (one) in process"), "{error}");
        }
        go.send(()).unwrap();
        worker.join().unwrap().unwrap();
    });
    prepare(&other_process, &two).unwrap();
    unprepare(&engine, &one);
    unprepare(&other_process, &two);
    node.assert_clean(GPU, "gone");
}

#[test]
fn a_busy_instance_is_tried_again_and_its_users_are_named() {
    let node = Node::start(H100);
    let (engine, faulty) = node.faulty_engine();
    let claim = claim("a", &[MIG_1G, MIG_3G]);
    prepare(&engine, &claim).unwrap();
    faulty.next("destroy_compute_instance", Fault::Fail(Code::InUse));
    faulty.next("destroy_gpu_instance", Fault::Fail(Code::InUse));
    unprepare(&engine, &claim);
    assert!(faulty.is_done());
    node.assert_clean(GPU, "it was tried again");

    prepare(&engine, &claim).unwrap();
    let own = std::process::id();
    // The 1g instance was carved first; its users are seen, a process elsewhere is not one of them.
    let of = |device: &str| {
        let known = engine.prepared_claims().unwrap();
        known[0].partitions.iter().find(|partition| partition.device.to_string() == device).unwrap().gpu_instance
    };
    let small = of(MIG_1G);
    faulty.set_processes(&[
        Process { pid: own, gpu_instance: Some(small) },
        Process { pid: 1, gpu_instance: Some(of(MIG_3G)) },
    ]);
    // The last one goes first.
    faulty.next("destroy_compute_instance", Fault::Pass);
    (0..50).for_each(|_| faulty.next("destroy_compute_instance", Fault::Fail(Code::InUse)));
    let error = engine.unprepare("a", soon()).unwrap_err();
    assert!(matches!(error, UnprepareError::Release(ReleaseError::Busy { .. })), "{error}");
    let error = error.to_string();
    let name = fs::read_to_string(format!("/proc/{own}/comm")).unwrap();
    assert!(error.contains(&format!("{MIG_1G} (compute instance")), "{error}");
    assert!(error.contains(&format!("in use by process {own} ({})", name.trim())), "{error}");
    assert!(!error.contains("process 1 "), "{error}");
    assert_eq!(node.live(GPU).len(), 1, "what was not in use is gone");
    assert_eq!(node.cdi_files(), [""; 0], "no new container gets it");
    let refused = refused(&engine, &engine_node::claim("b", &[MIG_2G]));
    assert!(refused.contains("held by claim team/claim-a (a)"), "{refused}");

    faulty.clear();
    unprepare(&engine, &claim);
    node.assert_clean(GPU, "the user has ended");
}

#[test]
fn instances_of_others_are_refused_and_left_alone() {
    let node = Node::start(H100);
    let engine = node.engine();
    let gpu = node.gpu(GPU);
    node.nvml.set_mig_mode(gpu, MigMode::Enabled).unwrap();
    let profiles = Geometry::new(node.nvml.gpu_instance_profiles(gpu).unwrap());
    let offer = profiles.offer_by_label("1g10gb", 4).unwrap();
    let foreign = node.nvml.create_gpu_instance(gpu, offer.profile.id, offer.placement).unwrap();
    let live = node.live(GPU);

    for device in [MIG_1G, MIG_2G, GPU] {
        let error = refused(&engine, &claim("a", &[device]));
        assert!(error.contains(&format!("occupied by GPU instance {} at memory slices 4-4", foreign.id)), "{error}");
        engine.unprepare("a", late()).unwrap();
        assert_eq!(node.live(GPU), live, "{device}");
    }
    let beside = claim("b", &[MIG_3G]);
    prepare(&engine, &beside).unwrap();
    unprepare(&engine, &beside);
    assert_eq!(node.live(GPU), live);
    assert!(node.mig_is_on(GPU), "it is in use by someone");
}

/// Ampere: the mode changes with a reset only, so it is obeyed and never touched.
#[test]
fn a_gpu_that_needs_a_reset_keeps_its_mode() {
    let node = Node::start("[{product: a100-40gb}, {product: a100-40gb, mig: {current: true}}]");
    let watch = Crash::never();
    let engine = node.watched_engine(watch.clone());
    let (off, on) = ("gpu-3b-00-0-mig-1g5gb-0", "gpu-47-00-0-mig-1g5gb-0");
    let error = refused(&engine, &claim("a", &[off]));
    assert!(error.contains("needs MIG mode on") && error.contains("reset"), "{error}");
    let error = refused(&engine, &claim("a", &[SECOND]));
    assert!(error.contains("needs MIG mode off") && error.contains("reset"), "{error}");

    let claim = claim("b", &[GPU, on]);
    prepare(&engine, &claim).unwrap();
    assert_eq!(node.live(SECOND).len(), 1);
    unprepare(&engine, &claim);
    assert_eq!(node.live(SECOND), []);
    assert!(node.mig_is_on(SECOND));
    assert!(!watch.steps().iter().any(|step| matches!(step, Step::EnableMig | Step::DisableMig)));
}

/// A whole GPU is handed out with MIG off, even if someone left it on.
#[test]
fn mig_left_on_is_switched_off_for_a_whole_gpu() {
    let node = Node::start("[{product: h100-80gb, mig: {current: true}}]");
    let (engine, faulty) = node.faulty_engine();
    let claim = claim("a", &[GPU]);
    faulty.next("set_mig_mode", Fault::Fail(Code::InUse));
    faulty.set_processes(&[Process { pid: std::process::id(), gpu_instance: None }]);
    let error = refused(&engine, &claim);
    assert!(error.contains(&format!("in use by process {}", std::process::id())), "{error}");
    prepare(&engine, &claim).unwrap();
    assert!(!node.mig_is_on(GPU));
    unprepare(&engine, &claim);
    node.assert_clean(GPU, "gone");
}

#[test]
fn admin_access_looks_and_holds_nothing() {
    let node = Node::start(H100);
    let engine = node.engine();
    let admin = |uid: &str, device: &str| {
        let mut claim = claim(uid, &[device]);
        claim.devices[0].admin_access = true;
        claim
    };
    let error = refused(&engine, &admin("early", MIG_1G));
    assert!(error.contains("not carved"), "{error}");

    let user = claim("user", &[MIG_1G]);
    prepare(&engine, &user).unwrap();
    let live = node.live(GPU);
    for device in [MIG_1G, GPU] {
        let watcher = admin("watcher", device);
        prepare(&engine, &watcher).unwrap();
        assert_eq!(node.nodes(&watcher, device)[0], "/dev/nvidia0");
        if device == MIG_1G {
            assert_eq!(node.nodes(&watcher, device), node.nodes(&user, device));
        }
        unprepare(&engine, &watcher);
        assert_eq!(node.live(GPU), live);
    }
    let watcher = admin("watcher", GPU);
    prepare(&engine, &watcher).unwrap();
    unprepare(&engine, &user);
    let whole = claim("whole", &[GPU]);
    prepare(&engine, &whole).unwrap();
    unprepare(&engine, &whole);
    unprepare(&engine, &watcher);
    node.assert_clean(GPU, "gone");
}

/// The API gave the same claim another device: the former one goes first.
#[test]
fn a_claim_that_is_allocated_anew_gives_up_what_it_had() {
    let node = Node::start(TWO_H100);
    let engine = node.engine();
    prepare(&engine, &claim("a", &[MIG_2G])).unwrap();
    for devices in [&[MIG_1G][..], &[SECOND_1G], &[GPU], &[MIG_3G, MIG_1G]] {
        let claim = claim("a", devices);
        let prepared = prepare(&engine, &claim).unwrap();
        assert_eq!(prepared.len(), devices.len());
        let partitions = devices.iter().filter(|device| device.contains("-mig-")).count();
        assert_eq!(node.live(GPU).len() + node.live(SECOND).len(), partitions, "{devices:?}");
        assert_eq!(prepare(&engine, &claim).unwrap(), prepared);
        assert_eq!(node.cdi(&claim)["devices"].as_array().unwrap().len(), devices.len());
    }
    engine.unprepare("a", late()).unwrap();
    node.assert_clean(GPU, "gone");
    node.assert_clean(SECOND, "gone");
}

/// What a reboot or a driver reload destroys is made again, under the same names.
#[test]
fn what_a_reboot_destroyed_is_made_again() {
    let node = Node::start(H100);
    let claims = [claim("part", &[MIG_1G, MIG_3G]), claim("other", &[MIG_2G])];
    for reboot in [false, true] {
        for unprepare_first in [false, true] {
            let context = format!("reboot {reboot}, unprepare first {unprepare_first}");
            let engine = node.engine();
            let claim = &claims[0];
            let prepared = prepare(&engine, claim).unwrap();
            node.ctl(&["reload"]);
            assert_eq!(node.live(GPU), [], "{context}");
            drop(engine);
            let mut settings = node.settings();
            if reboot {
                fs::remove_dir_all(&settings.cdi).unwrap();
                settings.boot_id = "second boot".to_owned();
            }
            let nvml = Library::open(&settings.driver_root).unwrap();
            let engine = Engine::open(Arc::new(nvml), settings).unwrap();
            let error = refused(&engine, &engine_node::claim("b", &[MIG_2G]));
            assert_eq!(error.contains("held by claim"), MIG_2G.ends_with("-4"), "{error}");
            if !unprepare_first {
                assert_eq!(prepare(&engine, claim).unwrap(), prepared, "{context}");
                assert_eq!(node.live(GPU).len(), 2, "{context}");
                assert_eq!(node.nodes(claim, MIG_1G).len(), 3, "{context}");
            }
            unprepare(&engine, claim);
            node.assert_clean(GPU, &context);
        }
    }
}

/// Making it again fails half-way: what was made goes, the claim stays, and no file names an instance that is not there.
#[test]
fn a_failed_repair_keeps_the_claim() {
    let node = Node::start(H100);
    let (engine, faulty) = node.faulty_engine();
    let claim = claim("a", &[MIG_3G, MIG_1G]);
    let prepared = prepare(&engine, &claim).unwrap();
    node.ctl(&["reload"]);
    faulty.next("create_compute_instance", Fault::Pass);
    faulty.next("create_compute_instance", Fault::Fail(Code::Other(999)));
    refused(&engine, &claim);
    assert_eq!(node.live(GPU), []);
    assert!(!node.mig_is_on(GPU));
    assert_eq!(node.cdi_files(), [""; 0]);
    let error = refused(&engine, &engine_node::claim("b", &[MIG_2G]));
    assert!(error.contains("held by claim team/claim-a (a)"), "{error}");
    assert_eq!(prepare(&engine, &claim).unwrap(), prepared);
    assert_eq!(node.live(GPU).len(), 2);
    unprepare(&engine, &claim);
    node.assert_clean(GPU, "gone");
}

/// A stranger has the claim's place, and therefore its id, after the driver was reloaded: ids follow the placement. Not even
/// one of the same profile is taken for the claim's.
#[test]
fn an_id_given_out_again_is_not_the_claims() {
    let node = Node::start(H100);
    for label in ["1g10gb-me", "1g10gb"] {
        let engine = node.engine();
        let claim = claim("a", &[MIG_1G]);
        prepare(&engine, &claim).unwrap();
        let id = engine.prepared_claims().unwrap()[0].partitions[0].gpu_instance;
        node.ctl(&["reload"]);
        assert_eq!(engine.prepared_claims().unwrap()[0].partitions, [], "nothing of it is live any more");
        let nvml = Arc::new(Library::open(&node.settings().driver_root).unwrap());
        let engine = Engine::open(nvml, node.settings()).unwrap();
        let gpu = node.gpu(GPU);
        node.nvml.set_mig_mode(gpu, MigMode::Enabled).unwrap();
        let geometry = Geometry::new(node.nvml.gpu_instance_profiles(gpu).unwrap());
        let offer = geometry.offer_by_label(label, 4).unwrap();
        let stranger = node.nvml.create_gpu_instance(gpu, offer.profile.id, offer.placement).unwrap();
        assert_eq!(stranger.id, id);
        let error = refused(&engine, &claim);
        assert!(error.contains("occupied by GPU instance"), "{error}");
        unprepare(&engine, &claim);
        assert_eq!(node.nvml.gpu_instances(gpu).unwrap(), [stranger], "it lives on");
        assert_eq!((node.journal_files(), node.cdi_files()), (vec![], vec![]));
        node.nvml.destroy_gpu_instance(gpu, stranger.id).unwrap();
    }
}

#[test]
fn a_damaged_journal_loses_nothing() {
    let node = Node::start(H100);
    let claim = claim("a", &[MIG_1G, MIG_3G]);
    let prepared = prepare(&node.engine(), &claim).unwrap();
    let live = node.live(GPU);
    let path = node.settings().claims.join("a.json");
    for content in ["", "{\"version\": 1, \"cl", "{\"version\": 7, \"invented\": true}"] {
        for finish in ["prepare", "unprepare"] {
            fs::write(&path, content).unwrap();
            let engine = node.engine();
            let aside = engine.take_set_aside();
            assert_eq!(aside.len(), 1, "it is told");
            assert_eq!(aside[0].claim_uid, "a");
            assert_eq!(fs::read_to_string(&aside[0].path).unwrap(), content);
            assert_eq!(engine.take_set_aside(), [], "once");
            for device in [MIG_2G, GPU] {
                let error = refused(&engine, &engine_node::claim("b", &[device]));
                assert!(error.contains("held by claim") && error.contains("(a)"), "{error}");
            }
            assert_eq!(engine.prepared_claims().unwrap()[0].partitions.len(), 2);
            if finish == "prepare" {
                assert_eq!(prepare(&engine, &claim).unwrap(), prepared);
                assert_eq!(node.live(GPU), live, "nothing is carved twice");
                assert!(engine.prepared_claims().unwrap()[0].complete);
            } else {
                unprepare(&engine, &claim);
                node.assert_clean(GPU, "also what was set aside is gone");
                prepare(&engine, &claim).unwrap();
            }
        }
    }
}

#[test]
fn a_changed_cdi_file_is_written_again() {
    let node = Node::start(H100);
    let engine = node.engine();
    let claim = claim("a", &[MIG_1G]);
    let prepared = prepare(&engine, &claim).unwrap();
    let spec = node.cdi(&claim);
    let path = node.settings().cdi.join("k8s.gpu.nvidia.com-claim_a.json");
    fs::remove_file(&path).unwrap();
    assert_eq!(prepare(&engine, &claim).unwrap(), prepared);
    assert_eq!(node.cdi(&claim), spec);
    fs::write(&path, "{").unwrap();
    assert_eq!(prepare(&engine, &claim).unwrap(), prepared);
    assert_eq!(node.cdi(&claim), spec);
    unprepare(&engine, &claim);
    node.assert_clean(GPU, "gone");
}

/// NVML in the plugin may see a GPU whose node the host does not have (it makes nodes in its own `/dev`).
#[test]
fn a_missing_device_node_is_an_error() {
    let node = Node::start(H100);
    let host = tempfile::tempdir().unwrap();
    for part in ["usr", "proc", "run"] {
        symlink(node.root().join(part), host.path().join(part)).unwrap();
    }
    fs::create_dir(host.path().join("dev")).unwrap();
    let show = |name: &str| symlink(node.root().join("dev").join(name), host.path().join("dev").join(name)).unwrap();
    show("nvidiactl");
    let settings = Settings { driver_root: DriverRoot::at(host.path()), ..node.settings() };
    let engine = Engine::open(Arc::clone(&node.nvml), settings).unwrap();
    for device in [GPU, MIG_1G] {
        let error = refused(&engine, &claim("a", &[device]));
        assert!(error.contains("/host/driver/dev/nvidia0 does not exist"), "{error}");
        node.assert_clean(GPU, device);
    }

    // Capability nodes may be missing: the runtime makes them from the numbers. So may control nodes: they are left out.
    show("nvidia0");
    let claim = claim("a", &[MIG_1G]);
    prepare(&engine, &claim).unwrap();
    let spec = node.cdi(&claim);
    let capability = &spec["devices"][0]["containerEdits"]["deviceNodes"][1];
    assert!(capability["major"].as_u64().unwrap() > 0 && capability["minor"].as_u64().unwrap() > 0, "{capability}");
    let control = spec["containerEdits"]["deviceNodes"].as_array().unwrap();
    assert_eq!(control.len(), 1, "{control:?}");
    unprepare(&engine, &claim);
    node.assert_clean(GPU, "gone");
}

#[test]
fn a_gpu_that_is_gone_does_not_keep_a_pod() {
    let node = Node::start(H100);
    let (engine, faulty) = node.faulty_engine();
    let claim = claim("a", &[MIG_1G]);
    for code in [Code::NotFound, Code::GpuIsLost] {
        prepare(&engine, &claim).unwrap();
        faulty.next("gpu_at", Fault::Fail(code));
        faulty.next("gpu_at", Fault::Fail(code));
        unprepare(&engine, &claim);
        assert!(faulty.is_done());
        assert_eq!((node.journal_files(), node.cdi_files()), (vec![], vec![]));
        // In truth it was there all the time: put it back as a reset would.
        node.ctl(&["reload"]);
    }
}
