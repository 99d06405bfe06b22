//! A writer that writes at random in a file, and knows the expected content.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of the file at most.
const LARGEST: usize = 3 << 20;
/// Writes between two looks.
const WRITES: usize = 40;

/// A file, and what must be in it.
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

    /// Writes here and there, cuts the file now and then, has it on disk, and looks at all of it.
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
        // Past the kernel's pages.
        rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed).expect("fadvise");
        self.check(&self.file);
    }

    /// Whether a file has the expected content.
    pub fn check(&self, file: &File) {
        let length = file.metadata().expect("stat").len() as usize;
        assert_eq!(length, self.expected.len(), "length");
        let mut found = vec![0; length];
        file.read_exact_at(&mut found, 0).expect("read");
        let differs = found.iter().zip(&self.expected).position(|(found, expected)| found != expected);
        assert_eq!(differs, None, "the first byte that differs, of {length}");
    }

    /// Any number below `end` (xorshift).
    fn number(&mut self, end: usize) -> usize {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state % end as u64) as usize
    }
}
