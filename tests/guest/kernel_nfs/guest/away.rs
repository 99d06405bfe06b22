//! An unreachable server blocks only the processes that access it.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::statfs;

use super::{DIRECTORY, Emptied, Outage, OutageKind, assert_stops_clean, exported, fixture, version_3, volume_path};
use crate::common::*;

/// The documentation promises one second. The guest is slow, so the tests allow more; an operation that waits for the NFS
/// server would never end.
const SOON: Duration = Duration::from_secs(8);
/// More than a FUSE session of podfs has threads.
const READERS: usize = 24;

/// Panics if an operation takes longer than [`SOON`].
#[track_caller]
fn soon<T>(operation: &str, act: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let outcome = act();
    println!("{operation}: {:?}", start.elapsed());
    assert!(start.elapsed() < SOON, "{operation} took {:?}", start.elapsed());
    outcome
}

/// A process that reads a file that is not in the kernel's cache.
fn reader(path: &Path) -> Child {
    Command::new("cat").arg(path).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("cat")
}

/// A process that has written to a file and not closed it: the kernel keeps the data in its cache until a sync or a close. The
/// process creates `marker` when it has written.
///
/// A thread of the test must not hold the file open: when another thread starts a process, that process closes its copy of the
/// file, and the close waits for the NFS server.
fn writer(path: &Path, marker: &Path) -> Child {
    let script = "exec >\"$0\"; echo kept in memory; : >\"$1\"; exec sleep 1000";
    let writer = Command::new("sh").args(["-c", script]).arg(path).arg(marker).spawn().expect("sh");
    eventually("the process has written", || marker.exists());
    writer
}

/// The export's path and the mount options of each version, and the kind of outage to test it with.
fn versions() -> [(&'static str, String, OutageKind); 2] {
    [("/", "nfsvers=4.1".to_owned(), OutageKind::Refusing), ("/export", version_3(), OutageKind::Silent)]
}

#[test]
#[ignore = "runs in the guest"]
fn root_status_other_volumes_blocked_readers_and_the_end_need_no_server() {
    for (path, options, kind) in versions() {
        let _emptied = Emptied(DIRECTORY);
        let names: Vec<_> = (0..READERS).map(|number| format!("file-{number}")).collect();
        names.iter().for_each(|name| fs::write(exported(name), vec![1; 1 << 16]).expect("written"));
        let fixture = fixture(path, &options);
        let mut running = fixture.run();
        let (volume, config) = (volume_path(&running), running.volume("config"));
        statfs(&volume).expect("statistics");
        let mut writer = writer(&volume.join("unsaved"), &fixture.path("written"));
        let outage = Outage::begin(kind);
        let mut readers: Vec<_> = names.iter().map(|name| reader(&volume.join(name))).collect();
        // The readers have a second to send their requests: the operations below run while the readers wait.
        thread::sleep(Duration::from_secs(1));
        for _ in 0..2 {
            soon("stat of the root", || fs::metadata(&volume).expect("attributes"));
            soon("statfs", || statfs(&volume).expect("statistics"));
        }
        soon("another volume", || assert_eq!(fs::read_to_string(config.join("a")).expect("read"), "1"));
        soon("podfs status", || assert_eq!(fixture.status(&[]).code, Some(0)));
        for reader in readers.iter_mut().skip(2) {
            soon("the end of a killed reader", || {
                reader.kill().expect("killed");
                reader.wait().expect("the reader ends")
            });
        }
        soon("stat of the root", || fs::metadata(&volume).expect("attributes"));
        soon("the end of the pod", || assert_eq!(running.stop().code(), Some(0), "{}", running.log()));
        assert_eq!(fixture.mounts(), Vec::<std::path::PathBuf>::new());
        for reader in readers.iter_mut().chain([&mut writer]) {
            let _ = reader.kill();
            soon("the end of a process that used the volume", || reader.wait().expect("the process ends"));
        }
        drop(outage);
        eventually("no process is left", || fixture.processes().is_empty());
    }
}

#[test]
#[ignore = "runs in the guest"]
fn a_soft_mount_ends_its_calls_with_an_error() {
    let _emptied = Emptied(DIRECTORY);
    fs::write(exported("there"), "1").expect("written");
    let fixture = fixture("/export", &format!("{},soft,timeo=10,retrans=2", version_3()));
    let running = fixture.run();
    let path = volume_path(&running).join("there");
    let outage = Outage::begin(OutageKind::Silent);
    let error = fs::read(&path).expect_err("no answer");
    assert!(matches!(error.raw_os_error(), Some(libc::EIO | libc::ETIMEDOUT)), "{error}");
    drop(outage);
    eventually("the server is back", || fs::read_to_string(&path).is_ok_and(|text| text == "1"));
    assert_stops_clean(running, &fixture);
}

#[test]
#[ignore = "runs in the guest"]
fn waiting_calls_continue_when_the_server_is_back() {
    for (path, options, kind) in versions() {
        let _emptied = Emptied(DIRECTORY);
        let names: Vec<_> = (0..READERS).map(|number| format!("file-{number}")).collect();
        names.iter().for_each(|name| fs::write(exported(name), name).expect("written"));
        let fixture = fixture(path, &options);
        let running = fixture.run();
        let volume = volume_path(&running);
        let outage = Outage::begin(kind);
        let readers: Vec<_> = names
            .iter()
            .map(|name| {
                let path = volume.join(name);
                thread::spawn(move || fs::read_to_string(path))
            })
            .collect();
        let writer = {
            let path = volume.join("new");
            thread::spawn(move || fs::write(path, "written during the outage"))
        };
        running.wait_log("its source does not answer; the other volumes go on");
        let server = running.server();
        drop(outage);
        let deadline = Instant::now() + 2 * TIMEOUT;
        while readers.iter().any(|reader| !reader.is_finished()) || !writer.is_finished() {
            assert!(Instant::now() < deadline, "{options}: a caller still waits:\n{}", running.log());
            thread::sleep(Duration::from_millis(20));
        }
        for (reader, name) in readers.into_iter().zip(&names) {
            assert_eq!(reader.join().expect("no panic").expect("read"), *name, "{options}");
        }
        writer.join().expect("no panic").expect("written");
        assert_eq!(fs::read_to_string(exported("new")).expect("there"), "written during the outage");
        assert_eq!(running.server(), server, "podfs did not replace the server");
        assert_stops_clean(running, &fixture);
    }
}
