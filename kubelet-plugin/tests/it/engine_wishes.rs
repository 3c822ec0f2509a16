//! What is wanted of a GPU while nothing uses it.

use kerf_kubelet_plugin::engine::{ForeignPolicy, Settings, Wish, Wishes};
use kerf_nvml::{MigMode, Process};

use crate::engine_node::{GPU, H100, MIG_1G, MIG_2G, Node, address, claim, late, prepare, refused, unprepare};

fn wish(mig_mode: MigMode) -> Wish {
    Wish { foreign: None, mig_mode: Some(mig_mode) }
}

/// It is switched while the GPU is idle, left on after the last slice, and off only for a claim of the whole GPU.
#[test]
fn an_idle_gpu_is_in_the_mode_that_is_wanted() {
    let node = Node::start(H100);
    let wishes = Wishes::new(ForeignPolicy::Keep);
    let engine = node.faulty_engine_with(Settings { wishes: wishes.clone(), ..node.settings() }).0;
    assert!(!engine.set_mig_modes() && !node.mig_is_on(GPU), "nothing is wanted yet");

    wishes.tell([(address(GPU), wish(MigMode::Enabled))].into());
    assert!(engine.set_mig_modes() && node.mig_is_on(GPU));
    assert!(!engine.set_mig_modes(), "and stays");

    let slice = claim("slice", &[MIG_1G]);
    prepare(&engine, &slice).unwrap();
    unprepare(&engine, &slice);
    assert!(node.live(GPU).is_empty() && node.mig_is_on(GPU), "the last slice leaves it on");

    let whole = claim("whole", &[GPU]);
    prepare(&engine, &whole).unwrap();
    assert!(!node.mig_is_on(GPU), "a claim comes before a wish");
    assert!(!engine.set_mig_modes() && !node.mig_is_on(GPU), "a GPU with a claim is not idle");
    unprepare(&engine, &whole);
    let mut watcher = claim("watcher", &[GPU]);
    watcher.devices[0].admin_access = true;
    prepare(&engine, &watcher).unwrap();
    assert!(engine.set_mig_modes() && node.mig_is_on(GPU), "who only looks at it does not use it");
    unprepare(&engine, &watcher);

    wishes.tell([(address(GPU), wish(MigMode::Disabled))].into());
    prepare(&engine, &slice).unwrap();
    assert!(!engine.set_mig_modes() && node.mig_is_on(GPU), "a slice is in use");
    unprepare(&engine, &slice);
    node.assert_clean(GPU, "in the end");
}

/// What others use keeps its mode, and a failed switch is tried again.
#[test]
fn a_gpu_that_others_use_keeps_its_mode() {
    let node = Node::start(H100);
    let wishes = Wishes::new(ForeignPolicy::Keep);
    let (engine, _) = node.faulty_engine_with(Settings { wishes: wishes.clone(), ..node.settings() });
    wishes.tell([(address(GPU), wish(MigMode::Disabled))].into());
    node.make_foreign(MIG_2G, 1);
    assert!(!engine.set_mig_modes() && node.mig_is_on(GPU), "somebody's instance is there");
    node.remove_foreign();

    wishes.tell([(address(GPU), wish(MigMode::Enabled))].into());
    node.ctl(&["fault", "call", "nvmlDeviceSetMigMode", "--code", "IN_USE"]);
    assert!(!engine.set_mig_modes() && !node.mig_is_on(GPU), "it is in use");
    assert!(engine.set_mig_modes() && node.mig_is_on(GPU));
}

/// A plugin that has just started removes nothing that somebody else made, whatever its command line says.
#[test]
fn foreign_instances_are_safe_until_the_wishes_are_known() {
    let node = Node::start(H100);
    let wishes = Wishes::new(ForeignPolicy::Delete);
    let (engine, faulty) = node.faulty_engine_with(Settings { wishes: wishes.clone(), ..node.settings() });
    let foreign = node.make_foreign(MIG_2G, 1);
    assert_eq!(engine.sweep_foreign(), []);
    assert!(refused(&engine, &claim("a", &[GPU])).contains("occupied by GPU instance"));
    engine.unprepare("a", late()).unwrap();

    let keep = Wish { foreign: Some(ForeignPolicy::Keep), mig_mode: None };
    wishes.tell([(address(GPU), keep)].into());
    assert_eq!(engine.sweep_foreign(), [], "this GPU's are kept");

    wishes.tell([].into());
    assert_eq!(engine.sweep_foreign(), [], "nothing is decided");
    wishes.tell([(address(GPU), Wish::default())].into());
    faulty.set_processes(&[Process { pid: std::process::id(), gpu_instance: Some(foreign.id) }]);
    assert_eq!(engine.sweep_foreign(), [], "in use");
    faulty.set_processes(&[]);
    assert_eq!(engine.sweep_foreign().len(), 1);
}
