//! The side of the next server: it inherits descriptors from the keeper of a dead server.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use nix::sys::socket::{MsgFlags, recv, send, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

use super::{BATCH, FIRST_FREE, HANDOVER, SERVER, place_at, put_placeholder, reserved};
use crate::protocol::receive_descriptors;

/// Longest wait for a keeper's answer, in seconds.
const TIMEOUT: i64 = 5;

/// The connection to the keeper of a dead server, to inherit descriptors.
pub(crate) struct Handover(());

impl Handover {
    /// Connects to the keeper at the other end of `channel`.
    ///
    /// # Errors
    /// When `channel` is no socket.
    pub(crate) fn new(channel: OwnedFd) -> io::Result<Self> {
        setsockopt(&channel, sockopt::ReceiveTimeout, &TimeVal::seconds(TIMEOUT))?;
        setsockopt(&channel, sockopt::SendTimeout, &TimeVal::seconds(TIMEOUT))?;
        // A reserved number, so that it occupies none of the inherited ones.
        place_at(channel, HANDOVER)?;
        Ok(Self(()))
    }

    /// Inherits descriptors, each at its old number. `numbers` must be in ascending order and free in this process. Returns the
    /// numbers that the keeper does not have.
    ///
    /// # Errors
    /// When the keeper has ended, or does not answer within [`TIMEOUT`].
    pub(crate) fn inherit(&self, numbers: &[RawFd]) -> io::Result<Vec<RawFd>> {
        let mut missing = Vec::new();
        if numbers.is_empty() {
            return Ok(missing);
        }
        skip_earlier_answers(reserved(HANDOVER), Duration::from_secs(TIMEOUT.unsigned_abs()))?;
        let _others = occupy_others(reserved(SERVER), FIRST_FREE, numbers)?;
        for batch in numbers.chunks(BATCH) {
            let requested: Vec<u8> = batch.iter().flat_map(|number| number.to_ne_bytes()).collect();
            send(HANDOVER, &requested, MsgFlags::MSG_NOSIGNAL).map_err(|errno| no_answer(errno.into()))?;
            let mut presence = [0; BATCH];
            let received = receive_descriptors(&reserved(HANDOVER), &mut presence).map_err(no_answer)?;
            let (got, descriptors) = received;
            if got != batch.len() {
                return Err(gone());
            }
            missing.extend(batch.iter().zip(presence).filter(|(_, byte)| *byte == 0).map(|(number, _)| *number));
            let present: Vec<_> =
                batch.iter().zip(presence).filter(|(_, byte)| *byte != 0).map(|(number, _)| *number).collect();
            place(descriptors, &present)?;
        }
        Ok(missing)
    }
}

impl Drop for Handover {
    fn drop(&mut self) {
        put_placeholder(HANDOVER);
    }
}

/// Makes the next answer on `channel` that of the next request. A process that was killed, or did not wait any longer, may have left
/// requests to which the keeper answers later, each answer with descriptors.
///
/// The keeper says of each number whether it is open. So a request with a pattern of numbers, open and not open, has an answer that
/// no other request has, and all answers before it are for earlier requests.
///
/// # Errors
/// When the keeper has ended, or does not answer within `limit` and the time limit of the socket.
pub(super) fn skip_earlier_answers(channel: BorrowedFd<'_>, limit: Duration) -> io::Result<()> {
    /// A number that always has a placeholder, and one that is never open.
    const NUMBERS: [RawFd; 2] = [FIRST_FREE - 1, -2];
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let pattern = (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64);
    let is_open = |bit: u32| pattern >> bit & 1 == 1;
    let request: Vec<u8> = (0..u64::BITS).flat_map(|bit| NUMBERS[usize::from(!is_open(bit))].to_ne_bytes()).collect();
    let expected: Vec<u8> = (0..u64::BITS).map(|bit| u8::from(is_open(bit))).collect();
    send(channel.as_raw_fd(), &request, MsgFlags::MSG_NOSIGNAL).map_err(|errno| no_answer(errno.into()))?;
    let until = Instant::now() + limit;
    loop {
        let mut answer = [0; BATCH];
        // Without a place for them, the kernel drops the descriptors of the answer, without a flush of their files.
        let got = recv(channel.as_raw_fd(), &mut answer, MsgFlags::empty()).map_err(|errno| no_answer(errno.into()))?;
        match &answer[..got] {
            [] => return Err(gone()),
            answer if answer == expected => return Ok(()),
            // A process with the keeper's descriptors may send without end.
            _ if Instant::now() > until => return Err(no_answer(io::ErrorKind::WouldBlock.into())),
            _ => {}
        }
    }
}

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the keeper of the last server is gone")
}

/// The error of a call on the channel, with a sentence for the end of the time limit.
fn no_answer(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => {
            io::Error::new(io::ErrorKind::TimedOut, "the keeper of the last server does not answer")
        }
        _ => error,
    }
}

/// Puts copies of `placeholder` at all free numbers from `first` on that are below the last of `numbers`, and not among them. The
/// kernel gives each received descriptor the lowest free number, so the next ones are at `numbers` at once. A later move would
/// close the descriptor at its first number, and close(2) of a written file may wait for a server that does not answer.
fn occupy_others(placeholder: BorrowedFd<'_>, first: RawFd, numbers: &[RawFd]) -> io::Result<Vec<OwnedFd>> {
    let mut others = Vec::new();
    let Some(last) = numbers.last() else { return Ok(others) };
    let mut next = first;
    while next < *last {
        let taken = rustix::io::fcntl_dupfd_cloexec(placeholder, next)?;
        let number = taken.as_raw_fd();
        next = number + 1;
        // The drop of another copy frees its number again.
        if number < *last && numbers.binary_search(&number).is_err() {
            others.push(taken);
        }
    }
    Ok(others)
}

/// Moves descriptors to the free `numbers`. Both are in ascending order, and each descriptor arrived at the lowest free number, so
/// none is above its own number. The last one moves first, so none occupies the number of another. Only the descriptors after a
/// missing one are not [at their numbers already](occupy_others).
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
        // SAFETY: for a number that is no descriptor, fcntl(2) only returns an error.
        if unsafe { libc::fcntl(*number, libc::F_GETFD) } >= 0 {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("descriptor {number} is in use already")));
        }
        place_at(descriptor, *number)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use nix::sys::eventfd::{EfdFlags, EventFd};

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
            // SAFETY: for a number that is no descriptor, fcntl(2) only returns an error.
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
        let others = occupy_others(one.as_fd(), 800, &[802, 805, 806]).expect("taken");
        assert_eq!(others.iter().map(AsRawFd::as_raw_fd).collect::<Vec<_>>(), [800, 803]);
        let came = at(&[800, 800, 800]);
        assert_eq!(came.iter().map(AsRawFd::as_raw_fd).collect::<Vec<_>>(), [802, 805, 806], "each is at its number");
        drop((others, came));
        assert_eq!(at(&[800])[0].as_raw_fd(), 800, "the numbers are free again");
        assert!(occupy_others(one.as_fd(), 800, &[]).expect("taken").is_empty(), "nothing comes");
    }

    #[test]
    fn a_number_that_is_in_use_is_not_taken() {
        let _mine = at(&[720]);
        let error = place(at(&[715]), &[720]).expect_err("it is mine");
        assert!(error.to_string().contains("720"), "{error}");
        place(at(&[715]), &[716, 717]).expect_err("one is missing");
    }
}
