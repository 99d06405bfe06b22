//! The cost of a volume for its server: descriptors and memory for the files in the kernel's caches, until the kernel drops
//! them.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

use crate::common::eventually;
use crate::common::forgetting::forget_unused;
use crate::common::passthrough::Mounted;

const DIRECTORIES: usize = 100;
const FILES: usize = 500;
/// A limit that is far below the number of files in the tree.
const FEW_DESCRIPTORS: usize = 3000;

/// Creates 50 000 files.
fn grow(root: &Path) {
    for directory in 0..DIRECTORIES {
        let directory = root.join(format!("directory-{directory}"));
        fs::create_dir(&directory).expect("a directory");
        for file in 0..FILES {
            File::create_new(directory.join(format!("file-{file}"))).expect("created");
        }
    }
}

/// Reads the attributes of every file, as `find` does. Returns the number of files.
fn walk(root: &Path) -> usize {
    let directories = fs::read_dir(root).expect("a listing");
    let files = directories.flat_map(|directory| fs::read_dir(directory.expect("an entry").path()).expect("a listing"));
    files.filter(|file| file.as_ref().expect("an entry").metadata().expect("attributes").nlink() == 1).count()
}

fn descriptors(server: u32) -> usize {
    fs::read_dir(format!("/proc/{server}/fd")).expect("a process").count()
}

/// The server's memory in KiB that it does not share with the servers of other pods: anonymous memory, and the state of the
/// volume in shared memory.
fn memory(server: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{server}/status")).expect("a process");
    let figure = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).expect("a figure");
        line.split_whitespace().nth(1).expect("a number").parse::<u64>().expect("a number")
    };
    figure("RssAnon:") + figure("RssShmem:")
}

#[test]
fn a_walk_over_many_files_needs_few_descriptors() {
    let mounted = Mounted::new();
    let idle = descriptors(mounted.server());
    grow(mounted.source());
    assert_eq!(walk(mounted.path()), DIRECTORIES * FILES);
    let most = descriptors(mounted.server());
    assert!(most < FEW_DESCRIPTORS, "{most} descriptors");
    // The server has descriptors for open files and directories, until they are closed.
    let open: Vec<_> = (0..500).map(|file| mounted.path().join(format!("directory-0/file-{file}"))).collect();
    let open: Vec<_> = open.iter().map(|path| File::open(path).expect("a file")).collect();
    assert!(descriptors(mounted.server()) < most + 2 * open.len() + 100);
    drop(open);
    // When the test counted `most`, the kernel may have dropped directories because of another test's use of memory.
    eventually("the descriptors are closed", || descriptors(mounted.server()) <= most + 50);
    forget_unused(mounted.path());
    eventually("the descriptors of dropped directories are closed", || {
        forget_unused(mounted.path());
        descriptors(mounted.server()) <= idle + 50
    });
}

#[test]
fn a_known_file_takes_at_most_200_bytes_and_is_given_back() {
    let mounted = Mounted::new();
    fs::create_dir(mounted.source().join("few")).expect("a directory");
    File::create_new(mounted.source().join("few/file")).expect("created");
    assert_eq!(walk(mounted.path()), 1);
    let idle = memory(mounted.server());
    grow(mounted.source());
    assert_eq!(walk(mounted.path()), DIRECTORIES * FILES + 1);
    let known = memory(mounted.server()) - idle;
    // Threads, listings and tables of directories take at most 1 MiB more.
    let most = (DIRECTORIES * FILES * 200) as u64 / 1024 + 1024;
    assert!(known < most, "{known} KiB for 50 000 files");
    // The server keeps the last 8192 files that the kernel has dropped, for file handles.
    eventually("the server has released the memory of dropped files", || {
        forget_unused(mounted.path());
        memory(mounted.server()) < idle + 5120
    });
}

#[test]
fn forgotten_nodes_take_no_memory() {
    let mounted = Mounted::new();
    grow(mounted.source());
    let mut sizes = Vec::new();
    for _ in 0..4 {
        assert_eq!(walk(mounted.path()), DIRECTORIES * FILES);
        forget_unused(mounted.path());
        sizes.push(memory(mounted.server()));
    }
    // The first walks fill caches that later walks use. 50 000 nodes that stay would take megabytes after each walk.
    let (early, late) = (sizes[1], sizes[3]);
    assert!(late < early + 4096, "KiB after each walk: {sizes:?}");
}

#[test]
fn a_tree_that_is_made_and_removed_leaves_nothing_open() {
    let mounted = Mounted::new();
    let idle = descriptors(mounted.server());
    for round in 0..20 {
        let root = mounted.path().join(format!("round-{round}"));
        fs::create_dir(&root).expect("a directory");
        for file in 0..100 {
            fs::write(root.join(format!("file-{file}")), "content").expect("written");
        }
        fs::remove_dir_all(&root).expect("removed");
    }
    eventually("everything is closed", || descriptors(mounted.server()) <= idle + 10);
}

#[test]
fn a_server_without_descriptors_logs_it_and_continues_when_it_has_some() {
    let mounted = Mounted::new();
    for file in 0..100 {
        fs::write(mounted.source().join(format!("file-{file}")), "content").expect("written");
    }
    let server = Pid::from_raw(mounted.server().cast_signed());
    let few = Some(descriptors(mounted.server()) as u64 + 20);
    // The server has inherited the hard limit of this process, and keeps it.
    let few = Rlimit { current: few, ..getrlimit(Resource::Nofile) };
    let previous = prlimit(server, Resource::Nofile, few).expect("root may");
    let open = |file| File::open(mounted.path().join(format!("file-{file}")));
    let opened: Vec<_> = (0..100).map(open).collect();
    let refused = opened.iter().filter_map(|file| file.as_ref().err()?.raw_os_error()).collect::<Vec<_>>();
    assert!(!refused.is_empty() && refused.iter().all(|error| *error == libc::EMFILE), "{refused:?}");
    assert!(opened.iter().any(Result::is_ok), "the server had some descriptors");
    drop(opened);
    eventually("there are descriptors again", || (0..100).all(|file| open(file).is_ok()));
    prlimit(server, Resource::Nofile, previous).expect("root may");
    assert_eq!(fs::read_to_string(mounted.path().join("file-99")).expect("a file"), "content");
}
