//! Random sequences of payloads: after each commit the volume shows the payload and nothing else. Meanwhile, threads
//! read the volume, and check that they never see two generations at once.

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

use crate::common::set_on_drop::SetOnDrop;
use crate::common::tree::{Files, files, names};
use crate::common::{Served, plain_root};

/// The files of a payload: path, size, mode.
type Draft = Vec<(String, usize, u16)>;

/// There are few names, so that paths stay, vanish, come back, and change between file and directory.
fn drafts() -> impl Strategy<Value = Vec<Draft>> {
    let name = prop_oneof![Just("a"), Just("b"), Just(".hidden"), Just("with blank"), Just("..odd")];
    let path = prop::collection::vec(name, 1..4).prop_map(|names| names.join("/"));
    let size = prop_oneof![0..64_usize, 4000..4200_usize, 9000..20_000_usize];
    let mode = prop_oneof![Just(0o644), Just(0o400), Just(0o755), Just(0o440)];
    prop::collection::vec(prop::collection::vec((path, size, mode), 0..12), 1..8)
}

/// The payload that a draft describes. It leaves out each path that the payload already has, each path that would be a
/// file and a directory, and each reserved name. Every file begins with the number of the payload.
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

/// The content of a file: the payload's number, repeated every sixteen bytes, and then the path.
fn content(number: usize, path: &str, size: usize) -> Vec<u8> {
    let mut content = format!("{number:015}\n").repeat(size / 16 + 1).into_bytes();
    content.extend(path.as_bytes());
    content
}

/// The number of the payload that a file belongs to. Fails if the file has lines of several payloads.
fn number_of(content: &[u8]) -> usize {
    let lines: Vec<_> = content.chunks_exact(16).filter(|chunk| chunk[15] == b'\n').collect();
    assert!(lines.windows(2).all(|pair| pair[0] == pair[1]), "a file has bytes of two payloads");
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

    fn is_running(&self) -> bool {
        !self.done.load(Ordering::SeqCst)
    }
}

const READ: OFlags = OFlags::RDONLY.union(OFlags::CLOEXEC);

/// Opens the directory `..data` again and again, and checks that all files read through one descriptor are of one
/// payload. That payload must not be older than the last one committed before the opening, and at most one newer than
/// the last one committed after it. Returns the number of files that the function has read.
fn read_generations(volume: &Path, progress: &Progress) -> usize {
    let mut read = 0;
    while progress.is_running() {
        let oldest = progress.committed();
        let Ok(data) = openat(CWD, volume.join("..data"), READ | OFlags::DIRECTORY, Mode::empty()) else {
            // The server removed the old generation after the kernel had resolved the link to it.
            continue;
        };
        let newest = progress.committed() + 1;
        let mut numbers = Vec::new();
        read_below(data, &mut numbers);
        assert!(numbers.windows(2).all(|pair| pair[0] == pair[1]), "two payloads in one directory: {numbers:?}");
        for number in &numbers {
            assert!((oldest..=newest).contains(number), "payload {number} is not in {oldest}..={newest}");
        }
        read += numbers.len();
    }
    read
}

/// Adds the payload number of each file below a directory. Skips files that are deleted meanwhile.
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
            if let Some(below) = open_if_exists(directory.as_fd(), &name, READ | OFlags::DIRECTORY) {
                read_below(below, numbers);
            }
        } else if let Some(file) = open_if_exists(directory.as_fd(), &name, READ) {
            let mut content = Vec::new();
            File::from(file).read_to_end(&mut content).expect("an open file can be read");
            assert!(content.ends_with(name.as_bytes()), "{name} has the content of another file");
            numbers.push(number_of(&content));
        }
    }
}

fn open_if_exists(directory: BorrowedFd<'_>, name: &str, flags: OFlags) -> Option<OwnedFd> {
    match openat(directory, name, flags, Mode::empty()) {
        Ok(file) => Some(file),
        Err(Errno::NOENT) => None,
        Err(error) => panic!("cannot open {name}: {error}"),
    }
}

/// Opens and reads files until the readers end, and keeps them open. At the end each file must still have the bytes
/// that it had when it was opened, also after the kernel has dropped its cached pages.
fn keep_files(volume: &Path, progress: &Progress) {
    let mut kept = Vec::new();
    while progress.is_running() {
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

/// Commits the payloads, and checks the volume after each. Returns the number of files that [`read_generations`] read
/// meanwhile.
fn check(drafts: &[Draft]) -> usize {
    let mut served = Served::new(&plain_root());
    let volume = served.path().to_owned();
    let progress = Progress::default();
    let mut shown: Option<Files> = None;
    thread::scope(|scope| {
        let set_done = SetOnDrop(&progress.done);
        let readers = [(); 2].map(|()| scope.spawn(|| read_generations(&volume, &progress)));
        scope.spawn(|| keep_files(&volume, &progress));
        for (draft, number) in drafts.iter().zip(1..) {
            let next = payload(number, draft);
            let commit = served.commit_files(&next);
            progress.committed.store(number, Ordering::SeqCst);
            // Only an empty payload can equal the one before, because the files of all others contain the payload's
            // number.
            assert_eq!(commit == Commit::Unchanged, shown.as_ref() == Some(&next), "payload {number}");
            assert_eq!(files(&volume), next, "payload {number}");
            assert_root(&served, &next);
            shown = Some(next);
        }
        drop(set_done);
        readers.into_iter().map(|reader| reader.join().expect("each descriptor showed one payload")).sum()
    })
}

/// Checks that the root directory has exactly the generation, `..data`, and one link per top-level name of the payload.
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
    // Each case makes a mount and starts a process.
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, max_shrink_iters: 64, ..Default::default() })]

    #[test]
    fn every_sequence_of_payloads_is_shown_as_it_is(drafts in drafts()) {
        // AW-01, AW-10, AW-12, AW-13, AW-14, AW-15, AW-25
        check(&drafts);
    }
}

#[test]
fn readers_never_see_two_payloads_at_once() {
    // AW-13, over many switches of a volume whose paths stay the same.
    let draft = |round: usize| (0..20).map(|key| (format!("dir-{}/key-{key}", key % 4), 5000 + round, 0o644)).collect();
    let drafts: Vec<Draft> = (0..200).map(draft).collect();
    assert!(check(&drafts) > 0, "the readers have read");
}
