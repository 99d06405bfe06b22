//! One supervisor per pod: a locked file in the pod's run directory.
//!
//! The lock, not a process id, shows whether a supervisor serves the pod. The kernel releases the lock when its holder
//! ends, and the process id may belong to another program by then. The file records what its holder has made.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::kill;
use nix::unistd::Pid;
use podfs_fuse::mount::MountError;
use podfs_fuse::mount::directories::Directories;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::bounds::{Bounds, OUTSIDE, is_there};
use super::trust::{self, Untrusted};
use crate::manifest::pod::PodIdentity;
use crate::types::PodName;

/// The locked file in the pod's run directory.
pub const LOCK: &str = "lock";
/// The supervisor's control socket there.
pub const CONTROL: &str = "control.sock";
/// The socket there on which the next supervisor finds the server.
pub const SERVER: &str = "server.sock";
/// The pod's counters there, for the next supervisor.
pub const COUNTS: &str = "counts.json";
/// The new counters there, which podfs renames to [`COUNTS`] once they are written.
pub const NEXT_COUNTS: &str = "counts.json.new";
/// The disks of the pod's hostPath volumes there, for the next supervisor.
pub const DISKS: &str = "disks.json";

/// Most bytes of a path.
const LONGEST_PATH: usize = libc::PATH_MAX as usize - 1;

/// How long to wait for a lock whose recorded supervisor has ended: another process cleans up after it, or reads its
/// record.
const CLEANING: Duration = Duration::from_secs(3);

/// Why a pod cannot be claimed.
#[derive(Debug, thiserror::Error)]
pub enum PodLockError {
    /// Another supervisor serves it.
    #[error("pod {uid} is already served by podfs (pid {pid}); stop that one first")]
    Taken {
        /// The pod.
        uid: String,
        /// The other supervisor.
        pid: u32,
    },
    /// The paths of its files are too long for the kernel.
    #[error(
        "the run directory has too long a path: the pod's sockets in it have paths of {length} bytes, and Linux takes \
         {LONGEST_PATH}; choose a shorter --run-dir"
    )]
    TooLong {
        /// Bytes of the longest of these paths.
        length: usize,
    },
    /// Users other than root can change the run directory.
    #[error(transparent)]
    Untrusted(#[from] Untrusted),
    /// The run directory cannot be made.
    #[error(transparent)]
    Directory(#[from] MountError),
    /// The lock file cannot be used.
    #[error("cannot lock {}: {cause}", .path.display())]
    Lock {
        /// The lock file.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        cause: io::Error,
    },
}

/// The right to serve a pod. Dropping it removes the lock file.
#[derive(Debug)]
pub struct PodLock {
    pod: PodName,
    path: PathBuf,
    lock: Flock<File>,
    // Dropped after `drop` has removed the file in them. The directories of this process are inside those of earlier ones.
    run: Directories,
    inherited_run: Directories,
    cgroup: Option<PathBuf>,
    leaves_record: bool,
}

/// What a podfs that was killed has left for the next podfs that claims its pod.
#[derive(Debug, Default)]
pub struct PodLeftovers {
    /// Directories and files it had made for the pod.
    pub directories: Directories,
    /// Paths that had, or were about to get, a mount.
    pub mounts: Vec<PathBuf>,
    /// Files that it had written for containers.
    pub written: Vec<PathBuf>,
}

/// The content of the lock file.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct PodLockRecord {
    /// The supervisor that wrote it.
    pub pid: u32,
    /// The pod.
    #[serde(default)]
    pub pod: PodName,
    /// The directories that were made for the lock file, in the order they were made.
    pub run: Vec<PathBuf>,
    /// The directories that were made for the pod's volumes.
    pub directories: Vec<PathBuf>,
    /// Files in these that are mount points.
    #[serde(default)]
    pub files: Vec<PathBuf>,
    /// Mount points of volumes, and of parts of them (subPath).
    #[serde(default)]
    pub mounts: Vec<PathBuf>,
    /// Files in these directories that podfs removes with any content.
    #[serde(default)]
    pub written: Vec<PathBuf>,
    /// The cgroup of the server.
    #[serde(default)]
    pub cgroup: Option<PathBuf>,
}

impl PodLockRecord {
    /// The record in the lock file of this directory, if that has one.
    pub fn read(directory: &Path) -> Option<PodLockRecord> {
        let mut bytes = Vec::new();
        trust::open(OpenOptions::new().read(true), &directory.join(LOCK)).ok()?.read_to_end(&mut bytes).ok()?;
        // The file is empty while a process writes it, and after a write that failed.
        if bytes.is_empty() { Some(PodLockRecord::default()) } else { serde_json::from_slice(&bytes).ok() }
    }
}

/// Whether a process holds the claim on the pod with this run directory.
pub fn is_held(directory: &Path) -> bool {
    let Ok(file) = trust::open(OpenOptions::new().read(true), &directory.join(LOCK)) else { return false };
    matches!(Flock::lock(file, FlockArg::LockSharedNonblock), Err((_, Errno::EWOULDBLOCK)))
}

impl PodLock {
    /// Claims the pod, whose volumes are below the root directory. Returns what a podfs that was killed has left there.
    ///
    /// # Errors
    /// When another process holds the claim, or the run directory cannot be written.
    pub fn take(
        run_directory: &Path,
        root_directory: &Path,
        pod: &PodIdentity,
    ) -> Result<(Self, PodLeftovers), PodLockError> {
        let PodIdentity { namespace, name, uid } = pod;
        let directory = run_directory.join(uid.as_str());
        // Recorded paths must mean the same to a process with another working directory.
        let directory = std::path::absolute(&directory).unwrap_or(directory);
        let length = directory.join(CONTROL).as_os_str().len();
        if length > LONGEST_PATH {
            return Err(PodLockError::TooLong { length });
        }
        let mut run = Directories::default();
        let path = directory.join(LOCK);
        let failed = |cause: io::Error| PodLockError::Lock { path: path.clone(), cause };
        let until = Instant::now() + CLEANING;
        trust::check(run_directory)?;
        loop {
            run.make(&directory)?;
            // In a directory such as /tmp, another user may have made it first.
            trust::check(&directory)?;
            let mut options = OpenOptions::new();
            let file = match trust::open(options.read(true).write(true).create(true).truncate(false), &path) {
                // A supervisor that ends just now has removed the directory.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                opened => opened.map_err(failed)?,
            };
            let mut lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => lock,
                Err((mut file, Errno::EWOULDBLOCK)) => {
                    let pid = read(&mut file).pid;
                    if is_gone(pid) && Instant::now() < until {
                        sleep(Duration::from_millis(5));
                        continue;
                    }
                    return Err(PodLockError::Taken { uid: uid.to_string(), pid });
                }
                Err((_, errno)) => return Err(failed(errno.into())),
            };
            // A supervisor that ended between open and lock has removed the file this lock is on.
            if is_still_at(&lock, &path) {
                let mut record = read(&mut lock);
                let bounds = Bounds::new(&directory, root_directory).map_err(failed)?;
                for other in bounds.apply(&mut record).iter().filter(|other| is_there(other)) {
                    warn!("{} names {}, which {OUTSIDE}; podfs leaves it alone", path.display(), other.display());
                }
                // The pod's run directory is removed with its last claim, whichever podfs made it.
                if !record.run.contains(&directory) && !run.made().contains(&directory) {
                    record.run.push(directory);
                }
                let directories = Directories::inherit(record.directories, record.files);
                let inherited_run = Directories::inherit(record.run, Vec::new());
                let pod = PodName { namespace: namespace.clone(), name: name.clone() };
                let cgroup = record.cgroup;
                let mut claim =
                    Self { pod, path: path.clone(), lock, run, inherited_run, cgroup, leaves_record: false };
                claim.record(&directories, &record.mounts, &record.written).map_err(failed)?;
                let PodLockRecord { mounts, written, .. } = record;
                return Ok((claim, PodLeftovers { directories, mounts, written }));
            }
        }
    }

    /// Claims what a dead podfs has left in this run directory of a pod, and returns its record. Makes nothing and
    /// writes nothing. Dropping the claim removes the record, unless [`PodLock::leave_record`] is called.
    ///
    /// # Errors
    /// When another process holds the claim, or the lock file has no record.
    pub fn take_leftovers(directory: &Path) -> Result<(Self, PodLockRecord), PodLockError> {
        let path = directory.join(LOCK);
        let failed = |cause: io::Error| PodLockError::Lock { path: path.clone(), cause };
        let taken =
            |pid| PodLockError::Taken { uid: directory.file_name().unwrap_or_default().display().to_string(), pid };
        trust::check(directory)?;
        let file = trust::open(OpenOptions::new().read(true).write(true), &path).map_err(failed)?;
        let lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) if is_still_at(&lock, &path) => lock,
            Ok(lock) => return Err(taken(read(&mut lock.unlock().map_err(|(_, errno)| failed(errno.into()))?).pid)),
            Err((mut file, Errno::EWOULDBLOCK)) => return Err(taken(read(&mut file).pid)),
            Err((_, errno)) => return Err(failed(errno.into())),
        };
        let record = PodLockRecord::read(directory).ok_or_else(|| failed(io::ErrorKind::InvalidData.into()))?;
        let mut inherited_run = record.run.clone();
        inherited_run.retain(|run| directory.starts_with(run));
        if !inherited_run.iter().any(|run| run == directory) {
            inherited_run.push(directory.to_owned());
        }
        let inherited_run = Directories::inherit(inherited_run, Vec::new());
        let run = Directories::default();
        let (pod, cgroup) = (record.pod.clone(), record.cgroup.clone());
        Ok((Self { pod, path, lock, run, inherited_run, cgroup, leaves_record: false }, record))
    }

    /// Records the paths that were made for the pod's volumes: if this process is killed, the pod's next podfs removes them.
    ///
    /// # Errors
    /// When the lock file cannot be written.
    pub fn record(&mut self, directories: &Directories, mounts: &[PathBuf], written: &[PathBuf]) -> io::Result<()> {
        let record = PodLockRecord {
            pid: std::process::id(),
            pod: self.pod.clone(),
            run: [self.inherited_run.made(), self.run.made()].concat(),
            directories: directories.made().to_vec(),
            files: directories.files().to_vec(),
            mounts: mounts.to_vec(),
            written: written.to_vec(),
            cgroup: self.cgroup.clone(),
        };
        let text = serde_json::to_vec(&record)?;
        // The file keeps its blocks, so that a full disk does not lose the record.
        self.lock.rewind()?;
        self.lock.write_all(&text)?;
        self.lock.set_len(text.len() as u64)
    }

    /// Whether the lock file is still at its path. Another process may have deleted the run directory.
    pub fn is_in_place(&self) -> bool {
        is_still_at(&self.lock, &self.path)
    }

    /// Claims the pod again after another process has deleted its run directory. The caller has to call
    /// [`PodLock::record`] next.
    ///
    /// # Errors
    /// When another podfs has claimed the pod meanwhile, or the run directory cannot be made.
    pub fn take_again(&mut self) -> Result<(), PodLockError> {
        let directory = self.directory().to_owned();
        let failed = |cause: io::Error| PodLockError::Lock { path: self.path.clone(), cause };
        self.run.make(&directory)?;
        trust::check(&directory)?;
        let mut options = OpenOptions::new();
        let file = trust::open(options.read(true).write(true).create(true).truncate(false), &self.path);
        self.lock = match Flock::lock(file.map_err(failed)?, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((mut file, Errno::EWOULDBLOCK)) => {
                let uid = directory.file_name().unwrap_or_default().display().to_string();
                return Err(PodLockError::Taken { uid, pid: read(&mut file).pid });
            }
            Err((_, errno)) => return Err(failed(errno.into())),
        };
        Ok(())
    }

    /// The pod's run directory.
    pub fn directory(&self) -> &Path {
        self.path.parent().expect("the lock file is in it")
    }

    /// The cgroup of the pod's server, or of the last one that a podfs started.
    pub fn cgroup(&self) -> Option<&Path> {
        self.cgroup.as_deref()
    }

    /// Sets the server's cgroup, for the next record.
    pub fn set_cgroup(&mut self, cgroup: Option<&Path>) {
        self.cgroup = cgroup.map(Path::to_owned);
    }

    /// Gives the claim up, and leaves the record.
    pub fn leave_record(mut self) {
        self.leaves_record = true;
    }
}

impl Drop for PodLock {
    fn drop(&mut self) {
        if self.leaves_record {
            return;
        }
        let _ = std::fs::remove_file(self.directory().join(SERVER));
        let _ = std::fs::remove_file(self.directory().join(CONTROL));
        let _ = std::fs::remove_file(self.directory().join(COUNTS));
        let _ = std::fs::remove_file(self.directory().join(NEXT_COUNTS));
        let _ = std::fs::remove_file(self.directory().join(DISKS));
        // Removed while it is still locked, so that no process locks a deleted file.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The record in the file. It is empty while another process writes the file, and if the file has no record.
fn read(file: &mut File) -> PodLockRecord {
    let mut text = String::new();
    file.read_to_string(&mut text).ok().and_then(|_| serde_json::from_str(&text).ok()).unwrap_or_default()
}

/// Whether no process has this id.
fn is_gone(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0);
    pid.is_none_or(|pid| kill(Pid::from_raw(pid), None) == Err(Errno::ESRCH))
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

    /// No volume is there.
    const ROOT: &str = "/nonexistent";

    #[test]
    fn a_pod_has_one_supervisor_at_a_time() {
        let run = tempfile::tempdir().expect("a directory");
        let pod = PodIdentity::placeholder();
        let (first, _) = PodLock::take(run.path(), ROOT.as_ref(), &pod).expect("the pod is free");
        let error = PodLock::take(run.path(), ROOT.as_ref(), &pod).expect_err("the pod is taken").to_string();
        assert!(error.contains(&format!("(pid {})", std::process::id())), "{error}");
        drop(first);
        assert_eq!(std::fs::read_dir(run.path()).expect("a listing").count(), 0, "nothing stays behind");
        PodLock::take(run.path(), ROOT.as_ref(), &pod).expect("the pod is free again");
    }

    #[test]
    fn directories_of_a_killed_supervisor_are_removed_by_the_next() {
        let (run, root) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        let pod = PodIdentity::placeholder();
        let made = [root.path().join("pods"), root.path().join("pods/a")];
        made.iter().for_each(|path| std::fs::create_dir(path).expect("a directory"));
        let directory = run.path().join(pod.uid.as_str());
        std::fs::create_dir(&directory).expect("a directory");
        let record = PodLockRecord {
            pid: 1,
            run: vec![directory.clone()],
            directories: made.to_vec(),
            ..PodLockRecord::default()
        };
        std::fs::write(directory.join("lock"), serde_json::to_vec(&record).expect("JSON")).expect("written");
        drop(PodLock::take(run.path(), root.path(), &pod).expect("no process holds the lock"));
        for directory in [&run, &root] {
            assert_eq!(std::fs::read_dir(directory.path()).expect("a listing").count(), 0);
        }
    }

    #[test]
    fn a_claim_waits_for_the_process_that_cleans_up_after_a_dead_supervisor() {
        let run = tempfile::tempdir().expect("a directory");
        let pod = PodIdentity::placeholder();
        let directory = run.path().join(pod.uid.as_str());
        std::fs::create_dir(&directory).expect("a directory");
        std::fs::write(directory.join(LOCK), "").expect("written");
        let (cleaner, _) = PodLock::take_leftovers(&directory).expect("no process holds the lock");
        assert!(is_held(&directory));
        std::thread::scope(|scope| {
            let next = scope.spawn(|| PodLock::take(run.path(), ROOT.as_ref(), &pod).map(drop));
            drop(cleaner);
            next.join().expect("no panic").expect("the pod is free by now");
        });
        assert!(!is_held(&directory) && !directory.exists());
    }

    #[test]
    fn a_claim_whose_directory_was_deleted_is_taken_again_unless_another_supervisor_has_the_pod() {
        let run = tempfile::tempdir().expect("a directory");
        let pod = PodIdentity::placeholder();
        let (mut claim, _) = PodLock::take(run.path(), ROOT.as_ref(), &pod).expect("the pod is free");
        let directory = claim.directory().to_owned();
        assert!(claim.is_in_place());
        std::fs::remove_dir_all(&directory).expect("deleted");
        assert!(!claim.is_in_place() && !is_held(&directory));
        claim.take_again().expect("the pod is free");
        claim.record(&Directories::default(), &[], &[]).expect("written");
        assert!(claim.is_in_place() && is_held(&directory));
        assert_eq!(PodLockRecord::read(&directory).expect("a record").pid, std::process::id());

        std::fs::remove_dir_all(&directory).expect("deleted");
        let (other, _) = PodLock::take(run.path(), ROOT.as_ref(), &pod).expect("the lock file is another one");
        let refused = claim.take_again().expect_err("the other one has it").to_string();
        assert!(refused.contains("is already served by podfs"), "{refused}");
        drop(other);
        drop(claim);
        assert_eq!(std::fs::read_dir(run.path()).expect("a listing").count(), 0);
    }

    #[test]
    fn claims_that_come_and_go_never_meet_a_missing_directory() {
        let run = tempfile::tempdir().expect("a directory");
        let pod = PodIdentity::placeholder();
        let come_and_go = || {
            for _ in 0..200 {
                match PodLock::take(run.path(), ROOT.as_ref(), &pod) {
                    Ok(claim) => drop(claim),
                    Err(PodLockError::Taken { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(come_and_go))));
        assert_eq!(std::fs::read_dir(run.path()).expect("a listing").count(), 0);
    }
}
