//! The memory of rings as a successor finds it.

use super::*;
use crate::region::golden::{self, golden};
use crate::region::shared::assert_layout;
use rustix::time::Timespec;

fn map(file: OwnedFd) -> io::Result<RingMemory> {
    RingMemory::map(file, &VolumeLabel::new("data"))
}

/// Memory as a server has it, with one entry.
fn mapped() -> (RingMemory, EntryId) {
    let supervisors = RingMemory::create(2).expect("memory");
    let memory = map(supervisors.file.try_clone().expect("a descriptor")).expect("a place");
    let entry = memory.add(1, true).expect("an entry");
    assert_eq!(memory.in_use().collect::<Vec<_>>(), [(entry, 1)]);
    assert_eq!(memory.entry_state(entry), EntryState::Nothing);
    (memory, entry)
}

/// Writes a request into an entry, as the kernel does it.
fn request_comes(memory: &RingMemory, entry: EntryId, unique: u64, operation: &[u8], payload: &[u8]) {
    let len = (size_of::<InHeader>() + operation.len() + payload.len()) as u32;
    let header = InHeader { len, unique, opcode: 1, ..Default::default() };
    let start = memory.bytes(entry);
    let put = |offset: usize, bytes: &[u8]| {
        // SAFETY: within the entry, which the test has alone.
        unsafe { start.add(offset).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    };
    put(0, header.as_bytes());
    put(OPERATION, operation);
    put(PAGE, payload);
    put(COMMIT_ID, &unique.to_ne_bytes());
    put(PAYLOAD_SIZE, &(payload.len() as u32).to_ne_bytes());
}

#[test]
fn a_request_is_one_piece_wherever_its_payload_is() {
    let (memory, entry) = mapped();
    for (unique, length) in [(2, 0), (4, 5), (6, 1900), (8, 2000), (10, 2100), (12, PAYLOAD)] {
        let (operation, payload) = ([7_u8; 16], vec![unique as u8; length]);
        request_comes(&memory, entry, unique, &operation, &payload);
        assert_eq!(memory.entry_state(entry), EntryState::Request(None), "no thread has looked at it");
        assert!(memory.take(entry));
        // SAFETY: it is answered below.
        let request = unsafe { memory.request(entry) };
        assert_eq!(request.len(), size_of::<InHeader>() + 16 + length);
        assert!(request[size_of::<InHeader>()..].starts_with(&operation) && request.ends_with(&payload));
        memory.answer(entry, 0, [b"a", b"b"]).expect("short");
        assert_eq!((memory.entry_state(entry), memory.finish(entry)), (EntryState::Answer, unique));
    }
    request_comes(&memory, entry, 14, &[0; 12], b"");
    assert!(!memory.take(entry), "no operation of the kernel has such a length");
}

#[test]
fn a_successor_finds_begun_and_answered_requests() {
    let (memory, entry) = mapped();
    request_comes(&memory, entry, 2, &[0; 8], b"name\0");
    assert!(memory.take(entry));
    memory.slot(entry).begin(None, 9);
    let EntryState::Request(Some(begun)) = memory.entry_state(entry) else { panic!("it was begun") };
    assert_eq!((begun.note, memory.unanswered().collect::<Vec<_>>()), (9, vec![2]));
    // The successor dies, too, and the next one finds the same.
    assert!(memory.take(entry));
    assert_eq!(memory.entry_state(entry), EntryState::Request(Some(begun)));
    memory.answer(entry, -libc::ENOENT, [&[], &[]]).expect("short");
    assert_eq!((memory.entry_state(entry), memory.unanswered().count()), (EntryState::Answer, 0));
    request_comes(&memory, entry, 4, &[0; 8], b"");
    assert_eq!(memory.entry_state(entry), EntryState::Request(None), "it is another request");
    assert!(memory.answer(entry, 0, [&vec![0; PAYLOAD], b"more"]).is_err(), "the kernel takes no more");
}

#[test]
fn every_server_maps_the_memory_at_one_address() {
    let supervisors = RingMemory::create(1).expect("memory");
    let copy = || supervisors.file.try_clone().expect("a descriptor");
    let first = map(copy()).expect("a place");
    let place = first.start as usize;
    let other = RingMemory::create(1).expect("memory");
    let other = map(other.file.try_clone().expect("a descriptor")).expect("another place");
    assert_ne!(other.start as usize, place);
    assert!(map(copy()).is_err(), "the place is taken");
    drop(first);
    assert_eq!(map(copy()).expect("it is free").start as usize, place);
}

#[test]
fn a_file_that_is_no_memory_of_rings_is_refused() {
    let file = memfd_create("podfs-rings", MemfdFlags::ALLOW_SEALING).expect("a file");
    ftruncate(&file, 1 << 20).expect("a length");
    assert!(map(file.try_clone().expect("a descriptor")).is_err(), "it could shrink");
    fcntl_add_seals(&file, SealFlags::SHRINK).expect("sealed");
    assert!(RingMemory::adopt(file).is_err(), "it begins with zeros");
    assert!(RingMemory::create(0).is_err() && RingMemory::create(MOST_QUEUES + 1).is_err());
}

#[test]
fn the_memory_has_the_layout_that_other_versions_read() {
    assert_layout::<RingHeader>("magic 0, layout 8, queues 12, address 16, state 24, used 28; 32 bytes");
    assert_layout::<EntryJournal>(
        "queue 0, state 4, unique 8, request 16, in_place 20, error 24, answer 28, answer_in_place 32, slot 64; 128 bytes",
    );
    let offsets = [PAGE, ENTRY, PAYLOAD, OPERATION, COMMIT_ID, PAYLOAD_SIZE, KERNELS, ANSWER, REQUEST];
    assert_eq!(offsets, [4096, 77_824, 73_728, 128, 264, 272, 288, 512, 1024], "give a changed layout a new LAYOUT");
    assert_eq!((MAGIC, LAYOUT), (u64::from_le_bytes(*b"podfsrng"), 1));
}

#[test]
fn the_memory_has_the_bytes_that_other_versions_read() {
    let supervisors = RingMemory::create(1).expect("memory");
    // No other test maps memory at the last place.
    supervisors.header().address.store((ADDRESS + (MOST_VOLUMES - 1) * APART) as u64, Relaxed);
    let memory = map(supervisors.file.try_clone().expect("a descriptor")).expect("a place");
    let entry = memory.add(0, true).expect("an entry");
    memory.set_state(RingState::InUse);
    request_comes(&memory, entry, 2, &[7; 8], b"name\0");
    assert!(memory.take(entry));
    let slot = memory.slot(entry);
    slot.set_thread(3);
    slot.begin(Some(Timespec { tv_sec: 4, tv_nsec: 5 }), 6);
    let begun = slot.begun();
    // SAFETY: nothing answers it.
    let request = unsafe { memory.request(entry) }.to_vec();
    let bytes = golden::content(&memory);
    golden::assert_golden("rings.bin", golden!("rings.bin"), &bytes);
    drop(memory);
    let memory = map(golden::memory_file(golden!("rings.bin"), bytes.len())).expect("today's program reads it");
    assert_eq!((memory.queues(), memory.state()), (1, RingState::InUse));
    assert_eq!(memory.in_use().collect::<Vec<_>>(), [(entry, 0)]);
    assert_eq!(memory.entry_state(entry), EntryState::Request(begun));
    assert_eq!(memory.busy().collect::<Vec<_>>(), [(3, 2)]);
    assert!(memory.take(entry));
    // SAFETY: it is answered below.
    assert_eq!(unsafe { memory.request(entry) }, request);
    memory.answer(entry, -libc::ENOENT, [b"a", b"b"]).expect("short");
    assert_eq!((memory.entry_state(entry), memory.finish(entry)), (EntryState::Answer, 2));
}

#[test]
fn memory_with_an_unknown_layout_is_refused_and_stays() {
    let length = golden::content(RingMemory::create(1).expect("memory")).len();
    for layout in [0, 2] {
        for adopt in [RingMemory::adopt, map] {
            let refused = golden::refused_with(golden!("rings.bin"), (8, layout), length, adopt);
            assert!(refused.contains(&format!("has layout {layout}, and this podfs reads layout 1")), "{refused}");
        }
    }
}
