//! NVIDIA's own MPS control daemon in a simulated driver root.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::sim::{Sim, one, wait_for};

#[test]
fn the_mps_control_daemon_runs_and_answers() {
    let sim = Sim::with_programs(&one("h100-80gb"));
    let pipes = tempfile::tempdir().unwrap();
    let control = || {
        let mut command = Command::new(sim.root().join("usr/bin/nvidia-cuda-mps-control"));
        command
            .env("CUDA_VISIBLE_DEVICES", &sim.state().gpus[0].uuid)
            .env("CUDA_MPS_PIPE_DIRECTORY", pipes.path())
            .env("CUDA_MPS_LOG_DIRECTORY", pipes.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        command
    };
    let mut daemon = control().arg("-f").spawn().unwrap();
    let ask = |line: &str| {
        let mut asking = control().spawn().unwrap();
        writeln!(asking.stdin.take().unwrap(), "{line}").unwrap();
        String::from_utf8(asking.wait_with_output().unwrap().stdout).unwrap()
    };
    wait_for("the control socket", || pipes.path().join("control").exists());
    ask("set_default_active_thread_percentage 30");
    let mut answer = String::new();
    wait_for("the percentage that was set", || {
        answer = ask("get_default_active_thread_percentage");
        answer.trim() == "30.0"
    });
    ask("quit");
    wait_for("the end of the daemon", || daemon.try_wait().unwrap().is_some());
}
