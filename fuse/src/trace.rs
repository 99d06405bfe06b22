//! One line for each FUSE request of a volume, for debugging.
//!
//! Readers come and go while the volume is served. Without a reader, tracing costs each request one atomic load.
//!
//! A reader is a pipe, and a write to it never blocks. The server drops and counts lines that do not fit, and the next line that
//! fits says how many are missing. A line has at most `PIPE_BUF` bytes, so the kernel writes it whole or not at all (pipe(7)).
//! Only a write to standard output (`podfs mount --trace`) may block.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Instant, SystemTime};

use nix::errno::Errno;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat};

use crate::caller::credentials::UNSENT;
use crate::session::Caller;
use crate::utc::utc;

/// Most readers of one volume.
const MAX_READERS: usize = 4;
/// Longest path in a line, in bytes. The whole line fits into `PIPE_BUF`.
const LONGEST_PATH: usize = 3 * 1024;

/// The readers of one volume's requests.
#[derive(Default)]
pub struct Trace {
    on: AtomicBool,
    readers: Mutex<Vec<TraceReader>>,
}

struct TraceReader {
    output: File,
    /// The number of dropped lines since the last written one.
    missed: u64,
}

/// A request without an answer yet.
pub struct TraceLine<'a> {
    trace: &'a Trace,
    path: String,
    at: SystemTime,
    since: Instant,
}

impl Trace {
    /// A trace that writes to `output` from the start, and may block on it.
    pub fn to(output: OwnedFd) -> Self {
        let reader = TraceReader { output: File::from(output), missed: 0 };
        Self { on: AtomicBool::new(true), readers: Mutex::new(vec![reader]) }
    }

    /// Also writes to `pipe`, until its reader closes it.
    ///
    /// # Errors
    /// When it is no pipe, or the volume has four readers already.
    pub fn attach(&self, pipe: OwnedFd) -> io::Result<()> {
        if FileType::from_raw_mode(fstat(&pipe)?.st_mode) != FileType::Fifo {
            return Err(io::Error::new(ErrorKind::InvalidInput, "a trace is written to pipes only"));
        }
        fcntl_setfl(&pipe, fcntl_getfl(&pipe)? | OFlags::NONBLOCK)?;
        let mut readers = self.readers();
        readers.retain(TraceReader::is_connected);
        if readers.len() >= MAX_READERS {
            return Err(io::Error::other(format!("{MAX_READERS} traces of the volume are running; end one of them")));
        }
        readers.push(TraceReader { output: File::from(pipe), missed: 0 });
        self.on.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Closes the pipes of all readers.
    pub fn detach(&self) {
        let mut readers = self.readers();
        readers.clear();
        self.on.store(false, Ordering::Relaxed);
    }

    /// Whether there is a reader.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Notes the start of a request; `None` without a reader.
    pub fn begin(&self, path: impl FnOnce() -> String) -> Option<TraceLine<'_>> {
        if !self.is_on() {
            return None;
        }
        let path = path();
        Some(TraceLine { trace: self, path, at: SystemTime::now(), since: Instant::now() })
    }

    fn write(&self, line: &str) {
        let mut readers = self.readers();
        readers.retain_mut(|reader| reader.write(line));
        if readers.is_empty() {
            self.on.store(false, Ordering::Relaxed);
        }
    }

    fn readers(&self) -> MutexGuard<'_, Vec<TraceReader>> {
        self.readers.lock().expect("a thread that panics ends the process")
    }
}

impl TraceReader {
    /// Whether the pipe still has a reader.
    fn is_connected(&self) -> bool {
        let mut state = [PollFd::from_borrowed_fd(self.output.as_fd(), PollFlags::empty())];
        poll(&mut state, Some(&Timespec::default())).is_err() || !state[0].revents().contains(PollFlags::ERR)
    }

    /// Writes a line. Returns `false` if the pipe has no reader any more.
    fn write(&mut self, line: &str) -> bool {
        let missed = self.missed;
        let written = match missed {
            0 => self.output.write_all(line.as_bytes()),
            _ => self.output.write_all(format!("… {missed} requests not shown\n{line}").as_bytes()),
        };
        match written {
            Ok(()) => self.missed = 0,
            Err(error) if error.kind() == ErrorKind::WouldBlock => self.missed += 1,
            // Standard output may have no reader; the file system continues.
            Err(_) => return false,
        }
        true
    }
}

impl TraceLine<'_> {
    /// Writes the line after the answer: time (UTC), operation, path, caller, result, microseconds.
    pub fn end(self, operation: &str, caller: Caller, error: Option<Errno>) {
        let result = error.map_or("ok".to_owned(), |errno| format!("{errno:?}"));
        // The kernel's own requests have no caller.
        let (pid, uid) = if caller.pid == 0 { (UNSENT, UNSENT) } else { (caller.pid, caller.uid) };
        let line = format!(
            "{} {operation} {} pid={} uid={} {result} {}us\n",
            utc(self.at).strftime("%H:%M:%S%.6f"),
            shortened(self.path.escape_debug().to_string()),
            id_or_dash(pid),
            id_or_dash(uid),
            self.since.elapsed().as_micros()
        );
        self.trace.write(&line);
    }
}

fn id_or_dash(id: u32) -> String {
    if id == UNSENT { "-".to_owned() } else { id.to_string() }
}

fn shortened(mut path: String) -> String {
    if path.len() > LONGEST_PATH {
        let whole = (0..=LONGEST_PATH).rev().find(|end| path.is_char_boundary(*end));
        path.truncate(whole.unwrap_or_default());
        path.push('…');
    }
    path
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, PipeReader, Read, pipe};

    use super::*;

    const CALLER: Caller = Caller { uid: 65534, gid: 0, pid: 4711 };

    fn attached(trace: &Trace) -> PipeReader {
        let (reader, writer) = pipe().expect("a pipe");
        trace.attach(writer.into()).expect("attached");
        reader
    }

    fn request(trace: &Trace, path: &str, caller: Caller) {
        if let Some(line) = trace.begin(|| path.to_owned()) {
            line.end("LOOKUP", caller, None);
        }
    }

    #[test]
    fn every_reader_sees_a_request_and_the_trace_ends_with_the_last_reader() {
        let trace = Trace::default();
        request(&trace, "/unseen", CALLER);
        let (first, second) = (attached(&trace), attached(&trace));
        request(&trace, "/a", CALLER);
        for reader in [first, second] {
            let mut line = String::new();
            BufReader::new(reader).read_line(&mut line).expect("a line");
            assert!(line.contains(" LOOKUP /a pid=4711 uid=65534 ok "), "{line}");
        }
        request(&trace, "/b", CALLER);
        assert!(trace.begin(String::new).is_none());
    }

    #[test]
    fn a_slow_reader_delays_no_request_and_gets_the_number_of_missed_ones() {
        let trace = Trace::default();
        let mut reader = attached(&trace);
        (0..1000).for_each(|_| request(&trace, &"/long".repeat(100), CALLER));
        let mut seen = vec![0; 1 << 20];
        let length = reader.read(&mut seen).expect("what fitted");
        request(&trace, "/again", CALLER);
        trace.detach();
        let shown = seen[..length].iter().filter(|byte| **byte == b'\n').count();
        let mut rest = String::new();
        reader.read_to_string(&mut rest).expect("the rest");
        let missing = format!("… {} requests not shown\n", 1000 - shown);
        assert!(shown < 1000 && rest.starts_with(&missing) && rest.contains("/again"), "{shown}: {rest}");
    }

    #[test]
    fn an_unknown_caller_is_a_dash() {
        let trace = Trace::default();
        let mut reader = attached(&trace);
        request(&trace, "/a", Caller { uid: UNSENT, ..CALLER });
        request(&trace, "/b", Caller { pid: 0, uid: 0, gid: 0 });
        trace.detach();
        let mut lines = String::new();
        reader.read_to_string(&mut lines).expect("lines");
        assert!(lines.contains("/a pid=4711 uid=- ok") && lines.contains("/b pid=- uid=- ok"), "{lines}");
    }

    #[test]
    fn a_line_always_fits_into_a_pipe_at_once() {
        let trace = Trace::default();
        let mut reader = attached(&trace);
        request(&trace, &"\u{7f}ü".repeat(4096), CALLER);
        trace.detach();
        let mut line = String::new();
        reader.read_to_string(&mut line).expect("a line");
        assert!(line.len() < 4096 && line.contains("… pid="), "{}", line.len());
    }

    #[test]
    fn too_many_readers_and_descriptors_other_than_pipes_are_refused() {
        let trace = Trace::default();
        let mut readers: Vec<_> = (0..MAX_READERS).map(|_| attached(&trace)).collect();
        let (_reader, writer) = pipe().expect("a pipe");
        let error = trace.attach(writer.into()).expect_err("there are enough");
        assert!(error.to_string().contains("end one of them"), "{error}");
        readers.pop();
        readers.push(attached(&trace));
        let file = tempfile::tempfile().expect("a file");
        trace.attach(file.into()).expect_err("a write to a file may block");
    }
}
