//! The program itself, as its kubelet sees it: from the start to SIGTERM.

use std::error::Error;
use std::ffi::OsString;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kerf_kubelet_plugin::hook;
use kerf_kubelet_plugin::paths::Paths;
use kerf_proto::dra::v1::dra_plugin_client::DraPluginClient;
use kerf_proto::dra::v1::{
    self, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest,
};
use kerf_proto::registration::registration_client::RegistrationClient;
use kerf_proto::registration::{InfoRequest, RegistrationStatus};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::{NamedTempFile, TempDir};

use crate::api_server::ApiServer;
use crate::engine_node::Node;
use crate::rpc;

pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct Plugin {
    pub(crate) api: ApiServer,
    pub(crate) process: Child,
    pub(crate) paths: Paths,
    /// Where it logs: not in the directory, of which every change counts.
    pub(crate) log: NamedTempFile,
    arguments: Vec<OsString>,
    level: &'static str,
    pub(crate) directory: Arc<TempDir>,
}

impl Plugin {
    /// Starts the program on a node whose driver is at `driver_root`, and registers it as the kubelet does.
    pub(crate) async fn start(driver_root: &Path) -> Plugin {
        let mut plugin = Plugin::spawn(driver_root, "error", &[]).await;
        plugin.go();
        plugin.register().await;
        plugin
    }

    /// The same before the kubelet finds it, with `level` as RUST_LOG and `more` arguments.
    pub(crate) async fn begin(driver_root: &Path, level: &'static str, more: &[&str]) -> Plugin {
        let mut plugin = Plugin::spawn(driver_root, level, more).await;
        plugin.go();
        plugin
    }

    /// The program in a process that begins with [`Plugin::go`].
    pub(crate) async fn spawn(driver_root: &Path, level: &'static str, more: &[&str]) -> Plugin {
        let directory = Arc::new(tempfile::tempdir().unwrap());
        let [kubelet, cdi, hooks] = ["kubelet", "cdi", "hooks"].map(|name| directory.path().join(name));
        let api = ApiServer::default();
        api.put("/api/v1/nodes/node-1", json!({"metadata": {"name": "node-1", "uid": "node-uid"}}));
        let kubeconfig = directory.path().join("kubeconfig");
        std::fs::write(&kubeconfig, api.listen().await.to_string()).unwrap();
        let mut arguments: Vec<OsString> = ["--node-name", "node-1", "--log-format", "json"].map(OsString::from).into();
        let hook = directory.path().join("hook");
        std::fs::write(&hook, "a program").unwrap();
        let paths = [
            ("--cdi-hook", hook.as_path()),
            ("--driver-root", driver_root),
            ("--kubelet-root", &kubelet),
            ("--cdi-root", &cdi),
            ("--hook-root", &hooks),
            ("--kubeconfig", &kubeconfig),
        ];
        arguments.extend(paths.into_iter().flat_map(|(flag, path)| [OsString::from(flag), path.into()]));
        arguments.extend(more.iter().map(OsString::from));
        let log = NamedTempFile::new().unwrap();
        let process = spawn(&arguments, level, &log);
        let paths = Paths::new(&kubelet, &cdi, "gpu.nvidia.com");
        Plugin { api, process, paths, log, arguments, level, directory }
    }

    /// Where the program that container runtimes run is when it has begun.
    pub(crate) fn hook(&self) -> PathBuf {
        self.directory.path().join("hooks/gpu.nvidia.com").join(hook::NAME)
    }

    /// Another pod on the same node; it is not registered.
    pub(crate) fn beside(&self, pod_uid: &str, more: &[&str]) -> Plugin {
        let mut arguments = self.arguments.clone();
        arguments.extend(["--pod-uid", pod_uid].iter().chain(more).map(OsString::from));
        let log = NamedTempFile::new().unwrap();
        let mut plugin = Plugin {
            api: self.api.clone(),
            process: spawn(&arguments, self.level, &log),
            paths: self.paths.clone().of_pod(pod_uid),
            log,
            arguments,
            level: self.level,
            directory: Arc::clone(&self.directory),
        };
        plugin.go();
        plugin
    }

    /// After the end of the program, another one, which begins with [`Plugin::go`].
    pub(crate) fn spawn_again(&mut self) {
        self.process = spawn(&self.arguments, self.level, &self.log);
    }

    /// Lets a program begin that was just made.
    pub(crate) fn go(&mut self) {
        drop(self.process.stdin.take());
    }

    /// What the kubelet does when it finds the socket.
    pub(crate) async fn register(&mut self) {
        let socket = self.paths.registration_socket.clone();
        // A program that was killed leaves a socket where nobody listens.
        self.until("registration socket", || UnixStream::connect(&socket).is_ok()).await;
        self.try_register().await.unwrap();
    }

    /// The same, now or never.
    pub(crate) async fn try_register(&self) -> Result<(), Box<dyn Error>> {
        let mut kubelet = RegistrationClient::new(rpc::try_connect(&self.paths.registration_socket).await?);
        let info = kubelet.get_info(InfoRequest {}).await?.into_inner();
        assert_eq!(Path::new(&info.endpoint), self.paths.dra_socket);
        let registered = RegistrationStatus { plugin_registered: true, error: String::new() };
        kubelet.notify_registration_status(registered).await?;
        Ok(())
    }

    /// What the kubelet does when it does not want the plugin.
    pub(crate) async fn refuse(&self) {
        let mut kubelet = RegistrationClient::new(rpc::connect(&self.paths.registration_socket).await);
        let refused = RegistrationStatus { plugin_registered: false, error: "no".to_owned() };
        kubelet.notify_registration_status(refused).await.unwrap();
    }

    /// Waits until something holds, while the program runs.
    pub(crate) async fn until(&mut self, what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds() {
            assert_eq!(self.process.try_wait().unwrap(), None, "the program has ended");
            assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until the status of the GpuNode is as it should be, and gives it.
    pub(crate) async fn status(&mut self, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let api = self.api.clone();
        let status = || {
            let found = api.get("/apis/kerf.dev/v1alpha1/gpunodes/node-1");
            found.map_or(Value::Null, |object| object["status"].clone())
        };
        self.until(what, || is(&status())).await;
        status()
    }

    pub(crate) fn lease_holder(&self) -> Option<String> {
        let lease = self.api.get("/apis/coordination.k8s.io/v1/namespaces/kerf-system/leases/kubelet-plugin-node-1");
        lease?["spec"]["holderIdentity"].as_str().map(str::to_owned)
    }

    fn claim(&self, name: &str, device: &str) -> v1::Claim {
        self.claim_of(name, &[device])
    }

    /// A claim that is allocated these devices.
    pub(crate) fn claim_of(&self, name: &str, devices: &[&str]) -> v1::Claim {
        let result = |device| json!({"request": "gpu", "driver": "gpu.nvidia.com", "pool": "node-1", "device": device});
        let results: Vec<_> = devices.iter().map(result).collect();
        let claim = json!({
            "metadata": {"name": name, "namespace": "default", "uid": format!("uid-of-{name}")},
            "spec": {},
            "status": {"allocation": {"devices": {"results": results}}},
        });
        self.api.put(&format!("/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{name}"), claim);
        v1::Claim { namespace: "default".into(), uid: format!("uid-of-{name}"), name: name.into() }
    }

    pub(crate) async fn prepare(&self, claim: &v1::Claim) -> NodePrepareResourceResponse {
        let mut kubelet = DraPluginClient::new(rpc::connect(&self.paths.dra_socket).await);
        let request = NodePrepareResourcesRequest { claims: vec![claim.clone()] };
        let mut answers = kubelet.node_prepare_resources(request).await.unwrap().into_inner().claims;
        answers.remove(&claim.uid).unwrap()
    }

    pub(crate) async fn unprepare(&self, claim: &v1::Claim) -> String {
        let mut kubelet = DraPluginClient::new(rpc::connect(&self.paths.dra_socket).await);
        let request = NodeUnprepareResourcesRequest { claims: vec![claim.clone()] };
        let mut answers = kubelet.node_unprepare_resources(request).await.unwrap().into_inner().claims;
        answers.remove(&claim.uid).unwrap().error
    }

    pub(crate) fn ask_to_end(&self) {
        kill_process(Pid::from_child(&self.process), Signal::TERM).unwrap();
    }

    /// As Kubernetes ends a pod.
    pub(crate) async fn terminate(&mut self) -> ExitStatus {
        self.ask_to_end();
        self.ended().await
    }

    /// Waits for the end.
    pub(crate) async fn ended(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "the program does not end");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// The program in a process that waits for the end of its input before it begins.
fn spawn(arguments: &[OsString], level: &str, log: &NamedTempFile) -> Child {
    Command::new("sh")
        .args(["-c", "read go; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_kerf-kubelet-plugin")])
        .args(arguments)
        .env("RUST_LOG", level)
        .stdin(Stdio::piped())
        .stderr(log.as_file().try_clone().unwrap())
        .spawn()
        .unwrap()
}

impl Drop for Plugin {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(self.log.path()).unwrap_or_default());
        }
        // Where a test has failed before the program ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test]
async fn a_node_without_a_driver_says_so_and_serves_all_the_same() {
    let nothing = tempfile::tempdir().unwrap();
    let mut plugin = Plugin::start(nothing.path()).await;

    let status = plugin.status("status", |status| status["registered"] == true).await;
    let message = status["message"].as_str().unwrap();
    assert!(message.starts_with("nothing is offered: ") && message.contains("libnvidia-ml.so.1"), "{message}");
    let claim = plugin.claim("slice", "gpu-3b-00-0-mig-1g10gb-0");
    let error = plugin.prepare(&claim).await.error;
    assert!(error.starts_with("the NVIDIA driver on this node cannot be used: "), "{error}");
    assert!(error.contains("libnvidia-ml.so.1"), "{error}");
    assert_eq!(plugin.unprepare(&claim).await, "", "a claim that was never prepared");
    assert!(plugin.lease_holder().is_some_and(|holder| holder.starts_with("node-1_")));

    assert!(plugin.terminate().await.success());
    assert!(!plugin.paths.registration_socket.exists() && !plugin.paths.dra_socket.exists());
    assert_eq!(plugin.lease_holder(), None, "released");
}

#[tokio::test]
async fn a_slice_is_carved_reported_and_removed() {
    let node = Node::start("[{product: h100-80gb}, {product: l40s}]");
    let mut plugin = Plugin::start(&node.root()).await;
    let status = plugin.status("inventory", |status| status["gpus"][1]["offer"] == "Whole").await;
    assert_eq!(status["gpus"][0]["offer"], "WholeOrPartitions", "{status}");
    assert_eq!(status["gpus"][0]["name"], "gpu-3b-00-0");
    assert_eq!(status["driverVersion"], "535.261.03");
    assert_eq!(status.get("message"), None);

    let device = "gpu-3b-00-0-mig-1g10gb-4";
    let claim = plugin.claim("slice", device);
    let prepared = plugin.prepare(&claim).await;
    assert_eq!(prepared.error, "");
    assert_eq!(prepared.devices[0].device_name, device);
    assert_eq!(prepared.devices[0].cdi_device_ids, [format!("k8s.gpu.nvidia.com/claim=uid-of-slice-{device}")]);
    let status = plugin
        .status("instance", |status| status["gpus"][0]["mig"]["instances"][0]["claimUid"] == "uid-of-slice")
        .await;
    assert_eq!(status["gpus"][0]["mig"]["instances"][0]["placement"], json!({"start": 4, "size": 1}));
    assert_eq!(status["gpus"][0]["offer"], "WholeOrPartitions", "the instance is explained");
    assert_eq!(plugin.prepare(&claim).await, prepared, "the same again");

    let other = plugin.prepare(&plugin.claim("other", device)).await;
    assert!(other.devices.is_empty() && other.error.contains("default/slice"), "{}", other.error);

    assert_eq!(plugin.unprepare(&claim).await, "");
    plugin.status("no instance", |status| status["gpus"][0]["mig"]["instances"] == json!([])).await;
    assert!(plugin.terminate().await.success());
}
