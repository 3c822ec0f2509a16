//! What a policy's author is told: its status. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kerf_api::{GpuPolicyStatus, OverriddenGpu, PolicyGpus, PolicyNode, WaitingGpu};

use super::{LayoutFile, Policy, Progress, Resolution};

/// The most nodes that are listed, and the most GPUs of each that wait or are overridden: an object has its limits.
const MOST_NODES: usize = 100;
const MOST_GPUS: usize = 16;

/// The longest message of a condition, in bytes: one for a person.
const LONGEST_MESSAGE: usize = 1024;

/// The most that is said of one GPU, in bytes.
const LONGEST_WORDS: usize = 256;

/// What has come of the policies on one node.
#[derive(Clone, Debug)]
pub struct NodeReport<'a> {
    /// The node's name.
    pub node: &'a str,
    /// What matches there.
    pub resolution: &'a Resolution,
    /// What waits there.
    pub progress: Progress,
}

/// The status of `policy`, given every node on which any policy matches. Conditions that stay as they were keep their time.
pub fn status(policy: &Policy, layouts: &LayoutFile, nodes: &[NodeReport<'_>], now: &Time) -> GpuPolicyStatus {
    let mut listed = Vec::new();
    let (mut in_force, mut waiting, mut overridden) = (0, 0, 0);
    for node in nodes {
        let Some(matches) = node.resolution.matches.get(&policy.name) else { continue };
        let mut gpus = PolicyGpus::default();
        for found in matches {
            let name = cut(&found.gpu);
            if let Some(by) = &found.overridden_by {
                overridden += 1;
                gpus.overridden.push(OverriddenGpu { gpu: name, by: by.clone() });
            } else if let Some(why) = node.progress.waiting.get(&found.gpu) {
                waiting += 1;
                gpus.waiting.push(WaitingGpu { gpu: name, reason: cut(&why.reason), message: cut(&why.message) });
            } else {
                in_force += 1;
                gpus.in_force += 1;
            }
        }
        gpus.waiting.truncate(MOST_GPUS);
        gpus.overridden.truncate(MOST_GPUS);
        listed.push(PolicyNode { name: node.node.to_owned(), gpus });
    }
    let nodes_matched = u32::try_from(listed.len()).unwrap_or(u32::MAX);
    listed.sort_by(|a, b| (a.gpus.waiting.is_empty(), &a.name).cmp(&(b.gpus.waiting.is_empty(), &b.name)));
    listed.truncate(MOST_NODES);

    let refusal = refusal(policy, layouts);
    let condition = |type_, holds, reason: &str, message| condition(policy, type_, holds, reason, message, now);
    let accepted = match &refusal {
        Some((reason, why)) => condition("Accepted", false, reason, why.clone()),
        None => condition("Accepted", true, "Valid", "the policy can be followed".to_owned()),
    };
    let words = |many: usize| if many == 1 { "1 GPU".to_owned() } else { format!("{many} GPUs") };
    let in_force = match (in_force, waiting, overridden) {
        _ if refusal.is_some() => condition("InForce", false, "NotAccepted", "the policy is not accepted".to_owned()),
        (0, 0, 0) => condition("InForce", false, "NoMatch", "no GPU matches".to_owned()),
        (0, 0, by) => condition("InForce", false, "Overridden", format!("other policies decide about {}", words(by))),
        (on, 0, _) => condition("InForce", true, "InForce", format!("in force on {}", words(on))),
        (on, waits, _) => {
            condition("InForce", false, "Waiting", format!("in force on {}, waiting on {}", words(on), words(waits)))
        }
    };
    let conditions = vec![accepted, in_force];
    GpuPolicyStatus { observed_generation: policy.generation, conditions, nodes_matched, nodes: listed }
}

/// The beginning of words that nothing else limits: a node's own, or all names of a file.
fn cut(words: &str) -> String {
    words[..words.floor_char_boundary(LONGEST_WORDS)].to_owned()
}

/// Why the policy cannot be followed anywhere.
fn refusal(policy: &Policy, layouts: &LayoutFile) -> Option<(&'static str, String)> {
    let problems: Vec<String> = policy.problems().iter().map(ToString::to_string).collect();
    if !problems.is_empty() {
        return Some(("Invalid", problems.join("\n")));
    }
    let name = policy.spec.as_ref().ok()?.layout.as_ref()?.name.as_deref()?;
    let why = match layouts {
        LayoutFile::Read(layouts) => {
            if layouts.names().any(|known| known == name) {
                return None;
            }
            format!("the layout file has {}", layouts.names().collect::<Vec<_>>().join(", "))
        }
        LayoutFile::Absent => "there is no layout file".to_owned(),
        LayoutFile::Broken(why) => format!("the layout file cannot be read: {why}"),
    };
    Some(("NoSuchLayout", format!("there is no layout {name:?}: {why}")))
}

/// A condition that keeps its time if it was so before.
fn condition(policy: &Policy, type_: &str, holds: bool, reason: &str, mut message: String, now: &Time) -> Condition {
    message.truncate(message.floor_char_boundary(LONGEST_MESSAGE));
    let status = if holds { "True" } else { "False" };
    let known = policy.status.conditions.iter().find(|known| known.type_ == type_ && known.status == status);
    Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: known.map_or_else(|| now.clone(), |known| known.last_transition_time.clone()),
        observed_generation: policy.generation,
    }
}
