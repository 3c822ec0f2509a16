//! The lowest version for each feature.

use std::collections::BTreeMap;

use kerf_cdi::{ContainerEdits, Device, DeviceNode, Kind, Mount, Spec, Version};

/// A small spec for each feature that has a lowest version, with that version.
pub(crate) fn table() -> Vec<(&'static str, Spec, Version)> {
    let path = || "/p".to_owned();
    let node = || DeviceNode { path: path(), ..DeviceNode::default() };
    let mount = || Mount { host_path: path(), container_path: path(), ..Mount::default() };
    let device = |name: &str, container_edits| Device { name: name.into(), container_edits, ..Device::default() };
    let spec = |device| Spec { devices: vec![device], ..Spec::new(Kind::new("v.w", "c").unwrap()) };

    let base = || ContainerEdits { device_nodes: vec![node()], mounts: vec![mount()], ..ContainerEdits::default() };
    let typed = || ContainerEdits {
        mounts: vec![mount(), Mount { mount_type: Some("tmpfs".into()), ..mount() }],
        ..ContainerEdits::default()
    };
    let host = || ContainerEdits {
        device_nodes: vec![node(), DeviceNode { host_path: Some(path()), ..node() }],
        ..ContainerEdits::default()
    };
    let gids = || ContainerEdits { additional_gids: vec![44], ..ContainerEdits::default() };
    let common = |container_edits| Spec { container_edits, ..spec(device("d", base())) };
    let annotations = || BTreeMap::from([("k".to_owned(), "v".to_owned())]);

    vec![
        ("base", spec(device("d", base())), Version::V0_3),
        ("mount type, device", spec(device("d", typed())), Version::V0_4),
        ("mount type, common", common(typed()), Version::V0_4),
        ("host path, device", spec(device("d", host())), Version::V0_5),
        ("host path, common", common(host()), Version::V0_5),
        ("digit first", spec(device("0d", base())), Version::V0_5),
        ("annotation, device", spec(Device { annotations: annotations(), ..device("d", base()) }), Version::V0_6),
        ("annotation, spec", Spec { annotations: annotations(), ..common(typed()) }, Version::V0_6),
        ("dot in class", Spec { kind: Kind::new("v", "c.d").unwrap(), ..common(host()) }, Version::V0_6),
        ("groups, device", spec(device("0d", gids())), Version::V0_7),
        ("groups, common", Spec { annotations: annotations(), ..common(gids()) }, Version::V0_7),
    ]
}

#[test]
fn each_feature_has_its_version() {
    for (feature, spec, version) in table() {
        assert_eq!(spec.required_version(), version, "{feature}");
        let json = String::from_utf8(spec.to_json().unwrap()).unwrap();
        assert!(json.contains(&format!(r#""cdiVersion": "{version}""#)), "{feature}: {json}");
    }
}

#[test]
fn versions_are_in_order() {
    use Version::*;
    let all = [V0_3, V0_4, V0_5, V0_6, V0_7, V0_8, V1_0, V1_1];
    assert!(all.is_sorted());
    assert_eq!(all.map(|v| v.to_string()).join(" "), "0.3.0 0.4.0 0.5.0 0.6.0 0.7.0 0.8.0 1.0.0 1.1.0");
}
