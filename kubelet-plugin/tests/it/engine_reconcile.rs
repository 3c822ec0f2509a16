//! The engine's part in a reconcile: what is known on the node, and the release of what is gone from the API server.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use kerf_kubelet_plugin::engine::{Released, Settings};
use kerf_nvml::{Code, Process};

use crate::engine_node::{Crash, Fault, GPU, H100, MIG_1G, MIG_3G, Node, claim, late, prepare, soon};

/// Whatever of a claim is left on the node, it is known, and its release leaves nothing.
#[test]
fn whatever_is_left_of_a_claim_is_known_and_can_be_released() {
    let node = Node::start(H100);
    let engine = node.engine();
    let Settings { claims, cdi, .. } = node.settings();
    let spec = cdi.join("k8s.gpu.nvidia.com-claim_a.json");
    let of_temporary = cdi.join(".k8s.gpu.nvidia.com-claim_a.x1y2z3.tmp");
    let journal = claims.join("a.json");
    let lose = |path| fs::remove_file(path).unwrap();
    let damage = |path| fs::write(path, "{").unwrap();
    for (what, change, name, devices) in [
        ("nothing", &(|| ()) as &dyn Fn(), "claim-a", 2),
        ("the CDI file is lost", &|| lose(&spec), "claim-a", 2),
        ("the journal is lost", &|| lose(&journal), "", 2),
        ("the journal is damaged", &|| damage(&journal), "", 2),
        ("the CDI file is damaged", &|| damage(&spec), "claim-a", 2),
    ] {
        prepare(&engine, &claim("a", &[MIG_3G, MIG_1G])).unwrap();
        change();
        let known = engine.known_claims().unwrap();
        assert_eq!(known.len(), 1, "{what}");
        assert_eq!((known[0].uid.as_str(), known[0].name.as_str()), ("a", name), "{what}");
        assert_eq!((known[0].devices.len(), known[0].earlier_boot), (devices, false), "{what}");
        assert_eq!(engine.release_left_behind("a", &|| true).unwrap(), Some(Released::Gone), "{what}");
        node.assert_clean(GPU, what);
        assert_eq!(engine.known_claims().unwrap(), []);
    }
    for file in [&claims.join("a.tmp"), &claims.join("a.damaged"), &spec, &of_temporary] {
        damage(file);
        let known = engine.known_claims().unwrap();
        assert_eq!((known.len(), known[0].uid.as_str(), known[0].devices.len()), (1, "a", 0), "{file:?}");
        assert_eq!(engine.release_left_behind("a", &|| true).unwrap(), Some(Released::Gone), "{file:?}");
        node.assert_clean(GPU, &format!("{file:?}"));
    }
}

/// A pod that was deleted by force is gone from the API server in a moment, and has its grace period on the node.
#[test]
fn a_claim_whose_gpu_is_in_use_is_left_alone() {
    let node = Node::start(H100);
    let (engine, faulty) = node.faulty_engine();
    let release = || engine.release_left_behind("a", &|| true).unwrap();
    let run = |gpu_instance| faulty.set_processes(&[Process { pid: std::process::id(), gpu_instance }]);
    prepare(&engine, &claim("a", &[GPU])).unwrap();
    run(None);
    assert_eq!(release(), None);
    assert!(!node.cdi_files().is_empty(), "nothing of it is touched");
    faulty.next("processes", Fault::Fail(Code::Unknown));
    assert_eq!(release(), None, "nobody can tell");
    faulty.set_processes(&[]);
    assert_eq!(release(), Some(Released::Gone));

    let mut watcher = claim("a", &[GPU]);
    watcher.devices[0].admin_access = true;
    prepare(&engine, &watcher).unwrap();
    run(None);
    assert_eq!(release(), Some(Released::Gone), "it is another's process");
    node.assert_clean(GPU, "released");
}

/// The API server is asked again while the claim is locked, so that who prepares it meanwhile is not cut off.
#[test]
fn a_claim_that_is_there_again_is_left_alone() {
    let node = Node::start(H100);
    let engine = node.engine();
    let claim = claim("a", &[MIG_1G]);
    let prepared = prepare(&engine, &claim).unwrap();
    let live = node.live(GPU);
    let asked = || {
        assert!(engine.prepare(&claim, soon()).is_err(), "it is locked");
        false
    };
    assert_eq!(engine.release_left_behind("a", &asked).unwrap(), None);
    assert_eq!(node.live(GPU), live);
    assert_eq!(prepare(&engine, &claim).unwrap(), prepared);

    // Somebody is at work on it: its turn comes in the next round.
    let (busy, faulty) = node.faulty_engine();
    let (came, go) = faulty.hold("gpu_instances");
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| busy.prepare(&claim, late()).map(drop));
        came.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(engine.release_left_behind("a", &|| panic!("nobody asks")).unwrap(), None);
        go.send(()).unwrap();
        worker.join().unwrap().unwrap();
    });
    assert_eq!(node.live(GPU), live);
    assert_eq!(engine.release_left_behind("a", &|| true).unwrap(), Some(Released::Gone));
    node.assert_clean(GPU, "gone");
}

/// No container of an earlier boot lives.
#[test]
fn a_claim_of_an_earlier_boot_is_told_from_others() {
    let node = Node::start(H100);
    prepare(&node.engine(), &claim("a", &[MIG_1G])).unwrap();
    node.ctl(&["reload"]);
    let settings = Settings { boot_id: "second boot".to_owned(), ..node.settings() };
    let (engine, _) = node.faulty_engine_with(settings);
    let known = engine.known_claims().unwrap();
    assert!(known[0].earlier_boot);
    assert_eq!(known[0].partitions, []);
    assert_eq!(engine.release_left_behind("a", &|| true).unwrap(), Some(Released::Gone));
    node.assert_clean(GPU, "gone");
}

/// Whatever its release had come to when it was cut off: the next process need not wait to see it gone either.
#[test]
fn a_claim_of_an_earlier_boot_is_one_until_it_is_released() {
    let node = Node::start(H100);
    let settings = || Settings { boot_id: "second boot".to_owned(), ..node.settings() };
    for moment in 0.. {
        prepare(&node.engine(), &claim("a", &[MIG_1G])).unwrap();
        node.ctl(&["reload"]);
        let (dying, _) = node.faulty_engine_watched(settings(), Crash::at(moment));
        let release = AssertUnwindSafe(|| dying.release_left_behind("a", &|| true).unwrap());
        let released = catch_unwind(release).is_ok();
        drop(dying);
        let (engine, _) = node.faulty_engine_with(settings());
        let known = engine.known_claims().unwrap();
        assert!(known.iter().all(|claim| claim.earlier_boot), "moment {moment}: {known:?}");
        assert_eq!(engine.release_left_behind("a", &|| true).unwrap(), Some(Released::Gone));
        node.assert_clean(GPU, &format!("moment {moment}"));
        if released {
            assert!(moment >= 6, "it has only {moment} moments");
            return;
        }
    }
}

/// The journal's directory is not synced, so a power cut may take the last files away or bring removed ones back. Nothing on
/// a GPU survives it.
#[test]
fn what_a_power_cut_does_to_the_journal_is_harmless() {
    let node = Node::start(H100);
    let Settings { claims, cdi, .. } = node.settings();
    let (journal, spec) = (claims.join("a.json"), cdi.join("k8s.gpu.nvidia.com-claim_a.json"));
    let (one, other) = (claim("a", &[MIG_1G]), claim("b", &[MIG_1G]));
    let rebooted = || {
        node.ctl(&["reboot"]);
        let settings = Settings { boot_id: "second boot".to_owned(), ..node.settings() };
        node.faulty_engine_with(settings).0
    };
    let prepared = prepare(&node.engine(), &one).unwrap();
    let record = fs::read(&journal).unwrap();

    // Taken away, and the CDI directory is memory.
    fs::remove_file(&journal).unwrap();
    fs::remove_file(&spec).unwrap();
    let engine = rebooted();
    let known: Vec<_> = engine.known_claims().unwrap().into_iter().map(|known| (known.uid, known.devices)).collect();
    assert_eq!(known, [("a".to_owned(), Vec::new())], "by its device metadata, which holds nothing");
    assert_eq!(engine.prepared_claims().unwrap(), []);
    engine.unprepare("a", late()).unwrap();
    assert_eq!(engine.known_claims().unwrap(), []);
    assert_eq!(prepare(&engine, &one).unwrap(), prepared, "its pod starts again");
    engine.unprepare("a", late()).unwrap();
    node.assert_clean(GPU, "taken away");

    // Brought back.
    fs::write(&journal, &record).unwrap();
    let engine = rebooted();
    assert!(prepare(&engine, &other).unwrap_err().to_string().contains("held by claim team/claim-a"));
    assert!(engine.known_claims().unwrap()[0].earlier_boot);
    assert_eq!(engine.release_left_behind("a", &|| true).unwrap(), Some(Released::Gone));
    prepare(&engine, &other).unwrap();
    engine.unprepare("b", late()).unwrap();
    node.assert_clean(GPU, "brought back");
}
