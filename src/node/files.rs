//! Files that only root can read, replaced as a whole: the checkpoints of pods and the records of publications.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Writes a file under another name, which begins with a dot, and renames it: a reader sees the old or the new file, complete.
/// Only the daemon writes there, so a file with the other name can only come from a daemon that was killed.
///
/// # Errors
/// When the file cannot be written.
pub(super) fn replace(directory: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let new = directory.join(format!(".{name}"));
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let written = options.open(&new).and_then(|mut file| file.write_all(content));
    written.and_then(|()| fs::rename(&new, directory.join(name))).inspect_err(|_| drop(fs::remove_file(&new)))
}
