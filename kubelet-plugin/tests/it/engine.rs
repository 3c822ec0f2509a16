//! The carve engine over the real NVML code and a simulated node: the way of claims.

use std::collections::BTreeSet;
use std::fs::File;
use std::time::{Duration, SystemTime};

use kerf_kubelet_plugin::engine::{DeviceName, Engine, LockError, PrepareError, PreparedDevice};
use kerf_mig::{Geometry, Placement};

use crate::engine_node::{
    Crash, GPU, H100, MIG_1G, MIG_2G, MIG_3G, Node, SECOND, SECOND_1G, TWO_H100, address, claim, late, prepare,
    refused, soon, unprepare,
};

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
        let (card, render) = (format!("/dev/dri/card{minor}"), format!("/dev/dri/renderD{}", 128 + minor));
        assert_eq!(node.nodes(&claim, gpu), [format!("/dev/nvidia{minor}"), card, render]);

        let spec = node.cdi(&claim);
        let device_node = &spec["devices"][0]["containerEdits"]["deviceNodes"][0];
        assert_eq!(device_node["hostPath"], format!("/driver/dev/nvidia{minor}"));
        assert_eq!((&device_node["major"], &device_node["minor"]), (&195.into(), &minor.into()));
        let common = &spec["containerEdits"];
        let mounts: BTreeSet<_> = common["mounts"]
            .as_array()
            .unwrap()
            .iter()
            .map(|mount| (mount["hostPath"].as_str().unwrap(), mount["containerPath"].as_str().unwrap()))
            .collect();
        let lib = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
        let library = format!("/driver{lib}/libnvidia-ml.so.535.261.03");
        for expected in [
            (library.as_str(), format!("{lib}/libnvidia-ml.so.1")),
            (library.as_str(), format!("{lib}/libnvidia-ml.so.535.261.03")),
            ("/driver/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi".to_owned()),
            ("/driver/run/nvidia-persistenced/socket", "/run/nvidia-persistenced/socket".to_owned()),
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

/// What was read at the start serves the first who asks, unless it is not true any more.
#[test]
fn what_another_process_does_after_the_start_is_seen() {
    let node = Node::start(H100);
    let claims = [claim("a", &[MIG_1G]), claim("b", &[MIG_3G])];
    let other_process = node.engine();
    let started_long_after_the_last_change = || {
        let hour_ago = SystemTime::now() - Duration::from_secs(3600);
        File::open(node.settings().claims).unwrap().set_modified(hour_ago).unwrap();
        node.engine()
    };
    let known = |engine: &Engine| {
        let mut uids: Vec<_> = engine.prepared_claims().unwrap().into_iter().map(|claim| claim.uid).collect();
        uids.sort();
        uids
    };
    prepare(&other_process, &claims[0]).unwrap();
    assert_eq!(known(&started_long_after_the_last_change()), ["a"]);
    let engine = started_long_after_the_last_change();
    prepare(&other_process, &claims[1]).unwrap();
    assert_eq!(known(&engine), ["a", "b"]);
    let engine = started_long_after_the_last_change();
    unprepare(&other_process, &claims[0]);
    assert_eq!(known(&engine), ["b"]);
    let engine = started_long_after_the_last_change();
    unprepare(&engine, &claims[1]);
    assert_eq!(known(&engine), [""; 0]);
    node.assert_clean(GPU, "gone");
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
