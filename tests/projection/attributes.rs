//! `stat`, `statfs`, permission checks and extended attributes of a projection.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use nix::sys::statvfs::statvfs;
use podfs_fuse::projection::{FileEntry, ImageLayout};
use rustix::fs::{AtFlags, CWD, StatxFlags, XattrFlags, getxattr, listxattr, setxattr, statx};
use rustix::io::Errno;

use crate::common::idmap::{FIRST_ID, id_mapped_clone};
use crate::common::stopped::Stopped;
use crate::common::tree::{names, parse};
use crate::common::undisturbed::undisturbed;
use crate::common::{DIRECTORIES, Served, plain_root};

/// All paths of a volume. Does not follow links.
fn walk(directory: &Path) -> Vec<PathBuf> {
    let mut paths = vec![directory.to_owned()];
    for name in names(directory) {
        let path = directory.join(name);
        match fs::symlink_metadata(&path).expect("attributes").is_dir() {
            true => paths.extend(walk(&path)),
            false => paths.push(path),
        }
    }
    paths
}

fn run(command: &mut Command) -> Output {
    command.env("LC_ALL", "C").output().expect("the command starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn sizes_blocks_and_link_counts_are_those_of_tmpfs() {
    // FU-01, ME-03
    let (page, more) = ("x".repeat(4096), "x".repeat(4097));
    let served = Served::with(&[("empty", ""), ("one", "x"), ("page", &page), ("more", &more), ("sub/deep/b", "y")]);
    let data = served.path().join("..data");
    let size_blocks_and_links = |path: &str| {
        let metadata = fs::symlink_metadata(data.join(path)).expect("attributes");
        (metadata.size(), metadata.blocks(), metadata.nlink())
    };
    assert_eq!(size_blocks_and_links("empty"), (0, 0, 1));
    assert_eq!(size_blocks_and_links("one"), (1, 8, 1));
    assert_eq!(size_blocks_and_links("page"), (4096, 8, 1));
    assert_eq!(size_blocks_and_links("more"), (4097, 16, 1));
    assert_eq!(size_blocks_and_links("."), (0, 0, 3), "the directory has one directory");
    assert_eq!(size_blocks_and_links("sub"), (0, 0, 3));
    assert_eq!(size_blocks_and_links("sub/deep"), (0, 0, 2));
    let root = fs::metadata(served.path()).expect("a directory");
    assert_eq!(root.nlink(), 3, "the root has one directory: the generation");
    let link = fs::symlink_metadata(served.path().join("one")).expect("a link");
    assert_eq!((link.size(), link.blocks(), link.nlink()), ("..data/one".len() as u64, 0, 1));
}

#[test]
fn du_equals_the_sum_of_the_blocks() {
    // FU-01, ME-03
    let served = Served::with(&[("a", "x"), ("sub/b", &"x".repeat(10_000)), ("sub/c", "")]);
    let du = run(Command::new("du").args(["--summarize", "--block-size=1"]).arg(served.path()));
    assert!(du.status.success(), "{}", text(&du.stderr));
    let total: u64 = text(&du.stdout).split_whitespace().next().expect("a size").parse().expect("a number");
    let blocks = |path: &PathBuf| 512 * fs::symlink_metadata(path).expect("attributes").blocks();
    let sum: u64 = walk(served.path()).iter().map(blocks).sum();
    assert_eq!((total, sum), (4096 + 12288, 4096 + 12288));
}

#[test]
fn an_inode_number_is_never_reused() {
    // FU-01: over many generations, each inode number belongs to one file, and a file that stays keeps its number.
    let mut served = Served::new(&plain_root());
    let mut files: HashMap<u64, String> = HashMap::new();
    let device = fs::metadata(served.path()).expect("a directory").dev();
    for round in 0..100 {
        let text = round.to_string();
        let changing_key = format!("key-{}", round % 3);
        served.commit(&[("a", &text), (&changing_key, &text), ("sub/deep/b", &text)]);
        let root = served.path();
        for path in walk(root) {
            let metadata = fs::symlink_metadata(&path).expect("attributes");
            assert_eq!(metadata.dev(), device, "{}", path.display());
            let created = metadata.modified().expect("a time");
            let name = path.strip_prefix(root).expect("below the root").display().to_string();
            let file = if path == root { name } else { format!("{name} of {created:?}") };
            let first_file = files.entry(metadata.ino()).or_insert_with(|| file.clone());
            assert_eq!(*first_file, file, "inode {}", metadata.ino());
        }
    }
    assert!(files.len() > 600, "100 generations have six files each: {}", files.len());
}

#[test]
fn a_listing_and_stat_agree_on_inode_numbers() {
    // FU-01
    let served = Served::with(&[("a", "1"), ("sub/b", "1")]);
    for directory in [served.path().to_owned(), served.path().join("..data"), served.path().join("sub")] {
        for entry in fs::read_dir(directory).expect("a listing") {
            let entry = entry.expect("an entry");
            assert_eq!(entry.ino(), entry.metadata().expect("attributes").ino(), "{:?}", entry.path());
        }
    }
}

#[test]
fn a_file_that_is_open_but_gone_has_no_links() {
    // FU-01, AW-13
    let mut served = Served::with(&[("a", "1")]);
    let file = File::open(served.path().join("a")).expect("a file");
    let before = file.metadata().expect("attributes");
    served.commit(&[("a", "2")]);
    let after = file.metadata().expect("attributes");
    assert_eq!((before.nlink(), after.nlink()), (1, 0));
    assert_eq!((before.ino(), before.size()), (after.ino(), after.size()));
}

#[test]
fn a_server_that_hangs_does_not_block_calls_answered_from_the_cache() {
    // FU-02
    let served = Served::with(&[("a", "1"), ("sub/b", "1")]);
    let paths = walk(served.path());
    let requests = || served.projection.requests().expect("the server answers");
    let inode = |path: &Path, flag| {
        let flags = AtFlags::SYMLINK_NOFOLLOW | flag;
        statx(CWD, path, flags, StatxFlags::BASIC_STATS).expect("attributes").stx_ino
    };
    let mut cached = Vec::new();
    undisturbed(|| {
        for path in &paths {
            fs::symlink_metadata(path).expect("attributes");
        }
        let stopped = Stopped::server(&served);
        cached = paths.iter().map(|path| inode(path, AtFlags::STATX_DONT_SYNC)).collect();
        stopped.was_not_needed()
    });
    let before = requests();
    let requested: Vec<_> = paths.iter().map(|path| inode(path, AtFlags::STATX_FORCE_SYNC)).collect();
    assert_eq!(cached, requested);
    assert!(requests() >= before + paths.len() as u64, "STATX_FORCE_SYNC makes the kernel send requests");
}

#[test]
fn every_user_may_enter_and_modes_decide_what_they_read() {
    // FU-03, CM-10, SE-04
    let mut served = Served::new(&plain_root());
    let entry = |path, mode, uid, gid| FileEntry { path, content: b"text", mode, uid, gid };
    let entries = [
        entry("all", 0o644, 0, 0),
        entry("root", 0o400, 0, 0),
        entry("group", 0o440, 0, 1001),
        entry("own", 0o400, 1234, 0),
    ];
    served.projection.commit(&ImageLayout::new(entries, DIRECTORIES).expect("a tree"), DIRECTORIES).expect("a commit");
    let read = |user: &str, group: &str, path: &str| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", user, "--regid", group, "--clear-groups", "--", "cat"]);
        let output = run(command.arg(served.visible.path().join(path)));
        let refused = text(&output.stderr).contains("Permission denied");
        assert!(refused || output.stdout == b"text", "{path}: {}", text(&output.stderr));
        !refused
    };
    assert_eq!(["all", "root", "group", "own"].map(|path| read("1234", "1234", path)), [true, false, false, true]);
    assert_eq!(["all", "root", "group", "own"].map(|path| read("99", "1001", path)), [true, false, true, false]);
    assert_eq!(["all", "root", "group", "own"].map(|path| read("0", "0", path)), [true; 4]);
}

#[test]
fn a_file_without_x_bits_cannot_be_run() {
    // FU-03
    let mut served = Served::new(&plain_root());
    served.commit_files(&parse("plain=#!/bin/sh\n; script=#!/bin/sh\nexit 7\n@0755"));
    let refused = Command::new(served.path().join("plain")).status().expect_err("the file is not executable");
    assert_eq!(refused.raw_os_error(), Some(libc::EACCES));
    assert_eq!(Command::new(served.path().join("script")).status().expect("the script runs").code(), Some(7));
}

#[test]
fn the_visible_mount_can_be_id_mapped() {
    // FU-04: a container runtime makes such an ID-mapped clone for a pod with `hostUsers: false`.
    let mut served = Served::new(&plain_root());
    let entry = FileEntry { path: "a", content: b"text", mode: 0o400, uid: 1000, gid: 1001 };
    served.projection.commit(&ImageLayout::new([entry], DIRECTORIES).expect("a tree"), DIRECTORIES).expect("a commit");
    let clone = id_mapped_clone(served.path());
    let owner = |path: &str| {
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        let attributes = statx(&clone, path, flags, StatxFlags::BASIC_STATS).expect("attributes");
        (attributes.stx_uid, attributes.stx_gid)
    };
    assert_eq!(owner("..data/a"), (FIRST_ID + 1000, FIRST_ID + 1001));
    assert_eq!(owner("a"), (FIRST_ID + 1000, FIRST_ID), "the ids of the link are mapped, too");
    assert_eq!(owner(".").0, FIRST_ID);
    let path = format!("/proc/self/fd/{}/a", clone.as_raw_fd());
    assert_eq!(fs::read_to_string(path).expect("root may read"), "text");
    served.commit(&[("a", "after")]);
    assert_eq!(owner("..data/a"), (FIRST_ID, FIRST_ID));
}

#[test]
fn extended_attributes_are_unsupported_rather_than_an_error() {
    // FU-05
    let served = Served::with(&[("a", "1"), ("sub/b", "1")]);
    let mut buffer = [0_u8; 64];
    // In the second round, the kernel knows that the server does not support the operations.
    for _ in 0..2 {
        for path in walk(served.path()).into_iter().filter(|path| !path.is_symlink()) {
            let listed = listxattr(&path, &mut buffer);
            assert!(matches!(listed, Ok(0) | Err(Errno::OPNOTSUPP)), "{}: {listed:?}", path.display());
            for name in ["user.x", "security.selinux", "security.capability", "system.posix_acl_access"] {
                let result = getxattr(&path, name, &mut buffer);
                assert!(matches!(result, Err(Errno::OPNOTSUPP | Errno::NODATA)), "{name}: {result:?}");
                let set = setxattr(&path, name, b"value", XattrFlags::empty());
                assert!(matches!(set, Err(Errno::ROFS | Errno::OPNOTSUPP)), "{name}: {set:?}");
            }
        }
    }
}

#[test]
fn copying_with_all_attributes_works() {
    // FU-05: tar, rsync and cp read extended attributes and ACLs.
    let served = Served::with(&[("a", "1"), ("sub/b", "2")]);
    let target = tempfile::TempDir::new().expect("a directory");
    let copy =
        run(Command::new("cp").args(["--archive", "--no-target-directory"]).arg(served.path()).arg(target.path()));
    assert!(copy.status.success() && copy.stderr.is_empty(), "{}", text(&copy.stderr));
    assert_eq!(crate::common::tree::files(target.path()), parse("a=1; sub/b=2"));
}

#[test]
fn df_shows_the_size_of_the_volume() {
    let served = Served::with(&[("a", &"x".repeat(10_000)), ("sub/b", "1")]);
    let figures = statvfs(served.path()).expect("statvfs");
    let bytes = figures.blocks() * figures.fragment_size();
    assert!((10_001..20_000).contains(&bytes), "{bytes} bytes");
    let free = (figures.blocks_free(), figures.blocks_available(), figures.files_free());
    assert_eq!(free, (0, 0, 0), "nothing can be added");
    // The root, the generation, `a`, `sub`, `sub/b` and three links.
    assert_eq!((figures.files(), figures.name_max()), (8, 255));
    let df = run(Command::new("df").args(["--output=source,fstype,pcent"]).arg(served.path()));
    assert!(df.status.success(), "{}", text(&df.stderr));
    let line = text(&df.stdout).lines().last().expect("a line").split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(line, "podfs fuse.podfs 100%");
}
