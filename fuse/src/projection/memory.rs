//! Memory that two processes share, and that its owner zeroes.
//!
//! A block is a sealed memory file (`memfd_create(2)`): it cannot be resized, so a mapping of it
//! never causes SIGBUS. Its pages are locked against swap. The owner of the block overwrites them with zeros when it drops it. The
//! owner is the process that made the block, until it sends the descriptor to the other one.
//!
//! After the constant bytes, a block has counters, which the server changes. A successor continues with them.

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
    /// All bytes of the file. Only `drop` writes them, when no other thread can reach them; the counters are atomic.
    mapping: MmapRaw,
    /// The number of bytes of counters at its end.
    counted: usize,
    owned: AtomicBool,
    /// The bytes that are kept when the block is zeroed.
    kept: KeptBytes,
}

/// The bytes of a zeroed block that are not zero. They have no secret, and show that the block was zeroed.
#[derive(Clone, Copy, Default)]
pub(crate) struct KeptBytes {
    /// The number of bytes at the start that are not zeroed.
    pub(crate) length: usize,
    /// The new value of the first word of these bytes, if there are some.
    pub(crate) mark: u64,
}

const COUNTER: usize = size_of::<AtomicU64>();

impl Block {
    /// A block with `parts`, one after the other, and this number of counters, which are 0.
    pub(crate) fn new(parts: &[&[u8]], counters: usize) -> io::Result<Self> {
        let file = create()?;
        let length = write_all(&file, parts)?.next_multiple_of(COUNTER) + counters * COUNTER;
        ftruncate(&file, length as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let mut block = Self::map(file, length)?;
        block.count(counters)?;
        Ok(block)
    }

    /// Opens the block of the other process, and becomes its owner. It has no counters before [`count`](Self::count).
    pub(crate) fn adopt(file: OwnedFd) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the memory file is not sealed against shrinking"));
        }
        let length = usize::try_from(fstat(&file)?.st_size).map_err(io::Error::other)?;
        Self::map(file, length)
    }

    fn map(file: OwnedFd, length: usize) -> io::Result<Self> {
        // Populated: if an answer causes page faults, and the server is killed meanwhile, the answer fails with `EIO`.
        let mapping = MmapOptions::new().len(length).populate().map_raw(&file)?;
        // Without CAP_IPC_LOCK, the limit may be too small. The process reports that at its start, when it locks its other memory.
        let _ = mapping.lock();
        Ok(Self { file, mapping, counted: 0, owned: AtomicBool::new(true), kept: KeptBytes::default() })
    }

    /// Makes the last bytes this number of counters.
    ///
    /// # Errors
    /// `InvalidData` when the block has fewer bytes, or its length is not aligned.
    pub(crate) fn count(&mut self, counters: usize) -> io::Result<()> {
        let counted = counters.checked_mul(COUNTER).filter(|counted| *counted <= self.mapping.len());
        let aligned = self.mapping.len().is_multiple_of(COUNTER);
        self.counted = counted.filter(|_| aligned).ok_or(io::ErrorKind::InvalidData)?;
        Ok(())
    }

    /// The bytes, followed by up to seven zeros.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping has that length, and the kernel has initialised it. While the block can be borrowed, only its
        // counters are written, and the slice excludes them.
        unsafe { slice::from_raw_parts(self.mapping.as_ptr(), self.mapping.len() - self.counted) }
    }

    /// The counters.
    pub(crate) fn counters(&self) -> &[AtomicU64] {
        let first = self.mapping.as_ptr().wrapping_add(self.mapping.len() - self.counted);
        // SAFETY: the counters are inside the mapping, begin at a multiple of their size, and no other slice
        // covers them.
        unsafe { slice::from_raw_parts(first.cast(), self.counted / COUNTER) }
    }

    /// When the block is zeroed, `kept` stay.
    pub(crate) fn keep(&mut self, kept: KeptBytes) {
        self.kept = kept;
    }

    /// Makes this process the owner, which zeroes the block.
    pub(crate) fn own(&self) {
        self.owned.store(true, Ordering::Relaxed);
    }

    /// Makes the process that adopts the descriptor the owner.
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
            // SAFETY: `&mut self` proves that this process has no slice of the mapping, and the other process does not use the
            // block.
            let bytes = unsafe { slice::from_raw_parts_mut(self.mapping.as_mut_ptr(), self.mapping.len()) };
            let (kept, secret) = bytes.split_at_mut(self.kept.length.min(bytes.len()));
            if let Some(first) = kept.first_chunk_mut() {
                *first = self.kept.mark.to_ne_bytes();
            }
            wipe(secret);
        }
    }
}

/// Writes `parts` to a new file. Unlike a mapping, write(2) causes no page faults. A buffer reduces the number of calls for small
/// parts.
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
    // The buffer may have secrets up to its capacity.
    buffer.resize(buffer.capacity(), 0);
    wipe(&mut buffer);
    Ok(length)
}

fn create() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // NOEXEC_SEAL exists since Linux 6.3. A host may require it (sysctl vm.memfd_noexec).
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
