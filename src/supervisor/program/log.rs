//! Logging to standard error, with the crate tracing. Spans around an event have the pod and the volume of the event as
//! fields, and a JSON line has the spans' fields, too. A supervisor serves one pod, so each of its JSON lines names that pod
//! ([`set_pod`](podfs_fuse::log::set_pod)), also the lines of threads without a span.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::time::SystemTime;

use clap::Args;
use podfs_fuse::log::{line, may_be_coloured, open_standard_error, process_fields};
use serde_json::Value;
use tracing::level_filters::LevelFilter;
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, JsonFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormattedFields};
use tracing_subscriber::registry::{LookupSpan, Scope};

pub(crate) use crate::supervisor::log_format::LogFormat;
use crate::supervisor::status::progress::LogOutput;

/// The environment variable from which the pod's server, and the next version of podfs after an upgrade, take the filter.
const FILTER: &str = "RUST_LOG";
/// The filter if neither an option, nor the environment variable, nor a setting gives one.
const DEFAULT: &str = "info";

const LEVELS: [&str; 5] = ["error", "warn", "info", "debug", "trace"];

/// The messages to log.
#[derive(Args)]
pub(crate) struct LogOptions {
    /// Which events podfs logs: those of the level error, warn, info, debug or trace and of more severe levels, or a filter of the
    /// crate tracing-subscriber, such as warn,podfs::source=debug.
    #[arg(long, value_name = "FILTER", default_value = DEFAULT, value_parser = filter)]
    log: String,
}

impl LogOptions {
    /// Starts logging, in this process and in the processes that it starts. No other thread may run yet.
    pub(crate) fn start(&self, format: LogFormat) {
        // Programs that podfs runs may read this variable, too. So podfs does not set it to the default.
        if self.log != DEFAULT || env::var_os(FILTER).is_some() {
            // SAFETY: the process has no other thread yet: each command starts its log before its threads.
            unsafe { env::set_var(FILTER, &self.log) };
        }
        format.start();
    }
}

impl LogOptions {
    /// The option as arguments for another process of podfs.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        vec!["--log".into(), self.log.as_str().into()]
    }
}

fn filter(text: &str) -> Result<String, String> {
    EnvFilter::builder().parse(text).map_err(|error| error.to_string())?;
    // To the crate, a word that is no level is a target. So a misspelled level would turn the log off.
    let is_word = |directive: &&str| !directive.contains(['=', '[']) && directive.parse::<LevelFilter>().is_err();
    let is_own_target = |word: &str| word.split("::").next().is_some_and(|root| root.starts_with("podfs"));
    let unknown = |word: &&str| !word.is_empty() && is_word(word) && !is_own_target(word);
    let Some(word) = text.split(',').map(str::trim).find(unknown) else { return Ok(text.to_owned()) };
    let distance = |level: &&str| strsim::damerau_levenshtein(level, &word.to_lowercase());
    Err(match LEVELS.into_iter().find(|level| distance(level) <= 2) {
        Some(level) => format!("{word:?} is no level; did you mean {level:?}?"),
        None => format!("{word:?} is no level; the levels are {}, and off", LEVELS.join(", ")),
    })
}

impl LogFormat {
    /// Starts logging with the filter in the environment; without one, `info` and above.
    pub(crate) fn start(self) {
        let filter = EnvFilter::builder().with_default_directive(tracing::Level::INFO.into()).from_env_lossy();
        let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| LogOutput);
        open_standard_error(self == Self::Json);
        match self {
            Self::Text => lines.event_format(TextLine { coloured: may_be_coloured() }).init(),
            Self::Json => lines.fmt_fields(JsonFields::new()).event_format(JsonLine).init(),
        }
    }
}

/// Lines for people. They have no fields, because their sentences name the pod or the volume.
struct TextLine {
    coloured: bool,
}

impl<S, F> FormatEvent<S, F> for TextLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    F: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, F>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        to.write_str(&line::text(event, SystemTime::now(), self.coloured))
    }
}

/// JSON lines.
struct JsonLine;

impl<S> FormatEvent<S, JsonFields> for JsonLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, JsonFields>,
        mut to: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut fields = process_fields();
        for span in context.event_scope().into_iter().flat_map(Scope::from_root) {
            let extensions = span.extensions();
            let of_span = extensions.get::<FormattedFields<JsonFields>>();
            if let Some(Ok(Value::Object(of_span))) = of_span.map(|fields| serde_json::from_str(&fields.fields)) {
                fields.extend(of_span);
            }
        }
        to.write_str(&line::json(event, SystemTime::now(), fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelled_level_is_refused() {
        for good in ["info", "WARN", "off", "warn,podfs::source=debug", "podfs::node", "hyper=off,info", "[span]=debug"]
        {
            assert_eq!(filter(good).as_deref(), Ok(good));
        }
        for (word, level) in [("wran", "warn"), ("infos", "info"), ("errror", "error"), ("Debgu", "debug")] {
            let expected = format!("{word:?} is no level; did you mean {level:?}?");
            assert_eq!(filter(&format!("hyper=off,{word}")), Err(expected));
        }
        for (text, word) in [("verbose", "verbose"), ("quiet", "quiet"), ("info,otherprogram", "otherprogram")] {
            let expected = format!("{word:?} is no level; the levels are error, warn, info, debug, trace, and off");
            assert_eq!(filter(text), Err(expected));
        }
    }
}
