//! Claims of the DRA driver that was on the node before: held until they are released, and nothing of theirs is destroyed.

use std::fs;
use std::path::PathBuf;

use kerf_kubelet_plugin::engine::{Engine, ForeignPolicy, Released, Settings, Wish, Wishes};
use kerf_nvml::{Code, GpuInstance, MigMode, Process};
use serde_json::{Value, json};

use crate::engine_node::{
    Fault, GPU, MIG_1G, MIG_2G, MIG_3G, Node, SECOND, SECOND_1G, TWO_H100, address, claim, late, prepare, refused,
    unprepare, wishes,
};

/// What `make_foreign(MIG_1G, 1)` makes, as that driver calls it.
const NAME: &str = "gpu-0-mig-1g10gb-19-4";

/// A node that the former driver has left.
struct Left {
    node: Node,
    checkpoint: PathBuf,
}

impl Left {
    fn new() -> Left {
        let node = Node::start(TWO_H100);
        let checkpoint = node.settings().claims.with_file_name("checkpoint.json");
        Left { node, checkpoint }
    }

    fn uuid(&self, gpu: &str) -> String {
        self.node.nvml.facts(self.node.gpu(gpu)).unwrap().uuid
    }

    /// Its checkpoint says this of these claims.
    fn write(&self, claims: &Value) {
        let file = json!({"checksum": 1, "v1": {}, "v2": {
            "checksum": 2, "preparedClaims": claims, "nodeBootID": self.node.settings().boot_id,
        }});
        fs::write(&self.checkpoint, file.to_string()).unwrap();
    }

    /// It has prepared this device for a claim, and written the CDI file.
    fn prepared(&self, uid: &str, name: &str, mut device: Value) -> Value {
        let cdi = self.spec(uid);
        fs::create_dir_all(cdi.parent().unwrap()).unwrap();
        fs::write(cdi, "cdiVersion: 0.5.0\n").unwrap();
        for kind in ["gpu", "mig"] {
            if device[kind].is_object() {
                device[kind]["device"] =
                    json!({"Requests": ["r"], "PoolName": "node-1", "DeviceName": name, "CDIDeviceIDs": []});
            }
        }
        let result = json!({"request": "r", "driver": "gpu.nvidia.com", "pool": "node-1", "device": name});
        json!({
            "checkpointState": "PrepareCompleted",
            "status": {"allocation": {"devices": {"results": [result]}}},
            "preparedDevices": [{"devices": [device], "configState": {"mpsControlDaemonID": ""}}],
        })
    }

    fn whole(&self, uid: &str, gpu: &str) -> Value {
        self.prepared(uid, "gpu-0", json!({"gpu": {"info": {"uuid": self.uuid(gpu)}}, "mig": null}))
    }

    fn instance(&self, uid: &str, instance: &GpuInstance) -> Value {
        let concrete = json!({
            "parentMinor": 0, "giId": instance.id, "ciId": 0, "migUUID": "MIG-1", "parentUUID": self.uuid(GPU),
        });
        self.prepared(uid, NAME, json!({"gpu": null, "mig": {"concrete": concrete}}))
    }

    fn spec(&self, uid: &str) -> PathBuf {
        self.node.settings().cdi.join(format!("k8s.gpu.nvidia.com-claim_{uid}.yaml"))
    }

    fn released(&self) -> Vec<String> {
        let released = fs::read_dir(self.checkpoint.with_file_name("released")).into_iter().flatten();
        released.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn engine_under(&self, foreign: ForeignPolicy) -> Engine {
        self.node.faulty_engine_with(Settings { wishes: wishes(foreign), ..self.node.settings() }).0
    }
}

fn release(engine: &Engine, uid: &str) {
    assert_eq!(engine.unprepare(uid, late()).unwrap(), Released::Gone);
}

/// The very file that v0.5.0 has written on a node like this one.
#[test]
fn a_genuine_checkpoint_is_understood() {
    let left = Left::new();
    let file = include_str!("../former/checkpoint-0.5.0.json");
    let mut file: Value = serde_json::from_str(file).unwrap();
    file["v2"]["nodeBootID"] = left.node.settings().boot_id.into();
    fs::write(&left.checkpoint, file.to_string()).unwrap();
    assert_eq!(left.uuid(GPU), "GPU-03f5746e-d728-51ca-b05f-ee0127ce0ed8", "the GPUs are those of the file");
    let engine = left.node.engine();
    for device in [GPU, MIG_1G, SECOND, SECOND_1G] {
        let error = refused(&engine, &claim("new", &[device]));
        assert!(error.contains("which NVIDIA's DRA driver has prepared"), "{error}");
    }
    prepare(&engine, &claim("new", &["gpu-47-00-0-mig-1g10gb-1"])).unwrap();
}

#[test]
fn a_whole_gpu_is_held_until_the_kubelet_releases_it() {
    let left = Left::new();
    left.write(&json!({"old": left.whole("old", GPU)}));
    let before = fs::read(&left.checkpoint).unwrap();
    let engine = left.node.engine();
    for device in [GPU, MIG_1G, MIG_3G] {
        let error = refused(&engine, &claim("new", &[device]));
        assert!(
            error.contains("held by claim old, which NVIDIA's DRA driver has prepared, through gpu-3b-00-0"),
            "{error}"
        );
    }
    prepare(&engine, &claim("beside", &[SECOND_1G])).unwrap();
    release(&engine, "beside");
    let known = engine.prepared_claims().unwrap();
    assert_eq!((known.len(), known[0].former.len(), known[0].former[0].placement), (1, 1, None));

    release(&engine, "old");
    assert!(!left.spec("old").exists() && left.released() == ["old"]);
    release(&engine, "old");
    prepare(&engine, &claim("new", &[GPU])).unwrap();
    assert_eq!(left.node.engine().prepared_claims().unwrap().len(), 1, "the next plugin knows it, too");
    release(&engine, "new");
    assert_eq!(fs::read(&left.checkpoint).unwrap(), before, "it is not ours to write");
    assert_eq!(engine.prepared_claims().unwrap(), []);
}

/// While the claim lasts its instance stays under every policy; afterwards it is one that no claim explains.
#[test]
fn an_instance_is_held_and_never_destroyed_for_its_claim() {
    for policy in [ForeignPolicy::Keep, ForeignPolicy::Adopt, ForeignPolicy::Delete] {
        let left = Left::new();
        let instance = left.node.make_foreign(MIG_1G, 1);
        left.write(&json!({"old": left.instance("old", &instance)}));
        let engine = left.engine_under(policy);
        let live = left.node.live(GPU);
        for device in [GPU, MIG_1G, MIG_2G] {
            let error = refused(&engine, &claim("new", &[device]));
            assert!(error.contains("held by claim old, which NVIDIA's DRA driver has prepared, through"), "{error}");
            assert!(error.contains(MIG_1G), "{error}");
        }
        let beside = claim("beside", &[MIG_3G]);
        prepare(&engine, &beside).unwrap();
        unprepare(&engine, &beside);
        assert_eq!(engine.sweep_foreign(), []);
        assert!(left.node.live(GPU) == live && left.node.mig_is_on(GPU), "{policy:?}");

        release(&engine, "old");
        assert_eq!(left.node.live(GPU), live, "{policy:?}: the release touches no GPU");
        assert_eq!(engine.sweep_foreign().len(), usize::from(policy == ForeignPolicy::Delete));
        prepare(&engine, &claim("new", &[if policy == ForeignPolicy::Keep { MIG_1G } else { GPU }])).unwrap();
    }
}

/// Nobody knows how far it had got: the place is held, and what may be in it is left alone.
#[test]
fn a_claim_that_was_cut_off_holds_its_place() {
    let left = Left::new();
    let results = json!([
        {"request": "r", "driver": "gpu.nvidia.com", "pool": "node-1", "device": NAME},
        {"request": "s", "driver": "gpu.nvidia.com", "pool": "node-1", "device": "gpu-1"},
    ]);
    left.write(&json!({"old": {
        "checkpointState": "PrepareStarted", "name": "mine", "namespace": "team",
        "status": {"allocation": {"devices": {"results": results}}},
    }}));
    let engine = left.engine_under(ForeignPolicy::Delete);
    for device in [MIG_1G, MIG_2G, SECOND] {
        let error = refused(&engine, &claim("new", &[device]));
        assert!(error.contains("held by claim team/mine (old), which NVIDIA's DRA driver has prepared"), "{error}");
    }
    left.node.make_foreign(MIG_1G, 0);
    assert_eq!(engine.sweep_foreign(), []);
    assert!(!engine.prepared_claims().unwrap()[0].complete);
    release(&engine, "old");
    assert_eq!(engine.sweep_foreign().len(), 1);
    prepare(&engine, &claim("new", &[SECOND])).unwrap();
}

/// The release removes the CDI file and notes that it did: between the two the claim is held.
#[test]
fn a_release_that_was_cut_off_is_done_again() {
    let left = Left::new();
    left.write(&json!({"old": left.whole("old", GPU)}));
    fs::remove_file(left.spec("old")).unwrap();
    let engine = left.node.engine();
    refused(&engine, &claim("new", &[GPU]));
    release(&engine, "old");
    prepare(&engine, &claim("new", &[GPU])).unwrap();
    release(&engine, "new");

    // That driver was back, and has prepared the claim anew.
    left.write(&json!({"old": left.whole("old", GPU)}));
    refused(&engine, &claim("new", &[GPU]));
    release(&engine, "old");

    // It has forgotten the claim: nothing has to be known of it any more.
    left.write(&json!({}));
    drop(left.node.engine());
    assert!(!left.checkpoint.with_file_name("released").exists());
}

/// A claim that outlives its pods may be prepared by both, one after the other.
#[test]
fn a_claim_that_is_allocated_anew_is_ours() {
    let left = Left::new();
    left.write(&json!({"shared": left.whole("shared", GPU)}));
    let engine = left.node.engine();
    let shared = claim("shared", &[SECOND]);
    prepare(&engine, &shared).unwrap();
    unprepare(&engine, &shared);
    assert_eq!(engine.prepared_claims().unwrap(), [], "and not that driver's again");
    assert!(!left.spec("shared").exists());
}

#[test]
fn what_cannot_be_read_keeps_everything_back() {
    let left = Left::new();
    let engine = left.engine_under(ForeignPolicy::Delete);
    let own = claim("own", &[SECOND_1G]);
    let prepared = prepare(&engine, &own).unwrap();
    left.node.make_foreign(MIG_1G, 0);
    fs::write(&left.checkpoint, "{\"checksum\":1,\"v2\":{\"prepar").unwrap();
    for device in [GPU, SECOND, MIG_3G] {
        let error = refused(&engine, &claim("new", &[device]));
        assert!(error.contains("checkpoint.json of NVIDIA's DRA driver cannot be read (EOF while parsing"), "{error}");
    }
    assert_eq!(engine.sweep_foreign(), []);
    assert!(engine.former_doubt().is_some_and(|doubt| doubt.contains("remove the file")));
    assert_eq!(prepare(&engine, &own).unwrap(), prepared, "what is ours is ours");
    unprepare(&engine, &own);
    // A pod of that driver can end.
    fs::write(left.spec("old"), "").unwrap();
    release(&engine, "old");
    assert_eq!(left.released(), ["old"]);

    fs::remove_file(&left.checkpoint).unwrap();
    assert_eq!(engine.former_doubt(), None);
    assert_eq!(engine.sweep_foreign().len(), 1);
    prepare(&engine, &claim("new", &[GPU])).unwrap();
}

#[test]
fn nothing_is_given_out_while_it_runs() {
    let left = Left::new();
    let settings = Settings { wishes: wishes(ForeignPolicy::Delete), ..left.node.settings() };
    let former = settings.former.clone();
    let engine = left.node.faulty_engine_with(settings).0;
    left.node.make_foreign(MIG_1G, 0);
    former.set_runs(true);
    let error = refused(&engine, &claim("new", &[SECOND]));
    assert!(error.contains("NVIDIA's DRA driver runs on this node"), "{error}");
    assert_eq!(engine.sweep_foreign(), []);
    former.set_runs(false);
    assert_eq!(engine.sweep_foreign().len(), 1);
    prepare(&engine, &claim("new", &[SECOND])).unwrap();
}

#[test]
fn a_reboot_ends_its_claims() {
    let left = Left::new();
    left.write(&json!({"old": left.whole("old", GPU), "other": left.whole("other", SECOND)}));
    release(&left.node.engine(), "old");
    let settings = Settings { boot_id: "second boot".to_owned(), ..left.node.settings() };
    let engine = left.node.faulty_engine_with(settings).0;
    assert_eq!((engine.prepared_claims().unwrap(), left.released()), (vec![], vec![]));
    prepare(&engine, &claim("new", &[GPU, SECOND])).unwrap();
}

/// MIG mode of a GPU that it has given out whole is nobody's to switch.
#[test]
fn the_mode_of_a_held_gpu_stays() {
    let left = Left::new();
    left.write(&json!({"old": left.whole("old", GPU)}));
    let wishes = Wishes::new(ForeignPolicy::Keep);
    let engine = left.node.faulty_engine_with(Settings { wishes: wishes.clone(), ..left.node.settings() }).0;
    wishes.tell([(address(GPU), Wish { foreign: None, mig_mode: Some(MigMode::Enabled) })].into());
    assert!(!engine.set_mig_modes() && !left.node.mig_is_on(GPU));
    release(&engine, "old");
    assert!(engine.set_mig_modes() && left.node.mig_is_on(GPU));
}

/// A GPU that is gone is given to nobody. One that does not answer may be the one that is meant.
#[test]
fn a_gpu_that_is_not_found_is_no_obstacle_unless_one_is_silent() {
    let left = Left::new();
    let elsewhere =
        left.prepared("old", "gpu-7", json!({"gpu": {"info": {"uuid": "GPU-of-another-node"}}, "mig": null}));
    left.write(&json!({"old": elsewhere}));
    let (engine, faulty) = left.node.faulty_engine();
    assert_eq!(engine.former_doubt(), None);
    let new = claim("new", &[GPU]);
    prepare(&engine, &new).unwrap();
    unprepare(&engine, &new);
    faulty.next("gpu_at", Fault::Fail(Code::Unknown));
    let error = refused(&engine, &new);
    assert!(error.contains("not every GPU answers"), "{error}");
    assert!(faulty.is_done());

    // Where every claim's GPU is found, the others may be as they like.
    left.write(&json!({"old": left.whole("old", SECOND)}));
    faulty.next("gpu_at", Fault::Fail(Code::Unknown));
    assert_eq!(engine.former_doubt(), None);
}

/// What the kubelet forgets is found by the comparison with the API server.
#[test]
fn a_claim_that_is_gone_is_left_behind_as_any_other() {
    let left = Left::new();
    left.write(&json!({"old": left.whole("old", GPU)}));
    let engine = left.node.engine();
    let known: Vec<_> =
        engine.known_claims().unwrap().into_iter().map(|claim| (claim.uid, claim.earlier_boot)).collect();
    assert_eq!(known, [("old".to_owned(), false)]);
    assert_eq!(engine.release_left_behind("old", &|| true).unwrap(), Some(Released::Gone));
    assert_eq!(engine.known_claims().unwrap(), []);
}

/// As of kerf's own: its pod may run on for its grace period.
#[test]
fn a_claim_that_is_gone_keeps_its_gpu_while_a_process_uses_it() {
    let left = Left::new();
    left.write(&json!({"old": left.whole("old", GPU)}));
    let (engine, faulty) = left.node.faulty_engine();
    faulty.set_processes(&[Process { pid: std::process::id(), gpu_instance: None }]);
    assert_eq!(engine.release_left_behind("old", &|| true).unwrap(), None);
    let error = refused(&engine, &claim("new", &[GPU]));
    assert!(error.contains("which NVIDIA's DRA driver has prepared"), "{error}");

    faulty.set_processes(&[]);
    left.write(&json!("damaged"));
    assert_eq!(engine.release_left_behind("old", &|| true).unwrap(), None, "nobody can tell what it has");
    left.write(&json!({"old": left.whole("old", GPU)}));
    assert_eq!(engine.release_left_behind("old", &|| true).unwrap(), Some(Released::Gone));
    prepare(&engine, &claim("new", &[GPU])).unwrap();
}
