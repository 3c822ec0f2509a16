//! A DeviceClass for every MIG profile that the cluster's GPUs can be cut into, so that a pod may ask for
//! `nvidia.com/mig-1g.10gb: 1` as it did when a device plugin served it. Pure but for `keeper`.
//!
//! Architecture invariant: an admin's class is never touched. What the controller has made carries its labels, and a policy in
//! the API server holds the controller to objects with them.

mod keeper;
mod plan;
mod profile;

use k8s_openapi::api::resource::v1::{CELDeviceSelector, DeviceClass, DeviceClassSpec, DeviceSelector};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kerf_api::names;

pub(crate) use keeper::delete;
pub use keeper::{Keeper, WriteError};
pub use plan::{Note, Plan, plan};
pub use profile::{class_name, extended_resource, offered};
pub(crate) use profile::{is_profile, kind};

/// The class of one profile. With `resource`, pods that ask for that extended resource are served through it.
pub fn class(driver: &str, profile: &str, resource: Option<String>) -> DeviceClass {
    let expression = format!(
        r#"device.driver == "{driver}" && device.attributes["{driver}"].type == "{}" && device.attributes["{driver}"].profile == "{profile}""#,
        names::TYPE_MIG
    );
    made(driver, class_name(driver, profile), expression, resource)
}

/// A class that is only tried, and never stored.
pub(crate) fn probe_class(driver: &str) -> DeviceClass {
    let resource = Some(format!("{}/kerf-probe", names::GROUP));
    made(driver, format!("kerf-probe.{driver}"), "false".to_owned(), resource)
}

/// Whether the controller of `driver` has made this class.
pub fn is_ours(class: &DeviceClass, driver: &str) -> bool {
    let labels = class.metadata.labels.as_ref();
    marks(driver)
        .iter()
        .all(|(key, value)| labels.and_then(|labels| labels.get(*key)).is_some_and(|found| found == value))
}

/// The extended resource by which plain pods are served through a class.
pub fn resource_of(class: &DeviceClass) -> Option<&str> {
    class.spec.as_ref()?.extended_resource_name.as_deref()
}

/// The labels of everything that the controller makes beside slices.
fn marks(driver: &str) -> [(&'static str, &str); 3] {
    [(names::LABEL_MANAGED_BY, names::CONTROLLER), (names::LABEL_GENERATED, "true"), (names::LABEL_DRIVER, driver)]
}

fn made(driver: &str, name: String, expression: String, resource: Option<String>) -> DeviceClass {
    let labels = marks(driver).map(|(key, value)| (key.to_owned(), value.to_owned()));
    DeviceClass {
        metadata: ObjectMeta { name: Some(name), labels: Some(labels.into()), ..ObjectMeta::default() },
        spec: Some(DeviceClassSpec {
            selectors: Some(vec![DeviceSelector { cel: Some(CELDeviceSelector { expression }) }]),
            extended_resource_name: resource,
            config: None,
        }),
    }
}
