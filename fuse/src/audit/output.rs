//! Writes to standard error without waiting for its reader.
//!
//! Other processes write there, too, and rely on blocking writes. So the server reopens a pipe or a terminal with `O_NONBLOCK`,
//! and writes to a socket, such as a service manager's, with `MSG_DONTWAIT`. A write to a file never waits for a reader.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Mutex;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, fstat, major, minor, open};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use rustix::stdio::stderr;

/// The destination of lines.
pub struct AuditOutput {
    kind: OutputKind,
    /// Whether only a part of the last line was written.
    torn: Mutex<bool>,
}

enum OutputKind {
    /// A pipe or terminal, reopened with `O_NONBLOCK`.
    Reopened(OwnedFd),
    Socket,
    File,
    /// A pipe or terminal that the server could not reopen. The server polls it before each write, so a write blocks only if
    /// another process writes at the same moment.
    Polled,
    /// Standard error without a reader.
    Nowhere,
}

impl AuditOutput {
    /// The present standard error. The process must not be confined yet, because this opens `/proc/self/fd/2`.
    pub fn standard_error() -> Self {
        let file = fstat(stderr()).map(|status| (FileType::from_raw_mode(status.st_mode), status.st_rdev));
        Self::of_kind(match file {
            Err(_) => OutputKind::Nowhere,
            Ok((FileType::RegularFile, _)) => OutputKind::File,
            Ok((FileType::Socket, _)) => OutputKind::Socket,
            // `/dev/null`, which also replaces a closed descriptor.
            Ok((FileType::CharacterDevice, device)) if (major(device), minor(device)) == (1, 3) => OutputKind::Nowhere,
            Ok(_) => {
                let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
                open("/proc/self/fd/2", flags, Mode::empty()).map_or(OutputKind::Polled, OutputKind::Reopened)
            }
        })
    }

    fn of_kind(kind: OutputKind) -> Self {
        Self { kind, torn: Mutex::new(false) }
    }

    #[cfg(test)]
    pub(super) fn to_pipe(pipe: OwnedFd) -> Self {
        rustix::fs::fcntl_setfl(&pipe, OFlags::NONBLOCK).expect("a pipe");
        Self::of_kind(OutputKind::Reopened(pipe))
    }

    /// Writes a line, which ends with a line break, without blocking. Returns whether it wrote the whole line.
    pub(super) fn write(&self, line: &[u8]) -> bool {
        let mut torn = self.torn.lock().expect("a thread that panics ends the process");
        let ended = [if *torn { &b"\n"[..] } else { b"" }, line].concat();
        let written = self.write_bytes(&ended).unwrap_or(0);
        // A file on a full disk accepts only a part.
        *torn = written < ended.len() && (*torn || written > 0);
        written == ended.len()
    }

    fn write_bytes(&self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            let written = match &self.kind {
                OutputKind::Reopened(output) => rustix::io::write(output, bytes),
                OutputKind::Socket => send(stderr(), bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
                OutputKind::File => rustix::io::write(stderr(), bytes),
                OutputKind::Polled => check_room(stderr()).and_then(|()| rustix::io::write(stderr(), bytes)),
                OutputKind::Nowhere => Err(Errno::BADF),
            };
            match written {
                Err(Errno::INTR) => {}
                written => return Ok(written?),
            }
        }
    }
}

/// Fails if the reader has no room. If poll(2) reports room in a pipe, it is enough for a line.
fn check_room(output: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut state = [PollFd::new(&output, PollFlags::OUT)];
    poll(&mut state, Some(&Timespec::default()))?;
    if state[0].revents() == PollFlags::OUT { Ok(()) } else { Err(Errno::AGAIN) }
}
