//! Listings of directories.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::Path;

use crate::mounted::Mounted;
use crate::nfs_rig::Ganesha;
use crate::nfs_rig::Scripted;
use crate::nfs_rig::protocol::{error, procedure};
use crate::nfs_rig::scripted::trouble::{ALWAYS, Cookies, endless, fails};

fn names(directory: impl AsRef<Path>) -> BTreeSet<OsString> {
    let entries: Vec<_> =
        fs::read_dir(directory).expect("listed").map(|entry| entry.expect("an entry").file_name()).collect();
    let count = entries.len();
    let names: BTreeSet<_> = entries.into_iter().collect();
    assert_eq!(names.len(), count, "no name twice");
    names
}

#[test]
fn a_large_directory_is_listed_whole_and_each_name_once() {
    let server = Ganesha::start();
    for number in 0..10_000 {
        File::create(server.exported().join(format!("a-name-that-takes-some-room-{number}"))).expect("created");
    }
    for with_attributes in [true, false] {
        let mounted = Mounted::with(&server, |options| options.with_attributes = with_attributes);
        assert_eq!(names(mounted.at("")).len(), 10_000);
        let sizes = fs::read_dir(mounted.at(""))
            .expect("listed")
            .map(|entry| entry.expect("an entry").metadata().expect("attributes").len());
        assert_eq!(sizes.sum::<u64>(), 0);
    }
}

#[test]
fn a_directory_that_changes_while_it_is_read_shows_lasting_names() {
    let server = Ganesha::start();
    let mounted = Mounted::new(&server);
    for number in 0..2000 {
        File::create(server.exported().join(format!("stays-{number}"))).expect("created");
        File::create(server.exported().join(format!("goes-{number}"))).expect("created");
    }
    let mut listed = BTreeSet::new();
    for (number, entry) in fs::read_dir(mounted.at("")).expect("listed").enumerate() {
        let name = entry.expect("an entry").file_name();
        let name = name.to_string_lossy().into_owned();
        if number % 2 == 0 {
            let _ = fs::remove_file(mounted.at(&format!("goes-{}", number / 2)));
        }
        assert!(listed.insert(name), "no name twice");
    }
    assert_eq!(listed.iter().filter(|name| name.starts_with("stays")).count(), 2000);
}

#[test]
fn a_server_without_readdirplus_gets_readdir() {
    let server = Scripted::start();
    server.files(|files| {
        files.add("one", b"1");
        files.add("two", b"2");
    });
    server.rule(fails(procedure::READDIRPLUS, error::NOTSUPP, ALWAYS));
    let mounted = Mounted::new(&server);
    assert_eq!(names(mounted.at("")), BTreeSet::from(["one".into(), "two".into()]));
    assert_eq!(fs::read_to_string(mounted.at("one")).expect("read"), "1");
}

#[test]
fn a_directory_without_end_or_progress_is_an_error() {
    let server = Scripted::start();
    server.rule(endless(Cookies::Same));
    let mounted = Mounted::new(&server);
    let error = fs::read_dir(mounted.at("")).expect("opened").find_map(Result::err).expect("an error");
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
}

#[test]
fn a_place_that_the_server_has_forgotten_is_found_again() {
    let server = Scripted::start();
    server.files(|files| {
        for number in 0..3000 {
            files.add(&format!("a-name-that-takes-some-room-{number}"), b"");
        }
    });
    let mounted = Mounted::new(&server);
    let mut has_failed = false;
    server.rule(move |received, _| {
        let is_listing = received.is(procedure::READDIRPLUS) || received.is(procedure::READDIR);
        let fails = is_listing && received.at != 0 && !has_failed;
        has_failed |= fails;
        fails.then_some(crate::nfs_rig::scripted::Reply::Error(error::BAD_COOKIE))
    });
    assert_eq!(names(mounted.at("")).len(), 3000);
}

#[test]
fn a_server_that_refuses_each_place_in_a_directory_is_an_error() {
    // A client without a limit ends after so many calls, too.
    const REFUSALS: usize = 2000;
    let server = Scripted::start();
    server.files(|files| {
        for number in 0..3000 {
            files.add(&format!("a-name-that-takes-some-room-{number}"), b"");
        }
    });
    let mounted = Mounted::new(&server);
    let mut refusals = 0;
    server.rule(move |received, _| {
        let is_listing = received.is(procedure::READDIRPLUS) || received.is(procedure::READDIR);
        let fails = is_listing && received.at != 0 && refusals < REFUSALS;
        refusals += usize::from(fails);
        fails.then_some(crate::nfs_rig::scripted::Reply::Error(error::BAD_COOKIE))
    });
    let error = fs::read_dir(mounted.at("")).expect("opened").find_map(Result::err).expect("an error");
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
}

#[test]
fn a_directory_that_the_server_rearranges_again_and_again_is_listed_as_long_as_it_gets_further() {
    let server = Scripted::start();
    server.files(|files| {
        for number in 0..3000 {
            files.add(&format!("a-name-that-takes-some-room-{number}"), b"");
        }
    });
    let mounted = Mounted::new(&server);
    let mut furthest = 0;
    server.rule(move |received, _| {
        let is_listing = received.is(procedure::READDIRPLUS) || received.is(procedure::READDIR);
        let fails = is_listing && received.at > furthest;
        furthest = furthest.max(received.at);
        fails.then_some(crate::nfs_rig::scripted::Reply::Error(error::BAD_COOKIE))
    });
    assert_eq!(names(mounted.at("")).len(), 3000);
}
