//! The whole program before an API server that has nothing, or is not there.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;

const PATIENCE: Duration = Duration::from_secs(30);

/// A running program.
pub(crate) struct Controller {
    process: Child,
    log: PathBuf,
    _directory: TempDir,
}

impl Controller {
    /// Starts it, with the API server at `api_server`.
    pub(crate) fn start(http_address: &str, api_server: SocketAddr) -> Controller {
        let directory = tempfile::tempdir().unwrap();
        let (log, kubeconfig) = (directory.path().join("log"), directory.path().join("kubeconfig"));
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": format!("http://{api_server}")}}],
            "users": [{"name": "test", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "current-context": "test",
        });
        std::fs::write(&kubeconfig, config.to_string()).unwrap();
        let process = Command::new(env!("CARGO_BIN_EXE_kerf-controller"))
            .args(["--identity", "test", "--log-format", "json", "--http-address", http_address, "--kubeconfig"])
            .arg(&kubeconfig)
            .env_remove("RUST_LOG")
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        Controller { process, log, _directory: directory }
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    pub(crate) fn until<T>(&self, what: &str, mut holds: impl FnMut(&str) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let log = self.log();
            if let Some(found) = holds(&log) {
                return found;
            }
            assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}: {log}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.process.wait().unwrap()
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// An API server that has nothing of any kind, never sees a change, and keeps the lease of the controllers.
#[derive(Clone, Default)]
struct Empty(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// The last parts of the paths that nobody may read.
    forbidden: BTreeSet<&'static str>,
    lease: Option<Value>,
    /// How often each path was asked for.
    asked: BTreeMap<String, usize>,
}

type Answer = Response<BoxBody<Bytes, Infallible>>;

impl Empty {
    /// Serves it as long as the test runs.
    fn start() -> (Empty, SocketAddr) {
        let server = Empty::default();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let (address, serving) = (listener.local_addr().unwrap(), server.clone());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        std::thread::spawn(move || runtime.block_on(serving.serve(listener)));
        (server, address)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    async fn serve(self, listener: std::net::TcpListener) {
        let listener = TcpListener::from_std(listener).unwrap();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let server = self.clone();
            let service = service_fn(move |request| {
                let server = server.clone();
                async move { Ok::<_, Infallible>(server.answer(request).await) }
            });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    }

    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let (head, body) = request.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let mut state = self.state();
        let path = head.uri.path();
        *state.asked.entry(path.to_owned()).or_default() += 1;
        let last = path.rsplit('/').next().unwrap();
        if state.forbidden.contains(last) {
            return json_of(403, &json!({"kind": "Status", "status": "Failure", "message": "no", "code": 403}));
        }
        let watched = head.uri.query().is_some_and(|query| query.contains("watch=true"));
        match (&head.method, last) {
            (&Method::GET, "version") => json_of(
                200,
                &json!({
                    "major": "1", "minor": "37", "gitVersion": "v1.37.2", "gitCommit": "", "gitTreeState": "",
                    "buildDate": "", "goVersion": "", "compiler": "", "platform": "",
                }),
            ),
            (&Method::GET, "kerf-controller") => match &state.lease {
                Some(lease) => json_of(200, lease),
                None => {
                    json_of(404, &json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}))
                }
            },
            (&Method::GET, _) if watched => {
                let nothing = futures::stream::pending::<Result<Frame<Bytes>, Infallible>>();
                Response::new(BodyExt::boxed(StreamBody::new(nothing)))
            }
            (&Method::GET, _) => {
                let metadata = json!({"resourceVersion": "1"});
                json_of(200, &json!({"apiVersion": "v1", "kind": "List", "metadata": metadata, "items": []}))
            }
            (&Method::POST | &Method::PUT, "leases" | "kerf-controller") => {
                let lease: Value = serde_json::from_slice(&body).unwrap();
                state.lease = Some(lease.clone());
                json_of(200, &lease)
            }
            // What is tried.
            _ => json_of(201, &serde_json::from_slice(&body).unwrap()),
        }
    }
}

fn json_of(code: u16, value: &Value) -> Answer {
    let body = Full::new(Bytes::from(value.to_string()));
    Response::builder().status(code).body(BodyExt::boxed(body)).unwrap()
}

/// It would write nothing, and keep one that can work from it.
#[test]
fn who_has_not_seen_everything_does_not_lead() {
    let (server, address) = Empty::start();
    server.state().forbidden.insert("nodes");
    let controller = Controller::start("127.0.0.1:0", address);
    controller.until("several tries", |_| (server.state().asked.get("/api/v1/nodes")? >= &4).then_some(()));
    assert_eq!(server.state().lease, None);
    server.state().forbidden.clear();
    controller.until("a leader", |_| server.state().lease.clone());
}
