//! The C ABI through NVIDIA's header, in the form of the crate nvml-wrapper-sys.
#![expect(unsafe_code, reason = "this is the C ABI")]

use std::ffi::{c_uint, c_void};
use std::time::{Duration, Instant};

use nvml_wrapper_sys::bindings as sys;

use crate::sim::{Sim, node, one};

/// The library of a driver root, initialised.
pub(crate) fn load(sim: &Sim) -> sys::NvmlLib {
    // SAFETY: the library is ours and does nothing when loaded; initialising takes no argument.
    unsafe {
        let library = sys::NvmlLib::new(sim.library()).unwrap();
        assert_eq!(library.nvmlInit_v2(), 0);
        library
    }
}

pub(crate) fn gpu(library: &sys::NvmlLib, index: c_uint) -> sys::nvmlDevice_t {
    let mut device = std::ptr::null_mut();
    // SAFETY: the pointer is to memory of ours.
    assert_eq!(unsafe { library.nvmlDeviceGetHandleByIndex_v2(index, &raw mut device) }, 0);
    device
}

/// Handles may be used in any thread: they are numbers.
#[derive(Clone, Copy)]
struct Device(sys::nvmlDevice_t);
// SAFETY: NVML's handles are not dereferenced here, and NVML is thread-safe by contract.
unsafe impl Send for Device {}

impl Device {
    fn handle(self) -> sys::nvmlDevice_t {
        self.0
    }
}

fn create(library: &sys::NvmlLib, device: sys::nvmlDevice_t, profile: c_uint) -> (c_uint, sys::nvmlGpuInstance_t) {
    let mut gi = std::ptr::null_mut();
    // SAFETY: the pointer is to memory of ours.
    let ret = unsafe { library.nvmlDeviceCreateGpuInstance(device, profile, &raw mut gi) };
    (ret, gi)
}

#[test]
fn version_words_are_checked() {
    let sim = Sim::start(&node("gpus: [{product: rtx-pro-6000, mig: {current: true}}]"));
    let library = load(&sim);
    let device = gpu(&library, 0);
    let ask = |info: *mut c_void, id: c_uint| {
        // SAFETY: `info` is to a structure of ours of the size that its version word says.
        unsafe { library.nvmlDeviceGetGpuInstanceProfileInfoByIdV(device, id, info.cast()) }
    };
    // SAFETY: plain numbers, for which zero is a value.
    let (mut v2, mut v3): (sys::nvmlGpuInstanceProfileInfo_v2_t, sys::nvmlGpuInstanceProfileInfo_v3_t) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    v2.version = 0x0200_0098;
    v3.version = 0x0300_0098;
    assert_eq!(ask((&raw mut v2).cast(), 14), 0);
    assert_eq!((v2.id, v2.sliceCount, v2.memorySizeMB), (14, 1, 24192));
    assert_eq!(ask((&raw mut v3).cast(), 47), 0);
    assert_eq!((v3.id, v3.capabilities), (47, 2), "graphics");
    v2.version = 0x0100_0098;
    assert_eq!(ask((&raw mut v2).cast(), 14), sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    assert_eq!(ask(std::ptr::null_mut(), 14), sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
}

#[test]
fn gpus_meet_where_the_buses_do() {
    let sim = Sim::start(&node(
        "gpus: [{product: l40s, pcieRoot: 'pci0000:3a', numaNode: 0}, {product: l40s, pcieRoot: 'pci0000:3a', numaNode: 0}, \
         {product: l40s, pcieRoot: 'pci0000:80', numaNode: 0}, {product: l40s, pcieRoot: 'pci0000:c0', numaNode: 1}]",
    ));
    let library = load(&sim);
    let meet = |other: c_uint| {
        let mut level = 99;
        // SAFETY: the pointer is to memory of ours.
        let ret = unsafe {
            library.nvmlDeviceGetTopologyCommonAncestor(gpu(&library, 0), gpu(&library, other), &raw mut level)
        };
        assert_eq!(ret, 0);
        level
    };
    let levels = [
        sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_INTERNAL,
        sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_HOSTBRIDGE,
        sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_NODE,
        sys::nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM,
    ];
    assert_eq!([0, 1, 2, 3].map(meet), levels);
    let mut state = 99;
    // SAFETY: the pointer is to memory of ours.
    let ret = unsafe { library.nvmlDeviceGetNvLinkState(gpu(&library, 0), 0, &raw mut state) };
    assert_eq!((ret, state), (sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED, 99), "there is no NVLink");
}

#[test]
fn null_pointers_are_refused_before_anything_happens() {
    let sim = Sim::start(&node("gpus: [{product: h100-80gb, mig: {current: true}}]"));
    let library = load(&sim);
    let device = gpu(&library, 0);
    // SAFETY: null is what is tried.
    let ret = unsafe { library.nvmlDeviceCreateGpuInstance(device, 19, std::ptr::null_mut()) };
    assert_eq!(ret, sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
    assert_eq!(sim.state().gpus[0].mig.as_ref().unwrap().instances, []);
}

#[test]
fn a_buffer_that_is_too_small_is_not_written() {
    let sim = Sim::start(&one("h100-80gb"));
    let library = load(&sim);
    let device = gpu(&library, 0);
    let mut buffer = [0x55; 8];
    // SAFETY: the buffer is as long as is said.
    let ret = unsafe { library.nvmlDeviceGetName(device, buffer.as_mut_ptr(), 8) };
    assert_eq!(ret, sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
    assert_eq!(buffer, [0x55; 8]);
}

#[test]
fn nothing_works_before_initialisation_and_after_shutdown() {
    let sim = Sim::start(&one("h100-80gb"));
    // SAFETY: the library is ours; pointers are to memory of ours.
    unsafe {
        let library = sys::NvmlLib::new(sim.library()).unwrap();
        let mut count = 0;
        assert_eq!(library.nvmlDeviceGetCount_v2(&raw mut count), sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
        assert_eq!(library.nvmlInit_v2(), 0);
        assert_eq!((library.nvmlDeviceGetCount_v2(&raw mut count), count), (0, 1));
        assert_eq!(library.nvmlShutdown(), 0);
        assert_eq!(library.nvmlShutdown(), sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
        assert_eq!(library.nvmlDeviceGetCount_v2(&raw mut count), sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
    }
}

#[test]
fn calls_on_two_gpus_take_their_time_side_by_side() {
    let sim = Sim::start(&node(
        "latency: {nvmlDeviceCreateGpuInstance: 1s}\ngpus: [{product: h100-80gb, count: 2, mig: {current: true}}]",
    ));
    let library = load(&sim);
    let devices = [Device(gpu(&library, 0)), Device(gpu(&library, 1))];

    let carve = |devices: [Device; 2]| {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for device in devices {
                let library = &library;
                scope.spawn(move || {
                    assert_eq!(create(library, device.handle(), 19).0, 0);
                });
            }
        });
        start.elapsed()
    };
    let side_by_side = carve(devices);
    assert!(side_by_side >= Duration::from_secs(1), "the latency is waited for: {side_by_side:?}");
    assert!(side_by_side < Duration::from_secs(2), "two GPUs do not wait for each other: {side_by_side:?}");
    let in_turn = carve([devices[0], devices[0]]);
    assert!(in_turn >= Duration::from_secs(2), "one GPU does one thing at a time: {in_turn:?}");
}

#[test]
fn looking_does_not_wait_for_a_change() {
    let sim = Sim::start(&node("gpus: [{product: h100-80gb, mig: {current: true}}]"));
    sim.ctl("latency nvmlDeviceCreateGpuInstance=3s");
    let library = load(&sim);
    let device = Device(gpu(&library, 0));
    std::thread::scope(|scope| {
        let library = &library;
        let creating = scope.spawn(move || create(library, device.handle(), 19).0);
        let start = Instant::now();
        while !creating.is_finished() && start.elapsed() < Duration::from_millis(500) {
            gpu(library, 0);
            assert!(start.elapsed() < Duration::from_secs(2));
        }
        assert!(!creating.is_finished(), "still at it");
        assert_eq!(creating.join().unwrap(), 0);
    });
}
