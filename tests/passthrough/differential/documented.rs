//! Differences between a volume and the directory behind it that the documentation describes. Each has a row in
//! `docs/reference/differences.md`.

use serde_json::Value;

use super::lockstep::{Caching, LOCKS};
use super::program::Step;
use super::sources::SourceKind;

/// A call whose answers differ.
pub struct Observed<'a> {
    pub step: &'a Step,
    pub before: &'a [Step],
    pub native: &'a Value,
    pub volume: &'a Value,
    pub caching: Caching,
    pub kind: SourceKind,
}

/// A row of the documentation, and whether it describes a difference.
type DocumentedRow = (&'static str, fn(&Observed) -> bool);

const ROWS: &[DocumentedRow] = &[
    ("`fallocate` that moves the rest of a file", |seen| {
        seen.is("fallocate") && seen.has_word("_RANGE") && seen.volume_error() == Some("ENOTSUP")
    }),
    ("a removed file that a process has open by `O_PATH` alone", |seen| {
        seen.volume_error() == Some("ESTALE") && seen.opened_with("O_PATH")
    }),
    ("`F_SETFL` and `O_DIRECT`, `O_APPEND`", |seen| any_call(seen.before, "setfl")),
    ("closing a file opened for reading only", |seen| {
        seen.is_about_locks() && any_call(seen.before, "posix") && seen.closes()
    }),
    ("a `flock` on a directory", |seen| seen.is("flock")),
    ("the end of a directory", |seen| {
        let is_directory = |answer: &Value| answer[1] == "a directory" || answer[1] == "EISDIR";
        (seen.is_any(&["lseek", "read"]) && (is_directory(seen.native) || is_directory(seen.volume)))
            || (seen.is("lseek") && seen.native_error() == Some("EINVAL") && seen.volume_error() == Some("ENXIO"))
    }),
    ("names made after a directory of btrfs was opened", |seen| {
        let names = |answer: &Value| answer[1].as_array().cloned().unwrap_or_default();
        seen.kind == SourceKind::Btrfs
            && seen.is("readdir")
            && names(seen.native).iter().all(|name| names(seen.volume).contains(name))
    }),
    ("locks of a file that is mapped, but not open any more", |seen| {
        seen.is_about_locks() && any_call(seen.before, "mmap") && seen.closes()
    }),
    ("`O_DIRECT` with a `sizeLimit`", |seen| {
        seen.caching == Caching::Limited && seen.native_error() == Some("EINVAL") && seen.opened_with("O_DIRECT")
    }),
    ("owner and mode of an open file that were changed elsewhere", |seen| {
        seen.changed_elsewhere(&["chmod", "fchmod", "chown", "fchown", "lchown", "setacl"])
            && (seen.is_any(&["fchmod", "fchown", "futimens"]) || seen.differs_only_in_set_id())
    }),
    ("`chown(file, -1, -1)` of a file with setuid or setgid", |seen| {
        (seen.is_any(&["chown", "lchown", "fchown"]) && seen.native_error() == Some("EPERM"))
            || (seen.differs_only_in_set_id()
                && ["chown", "lchown", "fchown"].iter().any(|name| any_call(seen.before, name)))
    }),
    ("setuid and setgid after a write that fails", |seen| {
        seen.differs_only_in_set_id()
            && ["pwrite", "write", "copy", "sendfile"].iter().any(|name| any_call(seen.before, name))
    }),
    ("`copy_file_range` from a file that has grown elsewhere", |seen| {
        seen.is("copy")
            && seen.changed_elsewhere(&["write", "pwrite", "ftruncate", "truncate", "fallocate", "copy", "sendfile"])
            && (seen.volume[1].as_u64() < seen.native[1].as_u64() || seen.native_error() == Some("EINVAL"))
    }),
    ("setuid, setgid and capabilities after `fallocate`", |seen| {
        matches!(seen.kind, SourceKind::Btrfs | SourceKind::Tmpfs)
            && any_call(seen.before, "fallocate")
            && seen.has_only_capability_more()
    }),
    ("names of `trusted.` attributes on btrfs", |seen| seen.kind == SourceKind::Btrfs && seen.is("listxattr")),
    ("an ACL of a file that was moved elsewhere", |seen| {
        seen.changed_elsewhere(&["setacl", "setxattr", "removexattr", "chmod"])
            && seen.changed_elsewhere(&["rename"])
            && (seen.volume_error() == Some("ENODATA") || seen.is_any(&["access", "getxattr"]))
    }),
    ("times after a store through a mapping, with a `sizeLimit`", |seen| {
        let timeless = |answer: &Value| {
            let mut answer = answer.clone();
            ["mtime", "ctime"].into_iter().for_each(|time| remove(&mut answer, time));
            answer
        };
        seen.caching == Caching::Limited
            && any_call(seen.before, "store")
            && timeless(seen.native) == timeless(seen.volume)
    }),
    ("holes in a file, with a `sizeLimit`", |seen| {
        seen.caching == Caching::Limited && (seen.has_word("SEEK_DATA") || seen.has_word("SEEK_HOLE"))
    }),
    ("a rename between two directories that meets a directory which another process has moved", |seen| {
        seen.is("rename") && seen.volume_error() == Some("ESTALE") && seen.caching != Caching::Alone
    }),
    ("file handles of a source that has none", |seen| seen.is("handle") && seen.native_error() == Some("ENOTSUP")),
    ("FIFOs and sockets", |seen| {
        seen.is_any(&["open", "openat", "reopen"])
            && [seen.native_error(), seen.volume_error()].contains(&Some("ENXIO"))
    }),
];

/// The row that describes a difference.
pub fn row(seen: &Observed) -> Option<&'static str> {
    ROWS.iter().find(|(_, describes)| describes(seen)).map(|(row, _)| *row)
}

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
            .map(|(name, value)| match value.as_str().and_then(|mode| mode.strip_prefix("0o")) {
                Some(mode) if name == "mode" => {
                    (name.clone(), (u32::from_str_radix(mode, 8).expect("a mode") & !0o6000).into())
                }
                _ => (name.clone(), without_set_id(value)),
            })
            .collect(),
        Value::Array(values) => values.iter().map(without_set_id).collect(),
        other => other.clone(),
    }
}

fn any_call(steps: &[Step], wanted: &str) -> bool {
    steps.iter().any(|step| matches!(step, Step::Call { name, .. } if name == wanted))
}

impl Observed<'_> {
    fn is(&self, wanted: &str) -> bool {
        matches!(self.step, Step::Call { name, .. } if name == wanted)
    }

    fn is_any(&self, wanted: &[&str]) -> bool {
        wanted.iter().any(|name| self.is(name))
    }

    fn has_word(&self, word: &str) -> bool {
        self.step.to_string().contains(word)
    }

    fn native_error(&self) -> Option<&str> {
        (self.native[0] == "error").then_some(self.native[1].as_str()?)
    }

    fn volume_error(&self) -> Option<&str> {
        (self.volume[0] == "error").then_some(self.volume[1].as_str()?)
    }

    fn is_about_locks(&self) -> bool {
        self.is_any(&LOCKS)
    }

    /// Whether a stream of a directory has begun before the last change of a name. Then POSIX leaves open what it returns.
    pub fn is_of_old_stream(&self) -> bool {
        const BEGIN: [&str; 7] = ["open", "openat", "reopen", "openhandle", "dup", "rewind", "seekdir"];
        const CHANGE: [&str; 10] =
            ["open", "openat", "link", "linkfd", "mkdir", "mknod", "rename", "rmdir", "symlink", "unlink"];
        let Step::Call { by: own, .. } = self.step else { return false };
        let is_begin = |step: &Step| {
            matches!(step, Step::Call { by, name, .. } if by == own && BEGIN.contains(&name.as_str()))
                && step.slot() == self.step.slot()
        };
        let begin = self.before.iter().rposition(is_begin).map_or(0, |index| index + 1);
        self.is("readdir") && CHANGE.iter().any(|name| any_call(&self.before[begin..], name))
    }

    /// Whether a process in another place has made one of these calls.
    fn changed_elsewhere(&self, calls: &[&str]) -> bool {
        let place = |step: &Step| match step {
            Step::Call { by, name, .. } => Some((by.view(), name.clone())),
            Step::Disturb(_) => None,
        };
        let here = place(self.step).map(|(view, _)| view);
        let mut others = self.before.iter().filter_map(place);
        others.any(|(view, name)| Some(view) != here && calls.contains(&name.as_str()))
    }

    /// Whether the answers differ only in capabilities: the volume has removed them.
    fn has_only_capability_more(&self) -> bool {
        let without = |answer: &Value| {
            let mut answer = without_set_id(answer);
            remove_attribute(&mut answer, "security.capability");
            answer
        };
        without(self.native) == without(self.volume)
    }

    /// Whether the answers are attributes that differ in nothing but setuid and setgid.
    fn differs_only_in_set_id(&self) -> bool {
        without_set_id(self.native) == without_set_id(self.volume)
    }

    /// Whether an open with this flag came before.
    fn opened_with(&self, flag: &str) -> bool {
        self.before.iter().any(|step| step.to_string().contains(flag))
    }

    /// Whether a process has closed a file, also by using its slot again.
    fn closes(&self) -> bool {
        ["close", "open", "openat", "reopen", "dup", "openhandle"].iter().any(|name| any_call(self.before, name))
    }
}

#[test]
fn each_documented_difference_has_a_row() {
    let text = include_str!("../../../docs/reference/differences.md");
    for (row, _) in ROWS {
        assert!(text.lines().any(|line| line.starts_with(&format!("| {row} |"))), "there is no row {row:?}");
    }
}
