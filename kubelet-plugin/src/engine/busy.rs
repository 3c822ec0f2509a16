//! Who is in the way when NVML says "in use by another client".

use std::collections::BTreeSet;
use std::fs;

use kerf_nvml::{Gpu, Nvml, Process};

/// Names the processes on a GPU, or on one of its instances, for a person: `process 4711 (python3)`.
///
/// NVML does not see every client: field reports of "in use" without a visible process exist, mostly with monitoring
/// agents that hold handles (github.com/NVIDIA/DCGM issue 276).
pub(super) fn users(nvml: &dyn Nvml, gpu: Gpu, gpu_instance: Option<u32>) -> String {
    let named = processes(&nvml.processes(gpu).unwrap_or_default(), gpu_instance);
    named.unwrap_or_else(|| "a client that NVML does not name, such as a monitoring agent".to_owned())
}

/// Names those of `all` that run in a GPU instance, or on the whole GPU; `None` where there are none.
pub(crate) fn processes(all: &[Process], gpu_instance: Option<u32>) -> Option<String> {
    let here = all.iter().filter(|process| gpu_instance.is_none() || process.gpu_instance == gpu_instance);
    let pids: BTreeSet<u32> = here.map(|process| process.pid).collect();
    let names: Vec<String> = pids.into_iter().map(describe).collect();
    (!names.is_empty()).then(|| names.join(", "))
}

fn describe(pid: u32) -> String {
    // A process that has ended meanwhile has no name any more.
    match fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("process {pid} ({})", name.trim()),
        Err(_) => format!("process {pid}"),
    }
}
