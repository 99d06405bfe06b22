//! The keeper: a process that keeps the descriptors of a killed server open.
//!
//! It is a clone of the server that shares its table of descriptors (`CLONE_FILES` of clone(2)), but not its memory. So the keeper
//! has every descriptor of the server at once and without cost: open files, locks, files without a name. The keeper waits:
//!
//! 1. While the server lives, it waits for the server's end.
//! 2. When the server is dead, it starts the successor if the supervisor requests that, and it can (`successor`).
//! 3. It sends descriptors to the successor, by their numbers, until the supervisor dismisses it (`handover`).
//! 4. When the server is dead and no process has the other end of its channel, the keeper ends. That closes all descriptors of
//!    the server, and the mounts answer `ENOTCONN`.
//!
//! If the keeper dies with the server, the supervisor still has the descriptors of the mounts. The module `succession` describes
//! how the next server continues without the others.
//!
//! Numbers below [`FIRST_FREE`] are reserved: each has a fixed meaning or a placeholder. So descriptors of volumes have higher
//! numbers, and a successor can have them under the same numbers.

pub(super) mod handover;
pub(crate) mod successor;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::time::Duration;

use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, send, socketpair};

use crate::child;

/// The keeper's end of its channel.
pub(crate) const CHANNEL: RawFd = 10;
/// The number of the descriptor by which the keeper watches the server.
const SERVER: RawFd = 11;
/// The listening socket for the next supervisor.
pub(crate) const LISTENER: RawFd = 12;
/// The channel to the keeper of the server before this one.
pub(super) const HANDOVER: RawFd = 13;
/// The far end of the keeper's channel, until a supervisor gets it.
pub(crate) const FAR_END: RawFd = 14;
/// An eventfd by which the next server tells the keeper that it has its own table of descriptors.
pub(super) const SEPARATED: RawFd = 16;
/// The first number that is not reserved.
pub const FIRST_FREE: RawFd = 64;

/// Most descriptors of one message (`SCM_MAX_FD`).
const BATCH: usize = 250;
const _: () = assert!(BATCH < successor::ANSWER);

/// Closes all descriptors except standard input, output and error: the parent has left them open by mistake. A server puts
/// inherited descriptors at the numbers of its predecessor, so these must be free.
///
/// # Safety
/// No code of this process may use an open descriptor, except the standard ones.
pub unsafe fn close_inherited() {
    // SAFETY: the caller promises that no code uses these descriptors.
    unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
}

/// Puts placeholders at all free numbers below [`FIRST_FREE`], so that later descriptors get higher numbers.
///
/// # Errors
/// When there are no descriptors left.
pub fn reserve_numbers() -> io::Result<()> {
    let placeholder = EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?;
    loop {
        let next = rustix::io::fcntl_dupfd_cloexec(&placeholder, 0)?;
        if next.as_raw_fd() >= FIRST_FREE {
            break;
        }
        let _stays_open = next.into_raw_fd();
    }
    // The first placeholder may have a reserved number itself. It stays there.
    if placeholder.as_raw_fd() < FIRST_FREE {
        let _stays_open = OwnedFd::from(placeholder).into_raw_fd();
    }
    Ok(())
}

/// Puts a descriptor at one of the reserved numbers.
///
/// # Errors
/// Those of `dup3(2)`.
pub(crate) fn place_at(descriptor: OwnedFd, number: RawFd) -> io::Result<()> {
    // SAFETY: no other code owns reserved numbers, so this closes no descriptor in use.
    let placed = unsafe { libc::dup3(descriptor.as_raw_fd(), number, libc::O_CLOEXEC) };
    if placed < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The server's handle of its keeper.
pub(crate) struct FdKeeperHandle {
    pid: libc::pid_t,
    starts_successor: bool,
}

impl FdKeeperHandle {
    /// Starts the first keeper of the calling process, which must have no other thread and only reserved descriptors. The far end
    /// of its channel is at [`FAR_END`].
    ///
    /// Returns in the calling process, and later in each [successor] that the keeper starts after the death of that process. A
    /// successor has its own control socket and keeper.
    ///
    /// # Errors
    /// When the kernel makes no more processes or descriptors.
    pub(crate) fn start_first() -> io::Result<FdKeeperHandle> {
        let starts_successor = successor::is_possible();
        loop {
            prepare()?;
            // SAFETY: there is no other thread.
            if let Some(pid) = unsafe { child::fork() }? {
                return Ok(FdKeeperHandle { pid: pid.as_raw_nonzero().get(), starts_successor });
            }
            run_keeper(starts_successor);
            successor::become_server()?;
        }
    }

    /// Starts another keeper for the calling process, after the first one has ended. The far end of its channel is at [`FAR_END`].
    ///
    /// # Errors
    /// Those of [`Self::start_first`].
    pub(crate) fn start_another() -> io::Result<FdKeeperHandle> {
        prepare()?;
        // SAFETY: a keeper that starts no successor only makes system calls.
        let pid = unsafe { child::start(|| run_keeper(false)) }?;
        Ok(FdKeeperHandle { pid: pid.as_raw_nonzero().get(), starts_successor: false })
    }

    /// Its process.
    pub(crate) fn pid(&self) -> libc::pid_t {
        self.pid
    }

    /// Whether it can start a successor.
    pub(crate) fn starts_successor(&self) -> bool {
        self.starts_successor
    }
}

/// Prepares the reserved descriptors for a keeper of the calling process.
fn prepare() -> io::Result<()> {
    place_at(rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty())?, SERVER)?;
    open_channel()?;
    place_at(EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?.into(), SEPARATED)?;
    // The kernel reaps a keeper that ends.
    // SAFETY: no handler of SIGCHLD was set before.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    Ok(())
}

/// Makes a new channel to the running keeper, after the far end of the old one was closed. Its far end is at [`FAR_END`].
///
/// # Errors
/// When there are no descriptors left.
pub(crate) fn open_channel() -> io::Result<()> {
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    place_at(theirs, FAR_END)?;
    place_at(ours, CHANNEL)
}

/// Closes the far end, because a supervisor has it now.
pub(crate) fn close_far_end() {
    put_placeholder(FAR_END);
}

/// Puts a placeholder at one of the reserved numbers.
pub(super) fn put_placeholder(number: RawFd) {
    if let Ok(placeholder) = EventFd::from_flags(EfdFlags::EFD_CLOEXEC) {
        let _harmless = place_at(placeholder.into(), number);
    }
}

/// Ends the keeper at the other end of `channel`, whose server is dead.
pub fn dismiss(channel: OwnedFd) {
    // An error means that the keeper has ended already.
    let _ = send(channel.as_raw_fd(), &[], MsgFlags::MSG_NOSIGNAL);
}

/// The main loop of a keeper. It only makes system calls: it allocates no memory and takes no lock. It returns only in a successor
/// that the keeper has started.
fn run_keeper(starts_successor: bool) {
    const INTERVAL: Duration = Duration::from_millis(100);
    // SAFETY: the name outlives the call.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"podfs-keeper".as_ptr()) };
    let (mut server_lives, mut requested) = (true, [0; BATCH]);
    loop {
        let mut watched = [
            libc::pollfd { fd: if server_lives { SERVER } else { -1 }, events: libc::POLLIN, revents: 0 },
            libc::pollfd { fd: CHANNEL, events: libc::POLLIN, revents: 0 },
        ];
        // SAFETY: the array outlives the call and has as many entries.
        unsafe { libc::poll(watched.as_mut_ptr(), 2, -1) };
        if server_lives && watched[0].revents != 0 {
            server_lives = false;
            // If the server died before the supervisor got the far end, the far end is still open here.
            // SAFETY: the number is reserved, and only this process still has the table.
            unsafe { libc::close(FAR_END) };
        }
        if watched[1].revents & libc::POLLIN != 0 {
            match receive(&mut requested) {
                FdKeeperMessage::Numbers(count) => {
                    hand_over(&requested[..count]);
                    continue;
                }
                FdKeeperMessage::Start(control) if starts_successor => {
                    if successor::start(control) {
                        return;
                    }
                    continue;
                }
                FdKeeperMessage::Start(_) => continue,
                FdKeeperMessage::Nothing => {}
            }
        }
        if watched[1].revents != 0 {
            if !server_lives {
                // SAFETY: nothing is to be cleaned up.
                unsafe { libc::_exit(0) };
            }
            // The supervisor has ended. The server opens another channel for the next one.
            let mut watched = libc::pollfd { fd: SERVER, events: libc::POLLIN, revents: 0 };
            // SAFETY: the entry outlives the call.
            unsafe { libc::poll(&raw mut watched, 1, INTERVAL.as_millis() as libc::c_int) };
        }
    }
}

/// A message on a keeper's channel.
enum FdKeeperMessage {
    /// A request for this number of descriptors.
    Numbers(usize),
    /// A request for a successor, with its control socket.
    Start(RawFd),
    /// A dismissal, or the end of the channel. When the server is dead, the keeper ends after both.
    Nothing,
}

/// recvmsg(2) without an allocation. Stores the numbers of a request in `requested`.
fn receive(requested: &mut [RawFd; BATCH]) -> FdKeeperMessage {
    successor::close_control_socket();
    let mut space = AncillaryBuffer([0; 2048]);
    let mut part = libc::iovec { iov_base: requested.as_mut_ptr().cast(), iov_len: size_of_val(requested) };
    // SAFETY: the message points to memory of the given sizes, which outlives the call. The kernel fills in one header with at
    // least one number, or none.
    let (got, descriptor) = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = space.0.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(size_of::<RawFd>() as u32) as _;
        let got = libc::recvmsg(CHANNEL, &raw mut message, libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC);
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        let is_there = got > 0 && !header.is_null() && (*header).cmsg_type == libc::SCM_RIGHTS;
        (got, is_there.then(|| libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned()))
    };
    let Ok(got @ 1..) = usize::try_from(got) else { return FdKeeperMessage::Nothing };
    match descriptor {
        Some(control) => FdKeeperMessage::Start(control),
        None => FdKeeperMessage::Numbers(got / size_of::<RawFd>()),
    }
}

/// Answers a request for descriptors: a byte for each number, 1 if the descriptor is open, and the open descriptors.
fn hand_over(requested: &[RawFd]) {
    let (mut presence, mut numbers, mut count) = ([0_u8; BATCH], [0_i32; BATCH], 0);
    for (number, byte) in requested.iter().zip(&mut presence) {
        // SAFETY: for a number that is no descriptor, fcntl(2) only returns an error.
        if unsafe { libc::fcntl(*number, libc::F_GETFD) } >= 0 {
            *byte = 1;
            numbers[count] = *number;
            count += 1;
        }
    }
    send_descriptors(&presence[..requested.len()], &numbers[..count]);
}

/// The buffer for the descriptors of a message.
#[repr(align(16))]
struct AncillaryBuffer([u8; 2048]);

/// sendmsg(2) without an allocation.
pub(super) fn send_descriptors(bytes: &[u8], numbers: &[RawFd]) {
    let mut space = AncillaryBuffer([0; 2048]);
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let size = size_of_val(numbers) as u32;
    // SAFETY: the space is zeroed, aligned and larger than the message with its header; all that the message points to
    // outlives the call.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        if !numbers.is_empty() {
            message.msg_control = space.0.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(size) as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size) as _;
            std::ptr::copy_nonoverlapping(numbers.as_ptr().cast::<u8>(), libc::CMSG_DATA(header), size as usize);
        }
        libc::sendmsg(CHANNEL, &raw const message, libc::MSG_NOSIGNAL);
    }
}

/// A descriptor at one of the reserved numbers.
pub(crate) fn reserved(number: RawFd) -> BorrowedFd<'static> {
    debug_assert!((0..FIRST_FREE).contains(&number), "the number is reserved");
    // SAFETY: reserved numbers are open until the process ends.
    unsafe { BorrowedFd::borrow_raw(number) }
}
