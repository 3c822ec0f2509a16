//! What breaks around kerf: the node, the API server, the order of things.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::resource::v1::Device;
use kerf_e2e::{Claim, HEARS_AGAIN, NodeFile, Part, Pod, RETRIED, Request, World, eventually, scenario, setting};
use kube::api::DeleteParams;

/// How long the API server is away, `KERF_OUTAGE_SECONDS` of `make torture`; shorter otherwise.
const OUTAGE_SECONDS: usize = 20;

#[tokio::test]
async fn a_node_that_reboots_gets_its_pods_and_slices_back() {
    scenario("reboot", NodeFile::new().gpus("h100-80gb", 2), async |world| {
        for (name, request) in [
            // The first: before 1.36 the scheduler may put the two slices on two GPUs.
            ("whole", Request::gpu("gpu")),
            ("slice", Request::mig("gpu", "3g.40gb")),
            ("small", Request::mig("gpu", "1g.10gb")),
        ] {
            world.create(&Claim::of(&[request]).template(name)).await?;
            let mut pod = Pod::from_template(name, name).object();
            pod["spec"]["restartPolicy"] = "Always".into();
            world.create(&pod).await?;
            world.ready(name).await?;
        }
        let before = cuts(world)?;
        let gpu = world.gpu_uuids("whole", "main")?;

        // The power is cut. Disks stay: the kubelet's checkpoints, the journal. /run goes: CDI specs. So do the instances.
        world.kerf.expect_end(Part::KubeletPlugin).await?;
        world.kerf.expect_end(Part::Controller).await?;
        world.cluster.tool(&["power-off"])?;
        world.simulation.tell(&["reboot"])?;
        ensure!(world.simulation.instances()?.is_empty(), "no instance survives a reboot");
        for component in ["containerd", "kubelet", "kube-proxy"] {
            world.cluster.tool(&["start", component])?;
        }
        world.kerf.registered().await?;

        eventually("all pods run again", RETRIED, async || {
            for name in ["slice", "small", "whole"] {
                let status = world.pods().get(name).await?.status.unwrap_or_default();
                let status = status.container_statuses.and_then(|mut all| all.pop()).context("no status")?;
                ensure!(status.ready && status.restart_count > 0, "{name}: {status:?}");
            }
            Ok(Some(()))
        })
        .await?;
        ensure!(cuts(world)? == before, "the same slices in the same places: {:?}, was {before:?}", cuts(world)?);
        ensure!(world.mig_uuids("slice", "main")?.len() == 1, "the container sees its slice");
        ensure!(world.gpu_uuids("whole", "main")? == gpu, "and the other its GPU");
        for name in ["slice", "small", "whole"] {
            world.delete(name).await?;
        }
        world.nothing_is_left().await
    })
    .await;
}

#[tokio::test]
async fn pods_end_while_the_api_server_is_away() {
    scenario("api_away", NodeFile::new().gpus("h100-80gb", 2), async |world| {
        world.run_ready("stays", &Claim::of(&[Request::gpu("gpu")])).await?;
        let pods = ["one", "two", "three"];
        for name in pods {
            world.run_ready(name, &Claim::of(&[Request::mig("gpu", "2g.20gb")])).await?;
        }
        let mut uids = Vec::new();
        for name in pods {
            let deleted = world.pods().delete(name, &DeleteParams::default()).await?;
            uids.push(deleted.left().and_then(|pod| pod.metadata.uid));
        }
        world.cluster.tool(&["kill", "kube-apiserver"])?;
        // What the kubelet had heard of it ends without the API server's help; it tells the rest afterwards.
        let outage = setting("KERF_OUTAGE_SECONDS", OUTAGE_SECONDS)?;
        tokio::time::sleep(Duration::from_secs(u64::try_from(outage)?)).await;
        world.cluster.tool(&["start", "kube-apiserver"])?;
        world.patience = HEARS_AGAIN;
        for (name, uid) in pods.into_iter().zip(uids) {
            world.gone(name, uid.as_deref()).await?;
        }
        world.instances(0).await?;
        world.kerf.registered().await?;
        world.published().await?;
        // Its claim is made by the controller manager: with this pod all of Kubernetes is back, for the next scenario, too.
        world.run_ready("next", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
        world.ready("stays").await
    })
    .await;
}

#[tokio::test]
async fn a_device_of_a_force_deleted_pod_goes_to_one_claim_at_a_time() {
    scenario("force_deleted", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        let whole = Claim::of(&[Request::mig("gpu", "7g.80gb")]);
        world.create(&whole.template("first")).await?;
        let mut pod = Pod::from_template("first", "first").object();
        // Its container does not heed SIGTERM, so that it lives on after the API forgot the pod.
        pod["spec"]["terminationGracePeriodSeconds"] = 20.into();
        pod["spec"]["containers"][0]["command"] =
            serde_json::json!(["sh", "-c", "trap '' TERM; nvidia-smi -L; sleep 1000000"]);
        world.create(&pod).await?;
        world.ready("first").await?;

        world
            .pods()
            .delete("first", &DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() })
            .await?;
        world.run("second", &whole).await?;
        eventually("the second pod has the device", RETRIED, async || {
            let holders = world.simulation.instances()?.len();
            ensure!(holders <= 1, "{holders} instances on a GPU for one");
            let status = world.pods().get("second").await?.status.unwrap_or_default();
            Ok((status.phase.as_deref() == Some("Running")).then_some(()))
        })
        .await?;
        ensure!(world.mig_uuids("second", "main")?.len() == 1, "it sees the device");
        world.delete("second").await?;
        world.nothing_is_left().await
    })
    .await;
}

/// A process outside of the pod uses the pod's slice, and does not end with it.
#[tokio::test]
async fn a_pod_ends_although_its_slice_stays_in_use() {
    scenario("condemned", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        world.run_ready("busy", &Claim::of(&[Request::mig("gpu", "2g.20gb")])).await?;
        let pod = world.pods().get("busy").await?;
        let claims = pod.status.unwrap_or_default().resource_claim_statuses.unwrap_or_default();
        let claim = claims.into_iter().find_map(|claim| claim.resource_claim_name).context("the pod has a claim")?;
        let device = world.allocated("busy").await?.remove(0).device;
        let (gpu, instance) = world.simulation.instances()?.remove(0);
        let (pid, gi) = (std::process::id().to_string(), instance.id.to_string());
        let fault = world.simulation.tell(&["fault", "process", &gpu, &pid, "--gi", &gi])?;
        let fault = String::from_utf8(fault)?;
        ensure!(tainted(world).await?.is_empty(), "a slice in use is nothing odd while its pod runs");

        world.pods().delete("busy", &DeleteParams::default()).await?;
        let why = world.event(&claim, "UnprepareFailed").await?;
        ensure!(why.contains(&device) && why.contains(&format!("in use by process {pid} (")), "{why}");
        let held_back = eventually("what overlaps it is held back", RETRIED, async || {
            Ok(Some(tainted(world).await?).filter(|tainted| !tainted.is_empty()))
        })
        .await?;
        ensure!(held_back == overlapping(world, &device).await?, "{held_back:?} is held back for {device}");
        eventually("the pod is let go", RETRIED, async || {
            Ok(world.pods().get_opt("busy").await?.is_none().then_some(()))
        })
        .await?;
        let told = world.event(&claim, "UnprepareCondemned").await?;
        ensure!(told.contains(&device) && told.contains("in use by process"), "{told}");
        ensure!(world.simulation.instances()?.len() == 1, "nothing is taken from under a process");
        ensure!(tainted(world).await? == held_back, "its place is no one else's");
        world.run_ready("beside", &Claim::of(&[Request::mig("gpu", "3g.40gb")])).await?;
        world.delete("beside").await?;

        world.simulation.tell(&["fault", "clear", fault.trim()])?;
        world.instances(0).await?;
        eventually("its place is free again", RETRIED, async || Ok(tainted(world).await?.is_empty().then_some(())))
            .await?;
        world.run_ready("next", &Claim::of(&[Request::gpu("gpu")])).await?;
        world.delete("next").await?;
        world.nothing_is_left().await
    })
    .await;
}

/// A node is drained to have its driver repaired, so its pods must end without one.
#[tokio::test]
async fn pods_end_although_the_driver_is_gone() {
    scenario("no_driver", NodeFile::new().gpus("h100-80gb", 2), async |world| {
        world.run_ready("whole", &Claim::of(&[Request::gpu("gpu")])).await?;
        world.run_ready("slice", &Claim::of(&[Request::mig("gpu", "2g.20gb")])).await?;
        let claims = world.pods().get("slice").await?.status.unwrap_or_default().resource_claim_statuses;
        let claim = claims.unwrap_or_default().into_iter().find_map(|claim| claim.resource_claim_name);
        let claim = claim.context("the pod has a claim")?;
        let libraries = format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH);
        let library = world.simulation.root().join(libraries).join("libnvidia-ml.so.1");
        let aside = library.with_extension("aside");
        fs::rename(&library, &aside)?;
        world.kerf.renew(Part::KubeletPlugin).await?;
        world.kerf.registered().await?;

        world.delete("whole").await?;
        world.pods().delete("slice", &DeleteParams::default()).await?;
        let why = world.event(&claim, "UnprepareFailed").await?;
        ensure!(why.contains("cannot be taken back yet") && why.contains("libnvidia-ml.so.1"), "{why}");
        eventually("the pod is let go", RETRIED, async || {
            Ok(world.pods().get_opt("slice").await?.is_none().then_some(()))
        })
        .await?;
        world.event(&claim, "UnprepareCondemned").await?;
        ensure!(world.simulation.instances()?.len() == 1, "without a driver nobody can remove it");

        fs::rename(&aside, &library)?;
        world.run_ready("next", &Claim::of(&[Request::gpu("gpu")])).await?;
        world.delete("next").await?;
        world.nothing_is_left().await
    })
    .await;
}

/// The devices that are held back for what an ended claim has left.
async fn tainted(world: &World) -> Result<BTreeSet<String>> {
    let is_held_back = |device: &Device| device.taints.iter().flatten().any(|taint| taint.key == "kerf.dev/condemned");
    let devices = world.slices().await?.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default());
    Ok(devices.filter(is_held_back).map(|device| device.name).collect())
}

/// The devices that share a memory slice with this one, itself included.
async fn overlapping(world: &World, device: &str) -> Result<BTreeSet<String>> {
    let memory_slices = |device: &Device| {
        let counters = device.consumes_counters.iter().flatten().flat_map(|consumed| consumed.counters.keys());
        counters.filter(|name| name.starts_with("memory-slice-")).cloned().collect::<BTreeSet<_>>()
    };
    let slices = world.slices().await?.into_iter();
    let devices: Vec<_> = slices.flat_map(|slice| slice.spec.devices.unwrap_or_default()).collect();
    let its = devices.iter().find(|found| found.name == device).map(memory_slices).context("it is published")?;
    ensure!(!its.is_empty(), "{device} takes no memory slices");
    Ok(devices.iter().filter(|other| !memory_slices(other).is_disjoint(&its)).map(|other| other.name.clone()).collect())
}

/// What lives on the GPUs: by GPU, profile and place.
fn cuts(world: &World) -> Result<Vec<(String, String, u32)>> {
    let instances = world.simulation.instances()?;
    let mut cuts: Vec<_> =
        instances.into_iter().map(|(gpu, instance)| (gpu, instance.profile, instance.placement.start)).collect();
    cuts.sort();
    Ok(cuts)
}
