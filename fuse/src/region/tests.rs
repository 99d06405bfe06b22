//! The content of a region, and invalid regions that are refused.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};

use super::cell_id::CellId;
use super::cells::{CellContent, CellRef, OwnedCell};
use super::golden::{adopted as adopted_golden, assert_golden, assert_unknown_is_refused, content, golden, region};
use super::shared::{assert_layout, shared};
use super::*;

shared! {
    /// A cell with a number.
    pub(crate) struct Number { tag: AtomicU32, number: AtomicU32 }
}

impl CellContent for Number {
    const TAG: u32 = 77;
}

fn number(region: &Arc<Region>, number: u32) -> CellRef<Number> {
    CellRef::new(region, |cell: &Number| cell.number.store(number, Relaxed)).expect("memory")
}

/// The cells that another process finds, and their content.
fn found(region: &Region) -> HashMap<CellId, u32> {
    let cells = region.cells();
    cells.tagged().map(|(id, _)| (id, cells.find::<Number>(id).expect("a number").number.load(Relaxed))).collect()
}

/// Pages of memory that the file has, its header included.
fn pages(region: &Region) -> i64 {
    fstat(region.as_fd()).expect("attributes").st_blocks * 512 / 4096
}

/// The region, as another process adopts it.
fn adopted(region: &Region) -> Result<Region, RegionError> {
    Region::adopt(region.as_fd().try_clone_to_owned().expect("a descriptor"))
}

/// A memory file that begins with `bytes`.
fn file(bytes: &[u8], length: u64, sealed: bool) -> OwnedFd {
    let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a file");
    ftruncate(&file, length).expect("its length");
    pwrite(&file, bytes, 0).expect("written");
    if sealed {
        fcntl_add_seals(&file, SealFlags::SHRINK).expect("sealed");
    }
    file
}

/// The header of a new region.
fn header(kind: VolumeKind) -> Vec<u8> {
    let region = Region::create(kind).expect("a region");
    let mut bytes = vec![0; header::SIZE];
    assert_eq!(pread(region.as_fd(), &mut bytes, 0).expect("read"), header::SIZE);
    bytes
}

/// A region with one word of its header changed.
fn changed(offset: usize, value: u32) -> Result<Region, RegionError> {
    let mut bytes = header(VolumeKind::Passthrough);
    bytes[offset..offset + 4].copy_from_slice(&value.to_ne_bytes());
    Region::adopt(file(&bytes, bytes.len() as u64, true))
}

#[test]
fn two_processes_share_a_region() {
    for kind in [VolumeKind::Projection, VolumeKind::Passthrough] {
        let region = Region::create(kind).expect("a region");
        let other = adopted(&region).expect("the same");
        assert_eq!((other.kind(), other.accepted(), other.session_thread()), (kind, None, None));
        region.set_accepted(3);
        region.set_session_thread(7);
        region.counts().request(1);
        region.apply();
        region.apply();
        assert_eq!(other.accepted(), Some(3));
        assert_eq!((other.session_thread(), other.requests(), other.applied()), (Some(7), 1, 2));
    }
}

#[test]
fn a_region_cannot_be_shrunk_and_may_not_be_shrinkable() {
    let region = Region::create(VolumeKind::Passthrough).expect("a region");
    assert!(ftruncate(region.as_fd(), 0).is_err());
    let open = Region::adopt(file(&header(VolumeKind::Passthrough), header::SIZE as u64, false));
    assert!(matches!(open, Err(RegionError::NotSealed)));
    let pipe = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()).expect("a device");
    assert!(matches!(Region::adopt(pipe), Err(RegionError::NotSealed)));
}

#[test]
fn a_region_that_ends_too_early_or_begins_wrongly_is_refused() {
    let bytes = header(VolumeKind::Passthrough);
    for length in [0, 1, 8, header::SIZE as u64 - 1] {
        let short = Region::adopt(file(&bytes[..length as usize], length, true));
        assert!(matches!(short, Err(RegionError::Truncated(bytes)) if bytes as u64 == length));
    }
    assert!(matches!(changed(0, 0), Err(RegionError::Foreign)));
    assert!(matches!(changed(8, 0), Err(RegionError::Damaged { what: "layout", value: 0 })));
    assert!(matches!(changed(12, 64), Err(RegionError::Damaged { what: "cell size", value: 64 })));
    assert!(matches!(changed(16, 9), Err(RegionError::Damaged { what: "kind", value: 9 })));
}

#[test]
fn a_region_of_a_newer_podfs_is_refused_by_name() {
    let error = changed(8, 3).expect_err("refused");
    let sentence = error.to_string();
    assert!(sentence.contains("newer podfs (layout 3; this one reads up to 2)"), "{sentence}");
}

#[test]
fn slots_of_any_content_are_harmless() {
    let mut bytes = header(VolumeKind::Passthrough);
    let slots = std::mem::offset_of!(header::Header, slots);
    bytes[slots..].fill(0xff);
    let region = Region::adopt(file(&bytes, bytes.len() as u64, true)).expect("a region");
    region.in_flight().collect_replays();
    assert!(region.in_flight().all_to_replay().count() > 0);
    assert!(region.in_flight().all_to_replay().all(|unique| region.in_flight().earlier(unique).is_none()));
    region.in_flight().drop_all_replays();
    assert_eq!(region.waits().add(4), None, "all places are taken");
    region.waits().clear();
    assert_eq!(region.waits().add(4), Some(0));
}

#[test]
fn requests_are_counted_by_their_numbers_and_durations_in_groups() {
    let region = Region::create(VolumeKind::Projection).expect("a region");
    let other = adopted(&region).expect("the same");
    for opcode in [1, 1, 45, 63, 64, u32::MAX] {
        region.counts().request(opcode);
    }
    // An earlier version of podfs served these, and did not count them by opcode.
    region.header().requests.store(10, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(other.requests(), 16);
    let counted: Vec<_> = other.counts().requests().filter(|(_, count)| *count > 0).collect();
    assert_eq!(counted, [(0, 2), (1, 2), (45, 1), (63, 1)]);
    for milliseconds in [0, 1, 2, 31_000] {
        region.counts().commits.add(std::time::Duration::from_millis(milliseconds));
    }
    let commits = other.counts().commits.distribution();
    assert_eq!(commits.groups, [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    assert_eq!(commits.seconds(), 31.003);
}

#[test]
fn a_silence_is_seen_with_its_age_by_another_process_and_ends() {
    let region = Region::create(VolumeKind::Nfs).expect("a region");
    let other = adopted(&region).expect("the same");
    assert_eq!(other.silent_since(), None);
    let begin = std::time::Instant::now();
    region.silence().set(begin.checked_sub(std::time::Duration::from_secs(7)).map(Moment::of));
    let since = other.silent_since().expect("it is silent");
    // Milliseconds are cut off.
    let most = std::time::Duration::from_millis(7001) + begin.elapsed();
    assert!((std::time::Duration::from_secs(7)..=most).contains(&since.elapsed()), "{since:?}");
    assert_eq!(other.silent_since(), Some(since), "it stays the same silence");
    region.silence().set(None);
    assert_eq!(other.silent_since(), None);
}

#[test]
fn memory_without_cells_in_use_is_given_back_and_taken_again() {
    const MANY: u32 = 20_000;
    let region = Arc::new(Region::create(VolumeKind::Passthrough).expect("a region"));
    let all: Vec<_> = (0..MANY).map(|n| number(&region, n)).collect();
    let (full, length) = (pages(&region), fstat(region.as_fd()).expect("attributes").st_size);
    assert!(full >= i64::from(MANY) * 128 / 4096, "{full}");
    let unused = all.iter().filter(|cell| cell.number.load(Relaxed) % 1000 != 0);
    unused.for_each(|cell| region.cells().free(cell.id()));
    let few = pages(&region);
    assert!(few < 60, "20 cells and a few spare pages, not {few} of {full} pages");

    // A successor finds the cells in use, allocates no memory when it reads the others, and fills the file again.
    let successor = Arc::new(adopted(&region).expect("the same"));
    let mut kept: Vec<_> = found(&successor).into_iter().collect();
    kept.sort_unstable();
    assert_eq!(kept.iter().map(|(_, n)| *n).collect::<Vec<_>>(), (0..MANY).step_by(1000).collect::<Vec<_>>());
    assert_eq!(pages(&region), few);
    successor.cells().keep_only(&kept.iter().map(|(id, _)| *id).collect::<Vec<_>>());
    assert!(OwnedCell::<Number>::new(&successor, |_| ()).is_ok(), "which ones are free is known");
    successor.take_over();
    let more: Vec<_> = (0..MANY - 20).map(|n| number(&successor, MANY + n)).collect();
    let whole = found(&successor);
    assert_eq!(whole.len(), MANY as usize + 1, "no cell is given twice");
    assert!(kept.iter().all(|(id, n)| whole[id] == *n), "those in use are left alone");
    let grown = fstat(region.as_fd()).expect("attributes").st_size;
    assert!(grown <= length + 16 * 4096, "the holes are used: {length}, then {grown}");
    more.iter().for_each(|cell| successor.cells().free(cell.id()));
    assert!(pages(&successor) < 60, "{}", pages(&successor));
}

#[test]
fn memory_of_an_adopted_region_is_given_back_only_after_the_takeover() {
    let region = Arc::new(Region::create(VolumeKind::Passthrough).expect("a region"));
    (0..5000).for_each(|n| drop(number(&region, n)));
    let full = pages(&region);
    let successor = adopted(&region).expect("the same");
    assert!(
        OwnedCell::<Number>::new(&Arc::new(adopted(&region).expect("the same")), |_| ()).is_err(),
        "nothing is known"
    );
    successor.cells().keep_only(&[]);
    assert_eq!(pages(&region), full);
    let lost: Vec<_> = found(&successor).into_keys().collect();
    successor.take_over();
    successor.cells().erase(&lost);
    assert!(pages(&region) < 40, "{}", pages(&region));
}

proptest! {
    /// A model of cells: which numbers are in use. Takeovers in between change nothing.
    #[test]
    fn cells_are_given_once_and_found_by_successors(steps in prop::collection::vec((0..4000_usize, 0..40_u8), 1..3000)) {
        let mut region = Arc::new(Region::create(VolumeKind::Passthrough).expect("a region"));
        let mut model: Vec<(CellId, u32)> = Vec::new();
        let mut next = 0;
        for (at, action) in steps {
            match action {
                0 => {
                    let mut kept: Vec<_> = model.iter().map(|(id, _)| *id).collect();
                    kept.sort_unstable();
                    region = Arc::new(adopted(&region).expect("the same"));
                    region.cells().keep_only(&kept);
                    region.take_over();
                }
                1..20 if !model.is_empty() => region.cells().free(model.swap_remove(at % model.len()).0),
                20..22 => {
                    let freed = model.split_off(model.len().min(at % 100));
                    freed.into_iter().for_each(|(id, _)| region.cells().free(id));
                }
                _ => {
                    (0..at % 60).for_each(|_| {
                        next += 1;
                        model.push((number(&region, next).id(), next));
                    });
                }
            }
        }
        let wanted: HashMap<_, _> = model.iter().copied().collect();
        prop_assert_eq!(wanted.len(), model.len());
        prop_assert_eq!(found(&adopted(&region).expect("the same")), wanted);
    }

    #[test]
    fn random_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..2 * header::SIZE)) {
        let length = bytes.len() as u64;
        prop_assert!(Region::adopt(file(&bytes, length, true)).is_err());
    }

    #[test]
    fn a_header_with_random_bytes_in_it_is_refused_or_harmless(
        at in 0..header::SIZE, bytes in prop::collection::vec(any::<u8>(), 1..64), more in 0_u64..100_000,
    ) {
        let mut whole = header(VolumeKind::Passthrough);
        let end = whole.len().min(at + bytes.len());
        whole[at..end].copy_from_slice(&bytes[..end - at]);
        if let Ok(region) = Region::adopt(file(&whole, whole.len() as u64 + more, true)) {
            region.in_flight().collect_replays();
            prop_assert!(region.in_flight().all_to_replay().count() <= 64);
            prop_assert!(region.as_fd().as_raw_fd() >= 0);
        }
    }
}

#[test]
fn the_header_of_a_region_has_the_layout_that_other_versions_read() {
    assert_layout::<Header>(
        "magic 0, layout 8, cell_size 12, kind 16, session_thread 20, accepted 24, requests 32, applied 40, counters 48, opens 112, calls 136, silence 144, limit 152, root_free 160, spare 168, slots 384, waits 4032, counts 8128; 8960 bytes",
    );
    assert_layout::<header::PassthroughCounters>(
        "data_path 0, backing 4, next_node 8, last_handle 16, next_mount 24, used 32, redo 40; 64 bytes",
    );
    assert_layout::<header::RedoRecord>("cell 0, charged 8, used 16; 24 bytes");
    assert_layout::<header::CallCounters>("seed 0; 8 bytes");
    assert_layout::<Opens>("opens 0, lost 8, reported 16; 24 bytes");
    assert_layout::<Silence>("since 0; 8 bytes");
    assert_layout::<Waits>("uniques 0; 4096 bytes");
    assert_layout::<InFlightSlots>("slots 0, to_replay 1024, order 3584; 3648 bytes");
    assert_layout::<Counts>("requests 0, commits 512, propagations 624, errors 736; 800 bytes");
    assert_layout::<in_flight::InFlightSlot>("unique 0, last 8, begun 16, thread 40; 64 bytes");
    assert_layout::<in_flight::BegunRecord>("seconds 0, note 8, nanoseconds 16, is_begun 20; 24 bytes");
    assert_layout::<in_flight::Replay>("unique 0, order 8, begun 16; 40 bytes");
    assert_layout::<counts::Durations>("groups 0, nanoseconds 104; 112 bytes");
    assert_eq!((MAGIC, LAYOUT, LAYOUT_OF_RINGS), (u64::from_le_bytes(*b"podfsvol"), 1, 2));
    assert_eq!((header::SIZE, CELL), (12_288, 128), "the cells of other versions are elsewhere");
}

#[test]
fn a_region_has_the_bytes_that_other_versions_read() {
    let kinds: [(VolumeKind, &str, &[u8]); 2] = [
        (VolumeKind::Projection, "region-projection.bin", golden!("region-projection.bin")),
        (VolumeKind::Live, "region-live.bin", golden!("region-live.bin")),
    ];
    for (kind, name, golden) in kinds {
        assert_golden(name, golden, &content(region(kind).as_fd()));
        adopted_golden(golden, kind);
        assert_unknown_is_refused(golden);
    }
}
