//! Golden files in the unit tests of formats: bytes that another version of podfs reads (`tests/golden/README.md`).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};
use rustix::time::Timespec;

use super::in_flight::FileMark;
use super::{Region, RegionError, VolumeKind};

/// The bytes of a golden file.
macro_rules! golden {
    ($name:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/", $name))
    };
}
pub(crate) use golden;

/// A sealed memory file of `length` bytes that begins with these bytes, as another process hands it over. A golden file has no zeros
/// at its end.
pub(crate) fn memory_file(bytes: &[u8], length: usize) -> OwnedFd {
    let file = memfd_create("golden", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a file");
    ftruncate(&file, length as u64).expect("its length");
    pwrite(&file, bytes, 0).expect("written");
    fcntl_add_seals(&file, SealFlags::SHRINK).expect("sealed");
    file
}

/// All bytes of a memory file.
pub(crate) fn content(file: impl AsFd) -> Vec<u8> {
    let mut bytes = vec![0; fstat(&file).expect("attributes").st_size as usize];
    assert_eq!(pread(&file, &mut bytes, 0).expect("read"), bytes.len());
    bytes
}

/// Fails if these bytes, without zeros at their end, are not those of the golden file `name`.
#[track_caller]
pub(crate) fn assert_golden(name: &str, golden: &[u8], bytes: &[u8]) {
    let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    let bytes = &bytes[..end];
    if bytes == golden {
        return;
    }
    let place = std::env::temp_dir().join(name);
    std::fs::write(&place, bytes).expect("written");
    let differs = bytes.iter().zip(golden).position(|(one, other)| one != other).unwrap_or(end.min(golden.len()));
    panic!(
        "another version of podfs reads {name}, and this one writes other bytes from {differs:#x} on (see {}): give the changed \
         format a new number and a golden file of its own, keep this file, and test that podfs still reads it",
        place.display()
    );
}

/// A region in which each field of the header has a value.
pub(crate) fn region(kind: VolumeKind) -> Arc<Region> {
    let region = Arc::new(Region::create(kind).expect("a region"));
    let header = region.header();
    region.set_accepted(0x0102_0304_0506_0708);
    region.set_session_thread(9);
    header.requests.store(10, Relaxed);
    header.applied.store(11, Relaxed);
    let counters = &header.counters;
    [&counters.data_path, &counters.backing].into_iter().zip(1..).for_each(|(word, value)| word.store(value, Relaxed));
    let words = [&counters.next_node, &counters.last_handle, &counters.next_mount, &counters.used];
    words.into_iter().zip(14..).for_each(|(word, value)| word.store(value, Relaxed));
    let words = [&counters.redo.cell, &counters.redo.charged, &counters.redo.used];
    words.into_iter().zip(18..).for_each(|(word, value)| word.store(value, Relaxed));
    let words = [&header.opens.opens, &header.opens.lost, &header.opens.reported, &header.calls.seed];
    words.into_iter().zip(21..).for_each(|(word, value)| word.store(value, Relaxed));
    let words = [&header.silence.since, &header.limit, &header.root_free];
    words.into_iter().zip(25..).for_each(|(word, value)| word.store(value, Relaxed));
    let slots = region.in_flight();
    let at = Timespec { tv_sec: 28, tv_nsec: 29 };
    slots.slot(0).take(30);
    slots.slot(0).begin(Some(at), 31);
    slots.collect_replays();
    slots.slot(1).set_thread(32);
    slots.slot(1).take(34);
    slots.slot(1).begin(Some(at), 35);
    slots.slot(2).take(36);
    slots.slot(2).begin_with(37, FileMark::new(38, Some(39)));
    region.waits().add(40);
    region.counts().request(41);
    region.counts().commits.add(Duration::from_millis(2));
    region.counts().propagations.add(Duration::from_secs(31));
    region
}

/// Adopts a region from its golden bytes, and fails if its header has other values than [`region`] has given it.
pub(crate) fn adopted(golden: &[u8], kind: VolumeKind) -> Arc<Region> {
    let length = golden.len().next_multiple_of(4096);
    let region = Region::adopt(memory_file(golden, length)).expect("today's program reads it");
    assert_eq!((region.kind(), region.accepted(), region.applied()), (kind, Some(0x0102_0304_0506_0708), 11));
    assert_eq!((region.session_thread(), region.requests()), (Some(9), 11));
    assert_eq!((region.opens().counted().opens, region.opens().unreported()), (21, 0));
    assert!(region.silent_since().is_some());
    assert_eq!(region.in_flight().busy().collect::<Vec<_>>(), [(32, 34), (0, 36)]);
    assert_eq!(region.in_flight().all_to_replay().collect::<Vec<_>>(), [30]);
    let begun = region.in_flight().earlier(30).expect("begun");
    assert_eq!((begun.at, begun.note, begun.file), (Timespec { tv_sec: 28, tv_nsec: 29 }, 31, None));
    assert_eq!(region.in_flight().slot(2).begun().and_then(|begun| begun.file), Some(FileMark::new(38, Some(39))));
    assert_eq!(region.waits().all().collect::<Vec<_>>(), [40]);
    assert_eq!(region.counts().commits.distribution().groups[2], 1);
    Arc::new(region)
}

/// Fails unless a memory file with these bytes, of which a later podfs has changed a number to `number`, is refused. `adopt` gets
/// the changed file. No byte of the file may be changed. Returns the sentence.
#[track_caller]
pub(crate) fn refused_with<T, E: std::fmt::Display>(
    golden: &[u8],
    (offset, number): (usize, u32),
    length: usize,
    adopt: impl FnOnce(OwnedFd) -> Result<T, E>,
) -> String {
    let mut bytes = golden.to_vec();
    bytes[offset..offset + 4].copy_from_slice(&number.to_ne_bytes());
    let file = memory_file(&bytes, length);
    bytes.resize(length, 0);
    let refused = adopt(file.try_clone().expect("a descriptor")).err().expect("it is refused").to_string();
    assert!(content(&file) == bytes, "the refused file was changed");
    refused
}

/// Fails unless a region with another layout, kind or cell size is refused.
pub(crate) fn assert_unknown_is_refused(golden: &[u8]) {
    let adopt = |file: OwnedFd| -> Result<Region, RegionError> { Region::adopt(file) };
    let length = golden.len().next_multiple_of(4096);
    let sentence = refused_with(golden, (8, 3), length, adopt);
    assert!(sentence.contains("newer podfs (layout 3; this one reads up to 2)"), "{sentence}");
    for (offset, number, what) in [(8, 0, "layout"), (12, 256, "cell size"), (16, 9, "kind")] {
        let sentence = refused_with(golden, (offset, number), length, adopt);
        assert!(sentence.contains(&format!("its {what} is {number}")), "{sentence}");
    }
}
