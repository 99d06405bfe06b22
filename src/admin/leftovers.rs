//! Removes recorded directories and mount point files, and says why it leaves others.
//!
//! The cleanup opens each path from the directory that contains the outermost directory that podfs made. The kernel refuses
//! symbolic links and mount points on the way (`RESOLVE_NO_XDEV`), so no mount can appear between check and removal. The cleanup
//! removes directories with rmdir(2), and only empty files, except those that podfs wrote for containers.

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, open, openat2, statat, unlinkat};
use rustix::io::Errno;

/// The outcome of the removal of a path.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RemovalOutcome {
    /// The path is removed; in a dry run, it would be.
    Removed,
    /// The path did not exist.
    Absent,
    /// The path stays, because it has entries of other programs. A new start of the pod does not need its record.
    InUse(String),
    /// The path stays, and the next podfs of the pod needs its record.
    Kept(String),
}

/// The paths of one pod. The caller removes them one after another, innermost first.
pub(super) struct PodRemoval<'a> {
    directories: &'a [PathBuf],
    unmounted: Vec<PathBuf>,
    /// Removed paths; in a dry run, those that would be.
    gone: Vec<PathBuf>,
    dry_run: bool,
}

/// The directory of the content of emptyDirs, in the pod's directory. `PodRemoval` never enters it.
pub(crate) const HOMES: &str = "plugins/kubernetes.io~empty-dir";

const IN_PLACE: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl<'a> PodRemoval<'a> {
    /// `directories` are in the order in which podfs made them. The cleanup has unmounted the paths in `unmounted`, which
    /// contain no symbolic links; in a dry run, it would have.
    pub(super) fn new(directories: &'a [PathBuf], unmounted: &[PathBuf], dry_run: bool) -> Self {
        Self { directories, unmounted: unmounted.to_vec(), gone: Vec::new(), dry_run }
    }

    /// Takes a path as removed: this is a dry run, and the real cleanup would have removed it before.
    pub(super) fn expect_removed(&mut self, path: &Path) {
        self.gone.push(path.to_owned());
    }

    /// Removes a file that is still empty, as podfs made it.
    pub(super) fn remove_file(&mut self, path: &Path) -> RemovalOutcome {
        let outcome = self.check(path, |parent, name| {
            if self.is_unmounted_later(path) {
                // The file below the mount was empty when podfs mounted on it.
                return Ok(None);
            }
            let stat = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
            let is_as_made = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && stat.st_size == 0;
            Ok((!is_as_made).then(|| RemovalOutcome::InUse("it is not the empty file that podfs made".to_owned())))
        });
        self.remove(path, outcome, AtFlags::empty())
    }

    /// Removes a file that podfs wrote for containers, also if its content has changed.
    pub(super) fn remove_written(&mut self, path: &Path) -> RemovalOutcome {
        let outcome = self.check(path, |parent, name| {
            let stat = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
            let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
            Ok((!is_file).then(|| RemovalOutcome::InUse("it is not the file that podfs wrote".to_owned())))
        });
        self.remove(path, outcome, AtFlags::empty())
    }

    /// Removes an empty directory.
    pub(super) fn remove_directory(&mut self, path: &Path) -> RemovalOutcome {
        let gone = &self.gone;
        let outcome = self.check(path, |parent, name| {
            if self.is_unmounted_later(path) {
                return Ok(None);
            }
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let directory = openat2(parent, name, flags, Mode::empty(), ResolveFlags::NO_XDEV)?;
            let other = entries(directory)?.into_iter().find(|entry| !gone.contains(&path.join(entry)));
            Ok(other.map(|entry| not_empty(path, &entry)))
        });
        self.remove(path, outcome, AtFlags::REMOVEDIR)
    }

    /// Opens the parent of a path and calls `look`, which returns an outcome if the path has to stay.
    fn check(
        &self,
        path: &Path,
        look: impl FnOnce(&OwnedFd, &OsStr) -> Result<Option<RemovalOutcome>, Errno>,
    ) -> Result<(OwnedFd, Option<RemovalOutcome>), Errno> {
        let outermost =
            self.directories.iter().filter(|made| path.starts_with(made)).min_by_key(|made| made.as_os_str().len());
        let base = outermost.map_or(path, PathBuf::as_path).parent().ok_or(Errno::INVAL)?;
        let parent = path.parent().and_then(|parent| parent.strip_prefix(base).ok()).ok_or(Errno::INVAL)?;
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        let base = open(base, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let parent = openat2(&base, parent, IN_PLACE | OFlags::DIRECTORY, Mode::empty(), resolve)?;
        let name = path.file_name().ok_or(Errno::INVAL)?;
        if !self.is_unmounted_later(path) {
            // Fails with `EXDEV` when a file system is mounted on the path.
            openat2(&parent, name, IN_PLACE, Mode::empty(), ResolveFlags::NO_XDEV)?;
        }
        let stays = look(&parent, name)?;
        Ok((parent, stays))
    }

    /// Whether this is a dry run, and the real cleanup would have unmounted the path before.
    fn is_unmounted_later(&self, path: &Path) -> bool {
        let real = || Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?));
        self.dry_run && real().is_some_and(|path| self.unmounted.contains(&path))
    }

    fn remove(
        &mut self,
        path: &Path,
        checked: Result<(OwnedFd, Option<RemovalOutcome>), Errno>,
        flags: AtFlags,
    ) -> RemovalOutcome {
        let removed = checked.and_then(|(parent, stays)| match stays {
            Some(outcome) => Ok(outcome),
            None if self.dry_run => Ok(RemovalOutcome::Removed),
            None => unlinkat(&parent, path.file_name().unwrap_or_default(), flags).map(|()| RemovalOutcome::Removed),
        });
        let outcome = removed.unwrap_or_else(explain);
        if matches!(outcome, RemovalOutcome::Removed | RemovalOutcome::Absent) {
            self.gone.push(path.to_owned());
        }
        outcome
    }
}

fn explain(errno: Errno) -> RemovalOutcome {
    match errno {
        Errno::NOENT => RemovalOutcome::Absent,
        Errno::XDEV | Errno::BUSY => RemovalOutcome::Kept("a file system is mounted on it or above it".to_owned()),
        Errno::NOTEMPTY | Errno::EXIST => RemovalOutcome::InUse("it is not empty".to_owned()),
        Errno::NOTDIR | Errno::LOOP => RemovalOutcome::InUse("podfs did not make it".to_owned()),
        other => RemovalOutcome::Kept(std::io::Error::from(other).to_string()),
    }
}

fn not_empty(directory: &Path, entry: &OsStr) -> RemovalOutcome {
    if directory.parent().is_some_and(|parent| parent.ends_with(HOMES)) {
        return RemovalOutcome::Kept(
            "it holds the content of an emptyDir, which the next podfs run of the pod finds".to_owned(),
        );
    }
    RemovalOutcome::InUse(format!("it is not empty, {:?} is in it", entry.to_string_lossy()))
}

fn entries(directory: OwnedFd) -> Result<Vec<OsString>, Errno> {
    let names = Dir::new(directory)?.map(|entry| Ok(OsStr::from_bytes(entry?.file_name().to_bytes()).to_owned()));
    let names: Result<Vec<_>, Errno> = names.collect();
    Ok(names?.into_iter().filter(|name| name != "." && name != "..").collect())
}

/// Removes an empty directory that is no mount point.
pub(super) fn remove_if_empty(path: &Path, dry_run: bool) -> RemovalOutcome {
    if dry_run {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let names = open(path, flags, Mode::empty()).and_then(entries);
        return match names {
            Ok(names) if names.is_empty() => RemovalOutcome::Removed,
            Ok(_) => explain(Errno::NOTEMPTY),
            Err(errno) => explain(errno),
        };
    }
    unlinkat(CWD, path, AtFlags::REMOVEDIR).map_or_else(explain, |()| RemovalOutcome::Removed)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn cleanup_removes_podfs_files_and_leaves_others() {
        let base = tempfile::tempdir().expect("a directory");
        let made: Vec<_> = ["a", "a/b", "a/b/c", "a/d"].iter().map(|name| base.path().join(name)).collect();
        made.iter().for_each(|directory| fs::create_dir(directory).expect("a directory"));
        let (point, used) = (base.path().join("a/b/point"), base.path().join("a/b/used"));
        fs::write(&point, "").expect("written");
        fs::write(&used, "x").expect("written");
        let checked = |dry_run| {
            let mut leftovers = PodRemoval::new(&made, &[], dry_run);
            let mut outcomes: Vec<_> = [&point, &used].iter().map(|file| leftovers.remove_file(file)).collect();
            outcomes.extend(made.iter().rev().map(|directory| leftovers.remove_directory(directory)));
            outcomes
        };
        let planned = checked(true);
        assert!(point.exists() && made.iter().all(|directory| directory.is_dir()), "a dry run changes nothing");
        assert_eq!(checked(false), planned);
        let kinds = planned.iter().map(|outcome| matches!(outcome, RemovalOutcome::Removed)).collect::<Vec<_>>();
        assert_eq!(kinds, [true, false, true, true, false, false]);
        assert!(
            matches!(&planned[4], RemovalOutcome::InUse(reason) if reason.contains(r#""used" is in it"#)),
            "{planned:?}"
        );
        assert_eq!(checked(false)[0], RemovalOutcome::Absent);
    }

    #[test]
    fn the_content_of_an_empty_dir_is_kept() {
        let base = tempfile::tempdir().expect("a directory");
        let home = base.path().join(HOMES).join("scratch");
        fs::create_dir_all(home.join("content")).expect("a directory");
        let made = [home.clone()];
        let outcome = PodRemoval::new(&made, &[], false).remove_directory(&home);
        assert!(matches!(&outcome, RemovalOutcome::Kept(reason) if reason.contains("emptyDir")), "{outcome:?}");
    }

    #[test]
    fn links_are_not_followed() {
        let (base, other) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        fs::create_dir(other.path().join("b")).expect("a directory");
        let made = [base.path().join("a"), base.path().join("a/b")];
        std::os::unix::fs::symlink(other.path(), &made[0]).expect("a link");
        let mut leftovers = PodRemoval::new(&made, &[], false);
        assert!(made.iter().rev().all(|path| matches!(leftovers.remove_directory(path), RemovalOutcome::InUse(_))));
        assert!(other.path().join("b").is_dir());
    }
}
