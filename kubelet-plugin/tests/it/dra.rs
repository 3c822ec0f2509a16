//! The DRA service over a real socket, with claims from an API server in memory and a carver that does as it is told.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kerf_kubelet_plugin::claim::ApiClaims;
use kerf_kubelet_plugin::dra::{Carver, Dra};
use kerf_kubelet_plugin::engine::{Claim, PreparedDevice};
use kerf_kubelet_plugin::events::{self, EventWriter};
use kerf_kubelet_plugin::failure::{Class, Failure};
use kerf_kubelet_plugin::metrics::Metrics;
use kerf_kubelet_plugin::paths::Paths;
use kerf_kubelet_plugin::registration::{self, KubeletVerdict};
use kerf_kubelet_plugin::socket;
use kerf_proto::dra::v1::dra_plugin_client::DraPluginClient as V1;
use kerf_proto::dra::v1::{self, Device, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
use kerf_proto::dra::v1beta1::dra_plugin_client::DraPluginClient as V1beta1;
use kerf_proto::registration::InfoRequest;
use kerf_proto::registration::registration_client::RegistrationClient;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tonic::transport::Server;

use crate::api_server::ApiServer;
use crate::rpc::{self, Serving};

const PATIENCE: Duration = Duration::from_secs(20);

/// Prepares whatever it gets, unless the claim's name says otherwise.
struct Stub {
    /// Told when a claim named `hangs` has come in.
    hanging: mpsc::UnboundedSender<()>,
    /// A claim named `hangs` goes on when this is unlocked.
    gate: Mutex<()>,
    unprepared: Mutex<Vec<String>>,
}

impl Carver for Stub {
    fn prepare(&self, claim: &Claim, deadline: Instant) -> Result<Vec<PreparedDevice>, Failure> {
        let left = deadline.saturating_duration_since(Instant::now());
        assert!(left < Duration::from_secs(45), "the kubelet waits no longer");
        match claim.name.as_str() {
            "fails" => return Err(failure("the GPU is on fire:\npour water on it")),
            "panics" => panic!("a defect"),
            "hangs" => {
                self.hanging.send(()).unwrap();
                drop(self.gate.lock().unwrap());
            }
            _ => {}
        }
        let prepared = |device: &kerf_kubelet_plugin::engine::AllocatedDevice| PreparedDevice {
            requests: vec![device.request.clone()],
            pool: device.pool.clone(),
            device: device.device.clone(),
            cdi_ids: vec![format!("k8s.gpu.nvidia.com/claim={}-{}", claim.uid, device.device)],
            share_id: device.share_id.clone(),
        };
        Ok(claim.devices.iter().map(prepared).collect())
    }

    fn unprepare(&self, uid: &str, _: Instant) -> Result<(), Failure> {
        if uid == "busy" {
            return Err(failure("in use by process 42"));
        }
        self.unprepared.lock().unwrap().push(uid.to_owned());
        Ok(())
    }
}

fn failure(message: &str) -> Failure {
    Failure::new(Class::Gpu, &io::Error::other(message))
}

struct Plugin {
    api: ApiServer,
    stub: Arc<Stub>,
    hanging: mpsc::UnboundedReceiver<()>,
    event_writer: Option<EventWriter>,
    serving: Serving,
}

impl Plugin {
    fn start() -> Plugin {
        let api = ApiServer::default();
        let (sender, hanging) = mpsc::unbounded_channel();
        let stub = Arc::new(Stub { hanging: sender, gate: Mutex::default(), unprepared: Mutex::default() });
        let (events, event_writer) = events::channel("node-1", &Metrics::default());
        let claims = ApiClaims::new(api.client());
        let dra = Dra::new("gpu.nvidia.com", "node-1", claims, Arc::clone(&stub), events, Metrics::default());
        let serving = Serving::start(Server::builder().add_service(dra.v1()).add_service(dra.v1beta1()));
        Plugin { api, stub, hanging, event_writer: Some(event_writer), serving }
    }

    /// A claim on the API server that is allocated one slice of a GPU, with changes made by `change`.
    fn claim(&self, name: &str, change: impl FnOnce(&mut Value)) -> v1::Claim {
        let mut claim = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name, "namespace": "default", "uid": format!("uid-of-{name}")},
            "spec": {},
            "status": {"allocation": {"devices": {"results": [{
                "request": "slice/small",
                "driver": "gpu.nvidia.com",
                "pool": "node-1",
                "device": "gpu-3b-00-0-mig-1g10gb-4",
                "shareID": "a671734a-e8e5-11e4-8fde-42010af09327",
            }]}}},
        });
        change(&mut claim);
        self.api.put(&format!("/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{name}"), claim);
        asked(name)
    }

    async fn prepare(&self, claims: Vec<v1::Claim>) -> v1::NodePrepareResourcesResponse {
        let mut kubelet = V1::new(self.serving.connect().await);
        kubelet.node_prepare_resources(NodePrepareResourcesRequest { claims }).await.unwrap().into_inner()
    }
}

fn asked(name: &str) -> v1::Claim {
    v1::Claim { namespace: "default".into(), uid: format!("uid-of-{name}"), name: name.into() }
}

fn slice(claim: &str) -> Device {
    Device {
        request_names: vec!["slice".into()],
        pool_name: "node-1".into(),
        device_name: "gpu-3b-00-0-mig-1g10gb-4".into(),
        cdi_device_ids: vec![format!("k8s.gpu.nvidia.com/claim=uid-of-{claim}-gpu-3b-00-0-mig-1g10gb-4")],
        share_id: Some("a671734a-e8e5-11e4-8fde-42010af09327".into()),
    }
}

#[tokio::test]
async fn each_claim_of_a_call_has_its_own_fate() {
    let plugin = Plugin::start();
    let claims = vec![
        plugin.claim("good", |_| {}),
        plugin.claim("fails", |_| {}),
        plugin.claim("panics", |_| {}),
        asked("deleted"),
        plugin.claim("replaced", |claim| claim["metadata"]["uid"] = json!("another")),
        plugin.claim("malformed", |claim| {
            claim["status"]["allocation"]["devices"]["config"] = json!([{
                "source": "FromClaim",
                "opaque": {"driver": "gpu.nvidia.com", "parameters": {"kind": "GpuConfig"}},
            }]);
        }),
    ];

    let answers = plugin.prepare(claims).await.claims;

    assert_eq!(answers.len(), 6, "exactly one answer a claim");
    let good = &answers["uid-of-good"];
    assert_eq!((good.error.as_str(), &good.devices[..]), ("", &[slice("good")][..]));
    let error = |name: &str| {
        let answer = &answers[&format!("uid-of-{name}")];
        assert!(answer.devices.is_empty(), "{name}");
        answer.error.as_str()
    };
    assert_eq!(error("fails"), "the GPU is on fire: pour water on it", "in one line, as kubectl shows it");
    assert!(error("panics").starts_with("kerf has a defect"), "{}", error("panics"));
    assert_eq!(error("deleted"), "the claim does not exist any more: delete the pod, it cannot start");
    assert!(error("replaced").starts_with("the claim was replaced by another"), "{}", error("replaced"));
    assert_eq!(
        error("malformed"),
        "the configuration of the claim cannot be used: opaque.parameters.apiVersion: missing; use \
         resource.nvidia.com/v1beta1"
    );
}

#[tokio::test]
async fn both_versions_answer_alike() {
    let plugin = Plugin::start();
    let claims = vec![plugin.claim("good", |_| {}), plugin.claim("fails", |_| {})];
    let request = NodePrepareResourcesRequest { claims: claims.clone() };
    let mut old_kubelet = V1beta1::new(plugin.serving.connect().await);
    let old = old_kubelet.node_prepare_resources(request).await.unwrap().into_inner();
    assert_eq!(old, plugin.prepare(claims.clone()).await);

    let request = NodeUnprepareResourcesRequest { claims };
    let old = old_kubelet.node_unprepare_resources(request.clone()).await.unwrap().into_inner();
    let mut kubelet = V1::new(plugin.serving.connect().await);
    assert_eq!(old, kubelet.node_unprepare_resources(request).await.unwrap().into_inner());
}

#[tokio::test]
async fn an_api_server_that_fails_is_said_and_does_no_lasting_harm() {
    let plugin = Plugin::start();
    let claim = plugin.claim("good", |_| {});
    plugin.api.set_failing(true);
    let answer = plugin.prepare(vec![claim.clone()]).await;
    let error = &answer.claims["uid-of-good"].error;
    assert!(error.starts_with("the claim cannot be read from the API server: "), "{error}");
    plugin.api.set_failing(false);
    assert_eq!(plugin.prepare(vec![claim]).await.claims["uid-of-good"].error, "");
}

#[tokio::test]
async fn unprepare_needs_no_claim_object() {
    let plugin = Plugin::start();
    plugin.api.set_failing(true);
    let mut kubelet = V1::new(plugin.serving.connect().await);
    let busy = v1::Claim { uid: "busy".into(), ..asked("x") };
    let request = NodeUnprepareResourcesRequest { claims: vec![asked("gone"), busy] };
    let answers = kubelet.node_unprepare_resources(request).await.unwrap().into_inner().claims;
    assert_eq!(answers.len(), 2);
    assert_eq!(answers["uid-of-gone"].error, "");
    assert_eq!(answers["busy"].error, "in use by process 42");
    assert_eq!(*plugin.stub.unprepared.lock().unwrap(), ["uid-of-gone"]);
}

/// What a person must act on is told at the claim; what the kubelet retries by itself is not.
#[tokio::test]
async fn events_are_for_people() {
    let mut plugin = Plugin::start();
    let refused = plugin.claim("elsewhere", |claim| {
        claim["status"]["allocation"]["devices"]["results"][0]["pool"] = json!("node-2");
    });
    let unallocated = plugin.claim("unallocated", |claim| claim["status"] = json!({}));
    plugin.prepare(vec![refused, unallocated, asked("deleted")]).await;
    let writer = tokio::spawn(plugin.event_writer.take().unwrap().run(plugin.api.client()));
    drop(plugin.serving);

    tokio::time::timeout(PATIENCE, writer).await.unwrap().unwrap();
    let events = plugin.api.list("/api/v1/namespaces/default/events/");
    let [event] = &events[..] else { panic!("{events:#?}") };
    assert_eq!(event["involvedObject"]["name"], "elsewhere");
    assert_eq!(event["involvedObject"]["kind"], "ResourceClaim");
    assert_eq!(event["reason"], "PrepareRefused");
    assert_eq!(event["reportingComponent"], "kerf-kubelet-plugin");
    assert!(event["message"].as_str().unwrap().contains("of node node-2, and this is node node-1"), "{event}");
}

/// A GPU that hangs must cost neither the other claims of the node nor the plugin's registration.
#[tokio::test]
async fn a_hanging_claim_holds_up_nobody() {
    let mut plugin = Plugin::start();
    let directory = tempfile::tempdir().unwrap();
    let paths = Paths::new(directory.path(), directory.path(), "gpu.nvidia.com");
    let (listener, _file) = socket::listen(&paths.registration_socket).unwrap();
    let (verdict, _) = watch::channel(KubeletVerdict::Unknown);
    let info = registration::plugin_info("gpu.nvidia.com", &paths);
    tokio::spawn(registration::serve(listener, info, verdict, std::future::pending()));

    let stub = Arc::clone(&plugin.stub);
    let (locked, is_locked) = tokio::sync::oneshot::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let gate = std::thread::spawn(move || {
        let _gate = stub.gate.lock().unwrap();
        locked.send(()).unwrap();
        // Until released or the test has failed.
        let _ = released.recv();
    });
    is_locked.await.unwrap();
    let claim = plugin.claim("hangs", |_| {});
    let mut kubelet = V1::new(plugin.serving.connect().await);
    let request = NodePrepareResourcesRequest { claims: vec![claim] };
    let hanging = tokio::spawn(async move { kubelet.node_prepare_resources(request).await });
    tokio::time::timeout(PATIENCE, plugin.hanging.recv()).await.unwrap().unwrap();

    let mut kubelet = RegistrationClient::new(rpc::connect(&paths.registration_socket).await);
    tokio::time::timeout(PATIENCE, kubelet.get_info(InfoRequest {})).await.unwrap().unwrap();
    let other = plugin.claim("good", |_| {});
    let other = tokio::time::timeout(PATIENCE, plugin.prepare(vec![other])).await.unwrap();
    assert_eq!(other.claims["uid-of-good"].error, "");
    assert!(!hanging.is_finished());

    release.send(()).unwrap();
    gate.join().unwrap();
    let answer = tokio::time::timeout(PATIENCE, hanging).await.unwrap().unwrap().unwrap().into_inner();
    assert_eq!(answer.claims["uid-of-hangs"].devices, [slice("hangs")]);
}
