//! Releases that make no progress: busy instances and failing GPUs, and how the pod is let go all the same.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kerf_kubelet_plugin::engine::{
    Condemned, Engine, LockError, ReleaseError, Released, Retried, Settings, UnprepareError,
};
use kerf_nvml::{Code, Process};
use kerf_nvml_sim::client::Client;
use kerf_nvml_sim::fault::CallFault;

use crate::engine_node::{
    self, Fault, GPU, H100, MIG_1G, MIG_2G, MIG_3G, Node, SECOND, SECOND_1G, TWO_H100, claim, late, prepare, refused,
    soon, unprepare,
};

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

fn condemned(released: Released) -> Condemned {
    match released {
        Released::Condemned(condemned) => condemned,
        Released::Gone => panic!("nothing is left of it"),
    }
}

/// A call to a sick GPU may never return, and the locks of who waits for it stay. Nothing can be written of that claim then.
#[test]
fn a_gpu_that_hangs_lets_the_pods_go() {
    let node = Node::start(TWO_H100);
    let patience = Duration::from_millis(300);
    let (engine, faulty) = node.faulty_engine_with(Settings { patience, ..node.settings() });
    for (uid, device) in [("hangs", MIG_1G), ("beside", MIG_3G), ("elsewhere", SECOND_1G)] {
        prepare(&engine, &claim(uid, &[device])).unwrap();
    }
    let (has_come, let_go) = faulty.hold("destroy_gpu_instance");
    let moment = || Instant::now() + patience / 10;
    std::thread::scope(|scope| {
        let hanging = scope.spawn(|| engine.unprepare("hangs", late()));
        has_come.recv().unwrap();
        for uid in ["hangs", "beside"] {
            let first = engine.unprepare(uid, moment()).unwrap_err();
            assert!(matches!(first, UnprepareError::Lock(LockError::Timeout { .. })), "{uid}: {first}");
        }
        unprepare(&engine, &claim("elsewhere", &[SECOND_1G]));
        for uid in ["hangs", "beside"] {
            let ended = loop {
                match engine.unprepare(uid, moment()) {
                    Ok(released) => break condemned(released),
                    Err(error) => assert!(matches!(error, UnprepareError::Lock(_)), "{uid}: {error}"),
                }
            };
            assert_eq!(ended.claim.name, format!("claim-{uid}"));
            assert!(ended.why.contains("the release of claim") && ended.why.contains("hangs"), "{}", ended.why);
        }
        let error = engine.prepare(&claim("next", &[MIG_2G]), moment()).unwrap_err().to_string();
        assert!(error.contains("hangs"), "its place is held: {error}");
        let_go.send(()).unwrap();
        assert_eq!(hanging.join().unwrap().unwrap(), Released::Gone, "it goes on where it was");
    });
    assert_eq!(engine.release_left_behind("beside", &|| true).unwrap(), Some(Released::Gone));
    node.assert_clean(GPU, "released");
}

/// A driver that does not answer is opened anew for each call, and what holds the lock may be a process of before.
#[test]
fn the_wait_for_a_lock_outlasts_a_session() {
    let node = Node::start(H100);
    let patience = Duration::from_millis(300);
    let settings = Settings { patience, ..node.settings() };
    let (engine, faulty) = node.faulty_engine();
    prepare(&engine, &claim("a", &[MIG_1G])).unwrap();
    let (has_come, let_go) = faulty.hold("destroy_gpu_instance");
    std::thread::scope(|scope| {
        let hanging = scope.spawn(|| engine.unprepare("a", late()));
        has_come.recv().unwrap();
        let begun = Instant::now();
        let ended = loop {
            let anew = Engine::open(Arc::clone(&node.nvml), settings.clone()).unwrap();
            match anew.unprepare("a", Instant::now() + patience / 10) {
                Ok(released) => break condemned(released),
                Err(error) => assert!(begun.elapsed() < patience * 100, "{error}"),
            }
        };
        assert!(begun.elapsed() >= patience);
        assert!(ended.why.contains("the release of claim"), "{}", ended.why);
        let_go.send(()).unwrap();
        assert_eq!(hanging.join().unwrap().unwrap(), Released::Gone);
    });
    node.assert_clean(GPU, "released");
}

/// A claim may be prepared anew after a release that got no lock, as one that two pods share.
#[test]
fn a_claim_that_is_wanted_again_has_not_waited() {
    let node = Node::start(H100);
    let patience = Duration::from_secs(2);
    let (engine, faulty) = node.faulty_engine_with(Settings { patience, ..node.settings() });
    let (shared, beside) = (claim("shared", &[MIG_1G]), claim("beside", &[MIG_3G]));
    prepare(&engine, &shared).unwrap();
    prepare(&engine, &beside).unwrap();
    let try_to_release = |while_tried: &dyn Fn()| {
        let (has_come, let_go) = faulty.hold("compute_instances");
        std::thread::scope(|scope| {
            let hanging = scope.spawn(|| prepare(&engine, &beside).map(drop));
            has_come.recv().unwrap();
            while_tried();
            let error = engine.unprepare("shared", Instant::now() + patience / 100).unwrap_err();
            assert!(matches!(error, UnprepareError::Lock(LockError::Timeout { .. })), "{error}");
            let_go.send(()).unwrap();
            hanging.join().unwrap().unwrap();
        });
    };
    let begun = Instant::now();
    try_to_release(&|| {});
    prepare(&engine, &shared).unwrap();
    try_to_release(&|| {
        while begun.elapsed() < patience {
            std::thread::yield_now();
        }
    });
    unprepare(&engine, &shared);
    unprepare(&engine, &beside);
    node.assert_clean(GPU, "released");
}

/// The whole life of a condemned claim, twice: by the background, and by a kubelet that asks again.
#[test]
fn a_claim_that_stays_busy_is_condemned_and_removed_later() {
    let node = Node::start(H100);
    let settings = || Settings { patience: Duration::ZERO, ..node.settings() };
    let (engine, faulty) = node.faulty_engine_with(settings());
    for by_background in [true, false] {
        let claim = claim("a", &[MIG_1G, MIG_3G]);
        prepare(&engine, &claim).unwrap();
        // The last one goes first, and goes.
        faulty.next("destroy_compute_instance", Fault::Pass);
        faulty.next("destroy_gpu_instance", Fault::Pass);
        faulty.occupy();
        let Condemned { claim: ended, why } = condemned(engine.unprepare("a", late()).unwrap());
        assert!(why.contains(&format!("{MIG_1G} (compute instance")) && why.contains("in use by"), "{why}");
        assert_eq!((ended.name.as_str(), ended.condemned, ended.complete), ("claim-a", true, false));
        let left: Vec<_> = ended.partitions.iter().map(|partition| partition.device.to_string()).collect();
        assert_eq!(left, [MIG_1G], "what was not in use is gone");
        assert_eq!(node.cdi_files(), [""; 0], "no new container gets it");

        // What overlaps is held, by whom and until when is said; the rest is free.
        faulty.set_processes(&[Process {
            pid: std::process::id(),
            gpu_instance: Some(ended.partitions[0].gpu_instance),
        }]);
        for device in [MIG_1G, MIG_2G, GPU] {
            let error = refused(&engine, &engine_node::claim("b", &[device]));
            assert!(error.contains(&format!("{MIG_1G} of claim team/claim-a (a), which has ended")), "{error}");
            assert!(error.contains(&format!("in use by process {} (", std::process::id())), "{error}");
        }
        faulty.clear();
        let beside = engine_node::claim("b", &[MIG_3G]);
        prepare(&engine, &beside).unwrap();
        unprepare(&engine, &beside);
        faulty.occupy();

        // Another process goes on as well.
        assert_eq!(engine.retry_condemned().unwrap(), Retried { removed: vec![], left: 1 });
        condemned(engine.unprepare("a", late()).unwrap());
        let other = Engine::open(node.nvml.clone(), node.settings()).unwrap();
        assert!(other.prepared_claims().unwrap()[0].condemned);

        faulty.clear();
        if by_background {
            let retried = engine.retry_condemned().unwrap();
            assert_eq!((retried.removed.len(), retried.left), (1, 0));
            assert_eq!(retried.removed[0].uid, "a");
        } else {
            assert_eq!(engine.unprepare("a", late()).unwrap(), Released::Gone);
        }
        node.assert_clean(GPU, "it is gone");
        assert_eq!(engine.retry_condemned().unwrap(), Retried::default());
    }
}

/// The kubelet wants the claim again: it has what is there, and is not condemned any more.
#[test]
fn a_condemned_claim_can_be_prepared_again() {
    let node = Node::start(H100);
    let (engine, faulty) = node.faulty_engine_with(Settings { patience: Duration::ZERO, ..node.settings() });
    let claim = claim("a", &[MIG_1G]);
    let prepared = prepare(&engine, &claim).unwrap();
    let live = node.live(GPU);
    faulty.occupy();
    condemned(engine.unprepare("a", late()).unwrap());
    assert_eq!(prepare(&engine, &claim).unwrap(), prepared);
    assert_eq!(node.live(GPU), live);
    let known = &engine.prepared_claims().unwrap()[0];
    assert_eq!((known.complete, known.condemned), (true, false));
    faulty.clear();
    assert_eq!(engine.retry_condemned().unwrap(), Retried::default(), "it is left alone");
    assert_eq!(node.live(GPU), live);
    unprepare(&engine, &claim);
    node.assert_clean(GPU, "gone");
}

/// A GPU that fails to destroy would keep a pod as a busy one does.
#[test]
fn a_gpu_that_fails_lets_the_pod_go() {
    let node = Node::start(H100);
    let (engine, faulty) = node.faulty_engine_with(Settings { patience: Duration::ZERO, ..node.settings() });
    let claim = claim("a", &[MIG_1G]);
    for function in ["gpu_at", "gpu_instances", "destroy_gpu_instance"] {
        prepare(&engine, &claim).unwrap();
        faulty.next(function, Fault::Fail(Code::Unknown));
        let Condemned { why, .. } = condemned(engine.unprepare("a", late()).unwrap());
        assert!(why.contains("unknown error") && why.contains("kernel log"), "{function}: {why}");
        let error = refused(&engine, &engine_node::claim("b", &[MIG_2G]));
        assert!(error.contains("which has ended"), "{function}: {error}");
        assert_eq!(engine.retry_condemned().unwrap().removed.len(), 1);
        node.assert_clean(GPU, function);
    }
}

/// What happens to a claim that was condemned without its journal, on a GPU that does not answer.
#[derive(Clone, Copy, Debug)]
enum Then {
    GpuIsBack,
    GpuIsBackAndCdiFileIsLost,
    KubeletAsksAgain,
    KubeletWantsIt,
    Reload,
}

/// Nobody knows what a claim has on a GPU that does not answer once its journal is lost. Its pod ends all the same, what it
/// has elsewhere goes at once, and the rest when the GPU is back.
#[test]
fn a_lost_journal_on_a_gpu_that_fails_lets_the_pod_go() {
    use Then::{GpuIsBack, GpuIsBackAndCdiFileIsLost, KubeletAsksAgain, KubeletWantsIt, Reload};
    let node = Node::start(TWO_H100);
    let driver = Client::new(node.root());
    let claim = claim("a", &[MIG_1G, MIG_3G, SECOND_1G]);
    let impatient = || node.faulty_engine_with(Settings { patience: Duration::ZERO, ..node.settings() }).0;
    for (function, then) in [
        ("nvmlDeviceGetMinorNumber", GpuIsBack),
        ("nvmlDeviceGetMinorNumber", GpuIsBackAndCdiFileIsLost),
        ("nvmlDeviceGetGpuInstanceProfileInfo", GpuIsBack),
        ("nvmlDeviceGetGpuInstanceProfileInfo", KubeletAsksAgain),
        ("nvmlDeviceGetMinorNumber", KubeletWantsIt),
        ("nvmlDeviceGetMinorNumber", Reload),
    ] {
        let context = format!("{function}, {then:?}");
        let prepared = prepare(&node.engine(), &claim).unwrap();
        let live = node.live(GPU);
        fs::write(node.settings().claims.join("a.json"), "{").unwrap();
        driver.arm(CallFault::new(function).on(0).always().fails(kerf_nvml_sim::code::Code::UNKNOWN)).unwrap();

        let error = node.engine().unprepare("a", late()).unwrap_err().to_string();
        assert!(error.contains("unknown error") && error.contains("kernel log"), "{context}: {error}");
        assert_eq!((node.live(GPU), node.live(SECOND)), (live.clone(), vec![]), "{context}");
        let Condemned { claim: ended, why } = condemned(impatient().unprepare("a", late()).unwrap());
        assert!(why.contains("unknown error"), "{context}: {why}");
        assert_eq!((ended.condemned, ended.unplaced.len()), (true, 2), "{context}");

        // Whatever is there is held, by a process that knows nothing else as well. The other GPU is free.
        let engine = node.engine();
        for device in [MIG_2G, GPU] {
            let error = refused(&engine, &engine_node::claim("b", &[device]));
            assert!(error.contains("which has ended") || error.contains("unknown error"), "{context}: {error}");
        }
        let beside = engine_node::claim("b", &[SECOND_1G]);
        prepare(&engine, &beside).unwrap();
        unprepare(&engine, &beside);
        assert_eq!(engine.retry_condemned().unwrap(), Retried { removed: vec![], left: 1 }, "{context}");
        assert_eq!(node.live(GPU), live, "{context}");

        if let Reload = then {
            // Nothing survives it, so nothing has to be asked.
            node.ctl(&["reload"]);
            assert_eq!(node.engine_anew().retry_condemned().unwrap().removed.len(), 1);
        }
        driver.clear_all().unwrap();
        match then {
            GpuIsBack => assert_eq!(engine.retry_condemned().unwrap().removed.len(), 1, "{context}"),
            GpuIsBackAndCdiFileIsLost => {
                fs::remove_file(node.settings().cdi.join("k8s.gpu.nvidia.com-claim_a.json")).unwrap();
                assert_eq!(engine.retry_condemned().unwrap().removed.len(), 1, "{context}");
            }
            KubeletAsksAgain => assert_eq!(engine.unprepare("a", late()).unwrap(), Released::Gone, "{context}"),
            KubeletWantsIt => {
                assert_eq!(prepare(&engine, &claim).unwrap(), prepared, "{context}");
                assert_eq!(node.live(GPU), live, "{context}");
                assert_eq!(engine.retry_condemned().unwrap(), Retried::default(), "{context}");
                unprepare(&engine, &claim);
            }
            Reload => {}
        }
        node.assert_clean(GPU, &context);
        node.assert_clean(SECOND, &context);
    }
}

/// A reboot takes what is left along.
#[test]
fn a_condemned_claim_ends_with_its_epoch() {
    let node = Node::start(H100);
    let (engine, faulty) = node.faulty_engine_with(Settings { patience: Duration::ZERO, ..node.settings() });
    prepare(&engine, &claim("a", &[MIG_1G])).unwrap();
    faulty.occupy();
    condemned(engine.unprepare("a", late()).unwrap());
    node.ctl(&["reload"]);
    let engine = node.engine_anew();
    assert_eq!(engine.retry_condemned().unwrap().removed.len(), 1);
    node.assert_clean(GPU, "gone");
}
