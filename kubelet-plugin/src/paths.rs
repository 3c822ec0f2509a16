//! Where the plugin's files are on the node.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// How long the path of a socket may be: `sockaddr_un.sun_path` has 108 bytes with the closing zero (unix(7)).
pub const SOCKET_PATH_BYTES: usize = 107;

/// How many characters a pod's UID may have, and what stands for it.
const UID_CHARACTERS: std::ops::RangeInclusive<usize> = 8..=36;

/// The plugin's sockets and directories.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// Where the kubelet looks for plugins to register.
    ///
    /// The `@` in the name is essential. The kubelet dials this socket with its path as `:authority`, percent-encoded
    /// (`k8s.io/kubernetes/pkg/kubelet/pluginmanager/operationexecutor`, no `WithAuthority`), and `%` is not allowed in
    /// the host part of an authority: h2 answers PROTOCOL_ERROR. It is allowed in the user-info part, which everything
    /// before an `@` is.
    pub registration_socket: PathBuf,
    /// Where the DRA and health services are served.
    pub dra_socket: PathBuf,
    /// The driver's own directory under the kubelet's root; claims' journal and locks lie in it.
    pub plugin_directory: PathBuf,
    /// One journal file per prepared claim.
    pub claims: PathBuf,
    /// Lock files, valid across processes.
    pub locks: PathBuf,
    /// CDI specifications, read by the container runtime.
    pub cdi: PathBuf,
    /// What containers are told of their devices: a directory for each prepared claim.
    pub metadata: PathBuf,
    /// Programs of ours that container runtimes run, where there is no better place. The kubelet closes the directories above it
    /// to other users (0750), and so to root of a container in a user namespace, in which its hooks run.
    pub bin: PathBuf,
    driver_name: String,
}

/// One of the two kinds of sockets.
#[derive(Clone, Copy, Debug)]
pub enum Socket {
    /// See [`Paths::registration_socket`].
    Registration,
    /// See [`Paths::dra_socket`].
    Dra,
}

impl Paths {
    /// The paths under a kubelet's root directory, for a plugin that is the only one of its driver on the node.
    pub fn new(kubelet_root: &Path, cdi_root: &Path, driver_name: &str) -> Paths {
        let plugin_directory = kubelet_root.join("plugins").join(driver_name);
        let mut paths = Paths {
            registration_socket: kubelet_root.join("plugins_registry"),
            dra_socket: plugin_directory.clone(),
            claims: plugin_directory.join("claims"),
            locks: plugin_directory.join("locks"),
            metadata: plugin_directory.join("metadata"),
            bin: plugin_directory.join("bin"),
            plugin_directory,
            cdi: cdi_root.to_owned(),
            driver_name: driver_name.to_owned(),
        };
        paths.registration_socket.push(paths.name(Socket::Registration, None));
        paths.dra_socket.push(paths.name(Socket::Dra, None));
        paths
    }

    /// The same for one pod of several: only the sockets are its own. A short hash stands for a UID with which a socket's
    /// path would be too long.
    #[must_use]
    pub fn of_pod(mut self, uid: &str) -> Paths {
        for instance in [uid.to_owned(), short(uid)] {
            let (registration, dra) =
                (self.name(Socket::Registration, Some(&instance)), self.name(Socket::Dra, Some(&instance)));
            self.registration_socket.set_file_name(registration);
            self.dra_socket.set_file_name(dra);
            let fits = |path: &Path| path.as_os_str().len() <= SOCKET_PATH_BYTES;
            if fits(&self.registration_socket) && fits(&self.dra_socket) {
                break;
            }
        }
        self
    }

    /// This plugin's own socket of a kind.
    pub fn socket(&self, socket: Socket) -> &Path {
        match socket {
            Socket::Registration => &self.registration_socket,
            Socket::Dra => &self.dra_socket,
        }
    }

    /// Whether `name` is that of a socket of this kind of any plugin of this driver.
    pub fn is_socket_name(&self, socket: Socket, name: &OsStr) -> bool {
        let (before, after) = self.around(socket);
        let instance = name.to_str().and_then(|name| name.strip_prefix(before)?.strip_suffix(after));
        instance.is_some_and(|instance| instance.is_empty() || instance.strip_prefix('-').is_some_and(is_pod_uid))
    }

    /// Whether `name` is that of a registration socket of the driver that was here before: of its name, and as programs in Go
    /// call it (`k8s.io/dynamic-resource-allocation/kubeletplugin`).
    pub fn is_former_socket_name(&self, name: &OsStr) -> bool {
        let name = name.to_str().and_then(|name| name.strip_prefix(&self.driver_name)?.strip_suffix("-reg.sock"));
        name.is_some_and(|instance| instance.is_empty() || instance.starts_with('-'))
    }

    fn name(&self, socket: Socket, instance: Option<&str>) -> String {
        let (before, after) = self.around(socket);
        match instance {
            None => format!("{before}{after}"),
            Some(instance) => format!("{before}-{instance}{after}"),
        }
    }

    /// What comes in a socket's name before the pod, and after it.
    fn around(&self, socket: Socket) -> (&str, &'static str) {
        match socket {
            Socket::Registration => (&self.driver_name, "@reg.sock"),
            Socket::Dra => ("dra", ".sock"),
        }
    }
}

/// Whether a text can be a pod's UID, or what stands for one.
pub(crate) fn is_pod_uid(text: &str) -> bool {
    UID_CHARACTERS.contains(&text.len())
        && text.bytes().all(|byte| byte == b'-' || byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// FNV-1a of a UID, folded to 32 bits: 8 hexadecimal digits.
fn short(uid: &str) -> String {
    let hash = uid
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    format!("{:08x}", (hash >> 32) ^ (hash & 0xffff_ffff))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0d1c6f3e-9a2b-4c5d-8e7f-001122334455";

    fn paths(kubelet_root: &str) -> Paths {
        Paths::new(Path::new(kubelet_root), Path::new("/var/run/cdi"), "gpu.nvidia.com")
    }

    #[test]
    fn a_pod_has_sockets_of_its_own_and_shares_the_rest() {
        let alone = paths("/var/lib/kubelet");
        assert_eq!(alone.registration_socket, Path::new("/var/lib/kubelet/plugins_registry/gpu.nvidia.com@reg.sock"));
        assert_eq!(alone.dra_socket, Path::new("/var/lib/kubelet/plugins/gpu.nvidia.com/dra.sock"));

        let one = alone.clone().of_pod(UID);
        let (registration, dra) = (format!("gpu.nvidia.com-{UID}@reg.sock"), format!("dra-{UID}.sock"));
        assert_eq!(one.registration_socket, Path::new("/var/lib/kubelet/plugins_registry").join(registration));
        assert_eq!(one.dra_socket, Path::new("/var/lib/kubelet/plugins/gpu.nvidia.com").join(dra));
        assert_eq!((&one.claims, &one.locks, &one.cdi), (&alone.claims, &alone.locks, &alone.cdi));
    }

    #[test]
    fn a_hash_stands_for_a_uid_that_is_too_long() {
        // The longest root with which the UID fits, and the longest with which the hash does.
        let (fits, longest) = ("x".repeat(107 - 79), "x".repeat(107 - 51));
        let name = |root: &str| {
            let socket = paths(&format!("/{root}")).of_pod(UID).registration_socket;
            (socket.as_os_str().len(), socket.file_name().unwrap().to_str().unwrap().to_owned())
        };
        assert_eq!(name(&fits), (107, format!("gpu.nvidia.com-{UID}@reg.sock")));
        let hashed = "gpu.nvidia.com-da0abc50@reg.sock".to_owned();
        assert_eq!(name(&format!("{fits}x")), (80, hashed.clone()), "the same for ever");
        assert_eq!(name(&longest), (107, hashed));
        assert_eq!(name(&format!("{longest}x")).0, 108, "to be refused by who binds it");
        assert_ne!(short(UID), short(&UID.replace('5', "6")));
    }

    #[test]
    fn sockets_of_this_driver_are_known_by_their_names() {
        let paths = paths("/var/lib/kubelet");
        for (socket, name, is) in [
            (Socket::Registration, "gpu.nvidia.com@reg.sock".to_owned(), true),
            (Socket::Registration, format!("gpu.nvidia.com-{UID}@reg.sock"), true),
            (Socket::Registration, format!("gpu.nvidia.com-{}@reg.sock", short(UID)), true),
            (Socket::Registration, "gpu.nvidia.com-reg.sock".to_owned(), false),
            (Socket::Registration, "gpu.nvidia.com-other@reg.sock".to_owned(), false),
            (Socket::Registration, format!("compute-domain.nvidia.com-{UID}@reg.sock"), false),
            (Socket::Dra, "dra.sock".to_owned(), true),
            (Socket::Dra, format!("dra-{UID}.sock"), true),
            (Socket::Dra, format!("dra-{UID}.socket"), false),
            (Socket::Dra, "claims".to_owned(), false),
        ] {
            assert_eq!(paths.is_socket_name(socket, OsStr::new(&name)), is, "{name}");
        }
        for (name, is) in [
            ("gpu.nvidia.com-reg.sock", true),
            ("gpu.nvidia.com-0d1c6f3e-reg.sock", true),
            ("gpu.nvidia.com@reg.sock", false),
            ("compute-domain.nvidia.com-reg.sock", false),
            ("gpu.nvidia.community-reg.sock", false),
        ] {
            assert_eq!(paths.is_former_socket_name(OsStr::new(name)), is, "{name}");
        }
        for uid in [UID, "1f5fbb0ba1b0f1fd60e8f1f5e2d7c2aa", &short(UID)] {
            assert!(is_pod_uid(uid), "{uid}");
        }
        for other in ["", "1234567", "../../../etc", "0D1C6F3E", "gpu-nvidia"] {
            assert!(!is_pod_uid(other), "{other}");
        }
    }
}
