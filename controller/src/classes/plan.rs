//! What has to be written so that the classes there are become those that there should be.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::DeviceClass;
use kube::ResourceExt;

use super::{class, class_name, extended_resource, is_ours, resource_of};

/// What has to be done.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Classes that are missing.
    pub create: Vec<DeviceClass>,
    /// Classes of ours that say something else, as they should be.
    pub update: Vec<DeviceClass>,
    /// Classes of ours whose profile no node has any more.
    pub delete: Vec<DeviceClass>,
    /// What a person has to know, with the class that it is about.
    pub notes: Vec<(DeviceClass, Note)>,
}

/// Why a class does not serve pods that ask for its extended resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Note {
    /// The API server drops the extended resource of classes.
    Dropped {
        /// The resource.
        resource: String,
    },
    /// Another class has the resource.
    ResourceTaken {
        /// The resource.
        resource: String,
        /// The other class.
        by: String,
    },
    /// Another class has the name that the class would have.
    NameTaken,
}

impl Plan {
    /// Whether nothing has to be written.
    pub fn is_empty(&self) -> bool {
        self.create.is_empty() && self.update.is_empty() && self.delete.is_empty()
    }
}

impl Note {
    /// One CamelCase word for an Event's reason.
    pub fn reason(&self) -> &'static str {
        match self {
            Note::Dropped { .. } => "ExtendedResourceDropped",
            Note::ResourceTaken { .. } => "ExtendedResourceTaken",
            Note::NameTaken => "ClassNameTaken",
        }
    }
}

impl std::fmt::Display for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Note::Dropped { resource } => write!(
                f,
                "pods that ask for {resource} are not served: the API server drops extendedResourceName. Switch the feature \
                 gate DRAExtendedResource on, on kube-apiserver, kube-scheduler, kube-controller-manager and the kubelets \
                 (it is on by default from Kubernetes 1.36). ResourceClaims may name the class"
            ),
            Note::ResourceTaken { resource, by } => write!(
                f,
                "the class is made without the extended resource {resource}, because DeviceClass {by} has it: pods that ask \
                 for it get what that class selects"
            ),
            Note::NameTaken => write!(
                f,
                "the controller makes no class for this profile: this one has the name and is not the controller's. Pods \
                 get what it selects"
            ),
        }
    }
}

/// Compares the classes that there should be for `profiles` with those `there` are.
///
/// `named`: the API server keeps extended resources.
pub fn plan(driver: &str, profiles: &BTreeSet<String>, there: &BTreeMap<String, DeviceClass>, named: bool) -> Plan {
    let mut plan = Plan::default();
    let mut wanted = BTreeSet::new();
    for profile in profiles {
        let name = class_name(driver, profile);
        let found = there.get(&name);
        if let Some(other) = found.filter(|found| !is_ours(found, driver)) {
            plan.notes.push((other.clone(), Note::NameTaken));
            continue;
        }
        let resource = extended_resource(driver, profile);
        let taken = resource.as_ref().and_then(|resource| holder(there, resource, driver));
        let note = match (&resource, taken) {
            (Some(resource), _) if !named => Some(Note::Dropped { resource: resource.clone() }),
            (Some(resource), Some(by)) => Some(Note::ResourceTaken { resource: resource.clone(), by }),
            _ => None,
        };
        let class = class(driver, profile, resource.filter(|_| note.is_none()));
        match found {
            None => plan.create.push(class),
            Some(found) if found.spec != class.spec => {
                plan.update.push(DeviceClass { metadata: found.metadata.clone(), spec: class.spec });
            }
            Some(_) => {}
        }
        // Of a class that is made now it is said when it is there: an Event is found by the UID of its object.
        plan.notes.extend(found.cloned().zip(note));
        wanted.insert(name);
    }
    let superfluous = there.values().filter(|class| is_ours(class, driver) && !wanted.contains(&class.name_any()));
    plan.delete.extend(superfluous.filter(|class| class.metadata.deletion_timestamp.is_none()).cloned());
    plan
}

/// The class of somebody else that has the resource.
fn holder(there: &BTreeMap<String, DeviceClass>, resource: &str, driver: &str) -> Option<String> {
    let has = |class: &&DeviceClass| resource_of(class) == Some(resource);
    there.values().filter(|class| !is_ours(class, driver)).find(has).map(ResourceExt::name_any)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kerf_api::names::DRIVER_NAME;

    fn profiles(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(ToString::to_string).collect()
    }

    fn there(classes: &[DeviceClass]) -> BTreeMap<String, DeviceClass> {
        classes.iter().map(|class| (class.name_any(), class.clone())).collect()
    }

    fn ours(profile: &str) -> DeviceClass {
        class(DRIVER_NAME, profile, extended_resource(DRIVER_NAME, profile))
    }

    fn admins(name: &str, resource: Option<&str>) -> DeviceClass {
        let mut class = ours("1g.10gb");
        class.metadata.labels = None;
        class.metadata.name = Some(name.to_owned());
        class.spec.as_mut().unwrap().extended_resource_name = resource.map(str::to_owned);
        class
    }

    #[test]
    fn classes_come_with_the_profile_and_go_with_it() {
        let first = plan(DRIVER_NAME, &profiles(&["1g.10gb", "1g.10gb+me"]), &there(&[]), true);
        let names: Vec<_> = first.create.iter().map(ResourceExt::name_any).collect();
        assert_eq!(names, ["mig-1g.10gb.nvidia.com", "mig-1g.10gb.me.nvidia.com"]);
        assert_eq!(resource_of(&first.create[1]), Some("nvidia.com/mig-1g.10gb.me"));
        let made = there(&first.create);
        assert!(plan(DRIVER_NAME, &profiles(&["1g.10gb", "1g.10gb+me"]), &made, true).is_empty(), "once");
        let second = plan(DRIVER_NAME, &profiles(&["1g.10gb"]), &made, true);
        assert_eq!(second.delete, [ours("1g.10gb+me")]);
        assert!(second.create.is_empty() && second.update.is_empty());
    }

    #[test]
    fn a_class_of_ours_that_was_edited_is_mended() {
        let mut edited = ours("1g.10gb");
        edited.spec.as_mut().unwrap().selectors = None;
        edited.metadata.resource_version = Some("7".into());
        edited.metadata.annotations = Some([("a".to_owned(), "b".to_owned())].into());
        let plan = plan(DRIVER_NAME, &profiles(&["1g.10gb"]), &there(std::slice::from_ref(&edited)), true);
        assert_eq!(plan.update.len(), 1);
        assert_eq!((&plan.update[0].metadata, &plan.update[0].spec), (&edited.metadata, &ours("1g.10gb").spec));
    }

    #[test]
    fn what_is_somebody_elses_is_left_alone() {
        let same_name = admins("mig-1g.10gb.nvidia.com", None);
        let done = plan(DRIVER_NAME, &profiles(&["1g.10gb"]), &there(std::slice::from_ref(&same_name)), true);
        assert!(done.is_empty(), "{done:?}");
        assert_eq!(done.notes, [(same_name.clone(), Note::NameTaken)]);
        assert!(plan(DRIVER_NAME, &profiles(&[]), &there(&[same_name]), true).is_empty(), "nor deleted");
        let of_another_driver = class("gpu2.nvidia.com", "1g.10gb", None);
        assert!(plan(DRIVER_NAME, &profiles(&[]), &there(&[of_another_driver]), true).is_empty());
    }

    #[test]
    fn a_resource_has_one_class() {
        let resource = "nvidia.com/mig-1g.10gb";
        let other = admins("small", Some(resource));
        let made = plan(DRIVER_NAME, &profiles(&["1g.10gb"]), &there(std::slice::from_ref(&other)), true);
        assert_eq!(resource_of(&made.create[0]), None);
        assert_eq!(made.notes, [], "the class is not there yet");
        let note = Note::ResourceTaken { resource: resource.into(), by: "small".into() };
        let mut stored = made.create[0].clone();
        stored.metadata.uid = Some("uid-1".into());
        let next = plan(DRIVER_NAME, &profiles(&["1g.10gb"]), &there(&[other.clone(), stored.clone()]), true);
        assert_eq!(next.notes, [(stored, note)]);
        // An admin's class that comes later takes the resource from ours, and ours has it again when that one goes.
        let later = plan(DRIVER_NAME, &profiles(&["1g.10gb"]), &there(&[other, ours("1g.10gb")]), true);
        assert_eq!(resource_of(&later.update[0]), None);
        let again = plan(DRIVER_NAME, &profiles(&["1g.10gb"]), &there(&later.update), true);
        assert_eq!(again.update[0].spec, ours("1g.10gb").spec);
    }

    #[test]
    fn without_support_the_class_is_made_all_the_same() {
        let made = plan(DRIVER_NAME, &profiles(&["1g.10gb"]), &there(&[]), false);
        assert_eq!(resource_of(&made.create[0]), None);
        let next = plan(DRIVER_NAME, &profiles(&["1g.10gb"]), &there(&made.create), false);
        let [(_, note)] = next.notes.as_slice() else { panic!("{:?}", next.notes) };
        assert!(note.to_string().contains("DRAExtendedResource"), "{note}");
        assert!(next.is_empty(), "once");
    }
}
