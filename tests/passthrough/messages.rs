//! Messages to the server, counted by operation.

use std::fs::{self, File};
use std::io::{self, IsTerminal};

use crate::common::passthrough::Mounted;

#[test]
fn isatty_is_one_message_each_time() {
    // open(3) of Python before 3.14 calls it.
    for mounted in [Mounted::new(), Mounted::with_limit(1 << 30)] {
        fs::write(mounted.path().join("file"), "x").expect("written");
        let file = File::open(mounted.path().join("file")).expect("a file");
        let asked = mounted.requests_during(|| {
            for _ in 0..10 {
                assert!(!file.is_terminal());
                assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::ENOTTY));
            }
        });
        assert_eq!(asked.get("IOCTL"), Some(&10), "{asked:?}");
    }
}
