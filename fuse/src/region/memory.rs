//! The memory file of a region, and where it is mapped.
//!
//! 1. The file is sealed against shrinking before any other process has it. So an offset that was once within its length stays
//!    there, and reading it never faults.
//! 2. The mapping reserves more addresses than the file has bytes. So the file grows without a new mapping, and references into
//!    the mapping stay valid.
//! 3. The file grows by fallocate(2), which allocates memory: on a host without free memory, that call fails, and no later store
//!    causes SIGBUS. Returned memory becomes a hole, and gets memory again in the same way.
//! 4. Code that keeps plain bytes in the file must ensure that they are not written while they are read.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, SeekFrom, fallocate, fcntl_add_seals, fstat, memfd_create, seek,
};
use rustix::io::Errno;

use super::shared::SharedMemory;

/// A memory file, mapped.
pub(crate) struct Memory {
    file: OwnedFd,
    /// All reserved addresses. The bytes at them are read only through references to atomics, and through slices of bytes that no
    /// thread changes while they are borrowed.
    mapping: MmapRaw,
    /// The bytes of the mapping that are within the file.
    length: AtomicUsize,
}

impl Memory {
    /// A new file of zeros.
    pub(crate) fn create(length: usize, reserved: usize) -> io::Result<Memory> {
        let file = create()?;
        allocate(&file, length)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::SEAL)?;
        Self::map(file, length, reserved)
    }

    /// Maps a file for which [`may_be_mapped`] is `true`.
    pub(crate) fn map(file: OwnedFd, length: usize, reserved: usize) -> io::Result<Memory> {
        let mapping = MmapOptions::new().len(reserved).no_reserve_swap().map_raw(&file)?;
        Ok(Memory { file, mapping, length: AtomicUsize::new(length.min(reserved)) })
    }

    /// The length of the file, in bytes, as far as this process knows it.
    pub(crate) fn length(&self) -> usize {
        self.length.load(Ordering::Acquire)
    }

    /// Reads the length of the file again, because another process may have extended the file.
    pub(crate) fn look_again(&self) -> io::Result<usize> {
        let length = length_of(&self.file)?.min(self.mapping.len());
        self.length.fetch_max(length, Ordering::AcqRel);
        Ok(self.length())
    }

    /// Allocates memory for these bytes. Allocated bytes keep their values; new ones are zero.
    ///
    /// # Errors
    /// When there is no memory, or no address left.
    pub(crate) fn back(&self, offset: usize, length: usize) -> io::Result<()> {
        let end =
            offset.checked_add(length).filter(|end| *end <= self.mapping.len()).ok_or(io::ErrorKind::OutOfMemory)?;
        fallocate(&self.file, FallocateFlags::empty(), offset as u64, length as u64)?;
        self.length.fetch_max(end, Ordering::AcqRel);
        Ok(())
    }

    /// Like [`back`](Self::back), and maps all pages at once.
    ///
    /// # Errors
    /// Those of [`back`](Self::back).
    pub(crate) fn allocate(&self, offset: usize, length: usize) -> io::Result<()> {
        self.back(offset, length)?;
        // One madvise(2) takes less work than a page fault for each page. Linux before 5.14 does not have `MADV_POPULATE_WRITE`.
        let _faults = self.mapping.advise_range(Advice::PopulateWrite, offset, length);
        Ok(())
    }

    /// Gives the memory of these bytes back; they are zeros from now on.
    ///
    /// # Errors
    /// When the kernel cannot.
    pub(crate) fn give_back(&self, offset: usize, length: usize) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, flags, offset as u64, length as u64)?)
    }

    /// The parts from `offset` on that are not holes, in order. A page that was never written counts as a hole.
    pub(crate) fn data_from(&self, offset: usize) -> Vec<Range<usize>> {
        let end = self.length();
        let mut parts = Vec::new();
        let mut position = offset;
        while position < end {
            let start = match seek(&self.file, SeekFrom::Data(position as u64)) {
                Ok(start) => usize::try_from(start).unwrap_or(end).min(end),
                Err(Errno::NXIO) => break,
                // If the kernel cannot search for data, the file counts as one without holes.
                Err(_) => position,
            };
            let hole = seek(&self.file, SeekFrom::Hole(start as u64)).ok();
            position =
                hole.and_then(|hole| usize::try_from(hole).ok()).filter(|hole| *hole > start).unwrap_or(end).min(end);
            if start < position {
                parts.push(start..position);
            }
        }
        parts
    }

    /// Writes plain bytes, except those beyond the end of the file.
    ///
    /// # Safety
    /// No slice of these bytes is borrowed.
    pub(crate) unsafe fn write(&self, offset: usize, data: &[u8]) {
        let within = self.length().saturating_sub(offset).min(data.len());
        // SAFETY: the bytes are within the file, which never shrinks, and mapped. The caller guarantees that no code has borrowed
        // them, so `data` does not overlap them.
        unsafe {
            let start = self.mapping.as_mut_ptr().add(offset.min(self.mapping.len()));
            start.copy_from_nonoverlapping(data.as_ptr(), within);
        };
    }

    /// Plain bytes; fewer than `length` at the end of the file.
    ///
    /// # Safety
    /// They are not written while they are borrowed.
    pub(crate) unsafe fn bytes(&self, offset: usize, length: usize) -> &[u8] {
        let within = self.length().saturating_sub(offset).min(length);
        // SAFETY: the bytes are within the file, which never shrinks, and mapped as long as `self` is. The caller guarantees that
        // no code writes them.
        unsafe { std::slice::from_raw_parts(self.mapping.as_ptr().add(offset.min(self.mapping.len())), within) }
    }

    /// The value at `offset`; `None` beyond the end of the file.
    pub(crate) fn at<T: SharedMemory>(&self, offset: usize) -> Option<&T> {
        let end = offset.checked_add(size_of::<T>())?;
        if end > self.length() || !offset.is_multiple_of(align_of::<T>()) {
            return None;
        }
        // SAFETY: the bytes are within the file, which never shrinks, and mapped as long as `self` is; the mapping
        // begins at a page, so they are aligned; `SharedMemory` allows any bytes, and any writer.
        Some(unsafe { &*self.mapping.as_ptr().add(offset).cast() })
    }
}

impl AsFd for Memory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Whether a file of another process can be mapped: it is sealed against shrinking, so a read of its mapping never faults.
pub(crate) fn may_be_mapped(file: &OwnedFd) -> bool {
    rustix::fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
}

/// Length of a file in bytes.
pub(crate) fn length_of(file: &OwnedFd) -> io::Result<usize> {
    usize::try_from(fstat(file)?.st_size).map_err(io::Error::other)
}

fn allocate(file: &OwnedFd, length: usize) -> io::Result<()> {
    let before = length_of(file)?;
    let more = length.saturating_sub(before);
    if more > 0 {
        fallocate(file, FallocateFlags::empty(), before as u64, more as u64)?;
    }
    Ok(())
}

fn create() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Linux has NOEXEC_SEAL since 6.3; a host may require it (sysctl vm.memfd_noexec).
    match memfd_create("podfs-state", flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => Ok(memfd_create("podfs-state", flags)?),
        made => Ok(made?),
    }
}
