//! A warm volume sends no request to its server.
//!
//! Two rounds of reads fill the kernel's caches. In the first round the kernel caches names, absent names, attributes, links,
//! listings and bytes, and which requests the server does not support (ENOSYS). When the kernel reads a listing, a link or a
//! file from the server, it takes the cached access time as outdated, so the next `stat` of that inode asks for the attributes
//! once more. If the first round calls `stat` before it reads, this next `stat` is in the second round.

use std::fs::{self, File};
use std::io::{self, IsTerminal, Read};
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::common::Served;
use crate::common::namespace::{Container, Propagation, bind};
use crate::common::stopped::Stopped;
use crate::common::tree::{files, names, parse};
use crate::common::undisturbed::undisturbed;

const WARMING_ROUNDS: usize = 2;

const PAYLOAD: &str = "a=1; b=2; sub/c=3; sub/deep/d=4";

fn served() -> Served {
    let mut served = Served::new(&crate::common::plain_root());
    served.commit_files(&parse(PAYLOAD));
    served
}

/// The usual reads of containers.
fn round(volume: &Path) {
    for directory in ["", "..data", "sub", "sub/deep", "..data/sub"] {
        assert!(!names(&volume.join(directory)).is_empty());
        fs::metadata(volume.join(directory)).expect("a directory");
    }
    assert_eq!(files(volume), parse(PAYLOAD));
    for path in ["a", "sub", "..data", "..data/a", "..data/sub/c"] {
        fs::symlink_metadata(volume.join(path)).expect("attributes");
        fs::metadata(volume.join(path)).expect("attributes");
    }
    for link in ["a", "sub", "..data"] {
        fs::read_link(volume.join(link)).expect("a link");
    }
    for absent in ["absent", "..data/absent", "sub/absent", "a/absent"] {
        fs::metadata(volume.join(absent)).expect_err("the file does not exist");
        File::open(volume.join(absent)).expect_err("the file does not exist");
    }
    let mut content = String::new();
    File::open(volume.join("sub/deep/d")).expect("a file").read_to_string(&mut content).expect("text");
    fs::canonicalize(volume.join("sub/deep/d")).expect("it resolves");
}

/// The commands that people usually run in a container, except `find` and `du`: these call `statfs`, and the kernel sends a
/// request for each such call.
fn round_of_programs(volume: &Path) {
    run(Command::new("ls").arg("-la").arg(volume));
    run(Command::new("ls").arg("-laR").arg(volume));
    let paths = ["a", "b", "sub/c", "sub/deep/d"].map(|path| volume.join(path));
    run(Command::new("cat").args(&paths));
    run(Command::new("stat").args(&paths));
    let script = "cd \"$0\" && [ -r a ] && [ -d sub ] && [ ! -e absent ] && read -r line < b; [ \"$line\" = 2 ]";
    run(Command::new("sh").args(["-c", script]).arg(volume));
}

fn run(command: &mut Command) {
    let output = command.output().expect("the command starts");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn assert_silent(served: &Served, round: impl Fn(&Path)) {
    let requests = || served.projection.requests().expect("the server answers");
    undisturbed(|| {
        (0..WARMING_ROUNDS).for_each(|_| round(served.path()));
        let before = requests();
        round(served.path());
        match requests() - before {
            0 => {}
            sent => return Err(format!("a warm round sent {sent} requests")),
        }
        let stopped = Stopped::server(served);
        round(served.path());
        stopped.was_not_needed()
    });
}

#[test]
fn a_warm_volume_is_silent() {
    assert_silent(&served(), round);
}

#[test]
fn a_warm_volume_is_silent_for_programs_too() {
    // `ls -l` asks for extended attributes and access lists.
    assert_silent(&served(), round_of_programs);
}

#[test]
fn an_updated_volume_becomes_silent_again() {
    let mut served = Served::with(&[("a", "old"), ("sub/c", "old"), ("gone", "")]);
    for _ in 0..WARMING_ROUNDS {
        files(served.path());
        fs::metadata(served.path().join("absent")).expect_err("the file does not exist");
    }
    served.commit_files(&parse(PAYLOAD));
    assert_silent(&served, round);
}

#[test]
fn a_warm_volume_is_silent_through_a_container() {
    // The caches belong to the file system, not to one of its mounts.
    let served = served();
    undisturbed(|| {
        (0..WARMING_ROUNDS).for_each(|_| round(served.path()));
        let mount_point = TempDir::new().expect("a directory");
        let container = Container::new(Propagation::Private);
        let (from, to) = (served.path().to_owned(), mount_point.path().to_owned());
        let stopped = Stopped::server(&served);
        container.run(move || {
            bind(&from, &to);
            round(&to);
        });
        stopped.was_not_needed()
    });
}

#[test]
fn isatty_is_the_one_call_on_an_open_file_that_asks() {
    // open() of Python before 3.14 calls isatty(3), which sends an ioctl request. The kernel does not cache the answer.
    let served = served();
    let file = File::open(served.path().join("a")).expect("a file");
    let watch = served.projection.watch();
    let ioctl_requests = || watch.requests_by_operation().get("IOCTL").copied().unwrap_or_default();
    let before = ioctl_requests();
    for _ in 0..10 {
        assert!(!file.is_terminal());
        assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::ENOTTY));
    }
    assert_eq!(ioctl_requests() - before, 10);
}

#[test]
fn a_stopped_server_is_noticed() {
    // The tests above depend on this: a call about a name that is not cached waits for the server.
    let served = served();
    let stopped = Stopped::server(&served);
    let path = served.path().join("not-looked-up-yet");
    let caller = std::thread::spawn(move || fs::metadata(path).map(drop));
    drop(stopped);
    caller.join().expect("the call ends").expect_err("the file does not exist");
    let before = served.projection.requests().expect("the server answers");
    round(served.path());
    assert!(served.projection.requests().expect("the server answers") > before, "a cold round sends requests");
}
