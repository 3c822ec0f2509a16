//! Which of the driver's files containers get to see, and where.
//!
//! The lists are those of NVIDIA's container toolkit (github.com/NVIDIA/nvidia-container-toolkit, `pkg/nvcdi` and
//! `internal/discover`); `docs/cdi.md` compares item by item. What is not there is left out, and looked for again the next
//! time.
//!
//! Libraries are mounted in one directory under each name that programs load them by, links included: on Debian and Ubuntu,
//! the bases of NVIDIA's images, the linker searches it by itself, so that nothing has to run in the container. For images of
//! others the hook adds the directory to the linker's cache. Everything else is where the host has it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use kerf_nvml::{DriverRoot, Lookup};

/// Multiarch directory that glibc's linker searches on Debian and Ubuntu.
const LIBRARY_DIR: &str =
    if cfg!(target_arch = "aarch64") { "/usr/lib/aarch64-linux-gnu" } else { "/usr/lib/x86_64-linux-gnu" };

/// Directories below those of libraries that have some, too, and that the linker's cache shall know.
const LIBRARY_SUBDIRS: [&str; 2] = ["", "vdpau"];

/// How the driver's libraries begin whose versions are their own: NVVM of old drivers, and EGL's external platforms.
const OTHER_LIBRARIES: [&str; 6] = [
    "libnvidia-nvvm70.so.",
    "libnvidia-egl-gbm.so.",
    "libnvidia-egl-wayland.so.",
    "libnvidia-egl-wayland2.so.",
    "libnvidia-egl-xcb.so.",
    "libnvidia-egl-xlib.so.",
];

/// NVML's SONAME.
const NVML: &str = "libnvidia-ml.so.1";

/// A name that Mesa's packages have for a link of their own: a mount would go through it, and hide their library.
const INDIRECT_GLX: &str = "libGLX_indirect.so.0";

/// Links beside libraries that programs may look for: library, link, target; `*` is the driver's version.
const LIBRARY_LINKS: [(&str, &str, &str); 5] = [
    ("libcuda.so.*", "libcuda.so", "libcuda.so.1"),
    ("libGLX_nvidia.so.*", INDIRECT_GLX, "libGLX_nvidia.so.*"),
    ("libnvidia-allocator.so.*", "gbm/nvidia-drm_gbm.so", "../libnvidia-allocator.so.1"),
    ("libnvidia-opticalflow.so.*", "libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1"),
    ("libnvidia-vulkan-producer.so.*", "libnvidia-vulkan-producer.so", "libnvidia-vulkan-producer.so.*"),
];

/// Programs of the driver that work in a container.
const PROGRAMS: [&str; 8] = [
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
    "nvidia-xconfig",
];

const PROGRAM_DIR: &str = "/usr/bin";

/// Settings by which EGL, OpenCL, OptiX and X find the driver, below one of [`SETTING_DIRS`].
const SETTINGS: [&str; 10] = [
    "OpenCL/vendors/nvidia.icd",
    "X11/xorg.conf.d/10-nvidia.conf",
    "X11/xorg.conf.d/nvidia-drm-outputclass.conf",
    "egl/egl_external_platform.d/09_nvidia_wayland2.json",
    "egl/egl_external_platform.d/10_nvidia_wayland.json",
    "egl/egl_external_platform.d/15_nvidia_gbm.json",
    "egl/egl_external_platform.d/20_nvidia_xcb.json",
    "egl/egl_external_platform.d/20_nvidia_xlib.json",
    "glvnd/egl_vendor.d/10_nvidia.json",
    "nvidia/nvoptix.bin",
];

const SETTING_DIRS: [&str; 3] = ["etc", "usr/local/share", "usr/share"];

/// The same for Vulkan, whose loader looks in `/etc/vulkan` wherever the host has them.
const VULKAN: [&str; 4] = [
    "icd.d/nvidia_icd.json",
    if cfg!(target_arch = "aarch64") { "icd.d/nvidia_icd.aarch64.json" } else { "icd.d/nvidia_icd.x86_64.json" },
    "icd.d/nvidia_layers.json",
    "implicit_layer.d/nvidia_layers.json",
];

const VULKAN_DIRS: [&str; 3] = ["etc/vulkan", "usr/share/vulkan", "vulkan"];

/// The X server's driver and its GLX, below one of [`XORG_DIRS`].
const XORG: [&str; 2] = ["nvidia_drv.so", "libglxserver_nvidia.so.*"];

/// The link by which the X server loads its GLX.
const XORG_LINK: &str = "libglxserver_nvidia.so";

/// Below each directory of libraries, `/usr/lib` among them.
const XORG_DIRS: [&str; 5] = [
    "nvidia/xorg",
    "xorg/modules/drivers",
    "xorg/modules/extensions",
    "xorg/modules/updates/drivers",
    "xorg/modules/updates/extensions",
];

/// Where the kernel looks for firmware (Linux Documentation/driver-api/firmware/fw_search_path.rst), but for directories of
/// one kernel's.
const FIRMWARE_DIRS: [&str; 2] = ["lib/firmware/updates", "lib/firmware"];

/// Sockets of the driver's daemons.
const SOCKETS: [&str; 2] = ["run/nvidia-persistenced/socket", "run/nvidia-fabricmanager/socket"];

/// A file that containers get to see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shown {
    /// Its path on the host.
    pub(super) host_path: PathBuf,
    /// Its paths in the container, at least one.
    pub(super) container_paths: BTreeSet<String>,
}

/// A symbolic link in the container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Link {
    /// What it says.
    pub(super) target: String,
    /// Where it is.
    pub(super) path: String,
}

impl fmt::Display for Link {
    /// As the hook takes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}::{}", self.target, self.path)
    }
}

/// All that containers get to see of a driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ShownFiles {
    pub(super) files: Vec<Shown>,
    pub(super) sockets: Vec<Shown>,
    /// Where the linker has to look for libraries.
    pub(super) library_folders: Vec<String>,
    pub(super) links: Vec<Link>,
}

impl ShownFiles {
    /// What there is of the driver of this version.
    pub(super) fn of(root: &DriverRoot, driver_version: &str) -> ShownFiles {
        let mut shown = ShownFiles::default();
        let lookup = &root.lookup();
        let library_dirs = lookup.library_dirs();
        shown.add_libraries(lookup, &library_dirs, driver_version);
        shown.add_xorg(lookup, &library_dirs, driver_version);
        for name in PROGRAMS {
            if let Ok(path) = lookup.program(name) {
                shown.files.push(one(root, &path, format!("{PROGRAM_DIR}/{name}")));
            }
        }
        for name in SETTINGS {
            let found = SETTING_DIRS.iter().find_map(|dir| shown_at(lookup, &format!("{dir}/{name}")));
            shown.files.extend(found);
        }
        for name in VULKAN {
            let found = VULKAN_DIRS.iter().find_map(|dir| lookup.resolve(format!("{dir}/{name}")));
            shown.files.extend(found.map(|path| one(root, &path, format!("/etc/vulkan/{name}"))));
        }
        shown.files.extend(firmware(lookup, driver_version));
        shown.sockets = SOCKETS.iter().filter_map(|path| shown_at(lookup, path)).collect();
        shown
    }

    fn add_libraries(&mut self, lookup: &Lookup<'_>, dirs: &[PathBuf], driver_version: &str) {
        let libraries = libraries(lookup, dirs, driver_version);
        let names: BTreeSet<&String> = libraries.iter().flat_map(|(_, names)| names).collect();
        for (library, link, target) in LIBRARY_LINKS {
            let with_version = |name: &str| name.replace('*', driver_version);
            if names.contains(&with_version(library)) && !names.contains(&link.to_owned()) {
                self.links.push(Link { target: with_version(target), path: format!("{LIBRARY_DIR}/{link}") });
            }
        }
        for subdir in LIBRARY_SUBDIRS {
            if names.iter().any(|name| name.rsplit_once('/').map_or("", |(dir, _)| dir) == subdir) {
                self.library_folders.push(format!("{LIBRARY_DIR}/{subdir}").trim_end_matches('/').to_owned());
            }
        }
        self.files.extend(libraries.into_iter().map(|(host_path, names)| Shown {
            host_path,
            container_paths: names.into_iter().map(|name| format!("{LIBRARY_DIR}/{name}")).collect(),
        }));
    }

    fn add_xorg(&mut self, lookup: &Lookup<'_>, dirs: &[PathBuf], driver_version: &str) {
        let root = lookup.root();
        let places = dirs.iter().flat_map(|dir| XORG_DIRS.map(|subdir| dir.join(subdir)));
        let places: Vec<PathBuf> = places.collect();
        for name in XORG.map(|name| name.replace('*', driver_version)) {
            let below = |place: &PathBuf| Some(place.strip_prefix(root.path()).ok()?.join(&name));
            let found = places.iter().filter_map(below).find_map(|path| shown_at(lookup, path.to_str()?));
            let Some(file) = found else { continue };
            if name.starts_with(XORG_LINK) {
                let beside = file.container_paths.first().and_then(|path| path.strip_suffix(&name));
                let link = beside.map(|dir| Link { target: name.clone(), path: format!("{dir}{XORG_LINK}") });
                self.links.extend(link);
            }
            self.files.push(file);
        }
    }
}

/// A file or socket at a path below the root, in the same place in the container.
fn shown_at(lookup: &Lookup<'_>, path: &str) -> Option<Shown> {
    Some(one(lookup.root(), &lookup.resolve(path)?, format!("/{path}")))
}

fn one(root: &DriverRoot, path: &Path, container_path: String) -> Shown {
    Shown { host_path: root.host_path(path), container_paths: BTreeSet::from([container_path]) }
}

/// The firmware of the GPU's system processor.
fn firmware(lookup: &Lookup<'_>, driver_version: &str) -> Vec<Shown> {
    let of = |dir: &str| {
        let dir = format!("{dir}/nvidia/{driver_version}");
        let names = names_in(&lookup.resolve(&dir)?);
        let files = names.iter().filter(|name| name.starts_with("gsp") && name.ends_with(".bin"));
        let shown: Vec<_> = files.filter_map(|name| shown_at(lookup, &format!("{dir}/{name}"))).collect();
        (!shown.is_empty()).then_some(shown)
    };
    FIRMWARE_DIRS.iter().find_map(|dir| of(dir)).unwrap_or_default()
}

fn names_in(dir: &Path) -> BTreeSet<String> {
    fs::read_dir(dir).into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// The libraries that belong to this driver version, by their paths on the host, with the names by which programs load them,
/// relative to [`LIBRARY_DIR`]. Of two of one name the first counts that NVML's clients would find.
fn libraries(lookup: &Lookup<'_>, dirs: &[PathBuf], driver_version: &str) -> Vec<(PathBuf, BTreeSet<String>)> {
    let mut shown: Vec<(PathBuf, BTreeSet<String>)> = Vec::new();
    let mut taken = BTreeSet::new();
    let nvml = lookup.library(NVML).ok();
    for (subdir, dir) in LIBRARY_SUBDIRS.iter().flat_map(|sub| dirs.iter().map(move |dir| (sub, dir))) {
        let dir = dir.join(subdir);
        let mut found = libraries_in(&dir, driver_version);
        if let Some(nvml) = nvml.as_deref().filter(|nvml| nvml.parent() == Some(&dir)).and_then(Path::file_name) {
            let nvml = nvml.to_string_lossy().into_owned();
            found.entry(nvml.clone()).or_default().extend([nvml, NVML.to_owned()]);
        }
        for (file, names) in found {
            let in_container = |name: &String| Path::new(subdir).join(name).to_string_lossy().into_owned();
            let names: BTreeSet<_> = names.iter().map(in_container).filter(|name| !taken.contains(name)).collect();
            taken.extend(names.iter().cloned());
            if !names.is_empty() {
                shown.push((lookup.root().host_path(&dir.join(file)), names));
            }
        }
    }
    shown
}

/// The driver's libraries in a directory, each with its own name and that of every link to it there, among them its SONAME.
/// The host's other libraries are there, too, by the thousand.
fn libraries_in(dir: &Path, driver_version: &str) -> BTreeMap<String, BTreeSet<String>> {
    let (mut found, mut links) = (BTreeMap::new(), BTreeSet::new());
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        match entry.file_type() {
            Ok(kind) if kind.is_symlink() => _ = links.insert(name),
            Ok(kind) if kind.is_file() && is_drivers(&name, driver_version) => {
                found.insert(name.clone(), BTreeSet::from([name]));
            }
            _ => {}
        }
    }
    let stems: BTreeSet<&str> = found.keys().map(|file| stem(file)).collect();
    links.retain(|link| link != INDIRECT_GLX && stems.contains(stem(link)));
    let target = |link: &String| fs::read_link(dir.join(link)).ok()?.to_str().map(str::to_owned);
    let targets: BTreeMap<&String, String> = links.iter().filter_map(|link| Some((link, target(link)?))).collect();
    for link in targets.keys().copied() {
        let mut target = link;
        // Two steps lead from `libcuda.so` to the file; more are none of the driver's.
        for _ in 0..4 {
            let Some(next) = targets.get(target) else { break };
            target = next;
        }
        if let Some(names) = found.get_mut(target) {
            names.insert(link.clone());
        }
    }
    found
}

/// What the names of a library have in common: `libcuda` of `libcuda.so.1`.
fn stem(name: &str) -> &str {
    name.split_once(".so").map_or(name, |(stem, _)| stem)
}

/// Whether a file is a library of this driver version.
fn is_drivers(file: &str, driver_version: &str) -> bool {
    file.strip_suffix(driver_version).is_some_and(|rest| rest.ends_with(".so."))
        || OTHER_LIBRARIES.iter().any(|begin| file.starts_with(begin))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const VERSION: &str = "535.261.03";

    fn write(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }

    /// A driver root at `/run/nvidia/driver` of a host, with these files, and these links to where they say.
    struct Host {
        _directory: tempfile::TempDir,
        root: DriverRoot,
    }

    impl Host {
        fn with(files: &[&str], links: &[(&str, &str)]) -> Host {
            let dir = tempfile::tempdir().unwrap();
            let root = dir.path().join("run/nvidia/driver");
            fs::create_dir_all(&root).unwrap();
            files.iter().for_each(|file| write(&root.join(file)));
            for (link, target) in links {
                let link = root.join(link);
                fs::create_dir_all(link.parent().unwrap()).unwrap();
                symlink(target, link).unwrap();
            }
            let driver_root = DriverRoot::below(dir.path(), Path::new("/run/nvidia/driver"));
            Host { _directory: dir, root: driver_root }
        }

        fn shown(&self) -> ShownFiles {
            ShownFiles::of(&self.root, VERSION)
        }
    }

    /// What is shown, as (host path below the driver root, container path).
    fn mounts(shown: &[Shown]) -> BTreeSet<(String, String)> {
        let pairs = shown.iter().flat_map(|shown| {
            let host = shown.host_path.strip_prefix("/run/nvidia/driver").unwrap().to_str().unwrap().to_owned();
            shown.container_paths.iter().map(move |path| (host.clone(), path.clone()))
        });
        pairs.collect()
    }

    #[test]
    fn libraries_of_this_driver_go_by_every_name() {
        let files = [
            "libcuda.so.535.261.03",
            "libnvidia-ptxjitcompiler.so.535.261.03",
            "libnvidia-nvvm70.so.4",
            "libnvidia-egl-gbm.so.1.1.0",
            "libGLX_nvidia.so.535.261.03",
            "libcuda.so.470.1",
            "libc.so.6",
        ];
        let links = [
            ("libcuda.so", "libcuda.so.1"),
            ("libcuda.so.1", "libcuda.so.535.261.03"),
            ("libGLX_indirect.so.0", "libGLX_nvidia.so.535.261.03"),
            ("libm.so", "libm.so.6"),
            ("libloop.so", "libloop.so.1"),
            ("libloop.so.1", "libloop.so"),
            ("libdangling.so.1", "libdangling.so.535.261.03"),
        ];
        let host = Host::with(&files, &links);
        let shown = libraries_in(host.root.path(), VERSION);
        let names = |file: &str| shown[file].iter().map(String::as_str).collect::<Vec<_>>();
        assert_eq!(shown.len(), 5, "other versions and libraries of others stay out");
        assert_eq!(names("libcuda.so.535.261.03"), ["libcuda.so", "libcuda.so.1", "libcuda.so.535.261.03"]);
        for file in [files[1], files[2], files[3]] {
            assert_eq!(names(file), [file]);
        }
        assert_eq!(names(files[4]), [files[4]], "Mesa's name is left to a link");
    }

    /// Files are found below the plugin's driver root and named as the host names them; libraries in all of its directories.
    #[test]
    fn every_file_has_its_place() {
        let host = Host::with(
            &[
                "usr/lib64/libnvidia-ml.so.535.261.03",
                "usr/lib64/libGLX_nvidia.so.535.261.03",
                "usr/lib64/vdpau/libvdpau_nvidia.so.535.261.03",
                "usr/lib64/nvidia/xorg/libglxserver_nvidia.so.535.261.03",
                "usr/lib/libnvidia-allocator.so.535.261.03",
                "usr/lib/libnvidia-ml.so.535.261.03", // for 32-bit programs
                "usr/lib/xorg/modules/drivers/nvidia_drv.so",
                "usr/bin/nvidia-smi",
                "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
                "usr/share/vulkan/icd.d/nvidia_icd.json",
                "etc/OpenCL/vendors/nvidia.icd",
                "usr/lib/firmware/nvidia/535.261.03/gsp_ga10x.bin",
                "usr/lib/firmware/nvidia/470.1/gsp.bin",
                "run/nvidia-persistenced/socket",
            ],
            &[("usr/lib64/libnvidia-ml.so.1", "libnvidia-ml.so.535.261.03"), ("lib", "usr/lib")],
        );
        let shown = host.shown();
        let in_library_dir = |name: &str| format!("{LIBRARY_DIR}/{name}");
        let expected: BTreeSet<_> = [
            ("usr/lib64/libnvidia-ml.so.535.261.03", in_library_dir("libnvidia-ml.so.535.261.03")),
            ("usr/lib64/libnvidia-ml.so.535.261.03", in_library_dir("libnvidia-ml.so.1")),
            ("usr/lib64/libGLX_nvidia.so.535.261.03", in_library_dir("libGLX_nvidia.so.535.261.03")),
            ("usr/lib64/vdpau/libvdpau_nvidia.so.535.261.03", in_library_dir("vdpau/libvdpau_nvidia.so.535.261.03")),
            ("usr/lib/libnvidia-allocator.so.535.261.03", in_library_dir("libnvidia-allocator.so.535.261.03")),
            (
                "usr/lib64/nvidia/xorg/libglxserver_nvidia.so.535.261.03",
                "/usr/lib64/nvidia/xorg/libglxserver_nvidia.so.535.261.03".to_owned(),
            ),
            ("usr/lib/xorg/modules/drivers/nvidia_drv.so", "/usr/lib/xorg/modules/drivers/nvidia_drv.so".to_owned()),
            ("usr/bin/nvidia-smi", "/usr/bin/nvidia-smi".to_owned()),
            ("usr/share/glvnd/egl_vendor.d/10_nvidia.json", "/usr/share/glvnd/egl_vendor.d/10_nvidia.json".to_owned()),
            ("usr/share/vulkan/icd.d/nvidia_icd.json", "/etc/vulkan/icd.d/nvidia_icd.json".to_owned()),
            ("etc/OpenCL/vendors/nvidia.icd", "/etc/OpenCL/vendors/nvidia.icd".to_owned()),
            (
                "usr/lib/firmware/nvidia/535.261.03/gsp_ga10x.bin",
                "/lib/firmware/nvidia/535.261.03/gsp_ga10x.bin".to_owned(),
            ),
        ]
        .map(|(host, container)| (host.to_owned(), container))
        .into();
        assert_eq!(mounts(&shown.files), expected);
        let socket = "run/nvidia-persistenced/socket".to_owned();
        assert_eq!(mounts(&shown.sockets), BTreeSet::from([(socket.clone(), format!("/{socket}"))]));
        assert_eq!(shown.library_folders, [LIBRARY_DIR.to_owned(), in_library_dir("vdpau")]);
        let links: BTreeSet<_> = shown.links.iter().map(|link| (link.path.clone(), link.target.as_str())).collect();
        let expected = BTreeSet::from([
            (in_library_dir("libGLX_indirect.so.0"), "libGLX_nvidia.so.535.261.03"),
            (in_library_dir("gbm/nvidia-drm_gbm.so"), "../libnvidia-allocator.so.1"),
            ("/usr/lib64/nvidia/xorg/libglxserver_nvidia.so".to_owned(), "libglxserver_nvidia.so.535.261.03"),
        ]);
        assert_eq!(links, expected);
    }

    /// A library that is installed under its SONAME alone is shown under it.
    #[test]
    fn nvml_needs_no_versioned_name() {
        let host = Host::with(&["usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"], &[]);
        let nvml = "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1".to_owned();
        assert_eq!(mounts(&host.shown().files), BTreeSet::from([(nvml, format!("{LIBRARY_DIR}/libnvidia-ml.so.1"))]));
    }

    #[test]
    fn a_root_without_a_driver_shows_nothing() {
        assert_eq!(Host::with(&[], &[]).shown(), ShownFiles::default());
    }
}
