//! Files that are removed while they are open.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;

use crate::mounted::Mounted;
use crate::nfs_rig::{Ganesha, eventually};

#[test]
fn an_open_file_stays_usable_without_a_name_and_ends_at_its_close() {
    let server = Ganesha::start();
    let mounted = Mounted::new(&server);
    fs::write(mounted.at("file"), "content").expect("written");
    let mut file = File::options().read(true).append(true).open(mounted.at("file")).expect("opened");
    fs::remove_file(mounted.at("file")).expect("removed");
    assert!(!mounted.at("file").exists());
    assert_eq!(
        fs::read_dir(mounted.at("")).expect("listed").count(),
        0,
        "the name `.nfs…` of the removed file is hidden"
    );
    assert_eq!(file.metadata().expect("attributes").nlink(), 0);
    file.write_all(b" and more").expect("written");
    let mut content = String::new();
    File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file)))
        .expect("opened")
        .read_to_string(&mut content)
        .expect("read");
    assert_eq!(content, "content and more");
    let server_files = || fs::read_dir(server.exported()).expect("listed").count();
    assert_eq!(server_files(), 1);
    // Another file can have the name at once.
    fs::write(mounted.at("file"), "another").expect("written");
    drop(file);
    eventually("the file is gone", || server_files() == 1);
    assert_eq!(fs::read_to_string(server.exported().join("file")).expect("read"), "another");
}

#[test]
fn a_file_that_is_renamed_over_an_open_one_takes_its_name_and_not_its_content() {
    let server = Ganesha::start();
    let mounted = Mounted::new(&server);
    fs::write(mounted.at("old"), "old").expect("written");
    fs::write(mounted.at("new"), "new").expect("written");
    let mut open = File::open(mounted.at("old")).expect("opened");
    fs::rename(mounted.at("new"), mounted.at("old")).expect("renamed");
    let mut content = String::new();
    open.read_to_string(&mut content).expect("read");
    assert_eq!(content, "old");
    assert_eq!(fs::read_to_string(mounted.at("old")).expect("read"), "new");
    assert_eq!(open.metadata().expect("there").nlink(), 0);
    drop(open);
    eventually("the file is gone", || fs::read_dir(server.exported()).expect("listed").count() == 1);
}

#[test]
fn an_open_file_keeps_its_content_whichever_of_its_names_goes_first() {
    for order in [["one", "two"], ["two", "one"]] {
        let server = Ganesha::start();
        let mounted = Mounted::new(&server);
        fs::write(mounted.at("one"), "content").expect("written");
        let open = File::open(mounted.at("one")).expect("opened");
        fs::hard_link(mounted.at("one"), mounted.at("two")).expect("linked");
        fs::remove_file(mounted.at(order[0])).expect("removed");
        assert_eq!(open.metadata().expect("there").nlink(), 1);
        fs::write(mounted.at("other"), "other").expect("written");
        fs::rename(mounted.at("other"), mounted.at(order[1])).expect("renamed");
        assert_eq!(open.metadata().expect("there").nlink(), 0);
        assert_eq!(fs::read_to_string(mounted.at(order[1])).expect("read"), "other");
        // The kernel drops its pages of the file, so that the server has to read it.
        rustix::fs::fadvise(&open, 0, None, rustix::fs::Advice::DontNeed).expect("advised");
        let mut content = String::new();
        (&open).read_to_string(&mut content).expect("read");
        assert_eq!(content, "content");
        drop(open);
        eventually("the file is gone", || fs::read_dir(server.exported()).expect("listed").count() == 1);
    }
}

#[test]
fn files_that_are_still_open_are_removed_when_the_volume_ends() {
    let server = Ganesha::start();
    let mounted = Mounted::new(&server).shown();
    fs::write(mounted.path().join("file"), "content").expect("written");
    let file = File::open(mounted.path().join("file")).expect("opened");
    fs::remove_file(mounted.path().join("file")).expect("removed");
    drop(mounted);
    drop(file);
    eventually("the file is gone", || fs::read_dir(server.exported()).expect("listed").count() == 0);
}
