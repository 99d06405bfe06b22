//! Directories and mount point files that podfs makes, and removes later. It removes directories with rmdir(2), innermost first,
//! and only empty files. Directories and files that other processes use stay.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use super::MountError;
use super::table::mounts_at;

/// Mode of directories, like that of the kubelet's.
const MODE: u32 = 0o750;
/// Mode of mount point files.
const FILE_MODE: u32 = 0o640;
/// Most attempts: another podfs may remove a directory at the moment when this one needs it.
const TRIES: usize = 8;

/// The directories and files that podfs has made. To drop this removes them.
#[derive(Debug, Default)]
pub struct Directories {
    /// The directories in the order in which they were made: each follows the one around it.
    made: Vec<PathBuf>,
    /// The files inside them.
    files: Vec<PathBuf>,
}

impl Directories {
    /// Takes over the directories `made`, in their order, and `files` inside them. The process that made them has ended without
    /// removing them.
    pub fn inherit(made: Vec<PathBuf>, files: Vec<PathBuf>) -> Self {
        Self { made, files }
    }

    /// The directories, in the order in which they were made.
    pub fn made(&self) -> &[PathBuf] {
        &self.made
    }

    /// The files.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Adds a directory that the caller has made.
    pub fn adopt(&mut self, directory: PathBuf) {
        self.made.push(directory);
    }

    /// Lists `path` and the missing directories above it before they are made, so that the caller can record them first. Does not
    /// open `path` itself, because a mount on it may not answer.
    pub fn expect(&mut self, path: &Path, is_file: bool) {
        let Some(parent) = path.parent() else { return };
        let missing: Vec<_> = parent.ancestors().take_while(|above| !above.exists()).map(Path::to_owned).collect();
        missing.into_iter().rev().for_each(|directory| self.list(directory));
        let is_there = fs::read_dir(parent).is_ok_and(|mut names| {
            names.any(|name| name.is_ok_and(|name| Some(&*name.file_name()) == path.file_name()))
        });
        match (is_there, is_file) {
            (true, _) => {}
            (false, false) => self.list(path.to_owned()),
            (false, true) => self.list_file(path.to_owned()),
        }
    }

    fn list(&mut self, directory: PathBuf) {
        if !self.made.iter().rev().any(|made| *made == directory) {
            self.made.push(directory);
        }
    }

    fn list_file(&mut self, file: PathBuf) {
        if !self.files.contains(&file) {
            self.files.push(file);
        }
    }

    /// Makes the directory `path`, and the missing directories above it.
    ///
    /// # Errors
    /// When the kernel refuses one. The drop of this removes those that were made before.
    pub fn make(&mut self, path: &Path) -> Result<(), MountError> {
        if self.files.iter().any(|file| file == path) {
            remove_file(path);
        }
        retry(|| self.make_missing(path)).map_err(|cause| explain("directory", path, cause))
    }

    /// Makes an empty file at `path`, and the missing directories above it, unless the file exists.
    ///
    /// # Errors
    /// When the kernel refuses the file, or a directory above it.
    pub fn make_file(&mut self, path: &Path) -> Result<(), MountError> {
        if self.made.iter().any(|directory| directory == path) {
            // If the directory is not empty, the error below names it.
            let _ = fs::remove_dir(path);
        }
        retry(|| self.make_missing_file(path)).map_err(|cause| explain("file", path, cause))
    }

    /// Removes the listed files and directories at `path` and below it, then the listed, empty directories above it up to `top`.
    pub fn take_back(&mut self, path: &Path, top: &Path) {
        let is_inside = |made: &Path| made.starts_with(path);
        self.files.iter().filter(|file| is_inside(file)).for_each(|file| remove_file(file));
        self.files.retain(|file| !is_inside(file) || is_there(file));
        let is_in_the_way = |made: &Path| is_inside(made) || (path.starts_with(made) && made.starts_with(top));
        for directory in self.made.iter().rev().filter(|made| is_in_the_way(made)) {
            remove_directory(directory);
        }
        self.made.retain(|made| !is_in_the_way(made) || is_there(made));
    }

    fn make_missing_file(&mut self, path: &Path) -> io::Result<()> {
        if let Some(parent) = path.parent() {
            self.make_missing(parent)?;
        }
        match OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(path) {
            Ok(_) => self.list_file(path.to_owned()),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn make_missing(&mut self, path: &Path) -> io::Result<()> {
        match self.make_one(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.make_missing(path.parent().ok_or(error)?)?;
                self.make_one(path)
            }
            outcome => outcome,
        }
    }

    /// Makes a directory, unless it exists: another podfs may make it at the same moment.
    fn make_one(&mut self, path: &Path) -> io::Result<()> {
        match DirBuilder::new().mode(MODE).create(path) {
            Ok(()) => self.list(path.to_owned()),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

impl Drop for Directories {
    fn drop(&mut self) {
        for file in &self.files {
            remove_file(file);
        }
        for directory in self.made.iter().rev() {
            remove_directory(directory);
        }
    }
}

/// Removes a directory if it is empty. Shortly after an unmount, rmdir(2) may still fail with `EBUSY`, so it tries again.
fn remove_directory(directory: &Path) {
    const PAUSE: Duration = Duration::from_millis(1);
    for _ in 0..50 {
        match fs::remove_dir(directory) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy && is_unmounted(directory) => thread::sleep(PAUSE),
            // The directory stays if another process uses it now.
            _ => return,
        }
    }
}

fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

fn is_unmounted(directory: &Path) -> bool {
    mounts_at(directory).is_ok_and(|mounts| mounts.is_empty())
}

/// Removes a file if it is still empty. The kernel refuses to remove a mount point.
fn remove_file(path: &Path) {
    if fs::symlink_metadata(path).is_ok_and(|found| found.is_file() && found.len() == 0) {
        let _ = fs::remove_file(path);
    }
}

fn retry(mut attempt: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    let mut outcome = Ok(());
    for _ in 0..TRIES {
        outcome = attempt();
        match &outcome {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            _ => break,
        }
    }
    outcome
}

fn explain(kind: &str, path: &Path, cause: io::Error) -> MountError {
    let hint = match cause.kind() {
        ErrorKind::NotADirectory => "a file is in the way; remove it or choose another directory",
        ErrorKind::ReadOnlyFilesystem => "choose a directory on a writable file system",
        ErrorKind::StorageFull => "make room on that file system or choose another directory",
        _ => return MountError::at(&format!("make the {kind}"), path, cause),
    };
    MountError::Failed { what: format!("cannot make the {kind} {} ({hint})", path.display()), cause }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn only_made_directories_are_removed() {
        let base = tempfile::tempdir().expect("a directory");
        let (mine, below) = (base.path().join("mine"), base.path().join("mine/deep/er"));
        let mut directories = Directories::default();
        directories.make(&below).expect("made");
        assert!(below.is_dir());
        let mut again = Directories::default();
        again.make(&below).expect("there already");
        drop(again);
        assert!(below.is_dir(), "the second maker made nothing");
        fs::write(mine.join("foreign"), "").expect("a file");
        drop(directories);
        assert!(mine.is_dir() && !mine.join("deep").exists());
        assert!(base.path().is_dir());
    }

    #[test]
    fn a_directory_is_removed_with_the_empty_ones_above_it() {
        let base = tempfile::tempdir().expect("a directory");
        let (one, two) = (base.path().join("volumes/a/one"), base.path().join("volumes/a/two"));
        let mut directories = Directories::default();
        directories.make(&one).expect("made");
        directories.make_file(&two).expect("made");
        directories.take_back(&one, base.path());
        assert!(!one.exists() && two.exists());
        assert_eq!(directories.made().len(), 2, "{directories:?}");
        directories.take_back(&two, base.path());
        assert_eq!(fs::read_dir(base.path()).expect("a listing").count(), 0);
        assert!(directories.made().is_empty() && directories.files().is_empty(), "{directories:?}");
    }

    #[test]
    fn an_expected_directory_is_listed_once_before_it_is_made() {
        let base = tempfile::tempdir().expect("a directory");
        let (there, new, file) = (base.path().join("there"), base.path().join("a/b"), base.path().join("c/file"));
        fs::create_dir(&there).expect("made");
        let mut directories = Directories::default();
        directories.expect(&there, false);
        directories.expect(&new, false);
        directories.expect(&file, true);
        assert_eq!(directories.made(), [base.path().join("a"), new.clone(), base.path().join("c")]);
        assert_eq!(directories.files(), std::slice::from_ref(&file));
        directories.make(&new).expect("made");
        directories.make_file(&file).expect("made");
        assert_eq!((directories.made().len(), directories.files().len()), (3, 1));
        drop(directories);
        assert_eq!(fs::read_dir(base.path()).expect("a listing").count(), 1);
    }

    #[test]
    fn a_made_file_is_removed_unless_another_process_wrote_to_it() {
        let base = tempfile::tempdir().expect("a directory");
        let (plain, used) = (base.path().join("mine/plain"), base.path().join("mine/used"));
        let mut directories = Directories::default();
        directories.make_file(&plain).expect("made");
        directories.make_file(&used).expect("made");
        fs::write(&used, "x").expect("written");
        drop(directories);
        assert!(!plain.exists() && used.exists());
    }

    #[test]
    fn a_made_mount_point_is_replaced_by_the_other_type() {
        let base = tempfile::tempdir().expect("a directory");
        let path = base.path().join("a/point");
        let mut directories = Directories::default();
        directories.make_file(&path).expect("made");
        directories.make(&path).expect("made");
        assert!(path.is_dir());
        directories.make_file(&path).expect("made");
        assert!(path.is_file());
        drop(directories);
        assert_eq!(fs::read_dir(base.path()).expect("a listing").count(), 0);
    }

    #[test]
    fn a_part_is_removed_with_the_empty_directories_above_it() {
        let base = tempfile::tempdir().expect("a directory");
        let (top, file, other) =
            (base.path().join("top"), base.path().join("top/a/b/file"), base.path().join("top/a/c"));
        let mut directories = Directories::default();
        directories.make_file(&file).expect("made");
        directories.make(&other).expect("made");
        directories.take_back(&base.path().join("top/a/b"), &top);
        assert!(!base.path().join("top/a/b").exists() && other.is_dir());
        assert_eq!((directories.made().len(), directories.files().len()), (3, 0));
        directories.take_back(&other, &top.join("a"));
        assert!(top.is_dir() && !top.join("a").exists());
        directories.make_file(&file).expect("made again");
        directories.take_back(&file, &top);
        assert!(directories.made().is_empty() && !top.exists());
    }

    #[test]
    fn two_supervisors_can_make_the_same_directories() {
        // Two pods that start at once on a node that has served none yet.
        for _ in 0..100 {
            let base = tempfile::tempdir().expect("a directory");
            let start = Barrier::new(2);
            let make = |own: &str| {
                let mut directories = Directories::default();
                start.wait();
                directories.make(&base.path().join("common/pods").join(own)).map(|()| directories)
            };
            thread::scope(|scope| {
                let other = scope.spawn(|| make("other"));
                let kept = (make("own").expect("made"), other.join().expect("no panic").expect("made"));
                assert!(base.path().join("common/pods/own").is_dir() && base.path().join("common/pods/other").is_dir());
                drop(kept);
            });
        }
    }

    #[test]
    fn a_file_in_the_way_is_named_and_nothing_stays_behind() {
        let base = tempfile::tempdir().expect("a directory");
        fs::write(base.path().join("file"), "").expect("a file");
        let mut directories = Directories::default();
        let error = directories.make(&base.path().join("file/below")).expect_err("a file is no directory");
        drop(directories);
        assert!(error.to_string().contains("a file is in the way"), "{error}");
        assert_eq!(fs::read_dir(base.path()).expect("a listing").count(), 1);
    }
}
