//! What outlives what: clients, daemon restarts, driver reloads.

use kerf_nvml_sim::client::Client;
use kerf_nvml_sim::code::Code;
use kerf_nvml_sim::handle::Handle;
use kerf_nvml_sim::view::{Device, Gi, Node};
use kerf_nvml_sim::wire::{self, Op};
use serde_json::json;

use crate::sim::{Sim, node};

fn first_gpu(client: &Client) -> Handle {
    client.ask::<Node>("", Op::Node).unwrap().gpus[0].handle
}

#[test]
fn instances_outlive_their_makers_and_end_with_the_daemon() {
    let mut sim = Sim::start(&node("gpus: [{product: h100-80gb, mig: {current: true}}]"));
    let uuid = sim.state().gpus[0].uuid.clone();
    let before = Client::new(sim.root());
    let gpu = first_gpu(&before);
    let gi: Gi = before.ask("", Op::CreateGi(gpu, 9, None)).unwrap();
    drop(before);

    let client = Client::new(sim.root());
    assert_eq!(client.ask::<Gi>("", Op::Gi(gi.handle)), Ok(gi), "another client sees the same");
    sim.stop();
    assert_eq!(client.ask::<Gi>("", Op::Gi(gi.handle)), Err(Code::DRIVER_NOT_LOADED));
    assert!(!sim.root().join(kerf_nvml_sim::SOCKET).exists(), "the socket is gone");
    sim.start_again();
    assert_eq!(client.ask::<Gi>("", Op::Gi(gi.handle)), Err(Code::INVALID_ARGUMENT), "a handle of before");
    assert_eq!(client.ask::<Device>("", Op::Device(gpu)).unwrap_err(), Code::INVALID_ARGUMENT);
    let state = sim.state();
    assert_eq!(state.gpus[0].uuid, uuid, "the GPU is the same");
    assert_eq!(state.gpus[0].mig.as_ref().unwrap().instances, []);
    assert!(!sim.root().join("proc/driver/nvidia/capabilities/gpu0").exists());
}

#[test]
fn a_driver_reload_loses_instances_and_hoppers_mode() {
    let sim = Sim::start(&node(
        "gpus: [{product: a100-40gb, mig: {current: true}}, {product: h100-80gb, mig: {current: true}}]",
    ));
    let client = Client::new(sim.root());
    let gpus = client.ask::<Node>("", Op::Node).unwrap().gpus;
    for gpu in &gpus {
        client.ask::<Gi>("", Op::CreateGi(gpu.handle, 19, None)).unwrap();
    }
    sim.ctl("reload");
    let state = sim.state();
    let modes: Vec<_> = state.gpus.iter().map(|gpu| gpu.mig.as_ref().unwrap().current).collect();
    assert_eq!(modes, [true, false], "the A100 keeps its mode, the H100 does not");
    assert!(state.gpus.iter().all(|gpu| gpu.mig.as_ref().unwrap().instances.is_empty()));
    assert_eq!(client.ask::<Device>("", Op::Device(gpus[0].handle)).unwrap_err(), Code::INVALID_ARGUMENT);
    assert!(client.ask::<Device>("", Op::Device(first_gpu(&client))).is_ok());
}

#[test]
fn one_root_has_one_daemon_and_no_foreign_files() {
    let sim = Sim::start(&node("gpus: []"));
    let serve = |root: &std::path::Path| {
        let file = sim.root().with_file_name("node.yaml");
        let mut second = std::process::Command::new(env!("CARGO_BIN_EXE_nvml-sim"));
        crate::sim::run(second.arg("serve").arg("--node").arg(file).arg("--root").arg(root))
    };
    let output = serve(&sim.root());
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("another nvml-sim serves"), "{output:?}");
    let foreign = tempfile::tempdir().unwrap();
    std::fs::write(foreign.path().join("precious"), "").unwrap();
    let output = serve(foreign.path());
    assert!(String::from_utf8_lossy(&output.stderr).contains("is not empty"), "{output:?}");
    assert!(foreign.path().join("precious").exists());
}

#[test]
fn ctl_refuses_what_does_not_exist() {
    let sim = Sim::start(&node("gpus: [{product: l40s}]"));
    let address = sim.state().gpus[0].pci_bus_id.clone();
    sim.ctl(&format!("reset {address}"));
    for wrong in ["reset 1", "break 0000:ff:00.0", "latency nvmlInit_v2", "latency nvmlInit_v2=soon"] {
        assert!(!sim.ctl_output(wrong).status.success(), "{wrong}");
    }
}

#[test]
fn a_library_of_another_build_is_told_so() {
    let sim = Sim::start(&node("gpus: []"));
    let connection = std::os::unix::net::UnixStream::connect(sim.root().join(kerf_nvml_sim::SOCKET)).unwrap();
    for (request, expected) in [
        (json!({"version": 2, "question": "unknown to this build"}), Code::LIB_RM_VERSION_MISMATCH),
        (json!({"version": wire::VERSION, "question": "of no build"}), Code::INVALID_ARGUMENT),
    ] {
        wire::write(&connection, &request).unwrap();
        let reply: wire::Reply<()> = wire::read(&connection).unwrap();
        assert!(matches!(reply, wire::Reply::Error(code) if code == expected), "{request}: {reply:?}");
    }
}
