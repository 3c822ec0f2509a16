//! The policies' steward against an API server in memory, in simulated time.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use kerf_controller::features::Counters;
use kerf_controller::index::{Feed, Index, SharedIndex};
use kerf_controller::liveness::Now;
use kerf_controller::metrics::Metrics;
use kerf_controller::policy::{Policy, Steward};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::api_server::ApiServer;
use crate::fixtures::{DRIVER, NODE_UID, core_node, gpu, lease, node, policy};

struct World {
    server: ApiServer,
    index: SharedIndex,
    leading: watch::Sender<bool>,
}

impl World {
    fn new(leads: bool) -> World {
        let server = ApiServer::new(Counters::Separate);
        let index = SharedIndex::new(Index::new(DRIVER, true));
        let leading = watch::Sender::new(leads);
        let steward = Steward {
            client: server.client(),
            index: index.clone(),
            leading: leading.subscribe(),
            metrics: Metrics::default(),
        };
        tokio::spawn(steward.run(CancellationToken::new()));
        let world = World { server, index, leading };
        world.see(core_node("n", NODE_UID));
        world.see(node("n", vec![gpu("h100-80gb", 1)]));
        world.see(lease("n", "plugin", Timestamp::now()));
        world
    }

    fn see<T>(&self, object: T)
    where
        Index: Feed<T>,
    {
        self.index.update(|index| index.apply(object, Now::read()));
    }

    /// What was patched until now, after some time.
    async fn patches(&self, seconds: u64) -> Vec<(String, Value)> {
        for _ in 0..seconds {
            sleep(Duration::from_secs(1)).await;
            let mut leader = lease("", "test", Timestamp::now());
            leader.metadata.name = Some(kerf_api::names::CONTROLLER.into());
            self.index.update(|index| Feed::<Lease>::apply(index, leader, Now::read()));
        }
        std::mem::take(&mut self.server.state().patches)
    }

    /// The watches show what was patched.
    fn show(&self, patches: &[(String, Value)], rule: &Policy) {
        for (path, patch) in patches {
            if path.starts_with("gpunodes/") {
                let mut shown = node("n", vec![gpu("h100-80gb", 1)]);
                shown.spec = serde_json::from_value(patch[1]["value"].clone()).unwrap();
                self.see(shown);
            } else {
                self.see(Policy { status: serde_json::from_value(patch["status"].clone()).unwrap(), ..rule.clone() });
            }
        }
    }
}

fn rule() -> Policy {
    policy("p", json!({"offer": "WholeOnly", "foreignInstances": "Adopt"}))
}

#[tokio::test(start_paused = true)]
async fn nodes_and_authors_are_told_once() {
    let world = World::new(true);
    let patches = world.patches(40).await;
    assert_eq!(patches.len(), 1);
    let open = json!({"gpus": {"gpu-01-00-0": {}}});
    assert_eq!(patches[0].1[1]["value"], open, "without a policy: that nothing is wanted of the GPU");
    world.show(&patches, &rule());
    world.see(rule());
    let patches = world.patches(2).await;
    let paths: Vec<&str> = patches.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(paths, ["gpunodes/n", "gpupolicies/p/status"]);
    assert_eq!(
        patches[0].1,
        json!([
            {"op": "test", "path": "/metadata/uid", "value": "uid-of-gpunode-n"},
            {"op": "add", "path": "/spec", "value":
                {"gpus": {"gpu-01-00-0": {"migMode": "Disabled", "foreignInstances": "Adopt"}}}},
        ])
    );
    assert_eq!(patches[1].1["metadata"], json!({"name": "p", "uid": "uid-of-p"}));
    assert_eq!(patches[1].1["status"]["nodesMatched"], 1);
    assert_eq!(world.patches(20).await, [], "the watch is late");
    world.show(&patches, &rule());
    assert_eq!(world.patches(100).await, [], "a quiet cluster");

    world.index.update(|index| index.delete(rule(), Now::read()));
    let patches = world.patches(2).await;
    assert_eq!(patches.len(), 1);
    assert_eq!(patches[0].1[1]["value"], open, "what is not wished for any more is taken back");
}

/// An older CustomResourceDefinition drops what it does not know: that is no reason to write for ever.
#[tokio::test(start_paused = true)]
async fn what_is_dropped_is_written_once_a_minute() {
    let world = World::new(true);
    world.see(rule());
    let patches = world.patches(180).await;
    assert!((4..=8).contains(&patches.len()), "{} patches", patches.len());
}

#[tokio::test(start_paused = true)]
async fn failures_are_tried_again() {
    let world = World::new(true);
    world.server.state().refuses = Some(500);
    world.see(rule());
    assert_eq!(world.patches(8).await, []);
    world.server.state().refuses = None;
    assert_eq!(world.patches(8).await.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn only_the_leader_writes() {
    let world = World::new(false);
    world.see(rule());
    assert_eq!(world.patches(60).await, []);
    world.leading.send_replace(true);
    assert_eq!(world.patches(2).await.len(), 2);
    world.leading.send_replace(false);
    world.see(policy("q", json!({"offer": "Nothing"})));
    assert_eq!(world.patches(60).await, []);
}
