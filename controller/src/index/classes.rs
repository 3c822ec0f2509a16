//! All DeviceClasses there are: those of the controller are kept beside those of others.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::DeviceClass;
use kube::ResourceExt as _;

use super::{Feed, Index};
use crate::liveness::Now;

impl Index {
    /// All DeviceClasses, whoever made them, by name.
    pub fn classes(&self) -> Arc<BTreeMap<String, DeviceClass>> {
        self.classes.clone()
    }

    fn change_classes(&mut self, change: impl FnOnce(&mut BTreeMap<String, DeviceClass>)) {
        change(Arc::make_mut(&mut self.classes));
        self.revision += 1;
    }
}

impl Feed<DeviceClass> for Index {
    fn apply(&mut self, class: DeviceClass, _: Now) {
        self.change_classes(|classes| drop(classes.insert(class.name_any(), class)));
    }

    fn delete(&mut self, class: DeviceClass, _: Now) {
        self.change_classes(|classes| drop(classes.remove(&class.name_any())));
    }

    fn reset(&mut self, classes: Vec<DeviceClass>, _: Now) {
        let all = classes.into_iter().map(|class| (class.name_any(), class)).collect();
        self.change_classes(|classes| *classes = all);
    }
}
