//! Files of the pod's directory that containers mount beside volumes: `/etc/hosts`, and a file for the termination
//! message of each start of a container. podfs records them in the claim before it makes them, and removes them with
//! the pod.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::rand::{GetRandomFlags, getrandom};

use super::mount_points::{MountPoints, MountPointsError};

/// The kubelet's name of the pod's hosts file, in the pod's directory.
const HOSTS: &str = "etc-hosts";
/// The kubelet's name of the directory with one directory for each container.
const CONTAINERS: &str = "containers";
/// All users of the container may read the hosts file, and its root may write it.
const HOSTS_MODE: u32 = 0o644;
/// Writable for every user, because the container's user writes its message; the directory keeps other users of the node out
/// (MT-08).
const LOG_MODE: u32 = 0o666;

/// Why a file cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ContainerFileError {
    /// Its directory cannot be made, or the file cannot be recorded.
    #[error(transparent)]
    MountPoints(#[from] MountPointsError),
    /// The file cannot be written.
    #[error("cannot write {}: {cause}", .path.display())]
    Write {
        /// Its path.
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
    /// The record. Locked while a directory is made, never while a file is written.
    pub(in crate::supervisor) mount_points: &'a Mutex<MountPoints>,
}

impl ContainerFiles<'_> {
    /// Writes the pod's hosts file again, in place: running containers have it mounted. What a container wrote to it is
    /// lost (MT-08). Returns its path.
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

    /// Makes an empty file for the termination message of a container that is about to start, and returns its path.
    /// Keeps the file of its last start, and removes earlier ones.
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

    /// Removes the termination messages of this container; without one, all of them and the hosts file.
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

/// Replaces the content of a file. Does not write the same content again: a program of another container may read it.
fn replace(file: &mut File, text: &[u8]) -> io::Result<()> {
    let mut before = Vec::new();
    Read::by_ref(file).take(text.len() as u64 + 1).read_to_end(&mut before)?;
    if before == text {
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
