//! Whether podfs may use the bytes that were read from a file.

use std::collections::HashSet;
use std::path::PathBuf;

use super::SourceError;
use super::find::{FileToRead, PathRole};
use super::read::{FileId, FileReading, Stamp};
use super::settle::{Activity, SettledBy, SettledFiles};

/// What happens to a file's documents.
pub(super) enum DocumentUpdate {
    /// The documents stay as they were.
    Keep,
    /// The documents no longer count.
    Drop,
    /// The file does not exist any more.
    Absent,
    /// The documents in these bytes replace them.
    Take(Stamp, Vec<u8>),
}

/// A file that cannot be read.
pub(super) struct UnreadableFile {
    pub(super) problem: SourceError,
    /// Whether the last good documents stay in use.
    pub(super) keeps: bool,
}

/// Checks the files that one scan has read, in order.
pub(super) struct ReadCheck<'a> {
    settled: SettledFiles,
    activity: &'a mut Activity,
    /// Whether the watcher has received all events until the end of the reading.
    is_certain: bool,
    seen: HashSet<FileId>,
    stamps: HashSet<Stamp>,
    being_written: Option<PathBuf>,
}

impl<'a> ReadCheck<'a> {
    /// A check with the activity of a watcher. `is_certain` is whether the watcher has received all events until the end of the
    /// reading. If not, any file may be half written.
    pub(super) fn new(settled: SettledFiles, activity: &'a mut Activity, is_certain: bool) -> Self {
        Self { settled, activity, is_certain, seen: HashSet::new(), stamps: HashSet::new(), being_written: None }
    }

    /// Checks one file. `before` is the stamp of the last reading.
    pub(super) fn update(
        &mut self,
        target: &FileToRead,
        reading: Result<FileReading, SourceError>,
        before: Option<Stamp>,
    ) -> Result<DocumentUpdate, UnreadableFile> {
        let reading = match reading {
            Ok(reading) => reading,
            Err(problem) => return check_failure(target, problem, before.is_some()),
        };
        let stamp = match &reading {
            FileReading::Bytes(stamp, _) | FileReading::Same(stamp) | FileReading::Torn(stamp) => *stamp,
        };
        self.stamps.insert(stamp);
        if !self.seen.insert(stamp.file()) {
            // Another name of a file that was read already.
            return Ok(DocumentUpdate::Drop);
        }
        match reading {
            _ if self.activity.is_being_written(&target.real, &self.settled) => {}
            FileReading::Same(_) => return Ok(DocumentUpdate::Keep),
            FileReading::Bytes(..) if !self.is_certain || !self.is_settled(target, stamp, before) => {
                self.activity.write(&target.real)
            }
            FileReading::Torn(_) => self.activity.write(&target.real),
            FileReading::Bytes(stamp, bytes) => return Ok(DocumentUpdate::Take(stamp, bytes)),
        }
        self.being_written = Some(target.path.clone());
        Ok(DocumentUpdate::Keep)
    }

    /// Whether the scan has found a file with this stamp, under any name. (A new file may have the inode of a removed one.)
    pub(super) fn has_seen(&self, stamp: &Stamp) -> bool {
        self.stamps.contains(stamp)
    }

    /// A file that was left out because a process is writing it.
    pub(super) fn being_written(self) -> Option<PathBuf> {
        self.being_written
    }

    /// The kernel queues the event of a write after the write. So a file that changed in place is settled only after the event of
    /// its writer's close, or after a time without a write. A file that has become empty is about to be filled, unless it stays
    /// empty for that time.
    fn is_settled(&self, target: &FileToRead, stamp: Stamp, before: Option<Stamp>) -> bool {
        let settled_by = self.settled.get(&target.real);
        let Some(before) = before else { return true };
        let emptied = stamp.len == 0 && before.len > 0;
        match settled_by {
            Some(SettledBy::Quiet) => true,
            Some(SettledBy::Closed) => !emptied,
            None => !emptied && !stamp.changed_in_place(&before),
        }
    }
}

fn check_failure(target: &FileToRead, problem: SourceError, known: bool) -> Result<DocumentUpdate, UnreadableFile> {
    let path = || target.path.clone();
    match problem {
        // Other entries of a directory are ignored.
        SourceError::WrongType { .. } if target.listed => Ok(DocumentUpdate::Drop),
        SourceError::Missing(_) if target.listed => Ok(DocumentUpdate::Absent),
        SourceError::Missing(_) | SourceError::Dangling(_) if known && target.role == PathRole::Pod => {
            Err(UnreadableFile { problem: SourceError::PodGone(path()), keeps: true })
        }
        // The file was not deleted: its directory is gone, perhaps because a file system was unmounted.
        SourceError::Missing(_) if known && !target.directory().exists() => {
            Err(UnreadableFile { problem: SourceError::DirectoryGone(target.directory().to_owned()), keeps: true })
        }
        problem @ (SourceError::Missing(_) | SourceError::Dangling(_)) => Err(UnreadableFile { problem, keeps: false }),
        SourceError::WrongType { path, found } if target.role == PathRole::Pod => {
            Err(UnreadableFile { problem: SourceError::PodOfWrongType { path, found }, keeps: true })
        }
        problem => Err(UnreadableFile { problem, keeps: true }),
    }
}
