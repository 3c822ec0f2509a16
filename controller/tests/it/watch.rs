//! What the index is shown when the API server refuses to show anything.

use std::convert::Infallible;
use std::time::Duration;

use http::{Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame};
use k8s_openapi::api::core::v1::ConfigMap;
use kerf_controller::features::Counters;
use kerf_controller::index::{Feed as _, Index, SharedIndex};
use kerf_controller::liveness::Now;
use kerf_controller::policy::LayoutFile;
use kerf_controller::watch::{Interruption, Start, Unseen, feed};
use kerf_telemetry::Readiness;
use kube::client::Body;
use kube::runtime::watcher::Config;
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::api_server::ApiServer;
use crate::fixtures::{DRIVER, policy};

const WHAT: &str = "the layouts' ConfigMap";

/// What is waited for, and what is said of a policy with a layout, when the layout file was refused with `code` for `time`.
async fn refused(code: u16, unseen: Unseen<LayoutFile>, time: Duration) -> (Vec<&'static str>, String) {
    let server = ApiServer::new(Counters::Separate);
    server.state().refuses = Some(code);
    let index = SharedIndex::new(Index::new(DRIVER, true));
    let layout = policy("p", json!({"offer": "Layout", "layout": {"name": "mixed"}}));
    index.update(|index| index.apply(layout, Now::read()));
    let (readiness, stop) = (Readiness::default(), CancellationToken::new());
    let start = Start { pending: readiness.wait_for(WHAT), unseen };
    let api = Api::<ConfigMap>::namespaced(server.client(), "gone");
    let read = |object: ConfigMap| LayoutFile::read(&object);
    let interrupted = |_: Interruption<'_>| {};
    let feeding = tokio::spawn(feed(index.clone(), api, Config::default(), read, start, interrupted, stop.clone()));
    tokio::time::sleep(time).await;
    let waits = readiness.pending();
    stop.cancel();
    feeding.await.unwrap();
    let mut said = String::new();
    index.update(|index| said.clone_from(&index.reports(Now::read())[0].status.conditions[0].message));
    (waits, said)
}

/// The Role lies in the ConfigMap's namespace: where that is deleted, kerf must go on for everybody else.
#[tokio::test(start_paused = true)]
async fn a_right_that_does_not_come_is_not_waited_for() {
    let forbidden = || Unseen::IfForbidden(LayoutFile::forbidden("gone", "layouts"));
    let (waits, said) = refused(403, forbidden(), Duration::from_secs(60)).await;
    assert!(waits.is_empty(), "{waits:?}");
    assert!(said.contains("the controller has no right to read ConfigMap gone/layouts"), "{said}");
    // Rights that were just granted take a moment.
    let unknown = "there is no layout \"mixed\": there is no layout file";
    assert_eq!(refused(403, forbidden(), Duration::from_secs(2)).await, (vec![WHAT], unknown.to_owned()));
    assert_eq!(refused(500, forbidden(), Duration::from_secs(60)).await, (vec![WHAT], unknown.to_owned()));
}

/// Nothing tells a watch whose connection is dead from a quiet one.
#[tokio::test(start_paused = true)]
async fn a_watch_that_shows_nothing_is_begun_anew() {
    let (service, mut requests) = tower_test::mock::pair::<Request<Body>, Response<BoxBody<Bytes, Infallible>>>();
    let (begun, mut begins) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some((request, reply)) = requests.next_request().await {
            let list = json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": "1"}, "items": []});
            let body = if request.uri().query().unwrap().contains("watch=true") {
                begun.send(request.uri().to_string()).unwrap();
                let nothing = futures::stream::pending::<Result<Frame<Bytes>, Infallible>>();
                BodyExt::boxed(StreamBody::new(nothing))
            } else {
                BodyExt::boxed(Full::new(Bytes::from(list.to_string())))
            };
            reply.send_response(Response::new(body));
        }
    });
    let (readiness, stop) = (Readiness::default(), CancellationToken::new());
    let start = Start { pending: readiness.wait_for(WHAT), unseen: Unseen::Wait };
    let api = Api::<ConfigMap>::namespaced(Client::new(service, "default"), "kerf");
    let read = |object: ConfigMap| LayoutFile::read(&object);
    let index = SharedIndex::new(Index::new(DRIVER, true));
    tokio::spawn(feed(index, api, Config::default(), read, start, |_| {}, stop.clone()));
    begins.recv().await.unwrap();
    let again = tokio::time::timeout(Duration::from_secs(40), begins.recv()).await.unwrap().unwrap();
    assert!(again.contains("timeoutSeconds=30"), "a server that lives ends it before: {again}");
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn what_is_needed_is_waited_for() {
    for code in [403, 404, 500] {
        let (waits, _) = refused(code, Unseen::Wait, Duration::from_secs(60)).await;
        assert_eq!(waits, [WHAT], "{code}");
    }
    let (waits, _) = refused(404, Unseen::NoneIfUnknown, Duration::from_secs(1)).await;
    assert!(waits.is_empty(), "{waits:?}");
    assert_eq!(refused(403, Unseen::NoneIfUnknown, Duration::from_secs(60)).await.0, [WHAT]);
}

/// A controller that runs says the same as one that starts anew, and asks for nothing else because of it.
#[tokio::test(start_paused = true)]
async fn a_right_that_is_lost_is_as_one_that_never_was() {
    let (service, mut requests) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
    let back = Instant::now() + Duration::from_secs(130);
    tokio::spawn(async move {
        let list =
            json!({"apiVersion": "v1", "kind": "ConfigMapList", "metadata": {"resourceVersion": "1"}, "items": []});
        let refusal =
            json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403, "reason": "Forbidden"});
        let (mut answer, mut watches) = (Some(list), Vec::new());
        while let Some((request, reply)) = requests.next_request().await {
            // The right comes back, and nothing has changed meanwhile.
            if Instant::now() > back {
                if request.uri().query().unwrap().contains("watch=true") {
                    watches.push(reply);
                    continue;
                }
                answer = Some(json!({
                    "apiVersion": "v1", "kind": "ConfigMapList", "metadata": {"resourceVersion": "1"},
                    "items": [{"metadata": {"name": "layouts"}, "data": {"config.yaml": "broken"}}],
                }));
            }
            let code = if answer.is_some() { 200 } else { 403 };
            let body = answer.take().unwrap_or_else(|| refusal.clone());
            let body = Body::from(serde_json::to_vec(&body).unwrap());
            reply.send_response(Response::builder().status(code).body(body).unwrap());
        }
    });
    let index = SharedIndex::new(Index::new(DRIVER, true));
    let layout = policy("p", json!({"offer": "Layout", "layout": {"name": "mixed"}}));
    index.update(|index| index.apply(layout, Now::read()));
    let said = || {
        let mut said = String::new();
        index.update(|index| said.clone_from(&index.reports(Now::read())[0].status.conditions[0].message));
        said
    };
    let (readiness, stop) = (Readiness::default(), CancellationToken::new());
    let unseen = Unseen::IfForbidden(LayoutFile::forbidden("gone", "layouts"));
    let start = Start { pending: readiness.wait_for(WHAT), unseen };
    let api = Api::<ConfigMap>::namespaced(Client::new(service, "default"), "gone");
    let read = |object: ConfigMap| LayoutFile::read(&object);
    let (told, mut hears) = mpsc::unbounded_channel();
    let interrupted = move |how: Interruption<'_>| told.send(matches!(how, Interruption::StillRefused(_))).unwrap();
    tokio::spawn(feed(index.clone(), api, Config::default(), read, start, interrupted, stop.clone()));
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(readiness.pending().is_empty() && said().contains("there is no layout file"), "{}", said());
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert!(said().contains("the controller has no right to read ConfigMap gone/layouts"), "{}", said());
    tokio::time::sleep(Duration::from_secs(18)).await;
    assert!(said().contains("cannot be read") && !said().contains("no right"), "{}", said());
    stop.cancel();
    let mut told = Vec::new();
    while let Some(is_old) = hears.recv().await {
        told.push(is_old);
    }
    let news = told.iter().position(|is_old| *is_old).unwrap();
    assert_eq!(news, 1, "it is news once: {told:?}");
    assert!(told.len() > 10, "{told:?}");
}
