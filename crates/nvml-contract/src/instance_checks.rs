//! What kerf relies on about the instances that live on a GPU.

use std::collections::BTreeSet;

use crate::assertion::{Assertion, Findings, Outcome};
use crate::kernel::{Capability, DeviceFile};
use crate::reading::{GpuReading, LiveInstance};

/// In the order in which they are told.
pub(crate) const INSTANCES: &[Assertion<GpuReading>] = &[
    Assertion {
        name: "mig.instances",
        relied_on_for: "what lives on a GPU is recognised by profile and placement: own, a stranger's, or in the way",
        check: instances,
    },
    Assertion {
        name: "mig.instances-apart",
        relied_on_for: "no device is given twice; an instance is destroyed by its id",
        check: instances_apart,
    },
    Assertion {
        name: "mig.compute-instances",
        relied_on_for: "the compute instance is what a container gets, and goes before its GPU instance can",
        check: compute_instances,
    },
    Assertion {
        name: "mig.capability-files",
        relied_on_for: "an instance's device nodes in the container are made from these numbers",
        check: capability_files,
    },
    Assertion {
        name: "mig.capability-nodes",
        relied_on_for: "the node on the host opens the same instance as the one in the container",
        check: capability_nodes,
    },
    Assertion {
        name: "mig.unknown-instance",
        relied_on_for: "what is gone already counts as destroyed, and nothing else does",
        check: unknown_instance,
    },
];

/// The live instances, or why there are none to check.
fn live(gpu: &GpuReading) -> Result<&[LiveInstance], Outcome> {
    let why = match (&gpu.modes, &gpu.instances) {
        (Ok(None), _) => "the GPU has no MIG",
        (_, Err(_)) => "the instances cannot be listed",
        (_, Ok(live)) if live.is_empty() => "no instance lives here",
        (_, Ok(live)) => return Ok(live),
    };
    Err(Outcome::Skipped(why.to_owned()))
}

fn instances(gpu: &GpuReading) -> Outcome {
    let mut findings = Findings::default();
    if let Some(live) = findings.value(&gpu.instances, "the live instances, none where MIG is off") {
        findings.expect(gpu.instances_stable, "the same instances when listed again", || {
            "others, several times; is somebody carving?".to_owned()
        });
        let profiles = gpu.profiles.as_deref().unwrap_or_default();
        for LiveInstance { instance, .. } in live {
            let profile = profiles.iter().find(|profile| profile.id == instance.profile_id);
            let placed = profile.is_some_and(|profile| profile.placements.contains(&instance.placement));
            findings.expect(placed, "each instance of a known profile at one of its placements", || {
                format!("{instance:?}")
            });
        }
    }
    findings.outcome()
}

fn instances_apart(gpu: &GpuReading) -> Outcome {
    let live = match live(gpu) {
        Ok(live) => live,
        Err(skipped) => return skipped,
    };
    let mut findings = Findings::default();
    for (position, LiveInstance { instance, .. }) in live.iter().enumerate() {
        for LiveInstance { instance: other, .. } in &live[..position] {
            let apart = instance.id != other.id && !instance.placement.overlaps(other.placement);
            findings.expect(apart, "instances with ids and memory slices of their own", || {
                format!("{other:?} and {instance:?}")
            });
        }
    }
    findings.outcome()
}

fn compute_instances(gpu: &GpuReading) -> Outcome {
    let live = match live(gpu) {
        Ok(live) => live,
        Err(skipped) => return skipped,
    };
    let mut findings = Findings::default();
    let mut uuids = BTreeSet::new();
    for LiveInstance { instance, compute, .. } in live {
        let parent = instance.id;
        let mut ids = BTreeSet::new();
        for compute in
            findings.value(compute, format!("the compute instances of GPU instance {parent}")).into_iter().flatten()
        {
            let id = compute.id;
            findings
                .expect(ids.insert(id), format!("ids of their own in GPU instance {parent}"), || format!("two {id}"));
            let new = compute.uuid.starts_with("MIG-") && uuids.insert(&compute.uuid);
            findings.expect(new, "a UUID of its own that begins with MIG- for each MIG device", || {
                format!("another for compute instance {id} of GPU instance {parent}")
            });
        }
    }
    findings.outcome()
}

fn capability_files(gpu: &GpuReading) -> Outcome {
    let live = match live(gpu) {
        Ok(live) => live,
        Err(skipped) => return skipped,
    };
    let mut findings = Findings::default();
    for (name, capability) in live.iter().flat_map(|live| &live.capabilities) {
        expect_files(&mut findings, name, capability);
    }
    findings.outcome()
}

fn capability_nodes(gpu: &GpuReading) -> Outcome {
    let live = match live(gpu) {
        Ok(live) => live,
        Err(skipped) => return skipped,
    };
    judge_nodes(live.iter().flat_map(|live| &live.capabilities).map(|(name, capability)| (name.as_str(), capability)))
}

/// The instance's own file is there and says what the table says; the major number is known.
pub(crate) fn expect_files(findings: &mut Findings, name: &str, capability: &Capability) {
    let Capability { access, listed, major, .. } = capability;
    findings.expect(access.is_some(), format!("an access file of {name} with a minor number"), || "none".to_owned());
    if let (Some(access), Some(listed)) = (access, listed) {
        let expected = format!("minor number {access} of {name} in mig-minors, as in its access file");
        findings.expect(access == listed, expected, || listed.to_string());
    }
    findings.expect(major.is_some(), "nvidia-caps in /proc/devices", || "no such line".to_owned());
}

/// A node need not exist on the host: the container's is made from the numbers. One that exists must have them.
pub(crate) fn judge_nodes<'a>(capabilities: impl Iterator<Item = (&'a str, &'a Capability)>) -> Outcome {
    let mut findings = Findings::default();
    let mut there = 0;
    for (name, capability) in capabilities {
        if capability.node == DeviceFile::Missing {
            continue;
        }
        there += 1;
        let node = capability.node;
        if let (Some(major), Some(minor)) = (capability.major, capability.access.or(capability.listed)) {
            let expected = format!("a node {major}:{minor} of {name}");
            findings.expect(node == DeviceFile::Device { major, minor }, expected, || node.to_string());
        }
    }
    if there == 0 {
        return Outcome::Skipped("the host has no nodes of the instances, and kerf needs none".to_owned());
    }
    findings.outcome()
}

fn unknown_instance(gpu: &GpuReading) -> Outcome {
    let mut findings = Findings::default();
    let found = match &gpu.in_unknown_instance {
        Ok(compute) => format!("{} compute instances", compute.len()),
        Err(error) if error.is_gone() => return Outcome::Held,
        Err(error) => error.to_string(),
    };
    let id = gpu.unknown_instance;
    let expected = format!("no GPU instance {id}: not found (6), or not supported (3) where MIG is off");
    findings.expect(false, expected, || found);
    findings.outcome()
}
