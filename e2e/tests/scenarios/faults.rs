//! What breaks around kerf: the node, the API server, the order of things.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kerf_e2e::{Claim, NodeFile, Part, Pod, Request, World, eventually, scenario, setting};
use kube::api::DeleteParams;

/// How long the API server is away, `KERF_OUTAGE_SECONDS` of `make torture`; shorter otherwise.
const OUTAGE_SECONDS: usize = 20;

/// A pod may wait for the kubelet's next try, which comes after one to two minutes.
const RETRIED: Duration = Duration::from_secs(240);

#[tokio::test]
async fn a_node_that_reboots_gets_its_pods_and_slices_back() {
    scenario("reboot", NodeFile::new().gpus("h100-80gb", 2), async |world| {
        for (name, request) in [
            ("slice", Request::mig("gpu", "3g.40gb")),
            ("small", Request::mig("gpu", "1g.10gb")),
            ("whole", Request::gpu("gpu")),
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
        world.kerf.check().await?;
        world.cluster.tool(&["start", "kube-apiserver"])?;
        for (name, uid) in pods.into_iter().zip(uids) {
            world.gone(name, uid.as_deref()).await?;
        }
        world.instances(0).await?;
        world.kerf.registered().await?;
        world.published().await?;
        // The controller manager, which makes claims of templates, takes its time to come back to the server.
        let slice = Claim::of(&[Request::mig("gpu", "1g.10gb")]);
        world.create(&slice.object("next")).await?;
        world.create(&Pod::with_claim("next", "next").object()).await?;
        world.ready("next").await?;
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

/// What lives on the GPUs: by GPU, profile and place.
fn cuts(world: &World) -> Result<Vec<(String, String, u32)>> {
    let instances = world.simulation.instances()?;
    let mut cuts: Vec<_> =
        instances.into_iter().map(|(gpu, instance)| (gpu, instance.profile, instance.placement.start)).collect();
    cuts.sort();
    Ok(cuts)
}
