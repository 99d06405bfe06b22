//! Finds out whether a dead server has executed a request that it had begun. The kernel sends such a request again, and the state
//! of the source shows whether the first one took effect.
//!
//! | request | done already if | else |
//! |---|---|---|
//! | MKDIR, MKNOD, SYMLINK | the name leads to such a file, made since then, of the caller | it is made; `EEXIST` |
//! | CREATE | there is an open file of this request, or as above | it is created |
//! | TMPFILE, OPEN, OPENDIR | there is an open file of this request | it is opened; what was open is closed |
//! | LINK | the name leads to the same file | it is made; `EEXIST` |
//! | UNLINK, RMDIR | there was such a name and there is none now, or it leads to another file than before | it is removed |
//! | RENAME | the old name is gone and the new one is there, or the old name leads to another file than before | it is renamed |
//! | RENAME that exchanges, or leaves a whiteout | the old name leads to another file than before | it is renamed |
//! | SETXATTR that creates | there was no such attribute, and it has the value now | it is set; `EEXIST` |
//! | REMOVEXATTR | there was such an attribute, and there is none now | it is removed |
//! | WRITE at the end | the data begins where the file ended before | it is written |
//!
//! The server does not begin a request that can only fail: the name or attribute to remove is not there, or the attribute to create
//! is. The successor executes the request again, and it fails again.
//!
//! Why the successor takes no other file for the one that the dead server made: the kernel locks a directory from before it sends
//! the request until it has the answer, so no process changes the name in between through this mount. If a process makes the same
//! change on the source in this moment, with the caller's own uid, the successor takes it for the dead server's change. On an NFS
//! export, also with another uid and up to [`CLOCK_DIFFERENCE`] before: the NFS server sets owner and times, may map root to another
//! user, and has its own clock.
//!
//! A process that uses the source may give the name to another file after the dead server has removed or renamed the first one. The
//! successor tells the two files apart by inode number and birth time ([`FileMark`](crate::region::FileMark)). It takes the second
//! file for the first one, and removes or renames it, if
//!
//! - it is the first file: the process has moved it back, or has linked it again by another name;
//! - the file system knows no birth times, and has used the inode number again;
//! - both files were made in the same tick of the kernel's clock, and have the same inode number;
//! - both are subvolumes of btrfs, and one is a snapshot of the other;
//! - an earlier version of podfs has begun the request: it recorded no mark.
//!
//! The successor executes all other requests again, because that changes nothing: what they set has the same value afterwards. It
//! takes a lock on the same description, which already has that lock.

use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{AtFlags, OFlags, Statx, StatxFlags, getxattr, statx};
use rustix::io::{Errno, pread};

use super::super::attributes::{NamedFile, attributes_of};
use super::super::descriptor::reopen;
use super::super::devices::device_of;
use crate::region::BegunRequest;
use crate::session::{Caller, Exchange};

/// The number of seconds that the clock of an NFS server may be behind that of this node.
const CLOCK_DIFFERENCE: i64 = 120;

/// Success if `outcome` failed with the errno `sign`, and `done` finds that a dead server has executed the request.
///
/// # Errors
/// Those of `outcome`.
pub fn success_if_done(
    outcome: Result<(), Errno>,
    sign: Errno,
    exchange: &Exchange<'_>,
    done: impl FnOnce(BegunRequest) -> bool,
) -> Result<(), Errno> {
    match (outcome, exchange.earlier()) {
        (Err(errno), Some(begun)) if errno == sign => {
            if done(begun) {
                Ok(())
            } else {
                Err(errno)
            }
        }
        (outcome, _) => outcome,
    }
}

/// The process that sets owner and times of a new file.
#[derive(Clone, Copy)]
pub enum Maker {
    /// The kernel of this node, for the caller of the request.
    Kernel(Caller),
    /// An NFS server.
    NfsServer,
}

/// The file `name`, if it was made by `maker` after the request was begun.
pub fn made_by(maker: Maker, directory: impl AsFd, name: &OsStr, begun: BegunRequest) -> Option<Statx> {
    let found = status_of_name(directory.as_fd(), name)?;
    let has_birth = found.stx_mask & StatxFlags::BTIME.bits() != 0;
    let made = if has_birth { found.stx_btime } else { found.stx_ctime };
    let in_nanoseconds = |seconds: i64, nanoseconds: i64| i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
    let latest = in_nanoseconds(made.tv_sec, i64::from(made.tv_nsec) + resolution(made.tv_nsec) - 1);
    let is_since = |seconds| latest >= in_nanoseconds(seconds, begun.at.tv_nsec);
    let is_same = match maker {
        Maker::Kernel(caller) => is_since(begun.at.tv_sec) && is_owned_by(caller, directory.as_fd(), &found)?,
        Maker::NfsServer => is_since(begun.at.tv_sec - CLOCK_DIFFERENCE),
    };
    is_same.then_some(found)
}

fn is_owned_by(caller: Caller, directory: BorrowedFd<'_>, found: &Statx) -> Option<bool> {
    let home = attributes_of(directory).ok()?;
    // New files in a setgid directory have its group, and all new files of a file system that is mounted with `grpid`.
    let has_group = found.stx_gid == caller.gid || found.stx_gid == home.stx_gid;
    Some(has_group && found.stx_uid == caller.uid)
}

/// The resolution in nanoseconds of the times of a file system that has this fraction of a second: the file system cuts off the rest.
/// That of FAT is two seconds or 10 ms, that of NTFS, CIFS and UDF 100 ns or 1 us.
fn resolution(nanoseconds: u32) -> i64 {
    match nanoseconds {
        0 => 2_000_000_000,
        fraction => {
            [10_000_000, 1_000_000, 1_000, 100].into_iter().find(|unit| fraction % unit == 0).map_or(1, i64::from)
        }
    }
}

/// Begins a request that removes or renames the file `found`. Does not begin it if there is no such file.
pub fn begin_removal(exchange: &Exchange<'_>, note: u64, found: NamedFile) {
    match found {
        NamedFile::Marked(file) => exchange.begin_with(note, file),
        NamedFile::Unknown => exchange.begin(note),
        NamedFile::Absent => {}
    }
}

/// Whether a dead server has begun to remove or rename another file than `found`, to which its name leads now. If that server did
/// not execute the request, another process has taken the name from the file, and nothing is left to do either.
pub fn is_another_file(exchange: &Exchange<'_>, found: NamedFile) -> bool {
    let begun = exchange.earlier().and_then(|begun| begun.file);
    matches!((begun, found), (Some(begun), NamedFile::Marked(found)) if !begun.is_same(found))
}

/// Whether `name` leads to the file that `file` is open on.
pub fn leads_to(directory: impl AsFd, name: &OsStr, file: impl AsFd) -> bool {
    let same = |found: &Statx| (device_of(found), found.stx_ino);
    let found = status_of_name(directory.as_fd(), name);
    found.is_some_and(|found| attributes_of(file.as_fd()).is_ok_and(|file| same(&file) == same(&found)))
}

/// Returns a number for the file that `name` leads to; `None` if there is no such file. It is the inode number if the file has the
/// device of the directory, as an earlier podfs has it. The roots of all subvolumes of btrfs have the same inode number, and another
/// device each.
pub fn number_of(directory: impl AsFd, name: &OsStr) -> Option<u64> {
    let found = status_of_name(directory.as_fd(), name)?;
    let (device, above) = (device_of(&found), attributes_of(directory.as_fd()).map_or(0, |above| device_of(&above)));
    Some(if device == above { found.stx_ino } else { found.stx_ino ^ device.rotate_left(32) })
}

/// Whether the extended attribute `name` of the file at `path` has this value.
pub fn has_value(path: &str, name: &CString, value: &[u8]) -> bool {
    // The buffer has room for one more byte, so that a longer value does not look equal.
    let mut found = vec![0; value.len() + 1];
    getxattr(path, name, &mut found[..]).is_ok_and(|length| &found[..length] == value)
}

/// Returns the number of bytes of `data` that a dead server has appended to `file`, whose size was `end` before. `None` if it has
/// appended nothing, or if the file has other bytes there.
pub fn appended(file: BorrowedFd<'_>, data: &[u8], end: u64) -> Option<usize> {
    let size = attributes_of(file).ok()?.stx_size;
    let more = usize::try_from(size.checked_sub(end)?).unwrap_or(usize::MAX).min(data.len());
    // The caller may have no right to read the file.
    let readable = reopen(file, OFlags::RDONLY | OFlags::NONBLOCK).ok()?;
    let mut found = vec![0; more];
    let read = pread(&readable, &mut found[..], end).ok()?;
    (more > 0 && read == more && found == data[..more]).then_some(more)
}

fn status_of_name(directory: BorrowedFd<'_>, name: &OsStr) -> Option<Statx> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    statx(directory, name, AtFlags::SYMLINK_NOFOLLOW, wanted).ok()
}
