//! An io_uring of this process: the system calls, and the queues that the kernel shares.
//!
//! podfs needs two kinds of entries, so this module takes the place of a library. An entry has 128 bytes
//! (`IORING_SETUP_SQE128`), because a command of FUSE takes more than the usual 64.
//!
//! A ring belongs to the thread that made it (`IORING_SETUP_SINGLE_ISSUER`): only that thread enters it, and the kernel copies
//! requests only while the thread is in there (`IORING_SETUP_DEFER_TASKRUN`).

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use rustix::io::Errno;

/// Entries that may be submitted at once.
const ENTRIES: u32 = 64;
/// Bytes of an entry.
const ENTRY: usize = 128;

const SETUP_SQE128: u32 = 1 << 10;
const SETUP_SINGLE_ISSUER: u32 = 1 << 12;
const SETUP_DEFER_TASKRUN: u32 = 1 << 13;
const FEATURE_SINGLE_MMAP: u32 = 1 << 0;
const ENTER_GETEVENTS: u32 = 1 << 0;
const OFFSET_RINGS: u64 = 0;
const OFFSET_ENTRIES: u64 = 0x1000_0000;
const OP_POLL_ADD: u8 = 6;
const OP_URING_CMD: u8 = 46;

/// `struct io_uring_params`.
#[repr(C)]
#[derive(Default)]
struct Params {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    sq_thread_cpu: u32,
    sq_thread_idle: u32,
    features: u32,
    wq_fd: u32,
    reserved: [u32; 3],
    sq: SubmissionOffsets,
    cq: CompletionOffsets,
}

/// Offsets of the parts of the submission queue (`struct io_sqring_offsets`).
#[repr(C)]
#[derive(Default)]
struct SubmissionOffsets {
    head: u32,
    tail: u32,
    ring_mask: u32,
    ring_entries: u32,
    flags: u32,
    dropped: u32,
    array: u32,
    reserved: u32,
    user_address: u64,
}

/// Offsets of the parts of the completion queue (`struct io_cqring_offsets`).
#[repr(C)]
#[derive(Default)]
struct CompletionOffsets {
    head: u32,
    tail: u32,
    ring_mask: u32,
    ring_entries: u32,
    overflow: u32,
    cqes: u32,
    flags: u32,
    reserved: u32,
    user_address: u64,
}

/// `struct io_uring_sqe`, with 80 bytes of a command.
#[repr(C)]
struct Submission {
    opcode: u8,
    flags: u8,
    priority: u16,
    file: i32,
    /// The number of a command.
    command: u64,
    address: u64,
    length: u32,
    /// The events of a poll.
    events: u32,
    user_data: u64,
    unused: u64,
    /// `struct fuse_uring_cmd_req`.
    fuse: FuseCommand,
    rest: [u64; 7],
}

/// The part of a command that the FUSE driver reads (`struct fuse_uring_cmd_req`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FuseCommand {
    flags: u64,
    /// The request that is answered.
    pub(super) commit_id: u64,
    /// The queue.
    pub(super) queue: u16,
    padding: [u8; 6],
}

impl FuseCommand {
    /// The command for `queue`. `commit_id` is the number of the request that is answered, or 0.
    pub(super) fn new(queue: u16, commit_id: u64) -> Self {
        Self { commit_id, queue, ..Self::default() }
    }
}

const _: () = assert!(size_of::<Submission>() == ENTRY && size_of::<Params>() == 120);

/// The kernel's result of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Completion {
    /// The user data of the submission.
    pub(super) user_data: u64,
    /// The result, or a negative errno.
    pub(super) result: i32,
}

/// An io_uring of the thread that made it.
pub(super) struct Ring {
    file: OwnedFd,
    rings: Mapping,
    entries: Mapping,
    params: Params,
    /// The number of submissions that were pushed and not submitted.
    pushed: u32,
    _stays_on_its_thread: PhantomData<*mut ()>,
}

/// Memory that is shared with the kernel.
struct Mapping(MmapRaw);

impl Mapping {
    fn new(file: &OwnedFd, offset: u64, length: usize) -> io::Result<Self> {
        MmapOptions::new().offset(offset).len(length).populate().map_raw(file).map(Self)
    }

    /// A number at `offset`, which the kernel has given.
    fn number(&self, offset: u32) -> &AtomicU32 {
        assert!(
            offset as usize + 4 <= self.0.len() && offset.is_multiple_of(4),
            "the kernel's offsets are within its memory"
        );
        // SAFETY: it is within the mapping, aligned, and shared with the kernel as a number that both change atomically.
        unsafe { &*self.0.as_ptr().add(offset as usize).cast() }
    }
}

impl Ring {
    /// A new ring, of the calling thread.
    ///
    /// # Errors
    /// When the kernel has none, or does not let this process have one (`kernel.io_uring_disabled`).
    pub(super) fn new() -> io::Result<Self> {
        let flags = SETUP_SQE128 | SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN;
        let mut params = Params { flags, ..Params::default() };
        let file = set_up(ENTRIES, &mut params)?;
        if params.features & FEATURE_SINGLE_MMAP == 0 {
            return Err(Errno::NOSYS.into());
        }
        let submissions = params.sq.array as usize + params.sq_entries as usize * 4;
        let completions = params.cq.cqes as usize + params.cq_entries as usize * 16;
        let rings = Mapping::new(&file, OFFSET_RINGS, submissions.max(completions))?;
        let entries = Mapping::new(&file, OFFSET_ENTRIES, params.sq_entries as usize * ENTRY)?;
        Ok(Self { file, rings, entries, params, pushed: 0, _stays_on_its_thread: PhantomData })
    }

    /// Makes the kernel take the commands of this ring back when its thread is killed, and before the thread counts as exiting.
    ///
    /// A thread that exits cancels its commands only if it has a request on the file of an io_uring under way
    /// (`io_uring_files_cancel`); otherwise a worker of the kernel does that later, and what FUSE sends to the thread meanwhile
    /// fails. So the thread waits for the completions of a ring that never has any.
    ///
    /// # Errors
    /// When the kernel does not take it.
    pub(super) fn end_with_thread(&mut self, user_data: u64) -> io::Result<()> {
        static SILENT: OnceLock<OwnedFd> = OnceLock::new();
        let silent = match SILENT.get() {
            Some(silent) => silent,
            None => {
                let silent = set_up(1, &mut Params::default())?;
                SILENT.get_or_init(|| silent)
            }
        };
        self.poll(silent.as_raw_fd(), user_data)?;
        self.submit()
    }

    /// Completes when `file` can be read.
    ///
    /// # Errors
    /// Those of [`submit`](Self::submit).
    pub(super) fn poll(&mut self, file: RawFd, user_data: u64) -> io::Result<()> {
        let events = libc::POLLIN as u32;
        self.push(Submission {
            opcode: OP_POLL_ADD,
            file,
            // Two halves of a word are swapped on machines that begin with the larger one.
            events: if cfg!(target_endian = "big") { events.rotate_left(16) } else { events },
            user_data,
            ..Submission::default()
        })
    }

    /// A command of a FUSE device. `buffers` outlive its submission.
    ///
    /// # Errors
    /// Those of [`submit`](Self::submit).
    pub(super) fn command(
        &mut self,
        device: BorrowedFd<'_>,
        number: u32,
        fuse: FuseCommand,
        buffers: Option<&[libc::iovec; 2]>,
        user_data: u64,
    ) -> io::Result<()> {
        self.push(Submission {
            opcode: OP_URING_CMD,
            file: device.as_raw_fd(),
            command: number.into(),
            address: buffers.map_or(0, |buffers| buffers.as_ptr() as u64),
            length: buffers.map_or(0, |buffers| buffers.len() as u32),
            user_data,
            fuse,
            ..Submission::default()
        })
    }

    /// Submits the pushed entries.
    ///
    /// # Errors
    /// Those of `io_uring_enter(2)`.
    pub(super) fn submit(&mut self) -> io::Result<()> {
        while self.pushed > 0 {
            self.enter(0)?;
        }
        Ok(())
    }

    /// As [`submit`](Self::submit), and waits for a completion.
    ///
    /// # Errors
    /// Those of [`submit`](Self::submit).
    pub(super) fn submit_and_wait(&mut self) -> io::Result<()> {
        self.enter(1)
    }

    /// Whether there is a completion.
    pub(super) fn has_completion(&self) -> bool {
        let (head, tail) = (self.rings.number(self.params.cq.head), self.rings.number(self.params.cq.tail));
        head.load(Ordering::Relaxed) != tail.load(Ordering::Acquire)
    }

    /// The next completion, if there is one.
    pub(super) fn completion(&self) -> Option<Completion> {
        let (head, tail) = (self.rings.number(self.params.cq.head), self.rings.number(self.params.cq.tail));
        let next = head.load(Ordering::Relaxed);
        if next == tail.load(Ordering::Acquire) {
            return None;
        }
        let place = next & (self.params.cq_entries - 1);
        let offset = self.params.cq.cqes + place * 16;
        let word = |at: u32| u64::from(self.rings.number(offset + at).load(Ordering::Relaxed));
        let found = Completion { user_data: word(0) | (word(4) << 32), result: (word(8) as u32).cast_signed() };
        head.store(next.wrapping_add(1), Ordering::Release);
        Some(found)
    }

    fn push(&mut self, submission: Submission) -> io::Result<()> {
        if self.pushed == self.params.sq_entries {
            self.submit()?;
        }
        let tail = self.rings.number(self.params.sq.tail);
        let next = tail.load(Ordering::Relaxed);
        let place = next & (self.params.sq_entries - 1);
        // SAFETY: the place is within the mapping, and the kernel reads it only after the tail is moved.
        unsafe { self.entries.0.as_mut_ptr().cast::<Submission>().add(place as usize).write(submission) };
        self.rings.number(self.params.sq.array + place * 4).store(place, Ordering::Relaxed);
        tail.store(next.wrapping_add(1), Ordering::Release);
        self.pushed += 1;
        Ok(())
    }

    fn enter(&mut self, wait: u32) -> io::Result<()> {
        let none = std::ptr::null::<u8>();
        // SAFETY: the submissions are whole, and what they point to outlives the call.
        let entered = unsafe {
            libc::syscall(libc::SYS_io_uring_enter, self.file.as_raw_fd(), self.pushed, wait, ENTER_GETEVENTS, none, 0)
        };
        match entered {
            0.. => {
                self.pushed -= u32::try_from(entered).unwrap_or(u32::MAX).min(self.pushed);
                Ok(())
            }
            _ => match io::Error::last_os_error() {
                // Memory is short for a moment, or a signal came.
                error if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => Ok(()),
                error => Err(error),
            },
        }
    }
}

impl Default for Submission {
    fn default() -> Self {
        // SAFETY: zeros are a value of it.
        unsafe { std::mem::zeroed() }
    }
}

fn set_up(entries: u32, params: &mut Params) -> io::Result<OwnedFd> {
    // SAFETY: the struct outlives the call, and is the kernel's.
    let made = unsafe { libc::syscall(libc::SYS_io_uring_setup, entries, params as *mut Params) };
    match RawFd::try_from(made) {
        // SAFETY: the descriptor is new.
        Ok(file @ 0..) => Ok(unsafe { OwnedFd::from_raw_fd(file) }),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::eventfd::{EfdFlags, EventFd};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn completions_have_the_submission_and_its_result() {
        let mut ring = match Ring::new() {
            Ok(ring) => ring,
            // A host may forbid it.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => return,
            Err(error) => panic!("{error}"),
        };
        ring.end_with_thread(7).expect("submitted");
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC).expect("a descriptor");
        for round in 0..200 {
            ring.poll(event.as_fd().as_raw_fd(), round).expect("pushed");
            event.write(1).expect("written");
            ring.submit_and_wait().expect("submitted");
            let found = ring.completion().expect("one completion");
            assert_eq!((found.user_data, found.result), (round, i32::from(libc::POLLIN)));
            assert_eq!(ring.completion(), None);
            event.read().expect("read");
        }
        // An eventfd knows no commands.
        let command = FuseCommand::new(0, 0);
        ring.command(event.as_fd(), 1, command, None, 9).expect("pushed");
        ring.submit_and_wait().expect("submitted");
        assert_eq!(ring.completion(), Some(Completion { user_data: 9, result: -libc::EOPNOTSUPP }));
    }
}
