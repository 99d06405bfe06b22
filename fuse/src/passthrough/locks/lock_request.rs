//! A lock or unlock request of a caller, and the system calls for it: lock, unlock, and test for a conflicting lock.

use std::os::fd::OwnedFd;

use nix::fcntl::FcntlArg;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::session::abi::{FileLock, LK_FLOCK, LkIn};

/// `OFFSET_MAX` of the kernel: to the end of the file, however long it gets.
const TO_THE_END: u64 = i64::MAX as u64;

/// A lock that a caller asks for.
#[derive(Clone, Copy, Debug)]
pub enum LockRequest {
    /// `flock(2)`: `LOCK_SH`, `LOCK_EX` or `LOCK_UN`, which may block.
    Whole(FlockOperation),
    /// `fcntl(2)`: a kind and a range.
    Range(FileLock),
}

impl LockRequest {
    /// The lock that the request asks for.
    ///
    /// # Errors
    /// `EINVAL` for an unknown kind of lock.
    pub fn parse(arguments: &LkIn) -> Result<LockRequest, Errno> {
        let kind = arguments.lk.typ.cast_signed();
        if arguments.lk_flags & LK_FLOCK == 0 {
            let known = [libc::F_RDLCK, libc::F_WRLCK, libc::F_UNLCK].contains(&kind);
            return if known { Ok(LockRequest::Range(arguments.lk)) } else { Err(Errno::INVAL) };
        }
        match kind {
            libc::F_RDLCK => Ok(LockRequest::Whole(FlockOperation::LockShared)),
            libc::F_WRLCK => Ok(LockRequest::Whole(FlockOperation::LockExclusive)),
            libc::F_UNLCK => Ok(LockRequest::Whole(FlockOperation::Unlock)),
            _ => Err(Errno::INVAL),
        }
    }

    /// Whether this releases a lock, which never waits.
    pub fn is_unlock(self) -> bool {
        match self {
            LockRequest::Whole(operation) => operation == FlockOperation::Unlock,
            LockRequest::Range(range) => range.typ.cast_signed() == libc::F_UNLCK,
        }
    }

    /// The request that releases this lock.
    pub fn undone(self) -> Self {
        match self {
            LockRequest::Whole(_) => LockRequest::Whole(FlockOperation::Unlock),
            LockRequest::Range(range) => LockRequest::Range(FileLock { typ: libc::F_UNLCK.cast_unsigned(), ..range }),
        }
    }

    /// The request that releases all locks of a range.
    pub(super) fn unlock_all() -> Self {
        LockRequest::Range(FileLock { start: 0, end: TO_THE_END, typ: libc::F_UNLCK.cast_unsigned(), pid: 0 })
    }

    /// Releases a lock that was granted, but could not be recorded or reported to the kernel.
    pub fn undo_on(self, description: &OwnedFd) {
        // Unlocking fails only where locking would.
        let _ = self.undone().try_on(description);
    }

    /// Locks or unlocks, or fails at once with `EAGAIN`.
    pub fn try_on(self, description: &OwnedFd) -> Result<(), Errno> {
        match self {
            LockRequest::Whole(operation) => flock(description, at_once(operation)),
            LockRequest::Range(range) => fcntl(description, FcntlArg::F_OFD_SETLK(&fcntl_lock(range)?)),
        }
    }

    /// Locks, and waits for it as long as it takes; `EINTR` when a signal came.
    pub(super) fn wait_on(self, description: &OwnedFd) -> Result<(), Errno> {
        match self {
            LockRequest::Whole(operation) => flock(description, operation),
            LockRequest::Range(range) => fcntl(description, FcntlArg::F_OFD_SETLKW(&fcntl_lock(range)?)),
        }
    }
}

/// The lock that keeps `range` from being locked on `description`, or one of kind `F_UNLCK`.
///
/// # Errors
/// Those of `fcntl(2)`.
pub fn conflict(description: &OwnedFd, range: FileLock) -> Result<FileLock, Errno> {
    let mut lock = fcntl_lock(range)?;
    fcntl(description, FcntlArg::F_OFD_GETLK(&mut lock))?;
    let start = lock.l_start.max(0).cast_unsigned();
    let end = if lock.l_len == 0 { TO_THE_END } else { start.saturating_add_signed(lock.l_len - 1) };
    Ok(FileLock { start, end, typ: lock.l_type as u32, pid: lock.l_pid.max(0).cast_unsigned() })
}

/// The operation that fails instead of blocking.
fn at_once(operation: FlockOperation) -> FlockOperation {
    match operation {
        FlockOperation::LockShared => FlockOperation::NonBlockingLockShared,
        FlockOperation::LockExclusive => FlockOperation::NonBlockingLockExclusive,
        other => other,
    }
}

/// rustix has no locks of open file descriptions; nix takes libc's structure for them.
fn fcntl_lock(range: FileLock) -> Result<libc::flock, Errno> {
    let start = i64::try_from(range.start).map_err(|_| Errno::INVAL)?;
    let length = if range.end >= TO_THE_END { 0 } else { range.end.saturating_sub(range.start).saturating_add(1) };
    Ok(libc::flock {
        l_type: range.typ as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: i64::try_from(length).map_err(|_| Errno::INVAL)?,
        l_pid: 0,
    })
}

fn fcntl(description: &OwnedFd, command: FcntlArg<'_>) -> Result<(), Errno> {
    match nix::fcntl::fcntl(description, command) {
        Ok(_) => Ok(()),
        Err(errno) => Err(Errno::from_raw_os_error(errno as i32)),
    }
}
