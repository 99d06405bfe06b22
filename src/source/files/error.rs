//! Errors of manifest files, one sentence each.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use super::bad_document::{BadDocument, CombinationProblem};
use crate::manifest::ManifestError;

/// A source that cannot be used, or a part of it that cannot be used now. Its text is one sentence for the user.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// A configured path leads nowhere.
    #[error("{}: there is no such file or directory", .0.display())]
    Missing(PathBuf),

    /// A symbolic link leads nowhere.
    #[error("{}: the symbolic link leads to nothing", .0.display())]
    Dangling(PathBuf),

    /// The kernel refuses to open, list or read.
    #[error("{}: cannot be read: {reason}", path.display())]
    Unreadable {
        /// The path, as the user named it.
        path: PathBuf,
        /// The kernel's reason.
        #[source]
        reason: io::Error,
    },

    /// A pipe, a socket, a device, or a directory where a file belongs.
    #[error("{}: is {found}; give a regular file", path.display())]
    WrongType {
        /// The path, as the user named it.
        path: PathBuf,
        /// The type of the file.
        found: &'static str,
    },

    /// The same in place of the pod's manifest.
    #[error("{}: is {found}; give a regular file, or - for standard input", path.display())]
    PodOfWrongType {
        /// The path, as the user named it.
        path: PathBuf,
        /// The type of the file.
        found: &'static str,
    },

    /// A file larger than any set of manifests.
    #[error("{}: is larger than {} MiB; split it", path.display(), limit >> 20)]
    TooLarge {
        /// The path, as the user named it.
        path: PathBuf,
        /// The limit in bytes.
        limit: u64,
    },

    /// A file that is written to all the time while podfs starts.
    #[error("{}: is being written to all the time; stop the writer, or replace the file by renaming", .0.display())]
    BeingWritten(PathBuf),

    /// The pod manifest has gone while the pod runs.
    #[error("{}: has disappeared; the pod it described stays in use", .0.display())]
    PodGone(PathBuf),

    /// A configured directory has gone while the pod runs.
    #[error("{}: has disappeared or is another, empty directory; its last objects stay in use", .0.display())]
    DirectoryGone(PathBuf),

    /// A document is invalid, or does not go together with another one.
    #[error(transparent)]
    Manifest(#[from] Arc<ManifestError>),

    /// The kernel grants no more watches.
    #[error("{}: cannot be watched: the limit on inotify watches is reached; raise the sysctl fs.inotify.max_user_watches", .0.display())]
    WatchLimit(PathBuf),

    /// The kernel grants no more inotify instances.
    #[error(
        "cannot watch files: the limit on inotify instances or open files is reached; raise the sysctl fs.inotify.max_user_instances or the limit on open files"
    )]
    InstanceLimit,

    /// Watching fails for another reason.
    #[error("cannot watch files: {0}")]
    Watch(#[source] notify::Error),

    /// The thread that owns the files cannot start.
    #[error("cannot start the thread that watches the manifests: {0}")]
    Thread(#[source] io::Error),
}

/// A problem that a scan of the files has found.
pub(super) struct ScanProblem {
    pub(super) error: SourceError,
    /// Whether a podfs that starts now would refuse the files.
    pub(super) refuses_to_start: bool,
    /// Which content podfs uses; empty if the error says it.
    until_then: &'static str,
}

/// Content that podfs has read before.
const EARLIER: &str = "podfs uses the earlier content";

impl ScanProblem {
    /// A problem of a configured path. Its error says what podfs uses.
    pub(super) fn of_path(error: SourceError) -> ScanProblem {
        ScanProblem { error, refuses_to_start: true, until_then: "" }
    }

    /// A file that cannot be read. `has_earlier_content` is whether podfs has read it before.
    pub(super) fn of_file(error: SourceError, has_earlier_content: bool) -> ScanProblem {
        let until_then = match &error {
            SourceError::Unreadable { .. }
            | SourceError::WrongType { .. }
            | SourceError::PodOfWrongType { .. }
            | SourceError::TooLarge { .. } => match has_earlier_content {
                true => EARLIER,
                false => "podfs uses none of its content, and mounted volumes keep theirs",
            },
            _ => "",
        };
        ScanProblem { until_then, ..ScanProblem::of_path(error) }
    }

    pub(super) fn of_document(bad: &BadDocument, refuses_to_start: bool) -> ScanProblem {
        let until_then = match bad.has_earlier_content {
            true => EARLIER,
            false => "podfs leaves this document out, and mounted volumes keep their content",
        };
        ScanProblem { error: SourceError::Manifest(Arc::clone(&bad.error)), refuses_to_start, until_then }
    }

    pub(super) fn of_combination(problem: &CombinationProblem, refuses_to_start: bool) -> ScanProblem {
        let error = SourceError::Manifest(Arc::clone(&problem.error));
        ScanProblem { error, refuses_to_start, until_then: problem.until_then }
    }

    /// The sentence while the pod runs: it adds which content podfs uses.
    pub(super) fn sentence(&self) -> String {
        match self.until_then {
            "" => self.error.to_string(),
            content => format!("{}; until then, {content}", self.error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::Origin;
    use crate::source::files::bad_document::Subject;

    #[test]
    fn a_problem_says_once_which_content_podfs_uses() {
        let origin = Origin::file("web.yaml".as_ref());
        let problem = |sentence: &str| Arc::new(ManifestError::invalid(&origin, "metadata.name", sentence));
        let mut bad = BadDocument { error: problem("is bad"), subject: Subject::Unknown, has_earlier_content: true };
        let of_document = |bad: &BadDocument| ScanProblem::of_document(bad, false).sentence();
        let invalid = "web.yaml: metadata.name: is bad; until then, podfs";
        assert_eq!(of_document(&bad), format!("{invalid} uses the earlier content"));
        bad.has_earlier_content = false;
        assert_eq!(
            of_document(&bad),
            format!("{invalid} leaves this document out, and mounted volumes keep their content")
        );
        let first = "is there twice; until then, podfs goes by the first one";
        let twice = CombinationProblem { error: problem(first), until_then: "", object: None };
        assert_eq!(ScanProblem::of_combination(&twice, false).sentence(), format!("web.yaml: metadata.name: {first}"));
    }
}
