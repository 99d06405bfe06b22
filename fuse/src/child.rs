//! Children of this process that may outlive it.
//!
//! A child has a copy of all memory, and none of the other threads: locks that these held stay locked. So the child of a process
//! with threads makes system calls only, allocates no memory and takes no lock.

use std::io;

use rustix::process::Pid;

/// Makes a child that shares this process's descriptors. It does what `life` says, and ends. The caller must wait(2) for it, unless SIGCHLD is ignored.
///
/// # Safety
/// `life` makes system calls only.
///
/// # Errors
/// When there are no more processes.
pub(crate) unsafe fn start(life: impl FnOnce()) -> io::Result<Pid> {
    // SAFETY: what the child does is the caller's word.
    unsafe { start_with(libc::CLONE_FILES, life) }
}

/// As [`start`], with copies of this process's descriptors.
///
/// # Safety
/// As there.
///
/// # Errors
/// As there.
pub(crate) unsafe fn start_alone(life: impl FnOnce()) -> io::Result<Pid> {
    // SAFETY: what the child does is the caller's word.
    unsafe { start_with(0, life) }
}

unsafe fn start_with(flags: libc::c_int, life: impl FnOnce()) -> io::Result<Pid> {
    // SAFETY: what the child does is the caller's word.
    if let Some(child) = unsafe { fork_with(flags) }? {
        return Ok(child);
    }
    life();
    // SAFETY: nothing is to be cleaned up.
    unsafe { libc::_exit(0) }
}

/// Makes a child that shares this process's descriptors, and goes on from here with all signals blocked. Returns its process, and nothing in the child. The caller must
/// wait(2) for it, unless SIGCHLD is ignored.
///
/// # Safety
/// The child makes system calls only, unless the calling process has no other thread.
///
/// # Errors
/// When there are no more processes.
pub(crate) unsafe fn fork() -> io::Result<Option<Pid>> {
    // SAFETY: what the child does is the caller's word.
    unsafe { fork_with(libc::CLONE_FILES) }
}

unsafe fn fork_with(flags: libc::c_int) -> io::Result<Option<Pid>> {
    // SAFETY: what the child does is the caller's word.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags | libc::SIGCHLD, 0, 0, 0, 0) };
    if pid == 0 {
        // SAFETY: these calls take memory that outlives them.
        unsafe {
            let mut all = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
        }
        return Ok(None);
    }
    Pid::from_raw(pid as i32).filter(|_| pid > 0).map(Some).ok_or_else(io::Error::last_os_error)
}
