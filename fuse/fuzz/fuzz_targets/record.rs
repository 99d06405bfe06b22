//! The target `record`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use podfs_fuse_fuzz::record;

fuzz_target!(|data: &[u8]| {
    // Most inputs are not valid.
    let _is_valid = record::look(data);
});
