//! Reading a directory: the entries of the source, at the offsets of the source.
//!
//! The offsets that the kernel gets are those of the source (`d_off`), so `telldir(3)` and `seekdir(3)` mean what they mean on the
//! source, whatever entries are added or removed meanwhile.
//!
//! rustix's `RawDir` borrows its buffer, so it could not keep the entries that one READDIR has left over for the next READDIR:
//! that would have to seek and read them again.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::io::Errno;

use super::handle::last_errno;

/// Bytes read from the source at a time.
const CHUNK: usize = 32 << 10;
/// `d_ino`, `d_off`, `d_reclen` and `d_type` of `struct linux_dirent64`; the name follows.
const HEADER: usize = 19;

/// An open directory, and the read position in it.
pub struct SourceListing {
    directory: OwnedFd,
    /// Entries that were read and not returned yet.
    chunk: Vec<u8>,
    /// Where the next entry begins in `chunk`.
    position: usize,
    /// The offset of the entry at `position`; `None` where another process has read.
    offset: Option<u64>,
}

/// An entry of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryEntry<'a> {
    /// The inode number of the file on the source.
    pub ino: u64,
    /// The offset of the next entry.
    pub next: u64,
    /// `DT_*` of `readdir(3)`.
    pub kind: u8,
    /// The name.
    pub name: &'a OsStr,
}

impl SourceListing {
    /// A directory that another process may have read before. The first read seeks, also to the first entry: an open directory of btrfs has
    /// the entries of its last seek, and the kernel may cache what the first read finds for callers that open the directory later.
    pub fn new(directory: OwnedFd) -> Self {
        Self { directory, chunk: Vec::new(), position: 0, offset: None }
    }

    /// The directory.
    pub fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Passes the entries from `offset` on to `take`, until `take` returns `false`: it did not take that entry.
    ///
    /// # Errors
    /// When the source cannot be read, or `take` fails.
    pub fn read(
        &mut self,
        offset: u64,
        mut take: impl FnMut(BorrowedFd<'_>, DirectoryEntry<'_>) -> Result<bool, Errno>,
    ) -> Result<(), Errno> {
        if self.offset != Some(offset) {
            self.seek(offset)?;
        }
        loop {
            while let Some((entry, length)) = parse(&self.chunk[self.position..]) {
                if !take(self.directory.as_fd(), entry)? {
                    return Ok(());
                }
                self.offset = Some(entry.next);
                self.position += length;
            }
            if !self.fill()? {
                return Ok(());
            }
        }
    }

    /// As [`read`](Self::read), for an answer with the taken entries. An error behind them comes with the next call, as with
    /// getdents(2): the kernel has to get the entries, because their lookups are counted.
    ///
    /// # Errors
    /// When `take` has taken no entry, and the source cannot be read or `take` fails.
    pub fn read_some(
        &mut self,
        offset: u64,
        mut take: impl FnMut(BorrowedFd<'_>, DirectoryEntry<'_>) -> Result<bool, Errno>,
    ) -> Result<(), Errno> {
        let mut has_taken = false;
        let read = self.read(offset, |directory, entry| {
            let taken = take(directory, entry)?;
            has_taken |= taken;
            Ok(taken)
        });
        if has_taken { Ok(()) } else { read }
    }

    /// Drops the read entries: the next request reads them again.
    pub fn drop_chunk(&mut self) {
        (self.chunk, self.position, self.offset) = (Vec::new(), 0, None);
    }

    fn seek(&mut self, offset: u64) -> Result<(), Errno> {
        self.chunk.clear();
        self.position = 0;
        // `rustix::fs::seek` refuses offsets above `i64::MAX`, and so does the kernel.
        rustix::fs::seek(&self.directory, rustix::fs::SeekFrom::Start(offset))?;
        self.offset = Some(offset);
        Ok(())
    }

    /// Reads the next chunk; returns whether there was one.
    fn fill(&mut self) -> Result<bool, Errno> {
        self.position = 0;
        self.chunk.resize(CHUNK, 0);
        // SAFETY: the buffer has as many bytes as the call may write.
        let read = unsafe {
            libc::syscall(libc::SYS_getdents64, self.directory.as_raw_fd(), self.chunk.as_mut_ptr(), self.chunk.len())
        };
        let Ok(length) = usize::try_from(read) else {
            let errno = last_errno();
            self.chunk.clear();
            return Err(errno);
        };
        self.chunk.truncate(length);
        Ok(length > 0)
    }
}

/// Whether podfs can rely on offsets and times of directories in this file system. On ext4, XFS, btrfs and tmpfs (since Linux
/// 6.6) an offset means the same in each open of a directory, also after changes there. Each change of a directory sets its
/// times.
pub fn lists_reliably(source: &OwnedFd) -> bool {
    const KINDS: [libc::c_long; 4] =
        [libc::EXT4_SUPER_MAGIC, libc::XFS_SUPER_MAGIC, libc::BTRFS_SUPER_MAGIC, libc::TMPFS_MAGIC];
    rustix::fs::fstatfs(source).is_ok_and(|status| KINDS.contains(&status.f_type))
}

/// The first entry of a chunk, and its length there.
fn parse(chunk: &[u8]) -> Option<(DirectoryEntry<'_>, usize)> {
    let header = chunk.get(..HEADER)?;
    let number = |at: usize| header[at..at + 8].try_into().map(u64::from_ne_bytes).ok();
    let length = usize::from(u16::from_ne_bytes([header[16], header[17]]));
    let name = chunk.get(HEADER..length)?;
    let end = name.iter().position(|byte| *byte == 0)?;
    let entry =
        DirectoryEntry { ino: number(0)?, next: number(8)?, kind: header[18], name: OsStr::from_bytes(&name[..end]) };
    Some((entry, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(path: &std::path::Path) -> SourceListing {
        SourceListing::new(std::fs::File::open(path).expect("a directory").into())
    }

    fn names(listing: &mut SourceListing, offset: u64, most: usize) -> (Vec<String>, u64) {
        let (mut names, mut next) = (Vec::new(), offset);
        listing
            .read(offset, |_, entry| {
                if names.len() == most {
                    return Ok(false);
                }
                names.push(entry.name.to_string_lossy().into_owned());
                next = entry.next;
                Ok(true)
            })
            .expect("read");
        (names, next)
    }

    #[test]
    fn a_directory_is_read_in_pieces_and_from_any_offset() {
        let directory = tempfile::tempdir().expect("a directory");
        (0..3000)
            .for_each(|n| drop(std::fs::File::create(directory.path().join(format!("file-{n}"))).expect("a file")));
        let mut whole = listing(directory.path());
        let (all, _) = names(&mut whole, 0, usize::MAX);
        assert_eq!(all.len(), 3002);
        let mut pieces = listing(directory.path());
        let (first, middle) = names(&mut pieces, 0, 1000);
        pieces.drop_chunk();
        let (second, _) = names(&mut pieces, middle, usize::MAX);
        assert_eq!([first, second.clone()].concat(), all);
        assert_eq!(names(&mut pieces, middle, usize::MAX).0, second, "the same offset gives the same entries");
    }

    #[test]
    fn an_error_behind_taken_entries_comes_with_the_next_read() {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::File::create(directory.path().join("file")).expect("a file");
        let mut listing = listing(directory.path());
        let mut taken = Vec::new();
        let read = listing.read_some(0, |_, entry| {
            // The source cannot be read any more.
            let _is_gone_already = std::fs::remove_dir_all(directory.path());
            taken.push((entry.name.to_owned(), entry.next));
            Ok(true)
        });
        assert_eq!((read, taken.len()), (Ok(()), 3));
        assert_eq!(listing.read_some(taken[2].1, |_, _| panic!("there is no entry")), Err(Errno::NOENT));
    }
}
