//! File handles: the server's names of files.

use std::fmt;

use crate::xdr::{Malformed, XdrReader, XdrWriter};

/// Most bytes of a handle.
pub const MAX_HANDLE: usize = 64;

/// A server's handle of a file. A client can only compare handles.
#[derive(Clone, Copy, Eq, Hash, PartialEq)]
pub struct NfsFileHandle {
    length: u8,
    /// The bytes from `length` on are zero.
    bytes: [u8; MAX_HANDLE],
}

impl NfsFileHandle {
    /// The handle with these bytes; `None` if they are more than [`MAX_HANDLE`].
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let mut handle = Self { length: u8::try_from(bytes.len()).ok()?, bytes: [0; MAX_HANDLE] };
        handle.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(handle)
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length.into()]
    }

    /// A number that is the same for the same handle in every process.
    pub fn hash(&self) -> u64 {
        // FNV-1a
        self.as_bytes()
            .iter()
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
    }

    /// Reads a handle.
    ///
    /// # Errors
    /// [`Malformed`]
    pub fn read(reader: &mut XdrReader<'_>) -> Result<Self, Malformed> {
        Ok(Self::new(reader.opaque(MAX_HANDLE)?).expect("its length has been looked at"))
    }

    /// Writes the handle.
    pub fn write(&self, writer: &mut XdrWriter) {
        writer.opaque(self.as_bytes());
    }
}

impl fmt::Debug for NfsFileHandle {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_bytes().iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}
