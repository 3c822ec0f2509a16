//! Where the plugin's files are on the node.

use std::path::{Path, PathBuf};

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
}

impl Paths {
    /// The paths under a kubelet's root directory.
    pub fn new(kubelet_root: &Path, cdi_root: &Path, driver_name: &str) -> Paths {
        let plugin_directory = kubelet_root.join("plugins").join(driver_name);
        Paths {
            registration_socket: kubelet_root.join("plugins_registry").join(format!("{driver_name}@reg.sock")),
            dra_socket: plugin_directory.join("dra.sock"),
            claims: plugin_directory.join("claims"),
            locks: plugin_directory.join("locks"),
            plugin_directory,
            cdi: cdi_root.to_owned(),
        }
    }
}
