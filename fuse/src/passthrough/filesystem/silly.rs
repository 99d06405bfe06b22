//! RMDIR of directories of an NFS server that hold only files which were just removed.
//!
//! The kernel's NFS client gives a file that is removed while it is open another name, which begins with `.nfs`, until it is
//! closed. The server of a volume gets the RELEASE only after `close(2)` has returned. So a process that closes and removes all
//! files of a directory, and then removes the directory, would get `ENOTEMPTY`.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use rustix::fs::{AtFlags, Mode, OFlags, openat, unlinkat};
use rustix::io::Errno;

use super::super::listing::SourceListing;

/// The pauses between attempts. They are a second in all, not more, because the files may stay open for long.
const PAUSES: [Duration; 7] = [
    Duration::from_millis(10),
    Duration::from_millis(20),
    Duration::from_millis(40),
    Duration::from_millis(80),
    Duration::from_millis(160),
    Duration::from_millis(320),
    Duration::from_millis(370),
];

/// Removes the directory `name`. While it holds only files that the NFS client removes when they are closed, waits for that.
///
/// # Errors
/// As with `rmdir(2)`.
pub(super) fn remove_directory(
    directory: impl AsFd,
    name: &OsStr,
    mut wait: impl FnMut(Duration),
) -> Result<(), Errno> {
    let remove = || unlinkat(&directory, name, AtFlags::REMOVEDIR);
    let mut removed = remove();
    for pause in PAUSES {
        if !matches!(removed, Err(Errno::NOTEMPTY | Errno::EXIST))
            || !holds_only_removed_files(&directory, name).unwrap_or(false)
        {
            break;
        }
        wait(pause);
        removed = remove();
    }
    removed
}

/// Whether the directory `name` holds only `.nfs*` files, which the NFS client removes when they are closed.
fn holds_only_removed_files(directory: impl AsFd, name: &OsStr) -> Result<bool, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut listing = SourceListing::new(openat(directory, name, flags, Mode::empty())?);
    let mut all = true;
    listing.read(0, |_, entry| {
        all &= is_removed_file(entry.name);
        Ok(all)
    })?;
    Ok(all)
}

fn is_removed_file(name: &OsStr) -> bool {
    matches!(name.as_bytes(), b"." | b"..") || name.as_bytes().starts_with(b".nfs")
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    /// A directory `sub` with these files in a directory.
    fn directory(names: &[&str]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().expect("a directory");
        fs::create_dir(directory.path().join("sub")).expect("made");
        names.iter().for_each(|name| drop(File::create(directory.path().join("sub").join(name)).expect("made")));
        directory
    }

    /// Removes `sub`. Returns the result, and the sum of all pauses. At each pause, `act` gets the number of the pause.
    fn remove(directory: &tempfile::TempDir, mut act: impl FnMut(usize)) -> (Result<(), Errno>, Duration) {
        let (mut count, mut waited) = (0, Duration::ZERO);
        let wait = |pause| {
            (count, waited) = (count + 1, waited + pause);
            act(count);
        };
        let open = File::open(directory.path()).expect("opened");
        (remove_directory(open, OsStr::new("sub"), wait), waited)
    }

    #[test]
    fn an_empty_directory_goes_at_once_and_one_with_files_is_refused_at_once() {
        let never = |_| panic!("no wait is needed");
        assert_eq!(remove(&directory(&[]), never).0, Ok(()));
        for names in [&["file"][..], &[".nfs1", "file"], &[".nf"], &["x.nfs"]] {
            assert_eq!(remove(&directory(names), never).0, Err(Errno::NOTEMPTY), "{names:?}");
        }
    }

    #[test]
    fn rmdir_waits_for_open_files_that_were_removed() {
        let directory = directory(&[".nfs0001", ".nfs0002"]);
        let close = |count: usize| {
            if count <= 2 {
                fs::remove_file(directory.path().join(format!("sub/.nfs000{count}"))).expect("closed");
            }
        };
        assert_eq!(remove(&directory, close).0, Ok(()));
        assert!(!directory.path().join("sub").exists());
    }

    #[test]
    fn rmdir_waits_a_second_for_files_that_stay_open() {
        let directory = directory(&[".nfs0001"]);
        assert_eq!(remove(&directory, |_| {}), (Err(Errno::NOTEMPTY), Duration::from_secs(1)));
    }

    #[test]
    fn rmdir_does_not_wait_when_another_file_appears() {
        let directory = directory(&[".nfs0001"]);
        let make = |_| drop(File::create(directory.path().join("sub/file")).expect("made"));
        assert_eq!(remove(&directory, make), (Err(Errno::NOTEMPTY), PAUSES[0]));
    }
}
