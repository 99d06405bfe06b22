//! Mounts below the source of a passthrough volume, and sources that are files.

use std::collections::HashSet;
use std::fs;
use std::fs::Permissions;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::namespace::on_a_host_that_shares_mounts;
use crate::common::passthrough::{Mounted, disk_directory, within_timeout};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use podfs_fuse::mount::enclosed::SourceWithMounts;
use rustix::fs::{XattrFlags, getxattr, listxattr, setxattr};
use tempfile::TempDir;

/// A mount below the source. Dropping it unmounts it.
struct Below(PathBuf);

impl Below {
    fn tmpfs(path: &Path) -> Self {
        Self::tmpfs_with(path, MsFlags::empty())
    }

    fn tmpfs_with(path: &Path, flags: MsFlags) -> Self {
        mount(Some("tmpfs"), path, Some("tmpfs"), flags, None::<&str>).expect("a tmpfs");
        Self(path.to_owned())
    }

    fn bind(source: &Path, path: &Path, flags: MsFlags) -> Self {
        let nothing = None::<&str>;
        mount(Some(source), path, nothing, MsFlags::MS_BIND, nothing).expect("a bind mount");
        if !flags.is_empty() {
            let remount = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | flags;
            mount(nothing, path, nothing, remount, nothing).expect("the flags are set");
        }
        Self(path.to_owned())
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
    crate::common::eventually("the mount is shown", || mounted.path().join("below/there").exists());
}

#[test]
fn hp_09_mounts_come_and_go_on_a_host_that_shares_them() {
    on_a_host_that_shares_mounts(|| {
        let (source, below) = source_with_directory("below");
        fs::create_dir(source.path().join("later")).expect("a directory");
        let later = source.path().join("later");
        let first = Below::tmpfs(&below);
        fs::write(below.join("there"), "before").expect("written");
        let mounted = Mounted::of(source.path());
        let shown = mounted.path().to_owned();
        assert_eq!(fs::read_to_string(shown.join("below/there")).expect("read"), "before");
        let second = Below::tmpfs_with(&later, MsFlags::MS_NOSUID);
        fs::write(later.join("there"), "later").expect("written");
        crate::common::eventually("the later mount is shown", || shown.join("later/there").exists());
        fs::write(shown.join("later/new"), "through").expect("written");
        assert_eq!(fs::read_to_string(later.join("new")).expect("read"), "through");
        // A mount that the host unmounts also disappears from the volume. If the volume has open files of the mount,
        // the unmount is lazy there.
        drop((first, second));
        for name in ["below", "later"] {
            crate::common::eventually("the mount is gone", || !shown.join(name).join("there").exists());
        }
    });
}

#[test]
fn a_mount_of_the_host_is_neither_removed_nor_moved_through_a_volume() {
    let attempts = || {
        let (source, below) = source_with_directory("below");
        for name in ["empty", "other"] {
            fs::create_dir(source.path().join(name)).expect("a directory");
        }
        for name in ["file", "shown"] {
            fs::write(source.path().join(name), name).expect("written");
        }
        let _below = Below::tmpfs(&below);
        let _file = Below::bind(&source.path().join("shown"), &source.path().join("file"), MsFlags::empty());
        let mounted = Mounted::of(source.path());
        let at = |name: &str| mounted.path().join(name);
        let exchange = |one: &str, two: &str| {
            let flags = rustix::fs::RenameFlags::EXCHANGE;
            rustix::fs::renameat_with(rustix::fs::CWD, at(one), rustix::fs::CWD, at(two), flags).map_err(Into::into)
        };
        let outcomes: [(&str, std::io::Result<()>); 7] = [
            ("rmdir", fs::remove_dir(at("below"))),
            ("unlink", fs::remove_file(at("file"))),
            ("rename of a directory", fs::rename(at("below"), at("moved"))),
            ("rename of a file", fs::rename(at("file"), at("moved"))),
            ("rename to a directory", fs::rename(at("empty"), at("below"))),
            ("rename to a file", fs::rename(at("shown"), at("file"))),
            ("exchange", exchange("other", "below")),
        ];
        for (call, outcome) in outcomes {
            let error = outcome.expect_err(call);
            assert_eq!(error.raw_os_error(), Some(libc::EBUSY), "{call}: {error}");
        }
        for path in [below.clone(), source.path().join("file")] {
            umount2(&path, MntFlags::MNT_DETACH).expect("it is still mounted there");
        }
        crate::common::eventually("the directory can be removed", || fs::remove_dir(at("below")).is_ok());
    };
    attempts();
    on_a_host_that_shares_mounts(attempts);
}

#[test]
fn a_mount_that_the_volume_knows_nothing_of_can_be_unmounted_by_the_host() {
    on_a_host_that_shares_mounts(|| {
        let (source, below) = source_with_directory("below");
        let _below = Below::tmpfs(&below);
        let mounted = Mounted::of(source.path());
        assert_eq!(fs::read_dir(mounted.path()).expect("a listing").count(), 1);
        crate::common::eventually("the mount is not busy", || umount2(&below, MntFlags::empty()).is_ok());
        assert_eq!(fs::read_dir(mounted.path().join("below")).expect("a listing").count(), 0);
    });
}

#[test]
fn a_file_can_be_shown_on_a_host_that_shares_mounts() {
    on_a_host_that_shares_mounts(|| {
        let source = disk_directory();
        let file = source.path().join("file");
        fs::write(&file, "shown").expect("written");
        let enclosed = SourceWithMounts::of(fs::File::open(&file).expect("a file").as_fd(), "data").expect("enclosed");
        let mut text = String::new();
        let opened = rustix::fs::open(
            format!("/proc/self/fd/{}", enclosed.source.as_raw_fd()),
            rustix::fs::OFlags::RDONLY,
            rustix::fs::Mode::empty(),
        );
        fs::File::from(opened.expect("opened")).read_to_string(&mut text).expect("read");
        assert_eq!(text, "shown");
        assert_eq!(enclosed.table.mounts().expect("a table").len(), 2, "the root and the source");
    });
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

/// A directory that all users may enter, with a directory for each of `names`.
fn open_source(names: &[&str]) -> TempDir {
    let source = disk_directory();
    fs::set_permissions(source.path(), Permissions::from_mode(0o755)).expect("the mode is set");
    names.iter().for_each(|name| fs::create_dir(source.path().join(name)).expect("a directory"));
    source
}

/// A copy of `id(1)` in `directory` that runs as root for every user.
fn setuid_program(directory: &Path) {
    let program = directory.join("id");
    fs::copy("/usr/bin/id", &program).expect("a copy");
    fs::set_permissions(program, Permissions::from_mode(0o6755)).expect("the mode is set");
}

/// The effective user id of a program that an ordinary user starts.
fn effective_user(program: &Path) -> std::io::Result<String> {
    let output = Command::new(program).arg("-u").uid(65534).gid(65534).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[test]
fn a_setuid_program_has_no_effect_on_a_mount_below_the_source_that_is_nosuid() {
    let source = open_source(&["plain", "nosuid", "later"]);
    let in_source = |name: &str| source.path().join(name);
    let _plain = Below::tmpfs(&in_source("plain"));
    let _nosuid = Below::tmpfs_with(&in_source("nosuid"), MsFlags::MS_NOSUID);
    let mounted = Mounted::of(source.path());
    assert!(mounted.path().join("later").is_dir());
    let _later = Below::tmpfs_with(&in_source("later"), MsFlags::MS_NOSUID);
    ["plain", "nosuid", "later"].into_iter().for_each(|name| setuid_program(&in_source(name)));
    let user = |name: &str| effective_user(&mounted.path().join(name).join("id")).expect("the program runs");
    assert_eq!(user("plain"), "0", "a mount without the flag lets setuid work, as a bind mount does");
    assert_eq!(user("nosuid"), "65534");
    crate::common::eventually("the later mount is shown", || mounted.path().join("later/id").exists());
    assert_eq!(user("later"), "65534");
    let mode = fs::metadata(mounted.path().join("nosuid/id")).expect("attributes").mode();
    assert_eq!(mode & 0o7777, 0o755);

    // Writing to a program removes its setuid bit, though the volume does not show the bit.
    fs::OpenOptions::new().append(true).open(mounted.path().join("nosuid/id")).expect("opened");
    let mode = fs::metadata(in_source("nosuid").join("id")).expect("attributes").mode();
    assert_eq!(mode & 0o7777, 0o755);
}

#[test]
fn a_program_has_no_capabilities_on_a_mount_below_the_source_that_is_nosuid() {
    /// `cap_net_raw=ep`, as `setcap(8)` writes it.
    const NET_RAW: [u8; 20] = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let source = open_source(&["plain", "nosuid"]);
    let _plain = Below::tmpfs(&source.path().join("plain"));
    let _nosuid = Below::tmpfs_with(&source.path().join("nosuid"), MsFlags::MS_NOSUID);
    let mounted = Mounted::of(source.path());
    for (name, visible) in [("plain", true), ("nosuid", false)] {
        let (in_source, in_mount) = (source.path().join(name).join("file"), mounted.path().join(name).join("file"));
        fs::write(&in_source, "").expect("written");
        setxattr(&in_source, c"security.capability", &NET_RAW, XattrFlags::empty()).expect("a capability");
        let result = getxattr(&in_mount, c"security.capability", &mut [0; 64]);
        assert_eq!(result.is_ok(), visible, "{name}: {result:?}");
        let mut names = [0; 1024];
        let length = listxattr(&in_mount, &mut names[..]).expect("a list");
        assert_eq!(names[..length].windows(10).any(|part| part == b"capability"), visible, "{name}");
    }
}

#[test]
fn a_device_cannot_be_opened_on_a_mount_below_the_source_that_is_nodev() {
    let source = open_source(&["plain", "nodev"]);
    let _plain = Below::tmpfs(&source.path().join("plain"));
    let _nodev = Below::tmpfs_with(&source.path().join("nodev"), MsFlags::MS_NODEV);
    let mounted = Mounted::of(source.path());
    for name in ["plain", "nodev"] {
        let device = source.path().join(name).join("null");
        mknod(&device, SFlag::S_IFCHR, Mode::S_IRUSR | Mode::S_IWUSR, makedev(1, 3)).expect("a device");
    }
    fs::write(mounted.path().join("plain/null"), "x").expect("a mount without the flag lets devices work");
    let refused = fs::write(mounted.path().join("nodev/null"), "x").expect_err("the mount is nodev");
    assert_eq!(refused.raw_os_error(), Some(libc::ENXIO));
    // A device that is created through the volume cannot be opened either.
    let created = mounted.path().join("nodev/made");
    mknod(&created, SFlag::S_IFCHR, Mode::S_IRUSR | Mode::S_IWUSR, makedev(1, 3)).expect("a device");
    fs::write(&created, "x").expect_err("the mount is nodev");
}

#[test]
fn a_program_cannot_be_run_on_a_mount_below_the_source_that_is_noexec() {
    let source = open_source(&["plain", "noexec"]);
    let _plain = Below::tmpfs(&source.path().join("plain"));
    let _noexec = Below::tmpfs_with(&source.path().join("noexec"), MsFlags::MS_NOEXEC);
    let mounted = Mounted::of(source.path());
    ["plain", "noexec"].into_iter().for_each(|name| setuid_program(&source.path().join(name)));
    effective_user(&mounted.path().join("plain/id")).expect("the program runs");
    let program = mounted.path().join("noexec/id");
    let refused = Command::new(&program).output().expect_err("the mount is noexec, for root too");
    assert_eq!(refused.raw_os_error(), Some(libc::EACCES));
    let access = nix::unistd::access(&program, nix::unistd::AccessFlags::X_OK);
    assert_eq!(access, Err(nix::errno::Errno::EACCES));
    assert!(fs::read(&program).is_ok_and(|bytes| !bytes.is_empty()), "the program can be read");
}

#[test]
fn files_of_several_mounts_never_show_the_same_number() {
    let (source, first) = source_with_directory("first");
    let second = source.path().join("second");
    fs::create_dir(&second).expect("a directory");
    let _mounts = [Below::tmpfs(&first), Below::tmpfs(&second)];
    for directory in [&first, &second] {
        (0..50).for_each(|number| fs::write(directory.join(number.to_string()), "").expect("written"));
    }
    let mounted = Mounted::of(source.path());
    let mut numbers = HashSet::new();
    for name in ["first", "second"] {
        for entry in fs::read_dir(mounted.path().join(name)).expect("a listing") {
            let entry = entry.expect("an entry");
            let number = entry.metadata().expect("attributes").ino();
            assert!(numbers.insert(number), "{:?} has the inode number {number} of another file", entry.path());
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
    // The volume is mounted below its own source, as it is if the source is the host's root.
    let _inside = Below::bind(mounted.path(), &inner, MsFlags::empty());
    let shown = mounted.path().to_owned();
    within_timeout("a walk", move || {
        let refused = fs::metadata(shown.join("inner")).expect_err("the volume would be inside itself");
        assert_eq!(refused.raw_os_error(), Some(libc::ELOOP));
        let names: HashSet<_> =
            fs::read_dir(&shown).expect("a listing").map(|entry| entry.expect("an entry").file_name()).collect();
        assert_eq!(names.len(), 2, "both names are listed");
        assert!(fs::metadata(shown.join("outer")).expect("other names are not affected").is_dir());
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
    // The kernel hides files of /proc from a server that may not trace the process.
    let guarded = fs::read_link(shown.join("cwd")).expect_err("the server may trace no process");
    assert_eq!(guarded.raw_os_error(), Some(libc::EACCES));
}

#[test]
fn noatime_of_the_sources_mount_holds_and_that_of_the_volume_does_not() {
    let source = disk_directory();
    let (plain, without) = (source.path().join("plain"), source.path().join("without"));
    fs::create_dir(&plain).expect("a directory");
    fs::create_dir(&without).expect("a directory");
    fs::write(plain.join("file"), "content").expect("written");
    let _without = Below::bind(&plain, &without, MsFlags::MS_NOATIME);
    let is_set_by_a_read = |volume: &Mounted| {
        // The kernel sets the access time if it is not later than that of the last change.
        let old = fs::FileTimes::new().set_accessed(std::time::UNIX_EPOCH);
        fs::File::options().write(true).open(plain.join("file")).and_then(|file| file.set_times(old)).expect("set");
        assert_eq!(fs::read_to_string(volume.path().join("file")).expect("read"), "content");
        fs::metadata(plain.join("file")).expect("attributes").atime() != 0
    };
    assert!(is_set_by_a_read(&Mounted::of(&plain)));
    assert!(!is_set_by_a_read(&Mounted::of(&without)));
    let volume = Mounted::of(&plain);
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_NOATIME;
    mount(None::<&str>, volume.path(), None::<&str>, flags, None::<&str>).expect("the flag is set");
    assert!(is_set_by_a_read(&volume), "docs/reference/differences.md says so");
}
