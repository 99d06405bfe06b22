//! Log lines: written to standard error, or lost and counted.
//!
//! No process waits for the reader of its log: a pager that stands still, a terminal after Ctrl-S or a log collector that hangs would
//! stop the supervisor, and with it the updates of the volumes. If standard error takes nothing for a second, the line is lost, and
//! so are the next ones until there is room. The first line after them says how many.

use std::io::{self, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use super::line;
use super::standard_error::standard_error;
use crate::printable::{printable_line, printable_with_colours};

/// How long a line waits for room.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The number of lines that were lost since the last line that was written. Locked while a thread writes a line, so that no line of
/// another thread comes in between.
static LOST: Mutex<u64> = Mutex::new(0);
/// Whether lines are JSON objects.
static IS_JSON: AtomicBool = AtomicBool::new(false);

/// Opens standard error for the log, and sets the format of the line that reports lost lines.
pub fn open_standard_error(is_json: bool) {
    standard_error();
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

/// Writes a sentence of a program for people to standard error, as one line. A manifest, a server or another process may have given
/// parts of the sentence, so its line ends are escaped.
pub fn say(program: &str, sentence: &str) {
    // One write(2) for the whole line, because other processes may write to the same standard error.
    write_unless_stuck(format!("{program}: {}\n", printable_line(sentence)).as_bytes());
}

/// Writes lines to standard error as they are. If standard error has no room, they are lost.
pub fn write_unless_stuck(lines: &[u8]) {
    let mut lost = LOST.lock().expect("no thread panics while it writes a line");
    let output = standard_error();
    let timeout = if *lost == 0 { TIMEOUT } else { Duration::ZERO };
    if *lost > 0 {
        let report = line::of_lost_lines(*lost, SystemTime::now(), IS_JSON.load(Ordering::Relaxed));
        if !output.write(report.as_bytes()) {
            *lost += 1;
            return;
        }
        *lost = 0;
    }
    if !output.write_within(timeout, lines) {
        *lost += 1;
    }
}
