//! kerf on a cluster: its manifests applied, its two programs running under their own ServiceAccounts.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use kerf_api::names::NAMESPACE;
use kube::config::{AuthInfo, Kubeconfig};

use crate::cluster::Cluster;
use crate::program::{Program, built};

/// kerf's two programs on one node of a cluster.
#[derive(Debug)]
pub struct Installation {
    cluster: Cluster,
    driver_root: PathBuf,
    logs: PathBuf,
    /// What the plugin takes for the kernel's boot id, where that is not the machine's.
    boot_id: Option<PathBuf>,
    /// The node's part.
    pub plugin: Option<Program>,
    /// The cluster's part.
    pub controller: Option<Program>,
}

impl Installation {
    /// Applies `deploy/` and starts both programs. `logs` receives their output and kubeconfigs.
    pub fn start(cluster: &Cluster, driver_root: &Path, logs: &Path) -> Result<Installation> {
        let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy");
        let deploy = deploy.to_str().context("the path of deploy/ is not text")?;
        let namespace = format!("{deploy}/namespace.yaml");
        let crds = format!("{deploy}/chart/files/crds");
        cluster.kubectl(&["apply", "--server-side", "-f", &namespace, "-f", &crds])?;
        cluster.kubectl(&["wait", "--for=condition=Established", "--timeout=30s", "-f", &crds])?;
        let (rbac, classes) = (format!("{deploy}/rbac.yaml"), format!("{deploy}/deviceclasses.yaml"));
        cluster.kubectl(&["apply", "--server-side", "-f", &rbac, "-f", &classes])?;
        let mut installation = Installation {
            cluster: cluster.clone(),
            driver_root: driver_root.to_owned(),
            logs: logs.to_owned(),
            boot_id: None,
            plugin: None,
            controller: None,
        };
        installation.start_controller()?;
        installation.start_plugin()?;
        Ok(installation)
    }

    /// Starts the kubelet plugin (again).
    pub fn start_plugin(&mut self) -> Result<()> {
        let node = self.cluster.node()?;
        let kubeconfig = self.account("kerf-kubelet-plugin")?;
        let plugin = built("kerf-kubelet-plugin")?;
        let mut command = match &self.boot_id {
            None => Command::new(plugin),
            Some(boot_id) => {
                let mut command = Command::new("unshare");
                let script = r#"mount --no-mtab --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@""#;
                command.args(["--mount", "sh", "-c", script]).arg(boot_id).arg(plugin);
                command
            }
        };
        command
            .args(["--node-name", &node.name, "--namespace", NAMESPACE])
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .arg("--driver-root")
            .arg(&self.driver_root)
            .arg("--kubelet-root")
            .arg(&node.kubelet_root)
            .arg("--cdi-root")
            .arg(&node.cdi_root)
            .env("RUST_BACKTRACE", "1");
        self.plugin = Some(Program::start("kerf-kubelet-plugin", command, &self.logs.join("kubelet-plugin.log"))?);
        Ok(())
    }

    /// From its next start on the plugin sees another boot of the node's kernel. The machine's own boot id cannot change.
    pub fn reboot(&mut self) -> Result<()> {
        let path = self.logs.join("boot_id");
        let before = std::fs::read_to_string(&path).unwrap_or_default();
        let number = before.trim().rsplit('-').next().and_then(|number| number.parse::<u64>().ok()).unwrap_or(0);
        std::fs::write(&path, format!("00000000-0000-4000-8000-{:012}\n", number + 1))?;
        self.boot_id = Some(path);
        Ok(())
    }

    /// Starts the controller (again).
    pub fn start_controller(&mut self) -> Result<()> {
        let kubeconfig = self.account("kerf-controller")?;
        let mut command = Command::new(built("kerf-controller")?);
        command.args(["--namespace", NAMESPACE]).arg("--kubeconfig").arg(kubeconfig).env("RUST_BACKTRACE", "1");
        self.controller = Some(Program::start("kerf-controller", command, &self.logs.join("controller.log"))?);
        Ok(())
    }

    /// Fails when one of the programs has ended by itself.
    pub fn check(&mut self) -> Result<()> {
        self.plugin.iter_mut().chain(&mut self.controller).try_for_each(Program::check)
    }

    /// Ends the plugin in order.
    pub async fn stop_plugin(&mut self) -> Result<()> {
        match self.plugin.take() {
            Some(mut plugin) => plugin.terminate().await,
            None => Ok(()),
        }
    }

    /// Ends the controller in order.
    pub async fn stop_controller(&mut self) -> Result<()> {
        match self.controller.take() {
            Some(mut controller) => controller.terminate().await,
            None => Ok(()),
        }
    }

    /// Writes a kubeconfig that is nobody but this ServiceAccount.
    fn account(&self, name: &str) -> Result<PathBuf> {
        let token = self.cluster.kubectl(&["create", "token", name, "-n", NAMESPACE, "--duration=24h"])?;
        let mut config = Kubeconfig::read_from(self.cluster.kubeconfig()).context("cannot read the kubeconfig")?;
        for user in &mut config.auth_infos {
            user.auth_info = Some(AuthInfo { token: Some(token.trim().to_owned().into()), ..AuthInfo::default() });
        }
        let path = self.logs.join(format!("{name}.kubeconfig"));
        std::fs::write(&path, serde_saphyr::to_string(&config)?)?;
        Ok(path)
    }
}
