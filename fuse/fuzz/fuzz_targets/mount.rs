//! The target `mount`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use podfs_fuse_fuzz::mount;

fuzz_target!(|data: &[u8]| {
    // Most inputs are not valid.
    let _is_valid = mount::look(data);
});
