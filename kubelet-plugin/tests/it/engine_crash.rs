//! A crash before and after every step: whatever is left, the next call mends it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use kerf_kubelet_plugin::engine::{Claim, Step};
use kerf_nvml::Process;

use crate::engine_node::{Crash, GPU, Node, claim, late};

const MIG_1G: &str = "gpu-3b-00-0-mig-1g10gb-4";
const MIG_3G: &str = "gpu-3b-00-0-mig-3g40gb-0";

/// What the plugin is asked for when it dies.
#[derive(Clone, Copy, Debug)]
enum Call {
    Prepare,
    Unprepare,
}

impl Call {
    /// Makes the call with an engine that dies at a moment. Returns whether it died.
    fn dies_at(self, node: &Node, claim: &Claim, moment: usize) -> bool {
        let engine = node.watched_engine(Crash::at(moment));
        // The engine is dropped as a process ends: its locks go, and nothing is undone.
        let call = AssertUnwindSafe(|| match self {
            Call::Prepare => engine.prepare(claim, late()).map(drop).unwrap(),
            Call::Unprepare => engine.unprepare(&claim.uid, late()).unwrap(),
        });
        catch_unwind(call).is_err()
    }
}

/// Every crash point of Prepare and of Unprepare, for a claim with two partitions and for a whole GPU that was left in
/// MIG mode; afterwards the kubelet tries again, or gives up and releases.
#[test]
fn a_crash_at_any_step_is_mended_by_the_next_call() {
    for (gpus, devices) in
        [("[{product: h100-80gb}]", &[MIG_3G, MIG_1G][..]), ("[{product: h100-80gb, mig: {current: true}}]", &[GPU])]
    {
        let node = Node::start(gpus);
        let claim = claim("a", devices);
        let whole = node.engine().prepare(&claim, late()).unwrap();
        let live = node.live(GPU);
        node.engine().unprepare("a", late()).unwrap();
        for call in [Call::Prepare, Call::Unprepare] {
            for afterwards in [Call::Prepare, Call::Unprepare] {
                let mut moment = 0;
                loop {
                    let context = format!("{devices:?}: {call:?} died at {moment}, then {afterwards:?}");
                    if devices == [GPU] {
                        node.nvml.set_mig_mode(node.gpu(GPU), kerf_nvml::MigMode::Enabled).unwrap();
                    }
                    if matches!(call, Call::Unprepare) {
                        node.engine().prepare(&claim, late()).unwrap();
                    }
                    let died = call.dies_at(&node, &claim, moment);
                    if matches!(afterwards, Call::Prepare) {
                        let prepared = node.engine().prepare(&claim, late());
                        assert_eq!(prepared.unwrap(), whole, "{context}");
                        assert_eq!(node.live(GPU), live, "{context}");
                        assert_eq!(node.journal_files(), ["a.json"], "{context}");
                        assert_eq!(node.cdi_files(), ["k8s.gpu.nvidia.com-claim_a.json"], "{context}");
                        for device in devices {
                            let nodes = if devices == [GPU] { 1 } else { 3 };
                            assert_eq!(node.nodes(&claim, device).len(), nodes, "{context}");
                        }
                    }
                    node.engine().unprepare("a", late()).unwrap();
                    if devices == [GPU] && node.mig_is_on(GPU) {
                        // Nobody of ours switched it on, and the whole GPU was not reached.
                        assert!(matches!(call, Call::Prepare), "{context}");
                        node.nvml.set_mig_mode(node.gpu(GPU), kerf_nvml::MigMode::Disabled).unwrap();
                    }
                    node.assert_clean(GPU, &context);
                    if !died {
                        break;
                    }
                    moment += 1;
                }
                assert!(moment >= 6, "{call:?} of {devices:?} has more steps than {moment} moments");
            }
        }
    }
}

/// While one claim is cut off half-way, its devices are not given to another.
#[test]
fn what_a_crash_left_is_still_held() {
    let node = Node::start("[{product: h100-80gb}]");
    let (victim, other) = (claim("a", &[MIG_1G]), claim("b", &["gpu-3b-00-0-mig-2g20gb-4"]));
    let counter = Crash::never();
    node.watched_engine(counter.clone()).prepare(&victim, late()).unwrap();
    node.engine().unprepare("a", late()).unwrap();
    // From the first journal write on.
    for moment in 2..counter.moments() {
        assert!(Call::Prepare.dies_at(&node, &victim, moment));
        let error = node.engine().prepare(&other, late()).unwrap_err().to_string();
        assert!(error.contains("held by claim team/claim-a (a)"), "moment {moment}: {error}");
        node.engine().unprepare("a", late()).unwrap();
        node.engine().prepare(&other, late()).unwrap();
        node.engine().unprepare("b", late()).unwrap();
        node.assert_clean(GPU, &format!("moment {moment}"));
    }
}

/// An instance whose creation was cut off was never handed out. One that is in use is someone else's, who came meanwhile.
#[test]
fn an_instance_in_use_is_not_what_a_crash_left() {
    let node = Node::start("[{product: h100-80gb}]");
    let victim = claim("a", &[MIG_1G]);
    let counter = Crash::never();
    node.watched_engine(counter.clone()).prepare(&victim, late()).unwrap();
    node.engine().unprepare("a", late()).unwrap();
    let created = counter.steps().iter().position(|step| *step == Step::CreateGpuInstance).unwrap();
    // Two moments a step: this is the one after the creation, before the journal knows the id.
    assert!(Call::Prepare.dies_at(&node, &victim, 2 * created + 1));

    let (engine, faulty) = node.faulty_engine();
    let gpu = node.gpu(GPU);
    let instance = node.nvml.gpu_instances(gpu).unwrap()[0];
    faulty.set_processes(&[Process { pid: std::process::id(), gpu_instance: Some(instance.id) }]);
    let error = engine.prepare(&victim, late()).unwrap_err().to_string();
    assert!(error.contains(&format!("occupied by GPU instance {}", instance.id)), "{error}");
    engine.unprepare("a", late()).unwrap();
    assert_eq!(node.nvml.gpu_instances(gpu).unwrap(), [instance]);
    assert_eq!((node.journal_files(), node.cdi_files()), (vec![], vec![]));
}
