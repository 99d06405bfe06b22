//! Erasing a device: each byte of the device reads as zero afterwards.
//!
//! The kernel makes the zeros (`BLKZEROOUT`). If the disk has a command after which it guarantees zeros, the kernel uses that, and
//! it takes almost no time. Otherwise the kernel writes each byte. `BLKDISCARD` does not suffice: the kernel no longer reports
//! which disks read as zero after it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// `_IO(0x12, 127)` of `linux/fs.h`.
const BLKZEROOUT: libc::Ioctl = 0x127f;
/// How many bytes podfs erases at a time.
const CHUNK: u64 = 64 << 20;

/// Erases the bytes from `offset` to `size` of a device that is open for writing. After each part, calls `progress` with the offset
/// up to which the device is erased and synced. `progress` returns whether to go on.
///
/// # Errors
/// When the disk refuses; `Interrupted` if `progress` has returned false.
pub fn erase(device: &File, mut offset: u64, size: u64, progress: &mut dyn FnMut(u64) -> bool) -> io::Result<()> {
    while offset < size {
        let length = CHUNK.min(size - offset);
        let range = [offset, length];
        // SAFETY: the kernel reads two numbers of 64 bits, which `range` is.
        let result = unsafe { libc::ioctl(device.as_raw_fd(), BLKZEROOUT, range.as_ptr()) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        offset += length;
        device.sync_data()?;
        if !progress(offset) {
            return Err(io::ErrorKind::Interrupted.into());
        }
    }
    Ok(())
}
