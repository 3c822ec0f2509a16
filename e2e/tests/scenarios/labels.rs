//! Labels of a real Node: those that the page promises, an owner's left alone, none when kerf has gone.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kerf_e2e::{NodeFile, World, deploy, eventually, scenario};
use kube::{Api, ResourceExt as _};

const PATIENCE: Duration = Duration::from_secs(60);

type Labels = BTreeMap<String, String>;

/// The first table of `docs/labels.md`: keys, and their values on a node with two H100.
fn documented() -> Result<Labels> {
    let text = std::fs::read_to_string(deploy().join("../docs/labels.md"))?;
    let (_, rest) = text.split_once("<!-- node:begin -->").context("the table has a mark before it")?;
    let (rows, _) = rest.split_once("<!-- node:end -->").context("and one behind it")?;
    let cell = |cell: &str| cell.trim().trim_matches('`').to_owned();
    let rows = rows.lines().filter(|line| line.starts_with("| `"));
    Ok(rows.filter_map(|row| Some((cell(row.split('|').nth(1)?), cell(row.split('|').nth(2)?)))).collect())
}

async fn found(world: &World) -> Result<Labels> {
    let node = Api::<Node>::all(world.client.clone()).get_metadata(&world.cluster.node()?.name).await?;
    Ok(node
        .labels()
        .iter()
        .filter(|(key, _)| key.starts_with("nvidia.com/"))
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect())
}

async fn until(world: &World, what: &str, wanted: &Labels) -> Result<()> {
    eventually(what, PATIENCE, async || {
        let found = found(world).await?;
        ensure!(found == *wanted, "{found:#?}");
        Ok(Some(()))
    })
    .await
}

#[tokio::test]
async fn a_node_has_the_labels_of_feature_discovery_and_loses_them() {
    scenario("labels", NodeFile::new().gpus("h100-80gb", 2), async |world| {
        let mut wanted = documented()?;
        if !world.cluster.has_partitions()? {
            wanted.remove("nvidia.com/mig.strategy");
        }
        until(world, "the Node has the labels of the page", &wanted).await?;

        // Somebody takes a key for their own, and gives it up again.
        let (node, key) = (world.cluster.node()?.name.clone(), "nvidia.com/gpu.family");
        world.cluster.kubectl(&["label", "node", &node, "--overwrite", &format!("{key}=mine")])?;
        let generation = async || -> Result<Option<String>> {
            Ok(Api::<Node>::all(world.client.clone()).get_metadata(&node).await?.metadata.managed_fields.map(
                |fields| {
                    let ours = fields.iter().filter(|entry| entry.manager.as_deref() == Some("kerf-controller-labels"));
                    format!("{:?}", ours.map(|entry| &entry.fields_v1).collect::<Vec<_>>())
                },
            ))
        };
        eventually("the key is no longer kerf's", PATIENCE, async || {
            Ok(generation().await?.is_some_and(|fields| !fields.contains("gpu.family")).then_some(()))
        })
        .await?;
        let theirs = Labels::from_iter([(key.to_owned(), "mine".to_owned())]);
        let kept: Labels = wanted.clone().into_iter().chain(theirs.clone()).collect();
        until(world, "an owner's label is left alone", &kept).await?;
        world.cluster.kubectl(&["label", "node", &node, &format!("{key}-")])?;
        until(world, "a key that nobody has is kerf's", &wanted).await?;
        world.cluster.kubectl(&["label", "node", &node, "nvidia.com/gpu.count-"])?;
        until(world, "what is deleted comes back", &wanted).await?;

        // Gone with kerf, but for what is not kerf's.
        world.cluster.kubectl(&["label", "node", &node, "--overwrite", &format!("{key}=mine")])?;
        world.kerf.uninstall().await?;
        let left = found(world).await;
        world.cluster.kubectl(&["label", "node", &node, &format!("{key}-")])?;
        let left = left?;
        ensure!(left == theirs, "{left:?}");
        world.kerf.install(world.simulation.root()).await?;
        world.kerf.registered().await?;
        until(world, "back with kerf", &wanted).await?;
        // Switched off, they are taken away.
        world.kerf.upgrade(&["--set", "nodeLabels.enabled=false"])?;
        until(world, "none where they are switched off", &Labels::new()).await?;
        world.kerf.rolled_out(kerf_e2e::Part::Controller).await?;
        world.published().await.map(drop)
    })
    .await;
}
