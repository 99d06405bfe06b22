//! Close-to-open consistency: a file shows the content of the last close before it was opened, by any client.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::{Duration, SystemTime};

use crate::mounted::Mounted;
use crate::nfs_rig::{Ganesha, eventually};

#[test]
fn an_open_sees_the_writes_of_other_clients() {
    let server = Ganesha::start();
    let (one, other) = (Mounted::new(&server), Mounted::new(&server));
    for content in ["short", "a good deal longer", "short"] {
        fs::write(one.at("file"), content).expect("written");
        assert_eq!(fs::read_to_string(other.at("file")).expect("read"), content);
        assert_eq!(fs::read_to_string(server.exported().join("file")).expect("read"), content);
    }
}

#[test]
fn content_of_the_same_length_is_seen_too() {
    let server = Ganesha::start();
    let (one, other) = (Mounted::new(&server), Mounted::new(&server));
    for content in ["first", "other", "third"] {
        fs::write(one.at("file"), content).expect("written");
        // The client detects a change by the mtime. Two quick writes can have the same mtime, because clocks of file
        // systems are coarse; so the test sets another one.
        let modified = SystemTime::now() + Duration::from_secs(u64::from(content.as_bytes()[0]));
        let file = File::options().write(true).open(one.at("file")).expect("opened");
        file.set_modified(modified).expect("set");
        assert_eq!(fs::read_to_string(other.at("file")).expect("read"), content);
    }
}

#[test]
fn an_unchanged_file_is_read_from_the_server_once() {
    let server = Ganesha::start();
    fs::write(server.exported().join("file"), vec![1; 100_000]).expect("written");
    let mounted = Mounted::new(&server);
    fs::read(mounted.at("file")).expect("read");
    server.stop();
    server.cont();
    let before = mounted.requests();
    fs::read(mounted.at("file")).expect("read");
    // The kernel sends OPEN and RELEASE, perhaps GETATTR, but no READ.
    assert!(mounted.requests() - before <= 4, "{}", mounted.requests() - before);
}

#[test]
fn own_writes_are_read_from_the_cache() {
    let server = Ganesha::start();
    let mounted = Mounted::new(&server);
    let mut file =
        OpenOptions::new().read(true).write(true).create_new(true).open(mounted.at("file")).expect("created");
    file.write_all(&vec![7; 1 << 20]).expect("written");
    drop(file);
    let before = mounted.requests();
    assert_eq!(fs::read(mounted.at("file")).expect("read"), vec![7; 1 << 20]);
    // Without the cache, the kernel would send eight READ requests for these bytes.
    assert!(mounted.requests() - before <= 7, "{}", mounted.requests() - before);
}

#[test]
fn the_size_of_a_file_includes_unsent_writes() {
    let server = Ganesha::start();
    let mounted = Mounted::new(&server);
    let file = File::create(mounted.at("file")).expect("created");
    for count in 1..50_u64 {
        file.write_all_at(&[1; 1000], (count - 1) * 1000).expect("written");
        assert_eq!(fs::metadata(mounted.at("file")).expect("there").len(), count * 1000);
        let entry = fs::read_dir(mounted.at("")).expect("listed").next().expect("one entry").expect("an entry");
        assert_eq!(entry.metadata().expect("attributes").len(), count * 1000);
    }
}

#[test]
fn an_open_file_that_changes_elsewhere_is_read_anew_when_its_attributes_are_requested() {
    let server = Ganesha::start();
    fs::write(server.exported().join("file"), "before").expect("written");
    let mounted = Mounted::with(&server, |options| (options.caching.acregmin, options.caching.acregmax) = (0, 0));
    let mut file = File::open(mounted.at("file")).expect("opened");
    let mut content = String::new();
    file.read_to_string(&mut content).expect("read");
    assert_eq!(content, "before");
    // The change comes from another mount and not from the exported directory, because ganesha caches the attributes of
    // its local files for a while.
    fs::write(Mounted::new(&server).at("file"), "after, and longer").expect("written");
    eventually("the new content is read", || {
        let length = file.metadata().expect("there").len();
        let mut content = vec![0; length as usize];
        file.read_exact_at(&mut content, 0).is_ok() && content == b"after, and longer"
    });
}

#[test]
fn times_and_sizes_far_away_are_kept() {
    let server = Ganesha::start();
    let mounted = Mounted::new(&server);
    let file = File::create(mounted.at("file")).expect("created");
    let offset = 9 << 30;
    file.write_all_at(b"far away", offset).expect("written");
    let in_2100 = SystemTime::UNIX_EPOCH + Duration::from_secs(4_102_444_800);
    file.sync_all().expect("on disk");
    file.set_modified(in_2100).expect("set");
    let on_server = fs::metadata(server.exported().join("file")).expect("there");
    assert_eq!((on_server.len(), on_server.mtime()), (offset + 8, 4_102_444_800));
    let mut content = [0; 8];
    let again = File::open(mounted.at("file")).expect("opened");
    again.read_exact_at(&mut content, offset).expect("read");
    assert_eq!(&content, b"far away");
    assert_eq!(again.metadata().expect("there").modified().expect("a time"), in_2100);
}
