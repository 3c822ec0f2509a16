//! The arguments that both programs have.

use std::net::SocketAddr;

use crate::log::Format;

/// How a program can be observed. Part of a program's own arguments.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct TelemetryArgs {
    /// Address for /healthz, /readyz and /metrics, such as 0.0.0.0:8080 [default: they are not served].
    #[arg(long, env = "KERF_HTTP_ADDRESS")]
    pub http_address: Option<SocketAddr>,

    /// Form of the log on standard error. What is logged is chosen by RUST_LOG.
    #[arg(long, env = "KERF_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: Format,
}
