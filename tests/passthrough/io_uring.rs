//! Passthrough volumes whose requests come over io_uring: this program runs itself again, with the tests of these volumes.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::common::io_uring;
use crate::common::passthrough::Mounted;

/// The tests that run with both transports. In the second run, each volume asserts that it uses io_uring.
const SUITES: &[&str] = &[
    "attributes::",
    "coherence::",
    "data::",
    "escape::",
    "limit::",
    "locked_changes::",
    "locks::",
    "names::",
    "public_suites::every_test_of_pjdfstest",
    "public_suites::fsx_finds_nothing_in_buffered",
    "replaced::",
    "setid::",
];

#[test]
fn the_suites_pass_over_io_uring_too() {
    if io_uring::is_chosen() || !io_uring::is_offered() {
        return;
    }
    let program = std::env::current_exe().expect("the path of this program");
    let mut again = Command::new(program);
    again.args(SUITES).env(io_uring::VARIABLE, "on");
    assert!(again.status().expect("this program starts").success());
}

#[test]
fn a_server_that_may_have_no_ring_serves_through_the_device_and_says_for_which_volume() {
    if io_uring::is_chosen() || !io_uring::is_offered() {
        return;
    }
    let log = tempfile::NamedTempFile::new().expect("a file");
    // The server's seccomp filter does not allow io_uring_setup.
    let mounted = Mounted::refused_io_uring(log.reopen().expect("the same file"));
    assert!(!mounted.is_over_io_uring());
    fs::write(mounted.path().join("file"), "1").expect("written");
    assert_eq!(fs::read_to_string(mounted.source().join("file")).expect("a file"), "1");
    drop(mounted);
    let log = fs::read_to_string(log.path()).expect("a log");
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let pod_and_volume = |text: &str| {
        let has_text = |line: &&Value| line["fields"]["message"].as_str().is_some_and(|message| message.contains(text));
        let fields = &lines.iter().find(has_text).unwrap_or_else(|| panic!("{text:?}:\n{log}"))["fields"];
        ["pod", "uid", "volume"].map(|field| fields[field].as_str().unwrap_or_default())
    };
    assert_eq!(pod_and_volume("there are no rings for requests"), ["test/test", "test", "data"]);
    assert_eq!(pod_and_volume("the system call io_uring_setup"), ["test/test", "test", ""]);
}
