//! Tests: the log refuses invalid content of its memory, keeps the bytes that a connection still sends, and gives memory back when it
//! is empty.

use rustix::io::pwrite;

use super::*;
use crate::region::golden::{assert_golden, content, golden, memory_file, refused_with};
use crate::region::shared::assert_layout;

const TARGET: WriteTarget = WriteTarget { node: NodeId(7), open: HandleId(1), offset: 0 };

#[test]
fn memory_is_given_back_only_when_nothing_is_in_the_log() {
    let log = Log::create(20).expect("a log");
    let blocks = || rustix::fs::fstat(&log).expect("a file").st_blocks;
    let data = vec![1; SEGMENT];
    let records: Vec<_> = (0..20).map(|_| log.append(TARGET, &data).expect("room").0).collect();
    let full = blocks();
    records[1..].iter().for_each(|record| log.free(*record));
    assert!(!log.return_memory() && blocks() == full, "something is in it");
    log.free(records[0]);
    assert!(log.return_memory() && blocks() < full / 2, "{} of {full} blocks", blocks());
    let again: Vec<_> = (0..20).map(|_| log.append(TARGET, &data)).collect();
    assert!(again.iter().all(Option::is_some) && blocks() == full);
}

#[test]
fn bytes_that_a_connection_still_sends_are_not_overwritten() {
    let log = Log::create(20).expect("a log");
    let data = vec![1; SEGMENT];
    let records: Vec<_> = (0..20).map(|_| log.append(TARGET, &data).expect("room").0).collect();
    let sent: Vec<_> = [0, 19].map(|number| log.piece(records[number], 0)).into();
    records.iter().for_each(|record| log.free(*record));
    assert!(!log.return_memory(), "pieces need their memory");
    let later: Vec<_> = std::iter::from_fn(|| log.append(TARGET, &vec![2; SEGMENT])).collect();
    assert_eq!(later.len(), 18);
    assert!(sent.iter().all(|piece| piece.as_ref() == data), "a piece has other data");
    drop(sent);
    assert!(log.append(TARGET, &data).is_some(), "the segment of a piece that was sent is used again");
}

#[test]
fn a_foreign_log_is_refused_and_invalid_entries_are_lost() {
    let log = Log::create(4).expect("a log");
    log.append(TARGET, b"data").expect("room");
    let file = log.as_fd().try_clone_to_owned().expect("a descriptor");
    // A length beyond the segment.
    pwrite(&file, &u32::MAX.to_ne_bytes(), 4096 + 4).expect("written");
    let (_, inherited) = Log::adopt(file.try_clone().expect("a descriptor")).expect("a log");
    assert!(inherited.is_empty());
    pwrite(&file, b"something", 0).expect("written");
    assert!(Log::adopt(file).is_err());
    assert!(Log::adopt(tempfile::tempfile().expect("a file").into()).is_err());
}

#[test]
fn a_log_has_the_bytes_that_other_versions_read() {
    assert_layout::<LogHeader>("magic 0, layout 8, segments 12; 16 bytes");
    assert_layout::<RecordCell>(
        "state 0, length 4, node 8, open 16, offset 24, sequence 32, place 40, spare 44; 64 bytes",
    );
    let log = Log::create(4).expect("a log");
    let target = WriteTarget { node: NodeId(7), open: HandleId(1), offset: 0x1234 };
    let (first, _) = log.append(target, b"first").expect("room");
    let (failed, _) = log.append(target, b"data").expect("room");
    log.fail(failed, Errno::DQUOT);
    assert_golden("nfs-log.bin", golden!("nfs-log.bin"), &content(&log));
    let (log, inherited) = Log::adopt(memory_file(golden!("nfs-log.bin"), HEADER + STRIDE)).expect("a log");
    let none = WriteTarget { offset: 0, ..target };
    let expected = [
        InheritedRecord { id: first, target, length: Ok(5), sequence: 1 },
        InheritedRecord { id: failed, target: none, length: Err(Errno::DQUOT), sequence: 2 },
    ];
    assert_eq!(inherited, expected);
    assert_eq!(log.piece(first, 0).as_ref(), b"first");
}

#[test]
fn a_log_of_another_version_is_refused_and_stays() {
    for (offset, number, what) in [(8, 0, "layout"), (8, 2, "layout"), (HEADER, 3, "a record of state")] {
        let refused = refused_with(golden!("nfs-log.bin"), (offset, number), HEADER + STRIDE, Log::adopt);
        let reason =
            format!("has {what} {number}, which another version of podfs wrote; serve the volume with that version");
        assert!(refused.contains(&reason), "{refused}");
    }
}
