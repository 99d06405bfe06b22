//! The server of a projection volume is killed between any two of its system calls while it answers requests, also
//! those of a commit. Every generation is still complete, and watchers get the same events as without a kill.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::common::tracer::killed_at;
use crate::common::watch::{Watcher, renamed};
use crate::common::*;
use nix::sys::signal::{Signal, kill};
use rustix::fs::{Advice, AtFlags, CWD, StatxFlags, fadvise, statvfs, statx};

/// More system calls than the server makes for any of the actions in this file.
const STOPS: usize = 400;

/// A pod with a volume `config` that has so many files that each round of a test can use one that the kernel has not
/// cached.
fn fixture(number: usize, files: usize) -> Fixture {
    let fixture = Fixture::new(&config_pod());
    write(&fixture, number, files);
    fixture
}

fn write(fixture: &Fixture, number: usize, files: usize) {
    let (names, number) = ((0..files).map(|n| format!("file-{n:04}")).collect::<Vec<_>>(), number.to_string());
    let data: Vec<_> = names.iter().map(|name| (name.as_str(), number.as_str())).collect();
    fixture.write("objects/app.json", &config_map("app", &data));
}

/// Repeats `act`, and kills the server during each round, one stop (system call) later than in the round before, until
/// a round ends before its kill. `act` gets the number of the stop, and fails the test if it notices the kill.
#[track_caller]
fn withstands(running: &Running, action: &str, mut act: impl FnMut(usize)) {
    for stop in 0..STOPS {
        let (_, killed) = running.freed(|| killed_at(running.server(), stop, || act(stop)));
        if !killed {
            println!("{action}: {stop} kills");
            assert!(stop > 1, "{action} causes a request to the server");
            return;
        }
    }
    panic!("{action} does not end after {STOPS} system calls");
}

#[test]
fn a_kill_while_a_projection_is_read_is_not_noticed() {
    let fixture = fixture(7, STOPS);
    let running = fixture.run();
    let volume = running.volume("config");
    let inode = fs::metadata(&volume).expect("a directory").ino();
    let file = |stop: usize| volume.join(format!("..data/file-{stop:04}"));

    withstands(&running, "a lookup and a read", |stop| {
        assert_eq!(fs::read_to_string(file(stop)).expect("a file"), "7");
    });
    withstands(&running, "a lookup of a missing file", |stop| {
        let missing = fs::read(volume.join(format!("missing-{stop}"))).expect_err("the file does not exist");
        assert_eq!(missing.kind(), std::io::ErrorKind::NotFound);
    });
    let open = File::open(file(0)).expect("a file");
    withstands(&running, "reading again", |_| {
        fadvise(&open, 0, None, Advice::DontNeed).expect("dropped");
        let mut bytes = [0; 8];
        let length = std::os::unix::fs::FileExt::read_at(&open, &mut bytes, 0).expect("read");
        assert_eq!(&bytes[..length], b"7");
    });
    withstands(&running, "listing", |_| assert_eq!(tree::names(&volume).len(), STOPS + 2));
    withstands(&running, "attributes", |_| {
        let attributes = statx(CWD, &volume, AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS).expect("attributes");
        assert_eq!(attributes.stx_ino, inode);
    });
    withstands(&running, "the status of the file system", |_| {
        assert!(statvfs(&volume).expect("a status").f_files > STOPS as u64);
    });
}

#[test]
fn a_kill_while_a_projection_is_changed_is_not_noticed() {
    let fixture = fixture(1, 3);
    let mut command = fixture.command();
    // podfs removes the old generation at once, so that a commit ends soon.
    command.args(["--keep-old-generations", "0"]);
    let mut running = fixture.start_command(command);
    running.wait_ready();
    let volume = running.volume("config");
    let contents = |path: &Path| {
        let file = |n: usize| fs::read_to_string(path.join(format!("file-{n:04}")));
        (0..3).map(|n| file(n).expect("a file")).collect::<Vec<_>>()
    };
    let change = |number: usize| -> Vec<String> {
        let (before, inode) =
            (generation(&volume), fs::symlink_metadata(volume.join("file-0000")).expect("a link").ino());
        assert_eq!(contents(&volume).len(), 3, "the kernel has cached the files");
        let watcher = Watcher::on("root", &volume);
        write(&fixture, number, 3);
        let events = watcher.events_until_removal("root");
        let after = generation(&volume);
        assert_eq!(contents(&volume), vec![number.to_string(); 3]);
        let inode_after = fs::symlink_metadata(volume.join("file-0000")).expect("a link").ino();
        assert_eq!(inode_after, inode, "the link keeps its inode number");
        let names = [(before.as_str(), "OLD"), (after.as_str(), "NEW")];
        let is_change = |event: &String| ["CREATE", "MOVED", "DELETE"].iter().any(|word| event.contains(word));
        events.into_iter().filter(is_change).map(|event| renamed(event, &names)).collect()
    };
    let expected = change(2);
    assert!(expected.iter().any(|event| event == "root MOVED_TO ..data"), "{expected:?}");
    withstands(&running, "a commit", |stop| assert_eq!(change(stop + 3), expected, "killed at stop {stop}"));
    assert!(!running.log().contains("cannot commit"), "{}", running.log());
}

#[test]
fn a_successor_has_the_old_generation_that_the_killed_server_kept() {
    let fixture = fixture(1, 3);
    let mut command = fixture.command();
    command.args(["--keep-old-generations", "5"]);
    let mut running = fixture.start_command(command);
    running.wait_ready();
    let volume = running.volume("config");
    let old = volume.join(generation(&volume));
    let mut watcher = Watcher::on("root", &volume);
    watcher.add("file", &old.join("file-0001"));
    write(&fixture, 2, 3);
    wait_content(&volume.join("file-0001"), "2");
    kill(running.server(), Signal::SIGKILL).expect("the server exists");
    running.wait_log("another one (pid ");
    for number in 0..3 {
        let file = old.join(format!("file-{number:04}"));
        assert_eq!(fs::read_to_string(file).expect("the next server has the old generation"), "1");
    }
    let events = watcher.events_until_removal("root");
    assert!(events.contains(&"file DELETE_SELF".to_owned()), "{events:?}");
    assert!(!old.exists());
}
