//! hostPath and emptyDir volumes: the server reads and writes (before Linux 6.9, the kernel cannot do this for the
//! server).

use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::thread;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::{assert_stops_clean, host, mode};
use crate::common::namespace::{mount_tmpfs, on_a_host_that_shares_mounts, way_out};
use crate::common::passthrough::disk_directory;
use crate::common::*;

/// A pod with the hostPath volumes `host` (a directory) and `file`, and with the emptyDir `scratch`; and the source
/// directory of the volume `host`.
fn fixture() -> (Fixture, PathBuf) {
    let fixture = Fixture::new("");
    let (source, file) = (fixture.path("source"), fixture.path("single"));
    fs::create_dir(&source).expect("a directory");
    let volumes = [host("host", &source, "Directory"), host("file", &file, "FileOrCreate")].join(", ");
    fixture.write("pod.yaml", &pod(&format!("[{volumes}, {{name: scratch, emptyDir: {{sizeLimit: 1Mi}}}}]")));
    (fixture, source)
}

#[test]
#[ignore = "runs in the guest"]
fn directories_files_and_empty_dirs_are_shown_by_the_server() {
    let (fixture, source) = fixture();
    let running = fixture.run();
    for name in ["host", "file", "scratch"] {
        assert_eq!(mode(&running, name), "read-write", "{name}");
    }
    let (volume, single, scratch) = (running.volume("host"), running.volume("file"), running.volume("scratch"));
    fs::write(source.join("from-host"), "1").expect("written");
    assert_eq!(fs::read_to_string(volume.join("from-host")).expect("shown"), "1");
    fs::write(volume.join("from-pod"), "2").expect("written");
    assert_eq!(fs::read_to_string(source.join("from-pod")).expect("there"), "2");

    assert!(fs::symlink_metadata(&single).expect("shown").is_file());
    fs::write(&single, "from the pod").expect("written");
    assert_eq!(fs::read_to_string(fixture.path("single")).expect("there"), "from the pod");

    fs::write(scratch.join("fits"), [0; 1 << 19]).expect("written");
    let full = fs::write(scratch.join("too-much"), [0; 1 << 20]).expect_err("there is a limit");
    assert_eq!(full.raw_os_error(), Some(Errno::ENOSPC as i32));
    assert_stops_clean(running, &fixture);
}

#[test]
#[ignore = "runs in the guest"]
fn a_source_on_a_shared_mount_is_cut_off_from_the_host_and_shows_later_mounts() {
    on_a_host_that_shares_mounts(|| {
        let place = disk_directory();
        let (source, later) = (place.path().join("source"), place.path().join("source/later"));
        fs::create_dir_all(&later).expect("directories");
        fs::write(place.path().join("outside"), "").expect("written");
        let fixture = Fixture::new_in(place.path(), &pod(&format!("[{}]", host("host", &source, "Directory"))));
        let mut running = fixture.run();
        let shown = running.volume("host").join("later/file");
        mount_tmpfs(&later);
        fs::write(later.join("file"), "later").expect("written");
        for _ in 0..2 {
            eventually("the later mount is shown", || fs::read_to_string(&shown).is_ok_and(|text| text == "later"));
            assert_eq!(way_out(running.server(), "outside"), None);
            // This kernel ends a request with EIO that the killed server had read; so try until one succeeds.
            running.kill_server_and_keeper(|| eventually("a server answers", || fs::metadata(&shown).is_ok()));
        }
        assert_eq!(running.stop().code(), Some(0), "{}", running.log());
    });
}

#[test]
#[ignore = "runs in the guest"]
fn files_are_created_written_renamed_and_removed() {
    let (fixture, source) = fixture();
    let running = fixture.run();
    let volume = running.volume("host");
    let mut file = File::options().read(true).write(true).create_new(true).open(volume.join("a")).expect("created");
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|index| (index % 251) as u8).collect();
    file.write_all(&bytes).expect("written");
    fs::rename(volume.join("a"), volume.join("b")).expect("renamed");
    assert_eq!(fs::metadata(source.join("b")).expect("there").size(), 3_000_000);
    fs::create_dir(volume.join("d")).expect("made");
    fs::hard_link(volume.join("b"), volume.join("d/c")).expect("linked");
    assert_eq!(fs::metadata(volume.join("b")).expect("there").nlink(), 2);
    for name in ["b", "d/c"] {
        fs::remove_file(volume.join(name)).expect("removed");
    }
    // An open file can be read after its names are removed.
    file.rewind().expect("rewound");
    let mut read = Vec::new();
    file.read_to_end(&mut read).expect("read");
    assert!(read == bytes, "what was written is read");
    drop(file);
    fs::remove_dir(volume.join("d")).expect("removed");
    assert_eq!(fs::read_dir(&source).expect("a listing").count(), 0);
    assert_stops_clean(running, &fixture);
}

#[test]
#[ignore = "runs in the guest"]
fn locks_meet_those_of_the_host_and_a_wait_ends_with_them() {
    let (fixture, source) = fixture();
    fs::write(source.join("file"), "x").expect("written");
    let running = fixture.run();
    let (of_host, of_pod) = (source.join("file"), running.volume("host").join("file"));
    let lock = |path: &PathBuf, kind| Flock::lock(File::open(path).expect("opened"), kind).map_err(|(_, errno)| errno);
    let held = lock(&of_host, FlockArg::LockExclusive).expect("locked");
    assert_eq!(lock(&of_pod, FlockArg::LockExclusiveNonblock).err(), Some(Errno::EWOULDBLOCK));
    let waiting = thread::spawn(move || lock(&of_pod, FlockArg::LockExclusive));
    drop(held);
    let held = waiting.join().expect("the thread does not panic").expect("locked");
    assert_eq!(lock(&of_host, FlockArg::LockExclusiveNonblock).err(), Some(Errno::EWOULDBLOCK));
    drop(held);
    eventually("the lock ends with the last descriptor of its file", || {
        lock(&of_host, FlockArg::LockExclusiveNonblock).is_ok()
    });
    assert_stops_clean(running, &fixture);
}

#[test]
#[ignore = "runs in the guest"]
fn shared_mappings_work_in_an_empty_dir_and_are_refused_where_others_write() {
    let (fixture, _) = fixture();
    let running = fixture.run();
    let store = |name: &str| {
        let path = running.volume(name).join("mapped");
        fs::write(&path, "a").expect("written");
        let file = File::options().read(true).write(true).open(&path).expect("opened");
        // SAFETY: the kernel chooses the address; no other code knows the mapping, whose one byte is in the file.
        unsafe {
            let at = mmap(std::ptr::null_mut(), 1, ProtFlags::WRITE, MapFlags::SHARED, &file, 0)?;
            at.cast::<u8>().write(b'b');
            munmap(at, 1)?;
        }
        drop(file);
        std::io::Result::Ok(fs::read_to_string(&path).expect("read"))
    };
    assert_eq!(store("scratch").expect("a mapping"), "b");
    let refused = store("host").expect_err("the mapping would not see writes of the host");
    assert_eq!(refused.raw_os_error(), Some(Errno::ENODEV as i32));
    assert_stops_clean(running, &fixture);
}
