//! Processes that the harness starts, watches and ends.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::wait::eventually;

/// The path of a program of this workspace, built into the same target directory as the caller.
pub fn built(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find the harness's own path")?;
    let directory = own
        .ancestors()
        .skip(1)
        .find(|directory| directory.join(name).is_file())
        .with_context(|| format!("{name} is not built beside {}: run `make build`", own.display()))?;
    Ok(directory.join(name))
}

/// A running program whose output goes to a log file. Killed when dropped, unless left to itself.
#[derive(Debug)]
pub struct Program {
    name: String,
    child: Option<Child>,
    log: PathBuf,
}

impl Program {
    /// Starts `command` with its output appended to `log`.
    pub fn start(name: &str, mut command: Command, log: &Path) -> Result<Program> {
        let output = File::options()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("cannot open the log {}", log.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("cannot start {name} ({:?})", command.get_program()))?;
        Ok(Program { name: name.to_owned(), child: Some(child), log: log.to_owned() })
    }

    /// The process id.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Fails when the program has ended by itself.
    pub fn check(&mut self) -> Result<()> {
        if let Some(child) = &mut self.child
            && let Some(status) = child.try_wait()?
        {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            let tail: Vec<&str> = log.lines().rev().take(20).collect();
            let tail: Vec<&str> = tail.into_iter().rev().collect();
            bail!("{} ended with {status}:\n{}", self.name, tail.join("\n"));
        }
        Ok(())
    }

    /// SIGKILL: the program gets no chance to tidy up.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// SIGTERM, then waits for an orderly end.
    pub async fn terminate(&mut self) -> Result<()> {
        let Some(mut child) = self.child.take() else { return Ok(()) };
        let status = Command::new("kill").arg(child.id().to_string()).status()?;
        if !status.success() {
            bail!("cannot signal {}", self.name);
        }
        let name = self.name.clone();
        let ended =
            eventually(&format!("{name} ends after SIGTERM"), Duration::from_secs(60), async || Ok(child.try_wait()?))
                .await;
        if ended.is_err() {
            child.kill()?;
            child.wait()?;
        }
        ended.map(|_| ())
    }

    /// Resident memory in KiB, from `/proc`.
    pub fn resident_kib(&self) -> Result<u64> {
        let pid = self.pid().context("not running")?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix("kB")?.trim().parse().ok())
            .context("no VmRSS in /proc")
    }

    /// Lets the program run on after the harness ends; returns its process id.
    pub fn leave(mut self) -> Option<u32> {
        let pid = self.pid();
        self.child = None;
        pid
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Nobody can be told any more; a process that is already gone is what is wanted.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
