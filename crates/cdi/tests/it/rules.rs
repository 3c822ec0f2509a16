//! Each rule broken once and kept once.

use std::collections::BTreeMap;

use kerf_cdi::{ContainerEdits, Device, DeviceNode, Hook, HookName, Invalid, Kind, Mount, Problem, Spec};

fn text(text: &str) -> String {
    text.to_owned()
}

fn edits() -> ContainerEdits {
    ContainerEdits { env: vec![text("A=b")], ..ContainerEdits::default() }
}

fn device(name: &str) -> Device {
    Device { name: name.into(), container_edits: edits(), ..Device::default() }
}

fn spec(devices: impl Into<Vec<Device>>) -> Spec {
    Spec { devices: devices.into(), ..Spec::new(Kind::new("v", "c").unwrap()) }
}

/// `spec` breaks one rule at `at`, and is then not encoded.
#[track_caller]
fn assert_broken(spec: &Spec, at: &str, problem: Problem) {
    let expected = Err(Invalid { at: at.into(), problem });
    assert_eq!(spec.validate(), expected);
    assert_eq!(spec.to_json().map(drop), expected);
}

#[track_caller]
fn assert_kept(spec: &Spec) {
    assert_eq!(spec.validate(), Ok(()));
}

#[test]
fn vendor_and_class() {
    let bad = |vendor: &str, class: &str| {
        let Invalid { at, problem } = Kind::new(vendor, class).unwrap_err();
        assert_eq!(at, "kind");
        problem
    };
    assert_eq!(bad("", "c"), Problem::EmptyName);
    assert_eq!(bad("v", ""), Problem::EmptyName);
    assert_eq!(bad("1v", "c"), Problem::NameStartsWithDigit(text("1v")));
    assert_eq!(bad("v", "1c"), Problem::NameStartsWithDigit(text("1c")));
    assert_eq!(bad("-v", "c"), Problem::NameEnds(text("-v")));
    assert_eq!(bad("v.", "c"), Problem::NameEnds(text("v.")));
    assert_eq!(bad("v:w", "c"), Problem::NameCharacter { name: text("v:w"), character: ':' });
    assert_eq!(bad("v", "c/d"), Problem::NameCharacter { name: text("c/d"), character: '/' });
    assert_eq!(bad("vé", "c"), Problem::NameCharacter { name: text("vé"), character: 'é' });
    assert_eq!(Kind::try_from(text("vc")).unwrap_err().problem, Problem::NoClass(text("vc")));

    for (vendor, class) in [("v", "c"), ("V1", "C1"), ("k8s.gpu.nvidia.com", "a-b_c.d1")] {
        let kind = Kind::new(vendor, class).unwrap();
        assert_eq!(Kind::try_from(kind.to_string()), Ok(kind.clone()));
        assert_eq!(kind.qualified("d"), format!("{vendor}/{class}=d"));
    }
}

#[test]
fn devices() {
    assert_broken(&spec([]), "devices", Problem::NoDevices);
    assert_broken(
        &spec([device("d"), device("e"), device("d")]),
        "devices[2].name",
        Problem::DuplicateDevice(text("d")),
    );
    assert_broken(
        &spec([device("d"), Device { container_edits: ContainerEdits::default(), ..device("e") }]),
        "devices[1].containerEdits",
        Problem::NoEdits,
    );
    assert_kept(&spec([device("d"), device("e")]));
}

#[test]
fn device_names() {
    let broken = |name: &str, problem| assert_broken(&spec([device(name)]), "devices[0].name", problem);
    broken("", Problem::EmptyName);
    broken("-d", Problem::NameEnds(text("-d")));
    broken("d:", Problem::NameEnds(text("d:")));
    broken("d=e", Problem::NameCharacter { name: text("d=e"), character: '=' });
    for name in ["d", "0", "1:0", "a_b-c.d:e", "0b6f6c5e-8a3f-4a44-9d0c-0d9f4d1c2a11-gpu-3b-00-0"] {
        assert_kept(&spec([device(name)]));
    }
}

/// Edits are checked alike for the whole spec and for a device.
#[track_caller]
fn assert_edits_broken(edits: ContainerEdits, at: &str, problem: Problem) {
    let common = Spec { container_edits: edits.clone(), ..spec([device("d")]) };
    assert_broken(&common, &format!("containerEdits.{at}"), problem.clone());
    let own = spec([Device { container_edits: edits, ..device("d") }]);
    assert_broken(&own, &format!("devices[0].containerEdits.{at}"), problem);
}

#[track_caller]
fn assert_edits_kept(edits: ContainerEdits) {
    assert_kept(&Spec { container_edits: edits.clone(), ..spec([device("d")]) });
    assert_kept(&spec([Device { container_edits: edits, ..device("d") }]));
}

#[test]
fn environment() {
    let env = |variable: &str| ContainerEdits { env: vec![text("A=b"), text(variable)], ..ContainerEdits::default() };
    for bad in ["", "A", "=b"] {
        assert_edits_broken(env(bad), "env[1]", Problem::Env(text(bad)));
    }
    for good in ["A=", "A=b=c", "a.b=c"] {
        assert_edits_kept(env(good));
    }
}

#[test]
fn device_nodes() {
    let with = |node| ContainerEdits { device_nodes: vec![node], ..ContainerEdits::default() };
    let node = || DeviceNode { path: text("/dev/d"), ..DeviceNode::default() };
    let broken = |node, at: &str, problem| assert_edits_broken(with(node), &format!("deviceNodes[0]{at}"), problem);

    for path in ["", "dev/d"] {
        broken(DeviceNode { path: text(path), ..node() }, ".path", Problem::NotAbsolute(text(path)));
        broken(DeviceNode { host_path: Some(text(path)), ..node() }, ".hostPath", Problem::NotAbsolute(text(path)));
    }
    broken(DeviceNode { major: Some(195), ..node() }, "", Problem::HalfDeviceNumber);
    broken(DeviceNode { minor: Some(0), ..node() }, "", Problem::HalfDeviceNumber);
    broken(DeviceNode { file_mode: Some(0o20666), ..node() }, ".fileMode", Problem::FileMode(0o20666));
    for permissions in ["", "x", "rwx", "nonem"] {
        let bad = DeviceNode { permissions: Some(text(permissions)), ..node() };
        broken(bad, ".permissions", Problem::Permissions(text(permissions)));
    }

    assert_edits_kept(with(node()));
    for permissions in ["r", "rw", "mwr", "none"] {
        assert_edits_kept(with(DeviceNode {
            host_path: Some(text("/host/dev/d")),
            major: Some(195),
            minor: Some(0),
            file_mode: Some(0o777),
            permissions: Some(text(permissions)),
            ..node()
        }));
    }
}

#[test]
fn mounts() {
    let with = |mount| ContainerEdits { mounts: vec![mount], ..ContainerEdits::default() };
    let mount = || Mount { host_path: text("/h"), container_path: text("/c"), ..Mount::default() };
    let broken = |mount, at, problem| assert_edits_broken(with(mount), at, problem);

    for path in ["", "lib"] {
        let problem = || Problem::NotAbsolute(text(path));
        broken(Mount { host_path: text(path), ..mount() }, "mounts[0].hostPath", problem());
        broken(Mount { container_path: text(path), ..mount() }, "mounts[0].containerPath", problem());
    }
    broken(Mount { mount_type: Some(text("")), ..mount() }, "mounts[0].type", Problem::EmptyMountType);

    assert_edits_kept(with(mount()));
    assert_edits_kept(with(Mount { mount_type: Some(text("bind")), options: vec![text("ro")], ..mount() }));
}

#[test]
fn hooks() {
    let with = |hook| ContainerEdits { hooks: vec![hook], ..ContainerEdits::default() };
    let hook = || Hook {
        hook_name: HookName::CreateContainer,
        path: text("/bin/hook"),
        args: vec![],
        env: vec![text("A=b")],
        timeout: None,
    };
    for path in ["", "hook"] {
        let bad = Hook { path: text(path), ..hook() };
        assert_edits_broken(with(bad), "hooks[0].path", Problem::NotAbsolute(text(path)));
    }
    let bad = Hook { env: vec![text("A=b"), text("A")], ..hook() };
    assert_edits_broken(with(bad), "hooks[0].env[1]", Problem::Env(text("A")));
    assert_edits_kept(with(hook()));
}

#[test]
fn annotations() {
    let annotated = |key: &str, value: &str| BTreeMap::from([(text(key), text(value))]);
    let both = |annotations: BTreeMap<String, String>| {
        let own = spec([Device { annotations: annotations.clone(), ..device("d") }]);
        [("annotations", Spec { annotations, ..spec([device("d")]) }), ("devices[0].annotations", own)]
    };

    let long = "n".repeat(64);
    for key in ["", "/n", "p/", "p/n/m", "-n", "n.", "a b", "p_q/n", "p./n", &long] {
        for (at, spec) in both(annotated(key, "v")) {
            assert_broken(&spec, at, Problem::AnnotationKey(text(key)));
        }
    }
    for (at, spec) in both(annotated("key", &"v".repeat(256 * 1024 - 2))) {
        assert_broken(&spec, at, Problem::AnnotationsTooLarge(256 * 1024 + 1));
    }

    for key in ["n", "kerf.dev/claim-name", "a.b-c/D_e.f", &long[1..]] {
        both(annotated(key, "any text")).iter().for_each(|(_, spec)| assert_kept(spec));
    }
    both(annotated("key", &"v".repeat(256 * 1024 - 3))).iter().for_each(|(_, spec)| assert_kept(spec));
}
