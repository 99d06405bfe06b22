//! The keeper: a process that keeps the server's descriptors open when the server is killed.
//!
//! It is a clone of the server that shares its table of descriptors (`CLONE_FILES` of `clone(2)`), not its memory. So
//! every descriptor that the server opens is the keeper's, too, at the same moment and without cost: open files,
//! locks, files without a name. The keeper waits:
//!
//! 1. While the server lives, it waits for the server's end.
//! 2. When the server is dead, it starts the successor if the supervisor asks for that and it can (`successor`).
//! 3. It hands descriptors to the successor, by their numbers, until it is dismissed.
//! 4. When the server is dead and no process has the other end of its channel either, the keeper ends, and with it all
//!    descriptors of the server: the mounts answer `ENOTCONN`.
//!
//! When the keeper dies with the server, the supervisor still has the descriptors that the mounts need; `succession` says how the
//! next server continues without the others.
//!
//! Numbers below [`FIRST_FREE`] are for the server's own descriptors, each of a fixed meaning or taken by a placeholder.
//! So descriptors of volumes have higher numbers, and a successor can have them at the same numbers.

pub(crate) mod successor;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::time::Duration;

use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, send, setsockopt, socketpair, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::child;
use crate::protocol::receive_descriptors;

/// The keeper's end of its channel.
pub(crate) const CHANNEL: RawFd = 10;
/// The number of the descriptor by which the keeper watches the server.
const SERVER: RawFd = 11;
/// Where supervisors connect to a server that has lost its own.
pub(crate) const LISTENER: RawFd = 12;
/// The channel to the keeper of the server before this one.
pub(super) const HANDOVER: RawFd = 13;
/// The far end of the keeper's channel, until a supervisor has it.
pub(crate) const FAR_END: RawFd = 14;
/// The first number that is not reserved.
pub const FIRST_FREE: RawFd = 64;

/// Most descriptors of one message (`SCM_MAX_FD`).
const BATCH: usize = 250;
const _: () = assert!(BATCH < successor::ANSWER);
/// How long a keeper may take for an answer: it has nothing else to do.
const TIMEOUT: i64 = 5;

/// Closes all descriptors that the parent has left open by mistake: all but standard input, output and error. A server puts the
/// descriptors that it inherits at the numbers that its predecessor had, so these must be free.
///
/// # Safety
/// Nothing of this process is open yet.
pub unsafe fn close_strangers() {
    // SAFETY: the caller promises that no code uses what is closed.
    unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
}

/// Takes all numbers below [`FIRST_FREE`] that are free, so that nothing opened later gets one of them.
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
    // The original may have got a low number itself, and stays there.
    if placeholder.as_raw_fd() < FIRST_FREE {
        let _stays_open = OwnedFd::from(placeholder).into_raw_fd();
    }
    Ok(())
}

/// Puts a descriptor at one of the reserved numbers.
///
/// # Errors
/// Those of `dup3(2)`.
pub(crate) fn put(descriptor: OwnedFd, number: RawFd) -> io::Result<()> {
    // SAFETY: no other code owns reserved numbers, so nothing in use is closed.
    let placed = unsafe { libc::dup3(descriptor.as_raw_fd(), number, libc::O_CLOEXEC) };
    if placed < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A running keeper, as the server knows it.
pub(crate) struct Keeper {
    pid: libc::pid_t,
    starts_successor: bool,
}

impl Keeper {
    /// Starts the first keeper of the calling process, which has no other thread and nothing open but reserved numbers. The
    /// other end of its channel is at [`FAR_END`].
    ///
    /// Returns in the calling process, and in each [successor] that the keeper starts when that process is dead: with a
    /// control socket and a keeper of its own.
    ///
    /// # Errors
    /// When there are no more processes or descriptors.
    pub(crate) fn start_first() -> io::Result<Keeper> {
        let starts_successor = successor::is_possible();
        loop {
            prepare()?;
            // SAFETY: there is no other thread.
            if let Some(pid) = unsafe { child::fork() }? {
                return Ok(Keeper { pid: pid.as_raw_nonzero().get(), starts_successor });
            }
            keep(starts_successor);
            successor::become_server()?;
        }
    }

    /// Starts a keeper for the calling process, in place of one that is gone. The other end of its channel is at [`FAR_END`].
    ///
    /// # Errors
    /// As [`Self::start_first`].
    pub(crate) fn start_another() -> io::Result<Keeper> {
        prepare()?;
        // SAFETY: a keeper that starts no successor makes system calls only.
        let pid = unsafe { child::start(|| keep(false)) }?;
        Ok(Keeper { pid: pid.as_raw_nonzero().get(), starts_successor: false })
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

/// Prepares the descriptors that a keeper of the calling process expects.
fn prepare() -> io::Result<()> {
    put(rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty())?, SERVER)?;
    open_channel()?;
    // The kernel reaps a keeper that ends.
    // SAFETY: no handler of SIGCHLD was set before.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    Ok(())
}

/// A new channel to the keeper that runs, in place of one whose other end is closed. Its other end is at [`FAR_END`].
///
/// # Errors
/// When there are no descriptors left.
pub(crate) fn open_channel() -> io::Result<()> {
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    put(theirs, FAR_END)?;
    put(ours, CHANNEL)
}

/// A supervisor has the far end now.
pub(crate) fn let_go_of_far_end() {
    empty(FAR_END);
}

/// Puts a placeholder at one of the reserved numbers.
pub(super) fn empty(number: RawFd) {
    if let Ok(placeholder) = EventFd::from_flags(EfdFlags::EFD_CLOEXEC) {
        let _harmless = put(placeholder.into(), number);
    }
}

/// The descriptors that a dead server had open and its keeper holds.
pub(crate) struct Handover(());

impl Handover {
    /// Of the keeper at the other end of `channel`.
    ///
    /// # Errors
    /// When it is no socket.
    pub(crate) fn new(channel: OwnedFd) -> io::Result<Self> {
        setsockopt(&channel, sockopt::ReceiveTimeout, &TimeVal::seconds(TIMEOUT))?;
        setsockopt(&channel, sockopt::SendTimeout, &TimeVal::seconds(TIMEOUT))?;
        // Out of the way of what is inherited.
        put(channel, HANDOVER)?;
        Ok(Self(()))
    }

    /// Takes descriptors over, each at the number it had: `numbers` are in ascending order and free here. Gives those that
    /// are not to be had.
    ///
    /// # Errors
    /// When the keeper is gone.
    pub(crate) fn inherit(&self, numbers: &[RawFd]) -> io::Result<Vec<RawFd>> {
        let mut missing = Vec::new();
        let _others = take_others(reserved(SERVER), FIRST_FREE, numbers)?;
        for batch in numbers.chunks(BATCH) {
            let asked: Vec<u8> = batch.iter().flat_map(|number| number.to_ne_bytes()).collect();
            send(HANDOVER, &asked, MsgFlags::MSG_NOSIGNAL)?;
            let mut there = [0; successor::ANSWER];
            let (got, descriptors) = loop {
                match receive_descriptors(&reserved(HANDOVER), &mut there)? {
                    // It has started a successor, and the supervisor did not wait for that.
                    (successor::ANSWER, _) => {}
                    answer => break answer,
                }
            };
            if got != batch.len() {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the keeper of the last server is gone"));
            }
            missing.extend(batch.iter().zip(there).filter(|(_, there)| *there == 0).map(|(number, _)| *number));
            let had: Vec<_> =
                batch.iter().zip(there).filter(|(_, there)| *there != 0).map(|(number, _)| *number).collect();
            place(descriptors, &had)?;
        }
        Ok(missing)
    }
}

impl Drop for Handover {
    fn drop(&mut self) {
        empty(HANDOVER);
    }
}

/// Tells the keeper at the other end of `channel`, whose server is dead, to end.
pub fn dismiss(channel: OwnedFd) {
    // A keeper that is gone already needs no message.
    let _ = send(channel.as_raw_fd(), &[], MsgFlags::MSG_NOSIGNAL);
}

/// Takes all free numbers from `first` on that are below the last of `numbers` and not among them, with copies of
/// `placeholder`. As the kernel gives the lowest free number to each descriptor that comes, those that come next are at
/// `numbers` at once, which are in ascending order. To move one would be to close it where it came, and to close a file that
/// was written to may mean to wait for a server that does not answer.
fn take_others(placeholder: BorrowedFd<'_>, first: RawFd, numbers: &[RawFd]) -> io::Result<Vec<OwnedFd>> {
    let mut others = Vec::new();
    let Some(last) = numbers.last() else { return Ok(others) };
    let mut next = first;
    while next < *last {
        let taken = rustix::io::fcntl_dupfd_cloexec(placeholder, next)?;
        let number = taken.as_raw_fd();
        next = number + 1;
        // Dropping one that is too much makes its number free again.
        if number < *last && numbers.binary_search(&number).is_err() {
            others.push(taken);
        }
    }
    Ok(others)
}

/// Moves descriptors to `numbers`, which are free. Both are in ascending order, and each descriptor is at the lowest number
/// that was free when it came, so none is above its place; the last goes first, and none is in the way of another. Only if
/// one is missing are those after it not [there already](take_others).
fn place(descriptors: Vec<OwnedFd>, numbers: &[RawFd]) -> io::Result<()> {
    if descriptors.len() != numbers.len() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the keeper handed over other descriptors than the successor asked for",
        ));
    }
    for (descriptor, number) in descriptors.into_iter().zip(numbers).rev() {
        if descriptor.as_raw_fd() == *number {
            let _at_its_place = descriptor.into_raw_fd();
            continue;
        }
        // SAFETY: asking for the flags of a number that is no descriptor is an error, not harm.
        if unsafe { libc::fcntl(*number, libc::F_GETFD) } >= 0 {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("descriptor {number} is in use already")));
        }
        put(descriptor, *number)?;
    }
    Ok(())
}

/// The life of a keeper. Makes system calls only: it allocates no memory and takes no lock. Returns in a successor that the keeper
/// has started, and never otherwise.
fn keep(starts_successor: bool) {
    const LOOK_AGAIN: Duration = Duration::from_millis(100);
    // SAFETY: the name outlives the call.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"podfs-keeper".as_ptr()) };
    let (mut server_lives, mut asked) = (true, [0; BATCH]);
    loop {
        let mut watched = [
            libc::pollfd { fd: if server_lives { SERVER } else { -1 }, events: libc::POLLIN, revents: 0 },
            libc::pollfd { fd: CHANNEL, events: libc::POLLIN, revents: 0 },
        ];
        // SAFETY: the array outlives the call and has as many entries.
        unsafe { libc::poll(watched.as_mut_ptr(), 2, -1) };
        if server_lives && watched[0].revents != 0 {
            server_lives = false;
            // A server that died before the supervisor got the far end has left it here, and no process will fetch it.
            // SAFETY: the number is reserved, and this process alone is left to use it.
            unsafe { libc::close(FAR_END) };
        }
        if watched[1].revents & libc::POLLIN != 0 {
            match receive(&mut asked) {
                KeeperMessage::Numbers(count) => {
                    hand_over(&asked[..count]);
                    continue;
                }
                KeeperMessage::Start(control) if starts_successor => {
                    if successor::start(control) {
                        return;
                    }
                    continue;
                }
                KeeperMessage::Start(_) => continue,
                KeeperMessage::Nothing => {}
            }
        }
        if watched[1].revents != 0 {
            if !server_lives {
                // SAFETY: nothing is to be cleaned up.
                unsafe { libc::_exit(0) };
            }
            // The supervisor is gone. The server opens another channel for the next one.
            let mut watched = libc::pollfd { fd: SERVER, events: libc::POLLIN, revents: 0 };
            // SAFETY: as above.
            unsafe { libc::poll(&raw mut watched, 1, LOOK_AGAIN.as_millis() as libc::c_int) };
        }
    }
}

/// A message on a keeper's channel.
enum KeeperMessage {
    /// A question for so many descriptors.
    Numbers(usize),
    /// The order to start a successor, with its control socket.
    Start(RawFd),
    /// A dismissal or the end of the channel. Both are final once the server is dead.
    Nothing,
}

/// `recvmsg(2)` without asking for memory. The numbers of a question come to `asked`.
fn receive(asked: &mut [RawFd; BATCH]) -> KeeperMessage {
    successor::let_go_of_control();
    let mut space = Space([0; 2048]);
    let mut part = libc::iovec { iov_base: asked.as_mut_ptr().cast(), iov_len: size_of_val(asked) };
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
    let Ok(got @ 1..) = usize::try_from(got) else { return KeeperMessage::Nothing };
    match descriptor {
        Some(control) => KeeperMessage::Start(control),
        None => KeeperMessage::Numbers(got / size_of::<RawFd>()),
    }
}

/// Answers a question for descriptors.
fn hand_over(asked: &[RawFd]) {
    let (mut there, mut numbers, mut count) = ([0_u8; BATCH], [0_i32; BATCH], 0);
    for (number, there) in asked.iter().zip(&mut there) {
        // SAFETY: asking for the flags of a number that is no descriptor is an error, not harm.
        if unsafe { libc::fcntl(*number, libc::F_GETFD) } >= 0 {
            *there = 1;
            numbers[count] = *number;
            count += 1;
        }
    }
    send_descriptors(&there[..asked.len()], &numbers[..count]);
}

/// Room for the descriptors of a message.
#[repr(align(16))]
struct Space([u8; 2048]);

/// `sendmsg(2)` without asking for memory.
pub(super) fn send_descriptors(bytes: &[u8], numbers: &[RawFd]) {
    let mut space = Space([0; 2048]);
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
    // SAFETY: reserved numbers stay open for as long as the process lives.
    unsafe { BorrowedFd::borrow_raw(number) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// Descriptors at these numbers; other tests of this process open theirs far below.
    fn at(numbers: &[RawFd]) -> Vec<OwnedFd> {
        let one = EventFd::from_flags(EfdFlags::EFD_CLOEXEC).expect("a descriptor");
        numbers.iter().map(|number| rustix::io::fcntl_dupfd_cloexec(&one, *number).expect("it is free")).collect()
    }

    #[test]
    fn descriptors_get_their_recorded_numbers() {
        let came = at(&[700, 701, 703, 705]);
        place(came, &[700, 703, 705, 709]).expect("placed");
        for (number, open) in [(700, true), (701, false), (703, true), (705, true), (709, true)] {
            // SAFETY: asking for the flags of a number that is no descriptor is an error, not harm.
            assert_eq!(unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0, open, "{number}");
            if open {
                // SAFETY: it was placed there above, and no other code owns it.
                drop(unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(number) });
            }
        }
    }

    #[test]
    fn numbers_between_expected_descriptors_are_taken() {
        let one = EventFd::from_flags(EfdFlags::EFD_CLOEXEC).expect("a descriptor");
        let _in_use = at(&[801, 804]);
        let others = take_others(one.as_fd(), 800, &[802, 805, 806]).expect("taken");
        assert_eq!(others.iter().map(AsRawFd::as_raw_fd).collect::<Vec<_>>(), [800, 803]);
        let came = at(&[800, 800, 800]);
        assert_eq!(came.iter().map(AsRawFd::as_raw_fd).collect::<Vec<_>>(), [802, 805, 806], "each is at its number");
        drop((others, came));
        assert_eq!(at(&[800])[0].as_raw_fd(), 800, "the numbers are free again");
        assert!(take_others(one.as_fd(), 800, &[]).expect("taken").is_empty(), "nothing comes");
    }

    #[test]
    fn a_number_that_is_in_use_is_not_taken() {
        let _mine = at(&[720]);
        let error = place(at(&[715]), &[720]).expect_err("it is mine");
        assert!(error.to_string().contains("720"), "{error}");
        place(at(&[715]), &[716, 717]).expect_err("one is missing");
    }
}
