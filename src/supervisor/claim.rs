//! One supervisor per pod: a locked file in the pod's run directory.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use podfs_fuse::mount::MountError;
use podfs_fuse::mount::directories::Directories;

use crate::manifest::pod::PodUid;

/// Why a pod cannot be claimed.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// Another supervisor serves it.
    #[error("pod {uid} is already served by podfs (pid {pid}); stop that one first")]
    Taken {
        /// The pod.
        uid: String,
        /// The other supervisor.
        pid: String,
    },
    /// The run directory cannot be made.
    #[error(transparent)]
    Directory(#[from] MountError),
    /// The lock file cannot be used.
    #[error("cannot lock {}: {cause}", .path.display())]
    Lock {
        /// The lock file.
        path: PathBuf,
        /// What the kernel said.
        cause: io::Error,
    },
}

/// The right to serve a pod. Dropping it removes the lock file and the directories made for it.
#[derive(Debug)]
pub struct Claim {
    path: PathBuf,
    // Unlocked before the directories go.
    _lock: Flock<File>,
    _directories: Directories,
}

impl Claim {
    /// Claims the pod.
    ///
    /// # Errors
    /// When another process has it, or the run directory cannot be written.
    pub fn take(run_directory: &Path, uid: &PodUid) -> Result<Self, ClaimError> {
        let directory = run_directory.join(uid.as_str());
        let directories = Directories::make(&directory)?;
        let path = directory.join("lock");
        let failed = |cause: io::Error| ClaimError::Lock { path: path.clone(), cause };
        loop {
            let file =
                OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(failed)?;
            let mut lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => lock,
                Err((mut file, Errno::EWOULDBLOCK)) => {
                    let mut pid = String::new();
                    let _unknown_stays_empty = file.read_to_string(&mut pid);
                    return Err(ClaimError::Taken { uid: uid.to_string(), pid: pid.trim().to_owned() });
                }
                Err((_, errno)) => return Err(failed(errno.into())),
            };
            // A supervisor that ended between open and lock has removed the file this lock is on.
            if is_still_at(&lock, &path) {
                write_pid(&mut lock).map_err(failed)?;
                return Ok(Self { path, _lock: lock, _directories: directories });
            }
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Removed while it is still locked, so that nobody can lock the file that goes.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn is_still_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(held), Ok(found)) => (held.dev(), held.ino()) == (found.dev(), found.ino()),
        _ => false,
    }
}

fn write_pid(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::pod::PodIdentity;

    #[test]
    fn a_pod_has_one_supervisor_at_a_time() {
        let run = tempfile::tempdir().expect("a directory");
        let uid = PodIdentity::stand_in().uid;
        let first = Claim::take(run.path(), &uid).expect("the pod is free");
        let error = Claim::take(run.path(), &uid).expect_err("the pod is taken").to_string();
        assert!(error.contains(&format!("(pid {})", std::process::id())), "{error}");
        drop(first);
        assert_eq!(std::fs::read_dir(run.path()).expect("a listing").count(), 0, "nothing stays behind");
        Claim::take(run.path(), &uid).expect("the pod is free again");
    }
}
