//! The server's log: lines on standard error, in the form of the supervisor's lines.
//!
//! The supervisor logs with the crate tracing-subscriber. Its filters bring a compiler for regular expressions and a table of
//! 32 KiB into each process. The server needs neither: its code has no spans, and an event about a volume names it in a field.
//!
//! | module | owns |
//! |---|---|
//! | `filter` | which events are logged (`RUST_LOG`) |
//! | `line` | an event as a line, for people or as JSON |

mod filter;
pub mod line;

use std::env;
use std::io::{self, Write};
use std::sync::OnceLock;
use std::time::SystemTime;

use serde_json::{Map, Value};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, Subscriber, set_global_default};
use tracing::{Event, Metadata};

use crate::printable::printable_with_colours;
use filter::Filter;

/// The environment variable that says which events are logged.
const FILTER: &str = "RUST_LOG";

/// The pod of this process, as fields, once it is known.
static PROCESS_FIELDS: OnceLock<Map<String, Value>> = OnceLock::new();

/// Each JSON line of this process names this pod from now on, whichever thread it comes from. Later calls change nothing.
pub fn set_pod(pod: &str, uid: &str) {
    let fields = [("pod", pod), ("uid", uid)].map(|(name, value)| (name.to_owned(), value.into()));
    let _is_set = PROCESS_FIELDS.set(fields.into_iter().collect());
}

/// The fields of each JSON line of this process.
pub fn process_fields() -> Map<String, Value> {
    PROCESS_FIELDS.get().cloned().unwrap_or_default()
}

/// How log lines on standard error look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lines {
    /// Lines for people.
    Text,
    /// One JSON object per line.
    Json,
}

impl Lines {
    /// As in the server's arguments.
    pub fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }

    /// The lines of this name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Text, Self::Json].into_iter().find(|lines| lines.name() == name)
    }
}

/// Starts logging what the environment variable `RUST_LOG` asks for; without it, `info` and above.
pub fn start(lines: Lines) {
    let filter = Filter::parse(&env::var(FILTER).unwrap_or_default());
    let coloured = lines == Lines::Text && may_be_coloured();
    // A second call changes nothing.
    let _ = set_global_default(Logger { filter, lines, coloured });
}

/// Whether standard error is a terminal whose user wants colours (no-color.org).
pub fn may_be_coloured() -> bool {
    let unwanted = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = env::var_os("TERM").is_some_and(|terminal| terminal == "dumb");
    rustix::termios::isatty(rustix::stdio::stderr()) && !unwanted && !dumb
}

/// Standard error, with what would act on a terminal escaped. A line that cannot be written is lost: the program goes on
/// when its log has no reader.
pub struct StandardError;

impl Write for StandardError {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        let _no_reader = io::stderr().write_all(printable_with_colours(&text).as_bytes());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Logger {
    filter: Filter,
    lines: Lines,
    coloured: bool,
}

impl Subscriber for Logger {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.enabled(metadata) { Interest::always() } else { Interest::never() }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && self.filter.lets_through(metadata.target(), *metadata.level())
    }

    fn event(&self, event: &Event<'_>) {
        let now = SystemTime::now();
        let line = match self.lines {
            Lines::Text => line::text(event, now, self.coloured),
            Lines::Json => line::json(event, now, process_fields()),
        };
        let _never_fails = StandardError.write(line.as_bytes());
    }

    // No span is enabled, so none is made.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
