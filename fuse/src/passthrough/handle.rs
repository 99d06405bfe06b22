//! File handles: names for files that need no open descriptor (`name_to_handle_at(2)`).

use std::ffi::{CStr, c_int};
use std::hash::{Hash, Hasher};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::thread;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::state::HANDLE_WORDS;

/// `MAX_HANDLE_SZ` of `fcntl.h`.
const MAX_SIZE: usize = 128;
/// Longest handle that is used: what a node's cell has room for. No file system of Linux 6.18 has longer ones.
const MAX_USED: usize = HANDLE_WORDS * 8;

/// The handle of a file: inode number and generation, in the format of the file system. No other file has the same handle; after
/// the file is deleted, a file system gives the handle to another file only in rare cases (`Nodes::enter`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileHandle {
    kind: c_int,
    length: u32,
    /// The handle, and zeros behind it.
    words: [u64; HANDLE_WORDS],
}

/// `struct file_handle`, with room for the longest.
#[repr(C)]
struct RawFileHandle {
    size: u32,
    kind: c_int,
    bytes: [u8; MAX_SIZE],
}

impl FileHandle {
    /// The handle of the file that `file` is open on, and the id of the mount through which it was opened, as
    /// `/proc/self/mountinfo` has it. `O_PATH` is enough. The call sends no request to the server of a remote or FUSE file system.
    ///
    /// # Errors
    /// `EOPNOTSUPP` when the file system has no handles, `EOVERFLOW` when they are too long.
    pub fn of(file: BorrowedFd<'_>) -> Result<(FileHandle, u64), Errno> {
        Self::find(file, c"", libc::AT_EMPTY_PATH)
    }

    /// As [`of`](Self::of), for the file that `name` in `directory` leads to. Does not follow a symbolic link.
    ///
    /// # Errors
    /// Those of [`of`](Self::of), and `ENOENT` if there is no such name.
    pub fn of_name(directory: BorrowedFd<'_>, name: &CStr) -> Result<(FileHandle, u64), Errno> {
        Self::find(directory, name, 0)
    }

    /// The number of the file that the handle names, if it is one of the form that most file systems of disks have
    /// (`FILEID_INO32_GEN`).
    pub fn ino(&self) -> Option<u32> {
        const INO32_GEN: c_int = 1;
        let [a, b, c, d, ..] = self.words[0].to_ne_bytes();
        (self.kind == INO32_GEN && self.length == 8).then_some(u32::from_ne_bytes([a, b, c, d]))
    }

    /// The number by which a server of FUSE knows the file, if the handle is of such a file system (`FILEID_INO64_GEN`).
    pub fn fuse_node(&self) -> Option<u64> {
        const INO64_GEN: c_int = 0x81;
        let [a, b, c, d, e, f, g, h] = self.words[0].to_ne_bytes();
        let (high, low) = (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]));
        (self.kind == INO64_GEN && self.length == 12).then_some((u64::from(high) << 32) | u64::from(low))
    }

    fn find(file: BorrowedFd<'_>, name: &CStr, flags: c_int) -> Result<(FileHandle, u64), Errno> {
        let mut raw = RawFileHandle { size: MAX_SIZE as u32, kind: 0, bytes: [0; MAX_SIZE] };
        let mut mount: c_int = 0;
        // SAFETY: the path is a C string; `raw` has room for as many bytes as its size says.
        let result = unsafe {
            libc::name_to_handle_at(file.as_raw_fd(), name.as_ptr(), (&raw mut raw).cast(), &raw mut mount, flags)
        };
        if result != 0 {
            return Err(last_errno());
        }
        let bytes =
            raw.bytes.get(..raw.size as usize).filter(|bytes| bytes.len() <= MAX_USED).ok_or(Errno::OVERFLOW)?;
        let mut words = [0; HANDLE_WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        Ok((FileHandle { kind: raw.kind, length: raw.size, words }, mount.unsigned_abs().into()))
    }

    /// Records the handle without its [length](Self::length).
    pub fn write(&self, kind: &AtomicU32, words: &[AtomicU64; HANDLE_WORDS]) {
        words.iter().zip(self.used_words()).for_each(|(place, word)| place.store(*word, Relaxed));
        kind.store(self.kind.cast_unsigned(), Relaxed);
    }

    /// The length of the handle in bytes.
    pub fn length(&self) -> u32 {
        self.length
    }

    fn used_words(&self) -> &[u64] {
        &self.words[..(self.length as usize).div_ceil(8)]
    }

    /// The handle that was recorded; none if its length is impossible.
    pub fn read(length: u32, kind: &AtomicU32, words: &[AtomicU64; HANDLE_WORDS]) -> Option<FileHandle> {
        if length as usize > MAX_USED {
            return None;
        }
        let mut handle = FileHandle { kind: kind.load(Relaxed).cast_signed(), length, words: [0; HANDLE_WORDS] };
        let used = handle.used_words().len();
        // The remaining words of the cell belong to an earlier handle.
        handle.words.iter_mut().zip(&words[..used]).for_each(|(word, recorded)| *word = recorded.load(Relaxed));
        Some(handle)
    }

    /// Opens the file through the mount that `anchor` is open on. Needs `CAP_DAC_READ_SEARCH`.
    ///
    /// ext4 also fails with `ENOMEM` if the file is gone and its inode number is being given to a new file. So that is tried again
    /// for a moment, and then means that the file is gone.
    ///
    /// # Errors
    /// `ESTALE` when the file is gone, and those of `open(2)`.
    pub fn open(&self, anchor: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd, Errno> {
        const PAUSES: [Duration; 4] =
            [Duration::ZERO, Duration::from_micros(50), Duration::from_micros(500), Duration::from_millis(5)];
        for pause in PAUSES {
            match self.try_open(anchor, flags) {
                Err(Errno::NOMEM) => thread::sleep(pause),
                opened => return opened,
            }
        }
        Err(Errno::STALE)
    }

    fn try_open(&self, anchor: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd, Errno> {
        let mut raw = RawFileHandle { size: self.length, kind: self.kind, bytes: [0; MAX_SIZE] };
        for (bytes, word) in raw.bytes.chunks_exact_mut(8).zip(self.used_words()) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        let flags = (flags | OFlags::CLOEXEC).bits().cast_signed();
        // SAFETY: `raw` is a file handle of the size it says.
        let opened = unsafe { libc::open_by_handle_at(anchor.as_raw_fd(), (&raw mut raw).cast(), flags) };
        if opened < 0 {
            return Err(last_errno());
        }
        // SAFETY: the kernel just made this descriptor for this process alone.
        Ok(unsafe { OwnedFd::from_raw_fd(opened) })
    }
}

impl Hash for FileHandle {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // The kind says little, and most handles are much shorter than the longest.
        self.used_words().hash(state);
    }
}

/// Why the last system call failed.
pub(super) fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
