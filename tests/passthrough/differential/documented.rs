//! Differences between a volume and the directory behind it that the documentation describes. Each has a row in
//! `docs/reference/differences.md`.

use serde_json::Value;

use super::lockstep::{Caching, LOCKS};
use super::observed::{OPENS, Observed, WRITES, remove};
use super::program::{Actor, Step};
use super::sources::SourceKind;

/// A row of the documentation, and whether it describes a difference.
type DocumentedRow = (&'static str, fn(&Observed) -> bool);

const ROWS: &[DocumentedRow] = &[
    ("`fallocate` that moves the rest of a file, or copies shared blocks", |seen| {
        seen.is("fallocate")
            && ["COLLAPSE_RANGE", "INSERT_RANGE", "UNSHARE_RANGE"].iter().any(|mode| seen.has_word(mode))
            && seen.volume_error() == Some("ENOTSUP")
    }),
    ("server and keeper killed at once", |seen| {
        // A process that had a lock on the file gets EIO.
        let had_lock = || seen.done().any(|step| step.is_any(&LOCKS));
        let is_lost = match seen.volume_error() {
            Some("ESTALE") => true,
            Some("EIO") => had_lock(),
            Some("EFAULT") => seen.is_any(&["load", "store"]),
            _ => false,
        };
        seen.lost_both && is_lost && (seen.has_lost_name() || !seen.kind.has_handles())
    }),
    ("a removed file that a process has open by `O_PATH` alone", |seen| {
        seen.volume_error() == Some("ESTALE") && seen.slot_has("O_PATH") && seen.has_lost_name()
    }),
    ("`F_SETFL` and `O_DIRECT`, `O_APPEND`", |seen| {
        let errors = [seen.native_error(), seen.volume_error()];
        let keeps_append = || {
            let is_write = |step: &Step| step.is_any(&["write", "pwrite", "sendfile", "copy"]);
            errors == [None, None]
                && seen.done().any(|step| step.is("setfl") && seen.opened(step, "O_APPEND"))
                && seen.done().any(is_write)
        };
        let is_aligned_or_not = || {
            errors.contains(&Some("EINVAL"))
                && seen.step.is_any(&["read", "pread", "write", "pwrite", "copy", "sendfile"])
                && seen
                    .done()
                    .any(|step| step.is("setfl") && (step.has_word("O_DIRECT") || seen.opened(step, "O_DIRECT")))
        };
        keeps_append() || is_aligned_or_not()
    }),
    ("closing a file opened for reading only", |seen| {
        let has_lock = |step: &Step| step.is("posix") && !step.has_word("\"none\"");
        seen.caching != Caching::Private
            && seen.is_about_locks()
            && seen.volume_has_more_locks()
            && seen.anyone_after(has_lock, |locker, closer| seen.closes(locker, closer, false))
    }),
    ("a `flock` on a directory", |seen| {
        seen.is("flock")
            && seen.is_directory
            && seen.native_error() == Some("EAGAIN")
            && seen.done_elsewhere(&["flock"])
    }),
    ("the end of a directory", |seen| {
        // The kernel refuses a read at an offset near the largest one, which is the end of a directory on btrfs.
        let is_read = seen.is("read") && seen.native_error() == Some("EINVAL") && seen.volume_error() == Some("EISDIR");
        let is_of_removed = seen.is("seekdir")
            && seen.native_error() == Some("EINVAL")
            && seen.volume_error().is_none()
            && seen.done().any(|step| step.is_any(&["rmdir", "rename"]));
        seen.is_directory && (seen.is("lseek") || is_read || is_of_removed)
    }),
    ("names made after a directory of btrfs was opened", |seen| {
        let names = |answer: &Value| answer[1].as_array().cloned().unwrap_or_default();
        seen.kind == SourceKind::Btrfs
            && seen.is("readdir")
            && seen.native_error().is_none()
            && names(seen.native).iter().all(|name| names(seen.volume).contains(name))
            && seen.changes_names_since(OPENS)
    }),
    ("locks of a file that is mapped, but not open any more", |seen| {
        let has_lock =
            |step: &Step| step.is_any(&["flock", "ofd"]) && !step.has_word("\"none\"") && !step.has_word("LOCK_UN");
        seen.is_about_locks()
            && seen.native_has_more_locks()
            && seen.done().any(|step| step.is("mmap"))
            && seen.anyone_after(has_lock, |locker, closer| seen.closes(locker, closer, true))
    }),
    ("`O_DIRECT` with a `sizeLimit`", |seen| {
        seen.caching == Caching::Limited && seen.native_error() == Some("EINVAL") && seen.slot_has("O_DIRECT")
    }),
    ("owner and mode of an open file that were changed elsewhere", |seen| {
        let errors = [seen.native_error(), seen.volume_error()];
        let is_checked = || {
            seen.is_any(&["fchmod", "fchown", "futimens"])
                && errors.contains(&Some("EPERM"))
                && seen.is_by(Actor::U)
                && seen.done_elsewhere(&["chown", "fchown", "lchown"])
        };
        let survives = || {
            seen.volume_keeps_set_id()
                && seen.done_elsewhere(&["chmod", "fchmod", "setacl"])
                && seen.done().any(|step| step.by() == Some(Actor::U) && step.is_any(&WRITES))
        };
        is_checked() || survives()
    }),
    ("`chown(file, -1, -1)` of a file with setuid or setgid", |seen| {
        let changes_nothing = |step: &Step| step.is_any(&["chown", "lchown", "fchown"]) && step.ends_with(&[-1, -1]);
        (changes_nothing(seen.step) && seen.native_error() == Some("EPERM") && seen.volume_error().is_none())
            || (seen.volume_keeps_set_id() && seen.done().any(changes_nothing))
    }),
    ("setuid and setgid after a write that fails", |seen| {
        let has_failed = |step: &Step| step.is_any(&["pwrite", "write", "copy", "sendfile"]);
        seen.native_keeps_set_id() && seen.failed().any(|step| step.by() == Some(Actor::U) && has_failed(step))
    }),
    ("`copy_file_range` from a file whose size was changed elsewhere", |seen| {
        const SIZES: [&str; 9] =
            ["write", "pwrite", "ftruncate", "truncate", "fallocate", "copy", "sendfile", "open", "openat"];
        let copies_less = seen.volume[1].as_u64() < seen.native[1].as_u64();
        let overlaps = [seen.native_error(), seen.volume_error()];
        seen.is("copy")
            && seen.done_elsewhere(&SIZES)
            && match overlaps {
                [None, None] => copies_less,
                [native, volume] => native.or(volume) == Some("EINVAL") && (native.is_none() || volume.is_none()),
            }
    }),
    ("a working directory that was moved elsewhere", |seen| {
        let is_lost = seen.volume[1] == "in a removed directory" || seen.volume_error() == Some("ENOENT");
        seen.is_any(&["chdir", "fchdir", "getcwd"])
            && is_lost
            && seen.native_error().is_none()
            && matches!(seen.caching, Caching::Auto | Caching::None)
            && seen.done_elsewhere(&["rename"])
    }),
    ("setuid, setgid and capabilities after `fallocate`", |seen| {
        matches!(seen.kind, SourceKind::Btrfs | SourceKind::Tmpfs)
            && seen.done().any(|step| step.is("fallocate"))
            && seen.native_has_only_privileges_more()
    }),
    ("names of `trusted.` attributes on btrfs", |seen| {
        let mut native = seen.native.clone();
        if let Some(names) = native[1].as_array_mut() {
            names.retain(|name| !name.as_str().is_some_and(|name| name.starts_with("trusted.")));
        }
        seen.kind == SourceKind::Btrfs && seen.is("listxattr") && seen.is_by(Actor::U) && native == *seen.volume
    }),
    ("an ACL of a file that was moved elsewhere", |seen| {
        let is_denied = [seen.native_error(), seen.volume_error()].contains(&Some("EACCES"));
        let is_acl = seen.is_any(&["getxattr", "fgetxattr"]) && seen.has_word("system.posix_acl");
        // The names of attributes come from the server.
        let is_listed = seen.is("tree") && seen.volume_error() == Some("ENODATA");
        seen.done_elsewhere(&["setacl", "setxattr", "removexattr", "chmod"])
            && seen.done_elsewhere(&["rename"])
            && (is_acl || is_listed || (is_denied && seen.is_by(Actor::U)))
    }),
    ("times after a store through a mapping, with a `sizeLimit`", |seen| {
        let timeless = |answer: &Value| {
            let mut answer = answer.clone();
            ["mtime", "ctime"].into_iter().for_each(|time| remove(&mut answer, time));
            answer
        };
        seen.caching == Caching::Limited
            && seen.done().any(|step| step.is("store"))
            && timeless(seen.native) == timeless(seen.volume)
    }),
    ("bytes stored behind the end of a file through a mapping, with a `sizeLimit`", |seen| {
        seen.kind == SourceKind::Tmpfs
            && seen.caching == Caching::Limited
            && seen.is_any(&["tree", "read", "pread", "load"])
            && seen.done().any(|step| step.is("store"))
            && seen.differs_only_in_content()
    }),
    ("holes in a file, with a `sizeLimit`", |seen| {
        seen.caching == Caching::Limited
            && seen.is("lseek")
            && (seen.has_word("SEEK_DATA") || seen.has_word("SEEK_HOLE"))
    }),
    ("a rename between two directories that meets a directory which another process has moved", |seen| {
        seen.is("rename")
            && seen.volume_error() == Some("ESTALE")
            && matches!(seen.caching, Caching::Auto | Caching::None)
            && seen.done_elsewhere(&["rename"])
    }),
    ("file handles of a source that has none", |seen| {
        seen.is("handle")
            && seen.native_error() == Some("ENOTSUP")
            && seen.volume_error().is_none()
            && !seen.kind.has_handles()
    }),
    ("FIFOs and sockets", |seen| {
        let is_special = |step: &Step| step.is("mknod") && (step.has_word("S_IFIFO") || step.has_word("S_IFSOCK"));
        let is_connected = || {
            seen.is_any(&["open", "openat", "reopen", "openhandle"])
                && [seen.native_error(), seen.volume_error()].contains(&Some("ENXIO"))
                && seen.done_elsewhere(&["open", "openat", "reopen", "openhandle", "mknod"])
        };
        seen.done().any(is_special) && (is_connected() || seen.differs_only_in_times_of_fifos())
    }),
    ("ACLs of a FUSE file system that does not apply them, such as bindfs", |seen| {
        let is_denied = [seen.native_error(), seen.volume_error()].contains(&Some("EACCES"));
        seen.kind == SourceKind::Bindfs
            && is_denied
            && seen.is_by(Actor::U)
            && seen.done().any(|step| step.is("setacl"))
    }),
];

/// The row that describes a difference.
pub fn row(seen: &Observed) -> Option<&'static str> {
    ROWS.iter().find(|(_, describes)| describes(seen)).map(|(row, _)| *row)
}

#[test]
fn each_documented_difference_has_a_row() {
    let text = include_str!("../../../docs/reference/differences.md");
    for (row, _) in ROWS {
        assert!(text.lines().any(|line| line.starts_with(&format!("| {row} |"))), "there is no row {row:?}");
    }
}
