//! The server's log: lines on standard error, in the format of the supervisor's lines.
//!
//! The supervisor logs with the crate tracing-subscriber. Its filters add a compiler for regular expressions and a table of
//! 32 KiB to each process. The server needs neither: its code has no spans, and an event about a volume names it in a field.
//!
//! | module | owns |
//! |---|---|
//! | `filter` | the filter of events (`RUST_LOG`) |
//! | `line` | the format of lines: text or JSON |
//! | `writer` | log lines: written, or lost and counted |
//! | [`standard_error`](mod@standard_error) | standard error, written without waiting for its reader |

mod filter;
pub mod line;
pub mod standard_error;
mod writer;

use std::env;
use std::io::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use serde_json::{Map, Value};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, Subscriber, set_global_default};
use tracing::{Event, Metadata};

use filter::Filter;
pub use writer::{StandardError, open_standard_error, say, write_unless_stuck};

/// The environment variable with the filter of events.
const FILTER: &str = "RUST_LOG";

/// The fields with the pod of this process, after [`set_pod`].
static PROCESS_FIELDS: OnceLock<Map<String, Value>> = OnceLock::new();
/// The field with the pod's namespace and name.
const POD: &str = "pod";
/// Whether lines of text name the pod, too.
static NAMES_POD_IN_TEXT: AtomicBool = AtomicBool::new(false);

/// Sets the pod that each JSON line of this process names. Later calls have no effect.
pub fn set_pod(pod: &str, uid: &str) {
    let fields = [(POD, pod), ("uid", uid)].map(|(name, value)| (name.to_owned(), value.into()));
    let _is_set = PROCESS_FIELDS.set(fields.into_iter().collect());
}

/// Makes each line of text name the pod of this process, too, because lines of several pods may go to one place.
pub fn name_pod_in_text() {
    NAMES_POD_IN_TEXT.store(true, Ordering::Relaxed);
}

/// The pod that each line of text names.
fn pod_in_text() -> Option<&'static str> {
    let fields = PROCESS_FIELDS.get().filter(|_| NAMES_POD_IN_TEXT.load(Ordering::Relaxed))?;
    fields.get(POD)?.as_str()
}

/// The fields of each JSON line of this process.
pub fn process_fields() -> Map<String, Value> {
    PROCESS_FIELDS.get().cloned().unwrap_or_default()
}

/// The format of log lines on standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineFormat {
    /// Lines of text.
    Text,
    /// One JSON object per line.
    Json,
}

impl LineFormat {
    /// The word in the server's arguments.
    pub fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }

    /// The format of this name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Text, Self::Json].into_iter().find(|lines| lines.name() == name)
    }
}

/// Starts the log with the filter in the environment variable `RUST_LOG`; without it, `info` and above.
pub fn start(lines: LineFormat) {
    let filter = Filter::parse(&env::var(FILTER).unwrap_or_default());
    let coloured = lines == LineFormat::Text && may_be_coloured();
    open_standard_error(lines == LineFormat::Json);
    // A second call has no effect.
    let _ = set_global_default(Logger { filter, lines, coloured });
}

/// Whether standard error is a terminal whose user wants colours (no-color.org).
pub fn may_be_coloured() -> bool {
    let unwanted = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = env::var_os("TERM").is_some_and(|terminal| terminal == "dumb");
    rustix::termios::isatty(rustix::stdio::stderr()) && !unwanted && !dumb
}

struct Logger {
    filter: Filter,
    lines: LineFormat,
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
            LineFormat::Text => line::text(event, now, self.coloured),
            LineFormat::Json => line::json(event, now, process_fields()),
        };
        let _never_fails = StandardError.write(line.as_bytes());
    }

    // No span is enabled.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
