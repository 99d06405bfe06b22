//! The server of the pod (the process of podfs) is killed, also while the NFS server is unreachable: the next server of the pod
//! executes the waiting requests.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::fs::statfs;

use super::{DIRECTORY, Emptied, Outage, OutageKind, assert_stops_clean, exported, fixture, version_3, volume_path};
use crate::common::*;

/// Fewer than a FUSE session of podfs has threads: each reader's request has a thread.
const READERS: usize = 8;
/// The number of servers that are killed, one after the other.
const KILLS: usize = 2;

#[test]
#[ignore = "runs in the guest"]
fn a_kill_of_the_server_while_its_source_is_unreachable_fails_no_call() {
    for (path, options, kind) in
        [("/", "nfsvers=4.1".to_owned(), OutageKind::Refusing), ("/export", version_3(), OutageKind::Silent)]
    {
        let _emptied = Emptied(DIRECTORY);
        let names: Vec<_> = (0..READERS).map(|number| format!("file-{number}")).collect();
        names.iter().for_each(|name| fs::write(exported(name), name.repeat(1 << 12)).expect("written"));
        fs::write(exported("old"), "moved").expect("written");
        fs::write(exported("gone"), "").expect("written");
        let fixture = fixture(path, &options);
        let running = fixture.run();
        let volume = volume_path(&running);
        statfs(&volume).expect("statistics");
        let outage = Outage::begin(kind);
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
            println!("{options}: the next server showed the root after {:?}", start.elapsed());
            // The next server has a second to handle the requests of the killed server again.
            thread::sleep(Duration::from_secs(1));
        }
        drop(outage);
        for process in readers.iter_mut().chain(&mut changes) {
            let deadline = Instant::now() + 2 * TIMEOUT;
            let status = loop {
                match process.try_wait().expect("a child") {
                    Some(status) => break status,
                    None => assert!(Instant::now() < deadline, "{options}: a caller still waits:\n{}", running.log()),
                }
                thread::sleep(Duration::from_millis(20));
            };
            assert!(status.success(), "{options}: {status}");
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

#[test]
#[ignore = "runs in the guest"]
fn a_successor_starts_although_a_close_keeps_the_killed_server_from_ending() {
    // The close sends the written data to the NFS server, and no signal interrupts its wait. The shell writes to the file
    // itself (`exec >`): with a redirection of a single command, it would close only a copy of the descriptor.
    const CLOSE: &str = r#"exec >"$0"; echo written; read -r line; exec >&-"#;
    for (path, options, kind) in
        [("/", "nfsvers=4.1".to_owned(), OutageKind::Refusing), ("/export", version_3(), OutageKind::Silent)]
    {
        let _emptied = Emptied(DIRECTORY);
        let fixture = fixture(path, &options);
        let running = fixture.run();
        let (volume, config) = (volume_path(&running), running.volume("config"));
        let mut closer = Command::new("sh");
        closer.args(["-c", CLOSE]).arg(volume.join("file")).stdin(Stdio::piped());
        let mut closer = closer.spawn().expect("sh");
        let wchan = format!("/proc/{}/wchan", closer.id());
        let wchan = || fs::read_to_string(&wchan).expect("the shell runs");
        eventually("the shell has written, and reads", || ["poll", "pipe"].iter().any(|name| wchan().contains(name)));
        let outage = Outage::begin(kind);
        closer.stdin.take().expect("a pipe").write_all(b"\n").expect("the shell reads");
        let server = running.server();
        let closes = || calls(server).any(|call| call == libc::SYS_close);
        eventually("the server closes the file", closes);
        // The close still runs after a second: it is not one that ends at once.
        thread::sleep(Duration::from_secs(1));
        kill(server, Signal::SIGKILL).expect("killed");
        eventually("there is another server", || running.servers().last().is_some_and(|pid| *pid != server));
        assert!(closes(), "{options}: the killed server has already ended");
        fs::metadata(&volume).expect("attributes");
        assert_eq!(fs::read_to_string(config.join("a")).expect("read"), "1");
        drop(outage);
        assert!(closer.wait().expect("a child").success(), "{options}:\n{}", running.log());
        assert_eq!(fs::read_to_string(exported("file")).expect("there"), "written\n", "{options}");
        assert_stops_clean(running, &fixture);
    }
}

/// The system calls in which the threads of a process are.
fn calls(process: Pid) -> impl Iterator<Item = libc::c_long> {
    let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let calls = threads.filter_map(|thread| fs::read_to_string(thread.path().join("syscall")).ok());
    calls.filter_map(|call| call.split_whitespace().next()?.parse().ok())
}

#[test]
#[ignore = "runs in the guest"]
fn servers_that_are_killed_under_load_fail_lose_and_double_nothing() {
    // Each step fails if the step before was not executed, or if the step itself is executed twice.
    const ROUNDS: &str = r#"set -e
        for round in 1 2 3 4 5 6 7 8; do
            mkdir "$0-$round"; echo "$round" >"$0-$round/file"; mv "$0-$round/file" "$0-$round/moved"
            ln "$0-$round/moved" "$0-$round/linked"; rm "$0-$round/moved"
            [ "$(cat "$0-$round/linked")" = "$round" ]; echo more >>"$0-$round/linked"
            rm "$0-$round/linked"; rmdir "$0-$round"; echo "$round" >>"$0"
        done"#;
    for (path, options, kind) in
        [("/", "nfsvers=4.1".to_owned(), OutageKind::Refusing), ("/export", version_3(), OutageKind::Silent)]
    {
        let _emptied = Emptied(DIRECTORY);
        let fixture = fixture(path, &options);
        let running = fixture.run();
        let volume = volume_path(&running);
        let work = |name| Command::new("sh").args(["-c", ROUNDS, name]).current_dir(&volume).spawn().expect("sh");
        let mut workers = ["first", "second", "third"].map(work);
        let mut kills = 0;
        while workers.iter_mut().any(|worker| worker.try_wait().expect("a child").is_none()) {
            let server = running.server();
            thread::sleep(Duration::from_millis(300));
            // Every second kill happens during an outage of the NFS server. The killed server may need the NFS server to end.
            let outage = (kills % 2 == 1).then(|| Outage::begin(kind));
            kill(server, Signal::SIGKILL).expect("killed");
            thread::sleep(Duration::from_secs(if outage.is_some() { 2 } else { 0 }));
            drop(outage);
            eventually("there is another server", || running.servers().last().is_some_and(|pid| *pid != server));
            kills += 1;
            thread::sleep(Duration::from_millis(700));
        }
        println!("{options}: {kills} servers were killed");
        for worker in &mut workers {
            assert!(worker.wait().expect("a child").success(), "{options}:\n{}", running.log());
        }
        for name in ["first", "second", "third"] {
            assert_eq!(
                fs::read_to_string(exported(name)).expect("there"),
                "1\n2\n3\n4\n5\n6\n7\n8\n",
                "{options}: {name}"
            );
        }
        assert_eq!(fs::read_dir(DIRECTORY).expect("a listing").count(), 3, "{options}");
        assert_stops_clean(running, &fixture);
    }
}

/// A shell that changes the volume with a command.
fn changer(volume: &Path, change: &str) -> Child {
    Command::new("sh").args(["-c", change]).current_dir(volume).spawn().expect("sh")
}
