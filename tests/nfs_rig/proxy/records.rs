//! Finds the ends of the records in a stream of bytes (RFC 5531, section 11). Stores only the head of each record.

/// The number of bytes of a record that the proxy parses: the head of a call, with its arguments if they are small.
const HEAD: usize = 256;

/// The bit in the header of a record's last fragment.
const LAST: u32 = 1 << 31;

/// The position of a stream in its present record.
#[derive(Default)]
pub struct Records {
    /// The bytes of the present fragment's header that have come.
    header: Vec<u8>,
    /// The number of bytes of the present fragment that are still to come.
    missing: usize,
    /// Whether the present fragment is the record's last one.
    last: bool,
    head: Vec<u8>,
}

impl Records {
    /// Takes bytes up to the end of the present record. Returns their number, and the head of the record if it ends with them.
    pub fn take(&mut self, bytes: &[u8]) -> (usize, Option<Vec<u8>>) {
        let mut taken = 0;
        while taken < bytes.len() {
            if self.header.len() < 4 {
                self.header.push(bytes[taken]);
                taken += 1;
                if let Ok(header) = <[u8; 4]>::try_from(self.header.as_slice()) {
                    let header = u32::from_be_bytes(header);
                    (self.missing, self.last) = ((header & !LAST) as usize, header & LAST != 0);
                }
            } else {
                let part = &bytes[taken..][..self.missing.min(bytes.len() - taken)];
                self.head.extend(part.iter().take(HEAD - self.head.len()));
                self.missing -= part.len();
                taken += part.len();
            }
            if self.header.len() == 4 && self.missing == 0 {
                self.header.clear();
                if self.last {
                    return (taken, Some(std::mem::take(&mut self.head)));
                }
            }
        }
        (taken, None)
    }

    /// Whether no byte of the next record has come yet.
    pub fn between(&self) -> bool {
        self.header.is_empty() && self.head.is_empty()
    }
}

/// A complete record without the headers of its fragments.
pub fn joined(mut fragments: &[u8]) -> Vec<u8> {
    let mut record = Vec::new();
    while let Some((header, after_header)) = fragments.split_first_chunk::<4>() {
        let (part, following) = after_header.split_at((u32::from_be_bytes(*header) & !LAST) as usize);
        record.extend(part);
        fragments = following;
    }
    record
}
