//! Standard error, written without waiting for its reader.
//!
//! Other processes write there, too, and rely on blocking writes. So the server opens a pipe or a terminal anew, with `O_NONBLOCK`;
//! it writes to a socket, such as a service manager's, with `MSG_DONTWAIT`; a write to a file never waits for a reader.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Mutex;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, fstat, major, minor, open};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use rustix::stdio::stderr;

/// Where lines go.
pub struct AuditOutput {
    way: OutputKind,
    /// The last line got through in part.
    torn: Mutex<bool>,
}

enum OutputKind {
    /// Opened anew.
    Own(OwnedFd),
    Socket,
    File,
    /// A descriptor that could not be opened anew. The server polls it first, and a write blocks only if another process writes
    /// at the same moment.
    Asked,
    /// It has no reader.
    Nowhere,
}

impl AuditOutput {
    /// Standard error, as it is at this moment. To be called while `/proc` and what it leads to may be opened.
    pub fn standard_error() -> Self {
        let kind = fstat(stderr()).map(|status| (FileType::from_raw_mode(status.st_mode), status.st_rdev));
        Self::by(match kind {
            Err(_) => OutputKind::Nowhere,
            Ok((FileType::RegularFile, _)) => OutputKind::File,
            Ok((FileType::Socket, _)) => OutputKind::Socket,
            // `/dev/null`, which also takes the place of a descriptor that was closed.
            Ok((FileType::CharacterDevice, device)) if (major(device), minor(device)) == (1, 3) => OutputKind::Nowhere,
            Ok(_) => {
                let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
                open("/proc/self/fd/2", flags, Mode::empty()).map_or(OutputKind::Asked, OutputKind::Own)
            }
        })
    }

    fn by(way: OutputKind) -> Self {
        Self { way, torn: Mutex::new(false) }
    }

    #[cfg(test)]
    pub(super) fn to_pipe(pipe: OwnedFd) -> Self {
        rustix::fs::fcntl_setfl(&pipe, OFlags::NONBLOCK).expect("a pipe");
        Self::by(OutputKind::Own(pipe))
    }

    /// Writes a line, which ends with a line break, at once or not at all. Returns whether it got through.
    pub(super) fn write(&self, line: &[u8]) -> bool {
        let mut torn = self.torn.lock().expect("a thread that panics ends the process");
        let ended = [if *torn { &b"\n"[..] } else { b"" }, line].concat();
        let written = self.give(&ended).unwrap_or(0);
        // A disk that is full takes a part.
        *torn = written < ended.len() && (*torn || written > 0);
        written == ended.len()
    }

    fn give(&self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            let given = match &self.way {
                OutputKind::Own(own) => rustix::io::write(own, bytes),
                OutputKind::Socket => send(stderr(), bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
                OutputKind::File => rustix::io::write(stderr(), bytes),
                OutputKind::Asked => ask(stderr()).and_then(|()| rustix::io::write(stderr(), bytes)),
                OutputKind::Nowhere => Err(Errno::BADF),
            };
            match given {
                Err(Errno::INTR) => {}
                given => return Ok(given?),
            }
        }
    }
}

/// Whether the reader has room. That of a pipe is enough for a line.
fn ask(output: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut state = [PollFd::new(&output, PollFlags::OUT)];
    poll(&mut state, Some(&Timespec::default()))?;
    if state[0].revents() == PollFlags::OUT { Ok(()) } else { Err(Errno::AGAIN) }
}
