//! Finds the parts of a file that have blocks. With `FS_IOC_FIEMAP`, blocks count that are allocated and not yet written.

use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::handle::last_errno;

/// `struct fiemap` of `linux/fiemap.h`, with room for one extent.
#[repr(C)]
#[derive(Default)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extent: Extent,
}

/// `struct fiemap_extent`.
#[repr(C)]
#[derive(Default)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// `_IOWR('f', 11, struct fiemap)`, whose size does not count the extents.
pub const FS_IOC_FIEMAP: libc::Ioctl = 0xc020_660b_u32 as libc::Ioctl;

/// The first part of `range` that has blocks; none when it is a hole.
///
/// # Errors
/// When the kernel cannot list the extents of the file.
pub fn first_in(file: BorrowedFd<'_>, range: Range<u64>) -> Result<Option<Range<u64>>, Errno> {
    let length = range.end - range.start;
    let mut map = Fiemap { start: range.start, length, extent_count: 1, ..Fiemap::default() };
    // SAFETY: the request takes a `fiemap` with room for as many extents as it says.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP, &raw mut map) };
    let found = match (result, map.mapped_extents) {
        (0, 0) => None,
        (0, _) => Some(map.extent.logical..map.extent.logical.saturating_add(map.extent.length)),
        _ => match last_errno() {
            Errno::OPNOTSUPP | Errno::NOTTY => first_written_in(file, &range)?,
            errno => return Err(errno),
        },
    };
    let clip = |found: Range<u64>| found.start.max(range.start)..found.end.min(range.end);
    Ok(found.map(clip).filter(|found| !found.is_empty()))
}

/// As [`first_in`], on a file system that cannot list extents: blocks that are reserved and not written count as holes.
fn first_written_in(file: BorrowedFd<'_>, range: &Range<u64>) -> Result<Option<Range<u64>>, Errno> {
    match seek(file, SeekFrom::Data(range.start)) {
        Ok(start) => Ok(Some(start..seek(file, SeekFrom::Hole(start))?)),
        Err(Errno::NXIO) => Ok(None),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use rustix::fs::{FallocateFlags, fallocate};

    use super::*;

    #[test]
    fn blocks_are_found_where_something_was_written_or_reserved() {
        // The disk of the build: a tmpfs has no extents.
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).expect("a file");
        file.set_len(1 << 20).expect("a hole");
        let first = |range| first_in(File::as_fd(&file), range).expect("it can be looked at");
        assert_eq!(first(0..1 << 20), None);
        file.write_at(&[1; 4096], 65536).expect("written");
        assert_eq!(first(0..1 << 20), Some(65536..69632));
        assert_eq!(first(65537..65539), Some(65537..65539));
        assert_eq!(first(69632..1 << 20), None);
        fallocate(&file, FallocateFlags::KEEP_SIZE, 2 << 20, 8192).expect("reserved");
        assert_eq!(first(1 << 20..4 << 20), Some((2 << 20)..(2 << 20) + 8192));
    }
}
