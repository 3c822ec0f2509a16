//! What a container with a GPU finds in it, on a base that knows nothing of GPUs, and what is left of it afterwards.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use kerf_api::names;
use kerf_e2e::{Claim, NodeFile, Pod, Request, World, scenario};
use serde_json::Value;

/// Where a claim is told of, by how the pod has it.
const TOLD: &str = "/var/run/kubernetes.io/dra-device-attributes";

/// The image has a C library and no cache of its linker: what the cache knows, the hook has brought in.
#[tokio::test]
async fn the_linker_finds_the_driver_on_an_ordinary_base() {
    scenario("linker_cache", NodeFile::new().gpus("h100-80gb", 2), async |world| {
        world.run_ready("slice", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
        world.run_ready("whole", &Claim::of(&[Request::gpu("gpu")])).await?;
        for pod in ["slice", "whole"] {
            let cached = world.shell(pod, "main", "ldconfig -p")?;
            for library in ["libcuda.so.1", "libnvidia-ml.so.1"] {
                let line = cached.lines().find(|line| line.trim().starts_with(library));
                let line = line.with_context(|| format!("{pod}: {library} is not in the cache: {cached}"))?;
                let path = line.rsplit("=> ").next().context("a line of ldconfig names a path")?;
                let size = world.shell(pod, "main", &format!("stat -L -c %s {path}"))?;
                ensure!(size.trim().parse::<u64>()? > 0, "{pod}: {path} has {size} bytes");
            }
            ensure!(world.gpu_uuids(pod, "main")?.len() == 1, "{pod}: the genuine nvidia-smi lists one GPU");
            let env = world.shell(pod, "main", "env")?;
            ensure!(env.contains("NVIDIA_VISIBLE_DEVICES=void"), "{pod}: {env}");
        }
        // Hooks run in the container's user namespace, whose root is one of the others on the host.
        let hooks = world.cluster.node()?.hook_root.join(names::DRIVER_NAME);
        let nobody = Command::new(hooks.join("kerf-cdi-hook")).uid(65534).gid(65534).output();
        let said = String::from_utf8(nobody.context("the hook can be run by everybody")?.stderr)?;
        ensure!(said.starts_with("kerf-cdi-hook: "), "{said}");
        // Only a whole GPU, or a slice with graphics, can be drawn on.
        let drm = world.shell(
            "whole",
            "main",
            "cd /dev/dri/by-path && for link in *; do echo $link $(readlink $link); done",
        )?;
        let links: Vec<_> = drm.lines().filter_map(|line| line.split_once(' ')).collect();
        ensure!(links.len() == 2, "a link to each node: {drm}");
        for (link, target) in links {
            let pci = link.starts_with("pci-0000:") && (link.ends_with("-card") || link.ends_with("-render"));
            ensure!(pci && target.starts_with("../"), "{link} -> {target}");
            world.shell("whole", "main", &format!("test -c /dev/dri/by-path/{link}"))?;
        }
        let none = world.shell("slice", "main", "ls /dev/dri 2>&1 || true")?;
        ensure!(none.contains("No such file"), "a slice without graphics: {none}");
        world.delete("slice").await?;
        world.delete("whole").await?;
        world.nothing_is_left().await
    })
    .await;
}

#[tokio::test]
async fn a_container_is_told_of_its_devices() {
    scenario("device_metadata", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        let claim = Claim::of(&[Request::mig("one", "1g.10gb"), Request::mig("other", "2g.20gb")]);
        world.create(&claim.template("template")).await?;
        let pod = Pod::from_template("templated", "template").container("a", "one").container("b", "other");
        world.create(&pod.object()).await?;
        world.ready("templated").await?;
        world.create(&Claim::of(&[Request::mig("gpu", "1g.10gb")]).object("named")).await?;
        world.create(&Pod::with_claim("direct", "named").object()).await?;
        world.ready("direct").await?;

        for (pod, container, place, profile) in [
            ("templated", "a", "resourceclaimtemplates/gpu/one", "1g.10gb"),
            ("templated", "b", "resourceclaimtemplates/gpu/other", "2g.20gb"),
            ("direct", "main", "resourceclaims/named/gpu", "1g.10gb"),
        ] {
            let device = told(world, pod, container, place)?;
            let is =
                |attribute: &str| device["attributes"][attribute]["string"].as_str().unwrap_or_default().to_owned();
            ensure!((is("type"), is("profile")) == ("mig".to_owned(), profile.to_owned()), "{device}");
            ensure!(world.mig_uuids(pod, container)? == [is("uuid")], "{device}");
            ensure!(world.gpu_uuids(pod, container)? == [is("parentUUID")], "{device}");
        }
        for (container, place) in [("a", "one"), ("b", "other")] {
            let device = told(world, "templated", container, &format!("resourceclaimtemplates/gpu/{place}"))?;
            let allocated = world.allocated("templated").await?;
            let result = allocated.iter().find(|result| result.request == place).context("the request has a device")?;
            ensure!(device["name"] == result.device.as_str(), "{device}, {result:?}");
        }
        let other = world.shell("templated", "a", &format!("ls {TOLD}/resourceclaimtemplates/gpu"))?;
        ensure!(other.trim() == "one", "a container is told of its own requests: {other}");

        world.delete("templated").await?;
        world.delete("direct").await?;
        world.nothing_is_left().await
    })
    .await;
}

/// The one device in the file of a request.
fn told(world: &World, pod: &str, container: &str, place: &str) -> Result<Value> {
    let file = world.shell(pod, container, &format!("cat {TOLD}/{place}/gpu.nvidia.com-metadata.json"))?;
    let told: Value = serde_json::from_str(&file).with_context(|| file.clone())?;
    let known = told["kind"] == "DeviceMetadata" && told["apiVersion"] == "metadata.resource.k8s.io/v1alpha1";
    ensure!(known && told["metadata"]["generation"] == 1, "{told}");
    let devices = told["requests"][0]["devices"].as_array().context("a list of devices")?;
    ensure!(devices.len() == 1, "{told}");
    Ok(devices[0].clone())
}
