//! What kerf's CDI specifications bring into containers, beside what NVIDIA's own container toolkit would bring: its
//! `nvidia-ctk cdi generate` runs on the same node, over the same devices. `docs/cdi.md` has the reason of each difference.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use kerf_e2e::{Claim, Neighbours, NodeFile, Pod, Request, World, scenario};
use serde_json::Value;

const GENERATOR: &str = "container-toolkit/nvidia-ctk";

/// What the toolkit brings and kerf does not: how the item begins, and words of its row in `docs/cdi.md`.
const LEFT_OUT: [(&str, &str); 7] = [
    ("env NVIDIA_CTK_LIBCUDA_DIR=", "`NVIDIA_CTK_LIBCUDA_DIR`"),
    ("mount /var/run/nvidia-container-devices/void ", "`/var/run/nvidia-container-devices/void`"),
    ("hook enable-cuda-compat", "hook `enable-cuda-compat`"),
    ("hook disable-device-node-modification", "hook `disable-device-node-modification`"),
    ("hook update-application-profile", "hook `update-application-profile`"),
    ("hook apply-cuda-memory-limits", "hook `apply-cuda-memory-limits`"),
    ("hook chmod", "hook `chmod`"),
];

#[tokio::test]
async fn containers_get_what_nvidias_toolkit_would_give_them() {
    scenario("toolkit", NodeFile::new().gpus("h100-80gb", 1).gpus("rtx-pro-6000", 1), async |world| {
        let beside = Neighbours::on_node(&world.cluster, &world.simulation)?;
        let h100 = r#"device.attributes["gpu.nvidia.com"].architecture == "Hopper""#;
        run(world, "whole", Request::gpu("gpu").cel(h100)).await?;
        let whole = world.gpu_uuids("whole", "main")?;
        same(world, &beside, "whole", &whole).await?;
        world.delete("whole").await?;
        if !world.cluster.has_partitions()? {
            return Ok(());
        }
        for (pod, profile) in [("slice", "1g.10gb"), ("draws", "1g.24gb+gfx")] {
            run(world, pod, Request::mig("gpu", profile)).await?;
        }
        for pod in ["slice", "draws"] {
            same(world, &beside, pod, &world.mig_uuids(pod, "main")?).await?;
        }
        Ok(())
    })
    .await;
}

/// A pod with a claim of the same name.
async fn run(world: &World, name: &str, request: Request) -> Result<()> {
    world.create(&Claim::of(&[request]).object(name)).await?;
    world.create(&Pod::with_claim(name, name).object()).await?;
    world.ready(name).await
}

/// Compares what the claim of this name brings with what the toolkit has for these devices.
async fn same(world: &World, beside: &Neighbours, claim: &str, uuids: &[String]) -> Result<()> {
    let uid = world.claim(claim).await?.metadata.uid.context("a claim has a UID")?;
    let file = world.cluster.node()?.cdi_root.join(format!("k8s.gpu.nvidia.com-claim_{uid}.json"));
    let ours = items(&serde_json::from_slice(&std::fs::read(&file)?)?, |_| true);
    let root = world.simulation.root().display().to_string();
    let generated = beside.run(
        GENERATOR,
        &[
            "cdi",
            "generate",
            "--mode=nvml",
            "--format=json",
            "--device-name-strategy=uuid",
            &format!("--driver-root={root}"),
            &format!("--dev-root={root}"),
        ],
    )?;
    let theirs = items(&serde_json::from_str(&generated)?, |name| uuids.iter().any(|uuid| uuid == name));
    ensure!(theirs.iter().any(|item| item.starts_with("node /dev/nvidia0 ") || item.starts_with("node /dev/nvidia1 ")));

    let is_left_out = |item: &str| LEFT_OUT.iter().any(|(begin, _)| item.starts_with(begin));
    // A mount of the same file stands for a link.
    let is_mounted = |item: &str| {
        let path = item.strip_prefix("link ").and_then(|link| link.split(' ').next());
        path.is_some_and(|path| ours.iter().any(|ours| ours.starts_with(&format!("mount {path} "))))
    };
    let missing: Vec<_> = theirs.difference(&ours).filter(|item| !is_left_out(item) && !is_mounted(item)).collect();
    ensure!(missing.is_empty(), "{claim}: the toolkit brings, and kerf does not: {missing:#?}");
    let more: Vec<_> = ours.difference(&theirs).filter(|item| !is_more(item, &theirs)).collect();
    ensure!(more.is_empty(), "{claim}: kerf brings, and the toolkit does not: {more:#?}");
    Ok(())
}

/// Whether what only kerf brings is a library by another of its names, what Kubernetes has containers told, or a link to a DRM
/// node by its GPU's address: the toolkit brings those that the host has, and udev makes none on a simulated one.
fn is_more(item: &str, theirs: &BTreeSet<String>) -> bool {
    if item.starts_with("link /dev/dri/by-path/") {
        return true;
    }
    let Some((path, host)) = item.strip_prefix("mount ").and_then(|mount| mount.split_once(" of ")) else {
        return false;
    };
    let is_known = theirs.iter().any(|theirs| theirs.starts_with("mount ") && theirs.ends_with(&format!(" of {host}")));
    (path.contains(".so") && is_known) || path.starts_with("/var/run/kubernetes.io/dra-device-attributes/")
}

/// Everything that the devices of these names bring, and what every device does, one text an item.
fn items(spec: &Value, is_wanted: impl Fn(&str) -> bool) -> BTreeSet<String> {
    let devices = list(&spec["devices"]).into_iter().filter(|device| is_wanted(&text(&device["name"])));
    let mut edits: Vec<Value> = devices.map(|device| device["containerEdits"].clone()).collect();
    edits.push(spec["containerEdits"].clone());
    let mut items = BTreeSet::new();
    for edits in &edits {
        items.extend(list(&edits["deviceNodes"]).iter().map(node));
        items.extend(list(&edits["env"]).iter().map(|env| format!("env {}", text(env))));
        items.extend(list(&edits["additionalGids"]).iter().map(|group| format!("group {group}")));
        let mount = |mount: &Value| format!("mount {} of {}", text(&mount["containerPath"]), text(&mount["hostPath"]));
        items.extend(list(&edits["mounts"]).iter().map(mount));
        items.extend(list(&edits["hooks"]).iter().flat_map(hook));
    }
    items
}

/// A node with all that decides who may do what with it, but the permission to make it anew.
fn node(node: &Value) -> String {
    let number = |key: &str| node[key].as_u64().unwrap_or_default();
    format!(
        "node {} of {} {}:{} mode {:o} group {}",
        text(&node["path"]),
        text(&node["hostPath"]),
        number("major"),
        number("minor"),
        number("fileMode"),
        number("gid")
    )
}

/// What a hook does: each link and each folder of libraries, or the hook's name.
fn hook(hook: &Value) -> Vec<String> {
    let arguments: Vec<String> = list(&hook["args"]).iter().map(text).collect();
    let [_, name, options @ ..] = arguments.as_slice() else { return Vec::new() };
    let values = options.chunks(2).filter_map(|option| option.get(1));
    match name.as_str() {
        "create-symlinks" => values
            .filter_map(|link| link.split_once("::"))
            .map(|(target, path)| format!("link {path} to {target}"))
            .collect(),
        "update-ldcache" => values.map(|folder| format!("linker finds {folder}")).collect(),
        _ => vec![format!("hook {name}")],
    }
}

fn list(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_default()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[test]
fn every_difference_has_its_reason_in_the_docs() {
    let page = std::fs::read_to_string(kerf_e2e::deploy().join("../docs/cdi.md")).unwrap();
    for (item, words) in LEFT_OUT {
        let row = page.lines().find(|line| line.starts_with("| ") && line.contains(words));
        let row = row.unwrap_or_else(|| panic!("{item}: no row with {words:?}"));
        let reason = row.trim_end_matches(" |").rsplit("| ").next().unwrap();
        assert!(reason.split_whitespace().count() > 3, "{item}: no reason in {row}");
    }
}
