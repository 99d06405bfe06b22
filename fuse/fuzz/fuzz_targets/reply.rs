//! The target `reply`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use podfs_fuse_fuzz::reply;

fuzz_target!(|data: &[u8]| {
    // Most inputs are not valid.
    let _is_valid = reply::look(data);
});
