//! XDR (RFC 4506) as far as NFSv3 needs it.

/// Encodes values, one after the other.
#[derive(Clone, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    pub fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    pub fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_be_bytes());
        self
    }

    /// Adds bytes of a length that both sides know. The length is a multiple of four.
    pub fn fixed(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    /// Adds the length of `bytes`, the bytes, and zeros up to a multiple of four.
    pub fn opaque(mut self, bytes: &[u8]) -> Self {
        self = self.u32(u32::try_from(bytes.len()).expect("a short opaque")).fixed(bytes);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub fn bytes(self) -> Vec<u8> {
        self.0
    }
}

/// Decodes values, one after the other. A method returns `None` if the bytes end before its value does.
pub struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.fixed(N)?.try_into().ok()
    }

    pub fn fixed(&mut self, length: usize) -> Option<&'a [u8]> {
        let (bytes, remaining) = self.0.split_at_checked(length)?;
        self.0 = remaining;
        Some(bytes)
    }

    pub fn opaque(&mut self) -> Option<&'a [u8]> {
        let length = self.u32()? as usize;
        let bytes = self.fixed(length)?;
        self.fixed(length.next_multiple_of(4) - length)?;
        Some(bytes)
    }

    pub fn remaining(&self) -> &'a [u8] {
        self.0
    }
}
