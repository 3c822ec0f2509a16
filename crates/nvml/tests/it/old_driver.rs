//! An old driver's library, and answers that the simulator's healthy GPUs do not give: `old_driver.c`.

use std::path::Path;
use std::process::Command;

use kerf_mig::Placement;
use kerf_nvml::{Code, DriverRoot, Error, GpuInstance, Library, MigMode, Nvml, OpenError};
use tempfile::TempDir;

/// A driver root with the library, built with the C compiler that also links this test.
fn driver_root() -> (TempDir, DriverRoot) {
    let dir = tempfile::tempdir().expect("a directory");
    let lib = dir.path().join("usr/lib64");
    std::fs::create_dir_all(&lib).expect("a directory in it");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(lib.join("libnvidia-ml.so.1"))
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/old_driver.c"))
        .status();
    assert!(built.expect("a C compiler").success());
    let root = DriverRoot::at(dir.path());
    (dir, root)
}

#[test]
fn a_missing_function_fails_its_call_and_no_other() {
    let (_dir, root) = driver_root();
    let nvml = Library::open(&root).unwrap();
    let error = nvml.cuda_driver_version().unwrap_err();
    assert_eq!(error, Error { call: "nvmlSystemGetCudaDriverVersion_v2", code: Code::FunctionNotFound });
    assert_eq!(nvml.driver_version().unwrap(), "450.80.02");
    let gpu = nvml.gpu(0).unwrap();
    assert_eq!(nvml.mig_modes(gpu).unwrap(), None, "a driver that does not know MIG");
}

#[test]
fn profiles_come_from_the_first_versions_of_the_calls() {
    let (_dir, root) = driver_root();
    let nvml = Library::open(&root).unwrap();
    let gpu = nvml.gpu(0).unwrap();
    let profiles = nvml.gpu_instance_profiles(gpu).unwrap();

    let names: Vec<_> = profiles.iter().map(|profile| (profile.id, profile.name.as_str())).collect();
    assert_eq!(names, [(19, "1g.5gb"), (0, "7g.40gb")], "each id once, without the one that has no placements");
    assert_eq!(profiles[0].placements, [0, 1, 2, 3, 4, 5, 6].map(|start| Placement { start, size: 1 }));
    assert_eq!(profiles[1].placements, [Placement { start: 0, size: 8 }]);
    assert_eq!((profiles[1].engines.multiprocessors, profiles[1].engines.decoders), (98, 5));
}

#[test]
fn a_stale_gpu_is_an_error_and_not_a_gpu_without_profiles() {
    let (_dir, root) = driver_root();
    let nvml = Library::open(&root).unwrap();
    let gpu = nvml.gpu(1).unwrap();
    assert_eq!(nvml.gpu_instance_profiles(gpu).unwrap_err().code, Code::InvalidArgument);
    assert_eq!(nvml.gpu_instances(gpu).unwrap_err().code, Code::InvalidArgument);
}

#[test]
fn an_instance_that_vanishes_while_it_is_listed_is_left_out() {
    let (_dir, root) = driver_root();
    let nvml = Library::open(&root).unwrap();
    let gpu = nvml.gpu(0).unwrap();
    let live = GpuInstance { id: 9, profile_id: 19, placement: Placement { start: 2, size: 1 } };
    assert_eq!(nvml.gpu_instances(gpu).unwrap(), [live]);
}

#[test]
fn both_the_return_value_and_the_activation_status_of_a_mode_switch_are_obeyed() {
    let (_dir, root) = driver_root();
    let nvml = Library::open(&root).unwrap();
    let gpu = nvml.gpu(0).unwrap();
    assert_eq!(nvml.set_mig_mode(gpu, MigMode::Enabled).unwrap_err().code, Code::InUse);
    assert_eq!(nvml.set_mig_mode(gpu, MigMode::Disabled).unwrap_err().code, Code::NoPermission);
}

#[test]
fn a_compute_instance_that_would_pass_for_the_whole_gpu_is_taken_back() {
    let (_dir, root) = driver_root();
    let nvml = Library::open(&root).unwrap();
    let gpu = nvml.gpu(0).unwrap();
    let error = nvml.create_compute_instance(gpu, 9, 1).unwrap_err();
    assert!(error.call.contains("MIG device"), "{error}: 1_SLICE was created, not its shadow");
    assert_eq!(nvml.compute_instances(gpu, 9).unwrap(), []);
    assert_eq!(nvml.create_compute_instance(gpu, 9, 4).unwrap_err().code, Code::NotSupported);
}

#[test]
fn a_process_list_that_grows_while_it_is_read_is_read_whole() {
    let (_dir, root) = driver_root();
    let nvml = Library::open(&root).unwrap();
    let processes = nvml.processes(nvml.gpu(0).unwrap()).unwrap();
    assert_eq!(processes.len(), 100, "70 did not fit, the next call had 100");
    assert_eq!((processes[0].pid, processes[0].gpu_instance), (1000, Some(9)));
    assert_eq!((processes[1].pid, processes[1].gpu_instance), (1001, None));
}

#[test]
fn a_gpu_of_another_session_is_refused() {
    let (_dir, root) = driver_root();
    let (one, other) = (Library::open(&root).unwrap(), Library::open(&root).unwrap());
    let gpu = one.gpu(0).unwrap();
    assert_ne!(gpu, other.gpu(0).unwrap());
    assert_eq!(other.processes(gpu).unwrap_err().code, Code::InvalidArgument);
}

#[test]
fn what_cannot_be_opened_is_said_with_its_path() {
    let dir = tempfile::tempdir().unwrap();
    let root = DriverRoot::at(dir.path());
    assert!(matches!(Library::open(&root), Err(OpenError::Root(_))));

    let path = dir.path().join("lib64/libnvidia-ml.so.1");
    std::fs::create_dir(dir.path().join("lib64")).unwrap();
    std::fs::write(&path, "not a library").unwrap();
    let error = Library::open(&root).unwrap_err();
    assert!(matches!(error, OpenError::Load { .. }));
    assert!(error.to_string().starts_with(path.to_str().unwrap()), "{error}");
}
