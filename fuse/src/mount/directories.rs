//! Directories that are made for a while and taken back: with `rmdir` only, innermost first. One that
//! others use by then stays.

use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::MountError;

/// Mode of what is made, as the kubelet makes its directories.
const MODE: u32 = 0o750;

/// Directories that were made. Dropping it takes them back.
#[derive(Debug, Default)]
pub struct Directories {
    /// In the order they were made, so that what is inside another comes after it.
    made: Vec<PathBuf>,
}

impl Directories {
    /// None yet, but those that `made` lists, in their order: another process made them and ended without
    /// taking them back.
    pub fn inherit(made: Vec<PathBuf>) -> Self {
        Self { made }
    }

    /// What was made, in that order.
    pub fn made(&self) -> &[PathBuf] {
        &self.made
    }

    /// Makes `path` and what is missing above it.
    ///
    /// # Errors
    /// When one cannot be made. Those made before it are taken back with all the others.
    pub fn make(&mut self, path: &Path) -> Result<(), MountError> {
        // Another podfs may take back a directory just when this one needs it.
        const TRIES: usize = 8;
        let mut outcome = Ok(());
        for _ in 0..TRIES {
            outcome = self.make_missing(path);
            match &outcome {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                _ => break,
            }
        }
        outcome.map_err(|cause| explain(path, cause))
    }

    fn make_missing(&mut self, path: &Path) -> io::Result<()> {
        match DirBuilder::new().mode(MODE).create(path) {
            Ok(()) => self.made.push(path.to_owned()),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.make_missing(path.parent().ok_or(error)?)?;
                DirBuilder::new().mode(MODE).create(path)?;
                self.made.push(path.to_owned());
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

impl Drop for Directories {
    fn drop(&mut self) {
        for directory in self.made.iter().rev() {
            // Somebody else may use it by now, and then it is not ours to take.
            let _ = fs::remove_dir(directory);
        }
    }
}

fn explain(path: &Path, cause: io::Error) -> MountError {
    let hint = match cause.kind() {
        ErrorKind::NotADirectory => "a file is in the way; remove it or choose another directory",
        ErrorKind::ReadOnlyFilesystem => "choose a directory on a writable file system",
        ErrorKind::StorageFull => "make room on that file system or choose another directory",
        _ => return MountError::at("make the directory", path, cause),
    };
    MountError::Failed { what: format!("cannot make the directory {} ({hint})", path.display()), cause }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_made_is_taken_back() {
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
