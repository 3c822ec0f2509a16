//! What the chart tells the programs is what they can be told.

use std::collections::BTreeSet;
use std::process::Command;

use kerf_e2e::{built, render, situations};
use serde_json::Value;

/// The container of a workload.
fn container<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    let workload = objects.iter().find(|object| object["kind"] == kind).expect("the chart has this workload");
    &workload["spec"]["template"]["spec"]["containers"][0]
}

#[test]
fn the_programs_take_what_the_chart_gives_them() {
    for (kind, program) in [("DaemonSet", "kerf-kubelet-plugin"), ("Deployment", "kerf-controller")] {
        let program = built(program).unwrap();
        let help = Command::new(&program).arg("--help").output().unwrap();
        let help = String::from_utf8(help.stdout).unwrap();
        for situation in situations().unwrap() {
            let arguments: Vec<&str> = situation.iter().map(String::as_str).collect();
            let objects = render("kerf", "kerf-system", &arguments).unwrap();
            let container = container(&objects, kind);
            let given: Vec<&str> = container["args"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
            // Arguments are checked up to the one that asks for help.
            let output = Command::new(&program).args(&given).arg("--help").output().unwrap();
            assert!(output.status.success(), "{given:?}: {}", String::from_utf8_lossy(&output.stderr));

            let variables: BTreeSet<&str> = container["env"]
                .as_array()
                .unwrap()
                .iter()
                .filter_map(|variable| variable["name"].as_str().filter(|name| name.starts_with("KERF_")))
                .collect();
            for variable in variables {
                assert!(help.contains(&format!("[env: {variable}=")), "{variable} is no variable of {kind}:\n{help}");
            }
        }
    }
}

/// A flag that the chart leaves out has a default that is right in every pod.
#[test]
fn the_chart_leaves_out_what_is_for_runs_outside_of_a_cluster() {
    let left_out = [
        ("DaemonSet", "kerf-kubelet-plugin", &["--cdi-hook", "--cdi-without", "--driver-root", "--kubeconfig"][..]),
        ("Deployment", "kerf-controller", &["--identity", "--kubeconfig"]),
    ];
    let objects = render("kerf", "kerf-system", &[]).unwrap();
    for (kind, program, expected) in left_out {
        let help = Command::new(built(program).unwrap()).arg("--help").output().unwrap();
        let help = String::from_utf8(help.stdout).unwrap();
        let container = serde_json::to_string(container(&objects, kind)).unwrap();
        let mut missing = Vec::new();
        for flag in help.split_whitespace().filter(|word| word.starts_with("--")) {
            let flag = flag.trim_matches(|c: char| !c.is_ascii_lowercase() && c != '-');
            let variable = format!("KERF_{}", flag.trim_start_matches('-').replace('-', "_").to_uppercase());
            let is_flag = help.contains(&format!("[env: {variable}="));
            if is_flag && !container.contains(&format!("{flag}=")) && !container.contains(&variable) {
                missing.push(flag);
            }
        }
        missing.sort_unstable();
        missing.dedup();
        assert_eq!(missing, expected, "{kind}");
    }
}
