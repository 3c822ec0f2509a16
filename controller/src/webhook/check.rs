//! What kerf refuses of an object. Pure.

use kerf_api::problem::{Problem, element, field};
use kerf_api::{GpuPolicySpec, names, opaque};
use serde::Deserialize as _;
use serde_json::Value;

/// The kinds of objects that are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checked {
    /// A claim.
    ResourceClaim,
    /// A template of claims.
    ResourceClaimTemplate,
    /// A class, whose configurations every claim of it gets.
    DeviceClass,
    /// What GPUs offer. The API server has checked the types of its fields by the CRD.
    GpuPolicy,
}

impl Checked {
    /// All of them.
    pub const ALL: [Checked; 4] =
        [Checked::ResourceClaim, Checked::ResourceClaimTemplate, Checked::DeviceClass, Checked::GpuPolicy];

    /// The kind of this name in an API group, if it is checked.
    pub fn of(group: &str, kind: &str) -> Option<Checked> {
        Checked::ALL.into_iter().find(|checked| checked.group() == group && checked.name() == kind)
    }

    /// Its name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Checked::ResourceClaim => "ResourceClaim",
            Checked::ResourceClaimTemplate => "ResourceClaimTemplate",
            Checked::DeviceClass => "DeviceClass",
            Checked::GpuPolicy => "GpuPolicy",
        }
    }

    /// Its API group.
    pub fn group(self) -> &'static str {
        match self {
            Checked::ResourceClaim | Checked::ResourceClaimTemplate | Checked::DeviceClass => "resource.k8s.io",
            Checked::GpuPolicy => names::GROUP,
        }
    }
}

/// Everything that kerf, as this driver, refuses of an object.
pub fn check(kind: Checked, object: &Value, driver: &str) -> Vec<Problem> {
    match kind {
        Checked::ResourceClaim => configurations(object, &["spec", "devices"], driver),
        Checked::ResourceClaimTemplate => configurations(object, &["spec", "spec", "devices"], driver),
        Checked::DeviceClass => configurations(object, &["spec"], driver),
        Checked::GpuPolicy => match GpuPolicySpec::deserialize(&object["spec"]) {
            Ok(spec) => spec.problems(),
            Err(error) => vec![Problem::new("spec", error.to_string())],
        },
    }
}

/// Problems of the opaque configurations in the list `config` below some fields, as far as they are this driver's.
fn configurations(object: &Value, below: &[&str], driver: &str) -> Vec<Problem> {
    let (holder, path) =
        below.iter().fold((object, String::new()), |(value, path), name| (&value[*name], field(&path, name)));
    let list = field(&path, "config");
    let configs = holder["config"].as_array().into_iter().flatten().enumerate();
    let ours = configs.filter(|(_, config)| config["opaque"]["driver"] == driver);
    ours.flat_map(|(place, config)| {
        let path = field(&field(&element(&list, place), "opaque"), "parameters");
        opaque::problems(&config["opaque"]["parameters"], &path)
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn lines(kind: Checked, object: &Value) -> Vec<String> {
        check(kind, object, names::DRIVER_NAME).iter().map(ToString::to_string).collect()
    }

    fn config(driver: &str, strategy: &str) -> Value {
        let parameters =
            json!({"apiVersion": opaque::API_VERSION, "kind": "GpuConfig", "sharing": {"strategy": strategy}});
        json!({"requests": ["gpu"], "opaque": {"driver": driver, "parameters": parameters}})
    }

    #[test]
    fn every_kind_is_looked_through_where_it_has_configurations() {
        let devices = json!({"config": [
            config("other.example.com", "Foo"), config("gpu.nvidia.com", "TimeSlicing"), config("gpu.nvidia.com", "Foo"),
        ]});
        let claim = json!({"spec": {"devices": devices}});
        let what = "opaque.parameters.sharing.strategy: \"Foo\" is not known; use TimeSlicing";
        assert_eq!(lines(Checked::ResourceClaim, &claim), [format!("spec.devices.config[2].{what}")]);
        let template = json!({"spec": {"spec": {"devices": devices}}});
        assert_eq!(lines(Checked::ResourceClaimTemplate, &template), [format!("spec.spec.devices.config[2].{what}")]);
        assert_eq!(lines(Checked::DeviceClass, &json!({"spec": devices})), [format!("spec.config[2].{what}")]);
    }

    #[test]
    fn what_has_no_configurations_is_fine() {
        for object in [json!(null), json!({}), json!({"spec": {}}), json!({"spec": {"devices": {"config": null}}})] {
            for kind in [Checked::ResourceClaim, Checked::ResourceClaimTemplate, Checked::DeviceClass] {
                assert_eq!(lines(kind, &object), [""; 0], "{object}");
            }
        }
    }

    #[test]
    fn a_policy_is_checked_as_a_whole() {
        let wrong =
            json!({"spec": {"offer": "Layout", "profiles": [], "layout": {"name": "a", "migDevices": {"1g.10gb": 1}}}});
        let lines = lines(Checked::GpuPolicy, &wrong);
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert_eq!(lines[2], "spec.layout: it has both a name and migDevices; give one of the two");
        let fine = json!({"spec": {"offer": "WholeOnly"}});
        assert_eq!(check(Checked::GpuPolicy, &fine, names::DRIVER_NAME), []);
        let unread = check(Checked::GpuPolicy, &json!({"spec": {"offer": "Half"}}), names::DRIVER_NAME);
        assert!(unread.len() == 1 && unread[0].path == "spec", "{unread:?}");
    }

    #[test]
    fn kinds_are_told_apart_by_group() {
        for kind in Checked::ALL {
            assert_eq!(Checked::of(kind.group(), kind.name()), Some(kind));
        }
        assert_eq!(Checked::of("example.com", "ResourceClaim"), None);
        assert_eq!(Checked::of("", "Pod"), None);
    }
}
