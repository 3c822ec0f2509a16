//! The command line.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Parser;
use kerf_api::names;

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

    /// How this program can be observed.
    #[command(flatten)]
    pub telemetry: kerf_telemetry::TelemetryArgs,
}
