//! Requests of one file that run at once: the server holds its reply to one of them while the next one comes.

use std::fs::{self, File, Permissions};
use std::io::{Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Barrier;
use std::thread;

use crate::mounted::Mounted;
use crate::nfs_rig::protocol::{error, procedure};
use crate::nfs_rig::scripted::Gate;
use crate::nfs_rig::scripted::trouble::{ALWAYS, fails, held};
use crate::nfs_rig::{Ganesha, Scripted, eventually};

/// A server with files, and its mounted export.
fn mounted(files: &[(&str, &str)]) -> (Scripted, Mounted) {
    let server = Scripted::start();
    server.files(|all| {
        for (path, content) in files {
            all.add(path, content.as_bytes());
        }
    });
    let mounted = Mounted::new(&server);
    for (path, _) in files {
        // From now on, the kernel knows the name.
        fs::metadata(mounted.at(path)).expect("there");
    }
    (server, mounted)
}

/// Makes the server hold its next reply to `procedure`, calls `first`, and calls `second` while the reply is held.
fn at_once<T: Send>(
    server: &Scripted,
    procedure: u32,
    executed_first: bool,
    first: impl FnOnce() -> T + Send,
    second: impl FnOnce(&Gate),
) -> T {
    let gate = Gate::default();
    server.rule(held(procedure, &gate, executed_first));
    thread::scope(|scope| {
        let first = scope.spawn(first);
        eventually("the server holds its reply", || gate.arrived() == 1);
        second(&gate);
        gate.open();
        first.join().expect("no panic")
    })
}

/// Closes a file, and waits until podfs has read the requests of the close: RELEASE, and FLUSH of a file that is open for writing.
fn close(mounted: &Mounted, file: File, requests: u64) {
    let before = mounted.requests();
    drop(file);
    eventually("podfs has read RELEASE", || mounted.requests() >= before + requests);
}

fn names(server: &Scripted) -> Vec<String> {
    let mut names: Vec<_> = server.files(|files| {
        files.node("").entries.iter().map(|entry| String::from_utf8_lossy(&entry.name).into_owned()).collect()
    });
    names.sort();
    names
}

#[track_caller]
fn only(server: &Scripted, wanted: &[&str]) {
    eventually(&format!("the server has only {wanted:?}"), || names(server) == wanted);
}

#[test]
fn a_file_that_is_closed_while_it_is_removed_leaves_nothing() {
    for executed_first in [true, false] {
        for writes in [true, false] {
            let (server, mounted) = mounted(&[("file", "content")]);
            let mut file = File::options().read(true).write(writes).open(mounted.at("file")).expect("opened");
            if writes {
                file.write_all(b"data").expect("written");
            }
            let remove = || fs::remove_file(mounted.at("file"));
            let requests = if writes { 2 } else { 1 };
            at_once(&server, procedure::RENAME, executed_first, remove, |_| close(&mounted, file, requests))
                .expect("removed");
            only(&server, &[]);
        }
    }
}

#[test]
fn a_file_that_is_closed_while_another_takes_its_name_leaves_nothing() {
    for executed_first in [true, false] {
        for step in [procedure::LINK, procedure::RENAME] {
            let (server, mounted) = mounted(&[("old", "old"), ("new", "new")]);
            let file = File::open(mounted.at("old")).expect("opened");
            let rename = || fs::rename(mounted.at("new"), mounted.at("old"));
            at_once(&server, step, executed_first, rename, |_| close(&mounted, file, 1)).expect("renamed");
            only(&server, &["old"]);
            assert_eq!(fs::read_to_string(mounted.at("old")).expect("read"), "new");
        }
    }
}

#[test]
fn a_file_that_is_closed_while_it_is_renamed_keeps_its_content() {
    for executed_first in [true, false] {
        let (server, mounted) = mounted(&[("file", "content")]);
        let mut file = File::options().append(true).open(mounted.at("file")).expect("opened");
        file.write_all(b" and more").expect("written");
        let rename = || fs::rename(mounted.at("file"), mounted.at("other"));
        at_once(&server, procedure::RENAME, executed_first, rename, |_| close(&mounted, file, 2)).expect("renamed");
        only(&server, &["other"]);
        assert_eq!(fs::read_to_string(mounted.at("other")).expect("read"), "content and more");
    }
}

#[test]
fn a_file_that_is_closed_while_its_attributes_are_set_has_them_and_its_content() {
    for executed_first in [true, false] {
        let (server, mounted) = mounted(&[("file", "content")]);
        let mut file = File::options().append(true).open(mounted.at("file")).expect("opened");
        file.write_all(b" and more").expect("written");
        let set = || fs::set_permissions(mounted.at("file"), Permissions::from_mode(0o640));
        at_once(&server, procedure::SETATTR, executed_first, set, |_| close(&mounted, file, 2)).expect("set");
        assert_eq!(fs::metadata(mounted.at("file")).expect("there").mode() & 0o777, 0o640);
        let truncate = || nix::unistd::truncate(&mounted.at("file"), 3);
        let file = File::open(mounted.at("file")).expect("opened");
        at_once(&server, procedure::SETATTR, executed_first, truncate, |_| close(&mounted, file, 1)).expect("set");
        assert_eq!(fs::read_to_string(mounted.at("file")).expect("read"), "con");
        only(&server, &["file"]);
    }
}

#[test]
fn a_removed_file_that_is_closed_while_its_attributes_are_set_leaves_nothing() {
    for executed_first in [true, false] {
        let (server, mounted) = mounted(&[("file", "content")]);
        let file = File::open(mounted.at("file")).expect("opened");
        fs::remove_file(mounted.at("file")).expect("removed");
        let by_number = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        // The file may be gone when the server executes the call.
        let set = || fs::set_permissions(&by_number, Permissions::from_mode(0o640));
        let _ = at_once(&server, procedure::SETATTR, executed_first, set, |_| close(&mounted, file, 1));
        only(&server, &[]);
    }
}

#[test]
fn data_that_is_on_its_way_when_its_file_is_removed_is_in_the_open_file() {
    for executed_first in [true, false] {
        let (server, mounted) = mounted(&[("file", "content")]);
        let file = File::options().read(true).append(true).open(mounted.at("file")).expect("opened");
        // podfs accepts the data before the server has it.
        let write = || (&file).write_all(b" and more");
        at_once(&server, procedure::WRITE, executed_first, write, |_| {
            fs::remove_file(mounted.at("file")).expect("removed");
        })
        .expect("written");
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("advised");
        (&file).rewind().expect("a file");
        let mut content = String::new();
        (&file).read_to_string(&mut content).expect("read");
        assert_eq!(content, "content and more");
        drop(file);
        only(&server, &[]);
    }
}

#[test]
fn a_file_that_is_removed_while_it_is_opened_can_be_read() {
    for executed_first in [true, false] {
        let (server, mounted) = mounted(&[("file", "content")]);
        let open = || File::open(mounted.at("file"));
        let remove = |_: &Gate| fs::remove_file(mounted.at("file")).expect("removed");
        let mut file = at_once(&server, procedure::ACCESS, executed_first, open, remove).expect("opened");
        let mut content = String::new();
        file.read_to_string(&mut content).expect("read");
        assert_eq!(content, "content");
        drop(file);
        only(&server, &[]);
    }
}

#[test]
fn a_file_is_opened_either_before_or_after_its_removal() {
    for executed_first in [true, false] {
        for step in [procedure::REMOVE, procedure::RENAME] {
            let (server, mounted) = mounted(&[("file", "content"), ("other", "other")]);
            let change = || match step {
                procedure::REMOVE => fs::remove_file(mounted.at("file")),
                _ => fs::rename(mounted.at("other"), mounted.at("file")),
            };
            let before = mounted.requests();
            thread::scope(|scope| {
                let mut reader = None;
                at_once(&server, step, executed_first, change, |_| {
                    reader = Some(scope.spawn(|| fs::read_to_string(mounted.at("file"))));
                    eventually("podfs has read OPEN", || mounted.requests() >= before + 2);
                })
                .expect("done");
                let read = reader.expect("started").join().expect("no panic");
                match step {
                    procedure::REMOVE => assert_eq!(read.expect_err("removed").raw_os_error(), Some(libc::ENOENT)),
                    _ => assert_eq!(read.expect("read"), "other"),
                }
            });
        }
    }
}

#[test]
fn a_directory_is_removed_while_the_server_still_has_its_closed_files() {
    let (server, mounted) = mounted(&[("directory/file", "content")]);
    let file = File::open(mounted.at("directory/file")).expect("opened");
    fs::remove_file(mounted.at("directory/file")).expect("removed");
    let gate = Gate::default();
    server.rule(held(procedure::REMOVE, &gate, false));
    drop(file);
    eventually("podfs removes the closed file", || gate.arrived() == 1);
    fs::remove_dir(mounted.at("directory")).expect("removed");
    gate.open();
    only(&server, &[]);
}

#[test]
fn a_killed_process_that_was_removing_an_open_file_leaves_nothing() {
    for ends_first in [true, false] {
        let (server, mounted) = mounted(&[("file", "content")]);
        let shown = mounted.shown();
        let file = File::open(shown.path().join("file")).expect("opened");
        let gate = Gate::default();
        server.rule(held(procedure::RENAME, &gate, true));
        let mut rm = Command::new("rm").arg(shown.path().join("file")).spawn().expect("rm");
        eventually("the server holds its reply", || gate.arrived() == 1);
        rm.kill().expect("killed");
        rm.wait().expect("rm ends");
        if ends_first {
            drop(file);
            drop(shown);
            gate.open();
        } else {
            gate.open();
            drop(file);
        }
        only(&server, &[]);
    }
}

#[test]
fn a_closed_file_that_the_server_does_not_remove_is_removed_at_the_end_of_the_volume() {
    let (server, mounted) = mounted(&[("file", "content")]);
    let file = File::open(mounted.at("file")).expect("opened");
    fs::remove_file(mounted.at("file")).expect("removed");
    server.rule(fails(procedure::REMOVE, error::IO, ALWAYS));
    drop(file);
    eventually("podfs has tried", || server.calls(procedure::REMOVE) >= 3);
    server.clear_rules();
    drop(mounted);
    only(&server, &[]);
}

#[test]
fn many_files_that_are_closed_while_they_are_removed_leave_nothing() {
    const FILES: usize = 300;
    let server = Ganesha::start();
    let mounted = Mounted::new(&server);
    fs::create_dir(mounted.at("directory")).expect("made");
    let path = |number| mounted.at(&format!("directory/file-{number}"));
    let (opened, start) = (Barrier::new(2), Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..FILES {
                fs::write(path(number), "content").expect("written");
                let file = File::open(path(number)).expect("opened");
                opened.wait();
                start.wait();
                drop(file);
            }
        });
        for number in 0..FILES {
            opened.wait();
            start.wait();
            fs::remove_file(path(number)).expect("removed");
        }
    });
    fs::remove_dir(mounted.at("directory")).expect("the directory is empty");
    assert_eq!(fs::read_dir(server.exported()).expect("listed").count(), 0);
}
