//! MIG mode: obeyed, switched, and put back.

use kerf_kubelet_plugin::engine::Step;
use kerf_nvml::{Code, MigMode, MigModes, Nvml as _, Process};

use crate::engine_node::{Crash, Fault, GPU, H100, MIG_1G, Node, SECOND, claim, prepare, refused, unprepare};

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

/// CUDA finds nothing to compute on in a GPU that is in MIG mode and has no instance.
#[test]
fn a_gpu_in_mig_mode_that_denies_it_is_not_handed_out_whole() {
    let node = Node::start("[{product: h100-80gb, mig: {current: true}}]");
    let engine = node.engine();
    let claim = claim("a", &[GPU]);
    node.ctl(&["fault", "call", "nvmlDeviceGetMigMode", "--code", "NOT_SUPPORTED"]);
    let error = refused(&engine, &claim);
    assert!(error.contains("cannot read the MIG mode") && error.contains("not supported"), "{error}");
    assert_eq!((node.cdi_files(), node.mig_is_on(GPU)), (vec![], true));
    prepare(&engine, &claim).unwrap();
    assert!(!node.mig_is_on(GPU));
    unprepare(&engine, &claim);
    node.assert_clean(GPU, "gone");
}

/// A switch that fails, or does not come about, leaves no mode pending: the inventory would withhold the GPU for it.
#[test]
fn a_switch_that_fails_leaves_no_mode_pending() {
    let node = Node::start(H100);
    let (engine, faulty) = node.faulty_engine();
    let claim = claim("a", &[MIG_1G]);
    for (code, said) in [
        (Some(Code::ResetRequired), "does not change before the GPU is reset"),
        (Some(Code::InUse), "cannot be switched, it is in use by"),
        (Some(Code::Unknown), "cannot switch the MIG mode"),
        (None, "did not change although the driver said so"),
    ] {
        faulty.next("set_mig_mode", Fault::LeavePending(code));
        let error = refused(&engine, &claim);
        assert!(error.contains(said), "{code:?}: {error}");
        assert!(faulty.is_done());
        let off = MigModes { current: MigMode::Disabled, pending: MigMode::Disabled };
        assert_eq!(faulty.mig_modes(node.gpu(GPU)), Ok(Some(off)), "{code:?}");
        node.assert_clean(GPU, "nothing was begun");
    }
    prepare(&engine, &claim).unwrap();
    unprepare(&engine, &claim);
    node.assert_clean(GPU, "the next one works");
}
