//! Standard error, written without waiting for its reader.
//!
//! Other processes write there, too, and rely on blocking writes. So podfs reopens a pipe or a terminal with `O_NONBLOCK`, and
//! writes to a socket, such as a service manager's, with `MSG_DONTWAIT`. A write to a file never waits for a reader.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, fstat, major, minor, open};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use rustix::stdio::stderr;

/// If poll(2) reports a pipe or a terminal as writable, it takes at least so many bytes (`PIPE_BUF`, `pipe(7)`).
const PIPE_BUF: usize = 4096;

static STANDARD_ERROR: LazyLock<Arc<LineOutput>> = LazyLock::new(|| Arc::new(LineOutput::of_standard_error()));

/// The standard error of this process. The first call opens it, so it must come before the process confines itself. In a server,
/// it must also come before the descriptors of volumes, because a successor inherits only the numbers below those.
pub fn standard_error() -> Arc<LineOutput> {
    Arc::clone(&STANDARD_ERROR)
}

/// The destination of lines.
pub struct LineOutput {
    kind: OutputKind,
    /// Whether only a part of the last line was written.
    torn: Mutex<bool>,
}

enum OutputKind {
    /// A pipe or terminal, reopened with `O_NONBLOCK`.
    Reopened(OwnedFd),
    Socket,
    File,
    /// A pipe or terminal that podfs could not reopen. podfs polls it before each write, so a write blocks only if another
    /// process writes at the same moment.
    Polled,
    /// Standard error without a reader.
    Nowhere,
}

impl LineOutput {
    fn of_standard_error() -> Self {
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

    /// A pipe instead of standard error.
    #[cfg(test)]
    pub(crate) fn to_pipe(pipe: OwnedFd) -> Self {
        rustix::fs::fcntl_setfl(&pipe, OFlags::NONBLOCK).expect("a pipe");
        Self::of_kind(OutputKind::Reopened(pipe))
    }

    /// Writes a line, which ends with a line break, without waiting. Returns whether it wrote the whole line.
    pub(crate) fn write(&self, line: &[u8]) -> bool {
        self.write_part(line, false) == Ok(line.len())
    }

    /// Writes lines. Waits as long as `timeout` whenever there is no room. Returns false if there was still none; then it has not
    /// written all. Ignores other errors: no process reads the lines then.
    pub(super) fn write_within(&self, timeout: Duration, lines: &[u8]) -> bool {
        let (mut written, mut until) = (0, Instant::now() + timeout);
        while written < lines.len() {
            match self.write_part(&lines[written..], written > 0) {
                Ok(more) => (written, until) = (written + more, Instant::now() + timeout),
                Err(Errno::AGAIN) if !self.wait_until_writable(until) => return false,
                Err(Errno::AGAIN) => {}
                Err(_) => return true,
            }
        }
        true
    }

    /// Writes as many bytes as there is room for, and returns their number. `continues` says that the line's start is already
    /// written.
    fn write_part(&self, bytes: &[u8], continues: bool) -> Result<usize, Errno> {
        let mut torn = self.torn.lock().expect("a thread that panics ends the process");
        let end_of_torn = if *torn && !continues { &b"\n"[..] } else { b"" };
        let all = [end_of_torn, bytes].concat();
        // A file on a full disk accepts only a part.
        let written = self.write_bytes(&all)?;
        *torn = written < all.len() && (written > end_of_torn.len() || (*torn && written == 0));
        Ok(written.saturating_sub(end_of_torn.len()))
    }

    fn write_bytes(&self, bytes: &[u8]) -> Result<usize, Errno> {
        loop {
            let written = match &self.kind {
                OutputKind::Reopened(output) => rustix::io::write(output, bytes),
                OutputKind::Socket => send(stderr(), bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
                OutputKind::File => rustix::io::write(stderr(), bytes),
                OutputKind::Polled if !is_writable(stderr(), Duration::ZERO) => Err(Errno::AGAIN),
                OutputKind::Polled => rustix::io::write(stderr(), &bytes[..bytes.len().min(PIPE_BUF)]),
                OutputKind::Nowhere => Err(Errno::BADF),
            };
            if written != Err(Errno::INTR) {
                return written;
            }
        }
    }

    /// Waits for room, or for an error that a write reports. Returns false if there is neither at this time.
    fn wait_until_writable(&self, until: Instant) -> bool {
        let output = match &self.kind {
            OutputKind::Reopened(output) => output.as_fd(),
            _ => stderr(),
        };
        let timeout = until.saturating_duration_since(Instant::now());
        !timeout.is_zero() && is_writable(output, timeout)
    }
}

/// Waits until the descriptor is writable, or has an error, which a write reports.
fn is_writable(output: BorrowedFd<'_>, timeout: Duration) -> bool {
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    // A signal ends the wait early; then the caller tries again.
    poll(&mut [PollFd::new(&output, PollFlags::OUT)], Some(&timeout)) != Ok(0)
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, Read, pipe};
    use std::thread;

    use super::*;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(60);

    /// An output to a pipe that is full except for one page.
    fn nearly_full() -> (LineOutput, PipeReader) {
        let (reader, writer) = pipe().expect("a pipe");
        let output = LineOutput::to_pipe(writer.into());
        while output.write(&[b'x'; PIPE_BUF]) {}
        (&reader).read_exact(&mut [0; PIPE_BUF]).expect("a page");
        (output, reader)
    }

    #[test]
    fn lines_wait_for_room_and_are_written_whole_when_the_reader_goes_on() {
        let (output, mut reader) = nearly_full();
        let lines = vec![b'y'; 3 * PIPE_BUF];
        thread::scope(|scope| {
            let all = scope.spawn(|| output.write_within(LONG, &lines));
            let mut received = vec![0; 1 << 16];
            reader.read_exact(&mut received).expect("a full pipe");
            assert!(all.join().expect("no panic"));
        });
        drop(output);
        let mut rest = Vec::new();
        reader.read_to_end(&mut rest).expect("the rest");
        assert_eq!(rest, [b'y'; 2 * PIPE_BUF]);
    }

    #[test]
    fn a_line_of_which_only_a_part_had_room_gets_its_line_break_from_the_next_line() {
        let (output, mut reader) = nearly_full();
        assert!(!output.write_within(SHORT, &[b'y'; 2 * PIPE_BUF]), "the pipe is full after the first page");
        assert!(!output.write_within(SHORT, b"lost\n") && !output.write(b"lost, too\n"));
        let mut received = vec![0; 1 << 16];
        reader.read_exact(&mut received).expect("a full pipe");
        assert!(received.ends_with(&[b'y'; PIPE_BUF]));
        assert!(output.write_within(SHORT, b"next\n"));
        drop(output);
        let mut rest = String::new();
        reader.read_to_string(&mut rest).expect("text");
        assert_eq!(rest, "\nnext\n");
    }

    #[test]
    fn lines_without_a_reader_are_ignored() {
        let (reader, writer) = pipe().expect("a pipe");
        drop(reader);
        let output = LineOutput::to_pipe(writer.into());
        assert!(output.write_within(LONG, b"a line\n") && !output.write(b"a line\n"));
    }
}
