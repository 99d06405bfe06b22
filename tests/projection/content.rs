//! Bytes and listings are exact and complete, and from one generation, also while the volume is updated.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use podfs_fuse::projection::{FileEntry, ImageLayout};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;

use crate::common::set_on_drop::SetOnDrop;
use crate::common::tree::names;
use crate::common::{DIRECTORIES, Served, plain_root};

const READ: OFlags = OFlags::RDONLY.union(OFlags::CLOEXEC);

fn commit_bytes(served: &mut Served, payload: &[(&str, Vec<u8>)]) {
    let entries = payload.iter().map(|(path, content)| FileEntry { path, content, mode: 0o644, uid: 0, gid: 0 });
    let layout = ImageLayout::new(entries, DIRECTORIES).expect("a tree");
    served.projection.commit(&layout, DIRECTORIES).expect("a commit");
}

/// Bytes of which no two pages are equal.
fn bytes(size: usize) -> Vec<u8> {
    (0_u64..).flat_map(|number| number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).take(size).collect()
}

/// Makes the kernel drop the cached pages of a file.
fn drop_cache(file: &File) {
    posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).expect("advice");
}

#[test]
fn binary_content_is_exact() {
    // AW-23: all byte values, a short ELF header, an empty file, 1 MiB, and sizes around a page.
    let mut served = Served::new(&plain_root());
    let mut elf = b"\x7fELF\x02\x01\x01\0".to_vec();
    elf.extend(bytes(117));
    let mut payload = vec![("elf", elf), ("empty", Vec::new()), ("big", bytes(1 << 20))];
    payload.push(("every", (0..=u8::MAX).collect()));
    payload.extend([("4095", 4095), ("4096", 4096), ("4097", 4097)].map(|(path, size)| (path, bytes(size))));
    commit_bytes(&mut served, &payload);
    assert_eq!(payload[0].1.len(), 125);
    for (path, content) in &payload {
        assert!(fs::read(served.path().join(path)).expect("a file") == *content, "{path}");
        assert_eq!(fs::metadata(served.path().join(path)).expect("a file").len(), content.len() as u64);
    }
    let compared = Command::new("cmp").arg(served.path().join("big")).arg(served.path().join("..data/big")).status();
    assert!(compared.expect("cmp runs").success());
}

#[test]
fn a_payload_of_several_mebibytes_is_exact() {
    // AW-23: the test reads each file as a whole, and in pieces at odd offsets.
    let mut served = Served::new(&plain_root());
    let paths: Vec<_> = (0..12).map(|number| format!("dir-{}/key-{number}", number % 3)).collect();
    let payload: Vec<_> =
        paths.iter().zip(0..).map(|(path, number)| (path.as_str(), bytes((1 << 20) - 1000 * number))).collect();
    commit_bytes(&mut served, &payload);
    for (path, content) in &payload {
        let file = File::open(served.path().join(path)).expect("a file");
        for (offset, size) in [(0, 1), (4095, 2), (123_456, 70_001), (content.len() - 3, 3)] {
            let mut piece = vec![0; size];
            file.read_exact_at(&mut piece, offset as u64).expect("a piece");
            assert!(piece == content[offset..offset + size], "{path} at {offset}");
        }
        assert_eq!(file.read_at(&mut [0; 9], content.len() as u64).expect("the end"), 0);
        assert!(fs::read(served.path().join(path)).expect("a file") == *content, "{path}");
    }
}

#[test]
fn an_open_file_keeps_its_bytes() {
    // AW-13: also when the kernel has dropped the bytes and requests them again, long after the file was removed.
    let mut served = Served::new(&plain_root());
    let old = bytes(100_000);
    commit_bytes(&mut served, &[("a", old.clone()), ("never-read", old.clone())]);
    let open = |path: &str| File::open(served.path().join(path)).expect("a file");
    let (mut file, mut unread) = (open("a"), open("never-read"));
    file.read_exact(&mut [0; 10]).expect("the first bytes");
    for round in 0..5 {
        commit_bytes(&mut served, &[("a", bytes(round))]);
    }
    for round in 0..2 {
        drop_cache(&file);
        let before = served.projection.requests().expect("the server answers");
        let mut content = vec![0; old.len()];
        file.read_exact_at(&mut content, 0).expect("the file is whole");
        assert!(content == old, "round {round}");
        assert!(served.projection.requests().expect("the server answers") > before, "nothing was cached");
    }
    let mut content = Vec::new();
    unread.read_to_end(&mut content).expect("the file is whole");
    assert!(content == old);
    assert_eq!(fs::read(served.path().join("a")).expect("the present file"), bytes(4));
}

#[test]
fn a_directory_handle_never_shows_another_generation() {
    // AW-13: through a handle on the old generation's directory, open files can be read, other files do not exist, and
    // no file is of the new generation.
    let mut served = Served::with(&[("a", "old"), ("sub/b", "old")]);
    let data = openat(CWD, served.path().join("..data"), READ | OFlags::DIRECTORY, Mode::empty()).expect("a directory");
    let opened = File::from(openat(&data, "a", READ, Mode::empty()).expect("a file"));
    served.commit(&[("a", "new"), ("sub/b", "new")]);
    for path in ["a", "sub/b", "sub"] {
        assert_eq!(openat(&data, path, READ, Mode::empty()).err(), Some(Errno::NOENT), "{path}");
    }
    let mut old = [0; 3];
    opened.read_exact_at(&mut old, 0).expect("the bytes");
    assert_eq!(&old, b"old");
    assert_eq!(entries(&data, 1 << 15), Vec::<String>::new(), "the removed directory is empty");
}

#[test]
fn a_mapped_file_keeps_its_bytes() {
    // AW-13: a program that maps its configuration or a shared library from a volume.
    let mut served = Served::with(&[("a", "old")]);
    let file = File::open(served.path().join("a")).expect("a file");
    // SAFETY: the mapping is read-only and private, and is unmapped after its only use.
    let first = unsafe {
        let address = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0);
        assert_ne!(address, libc::MAP_FAILED);
        served.commit(&[("a", "new")]);
        let first = address.cast::<[u8; 3]>().read_volatile();
        libc::munmap(address, 4096);
        first
    };
    assert_eq!(&first, b"old");
}

#[test]
fn a_large_directory_is_listed_whole() {
    // This holds for the directory of the links and for the directory of the files, with buffers of any size.
    let keys: Vec<_> = (0..5000).map(|number| format!("key-{number:04}-{}", "x".repeat(number % 50))).collect();
    let payload: Vec<_> = keys.iter().map(|key| (key.as_str(), "")).collect();
    let served = Served::with(&payload);
    let expected: BTreeSet<_> = keys.iter().cloned().collect();
    for directory in [served.path().to_owned(), served.path().join("..data")] {
        for buffer in [128, 4096, 1 << 16] {
            let listed = list(&directory, buffer);
            let keys: BTreeSet<_> = listed.iter().filter(|name| !name.starts_with("..")).cloned().collect();
            assert_eq!(keys, expected);
            let duplicates = listed.len() - listed.iter().collect::<BTreeSet<_>>().len();
            assert_eq!(duplicates, 0);
        }
    }
    assert!(fs::metadata(served.path().join(&keys[4999])).expect("a file").is_file());
}

#[test]
fn the_order_of_a_listing_is_stable() {
    // FU-15: two listings have the same order, and names that stay keep their order after an update.
    let mut served = Served::with(&[("m", "1"), ("c", "1"), ("z", "1"), ("a/x", "1")]);
    let stays = |listed: Vec<String>| -> Vec<String> {
        listed.into_iter().filter(|name| ["m", "c", "z", "a", "..data"].contains(&name.as_str())).collect()
    };
    let first = list(served.path(), 128);
    assert_eq!(list(served.path(), 1 << 15), first);
    served.commit(&[("m", "2"), ("b", "2"), ("c", "2"), ("z", "2"), ("a/x", "2"), ("zz", "2")]);
    assert_eq!(stays(list(served.path(), 128)), stays(first));
}

#[test]
fn a_listing_that_crosses_switches_shows_each_name_once() {
    // FU-15: a small buffer makes one listing of the root take hundreds of calls.
    let stable: Vec<_> = (0..200).map(|number| format!("stable-{number}")).collect();
    let mut served = Served::new(&plain_root());
    let path = served.path().to_owned();
    let mut commit = |round: usize| {
        let text = round.to_string();
        let mut payload: Vec<_> = stable.iter().map(|name| (name.as_str(), text.as_str())).collect();
        let new_keys: Vec<_> = (0..10).map(|number| format!("coming-{round}-{number}")).collect();
        payload.extend(new_keys.iter().map(|name| (name.as_str(), "")));
        served.commit(&payload);
    };
    commit(0);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let set_done = SetOnDrop(&done);
        let lister = scope.spawn(|| {
            let mut listings = 0;
            while !done.load(Ordering::Relaxed) || listings == 0 {
                let listed = list(&path, 128);
                let distinct: BTreeSet<_> = listed.iter().collect();
                assert_eq!(distinct.len(), listed.len(), "a name was listed twice: {listed:?}");
                for name in &stable {
                    assert!(distinct.contains(name), "{name} was skipped");
                }
                assert!(distinct.contains(&"..data".to_owned()), "..data was skipped");
                listings += 1;
            }
        });
        (1..200).for_each(&mut commit);
        drop(set_done);
        lister.join().expect("every listing is correct");
    });
    assert_eq!(names(&path).len(), 200 + 10 + 2);
}

/// The names in a directory without `.` and `..`, read with a buffer of this size.
fn list(directory: &Path, buffer: usize) -> Vec<String> {
    entries(&openat(CWD, directory, READ | OFlags::DIRECTORY, Mode::empty()).expect("a directory"), buffer)
}

fn entries(directory: &OwnedFd, buffer: usize) -> Vec<String> {
    let mut buffer = Vec::with_capacity(buffer);
    let mut entries = rustix::fs::RawDir::new(directory, buffer.spare_capacity_mut());
    let mut names = Vec::new();
    while let Some(entry) = entries.next() {
        let name = match entry {
            Ok(entry) => entry.file_name().to_string_lossy().into_owned(),
            // The directory was removed.
            Err(Errno::NOENT) => break,
            Err(error) => panic!("cannot list: {error}"),
        };
        if name != "." && name != ".." {
            names.push(name);
        }
    }
    names
}
