//! What is found out about a server.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceSlice;
use kerf_controller::features::{Counters, ServerFeatures};
use kerf_controller::metrics::Metrics;
use kerf_controller::probe::{keep_probing, probe};
use kerf_telemetry::Readiness;
use kube::Client;
use kube::client::Body;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::api_server::ApiServer;
use crate::fixtures::DRIVER;

#[tokio::test]
async fn each_kind_of_server() {
    for counters in [Counters::None, Counters::Combined, Counters::Separate] {
        for taints in [false, true] {
            let server = ApiServer::new(counters);
            server.state().taints = taints;
            assert_eq!(
                probe(&server.client(), DRIVER).await.unwrap(),
                ServerFeatures { counters, taints, extended_resources: true }
            );
            assert!(server.state().slices.is_empty() && server.state().writes.is_empty(), "nothing is left behind");
        }
    }
}

#[tokio::test]
async fn extended_resources_are_tried_apart() {
    let server = ApiServer::new(Counters::Separate);
    assert!(probe(&server.client(), DRIVER).await.unwrap().extended_resources);
    server.state().extended_resources = false;
    assert!(!probe(&server.client(), DRIVER).await.unwrap().extended_resources);
    assert!(server.state().classes.is_empty(), "nothing is left behind");
}

/// A kubelet may create slices of its node under any name.
#[tokio::test]
async fn a_name_that_is_taken_keeps_nobody_from_trying() {
    let server = ApiServer::new(Counters::Separate);
    server.state().slices.insert(format!("kerf-probe-{DRIVER}"), ResourceSlice::default());
    probe(&server.client(), DRIVER).await.unwrap();
}

/// A refusal to let us try says nothing about counters.
#[tokio::test]
async fn no_answer_is_no_knowledge() {
    for code in [401, 403, 500] {
        let server = ApiServer::new(Counters::Separate);
        server.state().refuses = Some(code);
        assert!(probe(&server.client(), DRIVER).await.is_err());
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_says_nothing_is_asked_again() {
    let (service, mut requests) = tower_test::mock::pair::<http::Request<Body>, http::Response<Body>>();
    let (features, _known) = watch::channel(None);
    let (readiness, stop) = (Readiness::default(), CancellationToken::new());
    let pending = readiness.wait_for("features");
    let (client, doubt) = (Client::new(service, "default"), Arc::new(Notify::new()));
    tokio::spawn(keep_probing(client, DRIVER.into(), features, pending, doubt, Metrics::default(), stop.clone()));
    let _first = requests.next_request().await.unwrap();
    let again = tokio::time::timeout(Duration::from_secs(90), requests.next_request()).await;
    assert!(again.is_ok_and(|request| request.is_some()));
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn knowledge_follows_the_server() {
    let server = ApiServer::new(Counters::None);
    server.state().refuses = Some(503);
    let (features, mut known) = watch::channel(None);
    let (readiness, doubt, stop) = (Readiness::default(), Arc::new(Notify::new()), CancellationToken::new());
    let pending = readiness.wait_for("features");
    let probing = tokio::spawn(keep_probing(
        server.client(),
        DRIVER.into(),
        features,
        pending,
        doubt.clone(),
        Metrics::default(),
        stop.clone(),
    ));
    let minutes = |n: u64| Duration::from_secs(60 * n);

    tokio::time::sleep(minutes(2)).await;
    assert_eq!(*known.borrow(), None);
    assert_eq!(readiness.pending(), ["features"]);
    server.state().refuses = None;
    let wanted = |counters| {
        move |known: &Option<ServerFeatures>| {
            *known == Some(ServerFeatures { counters, taints: true, extended_resources: true })
        }
    };
    known.wait_for(wanted(Counters::None)).await.unwrap();
    readiness.ready().await;

    // A quiet server is tried rarely.
    let before = server.state().dry_runs;
    tokio::time::sleep(minutes(9)).await;
    assert_eq!(server.state().dry_runs, before);

    // Another version is noticed within a minute or so.
    (server.state().version, server.state().counters) = ("v1.36.0", Counters::Separate);
    tokio::time::timeout(minutes(2), known.wait_for(wanted(Counters::Separate))).await.unwrap().unwrap();

    // The same version with other gates: when a watch was interrupted.
    server.state().counters = Counters::Combined;
    doubt.notify_one();
    tokio::time::timeout(Duration::from_secs(5), known.wait_for(wanted(Counters::Combined))).await.unwrap().unwrap();

    server.state().taints = false;
    doubt.notify_one();
    let untainted = |known: &Option<ServerFeatures>| known.is_some_and(|features| !features.taints);
    tokio::time::timeout(Duration::from_secs(5), known.wait_for(untainted)).await.unwrap().unwrap();

    stop.cancel();
    probing.await.unwrap();
}
