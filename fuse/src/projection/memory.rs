//! Memory that two processes share, and that its owner zeroes.
//!
//! Both processes can write a block, and a container may have taken over the server. So the supervisor copies what it reads
//! ([`Block::read`], pread(2)): a process that changes the bytes meanwhile changes neither a copy nor a slice. Only the server reads the
//! bytes in place ([`Block::served`]), to send them to the kernel: the supervisor writes a block only when no server uses it any more.
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
use rustix::io::{Errno, pread, pwrite, retry_on_intr};

use crate::memory_lock::wipe;

/// A shared, locked, fixed-size block of memory.
pub(crate) struct Block {
    file: OwnedFd,
    /// All bytes of the file. The counters are atomic.
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
/// Most bytes of a block of another process: no payload of Kubernetes has so many.
const MOST_BYTES: usize = 256 << 20;
/// How many bytes are zeroed at once.
const ZEROS: [u8; 4096] = [0; 4096];

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
        let length = usize::try_from(fstat(&file)?.st_size).ok().filter(|length| *length <= MOST_BYTES);
        let length = length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the memory file is too long"))?;
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

    /// The number of bytes without the counters. The last bytes, up to seven, are zeros that fill a word.
    pub(crate) fn length(&self) -> usize {
        self.mapping.len() - self.counted
    }

    /// Copies the bytes from `at` on. `buffer` ends before the counters.
    ///
    /// # Errors
    /// When the block has fewer bytes.
    pub(crate) fn read(&self, at: usize, buffer: &mut [u8]) -> io::Result<()> {
        let end = at.checked_add(buffer.len()).filter(|end| *end <= self.length());
        end.ok_or(io::ErrorKind::UnexpectedEof)?;
        // The file cannot shrink, and read(2) of a memory file is short only at its end.
        let mut done = 0;
        while done < buffer.len() {
            match retry_on_intr(|| pread(&self.file, &mut buffer[done..], (at + done) as u64))? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => done += read,
            }
        }
        Ok(())
    }

    /// The bytes in place. Only the server may call this, for bytes that it sends to the kernel.
    pub(crate) fn served(&self) -> &[u8] {
        // SAFETY: the mapping has that length, and the kernel has initialised it. This process is the server, so the only other one
        // with the block is the supervisor, which writes the block only when it drops its last reference after the server has ended
        // or has dropped the block. The slice excludes the counters.
        unsafe { slice::from_raw_parts(self.mapping.as_ptr(), self.length()) }
    }

    /// The counters.
    pub(crate) fn counters(&self) -> &[AtomicU64] {
        let first = self.mapping.as_ptr().wrapping_add(self.mapping.len() - self.counted);
        // SAFETY: the counters are inside the mapping, begin at a multiple of their size, and no other slice
        // covers them.
        unsafe { slice::from_raw_parts(first.cast(), self.counted / COUNTER) }
    }

    /// Opens the file anew for writing only, so that [`read`](Self::read) fails.
    #[cfg(test)]
    pub(super) fn forbid_reading(&mut self) {
        use std::os::fd::AsRawFd;

        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        self.file = File::options().write(true).open(path).expect("the same file").into();
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
            let length = self.mapping.len();
            let kept = self.kept.length.min(length);
            let mark = self.kept.mark.to_ne_bytes();
            if kept >= mark.len() {
                self.overwrite(0, &mark);
            }
            for at in (kept..length).step_by(ZEROS.len()) {
                self.overwrite(at, &ZEROS[..ZEROS.len().min(length - at)]);
            }
        }
    }
}

impl Block {
    /// Overwrites bytes. Does not use the mapping, because another process may have the block, too.
    fn overwrite(&self, at: usize, bytes: &[u8]) {
        // The pages exist and are locked, so the kernel writes them all.
        let _all = retry_on_intr(|| pwrite(&self.file, bytes, at as u64));
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
        assert_eq!(adopted.served(), b"abc\0\0\0\0\0");
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
        assert_eq!(adopted.served(), block.served());
        assert!(adopted.count(4).is_err() && adopted.count(usize::MAX).is_err());
        adopted.disown();
    }

    #[test]
    fn a_block_cannot_be_shrunk_under_a_reader() {
        let block = Block::new(&[b"abc"], 0).expect("a block");
        assert!(rustix::fs::ftruncate(&block.file, 0).is_err());
    }
}
