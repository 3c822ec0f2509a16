//! The rights that the chart gives are those that docs/security.md names, and none that nobody should have.

use std::collections::BTreeSet;

use kerf_e2e::{deploy, render};
use serde_json::Value;

/// What may be done, with which verbs, where.
type Right = (String, String, String);

fn words(value: &Value) -> Vec<&str> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// The rights of an account, by what the Roles bound to it say.
fn given(component: &str) -> BTreeSet<Right> {
    let objects = render("kerf", "kerf-system", &[]).expect("the chart renders");
    let account = format!("kerf-{component}");
    let bound = objects.iter().filter(|object| {
        let subjects = object["subjects"].as_array();
        subjects.is_some_and(|subjects| subjects.iter().any(|subject| subject["name"] == account.as_str()))
    });
    let mut rights = BTreeSet::new();
    for binding in bound {
        let role = objects.iter().find(|role| {
            role["kind"] == binding["roleRef"]["kind"]
                && role["metadata"]["name"] == binding["roleRef"]["name"]
                && role["metadata"]["namespace"] == binding["metadata"]["namespace"]
        });
        let scope = match binding["metadata"]["namespace"].as_str() {
            None => "cluster",
            Some("default") => "namespace `default`",
            Some(_) => "own namespace",
        };
        let role = role.expect("a binding names a role of the chart");
        for rule in role["rules"].as_array().expect("a role has rules") {
            for resource in words(&rule["resources"]) {
                let group = words(&rule["apiGroups"]);
                let (name, subresource) = resource.split_at(resource.find('/').unwrap_or(resource.len()));
                let dot = if group == [""] { "" } else { "." };
                let resource = format!("{name}{dot}{}{subresource}", group[0]);
                let names = words(&rule["resourceNames"]).iter().map(|name| format!(" `{name}`")).collect::<String>();
                let verbs = words(&rule["verbs"]).join(", ");
                rights.insert((format!("`{resource}`{names}"), verbs, scope.to_owned()));
            }
        }
    }
    rights
}

/// The rows of the table of an account in docs/security.md.
fn documented(component: &str) -> BTreeSet<Right> {
    let text = std::fs::read_to_string(deploy().join("../docs/security.md")).expect("the page is there");
    let begin = format!("<!-- rights:{component}:begin -->");
    let (_, rest) = text.split_once(&begin).expect("the table has a mark before it");
    let (table, _) = rest.split_once("<!-- rights:end -->").expect("and one behind it");
    let rows = table.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let mut cells = row.trim_matches('|').split('|').map(|cell| cell.trim().to_owned());
        let mut cell = || cells.next().unwrap_or_default();
        (cell(), cell(), cell())
    })
    .collect()
}

#[test]
fn the_documented_rights_are_those_given() {
    for component in ["kubelet-plugin", "controller"] {
        assert_eq!(given(component), documented(component), "{component}");
    }
}

#[test]
fn nobody_gets_what_leads_further() {
    for component in ["kubelet-plugin", "controller"] {
        let rights = given(component);
        assert!(!rights.is_empty());
        for (what, verbs, _) in rights {
            for word in ["*", "secrets", "pods", "serviceaccounts", "roles", "daemonsets", "certificates"] {
                assert!(!what.contains(word) && !verbs.contains(word), "{component}: {verbs} {what}");
            }
            let writes_slices = what.contains("resourceslices") && component == "kubelet-plugin";
            assert!(
                !writes_slices && !what.contains("/exec") && !what.contains("resourceclaims/"),
                "{component}: {what}"
            );
        }
    }
}
