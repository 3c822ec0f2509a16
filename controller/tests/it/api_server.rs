//! An API server in memory: as much of it as the controller writes to.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use http::{Method, Request, Response};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kerf_api::GpuNode;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

use crate::fixtures::DRIVER;
use kerf_controller::features::Counters;

/// Shared between a client and the test that looks behind it.
#[derive(Clone)]
pub(crate) struct ApiServer(Arc<Mutex<State>>);

pub(crate) struct State {
    /// What this server makes of counters.
    pub(crate) counters: Counters,
    /// Whether this server keeps taints.
    pub(crate) taints: bool,
    /// A field that this server does not know.
    pub(crate) drops_capacity: bool,
    /// Requests to answer with 500 from now on: true for each that fails.
    pub(crate) failures: Vec<bool>,
    /// The code of the answer to all requests, when it is not to work at all.
    pub(crate) refuses: Option<u16>,
    pub(crate) version: &'static str,
    pub(crate) slices: BTreeMap<String, ResourceSlice>,
    /// Whether this server keeps the extended resources of classes.
    pub(crate) extended_resources: bool,
    pub(crate) classes: BTreeMap<String, DeviceClass>,
    /// The metadata of Nodes.
    pub(crate) nodes: BTreeMap<String, Value>,
    /// None of them: this server does not know the kind.
    pub(crate) gpu_nodes: Option<Vec<GpuNode>>,
    /// Requests that changed something, in order: `create name`.
    pub(crate) writes: Vec<String>,
    pub(crate) dry_runs: usize,
    /// Messages of Events.
    pub(crate) events: Vec<String>,
    /// What was applied to kerf's own resources, in order: the path below them, and what was sent.
    pub(crate) patches: Vec<(String, Value)>,
    pub(crate) resource_version: u64,
}

impl ApiServer {
    pub(crate) fn new(counters: Counters) -> ApiServer {
        ApiServer(Arc::new(Mutex::new(State {
            counters,
            taints: true,
            drops_capacity: false,
            failures: Vec::new(),
            refuses: None,
            version: "v1.37.2",
            slices: BTreeMap::new(),
            extended_resources: true,
            classes: BTreeMap::new(),
            nodes: BTreeMap::new(),
            gpu_nodes: Some(Vec::new()),
            writes: Vec::new(),
            dry_runs: 0,
            events: Vec::new(),
            patches: Vec::new(),
            resource_version: 100,
        })))
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// A client of this server. Must be called inside a runtime.
    pub(crate) fn client(&self) -> Client {
        let (service, mut requests) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let server = self.clone();
        tokio::spawn(async move {
            while let Some((request, reply)) = requests.next_request().await {
                let (head, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap();
                let body = if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).unwrap() };
                let (code, answer) = server.state().answer(&head.method, &head.uri, body);
                let answer = Body::from(serde_json::to_vec(&answer).unwrap());
                reply.send_response(Response::builder().status(code).body(answer).unwrap());
            }
        });
        Client::new(service, "default")
    }
}

type Answer = (u16, Value);

impl State {
    fn answer(&mut self, method: &Method, uri: &http::Uri, body: Value) -> Answer {
        if let Some(code) = self.refuses {
            return failure(code, "refused");
        }
        if !self.failures.is_empty() && self.failures.remove(0) {
            return failure(500, "etcd is away");
        }
        let path: Vec<&str> = uri.path().split('/').filter(|part| !part.is_empty()).collect();
        match (method, path.as_slice()) {
            (&Method::GET, ["version"]) => (
                200,
                json!({
                    "major": "1", "minor": "37", "gitVersion": self.version, "gitCommit": "", "gitTreeState": "",
                    "buildDate": "", "goVersion": "", "compiler": "", "platform": "",
                }),
            ),
            (&Method::POST, ["api", "v1", "namespaces", "default", "events"]) => {
                let about = &body["involvedObject"];
                let class = about["name"].as_str().and_then(|name| self.classes.get(name));
                if let Some(class) = class.filter(|_| about["kind"] == "DeviceClass") {
                    assert_eq!(about["uid"].as_str(), class.metadata.uid.as_deref(), "kubectl describe asks for it");
                }
                self.events.push(body["message"].as_str().unwrap().to_owned());
                (201, body)
            }
            (&Method::POST, ["apis", "resource.k8s.io", "v1", "resourceslices"]) => {
                let dry_run = uri.query().is_some_and(|query| query.contains("dryRun=All"));
                self.create(serde_json::from_value(body).unwrap(), dry_run)
            }
            (&Method::GET, ["apis", "resource.k8s.io", "v1", "resourceslices"]) => {
                let query = uri.query().unwrap();
                let name = query.split_once("metadata.name%3D").unwrap().1.split('&').next().unwrap();
                let items: Vec<&ResourceSlice> = self.slices.get(name).into_iter().collect();
                (200, json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items}))
            }
            (&Method::PUT, ["apis", "resource.k8s.io", "v1", "resourceslices", name]) => {
                self.replace(name, serde_json::from_value(body).unwrap())
            }
            (&Method::DELETE, ["apis", "resource.k8s.io", "v1", "resourceslices", name]) => self.delete(name, &body),
            (&Method::GET, ["apis", "resource.k8s.io", "v1", "deviceclasses"]) => {
                let items: Vec<&DeviceClass> = self.classes.values().collect();
                (200, json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items}))
            }
            (&Method::POST, ["apis", "resource.k8s.io", "v1", "deviceclasses"]) => {
                let dry_run = uri.query().is_some_and(|query| query.contains("dryRun=All"));
                self.create_class(serde_json::from_value(body).unwrap(), dry_run)
            }
            (&Method::PUT, ["apis", "resource.k8s.io", "v1", "deviceclasses", name]) => {
                let class: DeviceClass = serde_json::from_value(body).unwrap();
                if self.classes[*name].metadata.resource_version != class.metadata.resource_version {
                    return failure(409, "the object has been modified");
                }
                self.writes.push(format!("update {name}"));
                self.store_class(class)
            }
            (&Method::DELETE, ["apis", "resource.k8s.io", "v1", "deviceclasses", name]) => {
                self.writes.push(format!("delete {name}"));
                (200, serde_json::to_value(self.classes.remove(*name).unwrap()).unwrap())
            }
            (&Method::GET, ["api", "v1", "nodes"]) => {
                let items: Vec<Value> = self.nodes.values().map(|metadata| json!({"metadata": metadata})).collect();
                (200, json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items}))
            }
            (&Method::GET, ["apis", "kerf.dev", "v1alpha1", "gpunodes"]) => match &self.gpu_nodes {
                Some(items) => (200, json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items})),
                None => failure(404, "the server could not find the requested resource"),
            },
            (&Method::PATCH, ["api", "v1", "nodes", name]) => {
                let query = uri.query().unwrap();
                assert!(
                    query.contains("fieldManager=kerf-controller-labels") && !query.contains("force=true"),
                    "{query}"
                );
                self.writes.push(format!("label {name}"));
                self.label(name, &body["metadata"])
            }
            (&Method::PATCH, ["apis", "kerf.dev", "v1alpha1", "gpunodes", name]) => {
                let query = uri.query().unwrap_or_default();
                assert!(query.contains("fieldManager=kerf-controller"), "{query}");
                self.patches.push((format!("gpunodes/{name}"), body.clone()));
                let metadata = json!({ "name": name, "uid": body[0]["value"] });
                let (version, kind) = ("kerf.dev/v1alpha1", "GpuNode");
                (200, json!({ "apiVersion": version, "kind": kind, "metadata": metadata, "spec": body[1]["value"] }))
            }
            (&Method::PATCH, ["apis", "kerf.dev", "v1alpha1", path @ ..]) => {
                let query = uri.query().unwrap_or_default();
                assert!(query.contains("fieldManager=kerf-controller") && query.contains("force=true"), "{query}");
                self.patches.push((path.join("/"), body.clone()));
                let mut policy = body;
                policy["spec"] = json!({ "offer": "Nothing" });
                (200, policy)
            }
            _ => panic!("the controller does not {method} {uri}"),
        }
    }

    fn create_class(&mut self, mut class: DeviceClass, dry_run: bool) -> Answer {
        if !self.extended_resources {
            class.spec.as_mut().unwrap().extended_resource_name = None;
        }
        if dry_run {
            return (201, serde_json::to_value(class).unwrap());
        }
        let name = class.metadata.name.clone().unwrap();
        if self.classes.contains_key(&name) {
            return failure(409, "already exists");
        }
        self.writes.push(format!("create {name}"));
        class.metadata.uid = Some(format!("uid-{}", self.resource_version));
        self.store_class(class)
    }

    fn store_class(&mut self, mut class: DeviceClass) -> Answer {
        self.resource_version += 1;
        class.metadata.resource_version = Some(self.resource_version.to_string());
        self.classes.insert(class.metadata.name.clone().unwrap(), class.clone());
        (200, serde_json::to_value(class).unwrap())
    }

    /// As much of server-side apply as labels need: what is applied replaces what was applied, and nobody else's.
    fn label(&mut self, name: &str, applied: &Value) -> Answer {
        let Some(node) = self.nodes.get_mut(name).filter(|node| node["uid"] == applied["uid"]) else {
            return failure(409, "another node");
        };
        let wanted = applied["labels"].as_object().cloned().unwrap_or_default();
        let owned = node["managedFields"][0]["fieldsV1"]["f:metadata"]["f:labels"].clone();
        let owned = |key: &str| owned.get(format!("f:{key}")).is_some();
        let labels = node["labels"].as_object_mut().unwrap();
        if wanted.iter().any(|(key, value)| labels.get(key).is_some_and(|found| found != value && !owned(key))) {
            return failure(409, "conflict");
        }
        labels.retain(|key, _| !owned(key) || wanted.contains_key(key));
        labels.extend(wanted.clone());
        let fields: serde_json::Map<_, _> = wanted.keys().map(|key| (format!("f:{key}"), json!({}))).collect();
        node["managedFields"] = json!([{
            "manager": "kerf-controller-labels", "operation": "Apply", "fieldsV1": {"f:metadata": {"f:labels": fields}},
        }]);
        (200, json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": node}))
    }

    fn create(&mut self, mut slice: ResourceSlice, dry_run: bool) -> Answer {
        let generate = || format!("{}{}", slice.metadata.generate_name.as_ref().unwrap(), self.resource_version);
        let name = slice.metadata.name.clone().unwrap_or_else(generate);
        slice.metadata.name = Some(name.clone());
        self.drop_fields(&mut slice.spec);
        if let Err(problem) = self.validate(&slice.spec) {
            return failure(422, &problem);
        }
        if self.slices.contains_key(&name) {
            return failure(409, "already exists");
        }
        if dry_run {
            self.dry_runs += 1;
            return (201, serde_json::to_value(slice).unwrap());
        }
        self.writes.push(format!("create {name}"));
        slice.metadata.uid = Some(format!("uid-{}", self.resource_version));
        self.store(slice)
    }

    fn replace(&mut self, name: &str, mut slice: ResourceSlice) -> Answer {
        let Some(known) = self.slices.get(name) else { return failure(404, "not found") };
        if known.metadata.resource_version != slice.metadata.resource_version {
            return failure(409, "the object has been modified");
        }
        slice.metadata.uid = known.metadata.uid.clone();
        self.drop_fields(&mut slice.spec);
        if let Err(problem) = self.validate(&slice.spec) {
            return failure(422, &problem);
        }
        self.writes.push(format!("update {name}"));
        self.store(slice)
    }

    fn store(&mut self, mut slice: ResourceSlice) -> Answer {
        self.resource_version += 1;
        slice.metadata.resource_version = Some(self.resource_version.to_string());
        add_taint_times(&mut slice, i64::try_from(self.resource_version).unwrap());
        self.slices.insert(slice.metadata.name.clone().unwrap(), slice.clone());
        self.assert_sound();
        (200, serde_json::to_value(slice).unwrap())
    }

    fn delete(&mut self, name: &str, body: &Value) -> Answer {
        let Some(known) = self.slices.get(name) else { return failure(404, "not found") };
        let preconditions = &body["preconditions"];
        if preconditions["uid"].as_str() != known.metadata.uid.as_deref()
            || preconditions["resourceVersion"].as_str() != known.metadata.resource_version.as_deref()
        {
            return failure(409, "precondition failed");
        }
        self.resource_version += 1;
        self.writes.push(format!("delete {name}"));
        let slice = self.slices.remove(name);
        (200, serde_json::to_value(slice).unwrap())
    }

    fn drop_fields(&self, spec: &mut ResourceSliceSpec) {
        if self.counters == Counters::None {
            spec.shared_counters = None;
            spec.devices.iter_mut().flatten().for_each(|device| device.consumes_counters = None);
        }
        if !self.taints {
            spec.devices.iter_mut().flatten().for_each(|device| device.taints = None);
        }
        if self.drops_capacity {
            spec.devices.iter_mut().flatten().for_each(|device| device.capacity = None);
        }
    }

    fn validate(&self, spec: &ResourceSliceSpec) -> Result<(), String> {
        let consumes = spec.devices.iter().flatten().any(|device| device.consumes_counters.is_some());
        match self.counters {
            Counters::Separate if spec.shared_counters.is_some() && spec.devices.is_some() => {
                Err("only one of devices and sharedCounters can be set".into())
            }
            Counters::Combined if consumes && spec.shared_counters.is_none() => {
                Err("counterSet must be one of the counter sets in sharedCounters".into())
            }
            _ => Ok(()),
        }
    }

    /// A partition without counters is never seen beside another: neither in a complete pool nor for a moment.
    fn assert_sound(&self) {
        let highest = self.slices.values().map(|slice| slice.spec.pool.generation).max();
        let current = self.slices.values().filter(|slice| Some(slice.spec.pool.generation) == highest);
        let current: Vec<&ResourceSlice> = current.collect();
        let complete = current.iter().all(|slice| slice.spec.pool.resource_slice_count == current.len() as i64);
        let devices = current.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
        let unguarded = devices.filter(|device| device.name.contains("-mig-") && device.consumes_counters.is_none());
        assert!(!complete || unguarded.count() == 0, "overlapping devices are offered without counters");
    }

    /// Checks that there is one complete pool and returns its devices' names.
    pub(crate) fn pool(&self, node: &str) -> Vec<String> {
        let of_node = |slice: &&ResourceSlice| slice.spec.node_name.as_deref() == Some(node);
        let slices: Vec<_> = self.slices.values().filter(of_node).filter(|slice| slice.spec.driver == DRIVER).collect();
        for slice in &slices {
            assert_eq!(slice.spec.pool.name, node);
            assert_eq!(slice.spec.pool.resource_slice_count, slices.len() as i64);
            assert_eq!(slice.spec.pool.generation, slices[0].spec.pool.generation);
        }
        slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten()).map(|device| device.name.clone()).collect()
    }
}

/// What the API server does to a taint that says no time: it came at this moment.
pub(crate) fn add_taint_times(slice: &mut ResourceSlice, second: i64) {
    let taints = slice.spec.devices.iter_mut().flatten().flat_map(|device| device.taints.iter_mut().flatten());
    for taint in taints {
        taint.time_added.get_or_insert(Time(Timestamp::from_second(second).unwrap()));
    }
}

fn failure(code: u16, message: &str) -> Answer {
    (code, json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code }))
}
