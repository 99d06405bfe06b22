//! Finds the records in a stream of bytes (RFC 5531, section 11), without keeping them.

/// The bytes of a record that the proxy parses: the head of a call, with its arguments if they are small.
const HEAD: usize = 256;

/// In the header of a fragment: it is the record's last one.
const LAST: u32 = 1 << 31;

/// The position of a stream in its present record.
#[derive(Default)]
pub struct Records {
    /// As much as there is of the present fragment's header.
    header: Vec<u8>,
    /// Bytes of the present fragment that are still to come.
    left: usize,
    last: bool,
    head: Vec<u8>,
}

impl Records {
    /// Takes bytes up to the end of the present record: how many these are, and the head of the record if it ends there.
    pub fn take(&mut self, bytes: &[u8]) -> (usize, Option<Vec<u8>>) {
        let mut taken = 0;
        while taken < bytes.len() {
            if self.header.len() < 4 {
                self.header.push(bytes[taken]);
                taken += 1;
                if let Ok(header) = <[u8; 4]>::try_from(self.header.as_slice()) {
                    let header = u32::from_be_bytes(header);
                    (self.left, self.last) = ((header & !LAST) as usize, header & LAST != 0);
                }
            } else {
                let part = &bytes[taken..][..self.left.min(bytes.len() - taken)];
                self.head.extend(part.iter().take(HEAD - self.head.len()));
                self.left -= part.len();
                taken += part.len();
            }
            if self.header.len() == 4 && self.left == 0 {
                self.header.clear();
                if self.last {
                    return (taken, Some(std::mem::take(&mut self.head)));
                }
            }
        }
        (taken, None)
    }

    /// Nothing of the next record has come yet.
    pub fn between(&self) -> bool {
        self.header.is_empty() && self.head.is_empty()
    }
}

/// A whole record without the headers of its fragments.
pub fn joined(mut raw: &[u8]) -> Vec<u8> {
    let mut record = Vec::new();
    while let Some((header, rest)) = raw.split_first_chunk::<4>() {
        let (part, rest) = rest.split_at((u32::from_be_bytes(*header) & !LAST) as usize);
        record.extend(part);
        raw = rest;
    }
    record
}
