//! The webhook's part of the command line.

use std::net::SocketAddr;

/// Whether and where what is written is checked.
#[derive(Clone, Debug, clap::Args)]
pub struct WebhookArgs {
    /// Address on which the API server asks whether kerf would refuse what is written, such as 0.0.0.0:8443. Without it kerf
    /// refuses only on the node, when a pod starts.
    #[arg(long, env = "KERF_WEBHOOK_ADDRESS")]
    pub webhook_address: Option<SocketAddr>,

    /// Name of the Service that leads to that address, and of the ValidatingWebhookConfiguration that names it.
    #[arg(long, env = "KERF_WEBHOOK_NAME", default_value = "kerf-webhook")]
    pub webhook_name: String,
}
