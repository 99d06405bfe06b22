//! Sources whose file handles end with the kernel's inode: file systems of FUSE, such as bindfs. What a process has open or works in stays
//! usable when the kernel has dropped the source's inodes from its caches.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use podfs_fuse::passthrough::CacheMode;
use tempfile::TempDir;

use crate::common::forgetting::forget_unused;
use crate::common::passthrough::{Mounted, disk_directory};
use crate::common::{Fixture, eventually, pod};

/// More directories than the server keeps open.
const OTHERS: usize = 1500;
/// The most descriptors of a server that has seen many files.
const FEW_DESCRIPTORS: usize = 2500;

/// A directory of the disk, shown by bindfs. The fields are dropped in this order.
struct Bindfs {
    process: Child,
    base: TempDir,
}

impl Bindfs {
    /// With the directory `work/deep/place` with a file, and [`OTHERS`] other directories.
    fn new() -> Self {
        let base = disk_directory();
        let (disk, shown) = (base.path().join("disk"), base.path().join("shown"));
        fs::create_dir_all(disk.join("work/deep/place")).expect("directories");
        fs::write(disk.join("work/deep/place/file"), "content").expect("written");
        (0..OTHERS).for_each(|number| fs::create_dir_all(disk.join(format!("others/{number}"))).expect("a directory"));
        fs::create_dir(&shown).expect("a directory");
        let mut command = Command::new("bindfs");
        command.arg("-f").arg(&disk).arg(&shown).stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn().expect("bindfs, which tests/run installs");
        eventually("bindfs has mounted", || shown.join("work").exists());
        Self { process, base }
    }

    fn shown(&self) -> PathBuf {
        self.base.path().join("shown")
    }

    /// Visits all other directories in a volume, and makes the kernel drop the inodes of bindfs.
    fn forget(&self, volume: &Path) {
        for number in 0..OTHERS {
            let other = volume.join(format!("others/{number}"));
            assert!(fs::read_dir(other).expect("a listing").count() <= 1);
        }
        forget_unused(&self.shown());
    }
}

impl Drop for Bindfs {
    fn drop(&mut self) {
        let _ = umount2(&self.shown(), MntFlags::MNT_DETACH);
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A shell with a working directory, which reads its script when told to.
struct Shell(Child);

impl Shell {
    fn in_directory(directory: &Path) -> Self {
        let mut command = Command::new("sh");
        command.current_dir(directory).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(command.spawn().expect("a shell"))
    }

    /// What the commands print, errors included.
    fn run(mut self, commands: &str) -> String {
        let script = format!("exec 2>&1; {commands}\n");
        self.0.stdin.take().expect("a pipe").write_all(script.as_bytes()).expect("written");
        let mut text = String::new();
        self.0.stdout.take().expect("a pipe").read_to_string(&mut text).expect("read");
        assert!(self.0.wait().expect("it ends").code().is_some());
        text
    }
}

/// Opens a directory without a request to the server (`O_PATH`).
fn open(directory: &Path) -> File {
    let flags = libc::O_PATH | libc::O_DIRECTORY;
    File::options().read(true).custom_flags(flags).open(directory).expect("a directory")
}

/// Uses a directory that is open, by its descriptor.
#[track_caller]
fn assert_usable(directory: &File) {
    let at = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
    assert_eq!(fs::read_to_string(at.join("file")).expect("read"), "content");
    fs::write(at.join("made"), "made").expect("written");
    let names = fs::read_dir(&at).expect("a listing").map(|entry| entry.expect("an entry").file_name());
    assert!(names.into_iter().any(|name| name == "made"));
    fs::remove_file(at.join("made")).expect("removed");
}

#[test]
fn working_and_open_directories_of_bindfs_survive_cache_pressure() {
    let bindfs = Bindfs::new();
    let mounted = Mounted::of(&bindfs.shown());
    let place = mounted.path().join("work/deep/place");
    let (directory, shell) = (open(&mounted.path().join("work/deep")), Shell::in_directory(&place));
    let other = mounted.path().join("others/7");
    fs::write(other.join("file"), "content").expect("written");
    let (listed, file) = (File::open(&other).expect("open"), File::open(other.join("file")).expect("open"));
    fs::write(place.join("../file"), "content").expect("written");
    for _ in 0..2 {
        bindfs.forget(mounted.path());
        assert_usable(&directory);
        assert_usable(&listed);
        assert_eq!(file.metadata().expect("attributes").len(), 7);
    }
    let text = shell.run("ls; cat file; echo; mkdir new && ls -d new; cd -P .. && ls");
    assert_eq!(text, "file\ncontent\nnew\nfile\nplace\n");
}

#[test]
fn a_directory_of_bindfs_with_the_number_of_a_removed_one_is_another_directory() {
    let bindfs = Bindfs::new();
    let mounted = Mounted::of_with_cache(&bindfs.shown(), CacheMode::None);
    let (on_host, shown) = (bindfs.shown().join("work/new"), mounted.path().join("work/new"));
    let number = |path: &Path| fs::metadata(path).expect("attributes").ino();
    fs::create_dir(&on_host).expect("made");
    let removed = number(&shown);
    fs::remove_dir(&on_host).expect("removed");
    // ext4 gives the lowest free number.
    let mut others = Vec::new();
    loop {
        fs::create_dir(&on_host).expect("made");
        if number(&on_host) == removed {
            break;
        }
        let other = bindfs.shown().join(format!("work/other-{}", others.len()));
        fs::rename(&on_host, &other).expect("renamed");
        others.push(other);
        assert!(others.len() < 1000, "no directory gets the number {removed}");
    }
    fs::write(on_host.join("file"), "content").expect("written");
    assert_eq!(fs::read_to_string(shown.join("file")).expect("shown"), "content");
    fs::write(shown.join("made"), "made").expect("written");
    assert_eq!(fs::read_to_string(on_host.join("made")).expect("it is there"), "made");
}

#[test]
fn working_directories_of_bindfs_survive_kills_of_servers_too() {
    let bindfs = Bindfs::new();
    let fixture = Fixture::new(&pod(&format!("[{{name: host, hostPath: {{path: {}}}}}]", bindfs.shown().display())));
    let mut running = fixture.run();
    let host = running.volume("host");
    let place = host.join("work/deep/place");
    let (directory, shell) = (open(&place), Shell::in_directory(&place));
    bindfs.forget(&host);
    kill(running.server(), Signal::SIGKILL).expect("it is there");
    assert_usable(&directory);
    bindfs.forget(&host);
    running.kill_server_and_keeper(|| assert_usable(&directory));
    bindfs.forget(&host);
    assert_eq!(shell.run("ls; cat file"), "file\ncontent");
    drop(directory);
    assert!(running.stop().success(), "{}", running.log());
}

#[test]
fn directories_of_bindfs_that_were_renamed_through_the_volume_are_found_again() {
    let bindfs = Bindfs::new();
    let mounted = Mounted::of(&bindfs.shown());
    let at = |name: &str| mounted.path().join(name);
    let directory = open(&at("work/deep/place"));
    let shell = Shell::in_directory(&at("work/deep/place"));
    fs::rename(at("work/deep/place"), at("work/elsewhere")).expect("renamed");
    fs::rename(at("work"), at("moved")).expect("renamed");
    bindfs.forget(mounted.path());
    assert_usable(&directory);
    let long = "long".repeat(60);
    fs::rename(at("moved/elsewhere"), at(&long)).expect("renamed");
    bindfs.forget(mounted.path());
    assert_usable(&directory);
    assert_eq!(shell.run("cat file; echo; cd -P .. && ls -d moved"), "content\nmoved\n");
}

#[test]
fn a_directory_of_bindfs_that_was_replaced_is_not_the_old_one() {
    let bindfs = Bindfs::new();
    let mounted = Mounted::of(&bindfs.shown());
    let place = mounted.path().join("work/deep/place");
    let directory = open(&place);
    bindfs.forget(mounted.path());
    // The old directory stays, so the new one has another inode number.
    let disk = bindfs.base.path().join("disk/work/deep");
    fs::rename(disk.join("place"), disk.join("old")).expect("renamed");
    fs::create_dir(disk.join("place")).expect("a directory");
    fs::write(disk.join("place/file"), "another").expect("written");
    forget_unused(&bindfs.shown());
    let by_descriptor = fs::read_to_string(format!("/proc/self/fd/{}/file", directory.as_raw_fd()));
    assert_eq!(by_descriptor.expect_err("it is gone").raw_os_error(), Some(libc::ESTALE));
    eventually("the path leads to the new one", || {
        fs::read_to_string(place.join("file")).expect("the path exists always") == "another"
    });
}

#[test]
fn many_files_of_bindfs_need_few_descriptors() {
    let bindfs = Bindfs::new();
    let disk = bindfs.base.path().join("disk/others");
    for number in 0..5000 {
        fs::write(disk.join(format!("{}/file-{number}", number % OTHERS)), number.to_string()).expect("written");
    }
    let mounted = Mounted::of(&bindfs.shown());
    let path = |number: usize| mounted.path().join(format!("others/{}/file-{number}", number % OTHERS));
    let descriptors = || fs::read_dir(format!("/proc/{}/fd", mounted.server())).expect("a process").count();
    for number in 0..5000 {
        assert_eq!(fs::read_to_string(path(number)).expect("read"), number.to_string());
    }
    assert!(descriptors() < FEW_DESCRIPTORS, "{} descriptors", descriptors());
    forget_unused(&bindfs.shown());
    for number in (0..5000).rev() {
        assert_eq!(fs::read_to_string(path(number)).expect("read"), number.to_string());
        fs::write(mounted.path().join(format!("work/new-{number}")), "new").expect("written");
    }
    assert!(descriptors() < FEW_DESCRIPTORS, "{} descriptors", descriptors());
}
