//! Random sequences of payloads against a model of a few lines: after each commit the volume shows the
//! payload and nothing else. Readers meanwhile check that they never see two generations at once.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use podfs_fuse::client::Commit;
use proptest::prelude::*;
use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, openat};
use rustix::io::Errno;

use crate::common::tree::{Files, files, names};
use crate::common::{Served, plain_root};

/// The files of a payload: path, size, mode.
type Draft = Vec<(String, usize, u16)>;

/// Few names, so that keys stay, go, come back, and change between file and directory.
fn drafts() -> impl Strategy<Value = Vec<Draft>> {
    let name = prop_oneof![Just("a"), Just("b"), Just(".hidden"), Just("with blank"), Just("..odd")];
    let path = prop::collection::vec(name, 1..4).prop_map(|names| names.join("/"));
    let size = prop_oneof![0..64_usize, 4000..4200_usize, 9000..20_000_usize];
    let mode = prop_oneof![Just(0o644), Just(0o400), Just(0o755), Just(0o440)];
    prop::collection::vec(prop::collection::vec((path, size, mode), 0..12), 1..8)
}

/// A payload: no path that is taken, none that is a file and a directory, no reserved name; every file
/// begins with the number of the payload.
fn payload(number: usize, draft: &Draft) -> Files {
    let mut payload = Files::new();
    for (path, size, mode) in draft.iter().filter(|(path, ..)| !path.starts_with("..")) {
        let conflicts = |other: &String| {
            other == path || other.starts_with(&format!("{path}/")) || path.starts_with(&format!("{other}/"))
        };
        if !payload.keys().any(conflicts) {
            payload.insert(path.clone(), (content(number, path, *size), *mode));
        }
    }
    payload
}

/// Every sixteen bytes say which payload they belong to.
fn content(number: usize, path: &str, size: usize) -> Vec<u8> {
    let mut content = format!("{number:015}\n").repeat(size / 16 + 1).into_bytes();
    content.extend(path.as_bytes());
    content
}

/// The number of the payload that these bytes belong to.
fn number_of(content: &[u8]) -> usize {
    let lines: Vec<_> = content.chunks_exact(16).filter(|chunk| chunk[15] == b'\n').collect();
    assert!(lines.windows(2).all(|pair| pair[0] == pair[1]), "a file of two payloads");
    let digits = str::from_utf8(&lines.first().expect("a line")[..15]).expect("digits");
    digits.parse().expect("a number")
}

/// The state that readers share with the committing thread.
#[derive(Default)]
struct Progress {
    /// The payload that was committed last, counted from 1; 0 before the first.
    committed: AtomicUsize,
    done: AtomicBool,
}

impl Progress {
    fn committed(&self) -> usize {
        self.committed.load(Ordering::SeqCst)
    }

    fn goes_on(&self) -> bool {
        !self.done.load(Ordering::SeqCst)
    }
}

const READ: OFlags = OFlags::RDONLY.union(OFlags::CLOEXEC);

/// Opens a directory handle on `..data` again and again; what can be read through one handle is of one
/// payload, no older than the last one committed before, and no newer than the next. Gives the number of
/// files it read.
fn read_generations(volume: &Path, progress: &Progress) -> usize {
    let mut read = 0;
    while progress.goes_on() {
        let oldest = progress.committed();
        let Ok(data) = openat(CWD, volume.join("..data"), READ | OFlags::DIRECTORY, Mode::empty()) else {
            // Removed between the resolution of the link and the opening.
            continue;
        };
        let newest = progress.committed() + 1;
        let mut numbers = Vec::new();
        read_below(data, &mut numbers);
        assert!(numbers.windows(2).all(|pair| pair[0] == pair[1]), "two payloads in one directory: {numbers:?}");
        for number in &numbers {
            assert!((oldest..=newest).contains(number), "payload {number} is none of {oldest} to {newest}");
        }
        read += numbers.len();
    }
    read
}

/// The inode numbers of all files below a directory. Skips files that are deleted meanwhile.
fn read_below(directory: OwnedFd, numbers: &mut Vec<usize>) {
    let entries = Dir::read_from(&directory).expect("a directory");
    for entry in entries {
        let entry = match entry {
            Ok(entry) => entry,
            Err(Errno::NOENT) => return,
            Err(error) => panic!("cannot list: {error}"),
        };
        if [&b"."[..], b".."].contains(&entry.file_name().to_bytes()) {
            continue;
        }
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type() == FileType::Directory {
            if let Some(below) = open_there(directory.as_fd(), &name, READ | OFlags::DIRECTORY) {
                read_below(below, numbers);
            }
        } else if let Some(file) = open_there(directory.as_fd(), &name, READ) {
            let mut content = Vec::new();
            File::from(file).read_to_end(&mut content).expect("an open file can be read");
            assert!(content.ends_with(name.as_bytes()), "{name} is another file");
            numbers.push(number_of(&content));
        }
    }
}

fn open_there(directory: BorrowedFd<'_>, name: &str, flags: OFlags) -> Option<OwnedFd> {
    match openat(directory, name, flags, Mode::empty()) {
        Ok(file) => Some(file),
        Err(Errno::NOENT) => None,
        Err(error) => panic!("cannot open {name}: {error}"),
    }
}

/// Keeps every file it opens until the end; each still has its bytes then, cached or not.
fn keep_files(volume: &Path, progress: &Progress) {
    let mut kept = Vec::new();
    while progress.goes_on() {
        let listed = fs::read_dir(volume).expect("a listing").flatten();
        for entry in listed.filter(|entry| !entry.file_name().to_string_lossy().starts_with("..")).take(3) {
            let Ok(mut file) = File::open(entry.path()) else { continue };
            if file.metadata().expect("attributes").is_file() && kept.len() < 500 {
                let mut content = Vec::new();
                file.read_to_end(&mut content).expect("an open file can be read");
                number_of(&content);
                kept.push((file, content));
            }
        }
    }
    for (file, content) in kept {
        posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).expect("advice");
        let mut again = vec![0; content.len()];
        file.read_exact_at(&mut again, 0).expect("an open file can be read");
        assert!(again == content, "an open file changed");
    }
}

/// Tells the readers to end, also when a check fails.
struct Ending<'a>(&'a Progress);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.done.store(true, Ordering::SeqCst);
    }
}

/// Commits the payloads and checks each; gives the number of files that were read meanwhile.
fn check(drafts: &[Draft]) -> usize {
    let mut served = Served::new(&plain_root());
    let volume = served.path().to_owned();
    let progress = Progress::default();
    let mut shown: Option<Files> = None;
    thread::scope(|scope| {
        let ending = Ending(&progress);
        let readers = [(); 2].map(|()| scope.spawn(|| read_generations(&volume, &progress)));
        scope.spawn(|| keep_files(&volume, &progress));
        for (draft, number) in drafts.iter().zip(1..) {
            let next = payload(number, draft);
            let commit = served.commit_files(&next);
            progress.committed.store(number, Ordering::SeqCst);
            // Only an empty payload can equal the one before: all others hold their number.
            assert_eq!(commit == Commit::Unchanged, shown.as_ref() == Some(&next), "payload {number}");
            assert_eq!(files(&volume), next, "payload {number}");
            assert_root(&served, &next);
            shown = Some(next);
        }
        drop(ending);
        readers.into_iter().map(|reader| reader.join().expect("what it read is of one payload")).sum()
    })
}

/// The generation, `..data`, and one link per top-level name.
fn assert_root(served: &Served, payload: &Files) {
    let generation = served.projection.generation().expect("a generation").to_string();
    let mut expected: Vec<_> = payload.keys().filter_map(|path| path.split('/').next()).map(str::to_owned).collect();
    expected.extend([generation, "..data".to_owned()]);
    expected.sort();
    expected.dedup();
    let mut listed = names(served.path());
    listed.sort();
    assert_eq!(listed, expected);
}

proptest! {
    // Each case is a mount and a process.
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, max_shrink_iters: 64, ..Default::default() })]

    #[test]
    fn every_sequence_of_payloads_is_shown_as_it_is(drafts in drafts()) {
        // AW-01, AW-10, AW-12, AW-13, AW-14, AW-15, AW-25
        check(&drafts);
    }
}

#[test]
fn readers_never_see_two_payloads_at_once() {
    // AW-13, over many switches of a volume whose keys stay.
    let draft = |round: usize| (0..20).map(|key| (format!("dir-{}/key-{key}", key % 4), 5000 + round, 0o644)).collect();
    let drafts: Vec<Draft> = (0..200).map(draft).collect();
    assert!(check(&drafts) > 0, "the readers have read");
}
