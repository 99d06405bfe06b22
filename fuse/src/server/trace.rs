//! One line per FUSE request, for people who debug a mount.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime};

use nix::errno::Errno;
use time::OffsetDateTime;

/// Where the lines go.
#[derive(Clone)]
pub struct Trace(Arc<Mutex<dyn Write + Send>>);

/// A request that has begun.
pub struct Line<'a> {
    trace: &'a Trace,
    at: SystemTime,
    since: Instant,
}

impl Trace {
    /// Writes to `output`, each line at once.
    pub fn new(output: impl Write + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(output)))
    }

    /// A request begins now.
    pub fn begin(&self) -> Line<'_> {
        Line { trace: self, at: SystemTime::now(), since: Instant::now() }
    }
}

impl Line<'_> {
    /// The request is answered: time (UTC), operation, path, caller, result, microseconds.
    pub fn end(self, operation: &str, path: &str, pid: u32, uid: u32, error: Option<Errno>) {
        let at = OffsetDateTime::from(self.at);
        let result = error.map_or("ok".to_owned(), |errno| format!("{errno:?}"));
        let line = format!(
            "{:02}:{:02}:{:02}.{:06} {operation} {} pid={pid} uid={uid} {result} {}us\n",
            at.hour(),
            at.minute(),
            at.second(),
            at.microsecond(),
            path.escape_debug(),
            self.since.elapsed().as_micros()
        );
        if let Ok(mut output) = self.trace.0.lock() {
            // Nobody may be reading any more; the file system goes on.
            let _ = output.write_all(line.as_bytes()).and_then(|()| output.flush());
        }
    }
}
