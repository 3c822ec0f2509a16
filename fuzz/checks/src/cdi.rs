//! CDI names and documents.

use std::path::Path;

use kerf_cdi::{ContainerEdits, Device, Kind, Spec, SpecDir};
use serde_json::Value;

use crate::json;

/// Three lines: a kind, a device's name, and the id of a file. Each is accepted exactly when the CDI specification
/// allows it, and a qualified name can be taken apart again.
pub fn cdi_name(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut lines = text.splitn(3, '\n');
    let [kind_text, device, id] = [(); 3].map(|()| lines.next().unwrap_or_default());

    let kind = Kind::try_from(kind_text.to_owned());
    let legal = kind_text
        .split_once('/')
        .is_some_and(|(vendor, class)| is_vendor_or_class(vendor) && is_vendor_or_class(class));
    assert_eq!(kind.is_ok(), legal, "{kind_text:?}: {kind:?}");
    let kind = match kind {
        Ok(kind) => kind,
        Err(error) => {
            assert_eq!(error.at, "kind");
            Kind::new("vendor.example", "class").expect("a legal kind")
        }
    };
    assert_eq!(Kind::try_from(kind.to_string()), Ok(kind.clone()));

    let edits = ContainerEdits { env: vec!["A=b".to_owned()], ..ContainerEdits::default() };
    let named = Device { name: device.to_owned(), container_edits: edits, ..Device::default() };
    let spec = Spec { devices: vec![named], ..Spec::new(kind.clone()) };
    assert_eq!(spec.validate().is_ok(), is_device(device), "{device:?}");
    if is_device(device) {
        let qualified = kind.qualified(device);
        let parts = qualified.split_once('=').expect("a qualified name");
        assert_eq!(parts, (kind.to_string().as_str(), device));
        let json = spec.to_json().expect("a valid spec");
        assert_eq!(Spec::from_json(&json).expect("what is written is read"), spec);
    }

    if let Ok(path) = SpecDir::new("/root/of/specs", kind.clone()).path(id) {
        assert_eq!(path.parent(), Some(Path::new("/root/of/specs")), "no id leads out of the directory");
        let name = path.file_name().and_then(|name| name.to_str()).expect("a file name");
        assert_eq!(name, format!("{}-{}_{id}.json", kind.vendor(), kind.class()));
    }
}

/// A document that is accepted is valid, is written in no higher version than it had, and reads back as the same. No
/// field that nobody knows is in it.
pub fn cdi_spec(data: &[u8]) {
    let spec = match Spec::from_json(data) {
        Ok(spec) => spec,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    spec.validate().expect("what is read is valid");
    let json = spec.to_json().expect("what is valid can be written");
    assert_eq!(Spec::from_json(&json).expect("what is written is read"), spec);
    assert_eq!(spec.clone().to_json().as_ref(), Ok(&json), "the same spec gives the same bytes");

    let read = |json: &[u8]| serde_json::from_slice::<Value>(json).expect("JSON");
    let (document, written) = (read(data), read(&json));
    if let Some(declared) = document["cdiVersion"].as_str() {
        // Each version of the specification sorts after the one before as a text.
        assert!(written["cdiVersion"].as_str() <= Some(declared), "{declared} was enough");
    }
    for unknown in json::with_an_unknown_field(&document, &["annotations"]) {
        assert!(Spec::from_json(unknown.to_string().as_bytes()).is_err(), "{unknown}");
    }
}

/// `vendor` and `class` of the CDI specification: a letter, then letters, digits, `_`, `-`, `.`, not ending in one of
/// the last three.
fn is_vendor_or_class(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic()) && is_device(name) && !name.contains(':')
}

/// A device's name: as above, with `:` inside, and a digit may be at the head.
fn is_device(name: &str) -> bool {
    let alphanumeric = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    alphanumeric(name.bytes().next())
        && alphanumeric(name.bytes().next_back())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.:".contains(&byte))
}
