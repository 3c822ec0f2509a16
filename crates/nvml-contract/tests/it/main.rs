//! `nvml-contract` against simulated nodes: everything holds, and each node is afterwards as it was before.
//!
//! The simulator's programs must have been built: `cargo build -p kerf-nvml-sim`.

mod simulator;

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use kerf_mig::Placement;
use kerf_mig::product::Product;
use kerf_nvml::Nvml;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::simulator::Simulator;

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_nvml-contract"))
}

/// Runs the program on a node. Returns its exit code and what it said.
fn check(node: &Simulator, arguments: &[&str]) -> (i32, String) {
    let output = program().arg("--driver-root").arg(node.root().path()).args(arguments).output().expect("it starts");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (output.status.code().expect("it ends by itself"), text(output.stdout) + &text(output.stderr))
}

/// Runs it, carving these GPUs, and returns the output; everything must hold and the node be as it was.
fn holds(node: &Simulator, carve: &[&str]) -> String {
    let before = node.state();
    let arguments: Vec<&str> = carve.iter().flat_map(|gpu| ["--carve", *gpu]).collect();
    let (code, output) = check(node, &arguments);
    assert!(!output.contains("FAILED") && output.contains(" 0 failed, "), "{output}");
    assert_eq!(code, 0, "{output}");
    assert_eq!(node.state(), before);
    output
}

fn wait(mut child: Child) -> ExitStatus {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(status) = child.try_wait().expect("it is a child") {
            return status;
        }
        assert!(Instant::now() < end, "it does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Two instances that are not kerf's, one of them without a compute instance.
fn add_foreign_instances(node: &Simulator, gpu: &str) {
    let nvml = node.open();
    let gpu = nvml.gpu_at(gpu.parse().expect("an address")).expect("a GPU");
    let small = nvml.create_gpu_instance(gpu, 19, Placement { start: 2, size: 1 }).expect("room");
    nvml.create_compute_instance(gpu, small.id, 1).expect("room");
    nvml.create_gpu_instance(gpu, 9, Placement { start: 4, size: 4 }).expect("room");
}

#[test]
fn reading_holds_on_a_mixed_node_with_a_broken_gpu_and_foreign_instances() {
    let node = Simulator::start(
        "[{product: h100-80gb, pciBusId: '0000:3b:00.0', mig: {current: true}}, \
         {product: a100-40gb, pciBusId: '0000:47:00.0', broken: true}, \
         {product: a100-40gb, pciBusId: '0000:53:00.0'}, \
         {product: a100-80gb, pciBusId: '0000:5f:00.0', mig: {current: true}}, \
         {product: a100-80gb, pciBusId: '0000:6b:00.0', mig: {current: false, pending: true}}, \
         {product: a30, pciBusId: '0000:77:00.0', mig: {current: true}}, \
         {product: rtx-pro-6000, pciBusId: '0000:83:00.0'}, \
         {product: l40s, pciBusId: '0001:af:00.0'}]",
    );
    add_foreign_instances(&node, "0000:3b:00.0");
    let output = holds(&node, &[]);
    for line in [
        "0000:3b:00.0 mig.instances: ok",
        "0000:3b:00.0 mig.capability-files: ok",
        "0000:3b:00.0 mig.capability-nodes: ok",
        "index 1 gpu.facts: skipped: no handle",
        "0000:53:00.0 mig.profiles: skipped: MIG is off",
        "0000:5f:00.0 mig.max-instances: ok",
        "0000:77:00.0 mig.placements: ok",
        "0000:83:00.0 mig.placements: ok",
        "0001:af:00.0 mig.placements: skipped: the GPU has no MIG",
    ] {
        assert!(output.contains(line), "{line}\n{output}");
    }
}

#[test]
fn reading_holds_on_every_known_product() {
    let on = |product: &Product| product.mig.is_some();
    let entry = |product: &Product| format!("{{product: {}, mig: {{current: {}}}}}", product.key, on(product));
    let gpus: Vec<String> = Product::all().iter().map(entry).collect();
    let node = Simulator::start(&format!("[{}]", gpus.join(", ")));
    let output = holds(&node, &[]);
    let told = output.lines().filter(|line| line.ends_with("mig.max-instances: ok")).count();
    assert_eq!(told, Product::all().iter().filter(|product| on(product)).count(), "{output}");
}

#[test]
fn carving_holds_with_mig_off_and_on_on_every_kind_of_mig_gpu() {
    let node = Simulator::start(
        "[{product: h100-80gb, pciBusId: '0000:3b:00.0'}, \
         {product: h100-80gb, pciBusId: '0000:47:00.0', mig: {current: true}}, \
         {product: a100-40gb, pciBusId: '0000:5f:00.0', mig: {current: true}}, \
         {product: a30, pciBusId: '0000:77:00.0', mig: {current: true}}, \
         {product: rtx-pro-6000, pciBusId: '0000:83:00.0'}]",
    );
    let gpus = ["0000:3b:00.0", "0000:47:00.0", "0000:5f:00.0", "0000:77:00.0", "0000:83:00.0"];
    let output = holds(&node, &gpus);
    for gpu in gpus {
        for name in
            ["created", "overlap", "capability-nodes", "in-use", "gone", "max-instances", "one-more", "as-found"]
        {
            assert!(output.contains(&format!("{gpu} carve.{name}: ok")), "{gpu} {name}\n{output}");
        }
    }
    for line in [
        "0000:3b:00.0 carve.mig-on: ok",
        "0000:3b:00.0 carve.mig-held: ok",
        "0000:3b:00.0 carve.mig-off: ok",
        "0000:47:00.0 carve.mig-on: skipped: MIG was on already",
        "0000:47:00.0 carve.mig-off: ok",
        "0000:5f:00.0 carve.mig-off: skipped: MIG mode of this GPU changes only with a reset",
    ] {
        assert!(output.contains(line), "{line}\n{output}");
    }
}

#[test]
fn carving_holds_where_uuids_are_fresh_each_time() {
    let node = Simulator::start_with("uuids: fresh", "[{product: h100-80gb, pciBusId: '0000:3b:00.0'}]");
    holds(&node, &["0000:3b:00.0"]);
}

#[test]
fn a_gpu_that_is_not_idle_is_not_carved() {
    let node = Simulator::start(
        "[{product: h100-80gb, pciBusId: '0000:3b:00.0', mig: {current: true}}, \
         {product: a100-40gb, pciBusId: '0000:53:00.0'}, {product: l40s, pciBusId: '0001:af:00.0'}]",
    );
    add_foreign_instances(&node, "0000:3b:00.0");
    let before = node.state();
    for (gpu, why) in [
        ("0000:3b:00.0", "2 GPU instances live on it"),
        ("0000:53:00.0", "only a reset of the GPU turns it on"),
        ("0001:af:00.0", "the GPU has no MIG"),
        ("0000:01:00.0", "name a GPU by its PCI address"),
    ] {
        let (code, output) = check(&node, &["--carve", gpu]);
        assert_eq!(code, 2, "{output}");
        let line = format!("{gpu} carve.created: skipped: not carved: ");
        assert!(output.lines().any(|said| said.starts_with(&line) && said.contains(why)), "{why}\n{output}");
    }
    assert_eq!(node.state(), before);
}

#[test]
fn what_does_not_hold_is_told_and_reported() {
    let node = Simulator::start("[{product: h100-80gb, pciBusId: '0000:3b:00.0', mig: {current: true}}]");
    add_foreign_instances(&node, "0000:3b:00.0");
    let capabilities = node.root().path().join("proc/driver/nvidia/capabilities/gpu0/mig");
    let live = fs::read_dir(&capabilities).unwrap().next().unwrap().unwrap();
    fs::remove_file(live.path().join("access")).unwrap();

    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("report.json");
    let (code, output) = check(&node, &["--report", file.to_str().unwrap()]);
    assert_eq!(code, 1, "{output}");
    assert!(output.contains("0000:3b:00.0 mig.capability-files: FAILED: expected an access file"), "{output}");

    let text = fs::read_to_string(file).unwrap();
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&report["version"], &report["summary"]["failed"]), (&1.into(), &1.into()));
    assert_eq!(report["gpus"][0]["instances"].as_array().unwrap().len(), 2);
    let times = report["times"].as_array().unwrap();
    assert!(times.iter().any(|entry| entry["function"] == "nvmlInit_v2" && entry["min_ms"].as_f64() > Some(0.0)));
    let uuid = node.state()["gpus"][0]["uuid"].as_str().unwrap().to_owned();
    assert!(!text.contains(&uuid) && !text.contains("GPU-"));
}

#[test]
fn an_interrupted_program_cleans_up() {
    let node = Simulator::start("[{product: h100-80gb, pciBusId: '0000:3b:00.0'}]");
    node.ctl(&["latency", "nvmlGpuInstanceDestroy=200ms"]);
    let before = node.state();
    let mut child = program()
        .arg("--driver-root")
        .arg(node.root().path())
        .args(["--carve", "0000:3b:00.0"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.any(|line| line.contains("(2 of 25 cuts)")));
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert!(said.any(|line| line.contains("cleaning up")));
    said.for_each(drop);
    assert_eq!(wait(child).code(), Some(130));
    assert_eq!(node.state(), before);
}

#[test]
fn a_driver_root_without_nvml_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let output = program().arg("--driver-root").arg(directory.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("libnvidia-ml.so.1 not found") && said.contains("--driver-root"), "{said}");
}
