//! Properties of all decoded values.

use podfs_nfs::rpc::Slice;
use podfs_nfs::xdr::{Malformed, XdrReader, XdrWriter};

use super::memory;

/// Whether the decoded value can be encoded again.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kept {
    /// Everything has its place in the value.
    All,
    /// Data and entries that no caller can use are left out.
    Usable,
}

/// The decoded value.
#[derive(Clone, Copy, Debug)]
pub struct Checked<T> {
    /// The value.
    pub value: T,
    /// Nothing stands behind it.
    pub is_all: bool,
}

/// Reads `bytes`, and looks at what comes of it: nothing was allocated beyond `most` bytes; no byte is missing that was
/// read, and none was read twice; and what `write` makes of the value is read as the same again.
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
    let again = Slice::from(written);
    let mut reader = XdrReader::new(&again);
    let same = read(&mut reader, &again).expect("what was written can be read");
    assert_eq!(reader.position(), again.len(), "it is read to its end");
    assert_eq!(write(&same), *again, "it is read as what was written");
    Some(Checked { value, is_all: end == bytes.len() })
}

/// `part` lies within `whole`, not only in content.
pub fn assert_within(part: &[u8], whole: &[u8]) {
    let (part, whole) = (part.as_ptr_range(), whole.as_ptr_range());
    assert!(whole.start <= part.start && part.end <= whole.end, "it does not lie within the message");
}
