//! The shapes a claim can have.

use anyhow::{Context, ensure};
use kerf_e2e::{Claim, NodeFile, Pod, Request, eventually, never, scenario};
use std::time::Duration;

#[tokio::test]
async fn two_requests_go_to_two_containers() {
    scenario("two_requests", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        let claim = Claim::of(&[Request::mig("large", "2g.20gb"), Request::mig("small", "1g.10gb")]);
        world.create(&claim.template("both")).await?;
        let pod = Pod::from_template("both", "both").container("trainer", "large").container("server", "small");
        world.create(&pod.object()).await?;
        world.ready("both").await?;
        let instances = world.instances(2).await?;
        for (container, profile) in [("trainer", "2g.20gb"), ("server", "1g.10gb")] {
            let live = instances.iter().find(|(_, instance)| instance.profile == profile).context("carved")?;
            let seen = world.mig_uuids("both", container)?;
            ensure!(seen == [live.1.compute_instances[0].uuid.clone()], "{container} sees {seen:?}");
        }
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn four_partitions_come_from_one_parent() {
    scenario("one_parent", NodeFile::new().gpus("h100-80gb", 2), async |world| {
        // One slice on the first GPU, so that four more only fit together where they share a parent by intent.
        let claim = Claim::of(&[Request::mig("gpu", "1g.20gb").count(4)]).match_attribute("gpu.nvidia.com/parentUUID");
        world.run_ready("first", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
        world.run("four", &claim).await?;
        // Before 1.36 the scheduler keeps the counters of a device that it tried and a constraint refused, so that a second
        // GPU looks full once it was tried beside the first (`allocateDevice` of k8s.io/dynamic-resource-allocation).
        let keeps_counters = world.cluster.minor()? < 36;
        if keeps_counters {
            world.waits("four").await?;
            world.delete("first").await?;
        }
        world.ready("four").await?;
        let instances = world.instances(if keeps_counters { 4 } else { 5 }).await?;
        let parents: std::collections::BTreeSet<&String> =
            instances.iter().filter(|(_, instance)| instance.profile == "1g.20gb").map(|(parent, _)| parent).collect();
        ensure!(parents.len() == 1, "{instances:?}");
        ensure!(world.mig_uuids("four", "main")?.len() == 4, "the container sees all four");
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_claim_shared_by_two_pods_is_prepared_once() {
    scenario("shared_claim", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        world.create(&Claim::of(&[Request::mig("gpu", "1g.10gb")]).object("shared")).await?;
        for pod in ["first", "second"] {
            world.create(&Pod::with_claim(pod, "shared").object()).await?;
        }
        world.ready("first").await?;
        world.ready("second").await?;
        let instances = world.instances(1).await?;
        ensure!(world.mig_uuids("first", "main")? == world.mig_uuids("second", "main")?, "both see the same device");
        world.delete("first").await?;
        ensure!(
            world.simulation.instances()?[0].1.id == instances[0].1.id,
            "the slice stays while the second pod runs"
        );
        ensure!(world.mig_uuids("second", "main")?.len() == 1, "and the second pod keeps it");
        world.delete("second").await?;
        world.instances(0).await?;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn first_available_takes_the_better_and_then_the_smaller() {
    scenario("first_available", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        let claim = Claim::first_available("gpu", &[Request::mig("best", "3g.40gb"), Request::mig("good", "2g.20gb")]);
        world.run_ready("other", &Claim::of(&[Request::mig("gpu", "3g.40gb")])).await?;
        world.run_ready("gets-best", &claim).await?;
        world.delete("other").await?;
        world.run_ready("blocker", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
        world.run_ready("gets-good", &claim).await?;
        let requests = [world.allocated("gets-best").await?, world.allocated("gets-good").await?].concat();
        ensure!(requests[0].request == "gpu/best" && requests[1].request == "gpu/good", "{requests:?}");
        ensure!(
            world.mig_uuids("gets-good", "main")?.len() == 1,
            "the container has it though the request has two parts"
        );
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn cel_selects_by_memory_product_and_architecture() {
    scenario("cel", NodeFile::two_h100_and_l40s(), async |world| {
        let cases = [
            (
                "memory",
                "mig.nvidia.com",
                r#"device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("39Gi")) >= 0
                && device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("41Gi")) < 0"#,
            ),
            ("product", "gpu.nvidia.com", r#"device.attributes["gpu.nvidia.com"].productName.contains("L40S")"#),
            ("architecture", "gpu.nvidia.com", r#"device.attributes["gpu.nvidia.com"].architecture == "Hopper""#),
            (
                "driver",
                "gpu.nvidia.com",
                r#"device.attributes["gpu.nvidia.com"].cudaComputeCapability.isGreaterThan(semver("8.9.0"))
                || device.attributes["gpu.nvidia.com"].driverVersion.isLessThan(semver("500.0.0"))"#,
            ),
        ];
        for (name, class, expression) in cases {
            world.run_ready(name, &Claim::of(&[Request::class("gpu", class).cel(expression)])).await?;
            let device = world.allocated(name).await?.remove(0).device;
            let listing = world.shell(name, "main", "nvidia-smi -L")?;
            match name {
                "memory" => ensure!(device.contains("-mig-3g40gb-") || device.contains("-mig-4g40gb-"), "{device}"),
                "product" => ensure!(listing.contains("L40S"), "{listing}"),
                _ => ensure!(listing.contains("H100"), "{name}: {listing}"),
            }
            world.delete(name).await?;
        }
        world
            .run(
                "nothing",
                &Claim::of(&[Request::gpu("gpu").cel(r#"device.attributes["gpu.nvidia.com"].productName == "none""#)]),
            )
            .await?;
        world.waits("nothing").await?;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_slice_is_gone_when_its_pod_completes() {
    scenario("completes", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        world.create(&Claim::of(&[Request::mig("gpu", "1g.10gb")]).template("job")).await?;
        let mut pod = Pod::from_template("job", "job").object();
        pod["spec"]["containers"][0]["command"] = serde_json::json!(["nvidia-smi", "-L"]);
        world.create(&pod).await?;
        let api = world.pods();
        eventually("the pod succeeds", Duration::from_secs(60), async || {
            let phase = api.get("job").await?.status.and_then(|status| status.phase);
            Ok((phase.as_deref() == Some("Succeeded")).then_some(()))
        })
        .await?;
        world.instances(0).await?;
        ensure!(world.logs("job", "main")?.contains("MIG 1g.10gb"), "the log shows the slice");
        let again = async || Ok(!world.simulation.instances()?.is_empty());
        never("a completed pod's slice is carved again", Duration::from_secs(2), again).await
    })
    .await;
}
