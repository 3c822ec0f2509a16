//! A ServiceAccount, and a client that is nobody else.

use anyhow::{Context, Result};
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::cluster::Cluster;

/// A ServiceAccount and where it is used.
#[derive(Clone, Copy, Debug)]
pub struct Account<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
    /// The node that its token names, as that of a pod there does.
    pub node: Option<&'a str>,
}

impl Account<'_> {
    /// A client with a token of this account, good for an hour.
    ///
    /// # Errors
    ///
    /// Where there is no such account.
    pub async fn client(&self, cluster: &Cluster) -> Result<Client> {
        let mut arguments = vec!["create", "token", self.name, "-n", self.namespace, "--duration=1h"];
        if let Some(node) = self.node {
            arguments.extend(["--bound-object-kind=Node", "--bound-object-name", node]);
        }
        let token = cluster.kubectl(&arguments)?;
        let mut kubeconfig = Kubeconfig::read_from(cluster.kubeconfig()).context("cannot read the kubeconfig")?;
        for user in &mut kubeconfig.auth_infos {
            user.auth_info = Some(AuthInfo { token: Some(token.trim().to_owned().into()), ..AuthInfo::default() });
        }
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        Ok(Client::try_from(config)?)
    }
}
