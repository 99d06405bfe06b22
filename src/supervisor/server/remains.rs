//! What remains of a server that was killed, while it has not ended.
//!
//! Not every wait in the kernel ends by a signal: who closes a file of an NFS server that is away waits until what was written is
//! there (`folio_wait_writeback`), killed or not. Such a thread keeps its process, but will never run the server's code
//! again. If what it does there changes nothing that its successor could do first, nobody has to wait for it.

use std::fs;

use podfs_fuse::ending::{is_dying, is_exiting};

/// Calls that bring what was written, or only look: doing them once more, or later, makes no difference.
const HARMLESS: [libc::c_long; 9] = [
    libc::SYS_close,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_preadv2,
    libc::SYS_lseek,
    libc::SYS_statx,
    libc::SYS_getdents64,
];

/// Whether a process was killed and nothing of it changes anything any more, though it may not have ended.
pub(super) fn is_spent(pid: i32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    let mut numbers = threads.flatten().filter_map(|thread| thread.file_name().to_str()?.parse().ok());
    numbers.all(|thread| is_exiting(thread) || (is_dying(thread) && call(thread).is_some_and(is_harmless)))
}

fn is_harmless(call: libc::c_long) -> bool {
    HARMLESS.contains(&call)
}

/// The number of the system call a thread is in, if it is in one.
fn call(thread: u32) -> Option<libc::c_long> {
    let text = fs::read_to_string(format!("/proc/{thread}/syscall")).ok()?;
    text.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_lives_is_not_spent() {
        assert!(!is_spent(std::process::id().cast_signed()));
        // A thread that reads, and was not killed.
        let (mut reader, _writer) = std::io::pipe().expect("a pipe");
        std::thread::spawn(move || std::io::Read::read(&mut reader, &mut [0]));
        assert!(!is_spent(std::process::id().cast_signed()));
    }

    #[test]
    fn who_has_ended_and_was_not_asked_how_is_spent() {
        let mut child = std::process::Command::new("true").spawn().expect("it starts");
        let pid = child.id().cast_signed();
        while fs::read_to_string(format!("/proc/{pid}/status")).expect("it is not forgotten").contains("VmSize:") {}
        assert!(is_spent(pid));
        child.wait().expect("it ends");
        assert!(!is_spent(pid), "there is none");
    }
}
