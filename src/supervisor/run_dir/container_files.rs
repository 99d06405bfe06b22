//! Files of the pod's directory that containers mount beside volumes: `/etc/hosts`, and a file for the termination message of
//! each start of a container. They are recorded in the claim before they are made, and go with the pod.

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
/// Everybody in the container may read the hosts file, and its root may write it.
const HOSTS_MODE: u32 = 0o644;
/// Writable for every user, because the container's user writes its message; the directory keeps other users of the node out
/// (MT-08).
const LOG_MODE: u32 = 0o666;

/// Why a file cannot be there.
#[derive(Debug, thiserror::Error)]
pub enum ContainerFileError {
    /// Its directory, or the note of it.
    #[error(transparent)]
    MountPoints(#[from] MountPointsError),
    /// The file itself.
    #[error("cannot write {}: {cause}", .path.display())]
    Write {
        /// Where.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        cause: io::Error,
    },
}

/// The files of one pod.
pub(in crate::supervisor) struct ContainerFiles<'a> {
    /// The pod's directory, without symbolic links.
    pub(in crate::supervisor) pod: &'a Path,
    /// Where they are written down. Locked while a directory is made, never while a file is written.
    pub(in crate::supervisor) mount_points: &'a Mutex<MountPoints>,
}

impl ContainerFiles<'_> {
    /// Writes the pod's hosts file anew, in place: containers that run have it mounted, and what one of them wrote is lost
    /// (MT-08). Gives where it is.
    ///
    /// # Errors
    /// When it cannot be written, or written down.
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

    /// Makes an empty file for the termination message of a container that is about to start. That of its last start stays,
    /// those before go. Gives where it is.
    ///
    /// # Errors
    /// When it cannot be made, or written down.
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
    /// When nothing can be written down.
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

/// Gives a file this content. A file that has it already is not touched: a program of another container may read it.
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
