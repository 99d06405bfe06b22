//! Mounts below the source of a passthrough volume, and sources of other kinds.

mod common;

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use common::passthrough::{Mounted, disk_directory, within_patience};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tempfile::TempDir;

/// A mount that goes when the test ends.
struct Below(PathBuf);

impl Below {
    fn tmpfs(at: &Path) -> Self {
        mount(Some("tmpfs"), at, Some("tmpfs"), MsFlags::empty(), None::<&str>).expect("a tmpfs");
        Self(at.to_owned())
    }

    fn bind(source: &Path, at: &Path, flags: MsFlags) -> Self {
        let nothing = None::<&str>;
        mount(Some(source), at, nothing, MsFlags::MS_BIND, nothing).expect("a bind mount");
        if !flags.is_empty() {
            let remount = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | flags;
            mount(nothing, at, nothing, remount, nothing).expect("its flags");
        }
        Self(at.to_owned())
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

fn source_with_directory(name: &str) -> (TempDir, PathBuf) {
    let source = disk_directory();
    let below = source.path().join(name);
    fs::create_dir(&below).expect("a directory");
    (source, below)
}

#[test]
fn hp_09_a_mount_below_the_source_is_shown_and_written_through() {
    let (source, below) = source_with_directory("below");
    let _below = Below::tmpfs(&below);
    fs::write(below.join("there"), "before").expect("written");
    let mounted = Mounted::of(source.path());
    let shown = mounted.path().join("below");
    assert_eq!(fs::read_to_string(shown.join("there")).expect("read"), "before");
    fs::write(shown.join("new"), "through").expect("written");
    assert_eq!(fs::read_to_string(below.join("new")).expect("read"), "through");
    let other_file_system = fs::rename(shown.join("new"), mounted.path().join("moved"));
    assert_eq!(other_file_system.expect_err("two file systems").raw_os_error(), Some(libc::EXDEV));
    let same = fs::hard_link(shown.join("new"), mounted.path().join("linked"));
    assert_eq!(same.expect_err("two file systems").raw_os_error(), Some(libc::EXDEV));
}

#[test]
fn hp_09_a_mount_that_comes_later_is_shown_too() {
    let (source, below) = source_with_directory("below");
    let mounted = Mounted::of(source.path());
    assert_eq!(fs::read_dir(mounted.path().join("below")).expect("a listing").count(), 0);
    let _below = Below::tmpfs(&below);
    fs::write(below.join("there"), "").expect("written");
    common::eventually("the mount is shown", || mounted.path().join("below/there").exists());
}

#[test]
fn a_mount_below_the_source_that_is_read_only_stays_so() {
    let (source, below) = source_with_directory("below");
    let other = disk_directory();
    fs::write(other.path().join("file"), "kept").expect("written");
    let _below = Below::bind(other.path(), &below, MsFlags::MS_RDONLY);
    let mounted = Mounted::of(source.path());
    let file = mounted.path().join("below/file");
    assert_eq!(fs::read_to_string(&file).expect("read"), "kept");
    for refused in [fs::write(&file, "changed"), fs::write(file.with_file_name("new"), ""), fs::remove_file(&file)] {
        assert_eq!(refused.expect_err("read-only").raw_os_error(), Some(libc::EROFS));
    }
}

#[test]
fn files_of_several_mounts_never_show_the_same_number() {
    let (source, first) = source_with_directory("first");
    let second = source.path().join("second");
    fs::create_dir(&second).expect("a directory");
    let _mounts = [Below::tmpfs(&first), Below::tmpfs(&second)];
    for place in [&first, &second] {
        (0..50).for_each(|n| fs::write(place.join(n.to_string()), "").expect("written"));
    }
    let mounted = Mounted::of(source.path());
    let mut numbers = HashSet::new();
    for place in ["first", "second"] {
        for entry in fs::read_dir(mounted.path().join(place)).expect("a listing") {
            let entry = entry.expect("an entry");
            let number = entry.metadata().expect("attributes").ino();
            assert!(numbers.insert(number), "{:?} shows {number}, and so does another", entry.path());
            assert_eq!(std::os::unix::fs::DirEntryExt::ino(&entry), number, "listing and attributes agree");
        }
    }
    assert_eq!(numbers.len(), 100);
}

#[test]
fn a_volume_is_not_shown_inside_itself_or_another_and_nothing_hangs() {
    let source = disk_directory();
    let (outer, inner) = (source.path().join("outer"), source.path().join("inner"));
    fs::create_dir(&outer).expect("a directory");
    fs::create_dir(&inner).expect("a directory");
    let mounted = Mounted::of(source.path());
    // The volume itself, seen below its own source, as with the host's root as source.
    let _inside = Below::bind(mounted.path(), &inner, MsFlags::empty());
    let shown = mounted.path().to_owned();
    within_patience("a walk", move || {
        let refused = fs::metadata(shown.join("inner")).expect_err("it would lead back here");
        assert_eq!(refused.raw_os_error(), Some(libc::ELOOP));
        let names: HashSet<_> =
            fs::read_dir(&shown).expect("a listing").map(|e| e.expect("an entry").file_name()).collect();
        assert_eq!(names.len(), 2, "both names are listed");
        assert!(fs::metadata(shown.join("outer")).expect("the rest is there").is_dir());
    });
}

#[test]
fn a_kernel_file_system_below_the_source_can_be_read() {
    let (source, below) = source_with_directory("proc");
    let _below = Below::bind(Path::new("/proc/self"), &below, MsFlags::empty());
    let mounted = Mounted::of(source.path());
    let shown = mounted.path().join("proc");
    let status = fs::read_to_string(shown.join("status")).expect("a file without a size");
    assert!(status.starts_with("Name:"), "{status}");
    // What the kernel shows to those alone who may trace the process, it does not show to a server.
    let guarded = fs::read_link(shown.join("cwd")).expect_err("the server may trace nobody");
    assert_eq!(guarded.raw_os_error(), Some(libc::EACCES));
}
