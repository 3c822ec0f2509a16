//! libFuzzer around `kerf_fuzz_checks`: see `make fuzz`.

pub mod mutate;
