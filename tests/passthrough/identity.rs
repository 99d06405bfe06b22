//! Identities of callers: new files belong to the caller, and modes, groups and ACLs decide what the caller may do.
//! Through a read-only mount, no caller changes anything.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use rustix::fs::{AtFlags, CWD, FallocateFlags, Timespec, Timestamps, XattrFlags, fallocate, lsetxattr, utimensat};

use crate::common::caller::Caller;
use crate::common::idmap::{FIRST_ID, id_mapped_clone};
use crate::common::passthrough::Mounted;
use crate::common::twins::{Answers, names, snapshot, the_mount_does_as_the_disk};

const OWNER: Caller = Caller::new(4711);
const MEMBER: Caller = Caller::with_groups(4712, &[100, 200, 300]);
const STRANGER: Caller = Caller::new(4713);

fn allow(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("root may");
}

fn directory(root: &Path, name: &str, mode: u32, uid: u32, gid: u32) {
    let path = root.join(name);
    fs::create_dir(&path).expect("a directory");
    chown(&path, Some(uid), Some(gid)).expect("root may");
    allow(&path, mode);
}

/// Creates one file of each type.
fn create_all(answers: &mut Answers, directory: &str) {
    let directory = Path::new(directory);
    let file = File::options().write(true).create_new(true).mode(0o6777).open(directory.join("file"));
    answers.note("file", file.map(drop));
    answers.note("mkdir", fs::create_dir(directory.join("directory")));
    answers.note("symlink", symlink("target", directory.join("link")));
    answers.note("fifo", mkfifo(&directory.join("fifo"), Mode::from_bits_truncate(0o777)).map_err(io::Error::from));
    answers.note("device", {
        let device = nix::sys::stat::makedev(1, 3);
        nix::sys::stat::mknod(&directory.join("null"), nix::sys::stat::SFlag::S_IFCHR, Mode::S_IRUSR, device)
    });
}

#[test]
fn a_new_file_belongs_to_the_caller() {
    the_mount_does_as_the_disk(|root, answers| {
        for (name, mode) in [("plain", 0o777), ("setgid", 0o2777), ("sticky", 0o1777)] {
            for (number, caller) in [OWNER, MEMBER, STRANGER].into_iter().enumerate() {
                let name = format!("{name}{number}");
                // Of the callers, only the member is in group 300.
                directory(root, &name, mode, 0, 300);
                caller.run(root, || create_all(answers, &name));
            }
        }
    });
}

#[test]
fn callers_without_permission_are_refused() {
    the_mount_does_as_the_disk(|root, answers| {
        for mode in [0o700, 0o750, 0o770, 0o755, 0o711, 0o733, 0o777] {
            let name = format!("{mode:o}");
            directory(root, &name, mode, 4711, 300);
            fs::write(root.join(&name).join("secret"), "secret").expect("written");
            chown(root.join(&name).join("secret"), Some(4711), Some(300)).expect("root may");
            allow(&root.join(&name).join("secret"), mode & 0o666);
            for (number, caller) in [OWNER, MEMBER, STRANGER].into_iter().enumerate() {
                caller.run(root, || {
                    let path = |file: &str| Path::new(&name).join(file);
                    let own = format!("own{number}");
                    answers.note(&format!("{mode:o} {caller:?} lists"), fs::read_dir(&name).map(Iterator::count));
                    answers.note("reads", fs::read_to_string(path("secret")));
                    answers.note("looks", fs::metadata(path("secret")).map(|metadata| metadata.len()));
                    answers.note("writes", fs::write(path("secret"), "overwritten"));
                    answers.note("creates", fs::write(path(&own), ""));
                    answers.note("links", fs::hard_link(path("secret"), path("link")));
                    answers.note("renames", fs::rename(path("secret"), path("renamed")));
                    answers.note("back", fs::rename(path("renamed"), path("secret")));
                    answers.note("removes its own", fs::remove_file(path(&own)));
                    answers
                        .note("changes the mode", fs::set_permissions(path("secret"), Permissions::from_mode(0o600)));
                    answers.note("enters", std::env::set_current_dir(&name));
                });
                let _ = fs::remove_file(root.join(&name).join("link"));
                allow(&root.join(&name).join("secret"), mode & 0o666);
            }
        }
    });
}

#[test]
fn in_a_sticky_directory_owners_alone_remove_and_rename() {
    the_mount_does_as_the_disk(|root, answers| {
        directory(root, "sticky", 0o1777, 0, 0);
        OWNER.run(root, || {
            fs::write("sticky/file", "x").expect("written");
            fs::create_dir("sticky/directory").expect("a directory");
        });
        STRANGER.run(root, || {
            answers.note("remove", fs::remove_file("sticky/file"));
            answers.note("rmdir", fs::remove_dir("sticky/directory"));
            answers.note("rename", fs::rename("sticky/file", "sticky/mine"));
            fs::write("sticky/own", "x").expect("written");
            answers.note("replace", fs::rename("sticky/own", "sticky/file"));
        });
        OWNER.run(root, || {
            answers.note("rename", fs::rename("sticky/file", "sticky/mine"));
            answers.note("remove", fs::remove_file("sticky/mine"));
        });
    });
}

#[test]
fn acls_let_in_and_keep_out() {
    the_mount_does_as_the_disk(|root, answers| {
        let setfacl = |name: &str, entries: &str| {
            let status = Command::new("setfacl").args(["-m", entries]).arg(root.join(name)).status();
            assert!(status.expect("setfacl runs").success());
        };
        for name in ["user", "group", "masked", "denied"] {
            fs::write(root.join(name), "content").expect("written");
            allow(&root.join(name), 0o640);
        }
        setfacl("user", "u:4711:rw");
        setfacl("group", "g:200:r");
        setfacl("masked", "u:4711:rw,m::r");
        setfacl("denied", "u:4711:-,o::rw");
        directory(root, "directory", 0o750, 0, 0);
        setfacl("directory", "u:4713:rwx");
        for caller in [OWNER, MEMBER, STRANGER] {
            caller.run(root, || {
                for name in ["user", "group", "masked", "denied"] {
                    answers.note(&format!("{caller:?} reads {name}"), fs::read_to_string(name));
                    answers.note("writes", File::options().append(true).open(name).map(drop));
                }
                answers.note("creates", fs::write("directory/file", ""));
            });
        }
    });
}

/// Copies a program with cp(1). If the test program itself wrote the copy, a child of another test could inherit the
/// descriptor for a moment, and the kernel does not execute a file that is open for writing.
#[track_caller]
fn copy_program(program: &Path, to: &Path) {
    assert!(Command::new("cp").arg(program).arg(to).status().expect("cp runs").success());
}

#[test]
fn programs_run_as_on_the_disk() {
    let script = tempfile::NamedTempFile::new().expect("a file");
    fs::write(script.path(), "#!/bin/sh\necho \"run by $(id -u)\"\n").expect("written");
    the_mount_does_as_the_disk(|root, answers| {
        for (name, mode) in [("all", 0o755), ("owner", 0o744), ("nobody", 0o644)] {
            copy_program(script.path(), &root.join(name));
            allow(&root.join(name), mode);
            for caller in [OWNER, Caller::new(0)] {
                caller.run(root, || {
                    let output = Command::new(format!("./{name}")).output();
                    answers.note(name, output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()));
                });
            }
        }
        copy_program(Path::new("/usr/bin/id"), &root.join("setuid"));
        chown(root.join("setuid"), Some(4713), Some(300)).expect("root may");
        allow(&root.join("setuid"), 0o6755);
        OWNER.run(root, || {
            let output = Command::new("./setuid").arg("-u").output();
            answers.note("setuid", output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()));
        });
        copy_program(Path::new("/bin/true"), &root.join("true"));
        answers.note("a binary", Command::new(root.join("true")).status().map(|status| status.success()));
    });
}

#[test]
fn a_mount_for_looking_refuses_every_change() {
    // The kernel also refuses changes by root.
    let writable = Mounted::new();
    fs::create_dir(writable.source().join("directory")).expect("a directory");
    fs::write(writable.source().join("file"), "content").expect("written");
    symlink("file", writable.source().join("link")).expect("a link");
    let before = snapshot(writable.source());
    let mounted = writable.read_only();
    let path = |name: &str| mounted.path().join(name);
    let now = Timespec { tv_sec: 1, tv_nsec: 1 };
    let times = Timestamps { last_access: now, last_modification: now };
    let changes: [(&str, io::Result<()>); 15] = [
        ("create", File::create_new(path("new")).map(drop)),
        ("write", File::options().write(true).open(path("file")).map(drop)),
        ("append", File::options().append(true).open(path("file")).map(drop)),
        ("truncate", nix::unistd::truncate(&path("file"), 0).map_err(Into::into)),
        ("mkdir", fs::create_dir(path("new"))),
        ("rmdir", fs::remove_dir(path("directory"))),
        ("unlink", fs::remove_file(path("file"))),
        ("rename", fs::rename(path("file"), path("new"))),
        ("link", fs::hard_link(path("file"), path("new"))),
        ("symlink", symlink("file", path("new"))),
        ("chmod", fs::set_permissions(path("file"), Permissions::from_mode(0o777))),
        ("chown", chown(path("file"), Some(1), Some(1))),
        ("times", utimensat(CWD, path("file"), &times, AtFlags::empty()).map_err(Into::into)),
        ("attribute", lsetxattr(path("file"), "user.a", b"b", XattrFlags::empty()).map_err(Into::into)),
        ("fifo", mkfifo(&path("new"), Mode::S_IRWXU).map_err(Into::into)),
    ];
    for (operation, result) in changes {
        assert_eq!(result.expect_err(operation).raw_os_error(), Some(libc::EROFS), "{operation}");
    }
    let file = File::open(path("file")).expect("a file");
    assert!(file.write_at(b"x", 0).is_err());
    assert!(fallocate(&file, FallocateFlags::empty(), 0, 9000).is_err());
    let through_proc = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    let reopened = File::options().write(true).open(through_proc).expect_err("the mount is read-only");
    assert_eq!(reopened.raw_os_error(), Some(libc::EROFS));
    assert_eq!(fs::read_to_string(path("link")).expect("a file"), "content");
    assert_eq!(names(mounted.path()), ["directory", "file", "link"]);
    assert_eq!(snapshot(writable.source()), before);
    // Another mount of the same directory can still be written to.
    fs::write(writable.path().join("new"), "").expect("written");
    assert!(fs::metadata(writable.source().join("new")).expect("a file").is_file());
}

#[test]
fn a_pod_with_ids_of_its_own_creates_files_with_the_ids_of_the_source() {
    // FU-04: a container runtime makes such an ID-mapped clone for a pod with `hostUsers: false`.
    let mounted = Mounted::new();
    fs::set_permissions(mounted.source(), Permissions::from_mode(0o777)).expect("the mode is set");
    let clone = id_mapped_clone(mounted.path());
    let inside = PathBuf::from(format!("/proc/self/fd/{}", clone.as_raw_fd()));
    // Root of the pod, and the pod's user 1000.
    for id in [0, 1000] {
        let name = format!("of-{id}");
        Caller::new(FIRST_ID + id).run(&inside, || {
            fs::create_dir(&name).expect("created");
            fs::write(format!("{name}/file"), "text").expect("written");
            symlink("file", format!("{name}/link")).expect("a link");
            let metadata = fs::metadata(format!("{name}/file")).expect("attributes");
            assert_eq!((metadata.uid(), metadata.gid()), (FIRST_ID + id, FIRST_ID + id));
            assert_eq!(fs::read_to_string(format!("{name}/link")).expect("read"), "text");
        });
        for entry in [name.clone(), format!("{name}/file"), format!("{name}/link")] {
            let in_source = fs::symlink_metadata(mounted.source().join(&entry)).expect("the entry exists");
            assert_eq!((in_source.uid(), in_source.gid()), (id, id), "{entry}");
        }
    }
}
