//! NVIDIA's Python bindings (nvidia-ml-py) as a judge: another client of the C ABI, written by others.

use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::sim::{Sim, cache, node, run, text};

/// The release that the walk was written for.
const NVIDIA_ML_PY: &str = "13.615.71";

/// Carves two slices and walks over everything that a monitoring agent looks at.
const WALK: &str = r#"
import json
from pynvml import *

nvmlInit()
gpu = nvmlDeviceGetHandleByIndex(0)
current, pending = nvmlDeviceGetMigMode(gpu)
profile = nvmlDeviceGetGpuInstanceProfileInfo(gpu, NVML_GPU_INSTANCE_PROFILE_3_SLICE)
gi = nvmlDeviceCreateGpuInstance(gpu, profile.id)
whole = nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, NVML_COMPUTE_INSTANCE_PROFILE_3_SLICE, 0)
ci = nvmlGpuInstanceCreateComputeInstance(gi, whole.id)
mine = nvmlComputeInstanceGetInfo(ci)
small = nvmlDeviceCreateGpuInstance(gpu, 19)

migs = []
for index in range(nvmlDeviceGetMaxMigDeviceCount(gpu)):
    try:
        mig = nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
    except NVMLError_NotFound:
        continue
    attributes = nvmlDeviceGetAttributes(mig)
    memory = nvmlDeviceGetMemoryInfo(mig, version=nvmlMemory_v2)
    migs.append({
        "name": nvmlDeviceGetName(mig),
        "uuid": nvmlDeviceGetUUID(mig),
        "byUuid": nvmlDeviceGetGpuInstanceId(nvmlDeviceGetHandleByUUID(nvmlDeviceGetUUID(mig))),
        "gi": nvmlDeviceGetGpuInstanceId(mig),
        "ci": nvmlDeviceGetComputeInstanceId(mig),
        "isMig": nvmlDeviceIsMigDeviceHandle(mig),
        "parent": nvmlDeviceGetUUID(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)),
        "memoryMib": memory.total >> 20,
        "multiprocessors": attributes.multiprocessorCount,
        "giSlices": attributes.gpuInstanceSliceCount,
        "processes": len(nvmlDeviceGetComputeRunningProcesses(mig)),
    })

def code(call, *arguments):
    try:
        call(*arguments)
        return 0
    except NVMLError as error:
        return error.value

events = nvmlEventSetCreate()
nvmlDeviceRegisterEvents(gpu, nvmlEventTypeXidCriticalError, events)
timeout = code(nvmlEventSetWait_v2, events, 10)
nvmlEventSetFree(events)

print(json.dumps({
    "driver": nvmlSystemGetDriverVersion(),
    "cuda": nvmlSystemGetCudaDriverVersion(),
    "count": nvmlDeviceGetCount(),
    "pci": nvmlDeviceGetPciInfo(gpu).busId,
    "device": hex(nvmlDeviceGetPciInfo(gpu).pciDeviceId),
    "capability": nvmlDeviceGetCudaComputeCapability(gpu),
    "architecture": nvmlDeviceGetArchitecture(gpu),
    "mode": [current, pending],
    "uuid": nvmlDeviceGetUUID(gpu),
    "viaComputeInstance": nvmlDeviceGetUUID(mine.device),
    "migs": migs,
    "timeout": timeout,
    "utilisation": code(nvmlDeviceGetUtilizationRates, gpu),
    "registerOnMig": code(nvmlDeviceRegisterEvents, mine.device, nvmlEventTypeXidCriticalError, events),
    "beyondProfiles": code(nvmlDeviceGetGpuInstanceProfileInfo, gpu, 0x12),
    "busy": code(nvmlGpuInstanceDestroy, gi),
    "destroyed": [code(nvmlComputeInstanceDestroy, ci), code(nvmlGpuInstanceDestroy, gi), code(nvmlGpuInstanceDestroy, small)],
    "stale": code(nvmlGpuInstanceGetInfo, gi),
}, default=lambda number: number.value))
nvmlShutdown()
"#;

/// An interpreter with nvidia-ml-py, made once.
fn interpreter() -> PathBuf {
    let environment = cache().join(format!("nvidia-ml-py-{NVIDIA_ML_PY}"));
    let (python, done) = (environment.join("bin/python3"), environment.join("done"));
    if !done.exists() {
        text(&run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment)), "python3 -m venv");
        let package = format!("nvidia-ml-py=={NVIDIA_ML_PY}");
        let mut pip = Command::new(&python);
        text(&run(pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", &package])), &package);
        std::fs::write(&done, "").unwrap();
    }
    python
}

/// Who uses the GPU and its first MIG device.
const USERS: &str = r#"
import json
from pynvml import *

nvmlInit()
gpu = nvmlDeviceGetHandleByIndex(0)
def users(device):
    processes = nvmlDeviceGetComputeRunningProcesses(device)
    return [[p.pid, nvmlSystemGetProcessName(p.pid), p.usedGpuMemory >> 20, p.gpuInstanceId, p.computeInstanceId] for p in processes]
print(json.dumps([users(gpu), users(nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0))]))
"#;

#[test]
fn nvidia_ml_py_lists_who_uses_a_divided_gpu() {
    let sim = Sim::start(&node("gpus: [{product: h100-80gb, mig: {current: true}}]"));
    for start in [0, 6] {
        sim.ctl(&format!("create 0 1g.10gb {start} --compute"));
    }
    sim.ctl("fault process 0 4242 --gi 7 --ci 0 --name trainer --memory-mib 512");
    sim.ctl("fault process 0 4243 --gi 13 --name server");
    let mut python = Command::new(interpreter());
    python.args(["-c", USERS]).env("LD_LIBRARY_PATH", sim.library().parent().unwrap());
    let listed: Value = serde_json::from_str(&text(&run(&mut python), "the lists")).unwrap();
    let trainer = json!([4242, "trainer", 512, 7, 0]);
    let none = u32::MAX;
    assert_eq!(listed, json!([[trainer, [4243, "server", 256, 13, none]], [trainer]]));
}

#[test]
fn nvidia_ml_py_walks_a_divided_gpu() {
    let sim = Sim::start(&node("gpus: [{product: h100-80gb, mig: {current: true}}]"));
    let mut python = Command::new(interpreter());
    python.args(["-c", WALK]).env("LD_LIBRARY_PATH", sim.library().parent().unwrap());
    let walked: Value = serde_json::from_str(&text(&run(&mut python), "the walk")).unwrap();

    let gpu = sim.state().gpus[0].uuid.clone();
    let mig = walked["migs"][0]["uuid"].clone();
    assert!(mig.as_str().unwrap().starts_with("MIG-"), "{walked:#}");
    let expected = json!({
        "driver": "535.261.03",
        "cuda": 12020,
        "count": 1,
        "pci": "00000000:3B:00.0",
        "device": "0x233010de",
        "capability": [9, 0],
        "architecture": 9,
        "mode": [1, 1],
        "uuid": gpu,
        "viaComputeInstance": mig,
        // The GPU instance without a compute instance is no MIG device.
        "migs": [{
            "name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
            "uuid": mig,
            "byUuid": 2,
            "gi": 2,
            "ci": 0,
            "isMig": 1,
            "parent": gpu,
            "memoryMib": 40448,
            "multiprocessors": 60,
            "giSlices": 3,
            "processes": 0,
        }],
        "timeout": 10,
        "utilisation": 3,
        "registerOnMig": 2, // the set was freed before
        "beyondProfiles": 2,
        "busy": 19,
        "destroyed": [0, 0, 0],
        "stale": 2,
    });
    assert_eq!(walked, expected, "{walked:#}");
}
