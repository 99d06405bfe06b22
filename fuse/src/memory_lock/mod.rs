//! Keeping the memory of a process with secrets out of swap, core dumps and other processes.

pub mod allocator;
mod unused;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::thread::{CapabilitySet, capabilities};
use zeroize::Zeroize;

pub use unused::{return_own_stack, return_unused_memory};

/// Bytes above which the allocator returns a freed block to the kernel at once.
const RETURN_AT: libc::c_int = 128 * 1024;

static LOCKED: AtomicBool = AtomicBool::new(false);

/// No core dumps, no `ptrace` by others of the same user, no swap: everything this process holds now
/// or later stays in memory, pages it never touches excepted.
///
/// # Errors
/// When memory cannot be locked (no `CAP_IPC_LOCK`, and a limit in `RLIMIT_MEMLOCK`). The rest holds then.
pub fn protect_memory() -> io::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    // Under a limit, locking what comes later would make some later allocation fail.
    if !may_lock_without_limit()? {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    lock_all()?;
    LOCKED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Locks the memory of a process that is a clone of one whose memory is locked: a clone does not inherit that.
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
    // SAFETY: any eight bytes are a `u64`. Whole words make an eighth of the stores.
    let (head, words, tail) = unsafe { bytes.align_to_mut::<u64>() };
    head.zeroize();
    words.zeroize();
    tail.zeroize();
}

fn may_lock_without_limit() -> io::Result<bool> {
    let (soft, _) = getrlimit(Resource::RLIMIT_MEMLOCK)?;
    Ok(soft == RLIM_INFINITY || capabilities(None)?.effective.contains(CapabilitySet::IPC_LOCK))
}

/// Keeps the C allocator small in a process with a thread per volume, and lets large blocks, such as
/// the read buffers of FUSE sessions, go back to the kernel when they are freed.
pub fn tune_allocator() {
    // SAFETY: mallopt only sets parameters; it is called before threads are started.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, RETURN_AT);
    }
}

/// Returns all memory that is free to the kernel. A process that is cloned from this one shares what is left.
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
