//! Standard error as the place of log lines.
//!
//! No process waits for the reader of its log: a pager that stands still, a terminal after Ctrl-S or a log collector that hangs would
//! stop the supervisor, and with it the updates of the volumes. If standard error takes nothing for a second, the line is lost, and
//! so are the next ones until there is room. The first line after them says how many.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::line;
use crate::printable::printable_with_colours;

/// How long a line waits for room.
const TIMEOUT: Duration = Duration::from_secs(1);
/// If poll(2) reports room in a pipe or a terminal, a write of this size does not block (`PIPE_BUF`, `pipe(7)`). Another process may
/// take the room between the two calls; then the write waits for the reader.
const ROOM: usize = 4096;

/// The number of lines that were lost since the last line that was written.
static LOST: AtomicU64 = AtomicU64::new(0);
/// Whether lines are JSON objects.
static IS_JSON: AtomicBool = AtomicBool::new(false);

/// Sets the format of the line that reports lost lines.
pub fn set_json(is_json: bool) {
    IS_JSON.store(is_json, Ordering::Relaxed);
}

/// Standard error with control characters escaped. It ignores errors, so the program continues when its log has no reader.
pub struct StandardError;

impl Write for StandardError {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        write_unless_stuck(printable_with_colours(&String::from_utf8_lossy(bytes)).as_bytes());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes lines to standard error as they are, in one call of write(2) for each 4096 bytes. If standard error has no room, they
/// are lost.
pub fn write_unless_stuck(lines: &[u8]) {
    // The lock keeps the lines of other threads out.
    let mut output = io::stderr().lock();
    let lost = LOST.load(Ordering::Relaxed);
    let timeout = if lost == 0 { TIMEOUT } else { Duration::ZERO };
    if !has_room(timeout) {
        LOST.fetch_add(1, Ordering::Relaxed);
        return;
    }
    if lost > 0 {
        LOST.store(0, Ordering::Relaxed);
        let report = line::of_lost_lines(lost, SystemTime::now(), IS_JSON.load(Ordering::Relaxed));
        let _no_reader = output.write_all(report.as_bytes());
        if !has_room(Duration::ZERO) {
            LOST.fetch_add(1, Ordering::Relaxed);
            return;
        }
    }
    for (number, chunk) in lines.chunks(ROOM).enumerate() {
        if number > 0 && !has_room(TIMEOUT) {
            LOST.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let _no_reader = output.write_all(chunk);
    }
}

/// Waits until standard error has room, or has an error, which a write reports.
fn has_room(timeout: Duration) -> bool {
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: 0 };
    let output = rustix::stdio::stderr();
    loop {
        match poll(&mut [PollFd::new(&output, PollFlags::OUT)], Some(&timeout)) {
            Ok(0) => return false,
            Err(Errno::INTR) => {}
            Ok(_) | Err(_) => return true,
        }
    }
}
