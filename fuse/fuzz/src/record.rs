//! Records of a stream. The decoder gets the stream in pieces of any size, and must find the same records as a few obvious lines.
//!
//! The first [`PIECES`] bytes of an input are the sizes of the pieces. The other bytes are instructions that make the stream, so
//! that a few bytes make long records and many fragments.

use std::collections::VecDeque;

use podfs_nfs::rpc::pool::{LARGE, SMALL};
use podfs_nfs::rpc::record::{Incoming, MAX_FRAGMENTS, MAX_RECORD, StreamError};
use podfs_nfs::rpc::{Pool, Slice};

use super::{memory, stream};

const LAST: u32 = 1 << 31;
/// The number of bytes with the sizes of the pieces.
const PIECES: usize = 4;
/// Lengths in instructions from this one on mean longer lengths, up to one that is too long.
const LONG: usize = 0xc000;
/// The length of a stream after which further instructions are ignored.
const MAX_STREAM: usize = 2 * MAX_RECORD;
/// The number of records that stay in use while later ones are read.
const HELD: usize = 3;

/// Checks an input. Returns whether the whole input is valid: its last instruction is complete, and the stream has a record or an
/// error.
pub fn look(data: &[u8]) -> bool {
    let Some((pieces, instructions)) = data.split_first_chunk::<PIECES>() else { return false };
    let (made, are_whole) = make(instructions);
    // Pieces of single bytes of a long stream would take long, and test nothing new.
    let unit = 1 + made.len() / 4096;
    let pieces = pieces.map(usize::from).map(|piece| unit * if piece < 128 { piece + 1 } else { (piece - 127) * 521 });
    let known = Known::of(&made);

    let mut found = 0;
    let mut held: VecDeque<(usize, Slice)> = VecDeque::with_capacity(HELD + 1);
    let (outcome, peak) = memory::peak(|| {
        let mut incoming = Incoming::new(Pool::default());
        let outcome = stream::feed(&mut incoming, &made, pieces.into_iter().cycle(), |record| {
            assert!(found < known.records.len() && *record == *known.records[found], "the record {found} is another");
            held.push_back((found, record));
            found += 1;
            if held.len() > HELD {
                let (index, record) = held.pop_front().expect("it is not empty");
                assert!(*record == *known.records[index], "the record {index} was written over");
            }
        });
        assert!(held.iter().all(|(index, record)| **record == *known.records[*index]), "a record was written over");
        outcome
    });
    assert_eq!(outcome.err(), known.garbage);
    assert!(known.garbage.is_some() || found == known.records.len(), "{found} of {} records", known.records.len());

    // Beside the records in use: two buffers for the record that is being read, the lists of the pool, and the positions of the
    // complete records of one read.
    let buffer = if known.longest + 8 > SMALL { SMALL + LARGE } else { SMALL };
    let bound = (HELD + 2) * buffer + 4096 + 12 * made.len();
    assert!(peak <= bound, "{peak} bytes were allocated for a stream of {}", made.len());
    are_whole && (known.garbage.is_some() || found > 0)
}

/// Makes the stream. Returns also whether the last instruction is complete.
fn make(mut instructions: &[u8]) -> (Vec<u8>, bool) {
    let (mut made, mut are_whole) = (Vec::new(), true);
    while let [instruction, behind @ ..] = instructions
        && made.len() < MAX_STREAM
    {
        let argument = usize::from(instruction >> 2);
        instructions = match (instruction & 3, behind) {
            // The following bytes, unchanged.
            (0, behind) => {
                are_whole = argument <= behind.len();
                let (bytes, behind) = behind.split_at(argument.min(behind.len()));
                made.extend_from_slice(bytes);
                behind
            }
            // Many short fragments, none of them the last.
            (1, [length, behind @ ..]) => {
                (0..16 * (argument + 1)).for_each(|_| fragment(&mut made, usize::from(length & 7), false));
                behind
            }
            // One fragment.
            (kind @ (2 | 3), [first, second, behind @ ..]) => {
                let length = usize::from(u16::from_be_bytes([*first, *second]));
                let length = if length < LONG { length } else { (length - LONG) * 72 };
                fragment(&mut made, length, kind == 3);
                behind
            }
            _ => {
                are_whole = false;
                &[]
            }
        };
    }
    (made, are_whole)
}

/// Adds a fragment. Its bytes depend on their positions in the stream.
fn fragment(made: &mut Vec<u8>, length: usize, last: bool) {
    let mark = u32::try_from(length).expect("lengths are short") | if last { LAST } else { 0 };
    made.extend_from_slice(&mark.to_be_bytes());
    let end = made.len() + length;
    while made.len() < end {
        let part = &PATTERN[made.len() % PATTERN.len()..];
        made.extend_from_slice(&part[..part.len().min(end - made.len())]);
    }
}

/// The length is a prime number, so that bytes at a wrong position differ from the right ones.
static PATTERN: [u8; 65_537] = {
    let mut pattern = [0; 65_537];
    let mut at = 0;
    while at < pattern.len() {
        pattern[at] = (at ^ (at >> 8)) as u8;
        at += 1;
    }
    pattern
};

/// The content of a stream.
#[derive(Default)]
struct Known {
    records: Vec<Vec<u8>>,
    /// The error in the rest of the stream.
    garbage: Option<StreamError>,
    /// The length of the longest record that was begun.
    longest: usize,
}

impl Known {
    fn of(mut rest: &[u8]) -> Self {
        let mut known = Self::default();
        let (mut record, mut fragments) = (Vec::new(), 0);
        while let Some((mark, behind)) = rest.split_first_chunk() {
            let mark = u32::from_be_bytes(*mark);
            let length = (mark & !LAST) as usize;
            fragments += 1;
            if record.len() + length > MAX_RECORD {
                known.garbage = Some(StreamError::TooLong);
                break;
            }
            if fragments > MAX_FRAGMENTS {
                known.garbage = Some(StreamError::TooManyFragments);
                break;
            }
            known.longest = known.longest.max(record.len() + length);
            let Some((bytes, behind)) = behind.split_at_checked(length) else { break };
            record.extend_from_slice(bytes);
            rest = behind;
            if mark & LAST != 0 {
                known.records.push(std::mem::take(&mut record));
                fragments = 0;
            }
        }
        known
    }
}
