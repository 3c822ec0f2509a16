#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kerf_fuzz_checks::cdi_name(data));
