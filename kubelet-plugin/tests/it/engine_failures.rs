//! The carve engine when something fails, is lost, or was changed behind its back.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kerf_kubelet_plugin::engine::{Engine, ForeignPolicy, Released, Settings};
use kerf_mig::Geometry;
use kerf_nvml::{Code, DriverRoot, Library, MigMode};
use serde_json::{Value, json};

use crate::engine_node::{
    self, Fault, GPU, H100, MIG_1G, MIG_2G, MIG_3G, Node, claim, late, prepare, refused, unprepare, wishes,
};

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
/// one of the same profile is taken for the claim's own.
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
        if label == "1g10gb" {
            // Exactly what the claim wants: used, and left to whoever made it.
            prepare(&engine, &claim).unwrap();
        } else {
            let error = refused(&engine, &claim);
            assert!(error.contains("occupied by GPU instance"), "{error}");
        }
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
    for content in ["", "{\"version\": 1, \"cl", "{\"version\": \"7\", \"invented\": true}"] {
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

/// Of a claim that a newer plugin has prepared nothing is touched, whatever is asked for, and its devices are given to nobody.
#[test]
fn a_journal_of_a_newer_plugin_is_left_alone() {
    let node = Node::start(H100);
    let claim = claim("a", &[MIG_1G, MIG_3G]);
    prepare(&node.engine(), &claim).unwrap();
    let path = node.settings().claims.join("a.json");
    let mut newer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    newer["version"] = json!(2);
    newer["partitions"] = json!("kept elsewhere");
    fs::write(&path, newer.to_string()).unwrap();
    let (live, spec) = (node.live(GPU), node.cdi(&claim));

    let engine = Engine::open(
        Arc::clone(&node.nvml),
        Settings { wishes: wishes(ForeignPolicy::Delete), patience: Duration::ZERO, ..node.settings() },
    );
    let engine = engine.unwrap();
    let errors = [
        refused(&engine, &claim),
        engine.unprepare("a", late()).unwrap_err().to_string(),
        engine.release_left_behind("a", &|| true).unwrap_err().to_string(),
    ];
    for error in errors {
        assert!(error.contains("a.json has version 2, and this kubelet plugin reads up to 1"), "{error}");
    }
    for device in [MIG_2G, GPU] {
        let error = refused(&engine, &engine_node::claim("b", &[device]));
        assert!(error.contains("held by claim") && error.contains("(a)"), "{error}");
    }
    assert_eq!(engine.sweep_foreign(), []);
    assert_eq!(engine.retry_condemned().unwrap().left, 0);
    assert_eq!(engine.take_set_aside(), []);
    assert_eq!(serde_json::from_slice::<Value>(&fs::read(&path).unwrap()).unwrap(), newer);
    assert_eq!((node.live(GPU), node.cdi(&claim), node.journal_files()), (live, spec, vec!["a.json".to_owned()]));
}

/// What the CDI file does not tell is asked of the GPU. As long as that does not answer, nothing is taken for somebody else's
/// or made twice, and the claim holds its devices.
#[test]
fn a_damaged_journal_waits_for_the_gpu() {
    let node = Node::start(H100);
    let claim = claim("a", &[MIG_1G, MIG_3G]);
    let prepared = prepare(&node.engine(), &claim).unwrap();
    let live = node.live(GPU);
    for function in ["gpu_at", "facts", "gpu_instance_profiles"] {
        fs::write(node.settings().claims.join("a.json"), "{").unwrap();
        // A plugin that has just started, and knows nothing yet. The question comes once for each device.
        let fails = |devices| {
            let (engine, faulty) = node.faulty_engine();
            (0..devices).for_each(|_| faulty.next(function, Fault::Fail(Code::Unknown)));
            engine
        };
        let error = refused(&fails(1), &claim);
        assert!(error.contains("unknown error"), "{function}: {error}");
        let error = refused(&fails(3), &engine_node::claim("b", &[MIG_2G]));
        assert!(error.contains("held by claim") || error.contains("unknown error"), "{function}: {error}");
        assert_eq!(node.live(GPU), live, "{function}");
        let error = fails(2).unprepare("a", late()).unwrap_err().to_string();
        assert!(error.contains("unknown error"), "{function}: {error}");
        assert_eq!((node.live(GPU), node.cdi_files().len()), (live.clone(), 1), "{function}");
        let error = refused(&fails(3), &engine_node::claim("b", &[MIG_2G]));
        assert!(error.contains("held by claim") || error.contains("unknown error"), "{function}: {error}");
        assert_eq!(prepare(&node.engine(), &claim).unwrap(), prepared, "{function}");
        assert_eq!(node.live(GPU), live, "{function}");
    }
    unprepare(&node.engine(), &claim);
    node.assert_clean(GPU, "gone");
}

/// The kernel's files say which instance the CDI file means: the table, else those of the instances. Where neither can be
/// read, nobody takes an instance for another.
#[test]
fn a_damaged_journal_and_no_file_of_the_kernel_lose_nothing() {
    let node = Node::start(H100);
    let claim = claim("a", &[MIG_1G, MIG_3G]);
    let prepared = prepare(&node.engine(), &claim).unwrap();
    let live = node.live(GPU);
    let driver = node.root().join("proc/driver");
    let files = [driver.join("nvidia-caps/mig-minors"), driver.join("nvidia/capabilities/gpu0/mig")];
    let hide = |file: &Path| fs::rename(file, file.with_extension("away")).unwrap();
    let show = |file: &Path| fs::rename(file.with_extension("away"), file).unwrap();
    let damage = || fs::write(node.settings().claims.join("a.json"), "{").unwrap();
    let impatient = || node.faulty_engine_with(Settings { patience: Duration::ZERO, ..node.settings() }).0;

    hide(&files[0]);
    damage();
    assert_eq!(prepare(&node.engine(), &claim).unwrap(), prepared);
    assert_eq!(node.live(GPU), live);
    damage();
    unprepare(&node.engine(), &claim);
    node.assert_clean(GPU, "by the files of the instances");
    prepare(&node.engine(), &claim).unwrap();

    hide(&files[1]);
    for _ in 0..2 {
        damage();
        let engine = node.engine();
        for error in [refused(&engine, &claim), engine.unprepare("a", late()).unwrap_err().to_string()] {
            assert!(error.contains("nobody can tell") && error.contains("check that"), "{error}");
        }
        let error = refused(&engine, &engine_node::claim("b", &[GPU]));
        assert!(error.contains("held by claim"), "{error}");
        assert_eq!(node.live(GPU), live);
    }
    let engine = impatient();
    let Released::Condemned(condemned) = engine.unprepare("a", late()).unwrap() else { panic!("it is released") };
    assert_eq!(condemned.claim.unplaced.len(), 2);
    for device in [MIG_2G, GPU] {
        let error = refused(&engine, &engine_node::claim("b", &[device]));
        assert!(error.contains("nobody can tell what") && error.contains("which has ended"), "{error}");
    }
    assert_eq!((engine.retry_condemned().unwrap().left, node.live(GPU)), (1, live));
    files.iter().for_each(|file| show(file));
    assert_eq!(engine.retry_condemned().unwrap().removed.len(), 1);
    node.assert_clean(GPU, "the files are back");

    prepare(&engine, &claim).unwrap();
    node.ctl(&["reload"]);
    let engine = node.engine_anew();
    damage();
    files.iter().for_each(|file| hide(file));
    unprepare(&engine, &claim);
    files.iter().for_each(|file| show(file));
    node.assert_clean(GPU, "nothing was in the place");
}

/// The CDI file of a claim that only looks names an instance as its user's does, and is no witness for its own.
#[test]
fn a_damaged_journal_of_admin_access_harms_nobody() {
    let node = Node::start(H100);
    let engine = node.engine();
    let user = claim("user", &[MIG_1G]);
    let mut watcher = claim("watcher", &[MIG_1G]);
    watcher.devices[0].admin_access = true;
    let prepared = prepare(&engine, &user).unwrap();
    let watched = prepare(&engine, &watcher).unwrap();
    let live = node.live(GPU);
    for finish in ["prepare", "unprepare"] {
        fs::write(node.settings().claims.join("watcher.json"), "{").unwrap();
        assert_eq!(prepare(&engine, &user).unwrap(), prepared, "it holds nothing");
        if finish == "prepare" {
            assert_eq!(prepare(&engine, &watcher).unwrap(), watched);
        } else {
            unprepare(&engine, &watcher);
        }
        assert_eq!(node.live(GPU), live, "{finish}");
    }
    unprepare(&engine, &user);
    node.assert_clean(GPU, "gone");
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
        assert!(error.contains(&format!("{}/dev/nvidia0 does not exist", host.path().display())), "{error}");
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
