//! XDR (RFC 4506), as far as RPC and NFS need it: numbers of four and eight bytes, and opaque bytes padded to four.
//!
//! The reader compares each length with its limit and with the bytes that are present before it uses the length, and allocates
//! nothing. So it refuses any invalid bytes without harm.

use std::ops::Range;

/// Bytes that are not what the protocol says.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(pub(crate) &'static str);

const SHORT: Malformed = Malformed("the message ends too early");
const LONG: Malformed = Malformed("the message has a length beyond its limit");
const UNKNOWN: Malformed = Malformed("the message has a value that the protocol does not know");

/// The bytes that fill `length` up to a multiple of four.
pub const fn padding(length: usize) -> usize {
    length.wrapping_neg() % 4
}

/// Reads a message from its beginning to its end.
#[derive(Clone, Debug)]
pub struct XdrReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> XdrReader<'a> {
    /// A reader at the beginning of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Returns the offset of the next byte in the message.
    pub fn position(&self) -> usize {
        self.at
    }

    /// The next `count` bytes.
    fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let taken = self.bytes[self.at..].get(..count).ok_or(SHORT)?;
        self.at += count;
        Ok(taken)
    }

    /// A fixed number of opaque bytes; `N` is a multiple of four.
    ///
    /// # Errors
    /// [`Malformed`], like all of these.
    pub fn fixed<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        Ok(self.take(N)?.try_into().expect("N bytes were taken"))
    }

    /// An unsigned number of 32 bits.
    ///
    /// # Errors
    /// [`Malformed`]
    pub fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_be_bytes(self.fixed()?))
    }

    /// An unsigned number of 64 bits.
    ///
    /// # Errors
    /// [`Malformed`]
    pub fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_be_bytes(self.fixed()?))
    }

    /// A Boolean value.
    ///
    /// # Errors
    /// [`Malformed`]
    pub fn flag(&mut self) -> Result<bool, Malformed> {
        match self.u32()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(UNKNOWN),
        }
    }

    /// A value that the message may leave out.
    ///
    /// # Errors
    /// [`Malformed`], or what `read` returns.
    pub fn optional<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, Malformed>,
    ) -> Result<Option<T>, Malformed> {
        if self.flag()? { read(self).map(Some) } else { Ok(None) }
    }

    /// Opaque bytes after their length, which is at most `most`.
    ///
    /// # Errors
    /// [`Malformed`]
    pub fn opaque(&mut self, most: usize) -> Result<&'a [u8], Malformed> {
        let length = self.u32()? as usize;
        if length > most {
            return Err(LONG);
        }
        let taken = self.take(length)?;
        self.take(padding(length))?;
        Ok(taken)
    }

    /// Reads opaque bytes as [`opaque`](Self::opaque) does, and returns their range in the message.
    ///
    /// # Errors
    /// [`Malformed`]
    pub fn opaque_range(&mut self, most: usize) -> Result<Range<usize>, Malformed> {
        let length = self.opaque(most)?.len();
        let end = self.at - padding(length);
        Ok(end - length..end)
    }
}

/// A value that the protocol does not know.
pub(crate) fn unknown<T>() -> Result<T, Malformed> {
    Err(UNKNOWN)
}

/// Writes a message.
#[derive(Debug, Default)]
pub struct XdrWriter {
    bytes: Vec<u8>,
}

impl XdrWriter {
    /// An empty message with room for `capacity` bytes.
    pub fn with_capacity(capacity: usize) -> Self {
        Self { bytes: Vec::with_capacity(capacity) }
    }

    /// A number of 32 bits.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes.extend_from_slice(&value.to_be_bytes());
        self
    }

    /// A number of 64 bits.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes.extend_from_slice(&value.to_be_bytes());
        self
    }

    /// A Boolean value.
    pub fn flag(&mut self, value: bool) -> &mut Self {
        self.u32(value.into())
    }

    /// A fixed number of opaque bytes, a multiple of four.
    pub fn fixed(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// The length of opaque bytes that the caller sends from another buffer.
    pub fn length(&mut self, length: usize) -> &mut Self {
        self.u32(u32::try_from(length).expect("messages are far shorter than 4 GiB"))
    }

    /// Opaque bytes after their length.
    pub fn opaque(&mut self, bytes: &[u8]) -> &mut Self {
        self.length(bytes.len()).fixed(bytes).fixed(&[0; 3][..padding(bytes.len())])
    }

    /// A value that the message may leave out.
    pub fn optional<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T)) -> &mut Self {
        self.flag(value.is_some());
        if let Some(value) = value {
            write(self, value);
        }
        self
    }

    /// The written bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opaque_bytes_are_padded_and_found_again() {
        for length in 0..9 {
            let bytes: Vec<u8> = (1..=length).collect();
            let mut writer = XdrWriter::default();
            writer.opaque(&bytes).u32(7);
            let written = writer.into_bytes();
            assert_eq!(written.len() % 4, 0);
            let mut reader = XdrReader::new(&written);
            assert_eq!(reader.opaque(8), Ok(&bytes[..]));
            assert_eq!(reader.u32(), Ok(7));
            let range = XdrReader::new(&written).opaque_range(8).expect("as before");
            assert_eq!(written[range], bytes);
        }
    }

    #[test]
    fn a_length_beyond_the_received_bytes_is_refused() {
        let huge = [0xff, 0xff, 0xff, 0xff, 1, 2, 3, 4];
        assert_eq!(XdrReader::new(&huge).opaque(64), Err(LONG));
        assert_eq!(XdrReader::new(&huge).opaque(usize::MAX), Err(SHORT));
        assert_eq!(XdrReader::new(&[0, 0, 0, 1, 9]).opaque(64), Err(SHORT), "the padding is missing");
        assert_eq!(XdrReader::new(&[0, 0, 0, 2]).flag(), Err(UNKNOWN));
    }
}
