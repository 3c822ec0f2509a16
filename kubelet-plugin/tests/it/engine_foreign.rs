//! Instances that no claim explains, under each policy.

use std::fs;
use std::sync::Arc;

use kerf_kubelet_plugin::engine::{Engine, ForeignPolicy, RemovedForeign, Settings};
use kerf_nvml::Process;

use crate::engine_node::{
    Faulty, GPU, H100, MIG_1G, MIG_2G, MIG_3G, Node, address, claim, late, prepare, refused, unprepare, wishes,
};

const POLICIES: [ForeignPolicy; 3] = [ForeignPolicy::Keep, ForeignPolicy::Adopt, ForeignPolicy::Delete];

fn engine(node: &Node, foreign: ForeignPolicy) -> (Engine, Arc<Faulty>) {
    node.faulty_engine_with(Settings { wishes: wishes(foreign), ..node.settings() })
}

fn use_instance(faulty: &Faulty, gpu_instance: u32) {
    faulty.set_processes(&[Process { pid: std::process::id(), gpu_instance: Some(gpu_instance) }]);
}

/// Kept: what overlaps is refused, what does not is free, and MIG mode stays on.
#[test]
fn instances_of_others_are_refused_and_left_alone() {
    let node = Node::start(H100);
    let (engine, faulty) = engine(&node, ForeignPolicy::Keep);
    let foreign = node.make_foreign(MIG_1G, 1);
    let live = node.live(GPU);
    for device in [MIG_2G, GPU] {
        let error = refused(&engine, &claim("a", &[device]));
        assert!(error.contains(&format!("occupied by GPU instance {} at memory slices 4-4", foreign.id)), "{error}");
        engine.unprepare("a", late()).unwrap();
        assert_eq!(node.live(GPU), live, "{device}");
    }
    use_instance(&faulty, foreign.id);
    let error = refused(&engine, &claim("a", &[GPU]));
    assert!(error.contains(&format!("in use by process {} (", std::process::id())), "{error}");
    let beside = claim("b", &[MIG_3G]);
    prepare(&engine, &beside).unwrap();
    unprepare(&engine, &beside);
    assert_eq!(engine.sweep_foreign(), []);
    assert_eq!(node.live(GPU), live);
    assert!(node.mig_is_on(GPU), "it is in use by someone");
}

/// A claim for exactly what is there uses it, and leaves it as it was: with and without a compute instance of its own.
#[test]
fn a_kept_instance_is_used_and_left_as_it_was() {
    let node = Node::start(H100);
    let (engine, _) = engine(&node, ForeignPolicy::Keep);
    let claim = claim("a", &[MIG_2G]);
    for compute_instances in [0, 1] {
        let foreign = node.make_foreign(MIG_2G, compute_instances);
        let gpu = node.gpu(GPU);
        let found = node.nvml.compute_instances(gpu, foreign.id).unwrap();
        for _ in 0..2 {
            let prepared = prepare(&engine, &claim).unwrap();
            assert_eq!(prepare(&engine, &claim).unwrap(), prepared);
            assert_eq!(node.nodes(&claim, MIG_2G).len(), 3);
            assert_eq!(node.nvml.gpu_instances(gpu).unwrap(), [foreign]);
            let error = refused(&engine, &crate::engine_node::claim("b", &[MIG_1G]));
            assert!(error.contains("held by claim team/claim-a (a)"), "{error}");
            unprepare(&engine, &claim);
            assert_eq!(node.nvml.gpu_instances(gpu).unwrap(), [foreign]);
            assert_eq!(node.nvml.compute_instances(gpu, foreign.id).unwrap(), found);
            assert!(node.mig_is_on(GPU));
            assert_eq!((node.journal_files(), node.cdi_files()), (vec![], vec![]));
        }

        // The journal is lost meanwhile: the CDI file knows whose the instance is.
        prepare(&engine, &claim).unwrap();
        fs::remove_file(node.settings().claims.join("a.json")).unwrap();
        unprepare(&engine, &claim);
        assert_eq!(node.nvml.gpu_instances(gpu).unwrap(), [foreign], "{compute_instances}");
        assert_eq!(node.nvml.compute_instances(gpu, foreign.id).unwrap(), found);
        node.remove_foreign();
        node.assert_clean(GPU, "whoever made it has removed it");
    }
}

#[test]
fn a_kept_instance_that_is_not_idle_or_not_whole_is_not_used() {
    let node = Node::start(H100);
    let (engine, faulty) = engine(&node, ForeignPolicy::Keep);
    let claim = claim("a", &[MIG_2G]);
    let foreign = node.make_foreign(MIG_2G, 2);
    let error = refused(&engine, &claim);
    assert!(error.contains("occupied by GPU instance"), "two compute instances: {error}");
    node.remove_foreign();
    node.make_foreign(MIG_2G, 1);
    use_instance(&faulty, foreign.id);
    let error = refused(&engine, &claim);
    assert!(error.contains(&format!("in use by process {} (", std::process::id())), "{error}");
    faulty.set_processes(&[]);
    prepare(&engine, &claim).unwrap();
    unprepare(&engine, &claim);
    node.remove_foreign();
    node.assert_clean(GPU, "gone");
}

/// Adopted: taken where it fits, destroyed where it is in the way, and gone with the claim.
#[test]
fn an_adopted_instance_is_as_one_of_ours() {
    let node = Node::start(H100);
    for policy in [ForeignPolicy::Adopt, ForeignPolicy::Delete] {
        let (engine, _) = engine(&node, policy);
        for (foreign, compute_instances, devices) in [
            (MIG_2G, 0, &[MIG_2G][..]),
            (MIG_2G, 1, &[MIG_2G]),
            (MIG_2G, 2, &[MIG_2G]),
            (MIG_2G, 2, &[MIG_1G]),
            (MIG_1G, 1, &[MIG_2G]),
            (MIG_2G, 1, &[GPU]),
        ] {
            let context = format!("{policy:?}: {foreign} with {compute_instances}, then {devices:?}");
            node.make_foreign(foreign, compute_instances);
            let claim = claim("a", devices);
            let prepared = prepare(&engine, &claim).unwrap();
            assert_eq!(prepare(&engine, &claim).unwrap(), prepared, "{context}");
            let expected = if devices == [GPU] { 0 } else { 1 };
            assert_eq!(node.live(GPU).len(), expected, "{context}");
            assert!(node.live(GPU).iter().all(|live| live.3 == 1), "{context}");
            unprepare(&engine, &claim);
            node.assert_clean(GPU, &context);
        }
    }
}

/// Whatever the policy: an instance with processes is neither taken nor destroyed.
#[test]
fn an_instance_in_use_is_never_touched() {
    let node = Node::start(H100);
    let foreign = node.make_foreign(MIG_2G, 1);
    let live = node.live(GPU);
    for policy in POLICIES {
        let (engine, faulty) = engine(&node, policy);
        use_instance(&faulty, foreign.id);
        for device in [MIG_2G, MIG_1G, GPU] {
            let error = refused(&engine, &claim("a", &[device]));
            assert!(error.contains(&format!("occupied by GPU instance {}", foreign.id)), "{policy:?}: {error}");
            assert!(error.contains(&format!("in use by process {} (", std::process::id())), "{policy:?}: {error}");
        }
        assert_eq!(engine.sweep_foreign(), [], "{policy:?}");
        assert_eq!(node.live(GPU), live, "{policy:?}");
        assert_eq!((node.journal_files(), node.cdi_files()), (vec![], vec![]), "{policy:?}");

        // One that NVML does not see, and that only the destruction tells of.
        if policy != ForeignPolicy::Keep {
            faulty.set_processes(&[]);
            faulty.occupy();
            let error = refused(&engine, &claim("a", &[MIG_1G]));
            assert!(error.contains("in use by a client that NVML does not name"), "{policy:?}: {error}");
            assert_eq!(node.live(GPU), live, "{policy:?}");
        }
    }
}

/// What is swept is idle and explained by nobody.
#[test]
fn a_sweep_removes_what_is_idle_and_nobodys() {
    let node = Node::start(H100);
    let (engine, faulty) = engine(&node, ForeignPolicy::Delete);
    let ours = claim("ours", &[MIG_3G]);
    prepare(&engine, &ours).unwrap();
    let (idle, used) = (node.make_foreign(MIG_1G, 1), node.make_foreign("gpu-3b-00-0-mig-1g10gb-5", 1));
    use_instance(&faulty, used.id);

    // While the files of a claim cannot be read, nobody knows what is explained.
    let Settings { claims, cdi, .. } = node.settings();
    let files = [claims.join("lost.json"), claims.join("lost.damaged"), cdi.join("k8s.gpu.nvidia.com-claim_lost.json")];
    for file in files {
        fs::write(&file, "{").unwrap();
        assert_eq!(engine.sweep_foreign(), []);
        for device in [MIG_1G, MIG_2G] {
            let error = refused(&engine, &claim("a", &[device]));
            assert!(error.contains("which no claim on this node explains"), "{error}");
        }
        fs::remove_file(&file).unwrap();
    }

    assert_eq!(engine.sweep_foreign(), [RemovedForeign { gpu: address(GPU), instance: idle }]);
    assert_eq!(engine.sweep_foreign(), []);
    let left: Vec<_> = node.live(GPU).iter().map(|live| live.1).collect();
    assert_eq!(left, [0, 5], "the claim's and the one in use");
    assert!(!node.nodes(&ours, MIG_3G).is_empty());
    faulty.set_processes(&[]);
    unprepare(&engine, &ours);
    assert_eq!(engine.sweep_foreign().len(), 1);
    assert_eq!(node.live(GPU), []);
}
