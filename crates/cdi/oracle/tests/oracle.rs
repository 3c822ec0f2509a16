//! What kerf-cdi writes, loaded and injected by the crate `container-device-interface`: an implementation of the
//! runtimes' side that knows nothing of ours.

use container_device_interface::{cache, spec as judge, spec_dirs, version};
use kerf_cdi::{Spec, SpecDir};
use oci_spec::runtime as oci;
use proptest::prelude::*;

#[path = "../../tests/it/arbitrary.rs"]
mod arbitrary;
#[path = "../../tests/it/samples.rs"]
mod samples;
#[path = "../../tests/it/versions.rs"]
mod versions;

/// A container's configuration after `devices` of `specs`, each written under its id, were injected.
fn inject(specs: &[(&str, Spec)], devices: &[&str]) -> oci::Spec {
    let root = tempfile::tempdir().unwrap();
    let dir = SpecDir::new(root.path(), samples::kind());
    for (id, spec) in specs {
        dir.write(id, spec).unwrap();
    }
    let cache = cache::new_cache(vec![spec_dirs::with_spec_dirs(&[root.path().to_str().unwrap()])]);
    let mut cache = cache.lock().unwrap();
    cache.refresh().unwrap();
    let mut container = oci::Spec::default();
    let devices = devices.iter().map(|device| samples::kind().qualified(device)).collect();
    cache.inject_devices(Some(&mut container), devices).unwrap();
    container
}

/// Path, numbers and mode of all device nodes.
fn nodes(container: &oci::Spec) -> Vec<(String, i64, i64, u32)> {
    let devices = container.linux().as_ref().unwrap().devices().as_deref().unwrap_or_default();
    devices
        .iter()
        .map(|d| {
            assert_eq!(d.typ(), oci::LinuxDeviceType::C);
            (d.path().display().to_string(), d.major(), d.minor(), d.file_mode().unwrap())
        })
        .collect()
}

/// What the device cgroup allows, as `major:minor access`, beyond what it allows any container.
fn rules(container: &oci::Spec) -> Vec<String> {
    let text = |rule: &oci::LinuxDeviceCgroup| {
        assert!(rule.allow());
        assert_eq!(rule.typ(), Some(oci::LinuxDeviceType::C));
        let (major, minor) = (rule.major().unwrap(), rule.minor().unwrap());
        format!("{major}:{minor} {}", rule.access().as_deref().unwrap())
    };
    let all = |spec: &oci::Spec| {
        let resources = spec.linux().as_ref().unwrap().resources().as_ref().unwrap();
        resources.devices().clone().unwrap_or_default()
    };
    let before = all(&oci::Spec::default());
    all(container).iter().filter(|rule| !before.contains(rule)).map(text).collect()
}

fn env(container: &oci::Spec) -> &[String] {
    container.process().as_ref().unwrap().env().as_deref().unwrap()
}

/// The edits that [`samples`] gives to every container with a GPU.
fn assert_common_edits(container: &oci::Spec) {
    assert!(env(container).contains(&"NVIDIA_VISIBLE_DEVICES=void".to_owned()));

    let mounts = container.mounts().as_ref().unwrap();
    for path in ["/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05", "/usr/bin/nvidia-smi"] {
        let found: Vec<_> = mounts.iter().filter(|mount| mount.destination().to_str() == Some(path)).collect();
        assert_eq!(found.len(), 1, "{path}");
        assert_eq!(found[0].source().as_ref().unwrap().to_str().unwrap(), format!("/run/nvidia/driver{path}"));
        assert_eq!(found[0].options().as_ref().unwrap().join(","), "ro,nosuid,nodev,rbind,rprivate");
    }
}

fn hooks(container: &oci::Spec) -> Vec<String> {
    let hooks = container.hooks().as_ref().unwrap().create_container().as_deref().unwrap_or_default();
    let line = |hook: &oci::Hook| format!("{} {}", hook.path().display(), hook.args().as_ref().unwrap().join(" "));
    hooks.iter().map(line).collect()
}

const HOOK: &str = "/usr/bin/nvidia-cdi-hook nvidia-cdi-hook update-ldcache --folder /usr/lib/x86_64-linux-gnu";

fn node(path: &str, major: i64, minor: i64, mode: u32) -> (String, i64, i64, u32) {
    (path.to_owned(), major, minor, mode)
}

#[test]
fn a_whole_gpu() {
    let spec = samples::gpu();
    let device = spec.devices[0].name.clone();
    let container = inject(&[(samples::GPU_CLAIM, spec)], &[&device]);

    assert_common_edits(&container);
    assert_eq!(hooks(&container), [HOOK]);
    assert_eq!(
        nodes(&container),
        [
            node("/dev/nvidiactl", 195, 255, 0o666),
            node("/dev/nvidia-uvm", 511, 0, 0o666),
            node("/dev/nvidia1", 195, 1, 0o666),
            node("/dev/dri/renderD128", 226, 128, 0o660),
        ]
    );
    assert_eq!(rules(&container), ["195:255 rwm", "511:0 rwm", "195:1 rwm", "226:128 rwm"]);
    let process = container.process().as_ref().unwrap();
    assert_eq!(process.user().additional_gids().as_deref(), Some(&[44][..]));
}

#[test]
fn a_mig_device() {
    let spec = samples::mig();
    let device = spec.devices[0].name.clone();
    let container = inject(&[(samples::MIG_CLAIM, spec)], &[&device]);

    assert_common_edits(&container);
    assert_eq!(hooks(&container), [HOOK]);
    assert_eq!(
        nodes(&container),
        [
            node("/dev/nvidiactl", 195, 255, 0o666),
            node("/dev/nvidia-uvm", 511, 0, 0o666),
            node("/dev/nvidia1", 195, 1, 0o666),
            node("/dev/nvidia-caps/nvidia-cap66", 508, 66, 0o666),
            node("/dev/nvidia-caps/nvidia-cap67", 508, 67, 0o666),
        ]
    );
    assert_eq!(rules(&container), ["195:255 rwm", "511:0 rwm", "195:1 rwm", "508:66 r", "508:67 r"]);
}

/// Two claims in one container: what they have in common is there once.
#[test]
fn two_claims_in_one_container() {
    let (gpu, mig) = (samples::gpu(), samples::mig());
    let devices = [gpu.devices[0].name.clone(), mig.devices[0].name.clone()];
    let specs = [(samples::GPU_CLAIM, gpu), (samples::MIG_CLAIM, mig)];
    let container = inject(&specs, &[&devices[0], &devices[1]]);

    assert_common_edits(&container);
    let mut paths: Vec<_> = nodes(&container).into_iter().map(|(path, ..)| path).collect();
    paths.sort();
    assert_eq!(
        paths,
        [
            "/dev/dri/renderD128",
            "/dev/nvidia-caps/nvidia-cap66",
            "/dev/nvidia-caps/nvidia-cap67",
            "/dev/nvidia-uvm",
            "/dev/nvidia1",
            "/dev/nvidiactl",
        ]
    );
    let variables = env(&container).iter().filter(|variable| variable.starts_with("NVIDIA_VISIBLE_DEVICES="));
    assert_eq!(variables.count(), 1);
}

/// `spec` as a file, read by the judge.
fn read(spec: &Spec) -> judge::Spec {
    let root = tempfile::tempdir().unwrap();
    let dir = SpecDir::new(root.path(), spec.kind.clone());
    dir.write("id", spec).unwrap();
    judge::read_spec(&dir.path("id").unwrap(), 0).unwrap()
}

#[test]
fn the_lowest_version_is_the_judges() {
    for (feature, spec, ours) in versions::table() {
        let judged = version::minimum_required_version(&read(&spec).cdi_spec).unwrap();
        assert_eq!(judged.to_string(), ours.to_string(), "{feature}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_valid_spec_is_loaded_at_the_lowest_version(spec in arbitrary::spec()) {
        let read = read(&spec);
        let judged = version::minimum_required_version(&read.cdi_spec).unwrap();
        prop_assert_eq!(judged.to_string(), spec.required_version().to_string());
        prop_assert_eq!(format!("{}/{}", read.get_vendor(), read.get_class()), spec.kind.to_string());
        let devices: Vec<_> = read.get_devices().into_values().map(|device| device.get_qualified_name()).collect();
        let mut ours: Vec<_> = spec.devices.iter().map(|device| spec.kind.qualified(&device.name)).collect();
        ours.sort();
        prop_assert_eq!(devices, ours);
    }
}
