//! Listings of directories through a mount, also while the directory changes.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString, OsString};
use std::fs::{self, File};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirEntryExt, FileTypeExt, MetadataExt, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::common::forgetting::forget_unused;
use crate::common::passthrough::Mounted;
use crate::common::twins::{names, the_mount_does_as_the_disk};

const MANY: usize = 10_000;

/// A directory stream of the C library, which has positions.
struct Directory(*mut libc::DIR);

impl Directory {
    fn open(path: &Path) -> Self {
        let path = CString::new(path.as_os_str().as_bytes()).expect("a path");
        // SAFETY: the path ends with a zero byte.
        let directory = unsafe { libc::opendir(path.as_ptr()) };
        assert!(!directory.is_null(), "{path:?} opens");
        Self(directory)
    }

    /// The next name.
    fn next(&mut self) -> Option<OsString> {
        // SAFETY: the stream is open, and the entry is copied before the next call.
        unsafe {
            let entry = libc::readdir(self.0);
            let name = (!entry.is_null()).then(|| CStr::from_ptr((*entry).d_name.as_ptr()));
            name.map(|name| OsString::from_vec(name.to_bytes().to_vec()))
        }
    }

    /// The remaining names, without `.` and `..`.
    fn remaining(&mut self) -> Vec<OsString> {
        std::iter::from_fn(|| self.next()).filter(|name| name != "." && name != "..").collect()
    }

    fn position(&mut self) -> libc::c_long {
        // SAFETY: the stream is open.
        unsafe { libc::telldir(self.0) }
    }

    fn seek(&mut self, position: libc::c_long) {
        // SAFETY: the stream is open, and the position is from this stream.
        unsafe { libc::seekdir(self.0, position) }
    }

    fn rewind(&mut self) {
        // SAFETY: the stream is open.
        unsafe { libc::rewinddir(self.0) }
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // SAFETY: the stream is open, and no code uses it any more.
        unsafe { libc::closedir(self.0) };
    }
}

fn fill(directory: &Path, count: usize) -> BTreeSet<OsString> {
    let names = (0..count).map(|number| OsString::from(format!("entry-{number}")));
    names.inspect(|name| drop(File::create_new(directory.join(name)).expect("created"))).collect()
}

/// A hostPath volume, and a private emptyDir, whose directories the kernel opens without OPENDIR.
fn both() -> [Mounted; 2] {
    [Mounted::new(), Mounted::alone()]
}

#[test]
fn ten_thousand_entries_are_listed_once_each() {
    for mounted in both() {
        let expected = fill(mounted.path(), MANY);
        for _ in 0..2 {
            let listed = Directory::open(mounted.path()).remaining();
            assert_eq!(listed.len(), MANY);
            assert_eq!(listed.into_iter().collect::<BTreeSet<_>>(), expected);
        }
        assert_eq!(fs::read_dir(mounted.path()).expect("a listing").count(), MANY);
    }
}

#[test]
fn a_listing_has_each_lasting_name_once_while_others_change() {
    let mounted = Mounted::new();
    // One thread changes the directory through the mount, the other on the host.
    listings_have_each_lasting_name_once(&mounted, [mounted.path(), mounted.source()]);
}

#[test]
fn a_listing_of_a_private_empty_dir_has_each_lasting_name_once_while_others_change() {
    let mounted = Mounted::alone();
    listings_have_each_lasting_name_once(&mounted, [mounted.path(), mounted.path()]);
}

/// Lists the directory while two threads change it, each through one of `paths`.
fn listings_have_each_lasting_name_once(mounted: &Mounted, paths: [&Path; 2]) {
    let stays = fill(paths[1], MANY);
    let ended = AtomicBool::new(false);
    let change = |directory: &Path, prefix: &str| {
        for number in (0..).take_while(|_| !ended.load(Ordering::Relaxed)) {
            let path = directory.join(format!("{prefix}-{}", number % 500));
            fs::write(&path, "").expect("written");
            let other = directory.join(format!("{prefix}-renamed-{}", number % 300));
            fs::rename(path, &other).expect("renamed");
            if number % 3 == 0 {
                fs::remove_file(other).expect("removed");
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| change(paths[0], "one"));
        scope.spawn(|| change(paths[1], "other"));
        let listings = scope.spawn(|| {
            for _ in 0..10 {
                let mut counts = BTreeMap::<OsString, usize>::new();
                Directory::open(mounted.path())
                    .remaining()
                    .into_iter()
                    .for_each(|name| *counts.entry(name).or_default() += 1);
                let missing = stays.iter().filter(|name| !counts.contains_key(*name)).count();
                let doubled = stays.iter().filter(|name| counts.get(*name).is_some_and(|count| *count > 1)).count();
                assert_eq!((missing, doubled), (0, 0), "missing and doubled");
            }
        });
        let listings = listings.join();
        ended.store(true, Ordering::Relaxed);
        listings.expect("every listing is complete");
    });
}

#[test]
fn a_directory_is_emptied_while_it_is_listed() {
    for mounted in both() {
        fill(mounted.path(), 3000);
        let mut directory = Directory::open(mounted.path());
        let mut removed = 0;
        while let Some(name) = directory.next() {
            if name != "." && name != ".." {
                fs::remove_file(mounted.path().join(name)).expect("each name is listed once");
                removed += 1;
            }
        }
        assert_eq!(removed, 3000);
        assert!(names(mounted.source()).is_empty());
    }
}

#[test]
fn positions_stay_good_while_entries_go() {
    for mounted in both() {
        fill(mounted.path(), 2000);
        let mut directory = Directory::open(mounted.path());
        let mut entries = Vec::new();
        loop {
            let position = directory.position();
            let Some(name) = directory.next() else { break };
            entries.push((position, name));
        }
        // One of ten entries is removed. From each position, the other entries follow in the same order as before.
        let is_removed = |name: &OsString| name.as_bytes().starts_with(b"entry") && name.as_bytes().ends_with(b"3");
        for (_, name) in entries.iter().filter(|(_, name)| is_removed(name)) {
            fs::remove_file(mounted.path().join(name)).expect("removed");
        }
        for index in (0..entries.len()).step_by(97) {
            directory.seek(entries[index].0);
            let expected: Vec<_> =
                entries[index..].iter().map(|(_, name)| name).filter(|name| !is_removed(name)).take(20).collect();
            let actual: Vec<_> =
                std::iter::from_fn(|| directory.next()).filter(|name| !is_removed(name)).take(20).collect();
            assert_eq!(actual.iter().collect::<Vec<_>>(), expected, "from entry {index}");
        }
    }
}

#[test]
fn a_rewound_listing_shows_new_names() {
    for mounted in both() {
        fill(mounted.path(), 10);
        let mut directory = Directory::open(mounted.path());
        assert_eq!(directory.remaining().len(), 10);
        fs::write(mounted.path().join("new"), "").expect("written");
        assert!(directory.remaining().is_empty());
        directory.rewind();
        let again = directory.remaining();
        assert_eq!(again.len(), 11);
        assert!(again.iter().any(|name| name == "new"));
    }
}

#[test]
fn two_readers_of_a_directory_have_their_own_positions() {
    for mounted in both() {
        fill(mounted.path(), 1000);
        let (mut one, mut two) = (Directory::open(mounted.path()), Directory::open(mounted.path()));
        for _ in 0..100 {
            one.next().expect("an entry");
        }
        assert_eq!(two.remaining().len(), 1000);
        let remaining = one.remaining().len();
        // The hundred entries may include `.` and `..`, which `remaining` does not count.
        assert!((900..=902).contains(&remaining), "{remaining} of 1000 remain after 100");
    }
}

#[test]
fn a_listing_has_the_types_and_inodes_of_stat() {
    the_mount_does_as_the_disk(|root, answers| {
        fs::create_dir(root.join("directory")).expect("a directory");
        fs::write(root.join("file"), "").expect("written");
        fs::hard_link(root.join("file"), root.join("same")).expect("a link");
        symlink("file", root.join("link")).expect("a link");
        nix::unistd::mkfifo(&root.join("fifo"), nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
        let mut entries: Vec<_> =
            fs::read_dir(root).expect("a listing").map(|entry| entry.expect("an entry")).collect();
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in &entries {
            let kind = entry.file_type().expect("a kind");
            answers.see("kind", (kind.is_dir(), kind.is_file(), kind.is_symlink(), kind.is_fifo()));
            let metadata = entry.metadata().expect("attributes");
            answers.see("the inode is stat's", entry.ino() == metadata.ino());
        }
        let inodes: BTreeSet<_> = entries.iter().map(DirEntryExt::ino).collect();
        answers.see("inodes", inodes.len());
        let mut dots = Directory::open(&root.join("directory"));
        let mut dots: Vec<_> = std::iter::from_fn(|| dots.next()).collect();
        dots.sort_unstable();
        answers.see("an empty directory", dots);
    });
}

#[test]
fn inodes_stay_the_same_when_the_kernel_forgets() {
    let mounted = Mounted::new();
    fs::create_dir(mounted.source().join("directory")).expect("a directory");
    fill(&mounted.source().join("directory"), 20);
    let inodes = || {
        let paths = names(&mounted.path().join("directory"))
            .into_iter()
            .map(|name| mounted.path().join("directory").join(name));
        paths.map(|path| fs::metadata(path).expect("a file").ino()).collect::<Vec<_>>()
    };
    let before = inodes();
    forget_unused(mounted.path());
    assert_eq!(inodes(), before);
}

#[test]
fn a_directory_that_is_gone_lists_as_empty() {
    for mounted in both() {
        let path = mounted.path().join("directory");
        fs::create_dir(&path).expect("a directory");
        fill(&path, 5);
        let mut open = Directory::open(&path);
        fs::remove_dir_all(&path).expect("removed");
        open.rewind();
        assert_eq!(open.remaining(), Vec::<OsString>::new());
    }
}
