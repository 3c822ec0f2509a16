//! Quotas of tenants for slices that nobody has cut yet: by class, and by extended resource.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use k8s_openapi::api::core::v1::{Pod, ResourceQuota};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kerf_e2e::{Claim, NodeFile, Request, World, deploy, eventually, scenario};
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};

use crate::extended::{container, pod, served};

const PATIENCE: Duration = Duration::from_secs(60);

const TENANTS: [&str; 3] = ["team-a", "team-b", "team-c"];

#[tokio::test]
async fn a_tenants_slice_too_many_is_refused() {
    scenario("quota", NodeFile::new().gpus("h100-80gb", 1), async |world| {
        let by_resource = served(world).await?;
        world.apply(&std::fs::read_to_string(deploy().join("samples/quotas.yaml"))?)?;
        for tenant in TENANTS {
            world.cluster.kubectl(&["label", "namespace", tenant, "kerf.dev/e2e=true"])?;
            used(world, tenant, |used| used.as_object().is_some_and(|used| !used.is_empty())).await?;
        }
        by_class(world).await?;
        if by_resource {
            by_extended_resource(world).await?;
            what_counts_nothing(world).await?;
        }
        Ok(())
    })
    .await;
}

/// Waits until a tenant's quota says of itself what it should.
async fn used(world: &World, tenant: &str, as_it_should: impl Fn(&Value) -> bool) -> Result<Value> {
    let api: Api<ResourceQuota> = Api::namespaced(world.client.clone(), tenant);
    eventually(&format!("the quota of {tenant} is counted"), PATIENCE, async || {
        let status = api.get(&format!("gpu-quota-{tenant}")).await?.status.unwrap_or_default();
        let used = serde_json::to_value(status.used)?;
        ensure!(as_it_should(&used), "{used}");
        Ok(Some(used))
    })
    .await
}

/// The API server's words when it refuses for want of quota.
fn refusal<T: std::fmt::Debug>(answer: kube::Result<T>) -> Result<String> {
    match answer {
        Err(kube::Error::Api(status)) if status.code == 403 => Ok(status.message.clone()),
        other => bail!("not refused: {other:?}"),
    }
}

async fn by_class(world: &World) -> Result<()> {
    let api: Api<ResourceClaim> = Api::namespaced(world.client.clone(), "team-c");
    let create = async |name: &str, class: &str| {
        let claim: ResourceClaim = serde_json::from_value(Claim::of(&[Request::class("gpu", class)]).object(name))
            .expect("the manifest is one of a claim");
        api.create(&PostParams::default(), &claim).await
    };
    for slice in ["first", "second", "third"] {
        create(slice, "mig-1g.10gb.nvidia.com").await?;
    }
    let words = refusal(create("fourth", "mig-1g.10gb.nvidia.com").await)?;
    let key = "mig-1g.10gb.nvidia.com.deviceclass.resource.k8s.io/devices";
    ensure!(
        words.contains("exceeded quota: gpu-quota-team-c") && words.contains(&format!("limited: {key}=3")),
        "{words}"
    );
    for class in ["mig.nvidia.com", "gpu.nvidia.com", "mig-3g.40gb.nvidia.com", "mig-7g.80gb.nvidia.com"] {
        let words = refusal(create("around", class).await)?;
        ensure!(words.contains(&format!("{class}.deviceclass.resource.k8s.io/devices=1")), "{words}");
    }
    Ok(())
}

async fn by_extended_resource(world: &World) -> Result<()> {
    let tenant = "team-b";
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), tenant);
    let create = async |name: &str, resource: &str| {
        let manifest = pod(name, &[container("main", &[(resource, 1)])]);
        pods.create(&PostParams::default(), &serde_json::from_value(manifest).expect("the manifest is one of a pod"))
            .await
    };
    for name in ["first", "second"] {
        create(name, "nvidia.com/mig-3g.40gb").await?;
        let wait = ["wait", "-n", tenant, "--for=condition=Ready", "--timeout=60s", &format!("pod/{name}")];
        world.cluster.kubectl(&wait)?;
    }
    world.instances(2).await?;
    let key = "requests.nvidia.com/mig-3g.40gb";
    let words = refusal(create("third", "nvidia.com/mig-3g.40gb").await)?;
    ensure!(
        words.contains("exceeded quota: gpu-quota-team-b") && words.contains(&format!("limited: {key}=2")),
        "{words}"
    );
    // A profile as large as the GPU, or another of the same size, is no way around.
    for profile in ["mig-7g.80gb", "mig-4g.40gb"] {
        let words = refusal(create("around", &format!("nvidia.com/{profile}")).await)?;
        ensure!(words.contains(&format!("limited: requests.nvidia.com/{profile}=0")), "{words}");
    }
    // The claims that the scheduler has made for the pods are not counted beside them, and a claim of the tenant's own is.
    used(world, tenant, |used| used[key] == "2").await?;
    let claims: Api<ResourceClaim> = Api::namespaced(world.client.clone(), tenant);
    // The API server of 1.34 counts pods alone by the name of an extended resource.
    let counted = world.cluster.minor()? >= 35;
    for (class, said) in [
        ("mig-3g.40gb.nvidia.com", format!("used: {key}=2")),
        ("mig-7g.80gb.nvidia.com", "limited: requests.nvidia.com/mig-7g.80gb=0".to_owned()),
    ]
    .into_iter()
    .filter(|_| counted)
    {
        let own = Claim::of(&[Request::class("gpu", class)]).object("own");
        let words = refusal(claims.create(&PostParams::default(), &serde_json::from_value(own)?).await)?;
        ensure!(words.contains(&said), "{words}");
    }
    pods.delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
    used(world, tenant, |used| used[key] == "0").await?;
    world.instances(0).await.map(drop)
}

/// Kubernetes takes a limit of an extended resource into a quota, and counts nothing by it.
async fn what_counts_nothing(world: &World) -> Result<()> {
    let quota = |hard: Value| {
        let metadata = json!({ "name": "limits" });
        json!({ "apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": { "hard": hard } })
            .to_string()
    };
    let plus = world.apply(&quota(json!({ "requests.nvidia.com/mig-1g.10gb+me": "1" })));
    let words = plus.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(words.contains("requests.nvidia.com/mig-1g.10gb+me"), "a plus is refused: {words}");
    let hard = json!({ "requests.nvidia.com/gpu": "1", "limits.nvidia.com/gpu": "0", "nvidia.com/gpu": "0" });
    world.apply(&quota(hard))?;
    let api: Api<ResourceQuota> = Api::namespaced(world.client.clone(), world.namespace());
    let used = eventually("the quota is counted", PATIENCE, async || {
        let status = api.get("limits").await?.status.unwrap_or_default();
        Ok(status.used.filter(|used| used.contains_key("requests.nvidia.com/gpu")))
    })
    .await?;
    ensure!(used.len() == 1, "{used:?}");
    world.create(&pod("whole", &[container("main", &[("nvidia.com/gpu", 1)])])).await?;
    world.ready("whole").await
}
