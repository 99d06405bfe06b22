//! A server that was killed but has not ended.
//!
//! SIGKILL does not end every wait in the kernel. A thread that closes a file of an unreachable NFS server waits until
//! the NFS server has the written data (`folio_wait_writeback`), even after a SIGKILL. The process exists as long as
//! such a thread, but the thread never runs the server's code again: the process is inert. If the thread's system call
//! cannot conflict with what the successor does, the supervisor starts the successor without waiting for the end of the
//! process.

use std::fs;

use podfs_fuse::caller::ending::{is_dying, is_exiting};

use super::call::{Call, call};

/// System calls that write back data, or only read. It makes no difference whether the kernel ends them late, or
/// whether the successor repeats them.
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

/// Whether a process was killed and none of its threads can change anything any more. The process may not have ended.
pub(super) fn is_inert(pid: i32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    let mut threads = threads.flatten().filter_map(|thread| thread.file_name().to_str()?.parse().ok());
    threads.all(|thread| is_inert_thread(pid, thread))
}

fn is_inert_thread(pid: i32, thread: i32) -> bool {
    let number = thread.cast_unsigned();
    is_exiting(number) || (is_dying(number) && is_harmless(call(pid, thread)))
}

fn is_harmless(call: Option<Call>) -> bool {
    matches!(call, Some(Call::In(number)) if HARMLESS.contains(&number))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_live_process_is_not_inert() {
        // The child is in read(2), a harmless call, and was not killed.
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("cat");
        let pid = child.id().cast_signed();
        while !is_harmless(call(pid, pid)) {}
        assert!(!is_inert(pid));
        drop(child.stdin.take());
        child.stdout.take().expect("a pipe").read_to_end(&mut Vec::new()).expect("its end");
        child.wait().expect("it ends");
    }

    #[test]
    fn a_process_that_was_not_reaped_is_inert() {
        let mut child = Command::new("true").spawn().expect("it starts");
        let pid = child.id().cast_signed();
        while fs::read_to_string(format!("/proc/{pid}/status")).expect("it is not forgotten").contains("VmSize:") {}
        assert!(is_inert(pid));
        child.wait().expect("it ends");
        assert!(!is_inert(pid), "there is none");
    }
}
