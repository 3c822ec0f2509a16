//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use kerf_api::names;

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

    /// Address for /healthz and /readyz, such as 0.0.0.0:8080; they are not served by default.
    #[arg(long, env = "KERF_HTTP_ADDRESS")]
    pub http_address: Option<SocketAddr>,

    /// How logs are written. RUST_LOG chooses what is.
    #[arg(long, env = "KERF_LOG_FORMAT", default_value = "text")]
    pub log_format: LogFormat,
}

/// How logs are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For programs.
    Json,
}
