//! An unreachable server blocks only the processes that access it.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::statfs;

use super::{Away, DIRECTORY, Emptied, How, assert_stops_clean, exported, fixture, shown, version_3};
use crate::common::*;

/// Far more than a second, which the documentation promises, and far less than for ever: the guest is slow.
const SOON: Duration = Duration::from_secs(8);
/// More than a session has threads.
const READERS: usize = 24;

#[track_caller]
fn soon<T>(what: &str, act: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let outcome = act();
    println!("{what}: {:?}", start.elapsed());
    assert!(start.elapsed() < SOON, "{what} took {:?}", start.elapsed());
    outcome
}

/// A process that reads a file which is not in the kernel's cache.
fn reader(path: &Path) -> Child {
    Command::new("cat").arg(path).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("cat")
}

/// A process that has written to a file and not closed it: the kernel keeps the data in its cache until a sync or a close.
/// It makes another file when it has written. It is a process of its own, because a thread that starts a process closes its
/// copies of open files there.
fn writer(path: &Path, done: &Path) -> Child {
    let script = "exec >\"$0\"; echo kept in memory; : >\"$1\"; exec sleep 1000";
    let writer = Command::new("sh").args(["-c", script]).arg(path).arg(done).spawn().expect("sh");
    eventually("it has written", || done.exists());
    writer
}

fn ways() -> [(&'static str, String, How); 2] {
    [("/", "nfsvers=4.1".to_owned(), How::Refusing), ("/export", version_3(), How::Silent)]
}

#[test]
#[ignore = "runs in the guest"]
fn root_status_other_volumes_blocked_readers_and_the_end_need_no_server() {
    for (path, options, how) in ways() {
        let _emptied = Emptied(DIRECTORY);
        let names: Vec<_> = (0..READERS).map(|number| format!("file-{number}")).collect();
        names.iter().for_each(|name| fs::write(exported(name), vec![1; 1 << 16]).expect("written"));
        let fixture = fixture(path, &options);
        let mut running = fixture.run();
        let (volume, config) = (shown(&running), running.volume("config"));
        statfs(&volume).expect("told");
        let mut writer = writer(&volume.join("unsaved"), &fixture.path("written"));
        let away = Away::go(how);
        let mut readers: Vec<_> = names.iter().map(|name| reader(&volume.join(name))).collect();
        // The root is looked up while the others wait.
        thread::sleep(Duration::from_secs(1));
        for _ in 0..2 {
            soon("stat of the root", || fs::metadata(&volume).expect("attributes"));
            soon("statfs", || statfs(&volume).expect("told"));
        }
        soon("another volume", || assert_eq!(fs::read_to_string(config.join("a")).expect("read"), "1"));
        soon("podfs status", || assert_eq!(fixture.status(&[]).code, Some(0)));
        for reader in readers.iter_mut().skip(2) {
            soon("a blocked reader", || {
                reader.kill().expect("killed");
                reader.wait().expect("it ends")
            });
        }
        soon("stat of the root", || fs::metadata(&volume).expect("attributes"));
        soon("the end of the pod", || assert_eq!(running.stop().code(), Some(0), "{}", running.log()));
        assert_eq!(fixture.mounts(), Vec::<std::path::PathBuf>::new());
        for reader in readers.iter_mut().chain([&mut writer]) {
            let _ = reader.kill();
            soon("who used the volume", || reader.wait().expect("it ends"));
        }
        drop(away);
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
    let path = shown(&running).join("there");
    let away = Away::go(How::Silent);
    let failed = fs::read(&path).expect_err("no answer");
    assert!(matches!(failed.raw_os_error(), Some(libc::EIO | libc::ETIMEDOUT)), "{failed}");
    drop(away);
    eventually("the server is back", || fs::read_to_string(&path).is_ok_and(|text| text == "1"));
    assert_stops_clean(running, &fixture);
}

#[test]
#[ignore = "runs in the guest"]
fn waiting_calls_continue_when_the_server_is_back() {
    for (path, options, how) in ways() {
        let _emptied = Emptied(DIRECTORY);
        let names: Vec<_> = (0..READERS).map(|number| format!("file-{number}")).collect();
        names.iter().for_each(|name| fs::write(exported(name), name).expect("written"));
        let fixture = fixture(path, &options);
        let running = fixture.run();
        let volume = shown(&running);
        let away = Away::go(how);
        let readers: Vec<_> = names
            .iter()
            .map(|name| {
                let path = volume.join(name);
                thread::spawn(move || fs::read_to_string(path))
            })
            .collect();
        let writer = {
            let path = volume.join("new");
            thread::spawn(move || fs::write(path, "written while it was away"))
        };
        running.wait_log("its source does not answer; the other volumes go on");
        let server = running.server();
        drop(away);
        let patience = Instant::now() + 4 * TIMEOUT;
        while readers.iter().any(|reader| !reader.is_finished()) || !writer.is_finished() {
            assert!(Instant::now() < patience, "{options}: a caller still waits:\n{}", running.log());
            thread::sleep(Duration::from_millis(20));
        }
        for (reader, name) in readers.into_iter().zip(&names) {
            assert_eq!(reader.join().expect("no panic").expect("read"), *name, "{options}");
        }
        writer.join().expect("no panic").expect("written");
        assert_eq!(fs::read_to_string(exported("new")).expect("there"), "written while it was away");
        assert_eq!(running.server(), server, "podfs did not replace the server");
        assert_stops_clean(running, &fixture);
    }
}
