//! Runs the same calls on the disk and through a mount of it, and compares results and files.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt::Debug;
use std::fs::{self, Metadata};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::passthrough::{Mounted, disk_directory};

/// The results of a scenario, one line per call.
#[derive(Default, PartialEq, Eq)]
pub struct Answers(Vec<String>);

impl Answers {
    /// Records the result of a call.
    pub fn note<T: Debug, E: Into<io::Error>>(&mut self, what: &str, result: Result<T, E>) {
        let answer = match result.map_err(Into::into) {
            Ok(value) => format!("{value:?}"),
            Err(error) => format!("{error}"),
        };
        self.0.push(format!("{what}: {answer}"));
    }

    /// Records a value that the scenario has observed.
    pub fn see(&mut self, what: &str, value: impl Debug) {
        self.0.push(format!("{what}: {value:?}"));
    }
}

/// Runs `scenario` in an empty directory of the disk and in an empty volume. The calls must have the same results in
/// both, and the same files must remain: as the mount shows them, and as they are on the disk. This compares three
/// volumes: one that the kernel reads and writes without the server, one of which the kernel caches everything, and one
/// that the server reads and writes.
#[track_caller]
pub fn the_mount_does_as_the_disk(scenario: impl Fn(&Path, &mut Answers)) {
    compare(&Mounted::new(), &scenario);
    println!("the kernel caches everything:");
    compare(&Mounted::alone(), &scenario);
    println!("the server reads and writes:");
    compare(&Mounted::with_limit(1 << 40), &scenario);
}

/// As [`the_mount_does_as_the_disk`], only with the volume that the kernel reads and writes without the server: for
/// calls that differ from the disk in the other volumes.
#[track_caller]
pub fn the_kernel_does_as_the_disk(scenario: impl Fn(&Path, &mut Answers)) {
    compare(&Mounted::new(), &scenario);
}

#[track_caller]
fn compare(mounted: &Mounted, scenario: &impl Fn(&Path, &mut Answers)) {
    let native = disk_directory();
    let (mut expected, mut actual) = (Answers::default(), Answers::default());
    scenario(native.path(), &mut expected);
    assert!(!expected.0.is_empty(), "the scenario records no results");
    scenario(mounted.path(), &mut actual);
    same_lines("the result of a call", &actual.0, &expected.0);
    let remaining = snapshot(native.path());
    same_lines("the content of the mount", &lines(&snapshot(mounted.path())), &lines(&remaining));
    same_lines("the content of the source", &lines(&snapshot(mounted.source())), &lines(&remaining));
}

#[track_caller]
fn same_lines(what: &str, got: &[String], expected: &[String]) {
    let mut differences = String::new();
    let mut before = "the start";
    for (got, expected) in got.iter().zip(expected) {
        if got != expected {
            differences += &format!("\n  after  {before}\n  mount: {got}\n  disk:  {expected}");
        }
        before = expected;
    }
    assert!(got == expected, "{what} differs, {} lines for {}:{differences}", got.len(), expected.len());
}

fn lines(snapshot: &Snapshot) -> Vec<String> {
    snapshot.iter().map(|(path, entry)| format!("{}: {entry}", path.display())).collect()
}

/// Entries by path: kind, mode, owner, links, size, content, extended attributes.
pub type Snapshot = BTreeMap<PathBuf, String>;

/// A directory and everything in it, without times and inode numbers.
pub fn snapshot(root: &Path) -> Snapshot {
    let mut snapshot = Snapshot::new();
    collect(root, Path::new("."), &mut snapshot);
    snapshot
}

fn collect(path: &Path, shown: &Path, snapshot: &mut Snapshot) {
    let metadata = fs::symlink_metadata(path).expect("an entry that is listed can be looked at");
    snapshot.insert(shown.to_owned(), describe(path, &metadata));
    if metadata.is_dir() {
        for name in names(path) {
            collect(&path.join(&name), &shown.join(&name), snapshot);
        }
    }
}

fn describe(path: &Path, metadata: &Metadata) -> String {
    let kind = metadata.file_type();
    let content = if kind.is_file() {
        let bytes = fs::read(path).expect("a file");
        let mut hasher = DefaultHasher::new();
        bytes.hash(&mut hasher);
        let shown = if bytes.len() <= 64 { format!("{:?}", OsStr::from_bytes(&bytes)) } else { String::new() };
        format!("{} bytes {:016x} {shown}", bytes.len(), hasher.finish())
    } else if kind.is_symlink() {
        format!("to {:?}", fs::read_link(path).expect("a link"))
    } else if kind.is_block_device() || kind.is_char_device() {
        format!("device {:x}", metadata.rdev())
    } else {
        String::new()
    };
    let (mode, uid, gid, links) = (metadata.mode(), metadata.uid(), metadata.gid(), metadata.nlink());
    format!("{mode:o} {uid}:{gid} {links} links {content} {:?}", attributes(path))
}

/// Names in a directory, sorted.
pub fn names(directory: &Path) -> Vec<OsString> {
    let entries = fs::read_dir(directory).expect("a listing");
    let mut names: Vec<_> = entries.map(|entry| entry.expect("an entry").file_name()).collect();
    names.sort_unstable();
    names
}

/// Extended attributes, POSIX ACLs included.
pub fn attributes(path: &Path) -> BTreeMap<OsString, OsString> {
    let list = attribute_names(path).expect("a list of attributes");
    let attribute = |name: OsString| {
        let mut value = vec![0; 65536];
        let length = rustix::fs::lgetxattr(path, &name, &mut value).expect("an attribute that is listed");
        value.truncate(length);
        (name, OsString::from_vec(value))
    };
    list.into_iter().map(attribute).collect()
}

/// Names of extended attributes, sorted.
pub fn attribute_names(path: &Path) -> io::Result<Vec<OsString>> {
    let mut list = vec![0; 65536];
    let length = rustix::fs::llistxattr(path, &mut list)?;
    let names = list[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let mut names: Vec<_> = names.map(|name| OsString::from_vec(name.to_vec())).collect();
    names.sort_unstable();
    Ok(names)
}
