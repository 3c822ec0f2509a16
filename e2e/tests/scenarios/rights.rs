//! What the two accounts may do, each with a token of its own, and what the API server refuses them.
//!
//! The rights are those of a release of its own, in a namespace of its own: whatever else is installed in the cluster does
//! not matter, and does not notice. They are applied once and stay until the cluster goes.

use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingWebhookConfiguration};
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Node, Pod, Secret, ServiceAccount};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kerf_api::{GpuNode, GpuPolicy};
use kerf_e2e::{Account, Cluster, eventually, render};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::OnceCell;

const RELEASE: &str = "e2e-rights-kerf";
const NAMESPACE: &str = "e2e-rights";
/// A node that is not the token's.
const OTHER: &str = "e2e-other-node";
/// How long a new policy or right may take to be in force.
const PATIENCE: Duration = Duration::from_secs(30);

static APPLIED: OnceCell<()> = OnceCell::const_new();

/// Who acts.
struct World {
    /// The plugin of `node`.
    plugin: Client,
    /// The plugin's account with a token that names no node.
    nowhere: Client,
    controller: Client,
    admin: Client,
    node: String,
}

impl World {
    async fn start() -> Result<World> {
        let cluster = Cluster::from_env()?;
        let admin = Client::try_default().await.context("no client: KUBECONFIG is set by `kerf-cluster exec`")?;
        APPLIED.get_or_try_init(|| apply(&cluster, &admin)).await?;
        let node = cluster.node()?.name.clone();
        let plugin = Account { namespace: NAMESPACE, name: &format!("{RELEASE}-kubelet-plugin"), node: Some(&node) };
        let nowhere = Account { node: None, ..plugin };
        let controller = Account { namespace: NAMESPACE, name: &format!("{RELEASE}-controller"), node: None };
        Ok(World {
            plugin: plugin.client(&cluster).await?,
            nowhere: nowhere.client(&cluster).await?,
            controller: controller.client(&cluster).await?,
            admin,
            node,
        })
    }
}

/// Applies the accounts, rights and policies, and what is acted on.
async fn apply(cluster: &Cluster, admin: &Client) -> Result<()> {
    const KINDS: [&str; 7] = [
        "ServiceAccount",
        "ClusterRole",
        "ClusterRoleBinding",
        "Role",
        "RoleBinding",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    ];
    crds(cluster, admin).await?;
    let mut objects = render(RELEASE, NAMESPACE, &[])?;
    objects.retain(|object| object["kind"].as_str().is_some_and(|kind| KINDS.contains(&kind)));
    objects.insert(0, json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}));
    let file = std::env::temp_dir().join(format!("kerf-rights-{}.json", std::process::id()));
    std::fs::write(&file, json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string())?;
    let path = file.to_str().context("the path is not text")?;
    let apply = ["apply", "--server-side", "--force-conflicts", "-f", path];
    eventually("the rights are applied", PATIENCE, async || Ok(Some(cluster.kubectl(&apply)?))).await?;
    std::fs::remove_file(&file)?;
    for object in [gpu_node(OTHER), gpu_node(&cluster.node()?.name)] {
        present(&Api::<GpuNode>::all(admin.clone()), object).await?;
    }
    let leases = Api::<Lease>::namespaced(admin.clone(), NAMESPACE);
    for name in [format!("kubelet-plugin-{OTHER}"), "kerf-controller".to_owned()] {
        present(&leases, lease(&name)).await?;
    }
    present(&Api::<GpuPolicy>::all(admin.clone()), policy()).await?;
    present(&Api::<ResourceClaim>::namespaced(admin.clone(), NAMESPACE), claim()).await?;
    present(&Api::<ResourceSlice>::all(admin.clone()), slice("other.example.com")).await
}

/// Sees to the CRDs. Where there is none it is made as the release of kerf that this cluster may get later would have left it,
/// so that Helm takes it for its own.
async fn crds(cluster: &Cluster, admin: &Client) -> Result<()> {
    let objects = render("kerf", kerf_api::names::NAMESPACE, &[])?;
    for mut crd in objects.into_iter().filter(|object| object["kind"] == "CustomResourceDefinition") {
        crd["metadata"]["annotations"]["meta.helm.sh/release-name"] = json!("kerf");
        crd["metadata"]["annotations"]["meta.helm.sh/release-namespace"] = json!(kerf_api::names::NAMESPACE);
        present(&Api::<CustomResourceDefinition>::all(admin.clone()), object(crd)).await?;
    }
    let wait = ["wait", "--for=condition=Established", "--timeout=30s"];
    cluster.kubectl(&[&wait[..], &["crd/gpunodes.kerf.dev", "crd/gpupolicies.kerf.dev"]].concat()).map(drop)
}

/// Creates an object unless it is there.
async fn present<K>(api: &Api<K>, object: K) -> Result<()>
where
    K: Clone + Debug + DeserializeOwned + serde::Serialize,
{
    match api.create(&PostParams::default(), &object).await {
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        done => done.map(drop).map_err(Into::into),
    }
}

/// An object from its manifest.
fn object<K: DeserializeOwned>(manifest: Value) -> K {
    serde_json::from_value(manifest).expect("the manifest is one of this kind")
}

fn gpu_node(name: &str) -> GpuNode {
    object(json!({"apiVersion": "kerf.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": name}, "spec": {}}))
}

/// One that matches no node.
fn policy() -> GpuPolicy {
    object(json!({
        "apiVersion": "kerf.dev/v1alpha1", "kind": "GpuPolicy", "metadata": {"name": "e2e-rights"},
        "spec": {"offer": "Nothing", "nodeSelector": {"matchLabels": {"kerf.dev/e2e": "nowhere"}}},
    }))
}

fn lease(name: &str) -> Lease {
    object(json!({"metadata": {"name": name}, "spec": {"holderIdentity": "e2e", "leaseDurationSeconds": 30}}))
}

fn claim() -> ResourceClaim {
    let request = json!({"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}});
    object(json!({"metadata": {"name": "claim"}, "spec": {"devices": {"requests": [request]}}}))
}

fn slice(driver: &str) -> ResourceSlice {
    object(json!({
        "metadata": {"name": format!("e2e-rights-{driver}")},
        "spec": {
            "driver": driver, "nodeName": OTHER, "devices": [{"name": "gpu"}],
            "pool": {"name": OTHER, "generation": 1, "resourceSliceCount": 1},
        },
    }))
}

/// A class as the controller makes them, or as others do.
fn class(name: &str, controllers: bool) -> DeviceClass {
    let labels = json!({
        "app.kubernetes.io/managed-by": "kerf-controller",
        "kerf.dev/generated": "true",
        "kerf.dev/driver": "gpu.nvidia.com",
    });
    let labels = if controllers { labels } else { json!({}) };
    object(json!({"metadata": {"name": name, "labels": labels}, "spec": {}}))
}

/// Server-side apply of labels to a Node.
fn node_labels(labels: &Value) -> (PatchParams, Patch<Value>) {
    let mut params = PatchParams::apply("e2e");
    params.dry_run = true;
    (params, Patch::Apply(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"labels": labels}})))
}

fn pod() -> Pod {
    object(json!({"metadata": {"name": "pod"}, "spec": {"containers": [{"name": "main", "image": "none"}]}}))
}

/// An Event as the plugin of a node writes it.
fn event(host: &str, about_node: &str) -> Event {
    let name = format!("e2e.{:x}", std::process::id());
    object(json!({
        "metadata": {"name": name, "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": about_node, "uid": about_node},
        "type": "Warning", "reason": "E2e", "message": "tried",
        "source": {"component": "kerf-kubelet-plugin", "host": host},
    }))
}

/// Nothing is stored: what is tried is whether it would be.
fn dry_run() -> PostParams {
    PostParams { dry_run: true, field_manager: None }
}

fn status_patch(name: &str) -> (PatchParams, Patch<Value>) {
    let mut params = PatchParams::apply("e2e").force();
    params.dry_run = true;
    let status = json!({"driverName": "gpu.nvidia.com"});
    let patch = json!({
        "apiVersion": "kerf.dev/v1alpha1", "kind": "GpuNode", "metadata": {"name": name}, "status": status,
    });
    (params, Patch::Apply(patch))
}

/// `act` is refused, with these words in the answer. Where a policy refuses it may take a moment to be in force.
async fn refused<T: Debug>(words: &str, mut act: impl AsyncFnMut() -> kube::Result<T>) -> Result<()> {
    eventually("it is refused", PATIENCE, async || match act().await {
        Err(kube::Error::Api(status)) if status.code == 403 => {
            ensure!(status.message.contains(words), "refused, but not for {words:?}: {}", status.message);
            Ok(Some(()))
        }
        other => bail!("not refused: {other:?}"),
    })
    .await
}

/// `act` is allowed, once the rights are in force.
async fn allowed<T: Debug>(what: &str, mut act: impl AsyncFnMut() -> kube::Result<T>) -> Result<()> {
    eventually(what, PATIENCE, async || match act().await {
        // There already: that is found out last.
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(Some(())),
        done => Ok(Some(done.map(drop)?)),
    })
    .await
}

/// Executes a command in a pod, as far as the API server lets it.
async fn exec(client: &Client) -> kube::Result<String> {
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/pod/exec?command=true&stdout=true");
    let request = http::Request::post(path).body(Vec::new()).map_err(kube::Error::HttpError)?;
    client.request_text(request).await
}

#[tokio::test]
async fn the_plugin_creates_no_gpu_node_of_another_node() {
    let world = World::start().await.unwrap();
    let api = Api::<GpuNode>::all(world.plugin);
    let gpu_node = gpu_node("e2e-third-node");
    refused("writes only the GpuNode of that name", async || api.create(&dry_run(), &gpu_node).await).await.unwrap();
}

#[tokio::test]
async fn the_plugin_writes_no_status_of_another_node() {
    let world = World::start().await.unwrap();
    let api = Api::<GpuNode>::all(world.plugin);
    let (params, patch) = status_patch(OTHER);
    let act = async || api.patch_status(OTHER, &params, &patch).await;
    refused("writes only the GpuNode of that name", act).await.unwrap();
}

#[tokio::test]
async fn the_plugin_creates_no_lease_of_another_node() {
    let world = World::start().await.unwrap();
    let api = Api::<Lease>::namespaced(world.plugin, NAMESPACE);
    let lease = lease("kubelet-plugin-e2e-third-node");
    refused("writes only the Lease kubelet-plugin-", async || api.create(&dry_run(), &lease).await).await.unwrap();
}

#[tokio::test]
async fn the_plugin_takes_no_lease_of_another() {
    let world = World::start().await.unwrap();
    let api = Api::<Lease>::namespaced(world.plugin, NAMESPACE);
    for name in [format!("kubelet-plugin-{OTHER}"), "kerf-controller".to_owned()] {
        let lease = api.get(&name).await.unwrap();
        let act = async || api.replace(&name, &dry_run(), &lease).await;
        refused("writes only the Lease kubelet-plugin-", act).await.unwrap();
    }
}

#[tokio::test]
async fn the_plugin_speaks_for_no_other_node() {
    let world = World::start().await.unwrap();
    let api = Api::<Event>::namespaced(world.plugin, "default");
    for event in [event(OTHER, &world.node), event(&world.node, OTHER)] {
        refused("writes only Events of its own", async || api.create(&dry_run(), &event).await).await.unwrap();
    }
}

#[tokio::test]
async fn a_token_of_no_node_writes_nothing() {
    let world = World::start().await.unwrap();
    let why = "the token is of no pod on a node";
    let (gpu_nodes, own) = (Api::<GpuNode>::all(world.nowhere.clone()), gpu_node(&world.node));
    refused(why, async || gpu_nodes.create(&dry_run(), &own).await).await.unwrap();
    let (leases, own) =
        (Api::<Lease>::namespaced(world.nowhere.clone(), NAMESPACE), lease(&format!("kubelet-plugin-{}", world.node)));
    refused(why, async || leases.create(&dry_run(), &own).await).await.unwrap();
    let (events, own) = (Api::<Event>::namespaced(world.nowhere, "default"), event(&world.node, &world.node));
    refused(why, async || events.create(&dry_run(), &own).await).await.unwrap();
}

#[tokio::test]
async fn the_plugin_creates_no_slice() {
    let world = World::start().await.unwrap();
    let api = Api::<ResourceSlice>::all(world.plugin);
    let slice = slice("gpu.nvidia.com");
    refused("cannot create resource \"resourceslices\"", async || api.create(&dry_run(), &slice).await).await.unwrap();
}

#[tokio::test]
async fn the_plugin_deletes_no_slice() {
    let world = World::start().await.unwrap();
    let api = Api::<ResourceSlice>::all(world.plugin);
    let params = DeleteParams { dry_run: true, ..DeleteParams::default() };
    let act = async || api.delete("e2e-rights-other.example.com", &params).await.map(drop);
    refused("cannot delete resource \"resourceslices\"", act).await.unwrap();
}

#[tokio::test]
async fn the_plugin_writes_no_status_of_a_claim() {
    let world = World::start().await.unwrap();
    let api = Api::<ResourceClaim>::namespaced(world.plugin, NAMESPACE);
    let patch = Patch::Merge(json!({"status": {"devices": []}}));
    let act = async || api.patch_status("claim", &PatchParams::default(), &patch).await;
    refused("cannot patch resource \"resourceclaims/status\"", act).await.unwrap();
}

#[tokio::test]
async fn the_plugin_changes_no_node() {
    let world = World::start().await.unwrap();
    let api = Api::<Node>::all(world.plugin);
    let patch = Patch::Merge(json!({"metadata": {"labels": {"e2e": "true"}}}));
    let act = async || api.patch(&world.node, &PatchParams::default(), &patch).await;
    refused("cannot patch resource \"nodes\"", act).await.unwrap();
}

#[tokio::test]
async fn the_controller_changes_of_a_node_its_labels_alone() {
    let world = World::start().await.unwrap();
    let api = Api::<Node>::all(world.controller.clone());
    let words = "nothing of a Node but its labels under nvidia.com/";
    for patch in [
        json!({"metadata": {"labels": {"e2e": "true"}}}),
        json!({"metadata": {"labels": {"kubernetes.io/hostname": null}}}),
        json!({"metadata": {"labels": {"nvidia.com/e2e": "true", "kubernetes.io/hostname": "other"}}}),
        json!({"metadata": {"annotations": {"nvidia.com/e2e": "true"}}}),
        json!({"metadata": {"finalizers": ["nvidia.com/e2e"]}}),
        json!({"spec": {"unschedulable": true}}),
        json!({"spec": {"taints": [{"key": "nvidia.com/e2e", "effect": "NoExecute"}]}}),
    ] {
        let params = PatchParams { dry_run: true, ..PatchParams::default() };
        let act = async || api.patch(&world.node, &params, &Patch::Merge(&patch)).await.map(drop);
        refused(words, act).await.unwrap_or_else(|error| panic!("{patch}: {error:#}"));
    }
    let status = Patch::Merge(json!({"status": {"conditions": []}}));
    let act = async || api.patch_status(&world.node, &PatchParams::default(), &status).await.map(drop);
    refused("cannot patch resource \"nodes/status\"", act).await.unwrap();
    let act = async || api.delete(&world.node, &DeleteParams::default()).await.map(drop);
    refused("cannot delete resource \"nodes\"", act).await.unwrap();
}

#[tokio::test]
async fn the_controller_touches_no_class_of_others() {
    let world = World::start().await.unwrap();
    let words = "only DeviceClasses that it has made for driver gpu.nvidia.com";
    present(&Api::<DeviceClass>::all(world.admin), class("e2e-rights-admins", false)).await.unwrap();
    let api = Api::<DeviceClass>::all(world.controller);
    let unlabelled = class("e2e-rights-other", false);
    refused(words, async || api.create(&dry_run(), &unlabelled).await).await.unwrap();
    let everything = ListParams::default();
    let admins = api.list(&everything).await.unwrap().items.into_iter();
    let mut admins =
        admins.into_iter().find(|class| class.metadata.name.as_deref() == Some("e2e-rights-admins")).unwrap();
    admins.metadata.labels = class("any", true).metadata.labels;
    refused(words, async || api.replace("e2e-rights-admins", &dry_run(), &admins).await).await.unwrap();
    let params = DeleteParams { dry_run: true, ..DeleteParams::default() };
    refused(words, async || api.delete("e2e-rights-admins", &params).await.map(drop)).await.unwrap();
}

#[tokio::test]
async fn nobody_reads_a_secret() {
    let world = World::start().await.unwrap();
    for client in [world.plugin, world.controller] {
        for namespace in [NAMESPACE, "kube-system"] {
            let api = Api::<Secret>::namespaced(client.clone(), namespace);
            refused("cannot get resource \"secrets\"", async || api.get("any").await).await.unwrap();
            refused("cannot list resource \"secrets\"", async || api.list(&ListParams::default()).await).await.unwrap();
        }
    }
}

#[tokio::test]
async fn nobody_creates_a_pod() {
    let world = World::start().await.unwrap();
    for client in [world.plugin, world.controller] {
        let (api, pod) = (Api::<Pod>::namespaced(client, NAMESPACE), pod());
        refused("cannot create resource \"pods\"", async || api.create(&dry_run(), &pod).await).await.unwrap();
    }
}

#[tokio::test]
async fn nobody_executes_in_a_pod() {
    let world = World::start().await.unwrap();
    for client in [world.plugin, world.controller] {
        refused("cannot create resource \"pods/exec\"", async || exec(&client).await).await.unwrap();
    }
}

#[tokio::test]
async fn nobody_makes_a_token() {
    let world = World::start().await.unwrap();
    let request: TokenRequest = object(json!({"spec": {"audiences": []}}));
    for client in [world.plugin, world.controller] {
        let api = Api::<ServiceAccount>::namespaced(client, NAMESPACE);
        let name = format!("{RELEASE}-controller");
        let act = async || api.create_token_request(&name, &PostParams::default(), &request).await.map(drop);
        refused("cannot create resource \"serviceaccounts/token\"", act).await.unwrap();
    }
}

#[tokio::test]
async fn the_controller_writes_no_slice_of_another_driver() {
    let world = World::start().await.unwrap();
    let api = Api::<ResourceSlice>::all(world.controller);
    let why = "writes only ResourceSlices of driver gpu.nvidia.com";
    let foreign = slice("third.example.com");
    refused(why, async || api.create(&dry_run(), &foreign).await).await.unwrap();
    let name = "e2e-rights-other.example.com";
    let found = Api::<ResourceSlice>::all(world.admin).get(name).await.unwrap();
    refused(why, async || api.replace(name, &dry_run(), &found).await).await.unwrap();
    let params = DeleteParams { dry_run: true, ..DeleteParams::default() };
    refused(why, async || api.delete(name, &params).await.map(drop)).await.unwrap();
}

#[tokio::test]
async fn the_controller_speaks_for_no_node() {
    let world = World::start().await.unwrap();
    let (gpu_nodes, gpu_node) = (Api::<GpuNode>::all(world.controller.clone()), gpu_node("e2e-third-node"));
    let act = async || gpu_nodes.create(&dry_run(), &gpu_node).await;
    refused("cannot create resource \"gpunodes\"", act).await.unwrap();
    let (params, patch) = status_patch(OTHER);
    let act = async || gpu_nodes.patch_status(OTHER, &params, &patch).await;
    refused("cannot patch resource \"gpunodes/status\"", act).await.unwrap();
    let leases = Api::<Lease>::namespaced(world.controller, NAMESPACE);
    let name = format!("kubelet-plugin-{OTHER}");
    let lease = Api::<Lease>::namespaced(world.admin, NAMESPACE).get(&name).await.unwrap();
    let act = async || leases.replace(&name, &dry_run(), &lease).await;
    refused("cannot update resource \"leases\"", act).await.unwrap();
}

/// Who may change what the API server asks whom could have everything sent to itself.
#[tokio::test]
async fn the_controller_changes_no_webhook_but_its_own() {
    let world = World::start().await.unwrap();
    let api = Api::<ValidatingWebhookConfiguration>::all(world.controller.clone());
    let (params, patch) = (PatchParams::default(), Patch::Merge(json!({"metadata": {"labels": {"e2e": "true"}}})));
    let why = "cannot patch resource \"validatingwebhookconfigurations\"";
    refused(why, async || api.patch("e2e-other", &params, &patch).await).await.unwrap();
    let why = "cannot list resource \"validatingwebhookconfigurations\"";
    refused(why, async || api.list(&ListParams::default()).await).await.unwrap();
    let own = format!("{RELEASE}-webhook");
    let one = ListParams::default().fields(&format!("metadata.name={own}"));
    allowed("looks at its own", async || api.list(&one).await).await.unwrap();
    eventually("may change its own, which is not there", PATIENCE, async || {
        match api.patch(&own, &params, &patch).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(Some(())),
            other => bail!("{other:?}"),
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn the_plugin_can_do_its_work() {
    let World { plugin, node, .. } = World::start().await.unwrap();
    let nodes = Api::<Node>::all(plugin.clone());
    allowed("reads its Node", async || nodes.get(&node).await).await.unwrap();
    let (gpu_nodes, own) = (Api::<GpuNode>::all(plugin.clone()), gpu_node(&node));
    allowed("creates its GpuNode", async || gpu_nodes.create(&dry_run(), &own).await).await.unwrap();
    let (params, patch) = status_patch(&node);
    allowed("writes its status", async || gpu_nodes.patch_status(&node, &params, &patch).await).await.unwrap();
    let (leases, name) = (Api::<Lease>::namespaced(plugin.clone(), NAMESPACE), format!("kubelet-plugin-{node}"));
    allowed("creates its lease", async || leases.create(&PostParams::default(), &lease(&name)).await).await.unwrap();
    let held = leases.get(&name).await.unwrap();
    allowed("renews it", async || leases.replace(&name, &dry_run(), &held).await).await.unwrap();
    let claims = Api::<ResourceClaim>::namespaced(plugin.clone(), NAMESPACE);
    allowed("reads a claim", async || claims.get("claim").await).await.unwrap();
    let claims = Api::<ResourceClaim>::all(plugin.clone());
    allowed("finds a claim", async || claims.list_metadata(&ListParams::default()).await).await.unwrap();
    let (events, mut own) = (Api::<Event>::namespaced(plugin, "default"), event(&node, &node));
    let name = format!("e2e-rights.{:x}", std::process::id());
    own.metadata.name = Some(name.clone());
    allowed("writes an Event", async || events.create(&PostParams::default(), &own).await).await.unwrap();
    let again = Patch::Merge(json!({"count": 2}));
    allowed("counts it", async || events.patch(&name, &PatchParams::default(), &again).await).await.unwrap();
}

#[tokio::test]
async fn the_controller_can_do_its_work() {
    let World { controller, node, .. } = World::start().await.unwrap();
    let everything = ListParams::default();
    let slices = Api::<ResourceSlice>::all(controller.clone());
    allowed("lists slices", async || slices.list(&everything).await).await.unwrap();
    let own = slice("gpu.nvidia.com");
    allowed("creates a slice", async || slices.create(&PostParams::default(), &own).await).await.unwrap();
    let name = "e2e-rights-gpu.nvidia.com";
    let found = slices.list(&everything).await.unwrap().items.into_iter();
    let found = found.into_iter().find(|slice| slice.metadata.name.as_deref() == Some(name)).unwrap();
    allowed("updates it", async || slices.replace(name, &dry_run(), &found).await).await.unwrap();
    allowed("deletes it", async || slices.delete(name, &DeleteParams::default()).await.map(drop)).await.unwrap();
    let nodes = Api::<Node>::all(controller.clone());
    allowed("lists nodes", async || nodes.list_metadata(&everything).await).await.unwrap();
    let (params, patch) = node_labels(&json!({"nvidia.com/e2e": "true"}));
    allowed("labels a node", async || nodes.patch(&node, &params, &patch).await.map(drop)).await.unwrap();
    let classes = Api::<DeviceClass>::all(controller.clone());
    allowed("lists classes", async || classes.list(&everything).await).await.unwrap();
    let own = class("e2e-rights-own", true);
    allowed("creates a class", async || classes.create(&PostParams::default(), &own).await).await.unwrap();
    let found = classes.list(&everything).await.unwrap().items.into_iter();
    let found = found.into_iter().find(|class| class.metadata.name == own.metadata.name).unwrap();
    allowed("updates it", async || classes.replace("e2e-rights-own", &dry_run(), &found).await).await.unwrap();
    let act = async || classes.delete("e2e-rights-own", &DeleteParams::default()).await.map(drop);
    allowed("deletes it", act).await.unwrap();
    let gpu_nodes = Api::<GpuNode>::all(controller.clone());
    allowed("lists GpuNodes", async || gpu_nodes.list(&everything).await).await.unwrap();
    let leases = Api::<Lease>::namespaced(controller.clone(), NAMESPACE);
    allowed("lists leases", async || leases.list(&everything).await).await.unwrap();
    let election = leases.get("kerf-controller").await.unwrap();
    allowed("renews its lease", async || leases.replace("kerf-controller", &dry_run(), &election).await).await.unwrap();
    let events = Api::<Event>::namespaced(controller.clone(), "default");
    let event = event("", "any");
    allowed("writes an Event", async || events.create(&dry_run(), &event).await).await.unwrap();
    let claims = Api::<ResourceClaim>::all(controller.clone());
    allowed("lists claims", async || claims.list(&everything).await).await.unwrap();
    let policies = Api::<GpuPolicy>::all(controller.clone());
    allowed("lists GpuPolicies", async || policies.list(&everything).await).await.unwrap();
    let mut params = PatchParams::apply("e2e").force();
    params.dry_run = true;
    let head =
        |kind: &str, name: &str| json!({"apiVersion": "kerf.dev/v1alpha1", "kind": kind, "metadata": {"name": name}});
    let (mut wish, mut report) = (head("GpuNode", OTHER), head("GpuPolicy", "e2e-rights"));
    wish["spec"] = json!({"gpus": {"gpu-3b-00-0": {"migMode": "Enabled"}}});
    report["status"] = json!({"nodesMatched": 1});
    let (wish, report) = (Patch::Apply(wish), Patch::Apply(report));
    allowed("tells a node", async || gpu_nodes.patch(OTHER, &params, &wish).await).await.unwrap();
    allowed("reports of a policy", async || policies.patch_status("e2e-rights", &params, &report).await).await.unwrap();
    let layouts = Api::<ConfigMap>::namespaced(controller.clone(), NAMESPACE);
    let only = |name: &str| ListParams::default().fields(&format!("metadata.name={name}"));
    allowed("reads the layouts", async || layouts.list(&only("kerf-layouts")).await).await.unwrap();
    let other = async || layouts.list(&only("kube-root-ca.crt")).await.map(drop);
    refused("cannot list resource \"configmaps\"", other).await.unwrap();
    let rule = policy();
    let own = async || policies.create(&dry_run(), &rule).await;
    refused("cannot create resource \"gpupolicies\"", own).await.unwrap();
    allowed("asks for the version", async || controller.apiserver_version().await).await.unwrap();
}

/// The API server finds nothing wrong with the types in the policies' expressions.
#[tokio::test]
async fn the_policies_are_sound() {
    let world = World::start().await.unwrap();
    let api = Api::<ValidatingAdmissionPolicy>::all(world.admin);
    for kind in ["gpunodes", "leases", "events", "resourceslices", "deviceclasses", "nodes"] {
        eventually("the policy is checked", PATIENCE, async || {
            let policy = api.get(&format!("{RELEASE}-{kind}")).await?;
            let status = policy.status.unwrap_or_default();
            let checked = status.observed_generation == policy.metadata.generation;
            let warnings = status.type_checking.and_then(|checking| checking.expression_warnings).unwrap_or_default();
            ensure!(warnings.is_empty(), "{kind}: {warnings:?}");
            Ok(checked.then_some(()))
        })
        .await
        .unwrap();
    }
}
