//! Finds the manifest files below the configured paths, and makes the watcher watch all directories on the way.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::SourceError;
use super::error::ScanProblem;
use super::read::FileId;
use super::route::{Route, is_manifest};
use super::watch::Watcher;

/// How often the search repeats when a path has changed before the watcher watched it. The search does not wait for links that
/// are switched all the time: each switch causes another scan.
const ATTEMPTS: usize = 4;

/// The purpose of a configured path.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PathRole {
    /// It is the pod manifest.
    Pod,
    /// It is a file of objects, or a directory of such files.
    Objects,
}

/// A configured path.
pub(super) struct ConfiguredPath {
    path: PathBuf,
    role: PathRole,
    /// The directory at the last listing.
    directory: Option<FileId>,
}

impl ConfiguredPath {
    pub(super) fn pod(path: PathBuf) -> Self {
        Self { path, role: PathRole::Pod, directory: None }
    }

    pub(super) fn objects(path: PathBuf) -> Self {
        Self { path, role: PathRole::Objects, directory: None }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a search has listed the path as a directory.
    pub(super) fn was_listed(&self) -> bool {
        self.directory.is_some()
    }
}

/// A file to read.
pub(super) struct FileToRead {
    /// The path as configured; for an entry of a configured directory, with the entry's name.
    pub(super) path: PathBuf,
    /// The real path, which inotify events have.
    pub(super) real: PathBuf,
    /// Index of the configured path.
    pub(super) root: usize,
    pub(super) role: PathRole,
    /// Whether it was found in a directory, not named by the user.
    pub(super) listed: bool,
}

impl FileToRead {
    /// The directory of the file.
    pub(super) fn directory(&self) -> &Path {
        match self.path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        }
    }
}

/// The files to read.
#[derive(Default)]
pub(super) struct FoundFiles {
    /// The files, in the order of the configured paths and by name.
    pub(super) targets: Vec<FileToRead>,
    /// Configured paths that cannot be inspected now; their files stay as they were.
    pub(super) kept: HashSet<usize>,
    pub(super) problems: Vec<ScanProblem>,
}

impl FoundFiles {
    /// Inspects the configured paths, and watches the directories on the way to files. No change escapes the watches: when a watch
    /// is new, everything is inspected again.
    pub(super) fn inspect(roots: &mut [ConfiguredPath], watcher: &mut Watcher) -> Self {
        let mut attempt = 0;
        loop {
            attempt += 1;
            let (mut found, mut route) = (Self::default(), Route::default());
            for (number, root) in roots.iter_mut().enumerate() {
                found.add(number, root, &mut route);
            }
            match watcher.adopt(route) {
                Ok(true) if attempt < ATTEMPTS => continue,
                Ok(true) => watcher.activity.request_scan(),
                Ok(false) => {}
                Err(problem) => {
                    found.problems.push(ScanProblem::of_path(problem));
                    watcher.activity.scan_later();
                }
            }
            return found;
        }
    }

    fn add(&mut self, number: usize, root: &mut ConfiguredPath, route: &mut Route) {
        let real = route.follow(&root.path).unwrap_or_else(|| root.path.clone());
        match fs::metadata(&root.path) {
            Ok(metadata) if metadata.is_dir() && root.role == PathRole::Objects => {
                if let Err(error) = self.add_directory(number, root, &real, &metadata, route) {
                    self.problems.push(ScanProblem::of_file(error, root.was_listed()));
                    self.kept.insert(number);
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound && root.directory.is_some() => {
                self.problems.push(ScanProblem::of_path(SourceError::DirectoryGone(root.path.clone())));
                self.kept.insert(number);
            }
            // If the path cannot be read, the scan's reading reports why.
            _ => self.targets.push(FileToRead {
                path: root.path.clone(),
                real,
                root: number,
                role: root.role,
                listed: false,
            }),
        }
    }

    fn add_directory(
        &mut self,
        number: usize,
        root: &mut ConfiguredPath,
        real: &Path,
        metadata: &Metadata,
        route: &mut Route,
    ) -> Result<(), SourceError> {
        route.every_manifest(real);
        let names =
            manifests_in(&root.path).map_err(|reason| SourceError::Unreadable { path: root.path.clone(), reason })?;
        let directory = FileId::of(metadata);
        if names.is_empty() && root.directory.is_some_and(|earlier| earlier != directory) {
            // The mount point below an unmounted file system, or a new directory that a process is about to fill.
            return Err(SourceError::DirectoryGone(root.path.clone()));
        }
        root.directory = Some(directory);
        self.targets.extend(names.into_iter().map(|name| FileToRead {
            path: root.path.join(&name),
            real: route.enter(real, &name).unwrap_or_else(|| real.join(&name)),
            root: number,
            role: PathRole::Objects,
            listed: true,
        }));
        Ok(())
    }
}

fn manifests_in(directory: &Path) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        let name = entry?.file_name();
        if is_manifest(&name) {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}
