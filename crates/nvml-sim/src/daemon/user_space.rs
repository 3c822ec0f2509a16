//! The rest of a driver's files, so that who gives a driver to containers has something to find.
//!
//! Only their names and places are a driver's (NVIDIA driver 535 README, "Installed components"). The libraries are empty: a
//! program finds `libcuda.so.1` and can load it, and finds no function in it. Nobody here reads the firmware and the settings.

use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::shared_object::shared_object;

/// Libraries of the driver's version, and the number in their SONAME; without one it is the version, and no link leads to it.
const LIBRARIES: [(&str, Option<u32>); 14] = [
    ("libEGL_nvidia.so", Some(0)),
    ("libGLX_nvidia.so", Some(0)),
    ("libcuda.so", Some(1)),
    ("libnvcuvid.so", Some(1)),
    ("libnvidia-allocator.so", Some(1)),
    ("libnvidia-cfg.so", Some(1)),
    ("libnvidia-encode.so", Some(1)),
    ("libnvidia-glcore.so", None),
    ("libnvidia-nvvm.so", Some(4)),
    ("libnvidia-opencl.so", Some(1)),
    ("libnvidia-opticalflow.so", Some(1)),
    ("libnvidia-ptxjitcompiler.so", Some(1)),
    ("libnvidia-vulkan-producer.so", None),
    ("vdpau/libvdpau_nvidia.so", Some(1)),
];

/// Libraries with versions of their own.
const OTHER_LIBRARIES: [(&str, &str); 2] = [
    ("libnvidia-egl-gbm.so.1.1.0", "libnvidia-egl-gbm.so.1"),
    ("libnvidia-egl-wayland.so.1.1.11", "libnvidia-egl-wayland.so.1"),
];

/// The X server's part, below the directory of libraries.
const XORG: [&str; 2] = ["nvidia/xorg/nvidia_drv.so", "nvidia/xorg/libglxserver_nvidia.so.*"];

/// The link to it that the installer makes.
const XORG_LINK: &str = "nvidia/xorg/libglxserver_nvidia.so";

/// Settings of EGL, OpenCL, OptiX, Vulkan and X, and firmware; `*` is the driver's version.
const FILES: [&str; 10] = [
    "etc/OpenCL/vendors/nvidia.icd",
    "etc/vulkan/icd.d/nvidia_icd.json",
    "etc/vulkan/implicit_layer.d/nvidia_layers.json",
    "lib/firmware/nvidia/*/gsp_ga10x.bin",
    "lib/firmware/nvidia/*/gsp_tu10x.bin",
    "usr/share/X11/xorg.conf.d/nvidia-drm-outputclass.conf",
    "usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json",
    "usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
    "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    "usr/share/nvidia/nvoptix.bin",
];

/// Writes all of it. `put` makes a file as a whole.
pub(super) fn lay_out<E>(
    root: &Path,
    libraries: &Path,
    version: &str,
    put: impl Fn(&Path, &[u8]) -> Result<(), E>,
    link: impl Fn(&Path, &dyn Fn(&Path) -> io::Result<()>) -> Result<(), E>,
) -> Result<(), E> {
    let name_of = |path: &str| path.rsplit('/').next().unwrap_or(path).to_owned();
    let symlink_to = |at: &Path, target: &str| link(at, &|new: &Path| symlink(target, new));
    for (library, number) in LIBRARIES {
        let file = format!("{library}.{version}");
        let soname = number.map_or_else(|| file.clone(), |number| format!("{library}.{number}"));
        put(&libraries.join(&file), &shared_object(&name_of(&soname)))?;
        if soname != file {
            symlink_to(&libraries.join(&soname), &name_of(&file))?;
        }
    }
    symlink_to(&libraries.join("libcuda.so"), "libcuda.so.1")?;
    for (file, soname) in OTHER_LIBRARIES {
        put(&libraries.join(file), &shared_object(soname))?;
        symlink_to(&libraries.join(soname), file)?;
    }
    for file in XORG.map(|file| file.replace('*', version)) {
        put(&libraries.join(&file), &shared_object(&name_of(&file)))?;
    }
    symlink_to(&libraries.join(XORG_LINK), &format!("libglxserver_nvidia.so.{version}"))?;
    for file in FILES.map(|file| file.replace('*', version)) {
        put(&root.join(file), b"simulated\n")?;
    }
    Ok(())
}
