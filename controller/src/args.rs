//! The command line.

use std::path::PathBuf;

use clap::Parser;
use kerf_api::names;

use crate::webhook::WebhookArgs;

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

    /// Name of this process in leader election; by default the host's name and a random part.
    #[arg(long, env = "KERF_IDENTITY")]
    pub identity: Option<String>,

    /// Whether and where what is written is checked.
    #[command(flatten)]
    pub webhook: WebhookArgs,

    /// How this program can be observed.
    #[command(flatten)]
    pub telemetry: kerf_telemetry::TelemetryArgs,
}
