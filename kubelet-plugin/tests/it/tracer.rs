//! Sees the system calls by which a process changes the world, and kills or holds it at a chosen one.
//!
//! strace(1) can kill at a system call too (`--inject=...:signal=SIGKILL:when=N`), but its "accounting of syscalls that are
//! subject to injection is done per syscall and per tracee", and a tracee is a thread: only the first thread to reach a number
//! would ever be hit. So this speaks ptrace(2) itself, and a [`Moment`] is known by what the call does, by whichever thread.
//!
//! A process killed at the entry of a call has not made it: a pending SIGKILL makes the kernel skip the call
//! (`ptrace_report_syscall_entry` in Linux' `include/linux/ptrace.h`). One killed at the exit has made it and nothing more.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::libc;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde_json::Value;

/// Just before or just after a step that changes the world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Moment {
    /// The step: `fsync claims/a.tmp`, `send nvmlDeviceSetMigMode`.
    pub(crate) step: String,
    /// The how many-th of this step, from 1.
    pub(crate) nth: usize,
    pub(crate) side: Side,
}

/// Which side of the step. Only messages have an after: someone else goes on with them. What a process does to files is
/// done when the call is over, so that the moment after one step is the moment before the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Before,
    After,
}

/// What happens at which moment.
pub(crate) enum Strike {
    /// Nothing: the steps are counted.
    Never,
    /// The whole process gets SIGKILL.
    Kill(Moment),
    /// The thread goes no further until the tracer is finished.
    Hold(Moment),
}

/// A process under watch.
pub(crate) struct Tracer {
    process: Pid,
    signs: Arc<Signs>,
    thread: JoinHandle<Vec<Moment>>,
}

/// What was seen of a process.
pub(crate) struct Trace {
    pub(crate) moments: Vec<Moment>,
    /// Whether the moment came.
    pub(crate) struck: bool,
}

#[derive(Default)]
struct Signs {
    finish: AtomicBool,
    struck: AtomicBool,
}

impl Tracer {
    /// Watches a running process from now on. Paths below `root` are told without it. Nobody may wait for the process
    /// meanwhile: waits of this process take what is for the tracer.
    pub(crate) fn attach(process: &Child, root: &Path, strike: Strike) -> Tracer {
        let process = Pid::from_raw(process.id().try_into().unwrap());
        let signs = Arc::<Signs>::default();
        let (attached, wait) = mpsc::channel();
        let mut watched = Watched {
            process,
            root: root.to_owned(),
            strike,
            signs: Arc::clone(&signs),
            calls: HashMap::new(),
            moments: Vec::new(),
        };
        let thread = std::thread::spawn(move || {
            watched.watch(&attached);
            watched.moments
        });
        wait.recv().expect("the process can be traced");
        Tracer { process, signs, thread }
    }

    /// Whether the moment has come.
    pub(crate) fn has_struck(&self) -> bool {
        self.signs.struck.load(Ordering::SeqCst)
    }

    /// Lets the process go.
    pub(crate) fn finish(self) -> Trace {
        self.signs.finish.store(true, Ordering::SeqCst);
        // A traced process stops for any signal, also for one that it ignores: that wakes the tracer. It may have ended.
        let _ = kill(self.process, Signal::SIGWINCH);
        let moments = self.thread.join().unwrap();
        Trace { moments, struck: self.signs.struck.load(Ordering::SeqCst) }
    }
}

/// The tracer's thread: ptrace(2) is for the thread that attached. When it ends the kernel detaches everything.
struct Watched {
    process: Pid,
    root: PathBuf,
    strike: Strike,
    signs: Arc<Signs>,
    /// The message that a thread is about to send.
    calls: HashMap<Pid, (String, usize)>,
    moments: Vec<Moment>,
}

impl Watched {
    fn watch(&mut self, attached: &mpsc::Sender<()>) {
        let mut pending = self.seize();
        // Other tests have children too: only those of this thread are waited for.
        let flags = WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD;
        loop {
            let status = match waitpid(None, Some(flags)) {
                Err(Errno::ECHILD) => return,
                status => status.unwrap(),
            };
            if self.signs.finish.load(Ordering::SeqCst) {
                return;
            }
            let Some(thread) = status.pid() else { continue };
            let go_on = match status {
                WaitStatus::PtraceSyscall(_) => self.call(thread),
                WaitStatus::Stopped(_, signal) => resume(thread, Some(signal)),
                WaitStatus::PtraceEvent(..) => resume(thread, None),
                _ => true,
            };
            if pending.remove(&thread) && pending.is_empty() || !go_on {
                // Nobody listens to a second one.
                let _ = attached.send(());
            }
            if !go_on {
                return;
            }
        }
    }

    /// Attaches to every thread, those that come meanwhile included. Tells which have been asked to stop.
    fn seize(&self) -> BTreeSet<Pid> {
        let (mut seen, mut asked) = (BTreeSet::new(), BTreeSet::new());
        loop {
            let threads = std::fs::read_dir(format!("/proc/{}/task", self.process)).unwrap();
            let threads = threads.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap());
            let new: Vec<_> = threads.map(Pid::from_raw).filter(|thread| !seen.contains(thread)).collect();
            if new.is_empty() {
                return asked;
            }
            for thread in new {
                match ptrace::seize(thread, Options::PTRACE_O_TRACECLONE | Options::PTRACE_O_TRACESYSGOOD) {
                    // Ended already, or attached with the thread that made it.
                    Err(Errno::ESRCH | Errno::EPERM) if thread != self.process => {}
                    done => {
                        done.unwrap();
                        if ptrace::interrupt(thread).is_ok() {
                            asked.insert(thread);
                        }
                    }
                }
                seen.insert(thread);
            }
        }
    }

    /// A thread stands at the entry or the exit of a call. Tells whether to go on watching.
    fn call(&mut self, thread: Pid) -> bool {
        // A thread that cannot be read has been killed meanwhile.
        let Ok(info) = ptrace::syscall_info(thread) else { return true };
        let moment = if info.op == libc::PTRACE_SYSCALL_INFO_ENTRY {
            Call::of(thread).and_then(|call| call.step(&self.root)).map(|step| {
                let before = |seen: &&Moment| seen.step == step && seen.side == Side::Before;
                let nth = self.moments.iter().filter(before).count() + 1;
                if step.starts_with(SEND) {
                    self.calls.insert(thread, (step.clone(), nth));
                }
                Moment { step, nth, side: Side::Before }
            })
        } else {
            self.calls.remove(&thread).map(|(step, nth)| Moment { step, nth, side: Side::After })
        };
        let Some(moment) = moment else { return resume(thread, None) };
        self.moments.push(moment.clone());
        match &self.strike {
            Strike::Kill(at) if *at == moment => {
                kill(self.process, Signal::SIGKILL).unwrap();
                self.signs.struck.store(true, Ordering::SeqCst);
                false
            }
            Strike::Hold(at) if *at == moment => {
                self.signs.struck.store(true, Ordering::SeqCst);
                true
            }
            _ => resume(thread, None),
        }
    }
}

/// Lets a thread run to its next call, with a signal that came for it.
fn resume(thread: Pid, signal: Option<Signal>) -> bool {
    match ptrace::syscall(thread, signal) {
        // Killed meanwhile.
        Err(Errno::ESRCH) => {}
        done => done.unwrap(),
    }
    true
}

const SEND: &str = "send ";

/// A system call that a thread is about to make.
struct Call {
    thread: Pid,
    number: libc::c_long,
    arguments: Vec<u64>,
}

/// What of a call's arguments tells what it is about.
enum Operand {
    Path(usize),
    File(usize),
}

use Operand::{File as Fd, Path as Name};

/// The calls that always change the world.
const STEPS: &[(libc::c_long, &str, &[Operand])] = &[
    (libc::SYS_fsync, "fsync", &[Fd(0)]),
    (libc::SYS_fdatasync, "fdatasync", &[Fd(0)]),
    (libc::SYS_ftruncate, "ftruncate", &[Fd(0)]),
    (libc::SYS_flock, "flock", &[Fd(0)]),
    (libc::SYS_fchmod, "fchmod", &[Fd(0)]),
    (libc::SYS_fchmodat, "fchmodat", &[Name(1)]),
    (libc::SYS_renameat, "renameat", &[Name(1), Name(3)]),
    (libc::SYS_renameat2, "renameat2", &[Name(1), Name(3)]),
    (libc::SYS_unlinkat, "unlinkat", &[Name(1)]),
    (libc::SYS_mkdirat, "mkdirat", &[Name(1)]),
    (libc::SYS_mknodat, "mknodat", &[Name(1)]),
    (libc::SYS_linkat, "linkat", &[Name(1), Name(3)]),
    (libc::SYS_symlinkat, "symlinkat", &[Name(2)]),
    (libc::SYS_bind, "bind", &[]),
    // Those that newer architectures have not.
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_chmod, "chmod", &[Name(0)]),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_rename, "rename", &[Name(0), Name(1)]),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_unlink, "unlink", &[Name(0)]),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_rmdir, "rmdir", &[Name(0)]),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_mkdir, "mkdir", &[Name(0)]),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_link, "link", &[Name(0), Name(1)]),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_symlink, "symlink", &[Name(1)]),
];

impl Call {
    fn of(thread: Pid) -> Option<Call> {
        // `number argument...`, see proc(5).
        let line = std::fs::read_to_string(format!("/proc/{thread}/syscall")).ok()?;
        let mut words = line.split_whitespace();
        let number = words.next()?.parse().ok()?;
        let hex = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok();
        Some(Call { thread, number, arguments: words.map_while(hex).collect() })
    }

    /// What it does to the world; `None` if nothing.
    fn step(&self, root: &Path) -> Option<String> {
        match self.number {
            libc::SYS_openat => {
                let changes = self.arguments[2] as libc::c_int & (libc::O_CREAT | libc::O_TRUNC) != 0;
                changes.then(|| format!("open {}", name(&self.text(self.arguments[1]), root)))
            }
            libc::SYS_fcntl => {
                let locks = [libc::F_SETLK, libc::F_SETLKW, libc::F_OFD_SETLK, libc::F_OFD_SETLKW];
                let is_lock = locks.contains(&(self.arguments[1] as libc::c_int));
                is_lock.then(|| format!("lock {}", name(&self.file(0), root)))
            }
            libc::SYS_write | libc::SYS_pwrite64 | libc::SYS_sendto => {
                self.data(&self.bytes(self.arguments[1], self.arguments[2]), root)
            }
            libc::SYS_writev => self.data(&self.vectors(self.arguments[1], self.arguments[2]), root),
            libc::SYS_sendmsg => {
                // `msg_iov` and `msg_iovlen` of struct msghdr, on 64 bits.
                let header = self.bytes(self.arguments[1] + 16, 16);
                self.data(&self.vectors(word(&header, 0), word(&header, 8)), root)
            }
            number => {
                let (_, name_of_call, operands) = STEPS.iter().find(|(step, ..)| *step == number)?;
                let mut step = (*name_of_call).to_owned();
                for operand in *operands {
                    let path = match operand {
                        Name(index) => self.text(self.arguments[*index]),
                        Fd(index) => self.file(*index),
                    };
                    step = format!("{step} {}", name(&path, root));
                }
                Some(step)
            }
        }
    }

    /// Bytes go into the file or socket that is the first argument.
    fn data(&self, bytes: &[u8], root: &Path) -> Option<String> {
        let file = self.file(0);
        if file.starts_with("socket:") {
            return message(bytes);
        }
        // Neither the log nor what a process tells itself: eventfds, pipes.
        (self.arguments[0] > 2 && file.starts_with('/')).then(|| format!("write {}", name(&file, root)))
    }

    /// What a file descriptor leads to.
    fn file(&self, index: usize) -> String {
        let link = std::fs::read_link(format!("/proc/{}/fd/{}", self.thread, self.arguments[index]));
        link.map_or_else(|_| "?".to_owned(), |path| path.to_string_lossy().into_owned())
    }

    fn text(&self, address: u64) -> String {
        let bytes = self.bytes(address, libc::PATH_MAX as u64);
        let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).into_owned()
    }

    fn vectors(&self, address: u64, count: u64) -> Vec<u8> {
        let vectors = self.bytes(address, count * 16);
        vectors.chunks_exact(16).flat_map(|vector| self.bytes(word(vector, 0), word(vector, 8))).collect()
    }

    /// As many of these bytes as can be read and are of interest.
    fn bytes(&self, address: u64, count: u64) -> Vec<u8> {
        let mut bytes = vec![0; count.min(1 << 14) as usize];
        let read =
            File::open(format!("/proc/{}/mem", self.thread)).and_then(|memory| memory.read_at(&mut bytes, address));
        bytes.truncate(read.unwrap_or(0));
        bytes
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).map_or(0, |word| u64::from_ne_bytes(word.try_into().unwrap()))
}

/// A message, by what is in it. Those that only ask for something change nothing.
fn message(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let mut words = text.split(' ');
    match (words.next(), words.next()) {
        (Some("GET"), _) => return None,
        (Some(method @ ("POST" | "PUT" | "PATCH" | "DELETE")), Some(path)) => {
            let path = path.split('?').next().unwrap_or_default();
            return Some(format!("{SEND}{method} {path}"));
        }
        _ => {}
    }
    // To the simulated driver: a length and JSON.
    match serde_json::from_slice::<Value>(bytes.get(4..).unwrap_or_default()) {
        Ok(request) => {
            // The library looks things up for itself as well, in the name of no function.
            let is_step = |function: &&str| !function.is_empty() && !function.contains("Get");
            let function = request["function"].as_str().filter(is_step);
            function.map(|function| format!("{SEND}{function}"))
        }
        Err(_) => Some(format!("{SEND}to the kubelet")),
    }
}

/// A path below the root, without what is random in it.
fn name(path: &str, root: &Path) -> String {
    let path = Path::new(path).strip_prefix(root).unwrap_or(Path::new(path)).to_string_lossy().into_owned();
    match path.strip_suffix(".tmp").and_then(|path| path.rsplit_once('.')) {
        // `.<name>.<random>.tmp`, as the CDI directory has it.
        Some((start, _)) if start.contains("/.") => format!("{start}.*.tmp"),
        _ => path,
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Moment { step, nth, side } = self;
        write!(f, "{} {step} ({nth})", if *side == Side::Before { "before" } else { "after" })
    }
}

/// The instrument itself: what is killed before a step has done the steps before it, and not this one.
#[test]
fn a_process_dies_before_the_step_that_is_meant() {
    use std::os::unix::process::ExitStatusExt as _;

    let run = |strike: &dyn Fn() -> Strike| {
        let directory = tempfile::tempdir().unwrap();
        let mut shell = std::process::Command::new("sh")
            .args(["-c", "read go; : > one; echo x >> two; : > three"])
            .current_dir(directory.path())
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let tracer = Tracer::attach(&shell, directory.path(), strike());
        drop(shell.stdin.take());
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        let last = || directory.path().join("three").exists() || tracer.has_struck();
        while !last() && std::time::Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let there = |name: &&str| directory.path().join(name).exists();
        let trace = tracer.finish();
        // Where nothing struck the tracer may have waited for the process itself.
        let signal = shell.wait().ok().and_then(|status| status.signal());
        let files: Vec<_> = ["one", "two", "three"].into_iter().filter(there).collect();
        (trace, files, signal)
    };
    let (trace, files, _) = run(&|| Strike::Never);
    let steps: Vec<_> = trace.moments.iter().map(|moment| moment.step.as_str()).collect();
    assert_eq!(steps[..], ["open one", "open two", "open three"]);
    assert_eq!((files.len(), trace.struck), (3, false));

    let moment = trace.moments[1].clone();
    let (trace, files, signal) = run(&|| Strike::Kill(moment.clone()));
    assert_eq!(trace.moments.last(), Some(&moment));
    assert_eq!((files, trace.struck, signal), (vec!["one"], true, Some(libc::SIGKILL)));
}
