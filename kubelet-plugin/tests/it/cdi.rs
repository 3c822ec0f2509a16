//! What a whole GPU and MIG slices bring into a container, item by item against NVIDIA's container toolkit.
//!
//! [`TOOLKIT`] is what the toolkit injects in its NVML mode: github.com/NVIDIA/nvidia-container-toolkit, `pkg/nvcdi`
//! (`common-nvml.go`, `driver-nvml.go`, `full-gpu-nvml.go`, `mig-device-nvml.go`) and `internal/discover` (`graphics.go`, `ipc.go`,
//! `hooks.go`). `docs/cdi.md` has the reason of each difference, and a test holds it to this list.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use kerf_kubelet_plugin::engine::{Engine, Injection, Settings};
use kerf_kubelet_plugin::hook::{self, Hook};
use serde_json::Value;

use crate::engine_node::{GPU, MIG_1G, Node, claim, late, prepare, unprepare};

/// A node with a GPU of compute alone, and one with slices that can draw.
const NODE: &str = "[{product: h100-80gb}, {product: rtx-pro-6000}]";

/// Where an item is looked for in a CDI document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum In {
    /// Paths of the device's own nodes.
    Nodes,
    /// Paths of the nodes that every device brings.
    Control,
    /// Container paths of mounts.
    Mounts,
    Env,
    /// Arguments of hooks.
    Hooks,
    /// Additional groups.
    Groups,
}

/// Who gets an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    Everyone,
    /// Whole GPUs, and slices with graphics.
    Graphics,
    Slices,
    /// Nobody: a difference, which `docs/cdi.md` explains with these words.
    Nobody(&'static str),
}

use In::{Control, Env, Groups, Hooks, Mounts, Nodes};
use Who::{Everyone, Graphics, Nobody, Slices};

/// What the toolkit injects: where, what it is or how it begins in the container, for hooks what it contains (`LIB` is the
/// directory of libraries, `VERSION` the driver's), and who gets it here.
const TOOLKIT: &[(In, &str, Who)] = &[
    (Nodes, "/dev/nvidia", Everyone),
    (Nodes, "/dev/nvidia-caps/nvidia-cap", Slices),
    (Nodes, "/dev/dri/card", Graphics),
    (Nodes, "/dev/dri/renderD", Graphics),
    (Hooks, "::/dev/dri/by-path/pci-0000:", Graphics),
    (Control, "/dev/nvidiactl", Everyone),
    (Control, "/dev/nvidia-uvm", Everyone),
    (Control, "/dev/nvidia-uvm-tools", Everyone),
    (Control, "/dev/nvidia-modeset", Everyone),
    (Mounts, "LIB/libcuda.so.1", Everyone),
    (Mounts, "LIB/libcuda.so.VERSION", Everyone),
    (Mounts, "LIB/libnvidia-ml.so.1", Everyone),
    (Mounts, "LIB/libnvidia-ml.so.VERSION", Everyone),
    (Mounts, "LIB/libnvidia-ptxjitcompiler.so.VERSION", Everyone),
    (Mounts, "LIB/libnvidia-nvvm.so.VERSION", Everyone),
    (Mounts, "LIB/libnvidia-nvvm70.so.4", Everyone),
    (Mounts, "LIB/libnvidia-allocator.so.VERSION", Everyone),
    (Mounts, "LIB/libnvidia-encode.so.VERSION", Everyone),
    (Mounts, "LIB/libnvcuvid.so.VERSION", Everyone),
    (Mounts, "LIB/libnvidia-opencl.so.VERSION", Everyone),
    (Mounts, "LIB/libEGL_nvidia.so.VERSION", Everyone),
    (Mounts, "LIB/libGLX_nvidia.so.VERSION", Everyone),
    (Mounts, "LIB/libnvidia-glcore.so.VERSION", Everyone),
    (Mounts, "LIB/vdpau/libvdpau_nvidia.so.VERSION", Everyone),
    (Mounts, "LIB/libnvidia-egl-gbm.so.1", Everyone),
    (Mounts, "LIB/libnvidia-egl-wayland.so.1", Everyone),
    (Mounts, "LIB/libnvidia-egl-wayland2.so.1", Everyone),
    (Mounts, "LIB/libnvidia-egl-xcb.so.1", Everyone),
    (Mounts, "LIB/libnvidia-egl-xlib.so.1", Everyone),
    (Mounts, "LIB/nvidia/xorg/nvidia_drv.so", Everyone),
    (Mounts, "LIB/nvidia/xorg/libglxserver_nvidia.so.VERSION", Everyone),
    (Mounts, "/usr/share/glvnd/egl_vendor.d/10_nvidia.json", Everyone),
    (Mounts, "/usr/share/egl/egl_external_platform.d/09_nvidia_wayland2.json", Everyone),
    (Mounts, "/usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json", Everyone),
    (Mounts, "/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json", Everyone),
    (Mounts, "/usr/share/egl/egl_external_platform.d/20_nvidia_xcb.json", Everyone),
    (Mounts, "/usr/share/egl/egl_external_platform.d/20_nvidia_xlib.json", Everyone),
    (Mounts, "/usr/share/nvidia/nvoptix.bin", Everyone),
    (Mounts, "/usr/share/X11/xorg.conf.d/10-nvidia.conf", Everyone),
    (Mounts, "/usr/share/X11/xorg.conf.d/nvidia-drm-outputclass.conf", Everyone),
    (Mounts, "/etc/OpenCL/vendors/nvidia.icd", Everyone),
    (Mounts, "/etc/vulkan/icd.d/nvidia_icd.json", Everyone),
    (Mounts, "/etc/vulkan/icd.d/nvidia_layers.json", Everyone),
    (Mounts, "/etc/vulkan/implicit_layer.d/nvidia_layers.json", Everyone),
    (Mounts, "/usr/bin/nvidia-smi", Everyone),
    (Mounts, "/usr/bin/nvidia-debugdump", Everyone),
    (Mounts, "/usr/bin/nvidia-persistenced", Everyone),
    (Mounts, "/usr/bin/nvidia-cuda-mps-control", Everyone),
    (Mounts, "/usr/bin/nvidia-cuda-mps-server", Everyone),
    (Mounts, "/usr/bin/nvidia-imex", Everyone),
    (Mounts, "/usr/bin/nvidia-imex-ctl", Everyone),
    (Mounts, "/usr/bin/nvidia-xconfig", Everyone),
    (Mounts, "/run/nvidia-persistenced/socket", Everyone),
    (Mounts, "/run/nvidia-fabricmanager/socket", Everyone),
    (Mounts, "/tmp/nvidia-mps", Nobody("`/tmp/nvidia-mps`")),
    (Mounts, "/lib/firmware/nvidia/VERSION/gsp_ga10x.bin", Everyone),
    (Mounts, "/lib/firmware/nvidia/VERSION/gsp_tu10x.bin", Everyone),
    (Mounts, "/var/run/nvidia-container-devices/void", Nobody("`/var/run/nvidia-container-devices/void`")),
    (Env, "NVIDIA_VISIBLE_DEVICES=void", Everyone),
    (Env, "NVIDIA_CTK_LIBCUDA_DIR=", Nobody("`NVIDIA_CTK_LIBCUDA_DIR`")),
    (Groups, "44", Graphics),
    (Hooks, "update-ldcache", Everyone),
    (Hooks, "create-symlinks", Everyone),
    (Hooks, "libGLX_nvidia.so.VERSION::LIB/libGLX_indirect.so.0", Everyone),
    (Hooks, "libnvidia-opticalflow.so.1::LIB/libnvidia-opticalflow.so", Everyone),
    (Hooks, "../libnvidia-allocator.so.1::LIB/gbm/nvidia-drm_gbm.so", Everyone),
    (Hooks, "enable-cuda-compat", Nobody("hook `enable-cuda-compat`")),
    (Hooks, "disable-device-node-modification", Nobody("hook `disable-device-node-modification`")),
    (Hooks, "update-application-profile", Nobody("hook `update-application-profile`")),
    (Hooks, "apply-cuda-memory-limits", Nobody("hook `apply-cuda-memory-limits`")),
    (Hooks, "chmod", Nobody("hook `chmod`")),
    (Nodes, "/dev/nvidia-caps-imex-channels/channel", Nobody("IMEX channels")),
    (Nodes, "/dev/nvidia-fs", Nobody("GPUDirect Storage")),
    (Nodes, "/dev/gdrdrv", Nobody("GDRCopy")),
];

/// What the simulated driver does not come with, below its root; `LIB` as above. It listens on the socket of nvidia-persistenced.
const MORE_FILES: [&str; 18] = [
    "LIB/libnvidia-nvvm70.so.4",
    "LIB/libnvidia-egl-wayland2.so.1",
    "LIB/libnvidia-egl-xcb.so.1",
    "LIB/libnvidia-egl-xlib.so.1",
    "usr/share/egl/egl_external_platform.d/09_nvidia_wayland2.json",
    "usr/share/egl/egl_external_platform.d/20_nvidia_xcb.json",
    "usr/share/egl/egl_external_platform.d/20_nvidia_xlib.json",
    "usr/share/X11/xorg.conf.d/10-nvidia.conf",
    "etc/vulkan/icd.d/nvidia_layers.json",
    "usr/bin/nvidia-debugdump",
    "usr/bin/nvidia-persistenced",
    "usr/bin/nvidia-cuda-mps-control",
    "usr/bin/nvidia-cuda-mps-server",
    "usr/bin/nvidia-imex",
    "usr/bin/nvidia-imex-ctl",
    "usr/bin/nvidia-xconfig",
    "run/nvidia-fabricmanager/socket",
    "tmp/nvidia-mps/control",
];

fn lib() -> String {
    format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH)
}

/// The texts of one kind in a document's edits: those of the device and those of all.
fn texts(spec: &Value, place: In) -> Vec<String> {
    let edits = [&spec["devices"][0]["containerEdits"], &spec["containerEdits"]];
    let list = |edits: &Value, key: &str| edits[key].as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let of_both = |key: &str, field: &str| -> Vec<String> {
        let all = edits.iter().flat_map(|edits| list(edits, key));
        all.map(|item| if field.is_empty() { text(&item) } else { text(&item[field]) }).collect()
    };
    match place {
        Nodes => list(edits[0], "deviceNodes").iter().map(|node| text(&node["path"])).collect(),
        Control => list(edits[1], "deviceNodes").iter().map(|node| text(&node["path"])).collect(),
        Mounts => of_both("mounts", "containerPath"),
        Env => of_both("env", ""),
        Groups => of_both("additionalGids", ""),
        Hooks => edits
            .iter()
            .flat_map(|edits| list(edits, "hooks"))
            .flat_map(|hook| list(&hook, "args"))
            .map(|arg| text(&arg))
            .collect(),
    }
}

/// Whether a text is what an item of the list is about. Nodes of GPUs and capabilities are numbered.
fn fits(place: In, item: &str, text: &str) -> bool {
    let item = item.replace("LIB", &format!("/{}", lib())).replace("VERSION", "535.261.03");
    let is_number = |rest: &str| rest.bytes().all(|byte| byte.is_ascii_digit());
    match place {
        Nodes => text.strip_prefix(&item).is_some_and(is_number),
        Env => text.starts_with(&item),
        Hooks => text.contains(&item),
        Control | Mounts | Groups => text == item,
    }
}

fn has(spec: &Value, place: In, item: &str) -> bool {
    texts(spec, place).iter().any(|text| fits(place, item, text))
}

fn engine_with_hook(node: &Node) -> Engine {
    let hook = Hook { path: "/plugins/bin/kerf-cdi-hook".into(), updates_ldcache: true };
    let injection = Injection { hook: Some(hook), metadata: true, additional_gids: true };
    Engine::open(node.nvml.clone(), Settings { injection, ..node.settings() }).unwrap()
}

#[test]
fn a_container_gets_what_the_toolkit_gives_it() {
    let node = Node::start(NODE);
    for file in MORE_FILES.map(|file| file.replace("LIB", &lib())) {
        let path = node.root().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }
    let engine = engine_with_hook(&node);
    let draws = "gpu-47-00-0-mig-1g24gb-gfx-0";
    let mut unexplained: BTreeSet<String> = BTreeSet::new();
    for (device, is_slice, has_graphics) in
        [(GPU, false, true), ("gpu-47-00-0", false, true), (MIG_1G, true, false), (draws, true, true)]
    {
        let claim = claim("a", &[device]);
        prepare(&engine, &claim).unwrap();
        let spec = node.cdi(&claim);
        for (place, item, who) in TOOLKIT {
            let expected = match who {
                Everyone => true,
                Graphics => has_graphics,
                Slices => is_slice,
                Nobody(_) => false,
            };
            assert_eq!(has(&spec, *place, item), expected, "{device}: {place:?} {item}: {:#?}", texts(&spec, *place));
        }
        // The other way round: nothing comes in that is not in the list.
        let listed = |place: In, text: &str| {
            TOOLKIT.iter().any(|(of, item, _)| *of == place && fits(place, item, text)) || is_more(text)
        };
        for place in [Nodes, Control, Mounts, Env, Groups] {
            unexplained.extend(texts(&spec, place).into_iter().filter(|text| !listed(place, text)));
        }
        let version = if has_graphics { "0.7.0" } else { "0.5.0" };
        assert_eq!(spec["cdiVersion"], version, "{device}: a runtime need not know more");
        unprepare(&engine, &claim);
    }
    assert_eq!(unexplained, BTreeSet::new(), "not in the toolkit's list");
}

/// Names of the same libraries, and what Kubernetes, not the toolkit, has containers told.
fn is_more(text: &str) -> bool {
    let library = text.strip_prefix(&format!("/{}/", lib())).unwrap_or_default();
    library.contains(".so") || text.starts_with("/var/run/kubernetes.io/dra-device-attributes/")
}

#[test]
fn every_difference_has_its_reason_in_the_docs() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/cdi.md")).unwrap();
    for (_, item, who) in TOOLKIT {
        let Nobody(words) = who else { continue };
        let row = page.lines().find(|line| line.starts_with("| ") && line.contains(words));
        let row = row.unwrap_or_else(|| panic!("{item}: no row with {words:?}"));
        let reason = row.trim_end_matches(" |").rsplit("| ").next().unwrap();
        assert!(reason.split_whitespace().count() > 3, "{item}: no reason in {row}");
    }
}

/// Each part can be left out, and what is left is complete without it.
#[test]
fn without_hook_metadata_and_groups_there_are_none() {
    let node = Node::start(NODE);
    let injection = Injection { hook: None, metadata: false, additional_gids: false };
    let engine = Engine::open(node.nvml.clone(), Settings { injection, ..node.settings() }).unwrap();
    let claim = claim("a", &[GPU]);
    prepare(&engine, &claim).unwrap();
    let spec = node.cdi(&claim);
    let text = spec.to_string();
    for part in ["hooks", "additionalGids", "dra-device-attributes", hook::NAME] {
        assert!(!text.contains(part), "{part} in {spec:#}");
    }
    assert_eq!(spec["cdiVersion"], "0.5.0");
    assert_eq!(node.metadata_files(), [""; 0]);
    assert!(has(&spec, Mounts, "LIB/libcuda.so.1") && has(&spec, Nodes, "/dev/dri/card"));

    // What an earlier plugin left goes with the claim, whatever this one is told.
    prepare(&engine_with_hook(&node), &claim).unwrap();
    assert_eq!(node.metadata_files(), ["a"]);
    engine.unprepare("a", late()).unwrap();
    node.assert_clean(GPU, "all is gone");
}

/// A container is told of what it has, and not of other devices.
#[test]
fn device_metadata_tells_what_no_slice_can() {
    let node = Node::start(NODE);
    let engine = node.engine();
    let claim = claim("a", &[MIG_1G, "gpu-47-00-0"]);
    prepare(&engine, &claim).unwrap();
    let read = |request: &str| -> Value {
        let path = node.settings().metadata.join("a").join(format!("{request}.json"));
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    };
    let device = |told: &Value| told["requests"][0]["devices"][0].clone();
    let attribute =
        |device: &Value, name: &str| device["attributes"][name]["string"].as_str().unwrap_or("-").to_owned();
    let (slice, whole) = (device(&read("request-0")), device(&read("request-1")));
    assert_eq!((slice["name"].as_str(), whole["name"].as_str()), (Some(MIG_1G), Some("gpu-47-00-0")));
    assert_eq!(["type", "profile"].map(|name| attribute(&slice, name)), ["mig", "1g.10gb"]);
    assert!(attribute(&slice, "uuid").starts_with("MIG-") && attribute(&slice, "parentUUID").starts_with("GPU-"));
    assert_eq!(["type", "profile", "parentUUID"].map(|name| attribute(&whole, name)), ["gpu", "-", "-"]);
    assert!(attribute(&whole, "uuid").starts_with("GPU-"));
    assert_eq!(attribute(&whole, "resource.kubernetes.io/pciBusID"), "0000:47:00.0");
    assert_eq!(slice["attributes"]["cudaDriverVersion"]["version"], "12.2.0");

    // Each device's containers get the file of its own request.
    let spec = node.cdi(&claim);
    let mounts = |number: usize| spec["devices"][number]["containerEdits"]["mounts"].to_string();
    assert!(mounts(0).contains("/request-0/") && !mounts(0).contains("request-1"), "{}", mounts(0));
    assert!(mounts(1).contains("/request-1/") && !mounts(1).contains("request-0"), "{}", mounts(1));
    unprepare(&engine, &claim);
    node.assert_clean(GPU, "gone");
}
