//! One supervisor per pod: a locked file in the pod's run directory.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use podfs_fuse::mount::MountError;
use podfs_fuse::mount::directories::Directories;
use serde::{Deserialize, Serialize};

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
        pid: u32,
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

/// The right to serve a pod. Dropping it removes the lock file.
#[derive(Debug)]
pub struct Claim {
    path: PathBuf,
    lock: Flock<File>,
    // Both are removed after the file in them, which `drop` does first; what this process made is inside
    // what one before it made.
    run: Directories,
    inherited_run: Directories,
    leaves_record: bool,
}

/// What a podfs that ended too early has left behind for the one that claims its pod next.
#[derive(Debug, Default)]
pub struct Inheritance {
    /// Directories and files it had made for the pod.
    pub directories: Directories,
    /// Paths it had mounted on, or was about to.
    pub mounts: Vec<PathBuf>,
}

/// What the lock file says.
#[derive(Default, Serialize, Deserialize)]
struct Record {
    /// The supervisor.
    pid: u32,
    /// The directories that were made for the lock file, in the order they were made.
    run: Vec<PathBuf>,
    /// Those that were made for the pod's volumes.
    directories: Vec<PathBuf>,
    /// Files in these that are mounted on.
    #[serde(default)]
    files: Vec<PathBuf>,
    /// Where volumes are mounted.
    #[serde(default)]
    mounts: Vec<PathBuf>,
}

impl Claim {
    /// Claims the pod, and gives what a podfs that was killed has left of it.
    ///
    /// # Errors
    /// When another process has it, or the run directory cannot be written.
    pub fn take(run_directory: &Path, uid: &PodUid) -> Result<(Self, Inheritance), ClaimError> {
        let directory = run_directory.join(uid.as_str());
        // Recorded paths must mean the same to a process with another working directory.
        let directory = std::path::absolute(&directory).unwrap_or(directory);
        let mut run = Directories::default();
        let path = directory.join("lock");
        let failed = |cause: io::Error| ClaimError::Lock { path: path.clone(), cause };
        loop {
            run.make(&directory)?;
            let file = match OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path) {
                // A supervisor that ends just now has taken the directory back.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                opened => opened.map_err(failed)?,
            };
            let mut lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => lock,
                Err((mut file, Errno::EWOULDBLOCK)) => {
                    return Err(ClaimError::Taken { uid: uid.to_string(), pid: read(&mut file).pid });
                }
                Err((_, errno)) => return Err(failed(errno.into())),
            };
            // A supervisor that ended between open and lock has removed the file this lock is on.
            if is_still_at(&lock, &path) {
                let mut record = read(&mut lock);
                // The pod's run directory goes with its last claim, whichever podfs made it.
                if !record.run.contains(&directory) && !run.made().contains(&directory) {
                    record.run.push(directory);
                }
                let directories = Directories::inherit(record.directories, record.files);
                let inherited_run = Directories::inherit(record.run, Vec::new());
                let mut claim = Self { path: path.clone(), lock, run, inherited_run, leaves_record: false };
                claim.record(&directories, &record.mounts).map_err(failed)?;
                return Ok((claim, Inheritance { directories, mounts: record.mounts }));
            }
        }
    }

    /// Writes down what was made for the pod's volumes, so that it is removed even if this process is killed: by the
    /// next one that serves the pod.
    ///
    /// # Errors
    /// When the lock file cannot be written.
    pub fn record(&mut self, directories: &Directories, mounts: &[PathBuf]) -> io::Result<()> {
        let record = Record {
            pid: std::process::id(),
            run: [self.inherited_run.made(), self.run.made()].concat(),
            directories: directories.made().to_vec(),
            files: directories.files().to_vec(),
            mounts: mounts.to_vec(),
        };
        self.lock.set_len(0)?;
        self.lock.rewind()?;
        self.lock.write_all(&serde_json::to_vec(&record)?)
    }

    /// Gives the claim up, but not what was written down.
    pub fn leave_record(mut self) {
        self.leaves_record = true;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.leaves_record {
            return;
        }
        // Removed while it is still locked, so that nobody can lock the file that goes.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A file that another process is just writing, or that is no record, says nothing.
fn read(file: &mut File) -> Record {
    let mut text = String::new();
    file.read_to_string(&mut text).ok().and_then(|_| serde_json::from_str(&text).ok()).unwrap_or_default()
}

fn is_still_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(held), Ok(found)) => (held.dev(), held.ino()) == (found.dev(), found.ino()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::pod::PodIdentity;

    #[test]
    fn a_pod_has_one_supervisor_at_a_time() {
        let run = tempfile::tempdir().expect("a directory");
        let uid = PodIdentity::stand_in().uid;
        let (first, _) = Claim::take(run.path(), &uid).expect("the pod is free");
        let error = Claim::take(run.path(), &uid).expect_err("the pod is taken").to_string();
        assert!(error.contains(&format!("(pid {})", std::process::id())), "{error}");
        drop(first);
        assert_eq!(std::fs::read_dir(run.path()).expect("a listing").count(), 0, "nothing stays behind");
        Claim::take(run.path(), &uid).expect("the pod is free again");
    }

    #[test]
    fn directories_of_a_killed_supervisor_are_removed_by_the_next() {
        let (run, root) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        let uid = PodIdentity::stand_in().uid;
        let made = [root.path().join("pods"), root.path().join("pods/a")];
        made.iter().for_each(|path| std::fs::create_dir(path).expect("a directory"));
        let directory = run.path().join(uid.as_str());
        std::fs::create_dir(&directory).expect("a directory");
        let record = Record { pid: 1, run: vec![directory.clone()], directories: made.to_vec(), ..Record::default() };
        std::fs::write(directory.join("lock"), serde_json::to_vec(&record).expect("JSON")).expect("written");
        drop(Claim::take(run.path(), &uid).expect("nobody holds the lock"));
        for directory in [&run, &root] {
            assert_eq!(std::fs::read_dir(directory.path()).expect("a listing").count(), 0);
        }
    }

    #[test]
    fn claims_that_come_and_go_never_meet_a_missing_directory() {
        let run = tempfile::tempdir().expect("a directory");
        let uid = PodIdentity::stand_in().uid;
        let come_and_go = || {
            for _ in 0..200 {
                match Claim::take(run.path(), &uid) {
                    Ok(claim) => drop(claim),
                    Err(ClaimError::Taken { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(come_and_go))));
        assert_eq!(std::fs::read_dir(run.path()).expect("a listing").count(), 0);
    }
}
