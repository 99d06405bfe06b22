//! Open files and cached state when the server process is killed.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::{Duration, Instant};

use crate::mounted::options;
use crate::nfs_rig::protocol::procedure;
use crate::nfs_rig::scripted::trouble::{ALWAYS, silent};
use crate::nfs_rig::{Ganesha, Scripted, eventually};
use crate::takeover::pod::Pod;

#[test]
fn open_files_and_directories_stay_usable_over_a_takeover() {
    let server = Ganesha::start();
    for number in 0..2000 {
        File::create(server.exported().join(format!("a-name-that-takes-some-room-{number}"))).expect("created");
    }
    let pod = Pod::new(&options(&server));
    let mut file = OpenOptions::new().read(true).append(true).create(true).open(pod.path().join("file")).expect("open");
    file.write_all(b"before").expect("written");
    let mut directory = fs::read_dir(pod.path()).expect("opened");
    let first = directory.by_ref().take(10).count();
    pod.replace_server();
    file.write_all(b" and after").expect("written");
    file.sync_all().expect("on disk");
    let mut content = [0; 16];
    file.read_exact_at(&mut content, 0).expect("read");
    assert_eq!(&content, b"before and after");
    assert_eq!(first + directory.filter(|entry| entry.is_ok()).count(), 2001);
    assert_eq!(fs::read_to_string(server.exported().join("file")).expect("read"), "before and after");
}

#[test]
fn a_file_that_was_removed_while_it_was_open_is_removed_by_the_successor() {
    let server = Ganesha::start();
    let pod = Pod::new(&options(&server));
    let file =
        OpenOptions::new().read(true).write(true).create_new(true).open(pod.path().join("file")).expect("created");
    fs::remove_file(pod.path().join("file")).expect("removed");
    pod.replace_server();
    file.write_all_at(b"nobody's", 0).expect("written");
    assert_eq!(fs::read_dir(pod.path()).expect("listed").count(), 0);
    assert_eq!(fs::read_dir(server.exported()).expect("listed").count(), 1);
    drop(file);
    eventually("the file is gone", || fs::read_dir(server.exported()).expect("listed").count() == 0);
}

/// Before the kernel drops pages of a file, it waits for those that are being read, and no signal interrupts this wait.
#[test]
fn a_server_that_has_pages_dropped_which_are_being_read_can_be_killed() {
    let server = Scripted::start();
    server.files(|files| {
        files.add("file", b"content");
    });
    let pod = Pod::new(&options(&server));
    let file = File::open(pod.path().join("file")).expect("opened");
    server.rule(silent(procedure::READ, ALWAYS));
    let reading = thread::spawn(move || {
        let mut content = [0; 7];
        file.read_exact_at(&mut content, 0).map(|()| content)
    });
    eventually("the reader has begun", || server.calls(procedure::READ) > 0);
    let reads = server.calls(procedure::READ);
    // The successor does not know whether the kernel's pages of open files have the present content. So it requests the
    // attributes of the files, and makes the kernel drop the pages.
    let attributes = server.calls(procedure::GETATTR);
    pod.replace_server();
    eventually("the successor has sent both calls", || {
        server.calls(procedure::GETATTR) > attributes && server.calls(procedure::READ) > reads
    });
    thread::sleep(Duration::from_millis(300));
    server.clear_rules();
    pod.replace_server();
    assert_eq!(&reading.join().expect("no panic").expect("read"), b"content");
}

#[test]
fn a_change_elsewhere_is_seen_through_a_file_that_stays_open() {
    let server = Ganesha::start();
    let mut options = options(&server);
    (options.caching.acregmin, options.caching.acregmax) = (0, 0);
    let (pod, other) = (Pod::new(&options), Pod::new(&options));
    fs::write(other.path().join("file"), "before").expect("written");
    let file = File::open(pod.path().join("file")).expect("opened");
    let read = || {
        let mut content = vec![0; file.metadata().expect("attributes").len() as usize];
        file.read_exact_at(&mut content, 0).map(|()| content)
    };
    assert_eq!(read().expect("read"), b"before");
    pod.replace_server();
    fs::write(other.path().join("file"), "after!").expect("written");
    eventually("the new content is read", || read().is_ok_and(|content| content == b"after!"));
}

#[test]
fn a_successor_answers_for_the_root_of_an_unreachable_nfs_server() {
    let mut server = Ganesha::start();
    let pod = Pod::new(&options(&server));
    let ino = std::os::unix::fs::MetadataExt::ino(&fs::metadata(pod.path()).expect("the root"));
    server.kill();
    pod.replace_server();
    let begin = Instant::now();
    let root = fs::metadata(pod.path()).expect("the root");
    assert_eq!(std::os::unix::fs::MetadataExt::ino(&root), ino);
    nix::sys::statvfs::statvfs(pod.path()).expect("free space");
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    server.restart();
    fs::write(pod.path().join("file"), "it goes on").expect("written");
}

#[test]
fn the_kernel_reads_ahead_far_enough_for_several_requests() {
    let server = Ganesha::start();
    let pod = Pod::new(&options(&server));
    assert_eq!(pod.read_ahead(), 4096);
    fs::write(server.exported().join("file"), vec![1; 16 << 20]).expect("written");
    assert_eq!(fs::read(pod.path().join("file")).expect("read"), vec![1; 16 << 20]);
}
