//! What a region keeps, and what it refuses.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::{pread, pwrite};

use super::*;

fn again(region: &Region) -> Result<Region, RegionError> {
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

/// What a new region begins with.
fn header(kind: Kind) -> Vec<u8> {
    let region = Region::create(kind).expect("a region");
    let mut bytes = vec![0; header::SIZE];
    assert_eq!(pread(region.as_fd(), &mut bytes, 0).expect("read"), header::SIZE);
    bytes
}

/// A region with one word of its header changed.
fn changed(offset: usize, value: u32) -> Result<Region, RegionError> {
    let mut bytes = header(Kind::Passthrough);
    bytes[offset..offset + 4].copy_from_slice(&value.to_ne_bytes());
    Region::adopt(file(&bytes, bytes.len() as u64, true))
}

#[test]
fn what_one_process_writes_another_reads() {
    for kind in [Kind::Projection, Kind::Passthrough] {
        let region = Region::create(kind).expect("a region");
        let other = again(&region).expect("the same");
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
    let region = Region::create(Kind::Passthrough).expect("a region");
    assert!(ftruncate(region.as_fd(), 0).is_err());
    let open = Region::adopt(file(&header(Kind::Passthrough), header::SIZE as u64, false));
    assert!(matches!(open, Err(RegionError::NotSealed)));
    let pipe = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()).expect("a device");
    assert!(matches!(Region::adopt(pipe), Err(RegionError::NotSealed)));
}

#[test]
fn a_region_that_ends_too_early_or_begins_wrongly_is_refused() {
    let bytes = header(Kind::Passthrough);
    for length in [0, 1, 8, header::SIZE as u64 - 1] {
        let short = Region::adopt(file(&bytes[..length as usize], length, true));
        assert!(matches!(short, Err(RegionError::Truncated(told)) if told as u64 == length));
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
    assert!(sentence.contains("newer podfs (layout 3; this one reads up to 1)"), "{sentence}");
}

#[test]
fn seats_of_any_content_are_harmless() {
    let mut bytes = header(Kind::Passthrough);
    let seats = std::mem::offset_of!(header::Header, seats);
    bytes[seats..].fill(0xff);
    let region = Region::adopt(file(&bytes, bytes.len() as u64, true)).expect("a region");
    region.seats().carry();
    assert!(region.seats().all_carried().count() > 0);
    assert!(region.seats().all_carried().all(|unique| region.seats().earlier(unique).is_none()));
    region.seats().drop_all_carried();
    assert_eq!(region.waits().add(4), None, "all places are taken");
    region.waits().clear();
    assert_eq!(region.waits().add(4), Some(0));
}

#[test]
fn requests_are_counted_by_their_numbers_and_durations_in_groups() {
    let region = Region::create(Kind::Projection).expect("a region");
    let other = again(&region).expect("the same");
    for opcode in [1, 1, 45, 63, 64, u32::MAX] {
        region.counts().request(opcode);
    }
    // Served by a program that does not tell them apart.
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
    let region = Region::create(Kind::Nfs).expect("a region");
    let other = again(&region).expect("the same");
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

proptest! {
    #[test]
    fn random_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..2 * header::SIZE)) {
        let length = bytes.len() as u64;
        prop_assert!(Region::adopt(file(&bytes, length, true)).is_err());
    }

    #[test]
    fn a_header_with_random_bytes_in_it_is_refused_or_harmless(
        at in 0..header::SIZE, bytes in prop::collection::vec(any::<u8>(), 1..64), more in 0_u64..100_000,
    ) {
        let mut whole = header(Kind::Passthrough);
        let end = whole.len().min(at + bytes.len());
        whole[at..end].copy_from_slice(&bytes[..end - at]);
        if let Ok(region) = Region::adopt(file(&whole, whole.len() as u64 + more, true)) {
            region.seats().carry();
            prop_assert!(region.seats().all_carried().count() <= 64);
            prop_assert!(region.as_fd().as_raw_fd() >= 0);
        }
    }
}
