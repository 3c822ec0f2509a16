//! What can be seen of the program from outside: readiness, metrics, log lines.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use kerf_controller::index::{Index, SharedIndex};
use kerf_controller::metrics::{Metrics, Seen};
use serde_json::json;
use tempfile::TempDir;
use tokio::sync::watch;

use crate::fixtures::DRIVER;
use crate::testing::{compare_with_page, get, http_address, is_named_on_page, lines};

const PATIENCE: Duration = Duration::from_secs(30);

/// The program before an API server that is not there.
struct Controller {
    process: Child,
    log: PathBuf,
    _directory: TempDir,
}

impl Controller {
    fn start(http_address: &str) -> Controller {
        let directory = tempfile::tempdir().unwrap();
        let (log, kubeconfig) = (directory.path().join("log"), directory.path().join("kubeconfig"));
        // Nobody listens on the port when this returns.
        let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": format!("http://{nobody}")}}],
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

    fn until<T>(&self, what: &str, mut holds: impl FnMut(&str) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let log = std::fs::read_to_string(&self.log).unwrap();
            if let Some(found) = holds(&log) {
                return found;
            }
            assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}: {log}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn it_tells_what_it_waits_for() {
    let controller = Controller::start("127.0.0.1:0");
    let address: SocketAddr = controller.until("address in the log", http_address);
    assert_eq!(get(address, "/healthz"), (200, "ok\n".into()));
    let waiting = "waiting for: API server features, DeviceClasses, GpuNodes, GpuPolicies, Leases, Nodes, ResourceClaims, \
                   ResourceSlices, the layouts' ConfigMap\n";
    assert_eq!(get(address, "/readyz"), (503, waiting.into()));
    is_named_on_page(waiting);
    let unavailable = |metrics: &str| {
        let count = metrics.lines().find_map(|line| line.strip_prefix("kerf_errors_total{class=\"unavailable\"} "));
        count.unwrap().parse::<u64>().unwrap()
    };
    // Eight watches and the probe.
    controller.until("errors", |_| (unavailable(&get(address, "/metrics").1) >= 9).then_some(()));
    let metrics = get(address, "/metrics").1;
    for line in ["kerf_leader 0", "kerf_slices 0", "kerf_nodes{state=\"live\"} 0"] {
        assert!(metrics.contains(&format!("\n{line}\n")), "{line}: {metrics}");
    }
    let log = lines(&std::fs::read_to_string(&controller.log).unwrap());
    let watching = log.iter().find(|line| line["does"] == "watches Nodes").unwrap();
    assert_eq!((&watching["level"], &watching["span"]), (&"WARN".into(), &"part".into()), "{watching}");
    assert!(watching["error"].as_str().unwrap().contains("onnect"), "the cause is told: {watching}");
}

#[test]
fn an_address_that_is_taken_ends_the_program() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let mut controller = Controller::start(&address);
    let status = controller.process.wait().unwrap();
    let log = std::fs::read_to_string(Path::new(&controller.log)).unwrap();
    assert!(
        !status.success() && log.contains(&format!("cannot serve on {address}, given by --http-address: ")),
        "{log}"
    );
}

#[test]
fn every_metric_is_on_its_page() {
    let seen = Seen { index: SharedIndex::new(Index::new(DRIVER, true)), leading: watch::channel(false).1 };
    compare_with_page("controller", &Metrics::default().registry(&seen));
}
