//! Tests: the log refuses invalid content of its memory, keeps the bytes that a connection still sends, and gives memory back when it
//! is empty.

use rustix::io::pwrite;

use super::*;

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
