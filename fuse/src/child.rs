//! Children of this process that may outlive it.
//!
//! A child has a copy of all memory, but only the calling thread: locks of other threads stay locked for ever. So the child of a
//! process with threads only makes system calls. It allocates no memory and takes no lock.

use std::io;

use rustix::process::Pid;

/// Makes a child that shares this process's table of descriptors. The child runs `body`, and ends. The caller must wait(2) for the
/// child, unless SIGCHLD is ignored.
///
/// # Safety
/// `body` must only make system calls.
///
/// # Errors
/// When the kernel makes no more processes.
pub(crate) unsafe fn start(body: impl FnOnce()) -> io::Result<Pid> {
    // SAFETY: the caller guarantees that the child only makes system calls.
    unsafe { start_with(libc::CLONE_FILES, body) }
}

/// Like [`start`], but the child has a copy of the table of descriptors.
///
/// # Safety
/// Those of [`start`].
///
/// # Errors
/// Those of [`start`].
pub(crate) unsafe fn start_alone(body: impl FnOnce()) -> io::Result<Pid> {
    // SAFETY: the caller guarantees that the child only makes system calls.
    unsafe { start_with(0, body) }
}

unsafe fn start_with(flags: libc::c_int, body: impl FnOnce()) -> io::Result<Pid> {
    // SAFETY: the caller guarantees that the child only makes system calls.
    if let Some(child) = unsafe { fork_with(flags) }? {
        return Ok(child);
    }
    body();
    // SAFETY: the child has nothing to clean up.
    unsafe { libc::_exit(0) }
}

/// Makes a child that shares this process's table of descriptors, like fork(2), with all signals blocked in it. Returns its
/// process id; `None` in the child. The caller must wait(2) for it, unless SIGCHLD is ignored.
///
/// # Safety
/// The child must only make system calls, unless the calling process has no other thread.
///
/// # Errors
/// When the kernel makes no more processes.
pub(crate) unsafe fn fork() -> io::Result<Option<Pid>> {
    // SAFETY: the caller guarantees that the child only makes system calls.
    unsafe { fork_with(libc::CLONE_FILES) }
}

unsafe fn fork_with(flags: libc::c_int) -> io::Result<Option<Pid>> {
    // SAFETY: the caller guarantees that the child only makes system calls.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags | libc::SIGCHLD, 0, 0, 0, 0) };
    if pid == 0 {
        // SAFETY: the memory outlives these calls.
        unsafe {
            let mut all = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
        }
        return Ok(None);
    }
    match i32::try_from(pid) {
        Ok(pid @ 1..) => Ok(Pid::from_raw(pid)),
        _ => Err(io::Error::last_os_error()),
    }
}
