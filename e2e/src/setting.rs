//! Numbers that make a scenario longer than it is in an ordinary run.

use anyhow::{Context, Result};

/// The number in an environment variable, or `otherwise` where it is not set.
pub fn setting(name: &str, otherwise: usize) -> Result<usize> {
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name}={text} is no number")),
        Err(_) => Ok(otherwise),
    }
}
