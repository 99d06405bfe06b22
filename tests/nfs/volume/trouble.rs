//! Faulty NFS servers.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::IntoRawFd;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use podfs_fuse::nfs::options::LookupCache;

use crate::mounted::Mounted;
use crate::nfs_rig::ganesha::{Export, Setup, Storage};
use crate::nfs_rig::protocol::{error, procedure};
use crate::nfs_rig::scripted::trouble::{ALWAYS, fails, generous_read, jukebox, restless};
use crate::nfs_rig::{Ganesha, Scripted, eventually};

#[test]
fn a_request_is_repeated_after_jukebox() {
    let server = Scripted::start();
    server.files(|files| {
        files.add("file", b"content");
    });
    let mounted = Mounted::new(&server);
    server.rule(jukebox(procedure::READ, 2));
    assert_eq!(fs::read_to_string(mounted.at("file")).expect("read"), "content");
}

#[test]
fn more_data_than_requested_is_ignored() {
    let server = Scripted::start();
    server.files(|files| {
        files.add("file", &[7; 10_000]);
    });
    let mounted = Mounted::new(&server);
    server.rule(generous_read());
    assert_eq!(fs::read(mounted.at("file")).expect("read").len(), 10_000);
}

#[test]
fn close_and_fsync_return_the_error_of_a_write() {
    let server = Scripted::start();
    let mounted = Mounted::new(&server);
    server.rule(fails(procedure::WRITE, error::NOSPC, ALWAYS));
    let mut file = File::create(mounted.at("file")).expect("created");
    // podfs accepts the first write before the NFS server has refused it.
    file.write_all(b"content").expect("accepted");
    assert_eq!(file.sync_all().expect_err("no room").raw_os_error(), Some(libc::ENOSPC));
    file.sync_all().expect("the first fsync has returned the error");
    server.clear_rules();
    file.write_all(b"more").expect("written");
    file.sync_all().expect("on disk");
}

#[test]
fn an_error_that_a_close_has_returned_is_still_one_of_fsync() {
    let server = Scripted::start();
    let mounted = Mounted::new(&server);
    server.rule(fails(procedure::WRITE, error::NOSPC, ALWAYS));
    let mut file = File::create(mounted.at("file")).expect("created");
    file.write_all(b"content").expect("accepted");
    // As a child does that has inherited the descriptor, and executes another program.
    let inherited = file.try_clone().expect("a descriptor").into_raw_fd();
    assert_eq!(nix::unistd::close(inherited), Err(Errno::ENOSPC));
    assert_eq!(file.sync_all().expect_err("no room").raw_os_error(), Some(libc::ENOSPC));
    drop(file);
    server.clear_rules();
    fs::write(mounted.at("file"), "more").expect("the error is gone with the last close");
}

#[test]
fn an_error_that_a_close_has_returned_is_none_of_a_later_writer() {
    let server = Scripted::start();
    let mounted = Mounted::new(&server);
    let append = || File::options().append(true).create(true).open(mounted.at("log")).expect("opened");
    let first = append();
    let _reader = File::open(mounted.at("log")).expect("opened");
    server.rule(fails(procedure::WRITE, error::NOSPC, ALWAYS));
    (&first).write_all(b"one\n").expect("accepted");
    assert_eq!(nix::unistd::close(first.into_raw_fd()), Err(Errno::ENOSPC));
    server.clear_rules();
    let second = append();
    (&second).write_all(b"two\n").expect("there is room again");
    nix::unistd::close(second.into_raw_fd()).expect("on disk");
    assert!(fs::read_to_string(mounted.at("log")).expect("read").ends_with("two\n"));
}

#[test]
fn a_hole_in_front_of_data_that_is_on_its_way_has_zeros() {
    let server = Scripted::start();
    let mounted = Mounted::new(&server);
    server.rule(jukebox(procedure::WRITE, 1));
    let file =
        File::options().read(true).write(true).create(true).truncate(true).open(mounted.at("file")).expect("created");
    file.write_all_at(b"data", 1 << 20).expect("accepted");
    let mut bytes = [1; 4096];
    assert_eq!(file.read_at(&mut bytes, 0).expect("read"), bytes.len());
    assert_eq!(bytes, [0; 4096]);
    assert_eq!(file.metadata().expect("attributes").len(), (1 << 20) + 4);
}

#[test]
fn appended_data_stays_if_a_process_looks_at_the_file_after_a_restart_of_the_server() {
    let server = Scripted::start();
    let mounted = Mounted::with(&server, |options| {
        (options.caching.acregmin, options.caching.acregmax) = (0, 0);
        options.caching.lookups = LookupCache::None;
    });
    let mut log = File::options().append(true).create(true).open(mounted.at("log")).expect("created");
    log.write_all(b"one\n").expect("accepted");
    eventually("the server has it", || server.calls(procedure::WRITE) == 1);
    server.restart();
    assert_eq!(fs::metadata(mounted.at("log")).expect("attributes").len(), 4);
    log.write_all(b"two\n").expect("accepted");
    log.sync_all().expect("on disk");
    assert_eq!(fs::read_to_string(mounted.at("log")).expect("read"), "one\ntwo\n");
}

#[test]
fn a_full_server_returns_enospc_and_keeps_its_data() {
    let exports = vec![Export { storage: Storage::Tmpfs("size=4m"), ..Export::named("/export") }];
    let server = Ganesha::with(Setup { exports, ..Setup::default() });
    let mounted = Mounted::new(&server);
    fs::write(mounted.at("small"), "small").expect("written");
    let file = File::create(mounted.at("large")).expect("created");
    let written: std::io::Result<()> =
        (0..16).try_for_each(|number| file.write_all_at(&vec![1; 1 << 20], number << 20));
    let error = written.and_then(|()| file.sync_all()).expect_err("no room");
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    drop(file);
    fs::remove_file(mounted.at("large")).expect("removed");
    assert_eq!(fs::read_to_string(mounted.at("small")).expect("read"), "small");
    fs::write(mounted.at("again"), "there is room again").expect("written");
}

#[test]
fn a_server_that_loses_uncommitted_data_gets_it_again() {
    let server = Scripted::start();
    let mounted = Mounted::new(&server);
    let file = File::create(mounted.at("file")).expect("created");
    let expected: Vec<u8> = (0..3_000_000_u32).map(|number| (number % 251) as u8).collect();
    for (number, part) in expected.chunks(100_000).enumerate() {
        file.write_all_at(part, number as u64 * 100_000).expect("written");
        if number % 7 == 0 {
            server.restart();
        }
    }
    file.sync_all().expect("on disk");
    server.restart();
    drop(file);
    assert_eq!(fs::read(mounted.at("file")).expect("read"), expected);
}

#[test]
fn syncing_ends_with_a_server_whose_verifier_is_never_the_same() {
    let server = Scripted::start();
    let mounted = Mounted::new(&server);
    server.rule(restless());
    let file = File::create(mounted.at("file")).expect("created");
    let expected: Vec<u8> = (0..3_000_000_u32).map(|number| (number % 251) as u8).collect();
    file.write_all_at(&expected, 0).expect("accepted");
    file.sync_all().expect("on disk");
    server.restart();
    assert_eq!(fs::read(mounted.at("file")).expect("read"), expected);
}

#[test]
fn small_transfers_make_up_large_ones() {
    let exports = vec![Export { max_read: 8192, max_write: 4096, ..Export::named("/export") }];
    let server = Ganesha::with(Setup { exports, ..Setup::default() });
    let mounted = Mounted::new(&server);
    let expected: Vec<u8> = (0..3_000_000_u32).map(|number| (number % 251) as u8).collect();
    fs::write(mounted.at("file"), &expected).expect("written");
    assert_eq!(fs::read(server.exported().join("file")).expect("read"), expected);
    let other = Mounted::new(&server);
    assert_eq!(fs::read(other.at("file")).expect("read"), expected);
}
