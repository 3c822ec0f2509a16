//! The command line.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{ArgAction, Parser, Subcommand};
use kerf_api::names;

use crate::webhook::WebhookArgs;
/// An object of some namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl FromStr for ObjectName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<ObjectName, &'static str> {
        let (namespace, name) = text.split_once('/').unwrap_or_default();
        if namespace.is_empty() || name.is_empty() || name.contains('/') {
            return Err("not of the form namespace/name");
        }
        Ok(ObjectName { namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

/// Publishes the ResourceSlices of every node that kerf's kubelet plugin runs on.
#[derive(Clone, Debug, Parser)]
#[command(version)]
pub struct Args {
    /// Name of the DRA driver whose slices are published; that of the kubelet plugins.
    #[arg(long, env = "KERF_DRIVER_NAME", default_value = names::DRIVER_NAME)]
    pub driver_name: String,

    /// Namespace of kerf's leases.
    #[arg(long, env = "KERF_NAMESPACE", default_value = names::NAMESPACE)]
    pub namespace: String,

    /// Kubeconfig file; without it the controller uses the service account of its pod.
    #[arg(long, env = "KERF_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,

    /// ConfigMap with the cluster's layouts, as namespace/name; by default kerf-layouts in kerf's namespace. Its key config.yaml
    /// holds a file as of NVIDIA's mig-parted.
    #[arg(long, env = "KERF_LAYOUTS_CONFIG_MAP")]
    pub layouts_config_map: Option<ObjectName>,

    /// Whether nodes choose a layout by their label nvidia.com/mig.config, where no GpuPolicy says otherwise.
    #[arg(long, env = "KERF_MIG_CONFIG_LABEL", default_value_t = true, action = clap::ArgAction::Set)]
    pub mig_config_label: bool,

    /// Name of this process in leader election; by default the host's name and a random part.
    #[arg(long, env = "KERF_IDENTITY")]
    pub identity: Option<String>,

    /// Whether and where what is written is checked.
    #[command(flatten)]
    pub webhook: WebhookArgs,

    /// Whether a DeviceClass is made of every MIG profile that the GPUs have: without, those made before are removed.
    #[arg(long, env = "KERF_GENERATE_DEVICE_CLASSES", default_value_t = true, action = ArgAction::Set)]
    pub generate_device_classes: bool,

    /// Whether Nodes get the labels of NVIDIA's GPU feature discovery: without, those put there before are removed.
    #[arg(long, env = "KERF_NODE_LABELS", default_value_t = true, action = ArgAction::Set)]
    pub node_labels: bool,

    /// How this program can be observed.
    #[command(flatten)]
    pub telemetry: kerf_telemetry::TelemetryArgs,

    /// What else to do than to publish.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// What the program can do beside its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Subcommand)]
pub enum Command {
    /// Remove what would stay behind without kerf: the labels of Nodes and the generated DeviceClasses. Controllers that run
    /// stop writing for a minute.
    Remove,
}
