//! Log lines on standard error.

mod json;

use std::io::{self, IsTerminal as _};

use tracing_subscriber::filter::{EnvFilter, LevelFilter};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

pub use json::JsonLines;

/// What is logged when `RUST_LOG` does not say. kube's client logs each error that it also returns.
const DEFAULT: &str = "info,kube_client=off";

/// Form of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Sends the log lines of this process to standard error from now on. To be called once, before anything is logged.
pub fn init(format: Format) {
    let chosen = std::env::var(EnvFilter::DEFAULT_ENV).ok().filter(|chosen| !chosen.is_empty());
    // What is wrong in it is told on standard error and left out.
    let filter = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into());
    let filter = filter.parse_lossy(chosen.as_deref().unwrap_or(DEFAULT));
    let lines = tracing_subscriber::registry().with(filter);
    match format {
        Format::Text => {
            let ansi = io::stderr().is_terminal();
            lines.with(tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(ansi)).init();
        }
        Format::Json => lines.with(JsonLines::new(io::stderr)).init(),
    }
}
