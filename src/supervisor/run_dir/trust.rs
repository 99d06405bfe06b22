//! Which directories podfs trusts with its records: directories that only root can change.
//!
//! The lock files in the run directory record the paths that podfs unmounts and removes as root, and the sockets there receive
//! Secrets. A user that can write to the run directory, or put another directory in its place, could make podfs unmount and remove
//! other paths, and could receive Secrets. So podfs checks the whole path of the run directory:
//!
//! 1. The directory itself belongs to root, and no other user may write to it.
//! 2. The same holds for each directory above it. A directory above it may also be sticky, as `/tmp` is: in a sticky directory,
//!    other users may make files, but cannot replace the files of root.
//! 3. A symbolic link on the path belongs to root, and podfs also checks the directories to which the link leads.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A directory that users other than root can change.
#[derive(Debug, thiserror::Error)]
#[error("{} {problem}, so podfs cannot trust what is in {}; {advice}", .at.display(), .directory.display())]
pub struct Untrusted {
    directory: PathBuf,
    at: PathBuf,
    problem: String,
    advice: &'static str,
}

impl From<Untrusted> for io::Error {
    fn from(untrusted: Untrusted) -> io::Error {
        io::Error::new(ErrorKind::PermissionDenied, untrusted)
    }
}

/// Checks a directory and the directories above it, as far as they exist.
///
/// # Errors
/// When a user other than root could change its entries.
pub fn check(directory: &Path) -> Result<(), Untrusted> {
    let absolute = std::path::absolute(directory).unwrap_or_else(|_| directory.to_owned());
    check_path(&absolute, directory)?;
    match std::fs::canonicalize(&absolute) {
        Ok(resolved) if resolved != absolute => check_path(&resolved, directory),
        _ => Ok(()),
    }
}

fn check_path(path: &Path, directory: &Path) -> Result<(), Untrusted> {
    let above: Vec<_> = path.ancestors().collect();
    for at in above.into_iter().rev() {
        // No other user can own a missing path. If stat(2) fails for another reason, podfs cannot use the path either.
        let Ok(found) = std::fs::symlink_metadata(at) else { return Ok(()) };
        let (problem, advice) = if !belongs_to_root(&found) {
            (format!("belongs to uid {}", found.uid()), "give it to root, or choose another directory")
        } else if is_open_to_others(&found, at == path) {
            let mode = found.mode() & 0o7777;
            (format!("can be written to by other users (mode {mode:04o})"), "take that right away, or choose another")
        } else {
            continue;
        };
        return Err(Untrusted { directory: directory.to_owned(), at: at.to_owned(), problem, advice });
    }
    Ok(())
}

/// Whether a file or directory belongs to root, or to the user that this program runs as.
fn belongs_to_root(found: &Metadata) -> bool {
    found.uid() == 0 || found.uid() == rustix::process::geteuid().as_raw()
}

/// Whether other users may replace the entries of a directory. If it is the last directory of a path, whether they may also add
/// entries.
fn is_open_to_others(found: &Metadata, is_last: bool) -> bool {
    const STICKY: u32 = 0o1000;
    const GROUP: u32 = 0o020;
    const OTHERS: u32 = 0o002;
    let group = if found.gid() == 0 { 0 } else { GROUP };
    let is_writable = found.is_dir() && found.mode() & (OTHERS | group) != 0;
    is_writable && (is_last || found.mode() & STICKY == 0)
}

/// Opens a regular file of the run directory without following links. `O_NONBLOCK`, because open(2) of a FIFO would
/// wait for another process.
///
/// # Errors
/// Those of `open(2)`, and when it is no regular file.
pub fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file; remove it"))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    fn refusal(directory: &Path) -> String {
        check(directory).expect_err("others can change it").to_string()
    }

    #[test]
    fn a_directory_is_trusted_if_only_root_can_change_its_path() {
        let own = tempfile::tempdir().expect("a directory");
        let (parent, inner) = (own.path().join("parent"), own.path().join("parent/inner"));
        fs::create_dir_all(&inner).expect("directories");
        let set = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).expect("its mode");
        check(&inner).expect("root's own, below a sticky directory");
        check(&inner.join("to/be/made")).expect("root will make it");

        for mode in [0o777, 0o1777] {
            set(&inner, mode);
            assert!(refusal(&inner).contains("inner can be written to by other users (mode"), "{mode:o}");
        }
        set(&inner, 0o755);
        set(&parent, 0o777);
        assert!(refusal(&inner).contains("parent can be written to by other users (mode 0777)"));
        set(&parent, 0o1777);
        check(&inner).expect("no other user can replace it");
        chown(&inner, Some(65534), None).expect("its owner");
        assert!(refusal(&inner).contains("inner belongs to uid 65534"));
        chown(&inner, Some(0), Some(65534)).expect("its owner");
        set(&inner, 0o775);
        assert!(refusal(&inner).contains("(mode 0775)"));
    }

    #[test]
    fn links_on_the_way_are_checked() {
        let own = tempfile::tempdir().expect("a directory");
        let (open, link) = (own.path().join("open"), own.path().join("link"));
        fs::create_dir_all(open.join("run")).expect("directories");
        fs::set_permissions(&open, Permissions::from_mode(0o777)).expect("its mode");
        symlink(open.join("run"), &link).expect("a link");
        assert!(refusal(&link).contains("open can be written to by other users"));
    }

    #[test]
    fn only_regular_files_are_opened() {
        let own = tempfile::tempdir().expect("a directory");
        let path = |name: &str| own.path().join(name);
        fs::write(path("file"), "x").expect("written");
        symlink(path("file"), path("link")).expect("a link");
        nix::unistd::mkfifo(&path("fifo"), nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
        open(OpenOptions::new().read(true), &path("file")).expect("a file");
        open(OpenOptions::new().read(true), &path("link")).expect_err("a link");
        open(OpenOptions::new().read(true), &path("fifo")).expect_err("a FIFO, and nothing waits for its writer");
        open(OpenOptions::new().read(true).write(true), &path("fifo")).expect_err("a FIFO");
    }
}
