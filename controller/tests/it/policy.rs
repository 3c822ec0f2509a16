//! Who decides about which GPU, and what is told of it.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use kerf_api::{ForeignInstances, Gpu, GpuOffer, GpuSpec, MigMode, Withheld, names};
use kerf_controller::index::{Decision, Feed, Index, Reason};
use kerf_controller::liveness::Now;
use kerf_controller::policy::{LayoutFile, MigConfigState, Policy, Resolution, Rules, resolve};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::fixtures::{DRIVER, NODE_UID, gpu, holding, labelled_node, layouts, lease, node, policy};
use crate::golden::partitions_only;
use crate::index::slices;

fn resolved(gpus: Vec<Gpu>, labels: &[(&str, &str)], policies: Vec<Policy>) -> Resolution {
    let labels: BTreeMap<String, String> = labels.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
    let mut rules = Rules { policies, layouts: layouts(), follow_label: true };
    rules.sort();
    resolve(&rules, &labels, node("n", gpus).status.as_ref().unwrap())
}

/// Which policy decides about which GPU: `"a: 01 03; b: 02"`.
fn decisions(resolution: &Resolution) -> String {
    let mut by: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (gpu, terms) in &resolution.terms {
        let name = match &terms.by {
            kerf_controller::policy::By::Policy(name) => name.clone(),
            kerf_controller::policy::By::Label => "label".to_owned(),
        };
        by.entry(name).or_default().push(&gpu[4..6]);
    }
    let each: Vec<String> = by.into_iter().map(|(name, gpus)| format!("{name}: {}", gpus.join(" "))).collect();
    each.join("; ")
}

fn three() -> Vec<Gpu> {
    vec![gpu("h100-80gb", 1), gpu("a100-80gb", 2), gpu("l40s", 3)]
}

#[test]
fn gpus_are_selected_by_all_that_is_given() {
    for (selector, gpus) in [
        (json!({}), "p: 01 02 03"),
        (json!({"indices": [0, 2, 9]}), "p: 01 03"),
        (json!({"products": ["NVIDIA H100 80GB HBM3"]}), "p: 01"),
        (json!({"products": ["*A100*", "*L40S"]}), "p: 02 03"),
        (json!({"uuids": ["GPU-00000000-0000-0000-0000-000000000003"]}), "p: 03"),
        (json!({"names": ["gpu-02-00-0"]}), "p: 02"),
        (json!({"products": ["*A100*"], "indices": [0]}), ""),
        (json!({"products": ["*A100*", "*H100*"], "indices": [0]}), "p: 01"),
    ] {
        let spec = json!({"offer": "Nothing", "gpus": selector});
        assert_eq!(decisions(&resolved(three(), &[], vec![policy("p", spec)])), gpus, "{selector}");
    }
}

#[test]
fn nodes_are_selected_by_their_labels() {
    let labels = [("pool", "a"), ("zone", "z1")];
    for (selector, matches) in [
        (json!({}), true),
        (json!({"matchLabels": {"pool": "a"}}), true),
        (json!({"matchLabels": {"pool": "b"}}), false),
        (json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["z1", "z2"]}]}), true),
        (json!({"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["z1"]}]}), false),
        (json!({"matchExpressions": [{"key": "gpu", "operator": "DoesNotExist"}]}), true),
        (json!({"matchExpressions": [{"key": "pool", "operator": "Exist"}]}), false),
    ] {
        let spec = json!({"offer": "Nothing", "nodeSelector": selector});
        let resolution = resolved(three(), &labels, vec![policy("p", spec)]);
        assert_eq!(!resolution.terms.is_empty(), matches, "{selector}");
    }
}

/// The overlap rule: priority, then age, then name.
#[test]
fn of_several_policies_one_decides() {
    let off = |priority: i32| json!({"offer": "Nothing", "priority": priority});
    let young = |mut policy: Policy| {
        policy.created = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::now()));
        policy
    };
    for (policies, winner) in [
        (vec![policy("a", off(0)), policy("b", off(1))], "b"),
        (vec![policy("b", off(-1)), policy("a", off(-1))], "a"),
        (vec![young(policy("a", off(0))), policy("b", off(0))], "b"),
        (
            vec![
                policy("a", off(0)),
                policy("b", json!({"offer": "Nothing", "priority": 7, "gpus": {"indices": [9]}})),
            ],
            "a",
        ),
    ] {
        let resolution = resolved(vec![gpu("l40s", 1)], &[], policies.clone());
        assert_eq!(decisions(&resolution), format!("{winner}: 01"), "{policies:?}");
        for (name, matches) in &resolution.matches {
            let by = (name != winner).then(|| winner.to_owned());
            assert_eq!(matches.iter().map(|found| found.overridden_by.clone()).collect::<Vec<_>>(), [by]);
        }
    }
}

/// A policy decides before the node's label, and GPUs of which a layout is silent are as if it were not there.
#[test]
fn the_label_decides_where_no_policy_does() {
    let label = [(names::LABEL_MIG_CONFIG, "mixed")];
    let gpus = || (1..=5).map(|bus| gpu("h100-80gb", bus)).collect::<Vec<_>>();
    let first = json!({"offer": "WholeOnly", "gpus": {"indices": [0]}});
    assert_eq!(decisions(&resolved(gpus(), &label, vec![policy("p", first)])), "label: 02 03 04; p: 01");
    let named = json!({"offer": "Layout", "layout": {"name": "mixed"}});
    assert_eq!(decisions(&resolved(gpus(), &[], vec![policy("p", named)])), "p: 01 02 03 04");
    assert_eq!(decisions(&resolved(gpus(), &[(names::LABEL_MIG_CONFIG, "")], vec![])), "");
}

/// What cannot be followed offers nothing and says why.
#[test]
fn what_cannot_be_offers_nothing() {
    let layout = |name: &str| json!({"offer": "Layout", "layout": {"name": name}});
    let devices = |devices: Value| json!({"offer": "Layout", "layout": {"migDevices": devices}});
    let amd_filter = |mut gpu: Gpu| {
        gpu.pci_device_id = Some("0x20b210de".into());
        gpu
    };
    let h100 = || gpu("h100-80gb", 1);
    for (gpu, spec, reason, words) in [
        (h100(), layout("mixd"), "NoSuchLayout", "did you mean \"mixed\"?"),
        (h100(), layout("zzz"), "NoSuchLayout", "there are all-1g.10gb, mixed, only-h100"),
        (h100(), layout("only-h100"), "UnknownModel", "PCI device id"),
        (h100(), devices(json!({"3g.40gb": 3})), "DoesNotFit", "3 x 3g.40gb do not fit"),
        (h100(), devices(json!({"1g.5gb": 1})), "DoesNotFit", "has no profile \"1g.5gb\""),
        (gpu("l40s", 1), devices(json!({"1g.5gb": 1})), "NoMig", "NVIDIA L40S"),
        (h100(), json!({"offer": "Dynamic", "profiles": []}), "Invalid", "spec.profiles: no profile is allowed"),
    ] {
        let resolution = resolved(vec![gpu], &[], vec![policy("p", spec.clone())]);
        let terms = &resolution.terms["gpu-01-00-0"];
        assert_eq!(terms.forms, kerf_controller::policy::Forms::Nothing, "{spec}");
        let obstacle = terms.obstacle.as_ref().unwrap();
        assert_eq!(obstacle.reason, reason, "{spec}");
        assert!(obstacle.message.contains(words), "{spec}: {}", obstacle.message);
    }
    let other = resolved(vec![amd_filter(h100())], &[], vec![policy("p", layout("only-h100"))]);
    assert_eq!(decisions(&other), "", "the layout is about other models");
    let mut right = h100();
    right.pci_device_id = Some("0x233010de".into());
    let right = resolved(vec![right], &[], vec![policy("p", layout("only-h100"))]);
    assert_eq!(right.terms["gpu-01-00-0"].obstacle, None);
}

/// Ampere: the mode is asked for, and a person is told that a reset makes it so.
#[test]
fn a_gpu_that_needs_a_reset_is_told_and_waits() {
    let wish = |gpu: Gpu, spec: Value| {
        let resolution = resolved(vec![gpu.clone()], &[], vec![policy("p", spec)]);
        let reason = resolution.terms["gpu-01-00-0"].obstacle.clone().map(|obstacle| obstacle.reason);
        (reason.unwrap_or_default(), resolution.wishes(&[gpu]).remove("gpu-01-00-0"))
    };
    let threes = || json!({"offer": "Layout", "layout": {"migDevices": {"3g.40gb": 2}}});
    let whole = || json!({"offer": "WholeOnly", "foreignInstances": "Delete"});
    let mode = |mig_mode| Some(GpuSpec { mig_mode: Some(mig_mode), foreign_instances: None });
    let deleting = GpuSpec { mig_mode: Some(MigMode::Disabled), foreign_instances: Some(ForeignInstances::Delete) };
    let off = || gpu("a100-80gb", 1);
    let on = || partitions_only("a100-80gb", 1);
    assert_eq!(wish(off(), threes()), ("ResetNeeded".into(), mode(MigMode::Enabled)));
    assert_eq!(wish(on(), threes()), (String::new(), mode(MigMode::Enabled)));
    assert_eq!(wish(on(), whole()), ("ResetNeeded".into(), Some(deleting)));
    assert_eq!(wish(off(), whole()), (String::new(), Some(deleting)));
    assert_eq!(wish(gpu("h100-80gb", 1), threes()), (String::new(), mode(MigMode::Enabled)));
    // A driver that tells its profiles only in MIG mode.
    let mut silent = off();
    silent.mig.as_mut().unwrap().profiles.clear();
    assert_eq!(wish(silent, threes()), ("ResetNeeded".into(), mode(MigMode::Enabled)));
    let nothing = || (String::new(), Some(GpuSpec::default()));
    assert_eq!(wish(on(), json!({"offer": "Dynamic"})), nothing());
    assert_eq!(wish(on(), json!({"offer": "Nothing"})), nothing());
    assert_eq!(wish(gpu("l40s", 1), json!({"offer": "WholeOnly"})), nothing());
}

/// The node removes what is not its own only where it knows that no policy forbids it, and of a GPU that cannot be read nobody
/// knows which policies select it.
#[test]
fn what_is_decided_is_told_of_each_gpu_that_can_be_read() {
    let unreadable = Gpu { uuid: String::new(), product: String::new(), ..gpu("h100-80gb", 2) };
    let gpus = vec![gpu("h100-80gb", 1), unreadable];
    let by_product = json!({"offer": "Dynamic", "foreignInstances": "Keep", "gpus": {"products": ["*H100*"]}});
    for policies in [vec![], vec![policy("p", by_product)]] {
        let foreign = (!policies.is_empty()).then_some(ForeignInstances::Keep);
        let wishes = resolved(gpus.clone(), &[], policies).wishes(&gpus);
        assert_eq!(wishes, [("gpu-01-00-0".into(), GpuSpec { mig_mode: None, foreign_instances: foreign })].into());
    }
}

/// A newer version's policy, or garbage, hides nothing.
#[test]
fn a_policy_that_cannot_be_read_matches_nothing() {
    let odd = [json!({"offer": "Sometimes"}), json!({"offer": "Nothing", "gpus": 7}), json!(null), json!({})];
    for spec in odd {
        let mut policies = vec![policy("odd", spec.clone()), policy("p", json!({"offer": "Nothing", "priority": -1}))];
        policies.rotate_left(1);
        assert_eq!(decisions(&resolved(vec![gpu("l40s", 1)], &[], policies)), "p: 01", "{spec}");
        assert!(!policy("odd", spec).problems().is_empty());
    }
}

/// An index with a living plugin on node `n`.
struct World {
    index: Index,
    now: Now,
}

impl World {
    fn new(gpus: Vec<Gpu>) -> World {
        let wall = Timestamp::from_second(1_800_000_000).unwrap();
        let now = Now { instant: Instant::now(), wall };
        let mut world = World { index: Index::new(DRIVER, true), now };
        world.see(labelled_node("n", NODE_UID, &[]));
        world.see(node("n", gpus));
        Feed::<Lease>::apply(&mut world.index, lease("n", "plugin", wall), now);
        world.see(layouts());
        world.index.take_dirty();
        world
    }

    fn see<T>(&mut self, object: T)
    where
        Index: Feed<T>,
    {
        self.index.apply(object, self.now);
    }

    fn label(&mut self, layout: &str) {
        self.see(labelled_node("n", NODE_UID, &[(names::LABEL_MIG_CONFIG, layout)]));
    }

    fn state(&self) -> Option<MigConfigState> {
        self.index.mig_config_state("n", self.now)
    }

    /// What is reported of the one policy, in the form of its status.
    fn status(&self) -> Value {
        let mut reports = self.index.reports(self.now);
        assert_eq!(reports.len(), 1);
        serde_json::to_value(reports.remove(0).status).unwrap()
    }

    /// The conditions in short.
    fn conditions(&self) -> Vec<String> {
        let status = self.status();
        let short = |condition: &Value| {
            let text = |name: &str| condition[name].as_str().unwrap().to_owned();
            format!("{}={} {}: {}", text("type"), text("status"), text("reason"), text("message"))
        };
        status["conditions"].as_array().unwrap().iter().map(short).collect()
    }
}

#[test]
fn the_nodes_label_is_answered_as_mig_manager_does() {
    let mut world = World::new(vec![gpu("h100-80gb", 1), gpu("h100-80gb", 2)]);
    assert_eq!(world.state(), None, "nobody asked");
    world.label("mixed");
    assert_eq!(world.state(), Some(MigConfigState::Success));
    world.see(holding("c", &["gpu-02-00-0-mig-3g40gb-0"]));
    assert_eq!(world.state(), Some(MigConfigState::Pending));
    world.see(holding("c", &["gpu-02-00-0-mig-1g10gb-0"]));
    assert_eq!(world.state(), Some(MigConfigState::Success), "that is part of the layout");
    world.label("mixt");
    assert_eq!(world.state(), Some(MigConfigState::Failed));
    world.see(LayoutFile::Broken("line 3".into()));
    assert_eq!(world.state(), Some(MigConfigState::Failed));
    world.see(LayoutFile::Absent);
    assert_eq!(world.state(), None, "nobody has set it up");
    world.see(layouts());
    world.label("mixed");
    world.see(node("n", vec![gpu("a100-80gb", 1), gpu("a100-80gb", 2)]));
    assert_eq!(world.state(), Some(MigConfigState::Failed), "it needs a reset");
    let pending = Withheld { reason: "MigModePending".into(), message: "reset".into() };
    let pending = |bus| Gpu { offer: GpuOffer::Nothing, withheld: Some(pending.clone()), ..gpu("a100-80gb", bus) };
    world.see(node("n", vec![pending(1), pending(2)]));
    assert_eq!(world.state(), Some(MigConfigState::Failed));

    let mut deaf = World { index: Index::new(DRIVER, false), now: world.now };
    deaf.see(node("n", vec![gpu("h100-80gb", 1)]));
    deaf.see(layouts());
    deaf.label("mixed");
    assert_eq!(deaf.state(), None, "labels are not followed");
}

/// What a node says of its GPUs is cut: a status is one object for all nodes.
#[test]
fn a_nodes_long_story_is_cut() {
    let long = |word: &str| word.repeat(1 << 20);
    let story = |bus| Gpu {
        offer: GpuOffer::Nothing,
        withheld: Some(Withheld { reason: long("ä"), message: long("x") }),
        ..gpu("h100-80gb", bus)
    };
    let mut world = World::new((1..=200).map(story).collect());
    world.see(policy("p", json!({"offer": "WholeOnly"})));
    let status = world.status();
    assert!(status.to_string().len() < 16 << 10, "{} bytes", status.to_string().len());
    assert_eq!(status["nodes"][0]["gpus"]["waiting"][0]["message"], "x".repeat(256));
    assert!(world.conditions()[1].contains("waiting on 128 GPUs"), "{:?}", world.conditions());
    assert_eq!(world.index.wishes()[0].spec.gpus.len(), 128);

    // Also where it is part of what kerf says.
    let named = Gpu { name: long("n"), product: long("p"), ..gpu("l40s", 1) };
    let mut world = World::new(vec![named]);
    world.see(policy("p", json!({"offer": "Layout", "layout": {"migDevices": {"1g.10gb": 1}}})));
    let waiting = &world.status()["nodes"][0]["gpus"]["waiting"][0];
    assert_eq!((&waiting["gpu"], &waiting["reason"]), (&json!("n".repeat(256)), &json!("NoMig")));
    assert_eq!(waiting["message"].as_str().map(str::len), Some(256));
}

/// The writer looks again when a rule, a label or a claim has changed, and only then.
#[test]
fn what_changes_the_offering_is_looked_at() {
    let mut world = World::new(vec![gpu("h100-80gb", 1)]);
    let offered = |world: &World| match world.index.verdict("n", world.now).decision {
        Decision::Publish { offering, .. } => offering,
        other => panic!("{other:?}"),
    };
    let dirty = |world: &mut World| !world.index.take_dirty().is_empty();
    let rule = || policy("p", json!({"offer": "WholeOnly"}));
    world.see(rule());
    assert!(dirty(&mut world));
    assert!(!offered(&world).resolution.terms.is_empty());
    let mut reported = rule();
    reported.status.nodes_matched = 7;
    world.see(reported);
    assert!(!dirty(&mut world), "a report is no change of the rule");
    world.see(holding("c", &["gpu-01-00-0"]));
    assert!(dirty(&mut world));
    assert_eq!(offered(&world).held.len(), 1);
    world.see(holding("c", &["gpu-01-00-0"]));
    assert!(!dirty(&mut world));
    world.see(holding("c", &[]));
    assert!(dirty(&mut world), "deallocated");
    assert!(offered(&world).held.is_empty());
    world.label("mixed");
    assert!(dirty(&mut world));
    world.index.delete(rule(), world.now);
    assert!(dirty(&mut world));
    assert_eq!(decisions(&offered(&world).resolution), "label: 01");
    world.see(rule());
    world.index.reset(Vec::<Policy>::new(), world.now);
    assert_eq!(decisions(&offered(&world).resolution), "label: 01");
    world.see(holding("c", &["gpu-01-00-0"]));
    world.index.reset(vec![holding("d", &["gpu-01-00-0-mig-1g10gb-0"])], world.now);
    let held: Vec<_> = offered(&world).held.iter().cloned().collect();
    assert_eq!(held, ["gpu-01-00-0-mig-1g10gb-0"], "the claim that is not listed is gone");
    world.index.reset(Vec::<LayoutFile>::new(), world.now);
    assert_eq!(decisions(&offered(&world).resolution), "");
}

#[test]
fn the_status_says_what_is_so() {
    let mut world = World::new(vec![gpu("h100-80gb", 1), gpu("a100-80gb", 2), gpu("h100-80gb", 3)]);
    world.see(policy("p", json!({"offer": "Layout", "layout": {"migDevices": {"3g.40gb": 2}}})));
    world.see(policy("q", json!({"offer": "Nothing", "priority": 1, "gpus": {"indices": [2]}})));
    world.see(holding("c", &["gpu-01-00-0-mig-1g10gb-0"]));
    let reports = world.index.reports(world.now);
    let status: Vec<_> = reports.iter().map(|report| (&report.policy, &report.status)).collect();
    insta::assert_yaml_snapshot!("status", status);
}

#[test]
fn conditions_in_words() {
    let accepted = "Accepted=True Valid: the policy can be followed";
    let mut world = World::new(vec![gpu("h100-80gb", 1), gpu("l40s", 2)]);
    let h100 = || json!({"offer": "Layout", "layout": {"name": "all-1g.10gb"}, "gpus": {"indices": [0]}});
    world.see(policy("p", h100()));
    assert_eq!(world.conditions(), [accepted, "InForce=True InForce: in force on 1 GPU"]);
    world.see(holding("c", &["gpu-01-00-0"]));
    assert_eq!(world.conditions(), [accepted, "InForce=False Waiting: in force on 0 GPUs, waiting on 1 GPU"]);
    let waiting = world.status()["nodes"][0]["gpus"]["waiting"][0].clone();
    assert_eq!(waiting["message"], "claims hold gpu-01-00-0, which is kept until they end");
    world.see(policy("p", json!({"offer": "Nothing", "gpus": {"indices": [7]}})));
    assert_eq!(world.conditions(), [accepted, "InForce=False NoMatch: no GPU matches"]);
    world.see(policy("p", json!({"offer": "Layout", "layout": {"name": "mixt"}})));
    assert_eq!(
        world.conditions(),
        [
            "Accepted=False NoSuchLayout: there is no layout \"mixt\": the layout file has all-1g.10gb, mixed, only-h100",
            "InForce=False NotAccepted: the policy is not accepted",
        ]
    );
    world.see(LayoutFile::Broken("line 3: mig-devices".into()));
    assert!(world.conditions()[0].ends_with("the layout file cannot be read: line 3: mig-devices"));
    world.see(policy("p", json!({"offer": "Layout", "whole": true})));
    let why = "Accepted=False Invalid: spec.whole: it has a meaning with offer: Dynamic only; leave it out\nspec.layout: \
               offer: Layout needs one; give layout.name or layout.migDevices";
    assert_eq!(world.conditions()[0], why);

    // The controller sees nothing any more, and what is published stays.
    world.see(layouts());
    world.see(holding("c", &[]));
    world.see(policy("p", h100()));
    world.see(slices().remove(0));
    world.now.instant += Duration::from_secs(20);
    assert_eq!(world.index.verdict("n", world.now).decision, Decision::Leave(Reason::Blind));
    assert!(world.conditions()[1].starts_with("InForce=True"), "{:?}", world.conditions());

    // The plugin is gone.
    for _ in 0..5 {
        world.now.instant += Duration::from_secs(8);
        let mut leader = lease("", "leader", world.now.wall);
        leader.metadata.name = Some(names::CONTROLLER.into());
        world.see(leader);
    }
    let waiting = world.status()["nodes"][0]["gpus"]["waiting"][0].clone();
    assert_eq!(waiting["reason"], "NodeNotReady");
    assert_eq!(waiting["message"], "the node's plugin has not renewed its lease in time");
}

/// What was reported is not reported again, and a condition keeps its time.
#[test]
fn a_report_settles() {
    let mut world = World::new(vec![gpu("h100-80gb", 1)]);
    world.see(policy("p", json!({"offer": "WholeOnly"})));
    let mut reports = world.index.reports(world.now);
    let mut reported = policy("p", json!({"offer": "WholeOnly"}));
    // As the API server gives it back.
    let stored = serde_json::to_value(reports.remove(0).status).unwrap();
    reported.status = serde_json::from_value(stored).unwrap();
    let since = reported.status.conditions[1].last_transition_time.clone();
    world.see(reported);
    world.now.wall = Timestamp::from_second(1_800_000_100).unwrap();
    assert_eq!(world.index.reports(world.now), []);
    world.see(gpu_node_with_two());
    let status = world.index.reports(world.now).remove(0).status;
    assert_eq!(status.conditions[1].last_transition_time, since, "it is in force as before");
    assert_eq!(status.conditions[1].message, "in force on 2 GPUs");
}

fn gpu_node_with_two() -> kerf_api::GpuNode {
    node("n", vec![gpu("h100-80gb", 1), gpu("h100-80gb", 2)])
}

/// Of two kerfs one reports of a policy: else each would overwrite what the other has just written.
#[test]
fn one_driver_reports_of_a_policy() {
    let mut world = World::new(vec![gpu("h100-80gb", 1)]);
    let mut other = node("m", vec![gpu("h100-80gb", 1)]);
    other.status.as_mut().unwrap().driver_name = "a.example.com".into();
    world.see(other.clone());
    world.see(labelled_node("m", "m", &[("on", "m")]));
    let theirs = || policy("p", json!({"offer": "Nothing", "nodeSelector": {"matchLabels": {"on": "m"}}}));
    world.see(theirs());
    assert_eq!(world.index.reports(world.now), [], "it matches their node alone");
    assert!(world.index.wishes().iter().all(|wish| wish.node == "n"));
    world.see(policy("p", json!({"offer": "Nothing"})));
    assert_eq!(world.status()["nodesMatched"], 1, "it matches both: who has the usual name reports, of its own");

    let mut second = Index::new("a.example.com", true);
    let mut show = |object: kerf_api::GpuNode| second.apply(object, world.now);
    show(other);
    show(node("n", vec![gpu("h100-80gb", 1)]));
    second.apply(labelled_node("m", "m", &[("on", "m")]), world.now);
    second.apply(policy("p", json!({"offer": "Nothing"})), world.now);
    assert_eq!(second.reports(world.now), [], "and the other does not");
    second.apply(theirs(), world.now);
    assert_eq!(second.reports(world.now).len(), 1);
}
