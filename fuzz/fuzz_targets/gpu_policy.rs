#![no_main]

use libfuzzer_sys::{fuzz_mutator, fuzz_target};

fuzz_target!(|data: &[u8]| kerf_fuzz_checks::gpu_policy(data));
fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    kerf_fuzz::mutate::json(data, size, max_size, seed)
});
