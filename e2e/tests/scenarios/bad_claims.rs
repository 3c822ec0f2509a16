//! Claims that cannot be prepared fail alone, with words that help.

use anyhow::{Context, ensure};
use kerf_e2e::{Claim, NodeFile, Part, Request, claim_ref, scenario};
use serde_json::json;

#[tokio::test]
async fn bad_claims_fail_alone_and_say_why() {
    scenario("bad_claims", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        let devices = world.devices().await?;
        let device = devices.iter().find(|name| name.ends_with("-mig-1g10gb-0")).context("published")?.clone();
        let held = devices.iter().find(|name| name.ends_with("-mig-2g20gb-0")).context("published")?.clone();
        let other = devices.iter().find(|name| name.ends_with("-mig-1g10gb-4")).context("published")?.clone();
        let claim = Claim::of(&[Request::mig("gpu", "1g.10gb")]);
        let malformed =
            json!({ "apiVersion": "resource.nvidia.com/v1beta1", "kind": "MigDeviceConfig", "sharring": {} });
        let mut uids = std::collections::BTreeMap::new();
        for (name, device, configs) in [
            ("good", device.as_str(), vec![]),
            ("vanished", "gpu-ff-00-0-mig-1g10gb-0", vec![]),
            ("deleted", other.as_str(), vec![]),
            ("replaced", other.as_str(), vec![]),
            ("malformed", other.as_str(), vec![malformed]),
        ] {
            world.create(&claim.object(name)).await?;
            uids.insert(name, world.allocate(name, &[("gpu", device)], &configs).await?);
        }
        world.create(&claim.object("unallocated")).await?;
        uids.insert("unallocated", world.claim("unallocated").await?.metadata.uid.context("has a UID")?);
        world.cluster.kubectl(&["delete", "resourceclaim", "deleted", "-n", world.namespace()])?;
        uids.insert("replaced", "00000000-0000-4000-8000-000000000000".to_owned());

        let asked: Vec<_> = uids.iter().map(|(name, uid)| claim_ref(world.namespace(), name, uid)).collect();
        let answers = world.kubelet().await?.prepare(asked.clone()).await?;
        ensure!(answers.len() == uids.len(), "one answer a claim: {answers:?}");
        let good = &answers[&uids["good"]];
        ensure!(good.error.is_empty() && good.devices.len() == 1, "{good:?}");
        for (name, words) in [
            ("vanished", "0000:ff:00.0"),
            ("deleted", "does not exist any more"),
            ("replaced", "replaced"),
            ("malformed", "sharring"),
            ("unallocated", "not allocated"),
        ] {
            let answer = &answers[&uids[name]];
            ensure!(answer.devices.is_empty() && answer.error.contains(words), "{name}: {answer:?}");
        }
        world.instances(1).await?;

        // The API gives a device that overlaps a held one to another claim: the node is the last line of defence.
        world.create(&claim.object("thief")).await?;
        let thief = world.allocate("thief", &[("gpu", &held)], &[]).await?;
        let answer = world.kubelet().await?.prepare(vec![claim_ref(world.namespace(), "thief", &thief)]).await?;
        ensure!(answer[&thief].error.contains("good"), "the holder is named: {answer:?}");
        world.instances(1).await?;

        let answers = world.kubelet().await?.unprepare(asked).await?;
        ensure!(answers.len() == uids.len() && answers.values().all(|answer| answer.error.is_empty()), "{answers:?}");
        world.instances(0).await?;
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_malformed_config_is_told_to_the_pods_owner() {
    scenario("malformed_config", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        // With the webhook it would not come to that; without it, or before kerf was installed, it does.
        let off = ["--set", "webhook.enabled=false"];
        world.kerf.expect_end(Part::Controller).await?;
        world.kerf.upgrade(&off)?;
        world.kerf.rolled_out(Part::Controller).await?;
        let parameters = json!({
            "apiVersion": "resource.nvidia.com/v1beta1", "kind": "MigDeviceConfig",
            "sharing": { "strategy": "Nonsense" },
        });
        world.run("wrong", &Claim::of(&[Request::mig("gpu", "1g.10gb")]).config(&parameters)).await?;
        world.run_ready("right", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
        let message = world.event("wrong", "FailedPrepareDynamicResources").await?;
        ensure!(message.contains("Nonsense"), "kubectl describe pod shows kerf's own words: {message}");
        world.delete("wrong").await?;
        world.instances(1).await?;
        Ok(())
    })
    .await;
}
