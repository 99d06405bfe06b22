//! The suites of passthrough volumes once more, with volumes whose requests come over io_uring: this program runs itself.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::common::io_uring;
use crate::common::passthrough::Mounted;

/// The tests that run over both transports. Each volume of the second run asserts its transport.
const SUITES: &[&str] = &[
    "attributes::",
    "coherence::",
    "data::",
    "escape::",
    "limit::",
    "locks::",
    "names::",
    "public_suites::every_test_of_pjdfstest",
    "public_suites::fsx_finds_nothing_in_buffered",
];

#[test]
fn the_suites_pass_over_io_uring_too() {
    if io_uring::is_chosen() || !io_uring::is_offered() {
        return;
    }
    let program = std::env::current_exe().expect("this program");
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
    // The server's list of system calls has no io_uring_setup.
    let mounted = Mounted::refused_io_uring(log.reopen().expect("the same file"));
    assert!(!mounted.is_over_io_uring());
    fs::write(mounted.path().join("file"), "1").expect("written");
    assert_eq!(fs::read_to_string(mounted.source().join("file")).expect("a file"), "1");
    drop(mounted);
    let log = fs::read_to_string(log.path()).expect("a log");
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let about = |words: &str| {
        let has = |line: &&Value| line["fields"]["message"].as_str().is_some_and(|message| message.contains(words));
        let fields = &lines.iter().find(has).unwrap_or_else(|| panic!("{words:?}:\n{log}"))["fields"];
        ["pod", "uid", "volume"].map(|field| fields[field].as_str().unwrap_or_default())
    };
    assert_eq!(about("there are no rings for requests"), ["test/test", "test", "data"]);
    assert_eq!(about("the system call io_uring_setup"), ["test/test", "test", ""]);
}
