//! What can be seen of the program from outside: readiness, metrics, log lines.

use std::net::{SocketAddr, TcpListener};

use kerf_controller::index::{Index, SharedIndex};
use kerf_controller::metrics::{Metrics, Seen};
use tokio::sync::watch;

use crate::fixtures::DRIVER;
use crate::program::Controller;
use crate::testing::{compare_with_page, get, http_address, is_named_on_page, lines};

/// An address on which nobody listens when this returns.
fn nobody() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

#[test]
fn it_tells_what_it_waits_for() {
    let controller = Controller::start("127.0.0.1:0", nobody());
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
    let log = lines(&controller.log());
    let watching = log.iter().find(|line| line["does"] == "watches Nodes").unwrap();
    assert_eq!((&watching["level"], &watching["span"]), (&"WARN".into(), &"part".into()), "{watching}");
    assert!(watching["error"].as_str().unwrap().contains("onnect"), "the cause is told: {watching}");
}

#[test]
fn an_address_that_is_taken_ends_the_program() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let mut controller = Controller::start(&address, nobody());
    let status = controller.wait();
    let log = controller.log();
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
