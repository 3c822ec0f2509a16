//! A running `nvml-sim`.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use kerf_nvml::{DriverRoot, Library, Nvml};
use tempfile::TempDir;

/// Simulates a node until dropped.
pub(crate) struct Simulator {
    daemon: Child,
    dir: TempDir,
}

/// A program of `kerf-nvml-sim`, from the target directory that holds this test.
fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    let directory = test.parent().and_then(|deps| deps.parent()).expect("tests lie in <target>/<profile>/deps");
    let program = directory.join(name);
    assert!(program.exists(), "{} is missing: run `cargo build -p kerf-nvml-sim` first", program.display());
    program
}

impl Simulator {
    /// Simulates a node with these GPUs: the list `gpus` of a node file, as flow-style YAML.
    pub(crate) fn start(gpus: &str) -> Simulator {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let node = dir.path().join("node.yaml");
        std::fs::write(&node, format!("driverVersion: 535.261.03\ncudaDriverVersion: \"12.2\"\ngpus: {gpus}\n"))
            .expect("a file in it");
        let mut daemon = Command::new(program("nvml-sim"))
            .args(["serve", "--node"])
            .arg(&node)
            .arg("--root")
            .arg(dir.path().join("driver"))
            .stdout(Stdio::piped())
            .spawn()
            .expect("nvml-sim starts");
        let lines = BufReader::new(daemon.stdout.take().expect("it is piped")).lines();
        let simulator = Simulator { daemon, dir };
        let (ready, wait) = mpsc::channel();
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| _ = ready.send(line)));
        let line = wait.recv_timeout(Duration::from_secs(20)).expect("nvml-sim says something within 20 s");
        assert_eq!(line.trim(), "ready");
        simulator
    }

    pub(crate) fn root(&self) -> DriverRoot {
        DriverRoot::at(self.dir.path().join("driver"))
    }

    pub(crate) fn open(&self) -> Box<dyn Nvml> {
        Box::new(Library::open(&self.root()).expect("NVML starts"))
    }

    /// Runs `nvml-sim ctl`.
    pub(crate) fn ctl(&self, arguments: &[&str]) {
        let mut command = Command::new(program("nvml-sim"));
        command.args(["ctl", "--root"]).arg(self.root().path()).args(arguments).stdout(Stdio::null());
        assert!(command.status().expect("nvml-sim starts").success(), "{command:?}");
    }
}

impl Drop for Simulator {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}
