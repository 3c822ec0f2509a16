//! What an unprivileged process sees: what it may open.

use std::fs;
use std::process::{Command, Output};

use crate::sim::{Sim, node, run};

/// nvidia-smi as in a container: without the right to administer MIG.
fn contained(sim: &Sim, arguments: &str) -> Output {
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]);
    run(command.arg(sim.root().join("usr/bin/nvidia-smi")).args(arguments.split_whitespace()))
}

fn printed(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// A node with two GPUs, the first of which holds two MIG devices, seen from a container that got the second of those.
fn container_with_one_slice() -> Sim {
    let sim = Sim::with_programs(&node("gpus: [{product: h100-80gb, count: 2, mig: {current: true}}]"));
    sim.smi("mig -i 0 -cgi 9:0,19:6 -C");
    let caps = sim.root().join("dev/nvidia-caps");
    // GPU instance 1 is the 3g, 13 the 1g; neither config nor the other slice is handed to the container.
    for minor in [1, 2, 3 + 9, 3 + 9 + 1] {
        fs::remove_file(caps.join(format!("nvidia-cap{minor}"))).unwrap();
    }
    sim
}

#[test]
fn a_container_sees_its_slice_only() {
    let sim = container_with_one_slice();
    fs::remove_file(sim.root().join("dev/nvidia1")).unwrap();
    let list = printed(&contained(&sim, "-L"));
    let state = sim.state();
    let uuid = &state.gpus[0].mig.as_ref().unwrap().instances[1].compute_instances[0].uuid;
    let lines: Vec<&str> = list.lines().collect();
    assert_eq!(lines.len(), 2, "{list}");
    assert!(lines[0].starts_with("GPU 0: NVIDIA H100 80GB HBM3"), "{list}");
    assert_eq!(lines[1], format!("  MIG 1g.10gb     Device  0: (UUID: {uuid})"));
    assert!(contained(&sim, "").status.success());
}

#[test]
fn gpus_are_numbered_as_they_are_seen() {
    let sim = container_with_one_slice();
    fs::remove_file(sim.root().join("dev/nvidia0")).unwrap();
    let query = "--query-gpu=index,pci.bus_id --format=csv,noheader";
    assert_eq!(printed(&contained(&sim, query)), "0, 00000000:47:00.0\n");
}

#[test]
fn a_container_does_not_administer_mig() {
    let sim = container_with_one_slice();
    let output = contained(&sim, "mig -cgi 19 -C");
    assert!(!output.status.success());
    assert!(printed(&output).contains("Insufficient Permissions"));
    let output = contained(&sim, "-mig 0");
    assert!(printed(&output).contains("Insufficient Permissions"));
    assert_eq!(sim.state().gpus[0].mig.as_ref().unwrap().instances.len(), 2);
    // Nor does it look into the whole of a divided GPU.
    assert!(
        printed(&contained(&sim, "--query-gpu=memory.total --format=csv,noheader"))
            .contains("Insufficient Permissions")
    );
}

#[test]
fn the_config_capability_is_enough_to_administer_mig() {
    let sim = Sim::with_programs(&node("gpus: [{product: h100-80gb, mig: {current: true}}]"));
    assert!(contained(&sim, "mig -cgi 19 -C").status.success());
}
