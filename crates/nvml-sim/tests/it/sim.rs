//! A simulated node for one test.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use kerf_nvml_sim::daemon::NodeState;
use tempfile::TempDir;

/// A node of one GPU.
pub(crate) fn one(product: &str) -> String {
    node(&format!("gpus: [{{product: {product}}}]"))
}

/// A node file.
pub(crate) fn node(rest: &str) -> String {
    format!("driverVersion: 535.261.03\ncudaDriverVersion: \"12.2\"\n{rest}\n")
}

/// A served node, which ends with the test.
pub(crate) struct Sim {
    daemon: Child,
    directory: TempDir,
}

impl Sim {
    /// A node without NVIDIA's programs.
    pub(crate) fn start(node: &str) -> Sim {
        Sim::serve(node, None)
    }

    /// A node with them.
    pub(crate) fn with_programs(node: &str) -> Sim {
        Sim::serve(node, Some(&nvidia_programs()))
    }

    fn serve(node: &str, programs: Option<&Path>) -> Sim {
        let directory = TempDir::new().unwrap();
        std::fs::write(directory.path().join("node.yaml"), node).unwrap();
        let daemon = spawn(directory.path(), programs);
        Sim { daemon, directory }
    }

    /// The driver root.
    pub(crate) fn root(&self) -> PathBuf {
        self.directory.path().join("root")
    }

    /// The library in the driver root.
    pub(crate) fn library(&self) -> PathBuf {
        self.root().join(format!("usr/lib/{}-linux-gnu/libnvidia-ml.so.1", std::env::consts::ARCH))
    }

    /// Ends the daemon as systemd would, and waits for it.
    pub(crate) fn stop(&mut self) {
        terminate(&mut self.daemon);
    }

    /// Starts it again.
    pub(crate) fn start_again(&mut self) {
        self.daemon = spawn(self.directory.path(), None);
    }

    /// What `nvidia-smi` of the driver root prints. It must succeed.
    pub(crate) fn smi(&self, arguments: &str) -> String {
        text(&self.smi_output(arguments), arguments)
    }

    /// How `nvidia-smi` of the driver root ends.
    pub(crate) fn smi_output(&self, arguments: &str) -> Output {
        run(Command::new(self.root().join("usr/bin/nvidia-smi")).args(arguments.split_whitespace()))
    }

    /// What `nvml-sim ctl` prints. It must succeed.
    pub(crate) fn ctl(&self, arguments: &str) -> String {
        text(&self.ctl_output(arguments), arguments)
    }

    /// How `nvml-sim ctl` ends.
    pub(crate) fn ctl_output(&self, arguments: &str) -> Output {
        let mut ctl = Command::new(env!("CARGO_BIN_EXE_nvml-sim"));
        run(ctl.arg("ctl").arg("--root").arg(self.root()).args(arguments.split_whitespace()))
    }

    pub(crate) fn state(&self) -> NodeState {
        serde_json::from_str(&self.ctl("state")).unwrap()
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        terminate(&mut self.daemon);
    }
}

fn spawn(directory: &Path, programs: Option<&Path>) -> Child {
    assert_eq!(std::fs::metadata("/proc/self").unwrap().uid(), 0, "these tests make device nodes: run them as root");
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvml-sim"));
    command.arg("serve").arg("--node").arg(directory.join("node.yaml")).arg("--root").arg(directory.join("root"));
    if let Some(programs) = programs {
        command.arg("--programs").arg(programs);
    }
    let mut daemon = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n", "nvml-sim serve did not start");
    daemon
}

fn terminate(child: &mut Child) {
    if child.try_wait().unwrap().is_some() {
        return;
    }
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    child.wait().unwrap();
}

/// Runs a program to its end.
pub(crate) fn run(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// What a program printed, which must have succeeded.
pub(crate) fn text(output: &Output, what: &str) -> String {
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{what}: {}\n{printed}\n{complained}", output.status);
    printed
}

/// Waits until something holds.
pub(crate) fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < deadline, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Where NVIDIA's own programs are.
fn nvidia_programs() -> PathBuf {
    let directory =
        std::env::var_os("KERF_NVIDIA_PROGRAMS").map_or_else(|| cache().join("nvidia-programs"), PathBuf::from);
    assert!(
        directory.join("usr/bin/nvidia-smi").exists(),
        "NVIDIA's programs are not in {}: run .ci/nvidia-programs.sh, or set KERF_NVIDIA_PROGRAMS",
        directory.display()
    );
    directory
}

/// Where what tests download is kept.
pub(crate) fn cache() -> PathBuf {
    PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cache/kerf")
}
