//! Errors of manifest files, one sentence each.

use std::io;
use std::path::PathBuf;

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

    /// The content of the file is invalid.
    #[error(transparent)]
    Manifest(#[from] ManifestError),

    /// Files whose documents do not go together. The sentence says which of the documents podfs uses.
    #[error(transparent)]
    Combined(ManifestError),

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
    /// Whether podfs has read content there before, which it uses now.
    pub(super) has_earlier_content: bool,
}

impl ScanProblem {
    /// A problem of something that podfs has used before, or whose error says what podfs uses.
    pub(super) fn new(error: SourceError) -> ScanProblem {
        ScanProblem { error, has_earlier_content: true }
    }

    /// The sentence while the pod runs: it adds which content podfs uses.
    pub(super) fn sentence(&self) -> String {
        let content = match self.has_earlier_content {
            true => "podfs uses the earlier content",
            false => "podfs uses none of its content, and mounted volumes keep theirs",
        };
        match &self.error {
            error @ (SourceError::Unreadable { .. }
            | SourceError::WrongType { .. }
            | SourceError::PodOfWrongType { .. }
            | SourceError::TooLarge { .. }
            | SourceError::Manifest(_)) => format!("{error}; until then, {content}"),
            error => error.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::Origin;

    #[test]
    fn a_problem_says_once_which_content_podfs_uses() {
        let origin = Origin::file("web.yaml".as_ref());
        let problem = |sentence: &str| ManifestError::invalid(&origin, "metadata.name", sentence);
        let sentence = |error| ScanProblem::new(error).sentence();
        let invalid = sentence(SourceError::Manifest(problem("is bad")));
        assert_eq!(invalid, "web.yaml: metadata.name: is bad; until then, podfs uses the earlier content");
        let first = "is there twice; until then, podfs goes by the first one";
        assert_eq!(sentence(SourceError::Combined(problem(first))), format!("web.yaml: metadata.name: {first}"));
    }
}
