//! What kerf relies on about one GPU, with or without MIG.

use kerf_nvml::{GpuFacts, MigMode};

use crate::assertion::{Assertion, Findings, Outcome};
use crate::kernel::DeviceFile;
use crate::reading::GpuReading;

/// In the order in which they are told.
pub(crate) const GPU: &[Assertion<GpuReading>] = &[
    Assertion {
        name: "gpu.handle",
        relied_on_for: "handles are remembered; each new one would be kept as one more GPU",
        check: handle,
    },
    Assertion {
        name: "gpu.address",
        relied_on_for: "the PCI address is the one name of a GPU; a claim finds its GPU by it",
        check: address,
    },
    Assertion {
        name: "gpu.sysfs",
        relied_on_for: "the PCI root and the NUMA node come from the kernel, by the address that NVML gave",
        check: sysfs,
    },
    Assertion { name: "gpu.facts", relied_on_for: "published as attributes and capacity", check: facts },
    Assertion {
        name: "gpu.facts-stable",
        relied_on_for: "facts are read once for the life of the driver, by many threads at once",
        check: facts_stable,
    },
    Assertion {
        name: "gpu.device-node",
        relied_on_for: "every container on the GPU, also on a part of it, gets /dev/nvidia<minor>",
        check: device_node,
    },
    Assertion {
        name: "gpu.processes",
        relied_on_for: "an instance in use is not destroyed, and who holds a busy one is named",
        check: processes,
    },
];

fn handle(gpu: &GpuReading) -> Outcome {
    let mut findings = Findings::default();
    if let Some(again) = findings.value(&gpu.handle_again, "the handle by its index again") {
        findings.expect(*again == gpu.handle, "the same handle each time", || "another handle".to_owned());
    }
    findings.outcome()
}

fn address(gpu: &GpuReading) -> Outcome {
    let mut findings = Findings::default();
    if let Some(address) = findings.value(&gpu.address, "a PCI address")
        && let Some(at_address) = &gpu.at_address
        && let Some(found) = findings.value(at_address, format!("the GPU at {address}"))
    {
        findings.expect(*found == gpu.handle, format!("the GPU that says it is at {address}"), || {
            "another handle".to_owned()
        });
    }
    findings.outcome()
}

fn sysfs(gpu: &GpuReading) -> Outcome {
    let Ok(address) = gpu.address else { return Outcome::Skipped("its PCI address is not known".to_owned()) };
    let mut findings = Findings::default();
    findings.expect(gpu.in_sysfs, format!("{address} among the kernel's PCI devices"), || "no such device".to_owned());
    findings.outcome()
}

fn facts(gpu: &GpuReading) -> Outcome {
    let mut findings = Findings::default();
    if let Some(facts) = findings.value(&gpu.facts, "the GPU's facts") {
        let GpuFacts { uuid, name, compute_capability, memory_bytes, .. } = facts;
        findings.expect(uuid.starts_with("GPU-"), "a UUID that begins with GPU-", || "another form".to_owned());
        findings.expect(!name.trim().is_empty(), "a product name", || format!("{name:?}"));
        findings.expect(compute_capability.0 > 0, "a compute capability", || format!("{compute_capability:?}"));
        findings.expect(*memory_bytes != Some(0), "memory, or that there is none of its own", || "0 bytes".to_owned());
    }
    findings.outcome()
}

fn facts_stable(gpu: &GpuReading) -> Outcome {
    let mut findings = Findings::default();
    match (&gpu.facts, &gpu.again.0) {
        (Ok(facts), again) => {
            if let Some(again) = findings.value(again, "the GPU's facts a second time") {
                let masked = |facts: &GpuFacts| format!("{:?}", GpuFacts { uuid: String::new(), ..facts.clone() });
                findings.expect(facts == again, masked(facts), || match (masked(facts), masked(again)) {
                    (one, other) if one == other => "another UUID".to_owned(),
                    (_, other) => other,
                });
            }
        }
        (Err(_), _) => return Outcome::Skipped("the facts cannot be read".to_owned()),
    }
    findings.outcome()
}

fn device_node(gpu: &GpuReading) -> Outcome {
    let Ok(GpuFacts { minor: wanted, .. }) = gpu.facts else {
        return Outcome::Skipped("its minor number is not known".to_owned());
    };
    let mut findings = Findings::default();
    let right = matches!(gpu.device_node, DeviceFile::Device { minor, .. } if minor == wanted);
    findings.expect(right, format!("a device node nvidia{wanted} of minor number {wanted}"), || {
        gpu.device_node.to_string()
    });
    findings.outcome()
}

fn processes(gpu: &GpuReading) -> Outcome {
    let mut findings = Findings::default();
    if let Some(processes) = findings.value(&gpu.processes, "the list of processes") {
        let mig = matches!(&gpu.modes, Ok(Some(modes)) if modes.current == MigMode::Enabled);
        let live = |id: u32| gpu.instances.iter().flatten().any(|live| live.instance.id == id);
        for process in processes {
            match process.gpu_instance {
                Some(id) => findings.expect(mig && live(id), "a process in an instance that lives here", || {
                    format!("one in GPU instance {id}")
                }),
                None => findings.expect(!mig, "the GPU instance of each process while MIG is on", || {
                    "a process without one".to_owned()
                }),
            }
        }
    }
    findings.outcome()
}
