//! The hook as a runtime runs it: a state on stdin, a bundle on disk, an image that may be hostile in it.
//!
//! Runs as root, which hooks are, and needs the ldconfig of this machine.

#![expect(clippy::unwrap_used, reason = "what a test cannot go on without fails it")]

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

/// A container that is being made, and a directory of the host beside it.
struct Bundle(TempDir);

impl Bundle {
    fn new() -> Bundle {
        let bundle = Bundle(tempfile::tempdir().unwrap());
        fs::create_dir(bundle.0.path().join("rootfs")).unwrap();
        fs::create_dir(bundle.0.path().join("host")).unwrap();
        fs::write(bundle.0.path().join("config.json"), r#"{"ociVersion": "1.2.0", "root": {"path": "rootfs"}}"#)
            .unwrap();
        bundle
    }

    /// A path in the container, or beside it.
    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn make(&self, path: &str) {
        fs::create_dir_all(self.path(path)).unwrap();
    }

    fn link(&self, path: &str, target: impl AsRef<Path>) {
        fs::create_dir_all(self.path(path).parent().unwrap()).unwrap();
        symlink(target, self.path(path)).unwrap();
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let state =
            format!(r#"{{"ociVersion": "1.2.0", "id": "c", "status": "creating", "bundle": {:?}}}"#, self.0.path());
        run(arguments, &state)
    }

    /// Succeeds, and gives what it says.
    fn succeeds(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{arguments:?}: {said}");
        said
    }

    fn target(&self, path: &str) -> PathBuf {
        fs::read_link(self.path(path)).unwrap()
    }
}

fn run(arguments: &[&str], state: &str) -> Output {
    let mut hook = Command::new(env!("CARGO_BIN_EXE_kerf-cdi-hook"));
    hook.args(arguments).stdin(Stdio::piped()).stderr(Stdio::piped()).stdout(Stdio::piped());
    let mut hook = hook.spawn().unwrap();
    // It may refuse its arguments before it reads.
    let _ = hook.stdin.take().unwrap().write_all(state.as_bytes());
    hook.wait_with_output().unwrap()
}

/// A library of this machine's, which goes by this SONAME.
const LIBRARY: &str = "libc.so.6";

fn a_library() -> Vec<u8> {
    fs::read(format!("/usr/lib/{}-linux-gnu/{LIBRARY}", std::env::consts::ARCH)).unwrap()
}

#[test]
fn links_are_made_once_and_those_of_others_replaced() {
    let bundle = Bundle::new();
    let lib = "rootfs/usr/lib/x86_64-linux-gnu";
    bundle.link(&format!("{lib}/libGLX_indirect.so.0"), "libGLX_mesa.so.0");
    bundle.make(&format!("{lib}/taken"));
    let arguments = [
        "create-symlinks",
        "--link",
        "../card1::/dev/dri/by-path/pci-0000:3b:00.0-card",
        "--link",
        "libGLX_nvidia.so.535.261.03::/usr/lib/x86_64-linux-gnu/libGLX_indirect.so.0",
        "--link",
        "elsewhere::/usr/lib/x86_64-linux-gnu/taken",
    ];
    for _ in 0..2 {
        let said = bundle.succeeds(&arguments);
        assert!(said.contains("/taken is no link, and stays"), "{said}");
        assert_eq!(bundle.target("rootfs/dev/dri/by-path/pci-0000:3b:00.0-card"), Path::new("../card1"));
        let glx = bundle.target(&format!("{lib}/libGLX_indirect.so.0"));
        assert_eq!(glx, Path::new("libGLX_nvidia.so.535.261.03"));
        assert_eq!(fs::read_dir(bundle.path(lib)).unwrap().count(), 2, "nothing else is left");
    }
}

/// Whatever an image's links say, they lead to places in the image.
#[test]
fn no_link_of_an_image_leads_out_of_it() {
    let bundle = Bundle::new();
    let host = bundle.path("host");
    bundle.link("rootfs/absolute", &host);
    bundle.link("rootfs/relative", "../host");
    bundle.link("rootfs/deep/relative", "../../../../../../../../../../tmp");
    bundle.link("rootfs/dangling", "/nowhere");
    bundle.link("rootfs/circle", "circle");
    bundle.link("rootfs/proc", "/proc/self/root");
    bundle.make("rootfs/tmp");
    for path in ["/absolute/a", "/relative/a", "/dangling/a", "/circle/a", "/proc/a"] {
        bundle.succeeds(&["create-symlinks", "--link", &format!("x::{path}")]);
    }
    bundle.succeeds(&["create-symlinks", "--link", "x::/deep/relative/kerf-cdi-hook-test"]);
    assert_eq!(bundle.target("rootfs/tmp/kerf-cdi-hook-test"), Path::new("x"), "`..` ends at the container's root");
    assert!(!Path::new("/tmp/kerf-cdi-hook-test").exists());
    assert_eq!(fs::read_dir(&host).unwrap().count(), 0, "the host's directory is as it was");
}

/// A volume may be a directory of the host, whose links are none of the hook's business; `/dev` is the runtime's.
#[test]
fn nothing_is_written_through_a_mount() {
    let bundle = Bundle::new();
    let mounted = |path: &str| {
        bundle.make(path);
        rustix::mount::mount_bind(bundle.path("host"), bundle.path(path)).unwrap();
        Mounted(bundle.path(path))
    };
    {
        let _volume = mounted("rootfs/usr/lib/x86_64-linux-gnu");
        let said = bundle.succeeds(&["create-symlinks", "--link", "x::/usr/lib/x86_64-linux-gnu/gbm/a"]);
        assert!(said.contains("left out"), "{said}");
        assert_eq!(fs::read_dir(bundle.path("host")).unwrap().count(), 0);
    }
    {
        let _volume = mounted("rootfs/etc");
        let said = bundle.succeeds(&["update-ldcache", "--folder", "/usr/lib"]);
        assert!(said.contains("cache stays as it is"), "{said}");
        assert_eq!(fs::read_dir(bundle.path("host")).unwrap().count(), 0, "the host keeps its cache");
    }
    let _dev = mounted("rootfs/dev");
    bundle.succeeds(&["create-symlinks", "--link", "../card0::/dev/dri/by-path/a"]);
    assert_eq!(bundle.target("host/dri/by-path/a"), Path::new("../card0"));
}

struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

/// What ldconfig reads in the container's cache.
fn cached(bundle: &Bundle) -> String {
    let print = Command::new("/sbin/ldconfig").arg("-p").arg("-C").arg(bundle.path("rootfs/etc/ld.so.cache")).output();
    String::from_utf8(print.unwrap().stdout).unwrap()
}

#[test]
fn libraries_in_a_folder_of_their_own_are_in_the_cache() {
    let bundle = Bundle::new();
    let folder = "opt/of/its/own";
    bundle.make(&format!("rootfs/{folder}"));
    bundle.make("rootfs/etc/ld.so.conf.d");
    fs::write(bundle.path("rootfs/etc/ld.so.conf"), "include /etc/ld.so.conf.d/*.conf\n").unwrap();
    fs::write(bundle.path(&format!("rootfs/{folder}/{LIBRARY}")), a_library()).unwrap();
    for _ in 0..2 {
        bundle.succeeds(&["update-ldcache", "--folder", "/opt/of/its/own", "--folder", "/does/not/exist"]);
        let cached = cached(&bundle);
        assert!(cached.contains(&format!("=> /opt/of/its/own/{LIBRARY}")), "{cached}");
        let configuration = fs::read_to_string(bundle.path("rootfs/etc/ld.so.conf.d/00-kerf.conf")).unwrap();
        assert_eq!(configuration, "/opt/of/its/own\n/does/not/exist\n");
    }
    // Its own ldconfig would find it again.
    fs::remove_file(bundle.path("rootfs/etc/ld.so.cache")).unwrap();
    assert!(Command::new("/sbin/ldconfig").arg("-r").arg(bundle.path("rootfs")).status().unwrap().success());
    assert!(cached(&bundle).contains("=> /opt/of/its/own/"));
}

/// A volume may be among the directories that the image names, and its links are none of ldconfig's business.
#[test]
fn no_link_beside_libraries_is_made_or_removed() {
    let bundle = Bundle::new();
    bundle.make("rootfs/etc");
    bundle.make("rootfs/opt/volume");
    fs::write(bundle.path("rootfs/etc/ld.so.conf"), "/opt/volume\n").unwrap();
    fs::write(bundle.path("rootfs/opt/volume/lib.so.1.2"), a_library()).unwrap();
    bundle.link("rootfs/opt/volume/libgone.so.1", "nowhere");
    bundle.succeeds(&["update-ldcache", "--folder", "/usr/lib"]);
    assert!(bundle.path("rootfs/etc/ld.so.cache").exists());
    let entries = fs::read_dir(bundle.path("rootfs/opt/volume")).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["lib.so.1.2", "libgone.so.1"]);
}

/// Without the right to enter the container ldconfig would look its paths up from outside.
#[test]
fn ldconfig_is_not_run_without_the_right_to_enter_the_container() {
    let bundle = Bundle::new();
    bundle.make("rootfs/etc");
    let state = format!(r#"{{"bundle": {:?}}}"#, bundle.0.path());
    // Capabilities are each thread's own, and a new program of root's has those of the bounding set.
    let output = std::thread::spawn(move || {
        rustix::thread::remove_capability_from_bounding_set(rustix::thread::CapabilitySet::SYS_CHROOT).unwrap();
        run(&["update-ldcache", "--folder", "/usr/lib"], &state)
    });
    let output = output.join().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("no CAP_SYS_CHROOT"), "{said}");
    assert!(!bundle.path("rootfs/etc/ld.so.cache").exists());
}

/// The cache is the container's own file, wherever its links lead.
#[test]
fn a_cache_that_is_a_link_is_replaced_and_not_followed() {
    let bundle = Bundle::new();
    let victim = bundle.path("host/victim");
    fs::write(&victim, "the host's").unwrap();
    bundle.link("rootfs/etc/ld.so.cache", &victim);
    bundle.link("rootfs/etc/ld.so.conf.d/00-kerf.conf", &victim);
    bundle.make("rootfs/usr/lib");
    let command = ["update-ldcache", "--folder", "/usr/lib"];
    bundle.succeeds(&command);
    assert!(bundle.path("rootfs/etc/ld.so.cache").symlink_metadata().unwrap().is_file());
    assert!(bundle.path("rootfs/etc/ld.so.conf.d/00-kerf.conf").symlink_metadata().unwrap().is_file());

    // The file that ldconfig writes first. It does not follow it: such an image does not start, and hurts itself only.
    bundle.link("rootfs/etc/ld.so.cache~", &victim);
    let output = bundle.run(&command);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("has made no cache in the container"), "{said}");
    assert_eq!(fs::read_to_string(&victim).unwrap(), "the host's");
}

/// An image without `/etc` gets no cache, and starts.
#[test]
fn a_container_without_settings_keeps_what_it_has() {
    let bundle = Bundle::new();
    let said = bundle.succeeds(&["update-ldcache", "--folder", "/usr/lib"]);
    assert!(said.contains("cache stays as it is"), "{said}");
    assert_eq!(fs::read_dir(bundle.path("rootfs")).unwrap().count(), 0);
}

#[test]
fn what_the_runtime_says_wrong_fails_the_container() {
    let bundle = Bundle::new();
    let command = ["update-ldcache", "--folder", "/usr/lib"];
    let fails = |arguments: &[&str], state: &str, part: &str| {
        let output = run(arguments, state);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(part), "{said}");
    };
    fails(&command, "", "is not JSON");
    fails(&command, "{}", "names no bundle");
    fails(&command, r#"{"bundle": "/nowhere"}"#, "/nowhere/config.json cannot be read");
    fails(&["chmod"], "{}", "there is no command `chmod`");
    let state = format!(r#"{{"bundle": {:?}}}"#, bundle.0.path());
    fs::write(bundle.path("config.json"), "{}").unwrap();
    fails(&command, &state, "names no root.path");
    fs::write(bundle.path("config.json"), r#"{"root": {"path": "elsewhere"}}"#).unwrap();
    fails(&command, &state, "cannot open the root");
}
