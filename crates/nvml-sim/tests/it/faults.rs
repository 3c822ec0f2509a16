//! What goes wrong on command, as a client of the C ABI meets it.
#![expect(unsafe_code, reason = "calls of the C ABI")]

use std::ffi::c_uint;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kerf_nvml_sim::client::Client;
use kerf_nvml_sim::code::Code;
use kerf_nvml_sim::fault::{CallFault, ForeignInstance, LateCapabilities, Part, Span, Times};
use nvml_wrapper_sys::bindings as sys;

use crate::abi::{gpu, load};
use crate::sim::{Sim, node, wait_for};

const CREATE: &str = "nvmlDeviceCreateGpuInstanceWithPlacement";

/// Two H100 in MIG mode.
const TWO: &str = "gpus: [{product: h100-80gb, count: 2, mig: {current: true}}]";

fn count(library: &sys::NvmlLib) -> c_uint {
    let mut count = 0;
    // SAFETY: the pointer is to memory of ours.
    unsafe { library.nvmlDeviceGetCount_v2(&raw mut count) }
}

/// Creates a 1g at a slice.
fn create(library: &sys::NvmlLib, device: sys::nvmlDevice_t, start: c_uint) -> c_uint {
    let place = sys::nvmlGpuInstancePlacement_t { start, size: 1 };
    let mut gi = std::ptr::null_mut();
    // SAFETY: the pointers are to memory of ours.
    unsafe { library.nvmlDeviceCreateGpuInstanceWithPlacement(device, 19, &raw const place, &raw mut gi) }
}

fn uuid(library: &sys::NvmlLib, device: sys::nvmlDevice_t) -> c_uint {
    let mut buffer = [0; 96];
    // SAFETY: the buffer is as long as is said.
    unsafe { library.nvmlDeviceGetUUID(device, buffer.as_mut_ptr(), 96) }
}

fn by_index(library: &sys::NvmlLib, index: c_uint) -> c_uint {
    let mut device = std::ptr::null_mut();
    // SAFETY: the pointer is to memory of ours.
    unsafe { library.nvmlDeviceGetHandleByIndex_v2(index, &raw mut device) }
}

/// Return value and activation status.
fn set_mode(library: &sys::NvmlLib, device: sys::nvmlDevice_t, on: bool) -> (c_uint, c_uint) {
    let mut activation = 0;
    // SAFETY: the pointer is to memory of ours.
    let ret = unsafe { library.nvmlDeviceSetMigMode(device, on.into(), &raw mut activation) };
    (ret, activation)
}

fn modes(library: &sys::NvmlLib, device: sys::nvmlDevice_t) -> (c_uint, c_uint) {
    let (mut current, mut pending) = (9, 9);
    // SAFETY: the pointers are to memory of ours.
    assert_eq!(unsafe { library.nvmlDeviceGetMigMode(device, &raw mut current, &raw mut pending) }, 0);
    (current, pending)
}

fn instances(sim: &Sim, gpu: usize) -> usize {
    sim.state().gpus[gpu].mig.as_ref().unwrap().instances.len()
}

#[test]
fn the_nth_call_of_one_gpu_fails_so_many_times() {
    let sim = Sim::start(&node(TWO));
    let (library, client) = (load(&sim), Client::new(sim.root()));
    let devices = [gpu(&library, 0), gpu(&library, 1)];
    let fault = client.arm(CallFault::new(CREATE).on(1).nth(2).times(2).fails(Code::IN_USE)).unwrap();
    let seen: Vec<_> = (0..4).flat_map(|start| devices.map(|device| create(&library, device, start))).collect();
    assert_eq!(seen, [0, 0, 0, 19, 0, 19, 0, 0]);
    assert_eq!((instances(&sim, 0), instances(&sim, 1)), (4, 2), "a call that fails does nothing");
    assert_eq!(client.met(fault), Ok(2));
    let armed = &client.faults().unwrap()[0];
    assert!(!armed.active, "over, and listed until cleared");
    client.clear(fault).unwrap();
    assert_eq!(client.clear(fault), Err(Code::NOT_FOUND));
    assert_eq!(client.faults().unwrap(), []);
}

#[test]
fn a_call_that_does_its_work_can_report_failure() {
    let sim = Sim::start(&node(TWO));
    let (library, client) = (load(&sim), Client::new(sim.root()));
    let device = gpu(&library, 0);
    client.arm(CallFault::new(CREATE).fails_after(Code::UNKNOWN)).unwrap();
    assert_eq!(create(&library, device, 3), 999);
    assert_eq!(instances(&sim, 0), 1);
    assert_eq!(create(&library, device, 3), 23, "it is there");
    client.arm(CallFault::new(CREATE).fails_after(Code::UNKNOWN)).unwrap();
    assert_eq!(create(&library, device, 3), 23, "work that fails by itself says why");
}

#[test]
fn every_function_meets_its_fault_once_in_a_call() {
    let sim = Sim::start(&node(TWO));
    let (library, client) = (load(&sim), Client::new(sim.root()));
    let device = gpu(&library, 0);
    let fails = |function: &str| client.arm(CallFault::new(function).fails(Code::UNKNOWN)).unwrap();
    // SAFETY: pointers are to memory of ours, of the size that each function documents.
    unsafe {
        fails("nvmlDeviceGetCount");
        assert_eq!((count(&library), count(&library)), (999, 0), "named without its version");
        fails("nvmlDeviceGetHandleByIndex_v2");
        assert_eq!((by_index(&library, 0), by_index(&library, 0)), (999, 0));
        fails("nvmlDeviceGetUUID");
        assert_eq!((uuid(&library, device), uuid(&library, device)), (999, 0));
        fails("nvmlInit_v2");
        assert_eq!((library.nvmlInit_v2(), library.nvmlInit_v2()), (999, 0));
        fails("nvmlShutdown");
        assert_eq!((library.nvmlShutdown(), library.nvmlShutdown()), (999, 0));
        fails("nvmlEventSetCreate");
        let mut set = std::mem::zeroed();
        assert_eq!((library.nvmlEventSetCreate(&raw mut set), library.nvmlEventSetCreate(&raw mut set)), (999, 0));
        fails("nvmlEventSetFree");
        assert_eq!((library.nvmlEventSetFree(set), library.nvmlEventSetFree(set)), (999, 0));
        // A fault of one GPU also meets the calls that look for that GPU.
        client.arm(CallFault::new("nvmlDeviceGetHandleByIndex").on(1).fails(Code::GPU_IS_LOST)).unwrap();
        assert_eq!([0, 1, 1].map(|index| by_index(&library, index)), [0, 15, 0]);
        client.arm(CallFault::new("nvmlDeviceGetHandleByIndex").fails(Code::UNKNOWN)).unwrap();
        assert_eq!([7, 7].map(|index| by_index(&library, index)), [999, 2], "nor does what is not there hide it");
    }
    assert!(client.faults().unwrap().iter().all(|armed| (armed.met, armed.active) == (1, false)));
}

#[test]
fn the_activation_status_fails_by_itself() {
    let sim = Sim::start(&node("gpus: [{product: h100-80gb}, {product: a100-40gb, pciBusId: '0000:d0:00.0'}]"));
    let (library, client) = (load(&sim), Client::new(sim.root()));
    let (hopper, ampere) = (gpu(&library, 0), gpu(&library, 1));
    let fault = || CallFault::new("nvmlDeviceSetMigMode");
    client.arm(fault().activation(Code::RESET_REQUIRED).times(2)).unwrap();
    assert_eq!(set_mode(&library, ampere, true), (0, 16));
    assert_eq!(modes(&library, ampere), (0, 1));
    assert_eq!(set_mode(&library, hopper, true), (0, 16));
    assert_eq!(modes(&library, hopper), (0, 1), "it waits for a reset");
    assert_eq!(set_mode(&library, hopper, false), (0, 0));
    client.arm(fault().activation(Code::IN_USE)).unwrap();
    assert_eq!(set_mode(&library, hopper, true), (0, 19));
    assert_eq!(modes(&library, hopper), (0, 0), "nothing happened");
    client.arm(fault().fails(Code::NO_PERMISSION)).unwrap();
    assert_eq!(set_mode(&library, hopper, true).0, 4);
    client.arm(CallFault { after: true, ..fault().activation(Code::IN_USE) }).unwrap();
    assert_eq!(set_mode(&library, hopper, true), (0, 19));
    assert_eq!(modes(&library, hopper), (1, 1), "it lied");
}

/// Calls in a thread of its own; the answer comes over a channel.
fn in_background(sim: &Sim, call: impl FnOnce(&sys::NvmlLib) -> c_uint + Send + 'static) -> mpsc::Receiver<c_uint> {
    let library = load(sim);
    let (answer, answers) = mpsc::channel();
    // The test may be over before the call is.
    std::thread::spawn(move || _ = answer.send(call(&library)));
    answers
}

#[test]
fn a_hanging_call_stops_nobody_else_and_goes_on_when_the_fault_is_cleared() {
    let sim = Sim::start(&node(TWO));
    let (library, client) = (load(&sim), Client::new(sim.root()));
    let fault = client.arm(CallFault::new(CREATE).hangs(Span::Forever)).unwrap();
    let answers = in_background(&sim, |library| create(library, gpu(library, 0), 0));
    wait_for("the call hangs", || client.met(fault) == Ok(1));
    for index in [0, 1] {
        let device = gpu(&library, index);
        assert_eq!(create(&library, device, 5), 0, "GPU {index} can be changed");
        assert_eq!(uuid(&library, device), 0, "GPU {index} can be looked at");
    }
    assert_eq!(answers.try_recv(), Err(mpsc::TryRecvError::Empty));
    client.clear(fault).unwrap();
    assert_eq!(answers.recv_timeout(Duration::from_secs(20)), Ok(0));
    assert_eq!(instances(&sim, 0), 2);
}

#[test]
fn a_call_can_hang_for_a_time_and_then_fail() {
    let sim = Sim::start(&node(TWO));
    let (library, client) = (load(&sim), Client::new(sim.root()));
    let device = gpu(&library, 0);
    client.arm(CallFault::new(CREATE).hangs(Duration::from_millis(300)).fails(Code::TIMEOUT)).unwrap();
    let start = Instant::now();
    assert_eq!(create(&library, device, 0), 10);
    assert!(start.elapsed() >= Duration::from_millis(300));
    assert_eq!(instances(&sim, 0), 0);
}

#[test]
fn a_lost_gpu_is_lost_everywhere_and_takes_no_neighbour_with_it() {
    let sim = Sim::start(&node(TWO));
    let (library, client) = (load(&sim), Client::new(sim.root()));
    let devices = [gpu(&library, 0), gpu(&library, 1)];
    assert_eq!(devices.map(|device| create(&library, device, 0)), [0, 0]);
    let fault = client.lose(0).unwrap();
    assert!(sim.state().gpus[0].lost && sim.state().gpus[0].broken);
    assert_eq!([uuid(&library, devices[0]), create(&library, devices[0], 1), by_index(&library, 0)], [15; 3]);
    assert_eq!(set_mode(&library, devices[0], false).0, 15);
    assert_eq!(client.met(fault), Ok(4));
    assert!(!sim.ctl_output("reset 0").status.success(), "what is not on the bus cannot be reset");
    assert_eq!((count(&library), by_index(&library, 1), create(&library, devices[1], 1)), (0, 0, 0));

    client.clear(fault).unwrap();
    assert_eq!((uuid(&library, devices[0]), instances(&sim, 0), instances(&sim, 1)), (0, 0, 2));
    assert!(!sim.root().join("proc/driver/nvidia/capabilities/gpu0/mig/gi7").exists());

    client.lose(0).unwrap();
    client.reload().unwrap();
    assert_eq!(by_index(&library, 0), 15, "the driver alone does not bring it back");
    client.reboot().unwrap();
    assert_eq!(by_index(&library, 0), 0);
    assert!(client.faults().unwrap().iter().all(|armed| !armed.active));
    create_foreign(&client, 0, 0);
    client.clear_all().unwrap();
    assert_eq!(instances(&sim, 0), 1, "a fault that a reboot has healed is nothing to bring back from");
}

/// A 1g that somebody else creates, after switching MIG mode on.
fn create_foreign(client: &Client, gpu: usize, start: u32) {
    use kerf_nvml_sim::{view::Node, wire::Op};
    let handle = client.ask::<Node>("", Op::Node).unwrap().gpus[gpu].handle;
    client.ask::<u32>("", Op::SetMigMode(handle, true)).unwrap();
    let instance = ForeignInstance { gpu: gpu.into(), profile: "1g.10gb".to_owned(), start, compute: true };
    client.create(instance).unwrap();
}

#[test]
fn a_reboot_leaves_what_hardware_keeps() {
    let sim = Sim::start(&node(
        "gpus: [{product: a100-40gb, mig: {current: true}}, {product: h100-80gb, mig: {current: true}}]",
    ));
    let (library, client) = (load(&sim), Client::new(sim.root()));
    let devices = [gpu(&library, 0), gpu(&library, 1)];
    assert_eq!(devices.map(|device| create(&library, device, 0)), [0, 0]);
    let (dev, proc) = (sim.root().join("dev"), sim.root().join("proc/driver/nvidia"));
    std::fs::remove_file(dev.join("nvidia1")).unwrap();
    let fault = client.arm(CallFault::new(CREATE).always().fails(Code::UNKNOWN)).unwrap();
    sim.ctl("reboot");
    let modes: Vec<_> = sim.state().gpus.iter().map(|gpu| gpu.mig.as_ref().unwrap().current).collect();
    assert_eq!(modes, [true, false], "the A100 keeps its mode, the H100 does not");
    assert_eq!((instances(&sim, 0), instances(&sim, 1)), (0, 0));
    assert!(devices.iter().all(|device| uuid(&library, *device) == 2), "handles are stale");
    assert!(!proc.join("capabilities/gpu0").exists() && proc.join("capabilities/mig/config").exists());
    let minors = std::fs::read_to_string(sim.root().join("proc/driver/nvidia-caps/mig-minors")).unwrap();
    assert_eq!(minors.lines().count(), 2 + 32 * 15 * 9);
    assert!(dev.join("nvidia1").exists(), "device nodes are made anew");
    assert_eq!(create(&library, gpu(&library, 0), 0), 999, "the script of what goes wrong stays");
    client.clear(fault).unwrap();
    assert_eq!(create(&library, gpu(&library, 0), 0), 0);
}

#[test]
fn capability_files_come_late_or_when_the_fault_is_cleared() {
    let sim = Sim::start(&node(TWO));
    let (library, client) = (load(&sim), Client::new(sim.root()));
    let access = |gi: u32| sim.root().join(format!("proc/driver/nvidia/capabilities/gpu0/mig/gi{gi}/access"));
    let cap = |gi: u32| sim.root().join(format!("dev/nvidia-caps/nvidia-cap{}", 3 + gi * 9));
    let listed = |gi: u32| {
        let minors = std::fs::read_to_string(sim.root().join("proc/driver/nvidia-caps/mig-minors")).unwrap();
        minors.lines().any(|line| line.starts_with(&format!("gpu0/gi{gi}/access ")))
    };
    let device = gpu(&library, 0);
    let late = LateCapabilities { parts: vec![Part::Nodes], ..LateCapabilities::new(Duration::from_millis(400)) };
    let fault = client.arm(LateCapabilities { times: Times::Number(1), ..late }).unwrap();
    let start = Instant::now();
    assert_eq!(create(&library, device, 0), 0);
    assert!(access(7).exists() && listed(7) && (!cap(7).exists() || start.elapsed() >= Duration::from_millis(400)));
    wait_for("the node appears", || cap(7).exists());
    assert!(start.elapsed() >= Duration::from_millis(400));
    assert_eq!(client.met(fault), Ok(1));
    assert_eq!(create(&library, device, 1), 0);
    assert!(cap(8).exists(), "only the first was late");

    let fault = client.arm(LateCapabilities { gpu: Some(0.into()), ..LateCapabilities::new(Span::Forever) }).unwrap();
    assert_eq!((create(&library, device, 2), create(&library, gpu(&library, 1), 2)), (0, 0));
    assert!(!access(9).exists() && !cap(9).exists() && !listed(9));
    assert!(
        sim.root().join("proc/driver/nvidia/capabilities/gpu1/mig/gi9/access").exists(),
        "the other GPU's are there"
    );
    assert_eq!(create(&library, device, 3), 0);
    client.destroy(0, 10).unwrap();
    assert!(listed(10), "what is gone is listed as ever");
    client.clear(fault).unwrap();
    wait_for("what was missing appears", || access(9).exists() && cap(9).exists() && listed(9));
    assert!(!access(10).exists(), "what is gone does not come back");
}

#[test]
fn another_hand_creates_and_destroys() {
    let sim = Sim::start(&node(TWO));
    let created = sim.ctl("create 1 1g.10gb 6 --compute");
    assert_eq!(created.split_whitespace().collect::<String>(), r#"{"gi":13,"ci":0}"#);
    let address = sim.state().gpus[1].pci_bus_id.clone();
    sim.ctl(&format!("create {address} 9 0"));
    let state = sim.state();
    let mig = state.gpus[1].mig.as_ref().unwrap();
    let seen: Vec<_> =
        mig.instances.iter().map(|gi| (gi.profile.as_str(), gi.placement.start, gi.compute_instances.len())).collect();
    assert_eq!(seen, [("3g.40gb", 0, 0), ("1g.10gb", 6, 1)]);
    assert!(sim.root().join("proc/driver/nvidia/capabilities/gpu1/mig/gi13/ci0/access").exists());
    for wrong in
        ["create 1 1g.10gb 6", "create 1 1g.5gb 0", "create 1 9 2", "create 7 9 0", "destroy 1 5", "destroy 9 1"]
    {
        assert!(!sim.ctl_output(wrong).status.success(), "{wrong}");
    }
    sim.ctl("destroy 1 13");
    assert_eq!(instances(&sim, 1), 1);
    assert!(!sim.root().join("proc/driver/nvidia/capabilities/gpu1/mig/gi13").exists());
}

#[test]
fn a_node_file_scripts_faults() {
    let sim = Sim::start(&node(
        "gpus: [{product: h100-80gb, count: 2, mig: {current: true}}]
faults:
- call: {function: nvmlDeviceCreateGpuInstanceWithPlacement, gpu: 0, code: IN_USE, times: 2}
- create: {gpu: 0, profile: 1g.10gb, start: 6, compute: true}
- process: {gpu: 0, gi: 13, ci: 0, pid: 4242, memoryMib: 512}
- busy: {gpu: '0000:3b:00.0', gi: 13, tries: 3}
- capabilities: {parts: [nodes], late: forever, times: 1}
- lost: {gpu: 1}",
    ));
    let (library, client) = (load(&sim), Client::new(sim.root()));
    assert_eq!([0, 1].map(|index| by_index(&library, index)), [0, 15]);
    let device = gpu(&library, 0);
    assert_eq!([0, 0, 0].map(|start| create(&library, device, start)), [19, 19, 0]);
    assert!(!sim.root().join("dev/nvidia-caps/nvidia-cap66").exists());
    assert_eq!(client.destroy(0, 13), Err(Code::IN_USE));
    let met: Vec<_> = client.faults().unwrap().iter().map(|armed| (armed.met, armed.active)).collect();
    assert_eq!(met, [(2, false), (1, true), (1, true), (1, false), (1, true)]);
}

#[test]
fn ctl_arms_lists_and_clears() {
    let sim = Sim::start(&node(TWO));
    let library = load(&sim);
    let arm = |arguments: &str| sim.ctl(&format!("fault {arguments}")).trim().parse::<u64>().unwrap();
    assert_eq!(arm("call nvmlDeviceGetCount_v2 --nth 2 --times 1 --code NVML_ERROR_UNKNOWN --hang 1ms"), 1);
    assert_eq!(arm("call nvmlDeviceSetMigMode --gpu 1 --activation IN_USE --after --times always"), 2);
    assert_eq!(arm("lost 1"), 3);
    assert_eq!(arm("process 0 77 --name sleep --memory-mib 1 --for 1h".replace("1h", "3600s").as_str()), 4);
    assert_eq!(arm("busy 0 --tries 2 --for forever"), 5);
    assert_eq!(arm("capabilities --gpu 0 --parts files,minors --late 2s --nth 2 --times 3"), 6);
    assert_eq!([count(&library), count(&library)], [0, 999]);
    let list: serde_json::Value = serde_json::from_str(&sim.ctl("fault list")).unwrap();
    assert_eq!(list.as_array().unwrap().len(), 6);
    let call = serde_json::json!({
        "id": 1, "met": 1, "active": false,
        "call": {"function": "nvmlDeviceGetCount_v2", "nth": 2, "times": "1", "code": "UNKNOWN", "hang": "1ms", "after": false},
    });
    assert_eq!(list[0], call);
    sim.ctl("fault clear 4");
    sim.ctl("fault clear all");
    assert_eq!(sim.ctl("fault list").trim(), "[]");
    for (wrong, reason) in [
        ("fault clear 4", "no fault 4"),
        ("fault clear some", "neither the id"),
        ("fault call nvmlDeviceGetCnt --code IN_USE", "no NVML function"),
        ("fault call nvmlInit_v2 --code BUSY", "no failure of nvml.h"),
        ("fault call nvmlInit_v2", "needs a code"),
        ("fault lost 2", "no GPU 2"),
        ("fault process 0 1 --gi 3", "Not Found"),
        ("fault process 0 1 --ci 3", "--gi"),
        ("fault busy 0 --for soon", "neither a time"),
    ] {
        let output = sim.ctl_output(wrong);
        assert!(!output.status.success(), "{wrong}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(reason), "{wrong}: {output:?}");
    }
    assert_eq!(sim.ctl("fault list").trim(), "[]", "what is refused is not armed");
}
