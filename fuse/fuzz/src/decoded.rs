//! Properties of all decoded values.

use podfs_nfs::rpc::Slice;
use podfs_nfs::xdr::{Malformed, XdrReader, XdrWriter};

use super::memory;

/// The part of a message that the decoded value contains.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kept {
    /// The whole message.
    All,
    /// All except data and entries that no caller can use.
    Usable,
}

/// The decoded value.
#[derive(Clone, Copy, Debug)]
pub struct Checked<T> {
    /// The value.
    pub value: T,
    /// Whether the message has no bytes after the value.
    pub is_all: bool,
}

/// Decodes `bytes` with `read`, and checks that the decoder allocates at most `most` bytes, that it reads no byte beyond the end
/// and needs the last byte that it reads, and that it decodes the bytes that `write` makes of the value as the same value.
pub fn check<T>(
    bytes: &Slice,
    most: usize,
    kept: Kept,
    read: impl Fn(&mut XdrReader<'_>, &Slice) -> Result<T, Malformed>,
    write: impl Fn(&mut XdrWriter, &T),
) -> Option<Checked<T>> {
    let mut reader = XdrReader::new(bytes);
    let (value, peak) = memory::peak(|| read(&mut reader, bytes));
    assert!(peak <= most, "{peak} bytes were allocated for a message of {}", bytes.len());
    let end = reader.position();
    assert!(end <= bytes.len(), "it was read to the byte {end} of {}", bytes.len());
    let value = value.ok()?;
    assert!(end.is_multiple_of(4), "it was read to the byte {end}");

    if end > 0 {
        let short = bytes.part(0..end - 1);
        assert!(read(&mut XdrReader::new(&short), &short).is_err(), "the last byte is not needed");
    }

    let write = |value| {
        let mut writer = XdrWriter::default();
        write(&mut writer, value);
        writer.into_bytes()
    };
    let written = write(&value);
    match kept {
        Kept::All => assert_eq!(written.len(), end, "it is as long as before"),
        Kept::Usable => assert!(written.len() <= end, "it has become longer"),
    }
    let written = Slice::from(written);
    let mut reader = XdrReader::new(&written);
    let same = read(&mut reader, &written).expect("what was written can be read");
    assert_eq!(reader.position(), written.len(), "it is read to its end");
    assert_eq!(write(&same), *written, "it is read as what was written");
    Some(Checked { value, is_all: end == bytes.len() })
}

/// Asserts that `part` is in the memory of `whole`, and not only equal to a part of it.
pub fn assert_within(part: &[u8], whole: &[u8]) {
    let (part, whole) = (part.as_ptr_range(), whole.as_ptr_range());
    assert!(whole.start <= part.start && part.end <= whole.end, "it does not lie within the message");
}
