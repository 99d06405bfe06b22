//! Erasing a device: each byte of it reads as zero afterwards.
//!
//! The kernel writes the zeros (`BLKZEROOUT`): by a command of the disk if the disk guarantees zeros after it, which takes no
//! time, and byte by byte otherwise. `BLKDISCARD` does not suffice: the kernel no longer reports which disks read as zero after
//! it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// `_IO(0x12, 127)` of `linux/fs.h`.
const BLKZEROOUT: libc::Ioctl = 0x127f;
/// So many bytes are erased at a time.
const CHUNK: u64 = 64 << 20;

/// Erases the bytes from `offset` to `size` of a device that is open for writing. After each part, `progress` gets how many
/// bytes from the beginning are erased and on the disk, and returns whether to go on.
///
/// # Errors
/// When the disk does not take it; `Interrupted` when `progress` said no.
pub fn erase(device: &File, mut offset: u64, size: u64, progress: &mut dyn FnMut(u64) -> bool) -> io::Result<()> {
    while offset < size {
        let length = CHUNK.min(size - offset);
        let range = [offset, length];
        // SAFETY: the kernel reads two numbers of 64 bits, which `range` is.
        let done = unsafe { libc::ioctl(device.as_raw_fd(), BLKZEROOUT, range.as_ptr()) };
        if done != 0 {
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
