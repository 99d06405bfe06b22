//! The target `results`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use podfs_fuse_fuzz::results;

fuzz_target!(|data: &[u8]| {
    // Most inputs are not valid.
    let _is_valid = results::look(data);
});
