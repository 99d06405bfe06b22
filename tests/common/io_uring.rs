//! Volumes whose requests come over io_uring: the setting of this process, and the support of the kernel.

use std::fs;
use std::process::Command;

use super::outcome::finish;

/// The environment variable of the setting. With the value `on`, all volumes of a test program use io_uring.
pub const VARIABLE: &str = "PODFS_IO_URING";

/// The module parameter by which the kernel offers FUSE over io_uring: `Y` or `N`.
pub const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";

/// Whether this process serves volumes over io_uring.
pub fn is_chosen() -> bool {
    std::env::var_os(VARIABLE).is_some_and(|value| value == "on")
}

/// Lets the kernel offer io_uring to connections that request it. Returns false if the kernel does not support that. The
/// setting stays after the test; it does not affect tests that do not request io_uring.
pub fn is_offered() -> bool {
    fs::write(PARAMETER, "Y").is_ok()
}

/// Starts this test program again with the setting, and repeats the tests that these filters choose.
#[track_caller]
pub fn repeat(filters: &[&str]) {
    let this_program = std::env::current_exe().expect("this program");
    for filter in filters {
        let tests = finish(Command::new(&this_program).args(["--list", filter])).stdout;
        assert!(tests.contains(": test"), "no test is called {filter}");
    }
    let mut again = Command::new(this_program);
    again.args(filters).env(VARIABLE, "on");
    assert!(again.status().expect("this program starts").success());
}
