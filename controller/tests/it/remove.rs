//! Removal against an API server in memory, beside a candidate that leads.

use std::time::Duration;

use kerf_controller::classes::class;
use kerf_controller::features::Counters;
use kerf_controller::remove::{RemoveError, remove};
use serde_json::json;

use crate::api_server::ApiServer;
use crate::fixtures::{DRIVER, node};
use crate::leader::{Memory, start};

fn labelled(uid: &str, keys: &[&str]) -> serde_json::Value {
    let fields: serde_json::Map<_, _> = keys.iter().map(|key| (format!("f:{key}"), json!({}))).collect();
    let mut labels: serde_json::Map<_, _> = keys.iter().map(|key| ((*key).to_owned(), json!("1"))).collect();
    labels.insert("nvidia.com/gpu.deploy.operands".into(), json!("true"));
    json!({
        "name": uid, "uid": uid, "labels": labels,
        "managedFields": [{
            "manager": "kerf-controller-labels", "operation": "Apply", "fieldsV1": {"f:metadata": {"f:labels": fields}},
        }],
    })
}

#[tokio::test(start_paused = true)]
async fn what_would_stay_is_removed_and_nobody_puts_it_back() {
    let server = ApiServer::new(Counters::Separate);
    server.state().nodes.insert("n".into(), labelled("n", &["nvidia.com/gpu.count", "nvidia.com/gpu.present"]));
    server.state().nodes.insert("m".into(), labelled("m", &[]));
    let mut admins = class(DRIVER, "2g.20gb", None);
    admins.metadata.labels = None;
    for (name, class) in [
        ("ours", class(DRIVER, "1g.10gb", None)),
        ("another-drivers", class("gpu.test.example", "1g.10gb", None)),
        ("admins", admins),
    ] {
        let mut class = class;
        class.metadata.name = Some(name.into());
        server.state().classes.insert(name.into(), class);
    }
    let lease = Memory::default();
    let mut leader = start(&lease, "leader", jiff::Timestamp::now);
    leader.leads(Duration::from_secs(1)).await;

    remove(&server.client(), DRIVER, &lease).await.unwrap();

    {
        let state = server.state();
        assert_eq!(state.nodes["n"]["labels"], json!({"nvidia.com/gpu.deploy.operands": "true"}));
        assert_eq!(state.classes.keys().collect::<Vec<_>>(), ["admins", "another-drivers"]);
        assert_eq!(state.writes, ["label n", "delete ours"]);
    }
    leader.follows(Duration::from_secs(5)).await;
    // Another kerf is installed: it need not wait.
    let mut next = start(&lease, "next", jiff::Timestamp::now);
    next.leads(Duration::from_millis(1)).await;
}

/// A trial on other nodes goes, and the kerf of the others keeps its labels.
#[tokio::test(start_paused = true)]
async fn nodes_of_another_kerf_keep_their_labels() {
    let server = ApiServer::new(Counters::Separate);
    for name in ["ours", "theirs"] {
        server.state().nodes.insert(name.into(), labelled(name, &["nvidia.com/gpu.count"]));
    }
    let mut theirs = node("theirs", Vec::new());
    theirs.status.as_mut().unwrap().driver_name = "gpu.test.example".into();
    server.state().gpu_nodes = Some(vec![node("ours", Vec::new()), theirs]);
    remove(&server.client(), DRIVER, &Memory::default()).await.unwrap();
    assert_eq!(server.state().writes, ["label ours"]);
}

#[tokio::test(start_paused = true)]
async fn labels_go_after_the_gpu_nodes() {
    let server = ApiServer::new(Counters::Separate);
    server.state().nodes.insert("n".into(), labelled("n", &["nvidia.com/gpu.count"]));
    server.state().gpu_nodes = None;
    remove(&server.client(), DRIVER, &Memory::default()).await.unwrap();
    assert_eq!(server.state().writes, ["label n"]);
}

#[tokio::test(start_paused = true)]
async fn a_kerf_that_was_installed_after_a_removal_is_removed_as_well() {
    let server = ApiServer::new(Counters::Separate);
    let lease = Memory::default();
    remove(&server.client(), DRIVER, &lease).await.unwrap();
    let mut leader = start(&lease, "leader", jiff::Timestamp::now);
    leader.leads(Duration::from_millis(1)).await;
    remove(&server.client(), DRIVER, &lease).await.unwrap();
    leader.follows(Duration::from_secs(5)).await;
    tokio::time::sleep(kerf_controller::remove::HELD / 2).await;
    assert_eq!(lease.holder().as_deref(), Some(kerf_api::names::REMOVED));
}

/// The one that has never led must not take the second removal for the first.
#[tokio::test(start_paused = true)]
async fn a_replica_that_follows_leaves_the_second_removal_alone() {
    let server = ApiServer::new(Counters::Separate);
    let lease = Memory::default();
    remove(&server.client(), DRIVER, &lease).await.unwrap();
    let (mut one, two) = (start(&lease, "one", jiff::Timestamp::now), start(&lease, "two", jiff::Timestamp::now));
    one.leads(Duration::from_secs(1)).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    remove(&server.client(), DRIVER, &lease).await.unwrap();
    tokio::time::sleep(kerf_controller::remove::HELD / 2).await;
    assert_eq!(lease.holder().as_deref(), Some(kerf_api::names::REMOVED));
    drop((one, two));
}

#[tokio::test(start_paused = true)]
async fn where_kerf_stays_one_leads_again() {
    let server = ApiServer::new(Counters::Separate);
    let lease = Memory::default();
    let mut leader = start(&lease, "leader", jiff::Timestamp::now);
    leader.leads(Duration::from_secs(1)).await;
    remove(&server.client(), DRIVER, &lease).await.unwrap();
    leader.follows(Duration::from_secs(5)).await;
    leader.leads(kerf_controller::remove::HELD + Duration::from_secs(5)).await;
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_removed_is_said() {
    let server = ApiServer::new(Counters::Separate);
    server.state().refuses = Some(403);
    let error = remove(&server.client(), DRIVER, &Memory::default()).await.unwrap_err();
    assert!(matches!(error, RemoveError::Request { .. }) && error.to_string() == "cannot list the Nodes", "{error}");
}
