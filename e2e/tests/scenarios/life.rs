//! kerf comes, goes and changes its leader, and the pods that use its devices do not notice.

use std::collections::BTreeSet;

use anyhow::{bail, ensure};
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::jiff::SignedDuration;
use kerf_e2e::{Claim, NodeFile, Part, Request, eventually, scenario};
use kube::Api;
use kube::api::DeleteParams;

/// A killed leader's lease runs out 10 s after the other one has seen its last renewal, and that one looks every 2.4 s at the
/// latest.
const TAKEOVER: SignedDuration = SignedDuration::from_secs(15);

/// What Helm leaves of kerf in the cluster, by kind.
const KINDS: &str = "all,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings,deviceclasses,\
                     validatingadmissionpolicies,validatingadmissionpolicybindings,poddisruptionbudgets,configmaps,\
                     validatingwebhookconfigurations,networkpolicies,secrets,services,jobs,crds";

#[tokio::test]
async fn kerf_is_removed_and_installed_again_under_running_pods() {
    scenario("reinstall", NodeFile::new().gpus("h100-80gb", 2), async |world| {
        world.run_ready("slice", &Claim::of(&[Request::mig("gpu", "3g.40gb")])).await?;
        world.run_ready("whole", &Claim::of(&[Request::gpu("gpu")])).await?;
        let before = world.mig_uuids("slice", "main")?;

        world.kerf.uninstall().await?;
        let arguments =
            ["get", KINDS, "--all-namespaces", "--output=name", "--selector=app.kubernetes.io/instance=kerf"];
        let left = world.cluster.kubectl(&arguments)?;
        let crds = ["gpunodes", "gpupolicies"]
            .map(|kind| format!("customresourcedefinition.apiextensions.k8s.io/{kind}.kerf.dev"));
        ensure!(left.lines().eq(&crds), "{left}");
        for pod in ["slice", "whole"] {
            world.undisturbed(pod).await?;
        }

        world.kerf.install(world.simulation.root()).await?;
        world.kerf.registered().await?;
        world.published().await?;
        for pod in ["slice", "whole"] {
            world.undisturbed(pod).await?;
        }
        ensure!(world.mig_uuids("slice", "main")? == before, "the slice is the one it was");
        world.kerf.test()?;
        world.run_ready("beside", &Claim::of(&[Request::mig("gpu", "1g.10gb")])).await?;
        for pod in ["slice", "whole", "beside"] {
            world.delete(pod).await?;
        }
        world.nothing_is_left().await
    })
    .await;
}

#[tokio::test]
async fn a_killed_leader_is_replaced() {
    scenario("leader_killed", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        world.kerf.rolled_out(Part::Controller).await?;
        let slices = world.published().await?;
        world.kerf.kill_leader().await?;
        let killed = world.kerf.lead().await?;
        let api: Api<ResourceSlice> = Api::all(world.client.clone());
        let name = slices.first().and_then(|slice| slice.metadata.name.clone()).unwrap_or_default();
        api.delete(&name, &DeleteParams::default()).await?;
        eventually("the other controller writes the slice again", world.patience, async || {
            let now = world.slices().await?;
            let names = |slices: &[ResourceSlice]| -> BTreeSet<_> {
                slices.iter().filter_map(|slice| slice.metadata.name.clone()).collect()
            };
            Ok((names(&now) == names(&slices)).then_some(()))
        })
        .await?;
        let next = world.kerf.lead().await?;
        ensure!(next.holder_identity != killed.holder_identity, "{next:?} after {killed:?}");
        let (Some(renewed), Some(acquired)) = (&killed.renew_time, &next.acquire_time) else {
            bail!("{next:?} after {killed:?}")
        };
        let took = acquired.0.duration_since(renewed.0);
        ensure!(took <= TAKEOVER, "{took:?}: {next:?} after {killed:?}");
        Ok(())
    })
    .await;
}
