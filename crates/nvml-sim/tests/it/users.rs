//! Who uses a GPU, as NVML's lists show it, and what its users are in the way of.
#![expect(unsafe_code, reason = "calls of the C ABI")]

use std::ffi::{CStr, c_uint};
use std::time::Duration;

use kerf_nvml_sim::client::Client;
use kerf_nvml_sim::code::Code;
use kerf_nvml_sim::fault::{Busy, ForeignInstance, Process};
use nvml_wrapper_sys::bindings as sys;

use crate::abi::{gpu, load};
use crate::sim::{Sim, node, wait_for};

type Info = sys::nvmlProcessInfo_v2_t;

/// `nvmlDeviceGetComputeRunningProcesses`, which the header has no more.
type FirstVersion = unsafe extern "C" fn(sys::nvmlDevice_t, *mut c_uint, *mut sys::nvmlProcessInfo_v1_t) -> c_uint;

/// An H100 with two 1g in use by nobody: GPU instances 7 and 8.
fn divided(start: impl Fn(&str) -> Sim) -> (Sim, Client) {
    let sim = start(&node("gpus: [{product: h100-80gb, mig: {current: true}}]"));
    let client = Client::new(sim.root());
    for start in [0, 1] {
        let instance = ForeignInstance { gpu: 0.into(), profile: "1g.10gb".to_owned(), start, compute: true };
        client.create(instance).unwrap();
    }
    (sim, client)
}

fn process(gi: u32, pid: u32) -> Process {
    Process { gi: Some(gi), ci: Some(0), name: format!("worker-{pid}"), memory_mib: 512, ..Process::new(0, pid) }
}

/// The code, the count after, and as many infos as there is room for.
fn list(library: &sys::NvmlLib, device: sys::nvmlDevice_t, room: usize) -> (c_uint, c_uint, Vec<Info>) {
    let mut infos = vec![Info { pid: 0, usedGpuMemory: 0, gpuInstanceId: 0, computeInstanceId: 0 }; room];
    let mut count = room as c_uint;
    let array = if room == 0 { std::ptr::null_mut() } else { infos.as_mut_ptr() };
    // SAFETY: the array has as many elements as is said.
    let ret = unsafe { library.nvmlDeviceGetComputeRunningProcesses_v3(device, &raw mut count, array) };
    (ret, count, infos)
}

fn mig(library: &sys::NvmlLib, index: c_uint) -> sys::nvmlDevice_t {
    let mut device = std::ptr::null_mut();
    // SAFETY: the pointer is to memory of ours.
    let ret = unsafe { library.nvmlDeviceGetMigDeviceHandleByIndex(gpu(library, 0), index, &raw mut device) };
    assert_eq!(ret, 0);
    device
}

#[test]
fn processes_are_listed_with_their_instances() {
    let (sim, client) = divided(Sim::start);
    let library = load(&sim);
    client.arm(process(7, 100)).unwrap();
    client.arm(process(8, 200)).unwrap();
    let pids = |device, room| {
        let (ret, count, infos) = list(&library, device, room);
        assert_eq!((ret, count as usize), (0, infos.iter().filter(|info| info.pid != 0).count()));
        infos.iter().map(|info| (info.pid, info.gpuInstanceId, info.computeInstanceId)).collect::<Vec<_>>()
    };
    let device = gpu(&library, 0);
    assert_eq!(pids(device, 3), [(100, 7, 0), (200, 8, 0), (0, 0, 0)]);
    assert_eq!(pids(mig(&library, 0), 1), [(100, 7, 0)]);
    assert_eq!(pids(mig(&library, 1), 1), [(200, 8, 0)]);
    assert_eq!(list(&library, device, 0).0, 7, "asked for the count");
    let (ret, count, infos) = list(&library, device, 1);
    assert_eq!((ret, count, infos[0].pid), (7, 2, 0), "too small: only the count");
    assert_eq!(list(&library, device, 2).2[0].usedGpuMemory, 512 << 20);

    // SAFETY: pointers are to memory of ours, of the size that each function documents.
    unsafe {
        let mut name = [0; 64];
        assert_eq!(library.nvmlSystemGetProcessName(200, name.as_mut_ptr(), 64), 0);
        assert_eq!(CStr::from_ptr(name.as_ptr()).to_str(), Ok("worker-200"));
        let mut memory = std::mem::zeroed();
        assert_eq!(library.nvmlDeviceGetMemoryInfo(mig(&library, 0), &raw mut memory), 0);
        assert_eq!((memory.used, memory.free), (512 << 20, memory.total - (512 << 20)));
    }
}

#[test]
fn every_version_of_the_list_has_its_own_layout() {
    let sim = Sim::start(&node("gpus: [{product: l40s}]"));
    let library = load(&sim);
    let client = Client::new(sim.root());
    client.arm(Process { memory_mib: 1, ..Process::new(0, 100) }).unwrap();
    client.arm(Process { memory_mib: 2, ..Process::new(0, 200) }).unwrap();
    let device = gpu(&library, 0);
    // SAFETY: the library is loaded and the function is of this type; the array has as many elements as is said.
    unsafe {
        let (mut count, mut v1) = (2, [sys::nvmlProcessInfo_v1_t { pid: 0, usedGpuMemory: 0 }; 2]);
        let path = std::ffi::CString::new(sim.library().into_os_string().into_encoded_bytes()).unwrap();
        let symbol =
            libc::dlsym(libc::dlopen(path.as_ptr(), libc::RTLD_NOW), c"nvmlDeviceGetComputeRunningProcesses".as_ptr());
        assert!(!symbol.is_null());
        let first: FirstVersion = std::mem::transmute(symbol);
        assert_eq!(first(device, &raw mut count, v1.as_mut_ptr()), 0);
        assert_eq!(v1.map(|info| (info.pid, info.usedGpuMemory >> 20)), [(100, 1), (200, 2)]);
    }
    let (ret, _, infos) = list(&library, device, 2);
    assert_eq!(ret, 0);
    assert_eq!(infos.iter().map(|info| info.gpuInstanceId).collect::<Vec<_>>(), [u32::MAX; 2], "no MIG, no instance");
}

#[test]
fn what_a_process_uses_is_in_use_until_it_ends() {
    let (sim, client) = divided(Sim::start);
    let library = load(&sim);
    let fault = client.arm(process(7, 100)).unwrap();
    let destroy = |gi: c_uint| {
        // SAFETY: the pointers are to memory of ours.
        unsafe {
            let (mut instance, mut compute) = (std::ptr::null_mut(), std::ptr::null_mut());
            assert_eq!(library.nvmlDeviceGetGpuInstanceById(gpu(&library, 0), gi, &raw mut instance), 0);
            match library.nvmlGpuInstanceGetComputeInstanceById(instance, 0, &raw mut compute) {
                0 => (library.nvmlComputeInstanceDestroy(compute), library.nvmlGpuInstanceDestroy(instance)),
                _ => (u32::MAX, library.nvmlGpuInstanceDestroy(instance)),
            }
        }
    };
    assert_eq!(destroy(7), (19, 19));
    assert_eq!(destroy(8), (0, 0), "a neighbour is free");
    assert!(!sim.ctl_output("reset 0").status.success(), "a GPU in use is not reset");
    assert_eq!(client.met(fault), Ok(2), "compute instance and reset; the GPU instance has the former in it");
    client.clear(fault).unwrap();
    assert_eq!(destroy(7), (0, 0));
    assert_eq!(client.arm(process(7, 100)), Err(Code::NOT_FOUND), "there is nothing to use");
}

#[test]
fn a_process_ends_by_itself() {
    let (sim, client) = divided(Sim::start);
    let library = load(&sim);
    let device = gpu(&library, 0);
    let fault = client.arm(Process { lasts: Some(Duration::from_millis(300).into()), ..process(7, 100) }).unwrap();
    wait_for("its end", || list(&library, device, 0).0 == 0);
    assert!(!client.faults().unwrap().iter().any(|armed| armed.id == fault && armed.active));
    client.destroy(0, 7).unwrap();
}

#[test]
fn who_is_not_listed_is_in_the_way_all_the_same() {
    let (sim, client) = divided(Sim::start);
    let library = load(&sim);
    client.arm(Busy { gi: Some(7), tries: Some(2), ..Busy::new(0) }).unwrap();
    assert_eq!(list(&library, gpu(&library, 0), 0).0, 0, "nobody is listed");
    assert_eq!([(); 3].map(|()| client.destroy(0, 7)), [Err(Code::IN_USE), Err(Code::IN_USE), Ok(())]);
    let busy = client.arm(Busy { lasts: Some(Duration::from_millis(300).into()), ..Busy::new(0) }).unwrap();
    wait_for("its end", || client.destroy(0, 8).is_ok());
    assert!(client.met(busy).unwrap() >= 1);
}

#[test]
fn a_gpu_in_use_keeps_its_mode() {
    let sim = Sim::start(&node("gpus: [{product: h100-80gb}, {product: a100-40gb, pciBusId: '0000:d0:00.0'}]"));
    let (library, client) = (load(&sim), Client::new(sim.root()));
    let switch = |index| {
        let (mut activation, mut current, mut pending) = (0, 9, 9);
        let device = gpu(&library, index);
        // SAFETY: the pointers are to memory of ours.
        unsafe {
            assert_eq!(library.nvmlDeviceSetMigMode(device, 1, &raw mut activation), 0);
            assert_eq!(library.nvmlDeviceGetMigMode(device, &raw mut current, &raw mut pending), 0);
        }
        (activation, current, pending)
    };
    let users = [client.arm(Process::new(0, 1)).unwrap(), client.arm(Busy::new(1)).unwrap()];
    assert_eq!(switch(0), (19, 0, 0));
    assert_eq!(switch(1), (19, 0, 1), "pending until a reset");
    assert_eq!(users.map(|user| client.met(user).unwrap()), [1, 1]);
    client.clear_all().unwrap();
    assert_eq!(switch(0), (0, 1, 1));
}

#[test]
fn users_do_not_outlive_the_driver() {
    for end in ["reload", "reboot"] {
        let (sim, client) = divided(Sim::start);
        let library = load(&sim);
        client.arm(process(7, 100)).unwrap();
        client.arm(Busy::new(0)).unwrap();
        sim.ctl(end);
        assert_eq!(list(&library, gpu(&library, 0), 0).0, 0, "{end}: nobody is listed");
        assert!(client.faults().unwrap().iter().all(|armed| !armed.active), "{end}");
        sim.ctl("reset 0");
    }
}

/// NVIDIA's program has the list of processes from the private interface, which is not simulated; what it asks NVML for,
/// it shows.
#[test]
fn nvidia_smi_shows_the_memory_in_use_and_destroys_nothing_that_is() {
    let (sim, client) = divided(Sim::with_programs);
    client.arm(process(8, 4242)).unwrap();
    let table = sim.smi("");
    assert!(table.lines().any(|line| line.starts_with("|  0    8   0   1") && line.contains(" 512MiB / ")), "{table}");
    for what in ["-dci", "-dgi"] {
        let output = sim.smi_output(&format!("mig {what} -i 0 -gi 8"));
        assert!(!output.status.success());
        assert!(String::from_utf8_lossy(&output.stdout).contains("In use by another client"), "{output:?}");
    }
}
