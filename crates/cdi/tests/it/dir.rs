//! The directory: one step for each change, and only our own files.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use kerf_cdi::{Error, Kind, Spec, SpecDir};
use tempfile::TempDir;

use crate::samples::{self, GPU_CLAIM, MIG_CLAIM};

fn dir() -> (TempDir, SpecDir) {
    let temporary = tempfile::tempdir().unwrap();
    let specs = SpecDir::new(temporary.path().join("run/cdi"), samples::kind());
    (temporary, specs)
}

fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn write_read_list_remove() {
    let (temporary, specs) = dir();
    assert_eq!(specs.list().unwrap(), Vec::<String>::new());
    assert_eq!(specs.read(GPU_CLAIM).unwrap(), None);

    assert!(specs.write(MIG_CLAIM, &samples::mig()).unwrap());
    assert!(specs.write(GPU_CLAIM, &samples::gpu()).unwrap());
    assert_eq!(specs.read(GPU_CLAIM).unwrap(), Some(samples::gpu()));
    assert_eq!(specs.read(MIG_CLAIM).unwrap(), Some(samples::mig()));
    assert_eq!(specs.list().unwrap(), [GPU_CLAIM, MIG_CLAIM]);
    let root = temporary.path().join("run/cdi");
    assert_eq!(specs.path(GPU_CLAIM).unwrap(), root.join(format!("k8s.gpu.nvidia.com-claim_{GPU_CLAIM}.json")));
    assert_eq!(names(&root), [GPU_CLAIM, MIG_CLAIM].map(|claim| format!("k8s.gpu.nvidia.com-claim_{claim}.json")));

    specs.remove(GPU_CLAIM).unwrap();
    assert_eq!(specs.list().unwrap(), [MIG_CLAIM]);
    specs.remove(GPU_CLAIM).unwrap();
    specs.remove(MIG_CLAIM).unwrap();
    assert_eq!(names(&root), Vec::<String>::new());
}

#[test]
fn removing_from_an_absent_directory_succeeds() {
    let (temporary, specs) = dir();
    specs.remove(GPU_CLAIM).unwrap();
    assert!(names(temporary.path()).is_empty());
}

#[test]
fn a_spec_is_readable_by_all() {
    let (_temporary, specs) = dir();
    specs.write(GPU_CLAIM, &samples::gpu()).unwrap();
    let mode = fs::metadata(specs.path(GPU_CLAIM).unwrap()).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o644);
}

#[test]
fn the_same_spec_is_not_written_again() {
    let (_temporary, specs) = dir();
    let inode = || fs::metadata(specs.path(GPU_CLAIM).unwrap()).unwrap().ino();
    assert!(specs.write(GPU_CLAIM, &samples::gpu()).unwrap());
    let before = inode();
    assert!(!specs.write(GPU_CLAIM, &samples::gpu()).unwrap());
    assert_eq!(inode(), before);

    let mut changed = samples::gpu();
    changed.container_edits.env.push("A=b".into());
    assert!(specs.write(GPU_CLAIM, &changed).unwrap());
    assert_eq!(specs.read(GPU_CLAIM).unwrap(), Some(changed));
}

#[test]
fn a_damaged_file_is_reported_and_replaced() {
    let (_temporary, specs) = dir();
    specs.write(GPU_CLAIM, &samples::gpu()).unwrap();
    let path = specs.path(GPU_CLAIM).unwrap();
    fs::write(&path, "{").unwrap();
    let error = specs.read(GPU_CLAIM).unwrap_err();
    assert!(matches!(error, Error::Decode { .. }));
    assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
    assert!(specs.write(GPU_CLAIM, &samples::gpu()).unwrap());
    assert_eq!(specs.read(GPU_CLAIM).unwrap(), Some(samples::gpu()));
}

/// Reads all that a runtime would load, again and again while a spec changes between a short and a long one.
#[test]
fn a_reader_never_sees_half_a_spec() {
    let (_temporary, specs) = dir();
    let mut long = samples::gpu();
    long.container_edits.env.extend((0..2000).map(|i| format!("VARIABLE_{i}=value")));
    let both = [samples::gpu(), long];
    specs.write(GPU_CLAIM, &both[0]).unwrap();
    let root = specs.path(GPU_CLAIM).unwrap().parent().unwrap().to_owned();

    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 1..=200 {
                assert!(specs.write(GPU_CLAIM, &both[i % 2]).unwrap());
            }
            done.store(true, Ordering::Release);
        });
        while !done.load(Ordering::Acquire) {
            let loaded: Vec<_> =
                names(&root).into_iter().filter(|name| name.ends_with(".json") || name.ends_with(".yaml")).collect();
            assert_eq!(loaded.len(), 1);
            let spec = Spec::from_json(&fs::read(root.join(&loaded[0])).unwrap()).unwrap();
            assert!(both.contains(&spec));
        }
    });
    assert_eq!(names(&root).len(), 1, "a temporary file was left");
}

#[test]
fn leftovers_of_an_interrupted_write_are_found_and_removed() {
    let (_temporary, specs) = dir();
    specs.write(MIG_CLAIM, &samples::mig()).unwrap();
    let root = specs.path(MIG_CLAIM).unwrap().parent().unwrap().to_owned();
    fs::write(root.join(format!(".k8s.gpu.nvidia.com-claim_{GPU_CLAIM}.x1Y2z3.tmp")), "{").unwrap();

    assert_eq!(specs.list().unwrap(), [GPU_CLAIM, MIG_CLAIM]);
    assert_eq!(specs.read(GPU_CLAIM).unwrap(), None);
    specs.remove(GPU_CLAIM).unwrap();
    assert_eq!(specs.list().unwrap(), [MIG_CLAIM]);
    assert_eq!(names(&root).len(), 1);
}

#[test]
fn files_of_others_are_not_ours() {
    let (_temporary, specs) = dir();
    specs.write(GPU_CLAIM, &samples::gpu()).unwrap();
    let root = specs.path(GPU_CLAIM).unwrap().parent().unwrap().to_owned();
    for name in [
        format!("k8s.gpu.nvidia.com-claim_{MIG_CLAIM}.yaml"),
        format!("k8s.gpu.nvidia.com-claim_other_{MIG_CLAIM}.json"),
        "k8s.gpu.nvidia.com-claim_.json".into(),
        "k8s.gpu.nvidia.com-claim.json".into(),
        "nvidia.com-gpu.json".into(),
        "spec.123.tmp".into(),
        ".k8s.gpu.nvidia.com-claim_.tmp".into(),
    ] {
        fs::write(root.join(name), "").unwrap();
    }
    let before = names(&root);
    assert_eq!(specs.list().unwrap(), [GPU_CLAIM]);
    specs.remove(MIG_CLAIM).unwrap();
    assert_eq!(names(&root), before);
}

#[test]
fn bad_ids_are_refused_before_anything_happens() {
    let (temporary, specs) = dir();
    for id in ["", "..", "a/b", "a_b", "a.b", "a\0b", "ü"] {
        assert!(matches!(specs.write(id, &samples::gpu()), Err(Error::Id(_))), "{id:?}");
        assert!(matches!(specs.read(id), Err(Error::Id(_))), "{id:?}");
        assert!(matches!(specs.remove(id), Err(Error::Id(_))), "{id:?}");
    }
    assert!(names(temporary.path()).is_empty());
}

#[test]
fn invalid_and_strange_specs_are_not_written() {
    let (temporary, specs) = dir();
    let error = specs.write("u", &Spec::new(samples::kind())).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }));
    assert!(error.to_string().contains("devices: there is no device"), "{error}");

    let other = Spec { kind: Kind::new("v", "c").unwrap(), ..samples::gpu() };
    assert!(matches!(specs.write("u", &other), Err(Error::Kind { .. })));
    assert!(names(temporary.path()).is_empty());
}

#[test]
fn errors_name_the_place() {
    let temporary = tempfile::tempdir().unwrap();
    let file = temporary.path().join("file");
    fs::write(&file, "").unwrap();
    let specs = SpecDir::new(&file, samples::kind());
    let error = specs.write("u", &samples::gpu()).unwrap_err();
    assert!(matches!(&error, Error::Create { path, .. } if *path == file), "{error}");
    assert!(matches!(specs.list(), Err(Error::List { path, .. }) if path == file));
    assert!(matches!(specs.read("u"), Err(Error::Read { .. })));

    // A directory where the file should be: neither replaced nor removed.
    let specs = SpecDir::new(temporary.path(), samples::kind());
    let path = specs.path("u").unwrap();
    fs::create_dir(&path).unwrap();
    assert!(matches!(specs.write("u", &samples::gpu()), Err(Error::Write { path: p, .. }) if p == path));
    assert!(matches!(specs.remove("u"), Err(Error::Remove { path: p, .. }) if p == path));
    assert_eq!(names(temporary.path()).len(), 2, "a temporary file was left");
}
