//! A call whose answers differ, and what came before.

use serde_json::Value;

use super::lockstep::{Caching, LOCKS};
use super::program::{Actor, Step};
use super::sources::SourceKind;

/// A call whose answers differ.
pub struct Observed<'a> {
    pub step: &'a Step,
    /// The steps before, and the answers to them in the native directory.
    pub before: &'a [Step],
    pub answers: &'a [Value],
    pub native: &'a Value,
    pub volume: &'a Value,
    pub caching: Caching,
    pub kind: SourceKind,
    /// Whether the first argument is the slot of a directory.
    pub is_directory: bool,
    /// Whether a server was killed together with its keeper since the program began.
    pub lost_both: bool,
}

/// Calls that put a file into a slot.
pub const OPENS: &[&str] = &["open", "openat", "reopen", "openhandle", "dup"];
/// Calls that take setuid and setgid from a file if an ordinary user makes them.
pub const WRITES: [&str; 9] =
    ["write", "pwrite", "copy", "sendfile", "ftruncate", "truncate", "fallocate", "open", "openat"];
/// Calls that may change the names in a directory.
const NAMES: [&str; 12] = [
    "open",
    "openat",
    "link",
    "linkfd",
    "mkdir",
    "mknod",
    "rename",
    "rmdir",
    "symlink",
    "unlink",
    "subvolume",
    "snapshot",
];

/// Removes the fields of this name.
pub fn remove(value: &mut Value, key: &str) {
    match value {
        Value::Object(fields) => {
            fields.remove(key);
            fields.values_mut().for_each(|value| remove(value, key));
        }
        Value::Array(values) => values.iter_mut().for_each(|value| remove(value, key)),
        _ => {}
    }
}

/// Removes the fields of this name from the attributes of files of this type.
pub fn remove_of_type(answer: &mut Value, kind: u32, key: &str) {
    match answer {
        Value::Object(fields) => {
            let mode = fields.get("mode").and_then(|mode| mode_of("mode", mode));
            if mode.is_some_and(|mode| mode & 0o170_000 == kind) {
                fields.remove(key);
            }
            fields.values_mut().for_each(|value| remove_of_type(value, kind, key));
        }
        Value::Array(values) => values.iter_mut().for_each(|value| remove_of_type(value, kind, key)),
        _ => {}
    }
}

/// Removes the files whose names begin with this from trees and listings.
pub fn remove_names(answer: &mut Value, prefix: &str) {
    let is_gone = |path: &str| path.rsplit('/').next().is_some_and(|name| name.starts_with(prefix));
    match answer.get_mut(1) {
        Some(Value::Object(files)) => files.retain(|path, _| !is_gone(path)),
        Some(Value::Array(entries)) => entries.retain(|entry| !entry[0].as_str().is_some_and(is_gone)),
        _ => {}
    }
}

/// Removes an extended attribute from trees.
fn remove_attribute(value: &mut Value, name: &str) {
    if let Value::Array(values) = value {
        values.retain(|value| value[0] != name);
    }
    match value {
        Value::Array(values) => values.iter_mut().for_each(|value| remove_attribute(value, name)),
        Value::Object(fields) => fields.values_mut().for_each(|value| remove_attribute(value, name)),
        _ => {}
    }
}

fn without_set_id(answer: &Value) -> Value {
    match answer {
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| match mode_of(name, value) {
                Some(mode) => (name.clone(), (mode & !0o6000).into()),
                None => (name.clone(), without_set_id(value)),
            })
            .collect(),
        Value::Array(values) => values.iter().map(without_set_id).collect(),
        other => other.clone(),
    }
}

impl<'a> Observed<'a> {
    pub fn is(&self, wanted: &str) -> bool {
        self.step.is(wanted)
    }

    pub fn is_any(&self, wanted: &[&str]) -> bool {
        self.step.is_any(wanted)
    }

    pub fn is_by(&self, actor: Actor) -> bool {
        self.step.by() == Some(actor)
    }

    pub fn has_word(&self, word: &str) -> bool {
        self.step.has_word(word)
    }

    pub fn native_error(&self) -> Option<&str> {
        (self.native[0] == "error").then_some(self.native[1].as_str()?)
    }

    pub fn volume_error(&self) -> Option<&str> {
        (self.volume[0] == "error").then_some(self.volume[1].as_str()?)
    }

    /// The calls before that have succeeded.
    pub fn done(&self) -> impl Iterator<Item = &'a Step> {
        self.before.iter().zip(self.answers).filter(|(_, answer)| answer[0] == "ok").map(|(step, _)| step)
    }

    /// The calls before that have failed.
    pub fn failed(&self) -> impl Iterator<Item = &'a Step> {
        self.before.iter().zip(self.answers).filter(|(_, answer)| answer[0] == "error").map(|(step, _)| step)
    }

    /// Whether a process in another place has made one of these calls.
    pub fn done_elsewhere(&self, calls: &[&str]) -> bool {
        let here = self.step.by().map(Actor::view);
        self.done().any(|step| step.by().map(Actor::view) != here && step.is_any(calls))
    }

    /// Whether a file may have lost a name, or never had one.
    pub fn has_lost_name(&self) -> bool {
        self.done().any(|step| step.is_any(&["unlink", "rmdir", "rename"]) || step.has_word("O_TMPFILE"))
    }

    /// Whether a file that the call uses may have been opened with this flag.
    pub fn slot_has(&self, flag: &str) -> bool {
        self.opened(self.step, flag)
    }

    /// Whether a file that `step` uses may have been opened with this flag.
    pub fn opened(&self, step: &Step, flag: &str) -> bool {
        let mut slots = step.slots();
        let opens: Vec<_> = self.done().filter(|other| other.by() == step.by() && other.is_any(OPENS)).collect();
        for open in opens.into_iter().rev() {
            let Some(slot) = open.slot().filter(|slot| slots.contains(slot)) else { continue };
            if open.has_word(flag) {
                return true;
            }
            match open.slots().into_iter().find(|other| *other != slot) {
                Some(other) if open.is_any(&["dup", "reopen"]) => slots.push(other),
                _ => {}
            }
        }
        false
    }

    /// Whether a call before is of the first kind, and a later one is of the second kind in view of that.
    pub fn anyone_after(&self, is_first: impl Fn(&Step) -> bool, is_second: impl Fn(&Step, &Step) -> bool) -> bool {
        let done: Vec<_> = self.done().collect();
        let after = |index: usize| done[index + 1..].iter().any(|later| is_second(done[index], later));
        (0..done.len()).any(|index| is_first(done[index]) && after(index))
    }

    /// Whether `closer` closes a file, maybe by using its slot again, in the process that made the call `locker`. If that matters, the
    /// file is the locked one; otherwise, it may have been opened for reading only.
    pub fn closes(&self, locker: &Step, closer: &Step, is_locked: bool) -> bool {
        let is_close = closer.by() == locker.by() && (closer.is("close") || closer.is_any(OPENS));
        let for_reading = || {
            let own = |open: &&Step| open.by() == closer.by() && open.slot() == closer.slot() && open.is_any(OPENS);
            self.done().filter(own).any(|open| !open.has_word("O_WRONLY") && !open.has_word("O_RDWR"))
        };
        is_close && if is_locked { closer.slot() == locker.slot() } else { for_reading() }
    }

    pub fn is_about_locks(&self) -> bool {
        self.is_any(&LOCKS)
    }

    /// Whether a lock conflicts in the volume alone.
    pub fn volume_has_more_locks(&self) -> bool {
        has_fewer_locks(self.native, self.volume)
    }

    /// Whether a lock conflicts in the native directory alone.
    pub fn native_has_more_locks(&self) -> bool {
        has_fewer_locks(self.volume, self.native)
    }

    /// Whether a stream of a directory has begun before the last change of a name. Then POSIX leaves open which names it returns.
    pub fn is_of_old_stream(&self) -> bool {
        let begins = [OPENS, &["rewind", "seekdir"]].concat();
        let is_listed = |answer: &Value| answer[0] == "ok";
        self.is("readdir") && is_listed(self.native) && is_listed(self.volume) && self.changes_names_since(&begins)
    }

    /// Whether names have changed since the process made the last of these calls with the slot.
    pub fn changes_names_since(&self, begins: &[&str]) -> bool {
        let done: Vec<_> = self.done().collect();
        let is_begin =
            |step: &&Step| step.by() == self.step.by() && step.is_any(begins) && step.slot() == self.step.slot();
        let begin = done.iter().rposition(is_begin).map_or(0, |index| index + 1);
        done[begin..].iter().any(|step| step.is_any(&NAMES))
    }

    /// Whether the answers are attributes that differ only in setuid and setgid: only the volume has them.
    pub fn volume_keeps_set_id(&self) -> bool {
        without_set_id(self.native) == without_set_id(self.volume) && set_ids(self.native) < set_ids(self.volume)
    }

    /// Whether the answers are attributes that differ only in setuid and setgid: the volume lacks them.
    pub fn native_keeps_set_id(&self) -> bool {
        without_set_id(self.native) == without_set_id(self.volume) && set_ids(self.native) > set_ids(self.volume)
    }

    /// Whether the answers are trees or data that differ only in what the files contain.
    pub fn differs_only_in_content(&self) -> bool {
        fn without(answer: &Value) -> Value {
            match answer {
                Value::String(text) if text.contains(" bytes ") => Value::Null,
                Value::Array(values) => values.iter().map(without).collect(),
                Value::Object(fields) => fields.iter().map(|(name, value)| (name.clone(), without(value))).collect(),
                other => other.clone(),
            }
        }
        without(self.native) == without(self.volume)
    }

    /// Whether the answers are attributes that differ only in the times of FIFOs.
    pub fn differs_only_in_times_of_fifos(&self) -> bool {
        let without = |answer: &Value| {
            let mut answer = answer.clone();
            ["atime", "mtime", "ctime"].iter().for_each(|time| remove_of_type(&mut answer, 0o010_000, time));
            answer
        };
        without(self.native) == without(self.volume)
    }

    /// Whether the answers differ only in setuid, setgid and capabilities: the volume has removed them.
    pub fn native_has_only_privileges_more(&self) -> bool {
        let without = |answer: &Value| {
            let mut answer = without_set_id(answer);
            remove_attribute(&mut answer, CAPABILITY);
            answer
        };
        let is_lost = || self.volume_error() == Some("ENODATA") && self.has_word(CAPABILITY);
        is_lost()
            || (without(self.native) == without(self.volume)
                && set_ids(self.native) >= set_ids(self.volume)
                && (self.native.to_string().contains(CAPABILITY) || !self.volume.to_string().contains(CAPABILITY)))
    }
}

const CAPABILITY: &str = "security.capability";

/// The number of setuid and setgid bits in the modes of an answer.
fn set_ids(answer: &Value) -> u32 {
    match answer {
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| match mode_of(name, value) {
                Some(mode) => (mode & 0o6000).count_ones(),
                None => set_ids(value),
            })
            .sum(),
        Value::Array(values) => values.iter().map(set_ids).sum(),
        _ => 0,
    }
}

/// The mode, if the field is one.
fn mode_of(name: &str, value: &Value) -> Option<u32> {
    let digits = value.as_str().filter(|_| name == "mode")?.strip_prefix("0o")?;
    u32::from_str_radix(digits, 8).ok()
}

/// Whether a call about locks meets fewer of them in the first answer than in the second.
fn has_fewer_locks(first: &Value, second: &Value) -> bool {
    let is_denied = second[0] == "error" && second[1] == "EAGAIN";
    let is_found = second[0] == "ok" && second[1].is_array() && second[1][0] != "none";
    first[0] == "ok" && (is_denied || is_found)
}
