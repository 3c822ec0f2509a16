//! A simulated node.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use kerf_nvml::{DriverRoot, Library};
use serde_json::Value;
use tempfile::TempDir;

/// Simulates a node until dropped.
pub(crate) struct Simulator {
    daemon: Child,
    directory: TempDir,
}

/// `nvml-sim`, from the target directory that holds this test.
fn nvml_sim() -> Command {
    let test = std::env::current_exe().expect("the test has a path");
    let directory = test.parent().and_then(|deps| deps.parent()).expect("tests lie in <target>/<profile>/deps");
    let program: PathBuf = directory.join("nvml-sim");
    assert!(program.exists(), "{} is missing: run `cargo build -p kerf-nvml-sim` first", program.display());
    Command::new(program)
}

impl Simulator {
    /// A node with these GPUs: the list `gpus` of a node file, as flow-style YAML.
    pub(crate) fn start(gpus: &str) -> Simulator {
        Simulator::start_with("", gpus)
    }

    /// The same with one more line in the node file.
    pub(crate) fn start_with(line: &str, gpus: &str) -> Simulator {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let node = directory.path().join("node.yaml");
        let text = format!("driverVersion: 535.261.03\ncudaDriverVersion: \"12.2\"\n{line}\ngpus: {gpus}\n");
        std::fs::write(&node, text).expect("a file in it");
        let mut serve = nvml_sim();
        serve.args(["serve", "--node"]).arg(&node).arg("--root").arg(directory.path().join("driver"));
        let mut daemon = serve.stdout(Stdio::piped()).spawn().expect("nvml-sim starts");
        let lines = BufReader::new(daemon.stdout.take().expect("it is piped")).lines();
        let simulator = Simulator { daemon, directory };
        let (said, wait) = mpsc::channel();
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| _ = said.send(line)));
        let first = wait.recv_timeout(Duration::from_secs(30)).expect("nvml-sim says something within 30 s");
        assert_eq!(first.trim(), "ready");
        simulator
    }

    pub(crate) fn root(&self) -> DriverRoot {
        DriverRoot::at(self.directory.path().join("driver"))
    }

    pub(crate) fn open(&self) -> Library {
        Library::open(&self.root()).expect("NVML starts")
    }

    /// Runs `nvml-sim ctl` and returns what it prints.
    pub(crate) fn ctl(&self, arguments: &[&str]) -> String {
        let mut command = nvml_sim();
        command.args(["ctl", "--root"]).arg(self.root().path()).args(arguments);
        let output = command.output().expect("nvml-sim starts");
        assert!(output.status.success(), "{command:?}");
        String::from_utf8(output.stdout).expect("text")
    }

    /// Modes and instances of every GPU.
    pub(crate) fn state(&self) -> Value {
        serde_json::from_str(&self.ctl(&["state"])).expect("JSON")
    }
}

impl Drop for Simulator {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}
