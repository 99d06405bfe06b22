//! Memory that two processes share, and that is zeroed at its end.
//!
//! A block is a sealed memory file (`memfd_create(2)`): it cannot be resized, so a mapping of it can
//! never fault. Its pages are locked against swap and, when the block's owner drops it, overwritten
//! with zeros. There is one owner at a time: the process that made the block, until it hands the
//! descriptor to the other.
//!
//! Behind the bytes, which never change, a block has counters, which the server changes. A successor takes over the counts from
//! them.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;

use crate::memory_lock::wipe;

/// A shared, locked, fixed-size block of memory.
pub(crate) struct Block {
    file: OwnedFd,
    /// All bytes of the file. They are only written when no other thread can reach them (`drop`); counters are atomic.
    mapping: MmapRaw,
    /// How many of its last bytes are counters.
    counted: usize,
    owned: AtomicBool,
}

const COUNTER: usize = size_of::<AtomicU64>();

impl Block {
    /// A block that holds `parts`, one after the other, and as many counters, which are 0.
    pub(crate) fn new(parts: &[&[u8]], counters: usize) -> io::Result<Self> {
        let file = create()?;
        let length = write_all(&file, parts)?.next_multiple_of(COUNTER) + counters * COUNTER;
        ftruncate(&file, length as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let mut block = Self::map(file, length)?;
        block.count(counters)?;
        Ok(block)
    }

    /// The block behind a descriptor that the other process made. The caller becomes its owner. All of it is bytes until
    /// [`count`](Self::count) says how many counters there are.
    pub(crate) fn adopt(file: OwnedFd) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the memory file is not sealed against shrinking"));
        }
        let length = usize::try_from(fstat(&file)?.st_size).map_err(io::Error::other)?;
        Self::map(file, length)
    }

    fn map(file: OwnedFd, length: usize) -> io::Result<Self> {
        // All of it is there from the start: an answer whose bytes have to be fetched first fails with EIO when the server
        // is killed meanwhile.
        let mapping = MmapOptions::new().len(length).populate().map_raw(&file)?;
        // Best effort: without CAP_IPC_LOCK the limit may be small; the process reports that once at
        // its start, when it locks the rest of its memory.
        let _ = mapping.lock();
        Ok(Self { file, mapping, counted: 0, owned: AtomicBool::new(true) })
    }

    /// The last of the bytes are so many counters.
    ///
    /// # Errors
    /// `InvalidData` when there are not as many bytes.
    pub(crate) fn count(&mut self, counters: usize) -> io::Result<()> {
        let counted = counters.checked_mul(COUNTER).filter(|counted| *counted <= self.mapping.len());
        let aligned = self.mapping.len().is_multiple_of(COUNTER);
        self.counted = counted.filter(|_| aligned).ok_or(io::ErrorKind::InvalidData)?;
        Ok(())
    }

    /// The bytes, and up to seven zeros.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has that length, and the kernel has initialised it. Only its counters, which are left out, are
        // written while the block can be borrowed.
        unsafe { slice::from_raw_parts(self.mapping.as_ptr(), self.mapping.len() - self.counted) }
    }

    /// The counters.
    pub(crate) fn counters(&self) -> &[AtomicU64] {
        let first = self.mapping.as_ptr().wrapping_add(self.mapping.len() - self.counted);
        // SAFETY: the counters are inside the mapping, begin at a multiple of their size, and no other slice
        // covers them.
        unsafe { slice::from_raw_parts(first.cast(), self.counted / COUNTER) }
    }

    /// Does the zeroing from now on.
    pub(crate) fn own(&self) {
        self.owned.store(true, Ordering::Relaxed);
    }

    /// Leaves the zeroing to the process that adopts the descriptor.
    pub(crate) fn disown(&self) {
        self.owned.store(false, Ordering::Relaxed);
    }
}

impl AsFd for Block {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if *self.owned.get_mut() {
            // SAFETY: `&mut self` proves that no slice of this mapping is alive in this process, and
            // the other process gave the block up.
            wipe(unsafe { slice::from_raw_parts_mut(self.mapping.as_mut_ptr(), self.mapping.len()) });
        }
    }
}

/// Fills a new file. `write(2)` costs no page faults, unlike a mapping, and a buffer between spares
/// many passes through the page cache when the parts are small.
fn write_all(file: &OwnedFd, parts: &[&[u8]]) -> io::Result<usize> {
    const BUFFER: usize = 64 * 1024;
    let length = parts.iter().map(|part| part.len()).sum();
    let mut buffer = Vec::with_capacity(BUFFER.min(length));
    let mut file = File::from(file.try_clone()?);
    for part in parts {
        if buffer.len() + part.len() > buffer.capacity() {
            file.write_all(&buffer)?;
            buffer.clear();
        }
        if part.len() >= buffer.capacity() {
            file.write_all(part)?;
        } else {
            buffer.extend_from_slice(part);
        }
    }
    file.write_all(&buffer)?;
    // It holds some of what the parts hold, up to where it was once filled.
    buffer.resize(buffer.capacity(), 0);
    wipe(&mut buffer);
    Ok(length)
}

fn create() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // NOEXEC_SEAL is known since Linux 6.3; a host may demand it (sysctl vm.memfd_noexec).
    match memfd_create("podfs-generation", flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => Ok(memfd_create("podfs-generation", flags)?),
        made => Ok(made?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(file: &OwnedFd) -> Vec<u8> {
        let mut bytes = vec![0xff; 16];
        let read = rustix::io::pread(file, &mut bytes, 0).expect("a memory file can be read");
        bytes.truncate(read);
        bytes
    }

    #[test]
    fn the_owner_zeroes_a_block_when_it_is_dropped() {
        // SE-02: nothing of a secret is left behind.
        let block = Block::new(&[b"s3", b"cr3"], 0).expect("a block");
        let witness = block.file.try_clone().expect("a second descriptor");
        assert_eq!(page(&witness), b"s3cr3\0\0\0");
        drop(block);
        assert_eq!(page(&witness), [0; 8]);
    }

    #[test]
    fn a_disowned_block_is_left_to_the_adopting_process() {
        let block = Block::new(&[b"abc"], 0).expect("a block");
        let witness = block.file.try_clone().expect("a second descriptor");
        let adopted = Block::adopt(witness.try_clone().expect("a descriptor")).expect("adoption");
        block.disown();
        drop(block);
        assert_eq!(adopted.bytes(), b"abc\0\0\0\0\0");
        drop(adopted);
        assert_eq!(page(&witness), [0; 8]);
    }

    #[test]
    fn all_owners_of_a_block_see_the_same_counters() {
        let block = Block::new(&[b"abc"], 2).expect("a block");
        block.counters()[1].store(7, Ordering::Relaxed);
        let mut adopted = Block::adopt(block.file.try_clone().expect("a descriptor")).expect("adoption");
        adopted.count(2).expect("there are two");
        assert_eq!(adopted.counters()[1].load(Ordering::Relaxed), 7);
        assert_eq!(adopted.bytes(), block.bytes());
        assert!(adopted.count(4).is_err() && adopted.count(usize::MAX).is_err());
        adopted.disown();
    }

    #[test]
    fn a_block_cannot_be_shrunk_under_a_reader() {
        let block = Block::new(&[b"abc"], 0).expect("a block");
        assert!(rustix::fs::ftruncate(&block.file, 0).is_err());
    }
}
