//! The webhook: asked over TLS as the API server asks, and trusted as the API server is told.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::channel::mpsc::{UnboundedSender, unbounded};
use http::{Request, Response};
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use kerf_controller::metrics::Metrics;
use kerf_controller::webhook::{Identity, Keeper, Webhook, WebhookArgs};
use kerf_telemetry::Readiness;
use kube::client::Body;
use kube::runtime::watcher::Event;
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig, crypto};
use tokio_util::sync::CancellationToken;

const NAME: &str = "kerf-webhook";
const HOST: &str = "kerf-webhook.kerf-system.svc";
const PATIENCE: Duration = Duration::from_secs(20);

/// An API server with one ValidatingWebhookConfiguration: it lists it, and applies patches that are not out of date.
#[derive(Clone)]
struct Server(Arc<Mutex<Stored>>);

struct Stored {
    configuration: Option<Value>,
    /// Answers in a row that are not to be given.
    failures: usize,
    patches: usize,
}

impl Server {
    fn new() -> Server {
        let webhook = |name: &str| {
            json!({
                "name": name, "admissionReviewVersions": ["v1"], "sideEffects": "None",
                "clientConfig": {"service": {"name": NAME, "namespace": "kerf-system"}},
            })
        };
        let configuration = json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": NAME, "resourceVersion": "1"},
            "webhooks": [webhook("resourceclaims.kerf.dev"), webhook("deviceclasses.kerf.dev")],
        });
        Server(Arc::new(Mutex::new(Stored { configuration: Some(configuration), failures: 0, patches: 0 })))
    }

    fn client(&self) -> Client {
        let (service, mut requests) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let server = self.clone();
        tokio::spawn(async move {
            while let Some((request, reply)) = requests.next_request().await {
                let (head, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap();
                if head.uri.query().is_some_and(|query| query.contains("watch=true")) {
                    // Nothing ever happens.
                    tokio::spawn(async move {
                        let _reply = reply;
                        std::future::pending::<()>().await;
                    });
                    continue;
                }
                let (code, answer) = match head.method.as_str() {
                    "GET" => (200, server.list()),
                    _ => server.patch(&serde_json::from_slice(&body).unwrap()),
                };
                let answer = Body::from(serde_json::to_vec(&answer).unwrap());
                reply.send_response(Response::builder().status(code).body(answer).unwrap());
            }
        });
        Client::new(service, "default")
    }

    fn list(&self) -> Value {
        let items: Vec<Value> = self.0.lock().unwrap().configuration.clone().into_iter().collect();
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfigurationList",
            "metadata": {"resourceVersion": "1"}, "items": items,
        })
    }

    fn patch(&self, steps: &Value) -> (u16, Value) {
        let failure =
            |code: u16| (code, json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}));
        let mut stored = self.0.lock().unwrap();
        if stored.failures > 0 {
            stored.failures -= 1;
            return failure(500);
        }
        let configuration = stored.configuration.as_mut().unwrap();
        let version = &configuration["metadata"]["resourceVersion"];
        let pinned = steps.as_array().unwrap().iter().find(|step| step["path"] == "/metadata/resourceVersion").unwrap();
        if pinned["value"] != *version {
            return failure(409);
        }
        let next = version.as_str().unwrap().parse::<u64>().unwrap() + 1;
        for step in steps.as_array().unwrap() {
            let path = step["path"].as_str().unwrap();
            if let Some(webhook) = path.strip_suffix("/caBundle") {
                configuration.pointer_mut(webhook).unwrap()["caBundle"] = step["value"].clone();
            }
        }
        configuration["metadata"]["resourceVersion"] = json!(next.to_string());
        let configuration = configuration.clone();
        stored.patches += 1;
        (200, configuration)
    }

    fn configuration(&self) -> ValidatingWebhookConfiguration {
        serde_json::from_value(self.0.lock().unwrap().configuration.clone().unwrap()).unwrap()
    }

    /// The certificates that each webhook trusts.
    fn bundles(&self) -> Vec<String> {
        let webhooks = self.configuration().webhooks.unwrap();
        let bundle = |bundle: Option<k8s_openapi::ByteString>| String::from_utf8(bundle.unwrap_or_default().0).unwrap();
        webhooks.into_iter().map(|webhook| bundle(webhook.client_config.ca_bundle)).collect()
    }

    fn patches(&self) -> usize {
        self.0.lock().unwrap().patches
    }

    /// Somebody changes the configuration.
    fn change(&self, change: impl FnOnce(&mut Value)) {
        let mut stored = self.0.lock().unwrap();
        let configuration = stored.configuration.as_mut().unwrap();
        change(configuration);
        configuration["metadata"]["resourceVersion"] = json!("1000");
    }
}

/// Waits until it holds. Where time is paused it passes by itself.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A keeper at work on a server, and what a test does to it.
struct Kept {
    server: Server,
    events: UnboundedSender<kube::runtime::watcher::Result<Event<ValidatingWebhookConfiguration>>>,
    serving: watch::Receiver<Arc<ServerConfig>>,
    readiness: Readiness,
    stop: CancellationToken,
}

impl Kept {
    fn start(server: Server, lifetime: Duration) -> Kept {
        let identity = Identity::make(HOST, lifetime).unwrap();
        let (sender, serving) = watch::channel(identity.server.clone());
        let keeper = Keeper {
            api: Api::all(server.client()),
            name: NAME.into(),
            identity,
            renew: Box::new(move || Identity::make(HOST, lifetime)),
            serving: sender,
        };
        let (events, stream) = unbounded();
        let (readiness, stop) = (Readiness::default(), CancellationToken::new());
        let pending = readiness.wait_for("webhook certificate");
        tokio::spawn(keeper.run(stream, Metrics::default(), pending, stop.clone()));
        Kept { server, events, serving, readiness, stop }
    }

    fn tell(&self, event: Event<ValidatingWebhookConfiguration>) {
        self.events.unbounded_send(Ok(event)).unwrap();
    }

    fn list(&self) {
        self.tell(Event::Init);
        self.tell(Event::InitApply(self.server.configuration()));
        self.tell(Event::InitDone);
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

const LONG: Duration = Duration::from_secs(7 * 24 * 3600);

#[tokio::test(start_paused = true)]
async fn ready_when_every_webhook_trusts_the_certificate() {
    let kept = Kept::start(Server::new(), LONG);
    kept.server.0.lock().unwrap().failures = 2;
    assert_eq!(kept.readiness.pending(), ["webhook certificate"]);
    kept.list();
    kept.readiness.ready().await;
    let bundles = kept.server.bundles();
    assert!(bundles.len() == 2 && bundles.iter().all(|bundle| bundle.matches("BEGIN CERTIFICATE").count() == 1));
    assert_eq!(kept.server.patches(), 1, "one write for all of them, and none for what is stored already");
}

#[tokio::test(start_paused = true)]
async fn replicas_leave_room_for_each_other() {
    let server = Server::new();
    let replicas: Vec<Kept> = (0..3).map(|_| Kept::start(server.clone(), LONG)).collect();
    replicas.iter().for_each(Kept::list);
    // All but the first have an old version in hand: what they write is refused until they see the new one.
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        replicas.iter().for_each(|replica| replica.tell(Event::Apply(server.configuration())));
    }
    until("each has its certificate", || server.bundles()[0].matches("BEGIN CERTIFICATE").count() == 3).await;
    for replica in &replicas {
        replica.readiness.ready().await;
    }
    let settled = server.patches();
    replicas.iter().for_each(|replica| replica.tell(Event::Apply(server.configuration())));
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(server.patches(), settled, "nobody writes what is there");
}

#[tokio::test(start_paused = true)]
async fn a_bundle_that_is_wiped_is_filled_again() {
    let kept = Kept::start(Server::new(), LONG);
    kept.list();
    kept.readiness.ready().await;
    let before = kept.server.bundles();
    kept.server.change(|configuration| configuration["webhooks"][1]["clientConfig"]["caBundle"] = json!(null));
    kept.tell(Event::Apply(kept.server.configuration()));
    until("it is back", || kept.server.bundles() == before).await;
}

#[tokio::test(start_paused = true)]
async fn the_next_certificate_is_trusted_before_it_is_served() {
    let mut kept = Kept::start(Server::new(), LONG);
    kept.list();
    kept.readiness.ready().await;
    kept.serving.mark_unchanged();
    tokio::time::sleep(LONG / 2 - Duration::from_secs(1)).await;
    assert_eq!(kept.server.bundles()[0].matches("BEGIN CERTIFICATE").count(), 1, "not before its time");
    until("both are trusted", || kept.server.bundles()[0].matches("BEGIN CERTIFICATE").count() == 2).await;
    assert!(!kept.serving.has_changed().unwrap(), "every API server shall know it first");
    let trusted = Instant::now();
    kept.serving.changed().await.unwrap();
    assert!(trusted.elapsed() >= Duration::from_secs(30), "{:?}", trusted.elapsed());
}

#[tokio::test(start_paused = true)]
async fn nobody_waits_where_nobody_asks() {
    let kept = Kept::start(Server::new(), LONG);
    kept.tell(Event::Init);
    kept.tell(Event::InitDone);
    kept.readiness.ready().await;
    assert_eq!(kept.server.patches(), 0);
    kept.tell(Event::Apply(kept.server.configuration()));
    until("it is filled when it comes", || kept.server.patches() == 1).await;
}

/// A webhook that serves, and who trusts it what the API server was told to trust.
struct Served {
    address: SocketAddr,
    trust: TlsConnector,
    stop: CancellationToken,
}

impl Served {
    async fn start() -> Served {
        let server = Server::new();
        let args = WebhookArgs { webhook_address: Some(([127, 0, 0, 1], 0).into()), webhook_name: NAME.into() };
        let webhook = Webhook::bind(args).await.unwrap().unwrap();
        let (address, readiness, stop) = (webhook.address(), Readiness::default(), CancellationToken::new());
        let pending = readiness.wait_for("webhook certificate");
        let driver = "gpu.nvidia.com".to_owned();
        let (client, namespace, end) = (server.client(), "kerf-system".to_owned(), stop.clone());
        tokio::spawn(async move {
            webhook.run(client, namespace, driver, Metrics::default(), pending, end).await.unwrap();
        });
        readiness.ready().await;
        let mut roots = RootCertStore::empty();
        let bundle = server.bundles().remove(0);
        for certificate in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
            roots.add(certificate.unwrap()).unwrap();
        }
        let config = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        Served { address, trust: TlsConnector::from(Arc::new(config)), stop }
    }

    /// The status and the body that a request gets.
    async fn ask(&self, request: &str, body: &[u8]) -> (u16, String) {
        let tcp = TcpStream::connect(self.address).await.unwrap();
        let mut tls = self.trust.connect(ServerName::try_from(HOST).unwrap(), tcp).await.unwrap();
        let head =
            format!("{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
        tls.write_all(head.as_bytes()).await.unwrap();
        // A server that has heard enough may hang up before everything is sent.
        let _ = tls.write_all(body).await;
        let mut answer = Vec::new();
        let _ = tls.read_to_end(&mut answer).await;
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }
}

#[tokio::test]
async fn a_review_is_answered_over_tls() {
    let served = Served::start().await;
    let parameters =
        json!({"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": {"strategy": "Foo"}});
    let config = json!([{"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}]);
    let review = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "u", "kind": {"group": "resource.k8s.io", "version": "v1", "kind": "ResourceClaim"},
            "object": {"spec": {"devices": {"config": config}}},
        },
    });
    let (status, body) = served.ask("POST /validate?timeout=5s", review.to_string().as_bytes()).await;
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &answer["response"]["uid"], &answer["response"]["allowed"]), (200, &json!("u"), &json!(false)));
    let line = "spec.devices.config[0].opaque.parameters.sharing.strategy: \"Foo\" is not known; use TimeSlicing";
    assert_eq!(answer["response"]["status"]["message"], line);
}

#[tokio::test]
async fn what_else_is_asked_is_turned_away() {
    let served = Served::start().await;
    assert_eq!(served.ask("GET /validate", b"").await, (405, "POST only\n".into()));
    assert_eq!(served.ask("POST /metrics", b"").await, (404, "there is /validate\n".into()));
    let (status, body) = served.ask("POST /validate", b"{}").await;
    assert!(status == 400 && body.starts_with("this is no AdmissionReview of admission.k8s.io/v1: "), "{body}");
    let (status, body) = served.ask("POST /validate", &vec![b' '; 9 << 20]).await;
    assert!(status == 400 && body.starts_with("the body cannot be read: "), "{body}");
}

/// Neither the others nor the end wait for who says nothing.
#[tokio::test]
async fn who_says_nothing_holds_up_nobody() {
    let served = Served::start().await;
    let _silent = TcpStream::connect(served.address).await.unwrap();
    assert_eq!(served.ask("POST /metrics", b"").await.0, 404);
    served.stop.cancel();
    let deadline = Instant::now() + PATIENCE;
    while TcpStream::connect(served.address).await.is_ok() {
        assert!(Instant::now() < deadline, "it still listens");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
