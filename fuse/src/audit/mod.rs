//! The access log: one JSON line on standard error for each open of a file in an audited projection.
//!
//! 1. The server writes the line before it answers the open. The caller waits in the kernel until then, so `/proc` describes it
//!    correctly, and no process reads a file without a line.
//! 2. The server marks an open with a line as begun in the region. If the server is killed, its successor gets the request again,
//!    finds the mark and writes no line. After a kill between the line and the mark, the successor writes a second line; after a
//!    kill before the line, the first. Both have `again`.
//! 3. Writing to standard error never blocks ([`LineOutput`]). The server counts a lost line in the region, and the volume's next
//!    line says how many were lost.
//!
//! A line has names only, never the content of a file.
//!
//! | module | owns |
//! |---|---|
//! | `opener` | the process that opens a file |

mod opener;

use std::sync::Arc;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::log::line::Timestamp;
use crate::log::standard_error::LineOutput;
use crate::region::Region;
use crate::session::Caller;
use opener::Opener;

/// Longest line, in bytes. The kernel writes it to a pipe whole or not at all (`PIPE_BUF` of pipe(7)).
const LONGEST_LINE: usize = 4095;
/// Longest key and longest cgroup, in bytes, in a line that would be too long otherwise.
const LONGEST_PATH: usize = 1024;

/// The owner of the files, as the program that started the volume describes it. It is in every line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditSubject(pub Map<String, Value>);

/// The access log of one volume.
pub(crate) struct Audit {
    subject: AuditSubject,
    region: Arc<Region>,
    output: Arc<LineOutput>,
}

/// A line, with its fields in their order.
#[derive(Serialize)]
struct AuditLine<'a> {
    /// The kind of event. It also distinguishes these lines from others on standard error.
    audit: &'static str,
    /// The time in UTC, in microseconds (RFC 3339).
    time: String,
    #[serde(flatten)]
    subject: &'a AuditSubject,
    /// The file's path in the volume.
    key: String,
    #[serde(flatten)]
    opener: Opener,
    /// Whether an earlier server got the request, too, and may have written a line.
    #[serde(skip_serializing_if = "Option::is_none")]
    again: Option<bool>,
    /// The number of lines of the volume that were lost since its last line.
    #[serde(skip_serializing_if = "Option::is_none")]
    lost: Option<u64>,
}

impl Audit {
    /// A log that writes to `output`, and counts in `region`.
    pub(crate) fn new(subject: AuditSubject, region: Arc<Region>, output: Arc<LineOutput>) -> Self {
        Self { subject, region, output }
    }

    /// Writes the line that `caller`, which waits for the answer, opens the file at `key`.
    pub(crate) fn open(&self, key: &str, caller: Caller, is_resent: bool) {
        let opens = self.region.opens();
        let lost = opens.unreported();
        let line = AuditLine {
            audit: "open",
            time: Timestamp(SystemTime::now()).to_string(),
            subject: &self.subject,
            key: key.to_owned(),
            opener: Opener::of(caller),
            again: is_resent.then_some(true),
            lost: (lost > 0).then_some(lost),
        };
        if line.text().is_some_and(|text| self.output.write(text.as_bytes())) {
            opens.written(lost);
        } else {
            opens.count_lost();
        }
    }
}

impl AuditLine<'_> {
    /// The line with its line break. Shortens the paths of a line that is too long; `None` if it still is.
    fn text(mut self) -> Option<String> {
        let mut limit = LONGEST_PATH;
        loop {
            // Strings and numbers are always valid JSON.
            let mut text = serde_json::to_string(&self).ok()?;
            text.push('\n');
            if text.len() <= LONGEST_LINE {
                return Some(text);
            }
            if limit == 0 {
                return None;
            }
            shorten(&mut self.key, limit);
            self.opener.cgroup.iter_mut().for_each(|cgroup| shorten(cgroup, limit));
            limit /= 2;
        }
    }
}

fn shorten(path: &mut String, limit: usize) {
    if path.len() > limit {
        let whole = (0..=limit).rev().find(|end| path.is_char_boundary(*end));
        path.truncate(whole.unwrap_or_default());
        path.push('…');
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, Read, pipe};

    use serde_json::json;

    use super::*;
    use crate::region::VolumeKind;

    const UNKNOWN_CALLER: Caller = Caller { uid: u32::MAX, gid: u32::MAX, pid: 0 };

    fn audit() -> (Audit, PipeReader) {
        let (reader, writer) = pipe().expect("a pipe");
        let Value::Object(subject) = json!({"volume": "db"}) else { unreachable!("it is one") };
        let region = Arc::new(Region::create(VolumeKind::Projection).expect("memory"));
        (Audit::new(AuditSubject(subject), region, Arc::new(LineOutput::to_pipe(writer.into()))), reader)
    }

    fn lines(audit: Audit, mut reader: PipeReader) -> Vec<Value> {
        drop(audit);
        let mut text = String::new();
        reader.read_to_string(&mut text).expect("text");
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    #[test]
    fn a_line_has_only_known_values() {
        let (audit, reader) = audit();
        audit.open("a\"b\n/ü", UNKNOWN_CALLER, false);
        audit.open("b", UNKNOWN_CALLER, true);
        let mut lines = lines(audit, reader);
        let time = lines[0].as_object_mut().expect("an object").remove("time").expect("a time");
        assert_eq!(time.as_str().map(str::len), Some("2026-11-21T16:40:01.123456Z".len()));
        let expected = json!({"audit": "open", "volume": "db", "key": "a\"b\n/ü", "pid": null, "uid": null, "gid": null,
                              "command": null, "cgroup": null});
        assert_eq!(lines[0], expected);
        assert_eq!((&lines[1]["key"], &lines[1]["again"]), (&json!("b"), &json!(true)));
    }

    #[test]
    fn the_caller_is_a_process_and_its_thread_is_not_mistaken_for_it() {
        let (audit, reader) = audit();
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let pid = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
                audit.open("k", Caller { pid, ..UNKNOWN_CALLER }, false);
            });
            thread.join().expect("it ends");
        });
        let line = lines(audit, reader).remove(0);
        let command = std::fs::read_to_string("/proc/self/comm").expect("a name");
        assert_eq!((&line["pid"], &line["command"]), (&json!(std::process::id()), &json!(command.trim_end())));
        assert_eq!((&line["uid"], &line["gid"]), (&json!(0), &json!(0)));
        assert!(line["cgroup"].as_str().expect("a cgroup").starts_with('/'));
    }

    #[test]
    fn lost_lines_are_reported_once_and_counted_for_good() {
        let (audit, mut reader) = audit();
        let opens = || audit.region.opens().counted();
        while opens().lost < 3 {
            audit.open("k", UNKNOWN_CALLER, false);
        }
        let written = opens().opens - 3;
        let mut text = vec![0; 1 << 20];
        let length = reader.read(&mut text).expect("what fitted");
        assert_eq!(text[..length].iter().filter(|byte| **byte == b'\n').count() as u64, written);
        audit.open("k", UNKNOWN_CALLER, false);
        audit.open("k", UNKNOWN_CALLER, false);
        assert_eq!((opens().opens, opens().lost), (written + 5, 3));
        let lines = lines(audit, reader);
        assert_eq!(lines.iter().map(|line| line["lost"].as_u64()).collect::<Vec<_>>(), [Some(3), None]);
    }

    #[test]
    fn a_line_always_fits_into_a_pipe_at_once() {
        let (audit, reader) = audit();
        audit.open(&"\u{1}ü".repeat(4096), UNKNOWN_CALLER, false);
        let line = lines(audit, reader).remove(0);
        assert!(line["key"].as_str().expect("a key").ends_with('…'));
    }
}
