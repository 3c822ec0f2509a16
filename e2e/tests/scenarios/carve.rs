//! The main path: a claim becomes a slice on a GPU, and the pod's end removes it.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use kerf_e2e::{Claim, NodeFile, Request, scenario};

#[tokio::test]
async fn a_claim_carves_one_slice_and_the_pods_end_removes_it() {
    scenario("one_slice", NodeFile::two_h100_and_l40s(), async |world| {
        world.run_ready("one", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;

        let allocated = world.allocated("one").await?;
        ensure!(allocated.len() == 1, "{allocated:?}");
        let (gpu, instance) = world.instances(1).await?.remove(0);
        let start: u32 = allocated[0].device.rsplit('-').next().unwrap_or_default().parse()?;
        ensure!(
            instance.profile == "1g.10gb" && instance.placement.start == start,
            "allocated {allocated:?}, live {instance:?}"
        );
        ensure!(instance.compute_instances.len() == 1, "{instance:?}");

        let uuids = world.mig_uuids("one", "main")?;
        ensure!(uuids == [instance.compute_instances[0].uuid.clone()], "in the container: {uuids:?}");
        let gpus = world.gpu_uuids("one", "main")?;
        ensure!(gpus.len() == 1, "the container sees the parent of its slice and no other GPU: {gpus:?}");

        // The simulated driver has no kernel module: a node that the device cgroup lets through ends in ENXIO ("No such
        // device or address"), one that it keeps back in EPERM.
        let minors = world.simulation.state()?.into_iter().map(|state| (state.pci_bus_id, state.minor));
        let minors: BTreeMap<String, u32> = minors.collect();
        let own = minors[&gpu];
        let opened = world.shell("one", "main", &format!("cat /dev/nvidia{own} 2>&1 || true"))?;
        ensure!(opened.contains("No such device or address"), "own GPU: {opened}");
        let other = minors.values().find(|minor| **minor != own).context("the node has another GPU")?;
        let opened = world.shell("one", "main", &format!("mknod /other c 195 {other}; cat /other 2>&1 || true"))?;
        ensure!(opened.contains("Operation not permitted"), "the other GPU: {opened}");

        let specs = std::fs::read_dir(&world.cluster.node()?.cdi_root)?.count();
        ensure!(specs == 1, "one CDI spec while the pod runs, not {specs}");
        world.delete("one").await?;
        world.nothing_is_left().await
    })
    .await;
}

#[tokio::test]
async fn each_profile_of_the_h100_is_carved_once() {
    scenario("each_profile", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        for profile in ["1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"] {
            let name = format!("p{}", profile.replace(['.', '+'], "-"));
            world.run_ready(&name, &Claim::of(&[Request::mig("gpu", profile)])).await?;
            let instances = world.instances(1).await?;
            ensure!(instances[0].1.profile == profile, "{instances:?}");
            let seen = world.mig_uuids(&name, "main")?;
            ensure!(seen == [instances[0].1.compute_instances[0].uuid.clone()], "{profile}: {seen:?}");
            world.delete(&name).await?;
            world.instances(0).await?;
        }
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn seven_slices_fill_a_gpu_and_the_eighth_waits() {
    scenario("seven_slices", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        let claim = Claim::of(&[Request::mig("gpu", "1g.10gb")]);
        for pod in 1..=7 {
            world.run(&format!("slice-{pod}"), &claim).await?;
        }
        for pod in 1..=7 {
            world.ready(&format!("slice-{pod}")).await?;
        }
        world.instances(7).await?;
        world.run("slice-8", &claim).await?;
        let reason = world.waits("slice-8").await?;
        ensure!(reason.contains("cannot allocate all claims"), "{reason}");
        world.delete("slice-3").await?;
        world.ready("slice-8").await?;
        world.instances(7).await?;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn mixed_partitions_share_a_gpu() {
    scenario("mixed_partitions", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        for mix in [["3g.40gb", "4g.40gb"].as_slice(), &["3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"]] {
            for (index, profile) in mix.iter().enumerate() {
                world.run(&format!("mix{}-{index}", mix.len()), &Claim::of(&[Request::mig("gpu", profile)])).await?;
            }
            for index in 0..mix.len() {
                world.ready(&format!("mix{}-{index}", mix.len())).await?;
            }
            let mut live: Vec<String> =
                world.instances(mix.len()).await?.into_iter().map(|(_, instance)| instance.profile).collect();
            let mut wanted: Vec<String> = mix.iter().map(ToString::to_string).collect();
            live.sort();
            wanted.sort();
            ensure!(live == wanted, "{live:?}");
            for index in 0..mix.len() {
                world.delete(&format!("mix{}-{index}", mix.len())).await?;
            }
            world.instances(0).await?;
        }
        Ok(())
    })
    .await;
}
