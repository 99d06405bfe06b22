//! Attributes of files: through a mount, programs read and change modes, owners, times, extended attributes and ACLs as
//! on the disk.

use std::ffi::{CStr, CString};
use std::fs::{self, File, Metadata, Permissions};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, lchown, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::ptr;

use nix::sched::{CloneFlags, unshare};
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, Mode, StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, XattrFlags, chmodat,
    fallocate, lgetxattr, llistxattr, lremovexattr, lsetxattr, statx, utimensat,
};

use crate::common::caller::Caller;
use crate::common::eventually;
use crate::common::passthrough::Mounted;
use crate::common::twins::{Answers, attribute_names, the_mount_does_as_the_disk};

const USER: Caller = Caller::new(4711);

fn metadata(path: &Path) -> Metadata {
    fs::symlink_metadata(path).expect("it is there")
}

pub fn mode(path: &Path) -> String {
    format!("{:o}", metadata(path).mode())
}

#[test]
fn modes_and_owners_are_set_in_every_form() {
    the_mount_does_as_the_disk(|root, answers| {
        let file = root.join("file");
        fs::write(&file, "").expect("written");
        symlink("file", root.join("link")).expect("a link");
        for bits in [0o7777, 0, 0o4755, 0o2755, 0o1777, 0o644] {
            answers.note("chmod", fs::set_permissions(&file, Permissions::from_mode(bits)));
            answers.see("mode", mode(&file));
        }
        answers.note("through the link", fs::set_permissions(root.join("link"), Permissions::from_mode(0o600)));
        let link = chmodat(CWD, root.join("link"), Mode::from_raw_mode(0o600), AtFlags::SYMLINK_NOFOLLOW);
        answers.note("of the link", link);
        for (uid, gid) in [(Some(5), None), (None, Some(6)), (None, None), (Some(u32::MAX - 1), Some(0))] {
            answers.note("chown", chown(&file, uid, gid));
            answers.note("of the link", lchown(root.join("link"), uid, gid));
            answers.see("owner", (metadata(&file).uid(), metadata(&file).gid()));
        }
        answers.note("of nothing", chown(root.join("absent"), Some(1), None));
        // The kernel removes setuid and setgid when the owner changes.
        fs::set_permissions(&file, Permissions::from_mode(0o6755)).expect("the mode is set");
        answers.note("root gives it away", chown(&file, Some(9), Some(9)));
        answers.see("mode", mode(&file));
    });
}

#[test]
fn an_owner_may_do_what_an_owner_may() {
    the_mount_does_as_the_disk(|root, answers| {
        let (own, other) = ("own", "other");
        for (name, uid) in [(own, 4711), (other, 4712)] {
            fs::write(root.join(name), "").expect("written");
            chown(root.join(name), Some(uid), Some(100)).expect("root may");
        }
        let owner = Caller::with_groups(4711, &[100, 200]);
        owner.run(root, || {
            for name in [own, other] {
                let bits = Permissions::from_mode(0o2775);
                answers.note("chmod", fs::set_permissions(name, bits.clone()));
                answers.note("to a group of theirs", chown(name, None, Some(200)));
                answers.note("chmod", fs::set_permissions(name, bits.clone()));
                answers.see("mode", mode(Path::new(name)));
                answers.note("to a group of others", chown(name, None, Some(300)));
                answers.note("to another user", chown(name, Some(4713), None));
                answers.note("to the same user", chown(name, Some(4711), None));
                answers.see("mode", mode(Path::new(name)));
            }
        });
        // A setgid bit for a group that the owner is not in.
        chown(root.join(own), None, Some(300)).expect("root may");
        USER.run(root, || answers.note("chmod", fs::set_permissions(own, Permissions::from_mode(0o2775))));
        answers.see("mode", mode(&root.join(own)));
    });
}

#[test]
fn times_are_set_in_every_form() {
    let at = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
    let forms = [
        ("both", at(1_000_000_000, 123_456_789), at(1_500_000_000, 1)),
        ("access only", at(1_100_000_000, 5), at(0, UTIME_OMIT)),
        ("modification only", at(0, UTIME_OMIT), at(1_200_000_000, 999_999_999)),
        ("none", at(0, UTIME_OMIT), at(0, UTIME_OMIT)),
        ("before 1970", at(-2, 500_000_000), at(-86_400, 0)),
        ("after 2038", at(5_000_000_000, 7), at(8_000_000_000, 8)),
        ("not a time", at(0, 1_000_000_000), at(0, 0)),
    ];
    the_mount_does_as_the_disk(|root, answers| {
        fs::write(root.join("file"), "").expect("written");
        fs::create_dir(root.join("directory")).expect("a directory");
        symlink("file", root.join("link")).expect("a link");
        let start = Timestamps { last_access: at(10, 10), last_modification: at(20, 20) };
        for name in ["file", "directory", "link"] {
            utimensat(CWD, root.join(name), &start, AtFlags::SYMLINK_NOFOLLOW).expect("set");
            for (form, last_access, last_modification) in forms {
                let times = Timestamps { last_access, last_modification };
                answers.note(form, utimensat(CWD, root.join(name), &times, AtFlags::SYMLINK_NOFOLLOW));
                let attributes = metadata(&root.join(name));
                answers.see("access", (attributes.atime(), attributes.atime_nsec()));
                answers.see("modification", (attributes.mtime(), attributes.mtime_nsec()));
            }
            let now = Timestamps { last_access: at(10, 10), last_modification: at(0, UTIME_NOW) };
            answers.note("now", utimensat(CWD, root.join(name), &now, AtFlags::SYMLINK_NOFOLLOW));
            answers.see("access", metadata(&root.join(name)).atime());
            answers.see("it is this century", metadata(&root.join(name)).mtime() > 1_600_000_000);
        }
    });
}

#[test]
fn only_allowed_callers_set_times() {
    let set = |name: &str, last_access: i64, last_modification: i64| {
        let at = |tv_nsec| Timespec { tv_sec: 50, tv_nsec };
        let times = Timestamps { last_access: at(last_access), last_modification: at(last_modification) };
        utimensat(CWD, name, &times, AtFlags::empty())
    };
    the_mount_does_as_the_disk(|root, answers| {
        for (name, bits, owner) in [("own", 0o444, 4711), ("writable", 0o666, 0), ("readable", 0o644, 0)] {
            fs::write(root.join(name), "").expect("written");
            fs::set_permissions(root.join(name), Permissions::from_mode(bits)).expect("the mode is set");
            chown(root.join(name), Some(owner), None).expect("root may");
            USER.run(root, || {
                answers.note(name, set(name, 1, 2));
                answers.note("now", set(name, UTIME_NOW, UTIME_NOW));
                answers.note("one now", set(name, UTIME_OMIT, UTIME_NOW));
                answers.note("none", set(name, UTIME_OMIT, UTIME_OMIT));
            });
        }
    });
}

#[test]
fn times_move_when_files_and_directories_change() {
    the_mount_does_as_the_disk(|root, answers| {
        let (file, directory) = (root.join("file"), root.join("directory"));
        fs::write(&file, "content").expect("written");
        fs::create_dir(&directory).expect("a directory");
        let mut moved = |operation: &str, path: &Path, change: &dyn Fn()| {
            let long_ago = Timespec { tv_sec: 1000, tv_nsec: 0 };
            let times = Timestamps { last_access: long_ago, last_modification: long_ago };
            utimensat(CWD, path, &times, AtFlags::empty()).expect("set");
            let before = metadata(path);
            // The clock for times of files is coarse: wait for its next tick, so that the change gets another time.
            let ctime = |path: &Path| (metadata(path).ctime(), metadata(path).ctime_nsec());
            let clock = root.join("clock");
            eventually("the clock moves", || {
                fs::write(&clock, "").expect("written");
                ctime(&clock) > ctime(path)
            });
            change();
            let after = metadata(path);
            let (old, new) = ((before.ctime(), before.ctime_nsec()), (after.ctime(), after.ctime_nsec()));
            answers.see(operation, (after.mtime() != 1000, new > old));
        };
        let open = || File::options().read(true).write(true).open(&file).expect("a file");
        moved("write", &file, &|| open().write_all_at(b"x", 0).expect("written"));
        moved("truncate", &file, &|| open().set_len(3).expect("cut"));
        moved("truncate to the same", &file, &|| open().set_len(3).expect("cut"));
        moved("fallocate", &file, &|| fallocate(open(), FallocateFlags::empty(), 0, 9000).expect("reserved"));
        moved("chmod", &file, &|| fs::set_permissions(&file, Permissions::from_mode(0o640)).expect("set"));
        moved("chown", &file, &|| chown(&file, Some(3), None).expect("set"));
        moved("attribute", &file, &|| lsetxattr(&file, "user.a", b"b", XattrFlags::empty()).expect("set"));
        moved("link", &file, &|| fs::hard_link(&file, directory.join("link")).expect("a link"));
        moved("unlink", &file, &|| fs::remove_file(directory.join("link")).expect("removed"));
        moved("rename", &file, &|| fs::rename(&file, &file).expect("renamed"));
        moved("look", &file, &|| assert!(fs::metadata(&file).is_ok()));
        moved("create in it", &directory, &|| fs::write(directory.join("a"), "").expect("written"));
        moved("write in it", &directory, &|| fs::write(directory.join("a"), "more").expect("written"));
        moved("rename in it", &directory, &|| fs::rename(directory.join("a"), directory.join("b")).expect("renamed"));
        moved("remove in it", &directory, &|| fs::remove_file(directory.join("b")).expect("removed"));
    });
}

#[test]
fn the_mount_shows_the_times_sizes_and_links_of_the_source() {
    let mounted = Mounted::new();
    let (shown, source) = (mounted.path().join("file"), mounted.source().join("file"));
    fs::write(&shown, vec![1; 100_000]).expect("written");
    fs::hard_link(&shown, mounted.path().join("link")).expect("a link");
    fs::read(&shown).expect("a file");
    let attributes = |path: &Path| {
        let stat = metadata(path);
        let times =
            [(stat.atime(), stat.atime_nsec()), (stat.mtime(), stat.mtime_nsec()), (stat.ctime(), stat.ctime_nsec())];
        (stat.size(), stat.blocks(), stat.nlink(), stat.mode(), times)
    };
    eventually("the attributes are equal", || attributes(&shown) == attributes(&source));
    let birth_time = |path: &Path| statx(CWD, path, AtFlags::empty(), StatxFlags::BTIME).expect("attributes");
    let birth = birth_time(&shown);
    if birth.stx_mask & StatxFlags::BTIME.bits() != 0 {
        assert_eq!(birth.stx_btime.tv_sec, birth_time(&source).stx_btime.tv_sec);
        assert_eq!(birth.stx_btime.tv_nsec, birth_time(&source).stx_btime.tv_nsec);
    }
}

#[test]
fn extended_attributes_are_set_read_listed_and_removed() {
    the_mount_does_as_the_disk(|root, answers| {
        let (file, link) = (root.join("file"), root.join("link"));
        fs::write(&file, "").expect("written");
        symlink("file", &link).expect("a link");
        let (set, create, replace) = (XattrFlags::empty(), XattrFlags::CREATE, XattrFlags::REPLACE);
        let long = format!("user.{}", "n".repeat(250));
        let longer = format!("user.{}", "n".repeat(251));
        let writes: [(&str, &[u8], XattrFlags); 14] = [
            ("user.a", b"one", set),
            ("user.a", b"two", create),
            ("user.a", b"three \0 bytes", replace),
            ("user.b", b"", set),
            ("user.c", b"c", replace),
            ("user.large", &[7; 3000], set),
            ("user.too.large", &[7; 65536], set),
            (&long, b"long name", set),
            (&longer, b"longer name", set),
            ("trusted.t", b"trusted", set),
            ("security.other", b"secure", set),
            ("unknown.x", b"x", set),
            ("user.", b"x", set),
            ("system.unknown", b"x", set),
        ];
        for (name, value, flags) in writes {
            answers.note(&format!("set {name} {flags:?}"), lsetxattr(&file, name, value, flags));
        }
        answers.note("on a link", lsetxattr(&link, "user.a", b"x", set));
        answers.note("trusted on a link", lsetxattr(&link, "trusted.a", b"x", set));
        answers.note("on a directory", lsetxattr(root, "user.d", b"x", set));

        let mut buffer = [0; 4096];
        for (name, size) in [("user.a", 4096), ("user.a", 13), ("user.a", 12), ("user.b", 8)] {
            answers.note(&format!("get {name}, {size}"), lgetxattr(&file, name, &mut buffer[..size]));
        }
        for name in ["user.absent", "unknown.x", "trusted.absent", "security.selinux", "system.posix_acl_access"] {
            answers.note(&format!("get {name}"), lgetxattr(&file, name, &mut buffer));
        }
        let all = llistxattr(&file, &mut buffer).expect("a list");
        answers.see("size of the list", all);
        answers.note("one byte too few", llistxattr(&file, &mut buffer[..all - 1]));
        answers.see("sizes without a buffer", sizes(&file, c"user.a"));
        answers.note("list", attribute_names(&file));
        answers.note("remove", lremovexattr(&file, "user.a"));
        answers.note("again", lremovexattr(&file, "user.a"));
        answers.note("list", attribute_names(&file));
    });
}

/// The size of an attribute and of the list of attributes. The calls have no buffer, so that they return just the size.
fn sizes(path: &Path, name: &CStr) -> (isize, isize) {
    let path = CString::new(path.as_os_str().as_bytes()).expect("a path");
    // SAFETY: both strings end with a zero byte; nothing is written to a buffer of no bytes.
    unsafe {
        let attribute = libc::lgetxattr(path.as_ptr(), name.as_ptr(), ptr::null_mut(), 0);
        (attribute, libc::llistxattr(path.as_ptr(), ptr::null_mut(), 0))
    }
}

#[test]
fn only_allowed_callers_use_extended_attributes() {
    the_mount_does_as_the_disk(|root, answers| {
        for (name, bits) in [("readable", 0o644), ("writable", 0o666), ("hidden", 0o600)] {
            let path = root.join(name);
            fs::write(&path, "").expect("written");
            fs::set_permissions(&path, Permissions::from_mode(bits)).expect("the mode is set");
            for attribute in ["user.a", "trusted.a", "security.a"] {
                lsetxattr(&path, attribute, b"value", XattrFlags::empty()).expect("root may");
            }
            USER.run(root, || {
                for attribute in ["user.a", "trusted.a", "security.a"] {
                    answers.note(attribute, lgetxattr(name, attribute, &mut [0; 32][..]));
                    answers.note("set", lsetxattr(name, attribute, b"other", XattrFlags::empty()));
                    answers.note("remove", lremovexattr(name, attribute));
                }
                answers.note("list", attribute_names(Path::new(name)));
            });
        }
    });
}

#[test]
fn trusted_attributes_are_listed_for_the_administrator_of_the_system_and_not_of_a_user_namespace() {
    the_mount_does_as_the_disk(|root, answers| {
        let file = root.join("file");
        fs::write(&file, "").expect("written");
        for attribute in ["user.a", "trusted.a"] {
            lsetxattr(&file, attribute, b"value", XattrFlags::empty()).expect("root may");
        }
        answers.note("root of the system", attribute_names(&file));
        for map in ["0 0 1", "0 0 4294967295"] {
            answers.see(map, names_in_user_namespace(&file, map));
        }
    });
}

/// The names of the attributes that root of a new user namespace with this ID mapping gets.
fn names_in_user_namespace(file: &Path, map: &str) -> String {
    const LIST: &str = "import os, sys; input(); print(sorted(os.listxattr(sys.argv[1])))";
    let mut command = Command::new("python3");
    // SAFETY: unshare is async-signal-safe.
    unsafe { command.pre_exec(|| unshare(CloneFlags::CLONE_NEWUSER).map_err(std::io::Error::from)) };
    let command = command.args(["-c", LIST]).arg(file).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("python3 runs");
    for ids in ["uid_map", "gid_map"] {
        fs::write(format!("/proc/{}/{ids}", child.id()), format!("{map}\n")).expect("mapped");
    }
    child.stdin.take().expect("a pipe").write_all(b"\n").expect("the program reads");
    String::from_utf8(child.wait_with_output().expect("the program ends").stdout).expect("text")
}

#[test]
fn acls_are_kept_inherited_and_follow_the_mode() {
    let setfacl = |path: &Path, entries: &[&str]| {
        let status = Command::new("setfacl").args(entries).arg(path).status().expect("setfacl runs");
        assert!(status.success());
    };
    the_mount_does_as_the_disk(|root, answers| {
        let getfacl = |answers: &mut Answers, name: &str| {
            let output = Command::new("getfacl").args(["-n", name]).current_dir(root).output().expect("getfacl runs");
            answers.see("acl", String::from_utf8_lossy(&output.stdout));
        };
        fs::write(root.join("file"), "").expect("written");
        setfacl(&root.join("file"), &["-m", "u:4711:rw,g:200:r,m::rw"]);
        getfacl(answers, "file");
        // The group bits of the mode are the mask of the ACL: a change of one changes the other.
        answers.see("mode", mode(&root.join("file")));
        fs::set_permissions(root.join("file"), Permissions::from_mode(0o640)).expect("the mode is set");
        getfacl(answers, "file");
        setfacl(&root.join("file"), &["-b"]);
        getfacl(answers, "file");

        fs::create_dir(root.join("parent")).expect("a directory");
        setfacl(&root.join("parent"), &["-d", "-m", "u::rwx,u:4711:rwx,g::rx,o::-"]);
        // With a default ACL, the kernel ignores the umask.
        for (name, mask) in [("002", 0o002), ("077", 0o077)] {
            crate::common::caller::in_thread(&root.join("parent"), || {
                nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(mask));
                fs::write(format!("file{name}"), "").expect("written");
                fs::create_dir(format!("directory{name}")).expect("a directory");
                symlink("x", format!("link{name}")).expect("a link");
                nix::unistd::mkfifo(&*format!("fifo{name}"), nix::sys::stat::Mode::from_bits_truncate(0o666))
                    .expect("a FIFO");
            });
            for kind in ["file", "directory", "fifo"] {
                getfacl(answers, &format!("parent/{kind}{name}"));
            }
        }
        // Without a default ACL, the umask applies.
        crate::common::caller::in_thread(root, || {
            nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o027));
            File::options().write(true).create_new(true).mode(0o666).open("masked").expect("created");
            fs::create_dir("masked-directory").expect("a directory");
        });
        answers.see("masked", (mode(&root.join("masked")), mode(&root.join("masked-directory"))));
        setfacl(&root.join("parent"), &["-k"]);
        getfacl(answers, "parent");
        // A caller that does not own the file sets an ACL.
        USER.run(root, || {
            let output = Command::new("setfacl").args(["-m", "u:4711:rw", "file"]).output();
            answers.note("of others", output.map(|output| output.status.success()));
        });
    });
}

#[test]
fn the_figures_of_the_file_system_are_those_of_the_source() {
    let mounted = Mounted::new();
    let figures = |path: &Path| {
        let statvfs = rustix::fs::statvfs(path).expect("figures");
        (statvfs.f_blocks, statvfs.f_bsize, statvfs.f_frsize, statvfs.f_files, statvfs.f_namemax)
    };
    fs::write(mounted.path().join("file"), "").expect("written");
    assert_eq!(figures(mounted.path()), figures(mounted.source()));
    assert_eq!(figures(&mounted.path().join("file")), figures(mounted.source()));
    let file = File::open(mounted.path().join("file")).expect("a file");
    let open = rustix::fs::fstatvfs(file.as_fd()).expect("figures");
    assert_eq!(open.f_namemax, 255);
    assert!(open.f_bavail > 0 && open.f_ffree > 0);
}
