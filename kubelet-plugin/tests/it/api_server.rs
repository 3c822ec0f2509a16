//! An API server in memory, as far as the plugin uses one: objects by path, and a record of every write.

use std::collections::BTreeMap;
use std::future::IntoFuture as _;
use std::sync::{Arc, Mutex};

use http::{Method, Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::net::TcpListener;

/// All claims of the cluster.
const CLAIMS: &str = "/apis/resource.k8s.io/v1/resourceclaims";

/// The server. Clones are the same.
#[derive(Clone, Default)]
pub(crate) struct ApiServer(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Value>,
    version: u64,
    writes: Vec<String>,
    failing: bool,
    unserved: bool,
}

impl ApiServer {
    /// A client of it.
    pub(crate) fn client(&self) -> Client {
        let (service, mut handle) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let server = self.clone();
        tokio::spawn(async move {
            while let Some((request, answer)) = handle.next_request().await {
                let (parts, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap();
                let (code, object) = server.serve(&parts, &body);
                answer.send_response(Response::builder().status(code).body(Body::from(object)).unwrap());
            }
        });
        Client::new(service, "default")
    }

    /// Serves HTTP, and gives a kubeconfig for it.
    pub(crate) async fn listen(&self) -> Value {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = self.clone();
        let answer = move |request: axum::extract::Request| async move {
            let (parts, body) = request.into_parts();
            let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
            let (code, object) = server.serve(&parts, &body);
            Response::builder().status(code).body(axum::body::Body::from(object)).unwrap()
        };
        tokio::spawn(axum::serve(listener, axum::Router::new().fallback(answer)).into_future());
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": url}}],
            "users": [{"name": "test", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        })
    }

    /// Puts an object at a path.
    pub(crate) fn put(&self, path: &str, object: Value) {
        self.0.lock().unwrap().objects.insert(path.to_owned(), object);
    }

    /// Removes what is at a path.
    pub(crate) fn remove(&self, path: &str) {
        self.0.lock().unwrap().objects.remove(path);
    }

    /// What is at a path.
    pub(crate) fn get(&self, path: &str) -> Option<Value> {
        self.0.lock().unwrap().objects.get(path).cloned()
    }

    /// Everything below a path.
    pub(crate) fn list(&self, prefix: &str) -> Vec<Value> {
        let state = self.0.lock().unwrap();
        state.objects.iter().filter(|(path, _)| path.starts_with(prefix)).map(|(_, object)| object.clone()).collect()
    }

    /// Every write so far, `PATCH /apis/...`.
    pub(crate) fn writes(&self) -> Vec<String> {
        self.0.lock().unwrap().writes.clone()
    }

    /// Whether every request fails from now on.
    pub(crate) fn set_failing(&self, failing: bool) {
        self.0.lock().unwrap().failing = failing;
    }

    /// Whether no API is served from now on, as by an API server that has just started: a 404 that says nothing.
    pub(crate) fn set_unserved(&self, unserved: bool) {
        self.0.lock().unwrap().unserved = unserved;
    }

    fn serve(&self, request: &http::request::Parts, body: &[u8]) -> (u16, Vec<u8>) {
        let content_type = request.headers.get("content-type").map_or("", |value| value.to_str().unwrap());
        let body = serde_json::from_slice(body).unwrap_or(Value::Null);
        let (code, object) = self.answer(&request.method, request.uri.path(), content_type, body);
        (code, serde_json::to_vec(&object).unwrap())
    }

    fn answer(&self, method: &Method, path: &str, content_type: &str, body: Value) -> (u16, Value) {
        let mut state = self.0.lock().unwrap();
        if state.failing {
            // Not one that the client tries again by itself.
            return failure(500, "InternalError");
        }
        if state.unserved {
            return (404, json!("404 page not found"));
        }
        if *method == Method::GET && path == CLAIMS {
            let is_claim = |path: &&String| path.contains("/resourceclaims/");
            let claims: Vec<_> =
                state.objects.keys().filter(is_claim).map(|path| state.objects[path].clone()).collect();
            let kind = json!({"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": {}});
            let mut list = kind;
            list["items"] = Value::Array(claims);
            return (200, list);
        }
        if *method != Method::GET {
            state.writes.push(format!("{method} {path}"));
        }
        let (path, subresource) = match path.strip_suffix("/status") {
            Some(path) => (path, true),
            None => (path, false),
        };
        let path = match *method {
            Method::POST => format!("{path}/{}", body["metadata"]["name"].as_str().unwrap()),
            _ => path.to_owned(),
        };
        let found = state.objects.get(&path).cloned();
        let object = match (method.as_str(), found) {
            ("GET", Some(found)) => return (200, found),
            ("POST", Some(_)) => return failure(409, "AlreadyExists"),
            ("POST", None) => body,
            (_, None) => return failure(404, "NotFound"),
            ("PUT", Some(found)) => {
                if body["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"] {
                    return failure(409, "Conflict");
                }
                body
            }
            ("PATCH", Some(mut found)) => {
                if subresource {
                    assert_eq!(content_type, "application/apply-patch+yaml");
                    assert_eq!(body["metadata"]["uid"], found["metadata"]["uid"]);
                    found["status"] = body["status"].clone();
                } else {
                    assert_eq!(content_type, "application/merge-patch+json");
                    for (name, value) in body.as_object().unwrap() {
                        found[name] = value.clone();
                    }
                }
                found
            }
            (method, _) => panic!("the plugin never does {method}"),
        };
        state.version += 1;
        let mut object = object;
        object["metadata"]["resourceVersion"] = json!(state.version.to_string());
        if object["metadata"]["uid"].is_null() {
            object["metadata"]["uid"] = json!(format!("uid-{}", state.version));
        }
        state.objects.insert(path, object.clone());
        (200, object)
    }
}

fn failure(code: u16, reason: &str) -> (u16, Value) {
    (
        code,
        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": reason, "reason": reason, "code": code}),
    )
}
