//! Files in the pod's directory that containers mount besides volumes: `/etc/hosts`, and a file for the termination message of
//! each start of a container. podfs records the files in the pod's lock file before it makes them, and removes them with the
//! pod.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::rand::{GetRandomFlags, getrandom};

use super::mount_points::{MountPoints, MountPointsError};

/// The kubelet's name of the pod's hosts file, in the pod's directory.
const HOSTS: &str = "etc-hosts";
/// The kubelet's name of the directory, in the pod's directory, that has a directory for each container.
const CONTAINERS: &str = "containers";
/// The mode of the hosts file: all users of a container may read it, and the container's root may write it.
const HOSTS_MODE: u32 = 0o644;
/// The mode of a termination message: every user may write it, because any user of the container may do so. The mode of the
/// directory above keeps other users of the node out (MT-08).
const LOG_MODE: u32 = 0o666;

/// Why a file cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ContainerFileError {
    /// The directory of the file cannot be made, or the file cannot be recorded.
    #[error(transparent)]
    MountPoints(#[from] MountPointsError),
    /// The file cannot be written.
    #[error("cannot write {}: {cause}", .path.display())]
    Write {
        /// The path of the file.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        cause: io::Error,
    },
}

/// The files of one pod.
pub(in crate::supervisor) struct ContainerFiles<'a> {
    /// The pod's directory, without symbolic links.
    pub(in crate::supervisor) pod: &'a Path,
    /// The record of the files. A thread holds its lock while it makes a directory, but not while it writes a file.
    pub(in crate::supervisor) mount_points: &'a Mutex<MountPoints>,
}

impl ContainerFiles<'_> {
    /// Writes the pod's hosts file again, in place, because running containers have it mounted. The text replaces what a container
    /// wrote to the file (MT-08). Returns the path of the file.
    ///
    /// # Errors
    /// When the file cannot be written or recorded.
    pub(in crate::supervisor) fn write_hosts(&self, text: &[u8]) -> Result<PathBuf, ContainerFileError> {
        let path = self.pod.join(HOSTS);
        self.lock().prepare_written(&path)?;
        let written = open(&path, false).and_then(|mut file| {
            file.set_permissions(Permissions::from_mode(HOSTS_MODE))?;
            replace(&mut file, text)
        });
        written.map_err(|cause| ContainerFileError::Write { path: path.clone(), cause })?;
        Ok(path)
    }

    /// Makes an empty file for the termination message of a container that is about to start, and returns the path of the file.
    /// Keeps the file of the container's last start, and removes the files of earlier starts.
    ///
    /// # Errors
    /// When the file cannot be made or recorded.
    pub(in crate::supervisor) fn make_termination_log(&self, container: &str) -> Result<PathBuf, ContainerFileError> {
        let directory = self.pod.join(CONTAINERS).join(container);
        let mut earlier = self.lock().written_below(&directory);
        earlier.pop();
        self.lock().remove_written(&earlier, &self.pod.join(CONTAINERS))?;
        loop {
            let path = directory.join(format!("{:08x}", random().map_err(|cause| self.failed(&directory, cause))?));
            self.lock().prepare_written(&path)?;
            match open(&path, true).and_then(|file| file.set_permissions(Permissions::from_mode(LOG_MODE))) {
                Ok(()) => return Ok(path),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(cause) => return Err(ContainerFileError::Write { path, cause }),
            }
        }
    }

    /// Removes the termination messages of this container. Without a container, removes those of all containers, and the hosts
    /// file.
    ///
    /// # Errors
    /// When the record cannot be written.
    pub(in crate::supervisor) fn remove(&self, container: Option<&str>) -> Result<(), ContainerFileError> {
        let containers = self.pod.join(CONTAINERS);
        let directory = container.map_or_else(|| self.pod.to_owned(), |container| containers.join(container));
        let mut mount_points = self.lock();
        let files = mount_points.written_below(&directory);
        Ok(mount_points.remove_written(&files, &containers)?)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, MountPoints> {
        self.mount_points.lock().expect("a thread that panics ends the process")
    }

    fn failed(&self, path: &Path, cause: io::Error) -> ContainerFileError {
        ContainerFileError::Write { path: path.to_owned(), cause }
    }
}

/// Opens a file for reading and writing, without following a symbolic link. Makes it if it is missing. Fails if it exists and
/// `is_new` is set.
fn open(path: &Path, is_new: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    if is_new {
        options.create_new(true)
    } else {
        options.create(true).truncate(false)
    };
    options.open(path)
}

/// Replaces the content of a file. Does not write the same content again, because a program of another container may read the
/// file at the same moment.
fn replace(file: &mut File, text: &[u8]) -> io::Result<()> {
    let mut current = Vec::new();
    Read::by_ref(file).take(text.len() as u64 + 1).read_to_end(&mut current)?;
    if current == text {
        return Ok(());
    }
    file.rewind()?;
    file.write_all(text)?;
    file.set_len(text.len() as u64)
}

fn random() -> io::Result<u32> {
    let mut bytes = [0; 4];
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(u32::from_ne_bytes(bytes))
}
