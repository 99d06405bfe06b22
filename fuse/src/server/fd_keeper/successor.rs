//! The start of a successor by the keeper of a dead server.
//!
//! An executed program has to be linked, locked into memory and confined before it can serve. That takes several milliseconds,
//! while callers wait. The keeper is linked, locked and confined already. The server cloned it before it had its first volume,
//! thread and secret, so a clone of the keeper can be the next server. This costs nothing, because the keeper exists anyway.
//!
//! 1. The supervisor sends [`START`] on the keeper's channel, with a control socket ([`request`]).
//! 2. The keeper puts the socket at [`NEXT_CONTROL`], and clones itself ([`start`]). The clone is a child of the keeper's parent.
//!    It first shares the keeper's table of descriptors, then leaves it with a copy of only the reserved numbers. That closes no
//!    file: close(2) may wait for a machine that does not answer.
//! 3. When the clone has its own table, the keeper answers with the process id and a pidfd. It closes the socket at the next message.
//! 4. The successor drops the state of its predecessor, locks its memory ([`become_server`]), and clones its own keeper. From here
//!    on, it is like an executed server, and inherits descriptors from the same keeper.
//!
//! A keeper that the server starts later is a clone of a process with threads, which may have locks. It starts no server; the
//! supervisor executes the next one.
//!
//! The successor has its addresses and the canaries of its stacks from its predecessor. So the supervisor requests one
//! only after a SIGKILL: each server after a crash has new addresses, so an attacker cannot guess them step by step.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;
use std::time::Duration;

use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

use super::handover::skip_earlier_answers;
use super::{
    CHANNEL, FIRST_FREE, HANDOVER, LISTENER, SEPARATED, place_at, put_placeholder, reserve_numbers, reserved,
    send_descriptors,
};
use crate::memory_lock;
use crate::protocol::receive_descriptors;

/// The control socket of a server that is started.
pub(super) const NEXT_CONTROL: RawFd = 15;
/// The message for a successor. No descriptor has this number.
pub(super) const START: RawFd = -1;
/// Length of the answer in bytes. It is longer than any answer to a request for descriptors, so that a late answer is recognised.
pub(super) const ANSWER: usize = 256;
/// Longest wait for the clone of a keeper, in milliseconds.
const TIMEOUT: i64 = 500;

/// A started successor.
pub struct StartedSuccessor {
    /// Its process id.
    pub pid: i32,
    /// Its pidfd.
    pub pidfd: OwnedFd,
}

/// Requests a successor from the keeper at the other end of `channel`. The successor's control socket is `control`.
///
/// # Errors
/// When the keeper does not answer in time, or cannot clone itself.
pub(crate) fn request(channel: BorrowedFd<'_>, control: &OwnedFd) -> io::Result<StartedSuccessor> {
    setsockopt(&channel, sockopt::ReceiveTimeout, &TimeVal::milliseconds(TIMEOUT))?;
    setsockopt(&channel, sockopt::SendTimeout, &TimeVal::milliseconds(TIMEOUT))?;
    // A keeper that does not answer gets no request: its clone would disturb the successor that the supervisor executes instead.
    skip_earlier_answers(channel, Duration::from_millis(TIMEOUT.unsigned_abs()))?;
    let (message, control) = (START.to_ne_bytes(), [control.as_raw_fd()]);
    let part = [io::IoSlice::new(&message)];
    let rights = [ControlMessage::ScmRights(&control)];
    sendmsg::<()>(channel.as_raw_fd(), &part, &rights, MsgFlags::MSG_NOSIGNAL, None)?;
    let mut answer = [0; ANSWER];
    let (length, mut descriptors) = receive_descriptors(&channel, &mut answer)?;
    let [a, b, c, d, ..] = answer;
    match descriptors.pop() {
        Some(pidfd) if length == ANSWER => Ok(StartedSuccessor { pid: i32::from_ne_bytes([a, b, c, d]), pidfd }),
        _ => Err(io::Error::other("the keeper could not clone itself")),
    }
}

/// Whether a clone can leave a table of descriptors without closing any (`close_range` with `CLOSE_RANGE_UNSHARE`, Linux 5.9).
pub(super) fn is_possible() -> bool {
    // SAFETY: the table has no such number.
    unsafe {
        libc::syscall(libc::SYS_close_range, libc::c_uint::MAX, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE) == 0
    }
}

/// In the keeper: clones it, and answers the supervisor. Returns `true` in the clone, which has its own table of descriptors. It
/// only makes system calls.
pub(super) fn start(control: RawFd) -> bool {
    let flags = libc::CLONE_FILES | libc::CLONE_PARENT | libc::CLONE_PIDFD | libc::SIGCHLD;
    let mut pidfd: libc::c_int = -1;
    // SAFETY: no other code uses the reserved number, and no other code owns `control`. The clone continues with a copy of all
    // memory, as after `fork(2)`; the keeper has no other thread. The pointer to the pidfd is the third argument on all
    // architectures.
    let pid = unsafe {
        libc::dup3(control, NEXT_CONTROL, libc::O_CLOEXEC);
        libc::close(control);
        libc::syscall(libc::SYS_clone, flags, ptr::null_mut::<libc::c_void>(), &raw mut pidfd, 0, 0)
    };
    if pid == 0 {
        // SAFETY: the descriptors stay open in the keeper's table; afterwards, the clone's table has none of these numbers.
        unsafe {
            let all = libc::c_uint::MAX;
            if libc::syscall(libc::SYS_close_range, FIRST_FREE, all, libc::CLOSE_RANGE_UNSHARE) != 0 {
                libc::_exit(1);
            }
            let one = 1_u64;
            libc::write(SEPARATED, (&raw const one).cast(), size_of_val(&one));
        }
        return true;
    }
    if pid > 0 && pidfd >= 0 {
        wait_until_separated(pidfd);
    }
    let mut answer = [0_u8; ANSWER];
    let pid = i32::try_from(pid).unwrap_or(-1);
    answer[..size_of_val(&pid)].copy_from_slice(&pid.to_ne_bytes());
    let has_begun = pid > 0 && pidfd >= 0;
    send_descriptors(&answer, if has_begun { std::slice::from_ref(&pidfd) } else { &[] });
    if has_begun {
        // SAFETY: clone(2) made the pidfd above, and no other code owns it.
        unsafe { libc::close(pidfd) };
    }
    false
}

/// In the keeper: waits until the clone has its own table of descriptors, or has ended. Until then, a change of the keeper's
/// descriptors would change those of the clone.
fn wait_until_separated(pidfd: RawFd) {
    let watch = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut watched = [watch(SEPARATED), watch(pidfd)];
    let mut count = 0_u64;
    // SAFETY: the array and the number outlive the calls.
    unsafe {
        while libc::poll(watched.as_mut_ptr(), 2, -1) < 0 {}
        if watched[0].revents != 0 {
            libc::read(SEPARATED, (&raw mut count).cast(), size_of_val(&count));
        }
    }
}

/// In the keeper: closes the control socket of the last requested successor, which has it or was given up.
pub(super) fn close_control_socket() {
    // SAFETY: no other code uses the reserved number.
    unsafe { libc::dup3(CHANNEL, NEXT_CONTROL, libc::O_CLOEXEC) };
}

/// In the clone: makes the process a server that has no keeper yet.
///
/// # Errors
/// When there are no descriptors left.
pub(super) fn become_server() -> io::Result<()> {
    let _ = rustix::thread::set_name(c"podfs-fuse");
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
    place_at(rustix::io::dup(reserved(NEXT_CONTROL))?, libc::STDIN_FILENO)?;
    [NEXT_CONTROL, LISTENER, HANDOVER].into_iter().for_each(put_placeholder);
    // The keeper has closed the descriptor at one of the reserved numbers.
    reserve_numbers()?;
    memory_lock::lock_again();
    Ok(())
}
