//! One call from a client's side: who calls, and what it may see.

use std::cell::Cell;
use std::ffi::{CStr, OsStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

use serde::de::DeserializeOwned;

use super::Ret;
use crate::client::Client;
use crate::code::Code;
use crate::handle::Handle;
use crate::view::{Device, MigDevice, Node, NodeGpu};
use crate::visibility;
use crate::wire::Op;

/// How often NVML was initialised and not shut down.
static INITIALISED: AtomicU32 = AtomicU32::new(0);

/// The daemon of the driver root that this library lies in.
static CLIENT: LazyLock<Client> = LazyLock::new(|| Client::new(driver_root(&own_path())));

/// A call of an NVML function.
pub(super) struct Call {
    function: &'static str,
    asked: Cell<bool>,
}

/// Runs an NVML function, provided that NVML is initialised.
pub(super) fn enter(function: &'static str, body: impl FnOnce(&Call) -> Result<(), Code>) -> Ret {
    if INITIALISED.load(Ordering::Relaxed) == 0 {
        return Code::UNINITIALIZED.0;
    }
    run(function, body)
}

fn run(function: &'static str, body: impl FnOnce(&Call) -> Result<(), Code>) -> Ret {
    body(&Call { function, asked: Cell::new(false) }).err().map_or(0, |code| code.0)
}

/// Initialises NVML: there must be a daemon.
pub(super) fn initialise(function: &'static str) -> Ret {
    let ret = run(function, |call| call.node().map(drop));
    if ret == 0 {
        INITIALISED.fetch_add(1, Ordering::Relaxed);
    }
    ret
}

/// Undoes one initialisation.
pub(super) fn shut_down() -> Ret {
    enter("nvmlShutdown", |call| {
        call.pass()?;
        let undone = INITIALISED.try_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_sub(1));
        undone.map(drop).map_err(|_| Code::UNINITIALIZED)
    })
}

impl Call {
    /// Asks the daemon. One call takes its time, and meets its fault, once, with the first question.
    pub(super) fn ask<T: DeserializeOwned>(&self, op: Op) -> Result<T, Code> {
        CLIENT.ask(if self.asked.replace(true) { "" } else { self.function }, op)
    }

    /// For a function that needs nothing of the driver: takes its time and meets its fault, and goes on without a daemon.
    pub(super) fn pass(&self) -> Result<(), Code> {
        self.node().map(drop).or_else(|code| if code == Code::DRIVER_NOT_LOADED { Ok(()) } else { Err(code) })
    }

    /// Asks the daemon what has to be known before it is clear which device the call is about.
    pub(super) fn ask_before<T: DeserializeOwned>(&self, op: Op) -> Result<T, Code> {
        CLIENT.ask("", op)
    }

    /// The device that a call looked for. Found or not, this is the question by which the call is known.
    pub(super) fn found(&self, device: Option<Handle>, missing: Code) -> Result<Handle, Code> {
        match device {
            Some(device) => self.device(device).map(|_| device),
            None => self.node().and(Err(missing)),
        }
    }

    /// A GPU or a MIG device.
    pub(super) fn device(&self, handle: Handle) -> Result<Device, Code> {
        self.ask(Op::Device(handle))
    }

    /// The node with all its GPUs.
    pub(super) fn node(&self) -> Result<Node, Code> {
        self.ask(Op::Node)
    }

    /// The GPUs that this process sees, in the order of their indexes.
    pub(super) fn gpus(&self) -> Result<Vec<NodeGpu>, Code> {
        Ok(visible(self.node()?))
    }

    /// The same, before it is clear which one the call is about.
    pub(super) fn gpus_before(&self) -> Result<Vec<NodeGpu>, Code> {
        Ok(visible(self.ask_before(Op::Node)?))
    }

    /// The MIG devices of a GPU that this process sees, in the order of their indexes.
    pub(super) fn mig_devices(&self, gpu: Handle) -> Result<Vec<MigDevice>, Code> {
        let mut devices: Vec<MigDevice> = self.ask(Op::MigDevices(gpu))?;
        if !self.privileged() {
            let minor = self.device(gpu)?.minor;
            devices.retain(|device| visibility::sees_mig_device(CLIENT.root(), minor, device.gi, device.ci));
        }
        Ok(devices)
    }

    /// Whether this process may administer MIG.
    pub(super) fn privileged(&self) -> bool {
        visibility::is_privileged(CLIENT.root())
    }
}

fn visible(node: Node) -> Vec<NodeGpu> {
    let mut gpus = node.gpus;
    gpus.retain(|gpu| visibility::sees_gpu(CLIENT.root(), gpu.minor));
    gpus
}

/// Where this library was loaded from, as the loader was told: symbolic links are not followed, because the way to a
/// file in a driver root or a container says which root it is.
fn own_path() -> PathBuf {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    let address: *const c_void = (&raw const INITIALISED).cast();
    // SAFETY: the address is one of this library's, and `info` is live memory of ours.
    let found = unsafe { libc::dladdr(address, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return PathBuf::from("/");
    }
    // SAFETY: dladdr succeeded, so the name is a C string that lives as long as the library is loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = Path::new(OsStr::from_bytes(name.to_bytes()));
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// The driver root of a library in one of the usual directories; `/` for one that lies elsewhere.
fn driver_root(library: &Path) -> PathBuf {
    let directory = library.parent().unwrap_or(Path::new("/"));
    let arch = format!("{}-linux-gnu", std::env::consts::ARCH);
    let usual = [format!("usr/lib/{arch}"), format!("lib/{arch}")];
    let usual = usual.iter().map(String::as_str).chain(["usr/lib64", "usr/lib", "lib64", "lib"]);
    let root = usual
        .into_iter()
        .find(|usual| directory.ends_with(usual))
        .and_then(|usual| directory.ancestors().nth(Path::new(usual).components().count()));
    root.unwrap_or(Path::new("/")).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_root_is_above_the_library_directory() {
        let arch = std::env::consts::ARCH;
        for (library, root) in [
            (format!("/usr/lib/{arch}-linux-gnu/libnvidia-ml.so.1"), "/"),
            (format!("/lib/{arch}-linux-gnu/libnvidia-ml.so.1"), "/"),
            (format!("/run/nvidia/driver/usr/lib/{arch}-linux-gnu/libnvidia-ml.so.1"), "/run/nvidia/driver"),
            ("/driver/usr/lib64/libnvidia-ml.so.535.261.03".to_owned(), "/driver"),
            ("/home/kubernetes/bin/nvidia/lib64/libnvidia-ml.so.1".to_owned(), "/home/kubernetes/bin/nvidia"),
            ("/opt/elsewhere/libnvidia-ml.so.1".to_owned(), "/"),
        ] {
            assert_eq!(driver_root(Path::new(&library)), Path::new(root), "{library}");
        }
    }
}
