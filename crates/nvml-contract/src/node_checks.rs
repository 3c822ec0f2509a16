//! What kerf relies on about the machine as a whole.

use std::collections::BTreeSet;

use kerf_nvml::Code;

use crate::assertion::{Assertion, Findings, Outcome};
use crate::reading::NodeReading;

/// In the order in which they are told.
pub(crate) const NODE: &[Assertion<NodeReading>] = &[
    Assertion {
        name: "node.driver-version",
        relied_on_for: "published as an attribute of every device, and finding the driver's libraries, which carry it",
        check: driver_version,
    },
    Assertion {
        name: "node.cuda-version",
        relied_on_for: "published as an attribute of every device",
        check: cuda_version,
    },
    Assertion {
        name: "node.handles",
        relied_on_for: "one broken GPU is reported as broken and does not hide its neighbours",
        check: handles,
    },
    Assertion {
        name: "node.identities",
        relied_on_for: "devices are named by PCI address, found by minor number and known to users by UUID",
        check: identities,
    },
    Assertion {
        name: "node.unknown-address",
        relied_on_for: "a GPU that is not there any more is taken to be gone with all that was on it, and no other error is",
        check: unknown_address,
    },
];

fn driver_version(node: &NodeReading) -> Outcome {
    let mut findings = Findings::default();
    if let Some(version) = findings.value(&node.driver_version, "a driver version") {
        let mut parts = version.split('.');
        let numbers = parts.clone().count() >= 2
            && parts.all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()));
        findings.expect(numbers, "numbers with dots between them, such as 535.261.03", || format!("{version:?}"));
    }
    findings.outcome()
}

fn cuda_version(node: &NodeReading) -> Outcome {
    let mut findings = Findings::default();
    if let Some(version) = findings.value(&node.cuda_version, "a CUDA version") {
        findings.expect(version.major > 0, "a CUDA version such as 12.2", || format!("{version:?}"));
    }
    findings.outcome()
}

fn handles(node: &NodeReading) -> Outcome {
    // What nvml.h says of an index and of the library, not of the GPU at it.
    let not_of_the_gpu = [
        Code::Uninitialized,
        Code::InvalidArgument,
        Code::NotSupported,
        Code::NotFound,
        Code::FunctionNotFound,
        Code::DriverNotLoaded,
    ];
    let mut findings = Findings::default();
    if findings.value(&node.count, "a number of GPUs").is_some() {
        for (index, error) in node.gpus.iter().enumerate().filter_map(|(index, gpu)| Some((index, gpu.as_ref().err()?)))
        {
            let expected = format!("a handle of GPU {index}, or an error that says it is broken");
            findings.expect(!not_of_the_gpu.contains(&error.code), expected, || error.to_string());
        }
    }
    findings.outcome()
}

fn identities(node: &NodeReading) -> Outcome {
    let mut findings = Findings::default();
    let (mut addresses, mut minors, mut uuids) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for gpu in node.reachable() {
        let name = gpu.name();
        if let Ok(address) = gpu.address {
            findings.expect(addresses.insert(address), "one GPU at each PCI address", || format!("two at {address}"));
        }
        if let Ok(facts) = &gpu.facts {
            let (minor, uuid) = (facts.minor, facts.uuid.as_str());
            findings.expect(minors.insert(minor), "one GPU of each minor number", || format!("two of {minor}"));
            findings.expect(uuids.insert(uuid), "one GPU of each UUID", || format!("{name} has that of another"));
        }
    }
    if addresses.is_empty() && minors.is_empty() {
        return Outcome::Skipped("no GPU can be asked".to_owned());
    }
    findings.outcome()
}

fn unknown_address(node: &NodeReading) -> Outcome {
    let mut findings = Findings::default();
    let found = match &node.at_nowhere {
        Ok(_) => "a GPU".to_owned(),
        Err(error) if error.code == Code::NotFound => return Outcome::Held,
        Err(error) => error.to_string(),
    };
    findings.expect(false, format!("no GPU at {}: not found (6)", node.nowhere), || found);
    findings.outcome()
}
