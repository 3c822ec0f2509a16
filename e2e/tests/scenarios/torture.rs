//! Many pods, and everything that serves them killed again and again: at the end nothing is left and no pod hangs.

use std::time::Duration;

use anyhow::{Result, ensure};
use kerf_e2e::{Claim, NodeFile, Part, Request, World, eventually, scenario, setting};
use kube::api::{DeleteParams, ListParams};

/// Pods in all, `KERF_TORTURE_PODS` of `make torture`; a short run otherwise.
const PODS: usize = 24;

/// Pods that are there at the same time, some of them waiting for room.
const CROWD: usize = 14;

/// The kubelet tries again after one to two minutes, more than once if it is killed in between.
const PATIENCE: Duration = Duration::from_secs(400);

const PROFILES: [&str; 6] = ["1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"];

/// Reproducible chance (splitmix64).
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((mixed ^ (mixed >> 31)) % bound as u64).unwrap_or_default()
    }
}

#[tokio::test]
async fn pods_come_and_go_while_everything_is_killed() {
    scenario("torture", NodeFile::new().gpus("h100-80gb", 4), async |world| {
        let pods = setting("KERF_TORTURE_PODS", PODS)?;
        let seed = setting("KERF_SEED", 1)?;
        println!("torture: {pods} pods, seed {seed}");
        let mut chance = Chance(u64::try_from(seed)?);
        let mut live: Vec<String> = Vec::new();
        for number in 0..pods {
            let name = format!("pod-{number}");
            let request = match chance.below(8) {
                0 => Request::gpu("gpu"),
                _ => Request::mig("gpu", PROFILES[chance.below(PROFILES.len())]),
            };
            world.run(&name, &Claim::of(&[request])).await?;
            live.push(name);
            if live.len() >= CROWD || chance.below(3) == 0 {
                let victim = live.swap_remove(chance.below(live.len()));
                world.pods().delete(&victim, &DeleteParams::default()).await?;
            }
            if number % 6 == 5 {
                strike(world, chance.below(4)).await?;
            }
        }
        world.kerf.registered().await?;
        world.published().await?;
        for name in live {
            world.pods().delete(&name, &DeleteParams::default()).await?;
        }
        eventually("no pod hangs", PATIENCE, async || {
            let left = world.pods().list(&ListParams::default()).await?.items;
            ensure!(left.is_empty(), "{:?}", left.iter().map(|pod| &pod.metadata.name).collect::<Vec<_>>());
            Ok(Some(()))
        })
        .await?;
        world.nothing_is_left().await
    })
    .await;
}

/// Kills one of those that serve pods, and starts it again.
async fn strike(world: &mut World, whom: usize) -> Result<()> {
    match whom {
        0 => {
            println!("torture: the plugin is killed");
            world.kerf.kill(Part::KubeletPlugin).await?;
            world.kerf.renew(Part::KubeletPlugin).await?;
        }
        1 => {
            println!("torture: both controllers are killed");
            world.kerf.kill(Part::Controller).await?;
            world.kerf.renew(Part::Controller).await?;
        }
        _ => {
            let component = ["kubelet", "containerd"][whom % 2];
            println!("torture: {component} is killed");
            world.cluster.tool(&["kill", component])?;
            world.cluster.tool(&["start", component])?;
        }
    }
    world.kerf.check().await
}
