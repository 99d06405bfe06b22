//! Formats events like the crate tracing-subscriber. The supervisor uses the same functions.

use std::fmt::{self, Display, Formatter, Write};
use std::time::SystemTime;

use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::{Event, Level};

use crate::printable::printable_line;
use crate::utc::utc;

/// An event as a line of text.
pub fn text(event: &Event<'_>, at: SystemTime, coloured: bool) -> String {
    let paint = |text: &str, colour: &str| match coloured {
        true => format!("\x1b[{colour}m{text}\x1b[0m"),
        false => text.to_owned(),
    };
    let level = *event.metadata().level();
    let colour = match level {
        Level::ERROR => "31",
        Level::WARN => "33",
        Level::INFO => "32",
        Level::DEBUG => "34",
        Level::TRACE => "35",
    };
    let level = paint(&format!("{:>5}", level.as_str()), colour);
    let (time, target) = (paint(&Timestamp(at).to_string(), "2"), paint(event.metadata().target(), "2"));
    let mut line = format!("{time} {level} {target}{}", paint(":", "2"));
    let mut fields = EventFields::of(event).0;
    if let Some(pod) = super::pod_in_text().filter(|_| fields.iter().all(|(name, _)| *name != super::POD)) {
        fields.push((super::POD, format!("{pod:?}")));
    }
    for (name, value) in fields {
        let value = printable_line(&value).into_owned();
        line += " ";
        match name {
            "message" => line += &value,
            name => line += &format!("{}{}{value}", paint(name, "3"), paint("=", "2")),
        }
    }
    line + "\n"
}

/// An event as one JSON object. `context` has the fields of the spans around the event; a field of the event itself overrides them.
pub fn json(event: &Event<'_>, at: SystemTime, context: Map<String, Value>) -> String {
    let mut fields = JsonFields(context);
    event.record(&mut fields);
    let (timestamp, level) = (json!(Timestamp(at).to_string()), json!(event.metadata().level().as_str()));
    let (fields, target) = (Value::Object(fields.0), json!(event.metadata().target()));
    format!("{{\"timestamp\":{timestamp},\"level\":{level},\"fields\":{fields},\"target\":{target}}}\n")
}

/// The line that reports lost lines.
pub(super) fn of_lost_lines(count: u64, at: SystemTime, is_json: bool) -> String {
    let message = format!("{count} line(s) of this log are lost: the reader of standard error took nothing");
    let (time, target) = (Timestamp(at), "podfs_fuse::log");
    if !is_json {
        let pod = super::pod_in_text().map(|pod| format!(" {}={pod:?}", super::POD)).unwrap_or_default();
        return format!("{time}  WARN {target}: {message}{pod}\n");
    }
    let mut fields = super::process_fields();
    fields.insert("message".to_owned(), message.into());
    fields.insert("lost".to_owned(), count.into());
    let (timestamp, fields, target) = (json!(time.to_string()), Value::Object(fields), json!(target));
    format!("{{\"timestamp\":{timestamp},\"level\":\"WARN\",\"fields\":{fields},\"target\":{target}}}\n")
}

/// A sentence about this program as a line of text, whatever the filter of events is.
pub fn of_sentence(program: &str, sentence: &str, at: SystemTime) -> String {
    format!("{}  INFO {program}: {}\n", Timestamp(at), printable_line(sentence))
}

/// A time in the format of log lines.
pub(crate) struct Timestamp(pub(crate) SystemTime);

impl Display for Timestamp {
    /// Allocates no memory.
    fn fmt(&self, to: &mut Formatter<'_>) -> fmt::Result {
        write!(to, "{:.6}", utc(self.0))
    }
}

/// The fields of an event in their order, as text.
struct EventFields(Vec<(&'static str, String)>);

impl EventFields {
    fn of(event: &Event<'_>) -> Self {
        let mut fields = Self(Vec::new());
        event.record(&mut fields);
        fields
    }
}

impl Visit for EventFields {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.0.push(("message", value.to_owned())),
            _ => self.record_debug(field, &value),
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let mut text = String::new();
        let _never_fails = write!(text, "{value:?}");
        self.0.push((field.name(), text));
    }
}

/// The fields of an event as JSON.
struct JsonFields(Map<String, Value>);

impl JsonFields {
    fn put(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

impl Visit for JsonFields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value);
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value);
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value);
    }
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use tracing::span::{Attributes, Id, Record};
    use tracing::subscriber::{Subscriber, with_default};
    use tracing::{Metadata, warn};

    use super::*;

    /// Keeps the line that a function makes of an event.
    struct Kept<F>(F, Arc<Mutex<String>>);

    impl<F: Fn(&Event<'_>) -> String + 'static> Subscriber for Kept<F> {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn event(&self, event: &Event<'_>) {
            *self.1.lock().expect("no panic") += &self.0(event);
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<String>>);

    impl io::Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            *self.0.lock().expect("no panic") += std::str::from_utf8(bytes).expect("text");
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Events of all kinds that there are in this crate.
    fn log_events() {
        let server = "10.0.0.7";
        warn!("a plain ü \"line\"");
        warn!(server, "NFS server {server} answers again");
        tracing::error!(number = 7, ok = true, "three fields");
        tracing::debug!("a level");
    }

    fn ours(line: impl Fn(&Event<'_>) -> String + Send + Sync + 'static) -> String {
        let kept = Arc::new(Mutex::new(String::new()));
        with_default(Kept(line, Arc::clone(&kept)), log_events);
        Arc::into_inner(kept).expect("it is over").into_inner().expect("no panic")
    }

    /// The same with the time of each line made equal, which stands between `before` and `Z`.
    fn without_times(lines: &str, before: &str) -> String {
        let line = |line: &str| {
            let (start, rest) = line.split_once(before).expect("a time");
            format!("{start}{before}{}\n", rest.split_once('Z').expect("a time").1)
        };
        lines.lines().map(line).collect()
    }

    #[test]
    fn lines_are_those_of_tracing_subscriber() {
        let theirs = Buffer::default();
        let writer = theirs.clone();
        let base = move || {
            let writer = writer.clone();
            tracing_subscriber::fmt().with_max_level(Level::TRACE).with_writer(move || writer.clone())
        };
        let taken = || std::mem::take(&mut *theirs.0.lock().expect("no panic"));
        for coloured in [false, true] {
            with_default(base().with_ansi(coloured).finish(), log_events);
            let before = if coloured { "\x1b[2m" } else { "" };
            let ours = ours(move |event| text(event, SystemTime::now(), coloured));
            assert_eq!(without_times(&ours, before), without_times(&taken(), before));
        }
        with_default(base().json().finish(), log_events);
        let before = "{\"timestamp\":\"";
        let ours = ours(|event| json(event, SystemTime::now(), Map::new()));
        assert_eq!(without_times(&ours, before), without_times(&taken(), before));
    }

    #[test]
    fn control_characters_are_escaped() {
        let kept = Arc::new(Mutex::new(String::new()));
        let line = |event: &Event<'_>| text(event, SystemTime::UNIX_EPOCH, false);
        with_default(Kept(line, Arc::clone(&kept)), || warn!("a name: {}", "\x1b[2J"));
        assert_eq!(
            *kept.lock().expect("no panic"),
            "1970-01-01T00:00:00.000000Z  WARN podfs_fuse::log::line::tests: a name: \\u001b[2J\n"
        );
    }

    #[test]
    fn a_line_end_in_a_name_begins_no_line() {
        let forged = "x\n2026-01-01T00:00:00.000000Z  INFO podfs: all is well";
        let kept = Arc::new(Mutex::new(String::new()));
        let line = |event: &Event<'_>| text(event, SystemTime::UNIX_EPOCH, false);
        with_default(Kept(line, Arc::clone(&kept)), || {
            warn!("a path: {forged}");
            warn!(path = forged, "a path");
        });
        let lines = kept.lock().expect("no panic").clone() + &of_sentence("podfs", forged, SystemTime::UNIX_EPOCH);
        assert_eq!(lines.lines().count(), 3, "{lines}");
    }
}
