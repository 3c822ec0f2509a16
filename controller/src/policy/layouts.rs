//! The cluster's layout file, from its ConfigMap.

use k8s_openapi::api::core::v1::ConfigMap;
use kerf_api::names;
use kerf_mig::parted::Layouts;

/// The file as it was last seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LayoutFile {
    /// There is none.
    #[default]
    Absent,
    /// It cannot be read, for this reason.
    Broken(String),
    /// It has these layouts.
    Read(Layouts),
}

impl LayoutFile {
    /// The file in a ConfigMap that the controller may not read. The chart's Role lies in the ConfigMap's namespace and goes with it.
    pub fn forbidden(namespace: &str, name: &str) -> LayoutFile {
        LayoutFile::Broken(format!(
            "the controller has no right to read ConfigMap {namespace}/{name}; if its namespace is gone, name another one in \
             the chart's layouts.configMap"
        ))
    }

    /// Reads the file in a ConfigMap.
    pub fn read(object: &ConfigMap) -> LayoutFile {
        let key = names::LAYOUTS_KEY;
        match object.data.as_ref().and_then(|data| data.get(key)).map(|text| Layouts::parse(text)) {
            None => LayoutFile::Broken(format!("its ConfigMap has no key {key}")),
            Some(Ok(layouts)) => LayoutFile::Read(layouts),
            Some(Err(error)) => LayoutFile::Broken(error.to_string()),
        }
    }
}
