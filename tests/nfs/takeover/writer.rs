//! A writer that writes at random offsets of a file, and checks the content.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The limit of the offsets of writes, in bytes.
const LARGEST: usize = 3 << 20;
/// The number of writes between two checks of the content.
const WRITES: usize = 40;

/// A file and its expected content.
pub struct Writer {
    file: File,
    expected: Vec<u8>,
    state: u64,
}

impl Writer {
    pub fn new(path: &Path, seed: u64) -> Self {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).expect("create");
        Self { file, expected: Vec::new(), state: seed }
    }

    /// Writes at random offsets, truncates the file now and then, syncs it, and checks its content.
    pub fn round(&mut self) {
        for _ in 0..WRITES {
            let (offset, length) = (self.number(LARGEST), 1 + self.number(200_000));
            let content: Vec<u8> = (0..length).map(|_| self.number(256) as u8).collect();
            self.file.write_all_at(&content, offset as u64).expect("write");
            self.expected.resize(self.expected.len().max(offset + length), 0);
            self.expected[offset..offset + length].copy_from_slice(&content);
            if self.number(10) == 0 {
                let length = self.number(LARGEST);
                self.file.set_len(length as u64).expect("truncate");
                self.expected.resize(length, 0);
            }
        }
        self.file.sync_all().expect("fsync");
        // The kernel drops its pages of the file, so that the check reads from the server.
        rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed).expect("fadvise");
        self.check(&self.file);
    }

    /// Panics unless a file has the expected content.
    pub fn check(&self, file: &File) {
        let length = file.metadata().expect("stat").len() as usize;
        assert_eq!(length, self.expected.len(), "length");
        let mut content = vec![0; length];
        file.read_exact_at(&mut content, 0).expect("read");
        let difference = content.iter().zip(&self.expected).position(|(byte, expected)| byte != expected);
        assert_eq!(difference, None, "the offset of the first different byte, of {length}");
    }

    /// A pseudorandom number below `end` (xorshift).
    fn number(&mut self, end: usize) -> usize {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state % end as u64) as usize
    }
}
