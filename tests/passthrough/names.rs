//! Names of files: to create, link, rename and remove files has the same results, and leaves the same files, through a
//! mount as on the disk.

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io::{Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, makedev, mknodat, open, openat, renameat_with};

use crate::common::caller::in_thread;
use crate::common::passthrough::Mounted;
use crate::common::twins::{Answers, names, the_mount_does_as_the_disk};

#[test]
fn renames_replace_keep_and_exchange_as_on_the_disk() {
    the_mount_does_as_the_disk(|root, answers| {
        let rename = |answers: &mut Answers, from: &str, to: &str, flags: RenameFlags| {
            let result = renameat_with(CWD, root.join(from), CWD, root.join(to), flags);
            answers.note(&format!("{from} to {to} {flags:?}"), result);
        };
        for file in ["a", "b", "c"] {
            fs::write(root.join(file), file).expect("written");
        }
        for directory in ["empty", "full", "full/inner", "other"] {
            fs::create_dir(root.join(directory)).expect("a directory");
        }
        symlink("a", root.join("link")).expect("a link");
        fs::hard_link(root.join("c"), root.join("same-as-c")).expect("a link");
        let (plain, keep, swap) = (RenameFlags::empty(), RenameFlags::NOREPLACE, RenameFlags::EXCHANGE);
        rename(answers, "a", "b", keep);
        rename(answers, "a", "new", keep);
        rename(answers, "new", "b", plain);
        rename(answers, "b", "full", swap);
        rename(answers, "full", "b", swap);
        rename(answers, "b", "absent", swap);
        rename(answers, "absent", "b", plain);
        rename(answers, "b", "empty", plain);
        rename(answers, "empty", "b", plain);
        rename(answers, "empty", "full", plain);
        rename(answers, "full", "empty", plain);
        rename(answers, "empty", "empty/below", plain);
        rename(answers, "empty", "empty/inner/below", plain);
        rename(answers, "other", "empty/inner", plain);
        rename(answers, "empty/inner", "empty", swap);
        rename(answers, "c", "same-as-c", plain);
        rename(answers, "link", "b", plain);
        rename(answers, "b", "moved/", plain);
        rename(answers, "empty", "moved/", plain);
        rename(answers, "moved/.", "x", plain);
        rename(answers, "c", "x", keep | swap);
        answers.see("the names", names(root));
    });
}

#[test]
fn hard_links_are_one_file_with_many_names() {
    the_mount_does_as_the_disk(|root, answers| {
        let path = |name: &str| root.join(name);
        fs::write(path("file"), "one").expect("written");
        symlink("file", path("symlink")).expect("a link");
        fs::create_dir(path("directory")).expect("a directory");
        answers.note("link", fs::hard_link(path("file"), path("directory/second")));
        answers.note("over an entry", fs::hard_link(path("file"), path("symlink")));
        answers.note("of a directory", fs::hard_link(path("directory"), path("third")));
        answers.note("of a symbolic link", fs::hard_link(path("symlink"), path("symlink2")));
        answers.note("of nothing", fs::hard_link(path("absent"), path("third")));
        let (one, two) = (metadata(&path("file")), metadata(&path("directory/second")));
        answers.see("they are one", one.ino() == two.ino());
        answers.see("links", (one.nlink(), metadata(&path("symlink2")).nlink()));
        fs::write(path("directory/second"), "changed").expect("written");
        answers.note("through the other name", fs::read_to_string(path("file")));
        fs::set_permissions(path("file"), Permissions::from_mode(0o600)).expect("the mode is set");
        answers.see("mode of the other name", metadata(&path("directory/second")).mode());
        answers.note("remove one", fs::remove_file(path("file")));
        answers.see("links left", metadata(&path("directory/second")).nlink());
    });
}

#[test]
fn a_file_has_no_more_names_than_the_source_gives_it() {
    const EXT4_LINK_MAX: u64 = 65_000;
    let mounted = Mounted::new();
    let file = mounted.source().join("file");
    fs::write(&file, "").expect("written");
    let refused =
        (0..EXT4_LINK_MAX).find_map(|number| fs::hard_link(&file, file.with_extension(number.to_string())).err());
    let Some(refused) = refused else { return }; // Not every file system has a limit.
    let error = fs::hard_link(mounted.path().join("file"), mounted.path().join("one more")).expect_err("too many");
    assert_eq!(error.raw_os_error(), refused.raw_os_error());
    fs::remove_file(mounted.path().join("file.0")).expect("removed");
    fs::hard_link(mounted.path().join("file"), mounted.path().join("one more")).expect("one more name is allowed");
}

#[test]
fn names_are_bytes_up_to_255_of_them() {
    the_mount_does_as_the_disk(|root, answers| {
        let long: Vec<u8> = (1..=255).map(|byte| if byte == b'/' { 0xff } else { byte }).collect();
        for name in [&long[..], b"\xff\xfe", b" ", b"\n\t\\", b"..data", b"...", &[0xc3; 255], &[b'x'; 256]] {
            let path = root.join(OsStr::from_bytes(name));
            answers.note("create", File::create_new(&path).map(drop));
            answers.note("again", File::create_new(&path).map(drop));
            answers.note("look", fs::metadata(&path).map(|metadata| metadata.len()));
        }
        let directory = root.join(OsStr::from_bytes(&[0xfe; 255]));
        answers.note("a directory", fs::create_dir(&directory));
        answers.note("in it", fs::write(directory.join(OsStr::from_bytes(&long)), "deep"));
        answers.note("a link", symlink(OsStr::from_bytes(&long), directory.join("link")));
        answers.note("moved", fs::rename(directory.join(OsStr::from_bytes(&long)), root.join("moved")));
        answers.see("names", names(root));
        let path_limit = root.join(OsStr::from_bytes(&b"./".repeat(2100)));
        answers.note("a path of 4200 bytes", fs::metadata(path_limit).map(drop));
    });
}

#[test]
fn symbolic_links_are_handed_out_as_they_are() {
    the_mount_does_as_the_disk(|root, answers| {
        let long = "x/".repeat(2047);
        let targets = ["/etc/hostname", "absent", "../..", "self", "a//b/./c/", &long, " "];
        for (number, target) in targets.iter().enumerate() {
            let link = root.join(format!("link{number}"));
            answers.note("make", symlink(target, &link));
            answers.note("read", fs::read_link(&link));
            answers.see("length", fs::symlink_metadata(&link).expect("a link").len());
        }
        symlink("loop", root.join("loop")).expect("a link");
        fs::write(root.join("file"), "content").expect("written");
        symlink("file", root.join("good")).expect("a link");
        answers.note("an empty target", symlink("", root.join("empty")));
        answers.note("a target of 4096 bytes", symlink("y".repeat(4096), root.join("longer")));
        answers.note("follow a loop", File::open(root.join("loop")).map(drop));
        answers.note("follow", fs::read_to_string(root.join("good")));
        answers.note("not to follow", open(root.join("good"), OFlags::NOFOLLOW, Mode::empty()).map(drop));
        answers.note("create through a dangling one", File::create(root.join("link1")).map(drop));
        answers.note("not so", File::create_new(root.join("link0")).map(drop));
        answers.note("readlink of a file", fs::read_link(root.join("file")));
        answers.note("its owner", std::os::unix::fs::lchown(root.join("good"), Some(7), Some(8)));
        answers.note("remove", fs::remove_file(root.join("good")));
    });
}

#[test]
fn nodes_of_every_kind_are_made_and_removed() {
    the_mount_does_as_the_disk(|root, answers| {
        let mode = Mode::from_raw_mode(0o640);
        let kinds = [
            ("regular", FileType::RegularFile, 0),
            ("fifo", FileType::Fifo, 0),
            ("socket", FileType::Socket, 0),
            ("null", FileType::CharacterDevice, makedev(1, 3)),
            ("large numbers", FileType::CharacterDevice, makedev(4095, 1_048_575)),
            ("loop", FileType::BlockDevice, makedev(7, 200)),
            ("whiteout", FileType::CharacterDevice, 0),
            ("a directory", FileType::Directory, 0),
        ];
        for (name, kind, device) in kinds {
            answers.note(name, mknodat(CWD, root.join(name), kind, mode, device));
            answers.note("again", mknodat(CWD, root.join(name), kind, mode, device));
            answers.note("it is", fs::symlink_metadata(root.join(name)).map(|node| (node.mode(), node.rdev())));
        }
        answers.note("open a device", open(root.join("null"), OFlags::RDONLY, Mode::empty()).map(drop));
        let nonblock = OFlags::WRONLY | OFlags::NONBLOCK;
        answers.note("open a FIFO", open(root.join("fifo"), nonblock, Mode::empty()).map(drop));
        answers.note("open a socket", open(root.join("socket"), OFlags::RDONLY, Mode::empty()).map(drop));
        fs::hard_link(root.join("fifo"), root.join("fifo2")).expect("a link");
        fs::rename(root.join("loop"), root.join("renamed")).expect("renamed");
        answers.note("remove", fs::remove_file(root.join("whiteout")));
    });
}

#[test]
fn open_flags_decide_as_on_the_disk() {
    the_mount_does_as_the_disk(|root, answers| {
        fs::write(root.join("file"), "content").expect("written");
        fs::create_dir(root.join("directory")).expect("a directory");
        symlink("directory", root.join("link")).expect("a link");
        let mode = Mode::from_raw_mode(0o666);
        let flags = [
            OFlags::RDONLY,
            OFlags::WRONLY,
            OFlags::RDWR | OFlags::APPEND,
            OFlags::RDONLY | OFlags::DIRECTORY,
            OFlags::RDONLY | OFlags::NOFOLLOW,
            OFlags::PATH,
            OFlags::PATH | OFlags::NOFOLLOW,
            OFlags::RDWR | OFlags::CREATE,
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL,
            OFlags::RDONLY | OFlags::NOATIME,
            OFlags::RDONLY | OFlags::TRUNC,
            OFlags::WRONLY | OFlags::TRUNC,
        ];
        for name in ["file", "directory", "link", "absent", "file/", "directory/", "file/below", "link/", "absent/"] {
            for flags in flags {
                let result = open(root.join(name), flags, mode).map(drop);
                answers.note(&format!("{name} {flags:?}"), result);
                let _ = fs::remove_file(root.join("absent"));
            }
        }
        for (what, result) in [
            ("mkdir", fs::create_dir(root.join("file/below"))),
            ("mkdir again", fs::create_dir(root.join("directory"))),
            ("rmdir of a file", fs::remove_dir(root.join("file"))),
            ("rmdir of a link", fs::remove_dir(root.join("link"))),
            ("unlink of a directory", fs::remove_file(root.join("directory"))),
            ("rmdir of .", fs::remove_dir(root.join("directory/."))),
            ("unlink of nothing", fs::remove_file(root.join("absent"))),
        ] {
            answers.note(what, result);
        }
        fs::write(root.join("directory/in"), "").expect("written");
        answers.note("rmdir of a full directory", fs::remove_dir(root.join("directory")));
    });
}

#[test]
fn a_file_without_a_name_lives_until_it_is_closed() {
    the_mount_does_as_the_disk(|root, answers| {
        let path = root.join("file");
        let options = File::options().read(true).write(true).create_new(true).clone();
        let mut file = options.open(&path).expect("created");
        file.write_all(b"before").expect("written");
        let reader = File::open(&path).expect("a file");
        answers.note("remove", fs::remove_file(&path));
        answers.note("gone", fs::metadata(&path).map(drop));
        let attributes =
            |file: &File| file.metadata().map(|metadata| (metadata.nlink(), metadata.len(), metadata.mode()));
        answers.note("links and size", attributes(&file));
        answers.note("write", file.write_all_at(b" and after", 6));
        answers.note("grow", file.set_len(20));
        answers.note("size", attributes(&reader));
        let mut content = String::new();
        answers.note("rewind", file.rewind());
        answers.note("read", file.read_to_string(&mut content));
        answers.see("content", content);
        answers.note("chmod", file.set_permissions(Permissions::from_mode(0o6751)));
        answers.note("chown", std::os::unix::fs::fchown(&file, Some(12), Some(13)));
        answers.note("attribute", rustix::fs::fsetxattr(&file, "user.a", b"b", rustix::fs::XattrFlags::empty()));
        answers.note("sync", file.sync_all());
        answers.note("size, mode", attributes(&reader));
        let through_proc = format!("/proc/self/fd/{}", reader.as_raw_fd());
        answers.note("opened again", fs::read(through_proc).map(|bytes| bytes.len()));
        // A new file of the same name is another file.
        answers.note("a new one", fs::write(&path, "new"));
        answers.note("the old one", attributes(&reader));
        answers.note("shrink", file.set_len(3));
        answers.note("the old one", fs::read(format!("/proc/self/fd/{}", file.as_raw_fd())));
    });
}

#[test]
fn a_file_replaced_by_a_rename_lives_until_it_is_closed() {
    the_mount_does_as_the_disk(|root, answers| {
        fs::write(root.join("file"), "old").expect("written");
        let old = File::options().read(true).write(true).open(root.join("file")).expect("a file");
        fs::write(root.join("next"), "new content").expect("written");
        answers.note("rename", fs::rename(root.join("next"), root.join("file")));
        answers.note("the old one", old.metadata().map(|metadata| (metadata.nlink(), metadata.len())));
        answers.note("append", old.write_all_at(b"er", 3));
        let mut bytes = [0; 8];
        answers.note("read", old.read_at(&mut bytes, 0));
        answers.see("bytes", bytes);
        answers.note("the new one", fs::read_to_string(root.join("file")));
    });
}

#[test]
fn a_removed_working_directory_is_empty_and_takes_nothing() {
    the_mount_does_as_the_disk(|root, answers| {
        fs::create_dir_all(root.join("outer/inner")).expect("a directory");
        in_thread(&root.join("outer/inner"), || {
            fs::write("file", "x").expect("written");
            fs::remove_file("file").expect("removed");
            answers.note("remove", fs::remove_dir(root.join("outer/inner")));
            answers.note("create", fs::write("file", "x"));
            answers.note("mkdir", fs::create_dir("directory"));
            answers.note("list", fs::read_dir(".").map(Iterator::count));
            answers.note("look", fs::metadata(".").map(|metadata| metadata.nlink()));
            answers.note("where", std::env::current_dir().map(drop));
            answers.note("above", fs::metadata("..").map(|metadata| metadata.is_dir()));
            answers.note("a file above", fs::write("../file", "x"));
        });
    });
}

#[test]
fn a_working_directory_follows_renames_of_what_is_above() {
    the_mount_does_as_the_disk(|root, answers| {
        fs::create_dir_all(root.join("a/b/c")).expect("directories");
        in_thread(&root.join("a/b/c"), || {
            answers.note("move", fs::rename(root.join("a/b"), root.join("moved")));
            answers.note("write", fs::write("file", "here"));
            answers.note("above", fs::write("../above", "there"));
            answers.note("a rename to above", fs::rename("file", "../../file"));
            answers.see("where", std::env::current_dir().map(|path| path.ends_with("moved/c")).ok());
        });
    });
}

#[test]
fn a_file_made_without_a_name_gets_one_or_a_clear_no() {
    let mounted = Mounted::new();
    let unnamed = openat(CWD, mounted.path(), OFlags::TMPFILE | OFlags::RDWR, Mode::from_raw_mode(0o640));
    match unnamed {
        // After this error, programs create a file with a name and remove the name.
        Err(errno) => assert_eq!(errno, rustix::io::Errno::OPNOTSUPP),
        Ok(unnamed) => {
            let proc = format!("/proc/self/fd/{}", unnamed.as_raw_fd());
            rustix::io::write(&unnamed, b"content").expect("written");
            let target = mounted.path().join("named");
            rustix::fs::linkat(CWD, proc, CWD, target, AtFlags::SYMLINK_FOLLOW).expect("the file gets a name");
            assert_eq!(fs::read(mounted.source().join("named")).expect("a file"), b"content");
        }
    }
    let mut file = tempfile::tempfile_in(mounted.path()).expect("a file without a name");
    file.write_all(b"content").expect("written");
    assert_eq!(file.metadata().expect("attributes").len(), 7);
    assert!(names(mounted.source()).iter().all(|name| name == "named"));
}

fn metadata(path: &Path) -> fs::Metadata {
    fs::symlink_metadata(path).expect("the file exists")
}
