//! Whether podfs may use the bytes that were read from a file.

use std::collections::HashSet;
use std::path::PathBuf;

use super::SourceError;
use super::find::{FileToRead, Role};
use super::read::{FileId, Reading, Stamp};
use super::settle::{Activity, Rest, Rested};

/// The verdict on a file's documents.
pub(super) enum Verdict {
    /// The documents stay as they were.
    Keep,
    /// The documents no longer count.
    Drop,
    /// The documents in these bytes replace them.
    Take(Stamp, Vec<u8>),
}

/// A file that cannot be read.
pub(super) struct Trouble {
    pub(super) problem: SourceError,
    /// Whether the last good documents stay in use.
    pub(super) keeps: bool,
}

/// Judges the readings of one scan, in order.
pub(super) struct Judge<'a> {
    rested: Rested,
    activity: &'a mut Activity,
    seen: HashSet<FileId>,
    restless: Option<PathBuf>,
}

impl<'a> Judge<'a> {
    /// For a watcher that has received the events of the time in which the files were read.
    pub(super) fn new(rested: Rested, activity: &'a mut Activity) -> Self {
        Self { rested, activity, seen: HashSet::new(), restless: None }
    }

    /// Judges one reading. `before` is the stamp of the last one.
    pub(super) fn judge(
        &mut self,
        target: &FileToRead,
        reading: Result<Reading, SourceError>,
        before: Option<Stamp>,
    ) -> Result<Verdict, Trouble> {
        let reading = match reading {
            Ok(reading) => reading,
            Err(problem) => return judge_failure(target, problem, before.is_some()),
        };
        let stamp = match &reading {
            Reading::Bytes(stamp, _) | Reading::Same(stamp) | Reading::Torn(stamp) => *stamp,
        };
        if !self.seen.insert(stamp.file()) {
            // Another name of a file that was read already.
            return Ok(Verdict::Drop);
        }
        match reading {
            _ if self.activity.is_restless(&target.real, &self.rested) => {}
            Reading::Same(_) => return Ok(Verdict::Keep),
            Reading::Bytes(..) if !self.is_at_rest(target, stamp, before) => self.activity.write(&target.real),
            Reading::Torn(_) => self.activity.write(&target.real),
            Reading::Bytes(stamp, bytes) => return Ok(Verdict::Take(stamp, bytes)),
        }
        self.restless = Some(target.path.clone());
        Ok(Verdict::Keep)
    }

    /// A file that was left out because a process is writing it.
    pub(super) fn restless(self) -> Option<PathBuf> {
        self.restless
    }

    /// The event of a write comes after the write. So a file changed in place is at rest only after an event or a time that
    /// shows it; and one that has become empty is about to be filled, unless it stays so for a while.
    fn is_at_rest(&self, target: &FileToRead, stamp: Stamp, before: Option<Stamp>) -> bool {
        let rest = self.rested.get(&target.real);
        let Some(before) = before else { return true };
        let emptied = stamp.len == 0 && before.len > 0;
        match rest {
            Some(Rest::Quiet) => true,
            Some(Rest::Closed) => !emptied,
            None => !emptied && !stamp.changed_in_place(&before),
        }
    }
}

fn judge_failure(target: &FileToRead, problem: SourceError, known: bool) -> Result<Verdict, Trouble> {
    let path = || target.path.clone();
    match problem {
        // Other entries of a directory are ignored.
        SourceError::WrongType { .. } if target.listed => Ok(Verdict::Drop),
        SourceError::Missing(_) if target.listed => Ok(Verdict::Drop),
        SourceError::Missing(_) | SourceError::Dangling(_) if known && target.role == Role::Pod => {
            Err(Trouble { problem: SourceError::PodGone(path()), keeps: true })
        }
        // The file was not deleted: its directory has gone, perhaps with a file system.
        SourceError::Missing(_) if known && !target.directory().exists() => {
            Err(Trouble { problem: SourceError::DirectoryGone(target.directory().to_owned()), keeps: true })
        }
        problem @ (SourceError::Missing(_) | SourceError::Dangling(_)) => Err(Trouble { problem, keeps: false }),
        problem => Err(Trouble { problem, keeps: true }),
    }
}
