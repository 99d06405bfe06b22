//! The scripted server: without a rule it is correct, and each rule causes its fault.

use std::fs;
use std::io::{ErrorKind, Read};

use tempfile::TempDir;

use crate::nfs_rig::Scripted;
use crate::nfs_rig::caller::{Caller, Handle};
use crate::nfs_rig::libnfs::Libnfs;
use crate::nfs_rig::protocol::error::{EXIST, IO, JUKEBOX, NOENT, STALE};
use crate::nfs_rig::protocol::procedure::*;
use crate::nfs_rig::protocol::{NFS, PORTMAP};
use crate::nfs_rig::rpc::Call;
use crate::nfs_rig::scripted::trouble::{self, ALWAYS, Cookies};
use crate::nfs_rig::scripted::{Reply, failed};
use crate::nfs_rig::xdr::Writer;

/// A server with the file `file`, a client of it, and the handles of the root and the file.
fn scene() -> (Scripted, Caller, Handle, Handle) {
    let server = Scripted::start();
    server.files(|files| files.add("file", b"hello").mode = 0o640);
    let (root, file) = server.files(|files| (files.handle(""), files.handle("file")));
    let caller = Caller::connect(server.address()).expect("connected");
    (server, caller, root, file)
}

/// Reads the first bytes of a file.
fn read(caller: &mut Caller, file: &[u8]) -> std::io::Result<Result<Vec<u8>, u32>> {
    caller.read(file, 0, 4096)
}

#[test]
fn without_a_rule_it_serves_its_files_to_another_client() {
    let (server, mut caller, root, file) = scene();
    assert_eq!(Caller::mount(server.address(), "/export").expect("an answer"), Ok(root.clone()));
    assert_eq!(Caller::mount(server.address(), "/missing").expect("an answer"), Err(NOENT));
    assert_eq!(caller.getattr(&file).expect("an answer").expect("attributes").mode, 0o640);
    let (nfs, mount) = (server.address(), server.address());
    let libnfs = Libnfs { nfs, mount, export: "/export".to_owned() };
    assert_eq!((libnfs.names(""), libnfs.cat("file")), (vec!["file".to_owned()], b"hello".to_vec()));

    let directory = TempDir::with_prefix("podfs-test-").expect("a directory");
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|index| (index % 251) as u8).collect();
    fs::write(directory.path().join("there"), &bytes).expect("written");
    libnfs.put(&directory.path().join("there"), "copy");
    libnfs.take("copy", &directory.path().join("back"));
    assert_eq!(fs::read(directory.path().join("back")).expect("there"), bytes);
    assert!(server.files(|files| files.node("copy").content == bytes));
}

#[test]
fn names_come_and_go_as_on_a_real_server() {
    let (server, mut caller, root, file) = scene();
    let directory = caller.mkdir(&root, "directory").expect("an answer").expect("made");
    assert_eq!(caller.mkdir(&root, "directory").expect("an answer"), Err(EXIST));
    caller.create(&directory, "inner").expect("an answer").expect("created");
    caller.rename(&root, "file", "other").expect("an answer").expect("renamed");
    assert_eq!(caller.lookup(&root, "file").expect("an answer"), Err(NOENT));
    assert_eq!(caller.lookup(&root, "other").expect("an answer"), Ok(file.clone()));
    caller.remove(&root, "other").expect("an answer").expect("removed");
    assert_eq!(caller.getattr(&file).expect("an answer"), Err(STALE));
    assert!(server.files(|files| files.exists("directory/inner") && !files.exists("other")));
}

#[test]
fn a_directory_comes_in_pages_that_end() {
    let (server, mut caller, root, _) = scene();
    server.files(|files| (0..200).for_each(|number| drop(files.add(&format!("file-{number}"), b"").clone())));
    let (mut cookie, mut names, mut pages) = (0, Vec::new(), 0);
    loop {
        let page = caller.page(&root, cookie, 4096).expect("an answer").expect("a page");
        cookie = page.entries.last().expect("an entry").0;
        names.extend(page.entries.into_iter().map(|(_, name)| name));
        pages += 1;
        if page.last {
            break;
        }
    }
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 203, "with both dots");
    assert!(pages > 1);
}

#[test]
fn a_restart_loses_uncommitted_data_and_changes_the_verifier() {
    let (server, mut caller, _, file) = scene();
    let before = caller.write(&file, 0, b"HE").expect("an answer").expect("written");
    assert_eq!(caller.commit(&file).expect("an answer"), Ok(before));
    caller.write(&file, 2, b"LLO").expect("an answer").expect("written");
    assert_eq!(read(&mut caller, &file).expect("an answer").expect("read"), b"HELLO");
    server.restart();
    assert!(read(&mut caller, &file).is_err(), "the connection has ended");
    let mut caller = Caller::connect(server.address()).expect("connected");
    assert_eq!(read(&mut caller, &file).expect("an answer").expect("read"), b"HEllo");
    assert_ne!(caller.commit(&file).expect("an answer"), Ok(before));

    server.rule(trouble::restless());
    let first = caller.write(&file, 0, b"x").expect("an answer").expect("written");
    assert_ne!(caller.commit(&file).expect("an answer"), Ok(first));
}

#[test]
fn a_procedure_fails_as_often_as_ordered() {
    let (server, mut caller, root, file) = scene();
    server.rule(trouble::jukebox(READ, 2));
    assert_eq!(read(&mut caller, &file).expect("an answer"), Err(JUKEBOX));
    assert_eq!(read(&mut caller, &file).expect("an answer"), Err(JUKEBOX));
    assert_eq!(read(&mut caller, &file).expect("an answer").expect("read"), b"hello");
    assert_eq!((server.calls(READ), server.calls(WRITE)), (3, 0));

    server.rule(trouble::stale(file.clone()));
    assert_eq!(caller.getattr(&file).expect("an answer"), Err(STALE));
    caller.getattr(&root).expect("an answer").expect("another handle");
    server.clear_rules();
    caller.getattr(&file).expect("an answer").expect("attributes");

    // The results of a failed call have the length that the procedure defines.
    for procedure in GETATTR..=COMMIT {
        server.rule(trouble::fails(procedure, IO, ALWAYS));
        let results = caller.call(NFS, procedure, Writer::default().opaque(&file)).expect("an answer");
        assert_eq!(results, failed((NFS.0, procedure), IO));
    }
}

#[test]
fn a_procedure_is_done_and_the_reply_is_lost() {
    let (server, mut caller, root, _) = scene();
    server.rule(trouble::executed_but(MKDIR, 1, Reply::Close));
    caller.mkdir(&root, "made").expect_err("the connection has ended");
    let mut caller = Caller::connect(server.address()).expect("connected");
    assert_eq!(caller.mkdir(&root, "made").expect("an answer"), Err(EXIST));
}

#[test]
fn a_silent_procedure_delays_no_other() {
    let (server, mut caller, root, file) = scene();
    server.rule(trouble::silent(READ, ALWAYS));
    let arguments = Writer::default().opaque(&file).u64(0).u32(5).bytes();
    let call = Call { xid: 1, program: NFS.0, version: 3, procedure: READ, identity: None, arguments };
    caller.send(&call.write()).expect("sent");
    caller.getattr(&root).expect("the only reply").expect("attributes");
    assert_eq!(server.calls(READ), 1);
}

#[test]
fn each_rule_makes_replies_wrong_in_its_own_way() {
    let (server, mut caller, root, file) = scene();
    let invalid = |caller: &mut Caller| read(caller, &file).expect_err("no results").kind() == ErrorKind::InvalidData;
    server.rule(trouble::wrong_xid(READ, 1));
    assert!(invalid(&mut caller));
    server.rule(trouble::garbage(READ, 1));
    assert!(invalid(&mut caller));
    server.rule(trouble::denied(READ, 1, 1));
    assert!(invalid(&mut caller));
    server.rule(trouble::not_executed(READ, 5, 1));
    assert!(invalid(&mut caller));
    assert_eq!(read(&mut caller, &file).expect("an answer").expect("good again"), b"hello");
    server.rule(trouble::cut_short(READ, 50));
    assert!(invalid(&mut caller));
    server.rule(trouble::huge_read());
    assert!(invalid(&mut caller));
    server.rule(trouble::generous_read());
    assert_eq!(caller.read(&file, 0, 100).expect("an answer").expect("read").len(), 612);
    server.clear_rules();

    server.rule(trouble::header_only(GETATTR, 0x7fff_ffff, 1));
    let call = Call { xid: 1, program: NFS.0, version: 3, procedure: GETATTR, identity: None, arguments: root };
    caller.send(&call.write()).expect("sent");
    let mut header = [0; 4];
    caller.stream().read_exact(&mut header).expect("a header");
    assert_eq!(header, [0xff; 4]);
}

#[test]
fn a_directory_never_ends_with_the_same_cookie_or_with_new_ones() {
    let (server, mut caller, root, _) = scene();
    for (cookies, advances) in [(Cookies::Same, false), (Cookies::New, true)] {
        server.rule(trouble::endless(cookies));
        let page = caller.page(&root, 77, 4096).expect("an answer").expect("a page");
        let last = page.entries.last().expect("an entry").0;
        assert_eq!((last != 77, page.last), (advances, false), "{cookies:?}");
    }
}

#[test]
fn the_server_reports_the_names_kinds_sizes_and_dates_that_a_test_sets() {
    let (server, mut caller, root, file) = scene();
    let strange: [&[u8]; 4] = [b"\xff\xfe", b"a/b", b"a\0b", b".."];
    server.files(|files| {
        strange.iter().for_each(|name| files.add_name("", name, "file"));
        let node = files.node("file");
        (node.kind, node.size, node.mtime) = (6, Some(u64::MAX), (u32::MAX, u32::MAX));
    });
    let page = caller.page(&root, 0, 1 << 16).expect("an answer").expect("a page");
    let names: Vec<_> = page.entries.iter().map(|(_, name)| name.as_slice()).collect();
    assert!(strange.iter().all(|name| names.contains(name)), "{names:?}");
    let attributes = caller.getattr(&file).expect("an answer").expect("attributes");
    let strange = (attributes.kind, attributes.size, attributes.mtime);
    assert_eq!(strange, (6, u64::MAX, (u32::MAX, u32::MAX)));
}

#[test]
fn a_sparse_server_omits_optional_attributes() {
    let (server, mut caller, root, file) = scene();
    server.files(|files| files.sparse = true);
    let results = caller.call(NFS, LOOKUP, Writer::default().opaque(&root).opaque(b"file")).expect("an answer");
    assert_eq!(results, Writer::default().u32(0).opaque(&file).u32(0).u32(0).bytes());
}

#[test]
fn handles_of_an_earlier_age_are_stale() {
    let (server, mut caller, root, _) = scene();
    server.files(|files| files.age += 1);
    assert_eq!(caller.getattr(&root).expect("an answer"), Err(STALE));
    let root = server.files(|files| files.handle(""));
    caller.getattr(&root).expect("an answer").expect("attributes");
}

#[test]
fn the_portmapper_answers_with_its_own_port() {
    let (server, mut caller, ..) = scene();
    let arguments = Writer::default().u32(NFS.0).u32(NFS.1).u32(6).u32(0);
    let port = caller.call(PORTMAP, GETPORT, arguments).expect("an answer");
    assert_eq!(port, u32::from(server.address().port()).to_be_bytes());
}
