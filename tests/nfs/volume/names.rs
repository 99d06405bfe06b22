//! Names of files: creation, renaming and removal.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};

use nix::sys::stat::{Mode, SFlag, mknod};

use crate::mounted::Mounted;
use crate::nfs_rig::Ganesha;

#[test]
fn any_bytes_are_a_name_and_no_name_is_too_long_by_one() {
    let server = Ganesha::start();
    let mounted = Mounted::new(&server);
    let (strange, longest) = (OsStr::from_bytes(b"\xff\xfe\n\x01"), "x".repeat(255));
    File::create(mounted.at("").join(strange)).expect("created");
    File::create(mounted.at(&longest)).expect("created");
    assert!(server.exported().join(strange).exists() && server.exported().join(&longest).exists());
    let names: Vec<_> =
        fs::read_dir(mounted.at("")).expect("listed").map(|entry| entry.expect("an entry").file_name()).collect();
    assert!(names.iter().any(|name| name == strange) && names.iter().any(|name| *name == *longest));
    let error = File::create(mounted.at(&"x".repeat(256))).expect_err("too long");
    assert_eq!(error.raw_os_error(), Some(libc::ENAMETOOLONG));
}

#[test]
fn two_names_of_a_file_are_one_file() {
    let server = Ganesha::start();
    let mounted = Mounted::new(&server);
    fs::write(mounted.at("one"), "content").expect("written");
    fs::hard_link(mounted.at("one"), mounted.at("two")).expect("linked");
    let (one, two) = (fs::metadata(mounted.at("one")).expect("there"), fs::metadata(mounted.at("two")).expect("there"));
    assert_eq!((one.ino(), one.nlink()), (two.ino(), 2));
    assert_eq!(one.ino(), fs::metadata(server.exported().join("one")).expect("there").ino());
    fs::remove_file(mounted.at("one")).expect("removed");
    assert_eq!(fs::metadata(mounted.at("two")).expect("there").nlink(), 1);
    assert_eq!(fs::read_to_string(mounted.at("two")).expect("read"), "content");
}

#[test]
fn exclusive_creation_fails_if_the_file_exists() {
    let server = Ganesha::start();
    let mounted = Mounted::new(&server);
    let create = || OpenOptions::new().write(true).create_new(true).open(mounted.at("file"));
    let file = create().expect("created");
    assert_eq!(file.metadata().expect("attributes").permissions().mode() & 0o777, 0o644);
    assert_eq!(create().expect_err("the file exists").raw_os_error(), Some(libc::EEXIST));
    fs::remove_file(mounted.at("file")).expect("removed");
    // The client caches that the file is absent, and does not notice the file that another client creates.
    assert!(!mounted.at("file").exists());
    File::create(server.exported().join("file")).expect("created");
    assert_eq!(create().expect_err("the file exists").raw_os_error(), Some(libc::EEXIST));
}

#[test]
fn a_file_that_another_client_has_just_made_is_opened_as_it_is() {
    let server = Ganesha::start();
    let mounted = Mounted::new(&server);
    assert!(!mounted.at("file").exists());
    fs::write(server.exported().join("file"), "content").expect("written");
    let file = OpenOptions::new().append(true).create(true).open(mounted.at("file")).expect("opened");
    assert_eq!(file.metadata().expect("there").len(), 7);
    drop(file);
    assert_eq!(fs::read_to_string(mounted.at("file")).expect("read"), "content");
}

#[test]
fn special_files_are_made() {
    let server = Ganesha::start();
    let mounted = Mounted::new(&server);
    let mode = Mode::from_bits_truncate(0o600);
    mknod(&mounted.at("pipe"), SFlag::S_IFIFO, mode, 0).expect("made");
    mknod(&mounted.at("device"), SFlag::S_IFCHR, mode, nix::libc::makedev(1, 3)).expect("made");
    mknod(&mounted.at("file"), SFlag::S_IFREG, mode, 0).expect("made");
    let on_server = |name: &str| fs::symlink_metadata(server.exported().join(name)).expect("there");
    assert!(on_server("pipe").file_type().is_fifo() && on_server("file").file_type().is_file());
    assert!(on_server("device").file_type().is_char_device());
    let in_mount = fs::symlink_metadata(mounted.at("device")).expect("there");
    assert_eq!((on_server("device").rdev(), in_mount.rdev()), (nix::libc::makedev(1, 3), nix::libc::makedev(1, 3)));
}

#[test]
fn a_rename_that_the_protocol_does_not_have_is_refused() {
    let server = Ganesha::start();
    let mounted = Mounted::new(&server);
    fs::write(mounted.at("one"), "1").expect("written");
    fs::write(mounted.at("two"), "2").expect("written");
    for flags in [libc::RENAME_NOREPLACE, libc::RENAME_EXCHANGE] {
        let c_path = |name| std::ffi::CString::new(mounted.at(name).as_os_str().as_bytes()).expect("a path");
        let (one, two) = (c_path("one"), c_path("two"));
        // SAFETY: the paths are C strings that outlive the call.
        let result = unsafe { libc::renameat2(libc::AT_FDCWD, one.as_ptr(), libc::AT_FDCWD, two.as_ptr(), flags) };
        assert_eq!(result, -1);
    }
    assert_eq!(fs::read_to_string(mounted.at("two")).expect("read"), "2");
}
