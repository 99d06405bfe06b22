//! One supervisor per pod: a locked file in the pod's run directory, the claim on the pod.
//!
//! The lock, not a process id, shows whether a supervisor serves the pod. The kernel releases the lock when the supervisor that
//! holds it ends. A process id may belong to another program by then. The file records what the supervisor has made.

#[cfg(test)]
mod tests;

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use podfs_fuse::caller::ending::is_exiting;
use podfs_fuse::mount::MountError;
use podfs_fuse::mount::directories::Directories;
use serde_json::Value;
use tracing::warn;

use super::bounds::{Bounds, OUTSIDE, path_exists};
use super::defined_volume::DefinedVolume;
use super::file_names::{CONTROL, COUNTS, DISKS, LOCK, NEXT_COUNTS, NEXT_SERVER, SERVER, UNREADABLE};
use super::record::{PodLockRecord, RecordWriter};
use super::server_socket;
use super::timed_lock::is_still_at;
use super::trust::{self, Untrusted};
use super::volumes_lock::{VolumesLock, VolumesTaken};
use crate::manifest::pod::PodIdentity;
use crate::types::{PodName, UnusableRecord};

/// Most bytes of a path.
const LONGEST_PATH: usize = libc::PATH_MAX as usize - 1;

/// How long podfs waits for a lock although the recorded supervisor has ended. Another process holds the lock then, because it
/// cleans up after that supervisor, or reads its record.
const CLEANING: Duration = Duration::from_secs(3);

/// Why a pod cannot be claimed.
#[derive(Debug, thiserror::Error)]
pub enum PodLockError {
    /// Another supervisor serves the pod.
    #[error("pod {uid} is already served by podfs (pid {pid}); stop that one first")]
    Taken {
        /// The uid of the pod.
        uid: String,
        /// The process id of the other supervisor.
        pid: u32,
    },
    /// A server that lives shows the pod's volumes below another root directory. If podfs went on, they would be dead.
    #[error(
        "the volumes of pod {uid} are mounted elsewhere, such as at {}; start podfs with the --root-dir with which it has mounted them",
        .mount.display()
    )]
    Elsewhere {
        /// The uid of the pod.
        uid: String,
        /// One of the mount points.
        mount: Box<Path>,
    },
    /// The record is one that this version of podfs does not know.
    #[error("podfs neither serves nor cleans up pod {uid}, because it cannot use the record in {}: {cause}", .path.display())]
    OtherVersion {
        /// The uid of the pod.
        uid: String,
        /// The lock file.
        path: PathBuf,
        /// The reason.
        #[source]
        cause: UnusableRecord,
    },
    /// The record has the definition of a volume that this version of podfs cannot read.
    #[error(
        "podfs does not serve pod {uid}, because it cannot read the definition of a volume in {}: {cause}; use the podfs that wrote it, \
         or remove the volumes of the pod with podfs cleanup when no container uses them",
        .path.display()
    )]
    Definition {
        /// The uid of the pod.
        uid: String,
        /// The lock file.
        path: PathBuf,
        /// The reason.
        #[source]
        cause: serde_json::Error,
    },
    /// The paths of the pod's sockets are too long for the kernel.
    #[error(
        "the run directory has too long a path: the pod's sockets in it have paths of {length} bytes, and Linux takes \
         {LONGEST_PATH}; choose a shorter --run-dir"
    )]
    TooLong {
        /// The bytes of the longest of these paths.
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

/// The right to serve a pod. Dropping it removes the lock file, unless that has the record of an earlier podfs: only
/// [`PodLock::remove_record`] removes such a record.
#[derive(Debug)]
pub struct PodLock {
    pod: PodName,
    path: PathBuf,
    /// The lock on the directory of the pod's volumes. It ends before the claim does, so the next podfs gets both.
    volumes: Option<VolumesLock>,
    lock: Flock<File>,
    /// Writes the record to the lock file.
    writer: RecordWriter,
    // Dropping these removes the directories, after `drop` has removed the files in them. `run` comes first, because the
    // directories that this process made are inside those that earlier ones made.
    /// The directories that this process has made for the lock file.
    run: Directories,
    /// The directories that earlier processes have made for the lock file.
    inherited_run: Directories,
    /// The cgroup of the pod's server, to record.
    cgroup: Option<PathBuf>,
    /// The definitions of the pod's volumes, to record.
    definitions: Vec<Value>,
    /// Whether the drop leaves the lock file, with the record. It does from the start if an earlier podfs has left a record.
    leaves_record: bool,
}

/// The leftovers of a podfs that was killed, for the next podfs that claims the pod.
#[derive(Debug, Default)]
pub struct PodLeftovers {
    /// The directories and mount point files that the killed podfs had made for the pod.
    pub directories: Directories,
    /// The paths on which it had mounted something, or was about to.
    pub mounts: Vec<PathBuf>,
    /// The files that it had written for containers.
    pub written: Vec<PathBuf>,
    /// The definitions of the volumes that it served.
    pub definitions: Vec<DefinedVolume>,
}

/// Whether a process holds the claim on the pod with this run directory.
pub fn is_held(directory: &Path) -> bool {
    let Ok(file) = trust::open(OpenOptions::new().read(true), &directory.join(LOCK)) else { return false };
    matches!(Flock::lock(file, FlockArg::LockSharedNonblock), Err((_, Errno::EWOULDBLOCK)))
}

impl PodLock {
    /// Claims the pod, whose volumes are below the root directory. Returns the claim, and the leftovers of a podfs that was killed.
    ///
    /// # Errors
    /// When another process holds the claim, the record of an earlier podfs has another version, or the run directory cannot be
    /// written.
    pub fn take(
        run_directory: &Path,
        root_directory: &Path,
        pod: &PodIdentity,
    ) -> Result<(Self, PodLeftovers), PodLockError> {
        let PodIdentity { namespace, name, uid } = pod;
        let directory = run_directory.join(uid.as_str());
        // The record must have absolute paths: the next podfs may have another working directory.
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
            // In a directory such as /tmp, another user may have made the pod's directory first.
            trust::check(&directory)?;
            let mut options = OpenOptions::new();
            let file = match trust::open(options.read(true).write(true).create(true).truncate(false), &path) {
                // A supervisor that ends at this moment has removed the directory.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                opened => opened.map_err(failed)?,
            };
            let mut lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => lock,
                Err((mut file, Errno::EWOULDBLOCK)) => {
                    let pid = read(&mut file).pid;
                    // A parent may not have taken the status of the ended supervisor yet.
                    if is_exiting(pid) && Instant::now() < until {
                        sleep(Duration::from_millis(5));
                        continue;
                    }
                    return Err(PodLockError::Taken { uid: uid.to_string(), pid });
                }
                Err((_, errno)) => return Err(failed(errno.into())),
            };
            // If a supervisor ended between the open and the lock, it has removed this file. Then podfs tries again.
            if is_still_at(&lock, &path) {
                let other_version =
                    |cause| PodLockError::OtherVersion { uid: uid.to_string(), path: path.clone(), cause };
                PodLockRecord::check_version(&directory).map_err(other_version)?;
                let mut record = read_or_keep(&mut lock, &directory).map_err(failed)?;
                let defined = DefinedVolume::of_record(record.definitions.clone());
                let unreadable = |cause| PodLockError::Definition { uid: uid.to_string(), path: path.clone(), cause };
                let defined = defined.map_err(unreadable)?;
                let bounds = Bounds::new(&directory, root_directory).map_err(failed)?;
                let mounts = record.mounts.clone();
                let outside: Vec<_> =
                    bounds.apply(&mut record).into_iter().filter(|other| path_exists(other)).collect();
                let elsewhere = mounts.into_iter().find(|mount| outside.contains(mount));
                if let Some(mount) = elsewhere.filter(|_| has_server(&directory)) {
                    return Err(PodLockError::Elsewhere { uid: uid.to_string(), mount: mount.into() });
                }
                report_outside(&path, &outside);
                // The podfs that gives up the claim removes the pod's run directory, whichever process has made it.
                if !record.run.contains(&directory) && !run.made().contains(&directory) {
                    record.run.push(directory);
                }
                let directories = Directories::inherit(record.directories, record.files);
                let inherited_run = Directories::inherit(record.run, Vec::new());
                let pod = PodName { namespace: namespace.clone(), name: name.clone() };
                // Until the caller has removed what the record names, only the record leads to it.
                let leaves_record = record.pid != 0;
                let (cgroup, definitions) = (record.cgroup, record.definitions);
                let path = path.clone();
                let writer = RecordWriter::default();
                let mut claim = Self {
                    pod,
                    path,
                    volumes: None,
                    lock,
                    writer,
                    run,
                    inherited_run,
                    cgroup,
                    definitions,
                    leaves_record,
                };
                claim.record(&directories, &record.mounts, &record.written).map_err(failed)?;
                let PodLockRecord { mounts, written, .. } = record;
                return Ok((claim, PodLeftovers { directories, mounts, written, definitions: defined }));
            }
        }
    }

    /// Claims the leftovers of a dead podfs. `directory` is the pod's run directory. Returns the claim and the record, which is
    /// empty if the lock file has no valid one. Makes nothing and writes nothing. Dropping the claim removes the record, unless
    /// [`PodLock::leave_record`] is called.
    ///
    /// # Errors
    /// When another process holds the claim, there is no lock file, or its record has another version.
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
        let uid = || directory.file_name().unwrap_or_default().display().to_string();
        let other_version = |cause| PodLockError::OtherVersion { uid: uid(), path: path.clone(), cause };
        PodLockRecord::check_version(directory).map_err(other_version)?;
        let record = PodLockRecord::read(directory).unwrap_or_default();
        let mut inherited_run = record.run.clone();
        inherited_run.retain(|run| directory.starts_with(run));
        if !inherited_run.iter().any(|run| run == directory) {
            inherited_run.push(directory.to_owned());
        }
        let inherited_run = Directories::inherit(inherited_run, Vec::new());
        let run = Directories::default();
        let (pod, cgroup) = (record.pod.clone(), record.cgroup.clone());
        let (writer, definitions) = (RecordWriter::default(), Vec::new());
        let leaves_record = false;
        let claim =
            Self { pod, path, volumes: None, lock, writer, run, inherited_run, cgroup, definitions, leaves_record };
        Ok((claim, record))
    }

    /// Locks the directory of the pod's volumes, if it exists; otherwise [`PodLock::wait_for_volumes`] does.
    ///
    /// # Errors
    /// When another podfs has locked the directory.
    pub fn lock_volumes(&mut self, directory: &Path) -> Result<(), VolumesTaken> {
        self.volumes.insert(VolumesLock::new(directory)).lock()
    }

    /// Locks the directory of the pod's volumes, if it is not locked yet. Waits a moment for a podfs that ends.
    ///
    /// # Errors
    /// When another podfs has locked the directory.
    pub fn wait_for_volumes(&mut self) -> Result<(), VolumesTaken> {
        // podfs node may look at the directory in this moment, and remove it if it is empty.
        let until = Instant::now() + CLEANING;
        self.volumes.as_mut().map_or(Ok(()), |volumes| volumes.lock_until(until))
    }

    /// Records the paths that were made for the pod's volumes: if this process is killed, the pod's next podfs removes them.
    ///
    /// # Errors
    /// When the lock file cannot be written. It keeps its record then, or has this one.
    pub fn record(&mut self, directories: &Directories, mounts: &[PathBuf], written: &[PathBuf]) -> io::Result<()> {
        let record = PodLockRecord {
            edition: 0,
            pid: std::process::id(),
            pod: self.pod.clone(),
            run: [self.inherited_run.made(), self.run.made()].concat(),
            directories: directories.made().to_vec(),
            files: directories.files().to_vec(),
            mounts: mounts.to_vec(),
            written: written.to_vec(),
            cgroup: self.cgroup.clone(),
            definitions: self.definitions.clone(),
        };
        self.writer.write(&self.lock, record)
    }

    /// Whether the locked file is still at its path. Another process may have deleted it, or the run directory.
    pub fn is_in_place(&self) -> bool {
        is_still_at(&self.lock, &self.path)
    }

    /// Claims the pod again after another process has deleted its lock file or run directory. The caller has to call
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
        self.writer.change_file();
        Ok(())
    }

    /// The pod's run directory.
    pub fn directory(&self) -> &Path {
        self.path.parent().expect("the lock file is in it")
    }

    /// The recorded cgroup: that of the pod's server, or of the last server of the pod.
    pub fn cgroup(&self) -> Option<&Path> {
        self.cgroup.as_deref()
    }

    /// Sets the server's cgroup, for the next record.
    pub fn set_cgroup(&mut self, cgroup: Option<&Path>) {
        self.cgroup = cgroup.map(Path::to_owned);
    }

    /// Sets the definitions of the volumes, for the next record. Returns those before.
    pub fn set_definitions(&mut self, definitions: Vec<Value>) -> Vec<Value> {
        std::mem::replace(&mut self.definitions, definitions)
    }

    /// Gives the claim up, and removes the record.
    pub fn remove_record(mut self) {
        self.leaves_record = false;
    }

    /// Gives the claim up, and leaves the record.
    pub fn leave_record(mut self) {
        self.leaves_record = true;
    }
}

/// Whether a server listens in this run directory.
fn has_server(directory: &Path) -> bool {
    server_socket::connect(directory).is_ok()
}

/// Reports recorded paths that lie elsewhere, in one line however many they are.
fn report_outside(lock: &Path, outside: &[PathBuf]) {
    let (lock, first) = (lock.display(), outside.first().map(|first| first.display()));
    match (first, outside.len()) {
        (None, _) => {}
        (Some(first), 1) => warn!("{lock} names {first}, which {OUTSIDE}; podfs leaves it alone"),
        (Some(first), paths) => warn!(
            "{lock} names {paths} paths such as {first}, each of which {OUTSIDE}; podfs leaves them alone. If an earlier podfs of the \
             pod had another --root-dir, podfs cleanup with that --root-dir unmounts what it has left"
        ),
    }
}

impl Drop for PodLock {
    fn drop(&mut self) {
        // Another podfs may have claimed the pod after the run directory was deleted. These are its files then.
        let is_of_other = !self.is_in_place() && path_exists(&self.path);
        if self.leaves_record || is_of_other {
            return;
        }
        let _ = std::fs::remove_file(self.directory().join(SERVER));
        let _ = std::fs::remove_file(self.directory().join(NEXT_SERVER));
        let _ = std::fs::remove_file(self.directory().join(CONTROL));
        let _ = std::fs::remove_file(self.directory().join(COUNTS));
        let _ = std::fs::remove_file(self.directory().join(NEXT_COUNTS));
        let _ = std::fs::remove_file(self.directory().join(DISKS));
        // This removes the file while it is still locked. A process that locks it later notices that it is deleted.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The record in the file; an empty record while another process writes the file, and if the file has no valid record.
fn read(file: &mut File) -> PodLockRecord {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).ok().and_then(|_| PodLockRecord::parse(&bytes).ok()).unwrap_or_default()
}

/// The record in the locked file of this directory. If the file has no valid record, keeps its content as [`UNREADABLE`], and
/// returns an empty record: the caller writes its own record next.
fn read_or_keep(file: &mut File, directory: &Path) -> io::Result<PodLockRecord> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    PodLockRecord::parse(&bytes).or_else(|error| {
        let copy = directory.join(UNREADABLE);
        std::fs::write(&copy, &bytes)?;
        warn!(
            "podfs cannot read the record of an earlier podfs in {} ({error}), and keeps it as {}; unmount and remove the paths \
             in it that the pod does not use, then remove it",
            directory.join(LOCK).display(),
            copy.display()
        );
        Ok(PodLockRecord::default())
    })
}
