//! A server that is replaced by another server with the same files: all earlier handles are stale.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;

use crate::mounted::Mounted;
use crate::nfs_rig::Ganesha;

#[test]
fn files_are_found_again_when_the_server_changes_their_handles() {
    let mut server = Ganesha::start();
    fs::create_dir_all(server.exported().join("a/b/c")).expect("made");
    fs::write(server.exported().join("a/b/c/file"), "content").expect("written");
    let mounted = Mounted::new(&server);
    let mut file = OpenOptions::new().read(true).append(true).open(mounted.at("a/b/c/file")).expect("opened");
    let directory = fs::read_dir(mounted.at("a/b")).expect("opened");
    server.restart_elsewhere();
    let mut content = String::new();
    file.read_to_string(&mut content).expect("read");
    assert_eq!(content, "content");
    file.write_all(b" and more").expect("written");
    file.sync_all().expect("on disk");
    drop(file);
    assert_eq!(fs::read_to_string(server.exported().join("a/b/c/file")).expect("read"), "content and more");
    assert_eq!(directory.count(), 1);
    fs::write(mounted.at("a/b/new"), "new").expect("written");
    assert_eq!(fs::read_to_string(mounted.at("a/b/new")).expect("read"), "new");
    server.restart_elsewhere();
    assert!(fs::metadata(mounted.at("")).expect("the root").is_dir());
    assert_eq!(fs::read_dir(mounted.at("")).expect("listed").count(), 1);
}

#[test]
fn concurrent_reads_find_their_files_on_the_new_server() {
    let mut server = Ganesha::start();
    let names: Vec<_> = (0..16).map(|number| format!("file-{number}")).collect();
    names.iter().for_each(|name| fs::write(server.exported().join(name), name).expect("written"));
    let mounted = Mounted::new(&server);
    // `O_DIRECT` avoids readahead: the kernel requests a page again if its readahead has failed, which would hide an
    // error.
    let open = |name: &String| {
        OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(mounted.at(name)).expect("opened")
    };
    let files: Vec<_> = names.iter().map(open).collect();
    server.restart_elsewhere();
    std::thread::scope(|scope| {
        let readers: Vec<_> = files.into_iter().map(|file| scope.spawn(|| std::io::read_to_string(file))).collect();
        for (name, reader) in names.iter().zip(readers) {
            assert_eq!(reader.join().expect("no panic").expect("read"), *name);
        }
    });
}

#[test]
fn a_file_that_another_has_replaced_is_not_taken_for_it() {
    let mut server = Ganesha::start();
    fs::write(server.exported().join("file"), "content").expect("written");
    let mounted = Mounted::new(&server);
    let mut file = File::open(mounted.at("file")).expect("opened");
    server.kill();
    fs::write(server.exported().join("other"), "other content").expect("written");
    fs::rename(server.exported().join("other"), server.exported().join("file")).expect("renamed");
    server.restart_elsewhere();
    let error = file.read_to_string(&mut String::new()).expect_err("the file is gone");
    assert_eq!(error.raw_os_error(), Some(libc::ESTALE));
    assert_eq!(fs::read_to_string(mounted.at("file")).expect("read"), "other content");
}
