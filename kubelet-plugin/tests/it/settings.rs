//! What makes the long tests longer than they are in an ordinary run.

/// The number in an environment variable, if it is set.
pub(crate) fn number(name: &str) -> Option<usize> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// `KERF_SEED`: where random numbers, and samples, start.
pub(crate) fn seed() -> usize {
    number("KERF_SEED").unwrap_or(1)
}

/// Whether every case is to be played, `KERF_TORTURE=all`, and not a sample.
pub(crate) fn plays_all() -> bool {
    std::env::var("KERF_TORTURE").is_ok_and(|what| what == "all")
}
