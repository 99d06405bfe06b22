//! Keeps the memory of a process with secrets out of swap, core dumps and other processes.

pub mod allocator;
mod unused;

use std::sync::atomic::{AtomicBool, Ordering};
use std::{fs, io};

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{CapabilitySet, capabilities};
use zeroize::Zeroize;

pub use unused::{return_own_stack, return_unused_memory, unmap_program};

/// Size from which the allocator returns freed blocks to the kernel at once, in bytes.
const RETURN_AT: libc::c_int = 128 * 1024;

/// Whether the kernel makes a process dumpable when one of its threads changes its uid (`fs.suid_dumpable`, proc_sys_fs(5)).
static UID_CHANGES_ALLOW_DUMPS: AtomicBool = AtomicBool::new(false);

static LOCKED: AtomicBool = AtomicBool::new(false);

/// Forbids core dumps and ptrace(2) by processes of the same user, and locks present and later memory against swap. The kernel
/// locks a page when the process first touches it.
///
/// # Errors
/// When memory cannot be locked (no `CAP_IPC_LOCK`, and a limit in `RLIMIT_MEMLOCK`). The other
/// measures are in effect then.
pub fn protect_memory() -> io::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let setting = fs::read("/proc/sys/fs/suid_dumpable").unwrap_or_default();
    UID_CHANGES_ALLOW_DUMPS.store(setting.trim_ascii() != b"0", Ordering::Relaxed);
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    // With a limit, later allocations would fail.
    if !may_lock_without_limit()? {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    lock_all()?;
    LOCKED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Forbids core dumps again after a thread has changed its uid. Does nothing if [`protect_memory`] was not called, or if the kernel
/// continues to forbid them.
pub(crate) fn forbid_dumps_again() {
    if UID_CHANGES_ALLOW_DUMPS.load(Ordering::Relaxed) {
        // The call was allowed before.
        let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    }
}

/// Locks the memory of a clone of a process with locked memory. A clone does not inherit memory locks (mlockall(2)).
pub(crate) fn lock_again() {
    if is_locked() {
        let _as_the_supervisor_warned = lock_all();
    }
}

fn lock_all() -> rustix::io::Result<()> {
    mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)
}

/// Whether the memory of this process is locked.
fn is_locked() -> bool {
    LOCKED.load(Ordering::Relaxed)
}

/// Overwrites `bytes` with zeros; the compiler keeps the stores even if no code reads the bytes again.
pub fn wipe(bytes: &mut [u8]) {
    // SAFETY: any eight bytes are a `u64`. Words need an eighth of the stores.
    let (head, words, tail) = unsafe { bytes.align_to_mut::<u64>() };
    head.zeroize();
    words.zeroize();
    tail.zeroize();
}

fn may_lock_without_limit() -> io::Result<bool> {
    let (soft, _) = getrlimit(Resource::RLIMIT_MEMLOCK)?;
    Ok(soft == RLIM_INFINITY || capabilities(None)?.effective.contains(CapabilitySet::IPC_LOCK))
}

/// Limits the memory of the C allocator in a process with a thread for each volume. The allocator returns large blocks, such
/// as the read buffers of FUSE sessions, to the kernel when they are freed.
pub fn tune_allocator() {
    // SAFETY: mallopt only sets parameters; it is called before threads are started.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, RETURN_AT);
    }
}

/// Returns all free memory to the kernel, for example before the process clones itself: the clone shares the memory in use.
pub fn return_free_memory() {
    // SAFETY: malloc_trim changes no block that is in use.
    unsafe { libc::malloc_trim(0) };
}

#[cfg(test)]
mod tests {
    use super::wipe;

    #[test]
    fn every_byte_is_wiped_wherever_the_bytes_begin_and_end() {
        // SE-02
        for (start, end) in (0..9).flat_map(|start| (start..40).map(move |end| (start, end))) {
            let mut bytes = [0x5a_u8; 40];
            wipe(&mut bytes[start..end]);
            let wiped = |at: usize| (start..end).contains(&at);
            assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == if wiped(at) { 0 } else { 0x5a }));
        }
    }
}
