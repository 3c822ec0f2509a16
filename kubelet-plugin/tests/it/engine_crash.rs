//! A crash before and after every step: whatever is left, the next call mends it.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use kerf_kubelet_plugin::engine::{Claim, Engine, ForeignPolicy, Released, Settings, Step};
use kerf_nvml::Process;

use crate::engine_node::{
    CRASH, Crash, GPU, H100, MIG_1G, MIG_2G, MIG_3G, Node, claim, late, prepare, unprepare, wishes,
};

/// Whether a call dies. A call that fails in another way fails the test.
pub(crate) fn dies(call: impl FnOnce()) -> bool {
    // The engine is dropped as a process ends: its locks go, and nothing is undone.
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(()) => false,
        Err(why) if why.downcast_ref() == Some(&CRASH) => true,
        Err(why) => resume_unwind(why),
    }
}

/// Plays a story once for each moment at which it can be cut off, and once to its end. It tells whether it was cut off.
/// Returns how many moments there are.
fn at_each_moment(story: impl Fn(usize) -> bool) -> usize {
    (0..).take_while(|moment| story(*moment)).count()
}

/// What the plugin is asked for when it dies.
#[derive(Clone, Copy, Debug)]
enum Call {
    Prepare,
    Unprepare,
}

impl Call {
    /// Makes the call with an engine that dies at a moment. Returns whether it died.
    fn dies_at(self, node: &Node, claim: &Claim, moment: usize) -> bool {
        self.dies(&node.watched_engine(Crash::at(moment)), claim)
    }

    fn dies(self, engine: &Engine, claim: &Claim) -> bool {
        dies(|| match self {
            Call::Prepare => _ = engine.prepare(claim, late()).unwrap(),
            Call::Unprepare => _ = engine.unprepare(&claim.uid, late()).unwrap(),
        })
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
                let moments = at_each_moment(|moment| {
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
                    died
                });
                assert!(moments >= 6, "{call:?} of {devices:?} has more steps than {moments} moments");
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

/// Both ways out of each crash: the kubelet asks again, or the claim is wanted again. A condemned claim has no other way on
/// than the background.
#[test]
fn a_crash_while_condemning_is_mended() {
    let node = Node::start(H100);
    let claim = claim("a", &[MIG_3G, MIG_1G]);
    let whole = prepare(&node.engine(), &claim).unwrap();
    let live = node.live(GPU);
    unprepare(&node.engine(), &claim);
    for wanted_again in [true, false] {
        for in_background in [true, false] {
            let moments = at_each_moment(|moment| {
                let context = format!("wanted again {wanted_again}, in background {in_background}, moment {moment}");
                prepare(&node.engine(), &claim).unwrap();
                let settings = || Settings { patience: Duration::ZERO, ..node.settings() };
                let crash = Crash::at(moment);
                let died = if in_background {
                    let (engine, faulty) = node.faulty_engine_with(settings());
                    faulty.occupy();
                    assert!(matches!(engine.unprepare("a", late()), Ok(Released::Condemned(_))), "{context}");
                    let (engine, _) = node.faulty_engine_watched(settings(), crash);
                    dies(|| assert_eq!(engine.retry_condemned().unwrap().removed.len(), 1))
                } else {
                    let (engine, faulty) = node.faulty_engine_watched(settings(), crash);
                    faulty.occupy();
                    dies(|| assert!(matches!(engine.unprepare("a", late()), Ok(Released::Condemned(_)))))
                };
                if wanted_again {
                    assert_eq!(prepare(&node.engine(), &claim).unwrap(), whole, "{context}");
                    assert_eq!(node.live(GPU), live, "{context}");
                    assert!(!node.engine().prepared_claims().unwrap()[0].condemned, "{context}");
                }
                if in_background {
                    node.engine().retry_condemned().unwrap();
                }
                if !in_background || wanted_again {
                    unprepare(&node.engine(), &claim);
                }
                node.assert_clean(GPU, &context);
                died
            });
            assert!(moments >= 6, "it has more steps than {moments} moments");
        }
    }
}

/// A reconcile that is cut off is taken up by the next one, whatever was lost before.
#[test]
fn a_crash_while_a_lost_claim_is_released_is_mended() {
    let node = Node::start(H100);
    for journal_is_lost in [true, false] {
        let moments = at_each_moment(|moment| {
            let context = format!("journal lost {journal_is_lost}, moment {moment}");
            prepare(&node.engine(), &claim("a", &[MIG_3G, MIG_1G])).unwrap();
            if journal_is_lost {
                std::fs::remove_file(node.settings().claims.join("a.json")).unwrap();
            }
            let engine = node.watched_engine(Crash::at(moment));
            let died = dies(|| assert_eq!(engine.release_left_behind("a", &|| true).unwrap(), Some(Released::Gone)));
            let engine = node.engine();
            for known in engine.known_claims().unwrap() {
                assert_eq!(
                    engine.release_left_behind(&known.uid, &|| true).unwrap(),
                    Some(Released::Gone),
                    "{context}"
                );
            }
            node.assert_clean(GPU, &context);
            died
        });
        assert!(moments >= 6, "it has more steps than {moments} moments");
    }
}

/// Foreign instances: one that is used and left as it was, one that is taken, and one that is cleared away.
#[test]
fn a_crash_around_foreign_instances_is_mended() {
    let node = Node::start(H100);
    for (foreign, device, policy) in [
        (MIG_2G, MIG_2G, ForeignPolicy::Keep),
        (MIG_2G, MIG_2G, ForeignPolicy::Adopt),
        (MIG_2G, MIG_1G, ForeignPolicy::Adopt),
        (MIG_2G, GPU, ForeignPolicy::Adopt),
    ] {
        let settings = || Settings { wishes: wishes(policy), ..node.settings() };
        let engine = || node.faulty_engine_with(settings()).0;
        let claim = claim("a", &[device]);
        for compute_instances in [0, 1] {
            for call in [Call::Prepare, Call::Unprepare] {
                for afterwards in [Call::Prepare, Call::Unprepare] {
                    let moments = at_each_moment(|moment| {
                        let context = format!(
                            "{policy:?} {foreign} with {compute_instances}: {call:?} of {device} died at {moment}, then \
                             {afterwards:?}"
                        );
                        node.make_foreign(foreign, compute_instances);
                        let found = node.live(GPU);
                        if matches!(call, Call::Unprepare) {
                            prepare(&engine(), &claim).unwrap();
                        }
                        let (watched, _) = node.faulty_engine_watched(settings(), Crash::at(moment));
                        let died = call.dies(&watched, &claim);
                        if matches!(afterwards, Call::Prepare) {
                            prepare(&engine(), &claim).unwrap();
                            let live = node.live(GPU);
                            assert_eq!(live.len(), usize::from(device != GPU), "{context}");
                            assert!(live.iter().all(|live| live.3 == 1), "{context}");
                        }
                        unprepare(&engine(), &claim);
                        assert_eq!((node.journal_files(), node.cdi_files()), (vec![], vec![]), "{context}");
                        if policy == ForeignPolicy::Keep {
                            assert_eq!(node.live(GPU), found, "it is as it was: {context}");
                            assert!(node.mig_is_on(GPU), "{context}");
                        }
                        // Under the other policy it may have come to nothing yet.
                        node.remove_foreign();
                        node.assert_clean(GPU, &context);
                        died
                    });
                    assert!(moments > 0, "{call:?} of {device} has no moment");
                }
            }
        }
    }
}
