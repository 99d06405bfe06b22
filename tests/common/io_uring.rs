//! Volumes whose requests come over io_uring: whether this process makes such ones, and what the kernel offers.

use std::fs;

/// The variable of the setting. A test program that runs with it makes all its volumes so.
pub const VARIABLE: &str = "PODFS_IO_URING";

/// Whether the kernel offers it: `Y` or `N`.
pub const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";

/// Whether volumes of this process are to be served over io_uring.
pub fn is_chosen() -> bool {
    std::env::var_os(VARIABLE).is_some_and(|value| value == "on")
}

/// Lets the kernel offer it to connections that ask. It stays so: other tests, which ask for nothing, do not notice. False if
/// this kernel cannot.
pub fn is_offered() -> bool {
    fs::write(PARAMETER, "Y").is_ok()
}
