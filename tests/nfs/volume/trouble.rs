//! Faulty NFS servers.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;

use crate::mounted::Mounted;
use crate::nfs_rig::ganesha::{Export, Setup, Storage};
use crate::nfs_rig::protocol::{error, procedure};
use crate::nfs_rig::scripted::trouble::{ALWAYS, fails, generous_read, jukebox, restless};
use crate::nfs_rig::{Ganesha, Scripted};

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
