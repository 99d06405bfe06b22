//! podfs's own server is killed while the NFS server is away: what waits is asked again by the next one.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use rustix::fs::statfs;

use super::{Away, DIRECTORY, Emptied, How, assert_stops_clean, exported, fixture, shown, version_3};
use crate::common::*;

/// Fewer than a session has threads: nothing of this is parked.
const READERS: usize = 8;
/// As many servers are killed, one after the other.
const KILLS: usize = 3;

#[test]
#[ignore = "runs in the guest"]
fn a_server_that_is_killed_while_its_source_is_away_is_followed_and_no_call_fails() {
    for (path, options, how) in [("/", "nfsvers=4.1".to_owned(), How::Refusing), ("/export", version_3(), How::Silent)]
    {
        let _emptied = Emptied(DIRECTORY);
        let names: Vec<_> = (0..READERS).map(|number| format!("file-{number}")).collect();
        names.iter().for_each(|name| fs::write(exported(name), name.repeat(1 << 12)).expect("written"));
        fs::write(exported("old"), "moved").expect("written");
        fs::write(exported("gone"), "").expect("written");
        let fixture = fixture(path, &options);
        let running = fixture.run();
        let volume = shown(&running);
        statfs(&volume).expect("told");
        let away = Away::go(how);
        let read = |name: &String| {
            let copy = File::create(fixture.path(name)).expect("a file");
            Command::new("cat").arg(volume.join(name)).stdout(copy).spawn().expect("cat")
        };
        let mut readers: Vec<_> = names.iter().map(read).collect();
        let mut changes = ["mkdir made", "mv old new", "rm gone", "echo written >file", "ln -s target link"]
            .map(|change| changer(&volume, change));
        running.wait_log("its source does not answer; the other volumes go on");
        for _ in 0..KILLS {
            let server = running.server();
            kill(server, Signal::SIGKILL).expect("killed");
            eventually("there is another server", || running.servers().last().is_some_and(|pid| *pid != server));
            let start = Instant::now();
            fs::metadata(&volume).expect("attributes");
            println!("{options}: the root was told after {:?}", start.elapsed());
            // It asks anew for what its predecessor was asked.
            thread::sleep(Duration::from_secs(1));
        }
        drop(away);
        for process in readers.iter_mut().chain(&mut changes) {
            let deadline = Instant::now() + 4 * PATIENCE;
            let ended = loop {
                match process.try_wait().expect("a child") {
                    Some(ended) => break ended,
                    None => assert!(Instant::now() < deadline, "{options}: somebody still waits:\n{}", running.log()),
                }
                thread::sleep(Duration::from_millis(20));
            };
            assert!(ended.success(), "{options}: {ended}");
        }
        for name in &names {
            let copy = fs::read_to_string(fixture.path(name)).expect("a copy");
            assert!(copy == name.repeat(1 << 12), "{options}: {name}");
        }
        assert!(exported("made").is_dir(), "{options}");
        assert!(!exported("gone").exists() && !exported("old").exists(), "{options}");
        assert_eq!(fs::read_to_string(exported("new")).expect("there"), "moved", "{options}");
        assert_eq!(fs::read_to_string(exported("file")).expect("there"), "written\n", "{options}");
        assert_eq!(fs::read_link(exported("link")).expect("there"), Path::new("target"), "{options}");
        assert_stops_clean(running, &fixture);
    }
}

/// A process that changes something of the volume with a command of the shell.
fn changer(volume: &Path, change: &str) -> Child {
    Command::new("sh").args(["-c", change]).current_dir(volume).spawn().expect("sh")
}
