//! Records of a stream (RFC 5531, section 11): a message comes in fragments, each behind its length.
//!
//! The client reads into a buffer of the pool. When the buffer holds whole records, the client hands these out as slices of it, and
//! continues in another buffer, to which it moves the beginning of the next record. It knows the end of a long record once the
//! record has begun, and reads nothing beyond it; so it never moves the data of a READ.

use std::ops::Range;
use std::rc::Rc;

use super::pool::{LARGE, Pool, PooledBuffer, SMALL};
use super::slice::Slice;

/// The longest record that the client accepts: a buffer holds it, its mark and the next mark.
pub const MAX_RECORD: usize = LARGE - 2 * MARK;
/// Most fragments of a record. Servers that send fragments at all send a few kilobytes in each.
pub const MAX_FRAGMENTS: u32 = 512;
/// The bit of a fragment's length that says that no other follows.
const LAST: u32 = 1 << 31;
/// The length of a fragment's length.
const MARK: usize = 4;

/// The stream does not consist of records, or has longer ones than the client takes.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum StreamError {
    /// A record of more than [`MAX_RECORD`] bytes.
    #[error("it sent a record that is too long")]
    TooLong,
    /// A record of more fragments than a server would send.
    #[error("it sent a record in too many fragments")]
    TooManyFragments,
    /// A record that is no reply. The code that parses the record finds it.
    #[error("it sent a record that is no reply")]
    NoReply,
}

/// The bytes that were read from a stream and not handed out yet.
#[derive(Debug)]
pub struct Incoming {
    pool: Pool,
    /// Begins with the mark of a record's first fragment.
    buffer: Option<PooledBuffer>,
    /// The number of bytes that were read into the buffer.
    filled: usize,
    record: PartialRecord,
    /// The length of the last record; the next one is probably as long.
    expected: usize,
    /// Whole records in the buffer.
    whole: Vec<Range<usize>>,
}

/// The record that is being read.
#[derive(Clone, Copy, Debug, Default)]
struct PartialRecord {
    /// The offset in the buffer of the mark of its first fragment.
    begin: usize,
    /// The end of the received bytes, without the marks of later fragments.
    end: usize,
    fragments: u32,
    /// The number of bytes that are missing from the fragment.
    missing: usize,
    last: bool,
}

impl Incoming {
    /// Starts a new stream, with no bytes.
    pub fn new(pool: Pool) -> Self {
        Self { pool, buffer: None, filled: 0, record: PartialRecord::default(), expected: 0, whole: Vec::new() }
    }

    /// Returns the buffer for the next read from the stream.
    pub fn read_buffer(&mut self) -> &mut [u8] {
        let record = &self.record;
        // The end of the record; the end of the fragment if others follow.
        let known = if record.fragments > 0 { record.end + record.missing } else { self.expected + MARK };
        let may_grow = record.fragments > 0 && !record.last;
        let wanted = if may_grow { known + MARK } else { known };
        if self.buffer.as_ref().is_none_or(|buffer| buffer.len() < wanted) {
            let mut larger = self.pool.buffer(wanted);
            if let Some(smaller) = &self.buffer {
                larger[..self.filled].copy_from_slice(&smaller[..self.filled]);
            }
            self.buffer = Some(larger);
        }
        let buffer = self.buffer.as_mut().expect("it was just made");
        // Reads a long record only to its end. Otherwise reads as much as fits.
        let end = if known > SMALL && !may_grow { known } else { buffer.len() };
        &mut buffer[self.filled..end]
    }

    /// Takes `count` bytes that were read into [`Self::read_buffer`], and calls `each` with each whole record.
    ///
    /// # Errors
    /// When the stream cannot be parsed, after which it is useless. And what `each` returns.
    pub fn read(
        &mut self,
        count: usize,
        mut each: impl FnMut(Slice) -> Result<(), StreamError>,
    ) -> Result<(), StreamError> {
        self.filled += count;
        while let Some(record) = self.next_record()? {
            self.whole.push(record);
        }
        if self.whole.is_empty() {
            return Ok(());
        }
        let full = Slice::new(Rc::new(self.buffer.take().expect("records stand in it")));
        let partial = self.record.begin..self.filled;
        self.expected = self.whole.last().map_or(0, Range::len);
        (self.filled, self.record.begin, self.record.end) = (partial.len(), 0, self.record.end - partial.start);
        if !partial.is_empty() {
            let mut next = self.pool.buffer(partial.len());
            next[..partial.len()].copy_from_slice(&full[partial]);
            self.buffer = Some(next);
        }
        self.whole.drain(..).try_for_each(|range| each(full.part(range)))
    }

    /// Parses the received bytes to the end of a record.
    fn next_record(&mut self) -> Result<Option<Range<usize>>, StreamError> {
        let Some(buffer) = &mut self.buffer else { return Ok(None) };
        let record = &mut self.record;
        loop {
            if record.missing == 0 {
                if record.last {
                    let body = record.begin + MARK..record.end;
                    *record = PartialRecord { begin: record.end, end: record.end, ..PartialRecord::default() };
                    return Ok(Some(body));
                }
                let Some(mark) = buffer[record.end..self.filled].first_chunk::<MARK>() else { return Ok(None) };
                let mark = u32::from_be_bytes(*mark);
                if record.fragments == 0 {
                    record.end += MARK;
                } else {
                    buffer.copy_within(record.end + MARK..self.filled, record.end);
                    self.filled -= MARK;
                }
                record.fragments += 1;
                record.missing = (mark & !LAST) as usize;
                record.last = mark & LAST != 0;
                if record.missing > MAX_RECORD || record.end - record.begin - MARK + record.missing > MAX_RECORD {
                    return Err(StreamError::TooLong);
                }
                if record.fragments > MAX_FRAGMENTS {
                    return Err(StreamError::TooManyFragments);
                }
            }
            let received = (self.filled - record.end).min(record.missing);
            record.end += received;
            record.missing -= received;
            if record.missing > 0 {
                return Ok(None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reads `stream` in pieces of at most `piece` bytes.
    fn records(stream: &[u8], piece: usize) -> Result<Vec<Vec<u8>>, StreamError> {
        let mut incoming = Incoming::new(Pool::default());
        let mut records = Vec::new();
        let mut rest = stream;
        while !rest.is_empty() {
            let room = incoming.read_buffer();
            let count = room.len().min(piece).min(rest.len());
            assert!(count > 0, "there is always room");
            room[..count].copy_from_slice(&rest[..count]);
            rest = &rest[count..];
            incoming.read(count, |record| {
                records.push(record.to_vec());
                Ok(())
            })?;
        }
        Ok(records)
    }

    fn fragment(bytes: &[u8], last: bool) -> Vec<u8> {
        let mark = bytes.len() as u32 | if last { LAST } else { 0 };
        [&mark.to_be_bytes(), bytes].concat()
    }

    proptest! {
        #[test]
        fn records_are_found_however_they_are_cut(
            records_in in prop::collection::vec(prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 1..5), 0..20),
            piece in 1usize..3000,
        ) {
            let mut stream = Vec::new();
            for fragments in &records_in {
                for (index, bytes) in fragments.iter().enumerate() {
                    stream.extend(fragment(bytes, index + 1 == fragments.len()));
                }
            }
            let whole: Vec<Vec<u8>> = records_in.iter().map(|fragments| fragments.concat()).collect();
            prop_assert_eq!(records(&stream, piece), Ok(whole));
        }

        #[test]
        fn any_bytes_are_read_or_refused(stream in prop::collection::vec(any::<u8>(), 0..5000), piece in 1usize..5000) {
            let _any = records(&stream, piece);
        }
    }

    #[test]
    fn long_records_are_found_however_they_are_cut() {
        let long: Vec<u8> = (0..MAX_RECORD).map(|at| at as u8).collect();
        let in_fragments: Vec<u8> = long.chunks(9000).flat_map(|chunk| fragment(chunk, false)).collect();
        let stream = [fragment(&long, true), in_fragments, fragment(b"", true), fragment(b"short", true)].concat();
        for piece in [1000, 65_536, 65_537, 3 << 20] {
            let records = records(&stream, piece).expect("they are records");
            assert!(records == [&long[..], &long, b"short"], "in pieces of {piece}");
        }
    }

    #[test]
    fn too_long_a_record_is_refused_before_it_is_read() {
        let mark = (MAX_RECORD as u32 + 1) | LAST;
        assert_eq!(records(&mark.to_be_bytes(), 4), Err(StreamError::TooLong));
        assert_eq!(records(&[0xff; 4], 4), Err(StreamError::TooLong));
        let half = vec![0; MAX_RECORD / 2 + 1];
        assert_eq!(records(&[fragment(&half, false), fragment(&half, true)].concat(), 5000), Err(StreamError::TooLong));
        assert_eq!(records(&[0; 4 * 600], 100), Err(StreamError::TooManyFragments));
    }
}
