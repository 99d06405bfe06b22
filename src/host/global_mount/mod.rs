//! A global mount: a mount of the node that several pods share. podfs makes it for the first of these pods, and unmounts it after
//! the last.
//!
//! podfs mounts a file system on a block device once, and makes a CSI driver stage a volume once, however many pods use it. Each
//! pod has a supervisor of its own. The supervisors record in files which pods use the mount:
//!
//! ```text
//! ROOT/plugins/podfs/global-mounts/PLUGIN/NAME/lock         the lock for each change of these files and of the mount
//! ROOT/plugins/podfs/global-mounts/PLUGIN/NAME/users/UID    the record of a user, a pod that uses the mount
//! ```
//!
//! A mount that a driver of another vendor makes has these files in the driver's staging directory, see `driver::NodeMount`.
//!
//! 1. podfs writes the file of a user before it makes the mount for that pod, and removes the file after the unmount. So if a
//!    process is killed at any step, the file stays, and the next podfs of the pod, or a cleanup, removes the mount and the file.
//! 2. A user counts while the claim of its pod exists and the machine has not rebooted. So the file need not reach the disk, and
//!    the file of a dead pod does not prevent the unmount.
//! 3. The lock is a lock of an open file (`flock(2)`). A program that works on the mount inherits that open file as its standard
//!    input ([`LockedGlobalMount::program_input`]). If the process that started the program is killed, the lock lasts until the
//!    program has ended, and no other process touches the device meanwhile.
//! 4. The process that holds the lock may remove the lock file with its directory. A process that waited for the lock checks
//!    whether the file that it has locked is still at the path, and begins again if it is not.
//!
//! The caller mounts and unmounts, in the function that it passes to [`GlobalMount::enter`] or [`GlobalMount::leave`]. The function
//! must be idempotent, because a killed process may have done the same work already.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use podfs_fuse::mount::table::mounts_at;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::HostError;
use crate::types::{is_blank, parse_record};

/// The directory for the records of all global mounts, relative to the root directory.
const RECORDS: &str = "plugins/podfs/global-mounts";
const LOCK: &str = "lock";
const USERS: &str = "users";
/// The file with the kernel's id of the current boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A mount of the node that several pods use.
#[derive(Clone, Debug)]
pub struct GlobalMount {
    /// The directory of the lock and of the users' files.
    records: PathBuf,
    /// The mount point.
    mount_point: PathBuf,
    /// How many directories podfs removes after the last user, if they are empty: `records` and directories above it.
    removed: usize,
}

/// A pod that uses a global mount.
#[derive(Clone, Copy, Debug)]
pub struct GlobalMountUser<'a> {
    /// The pod's uid, or its uid and the name of its volume; safe as a path element.
    pub uid: &'a str,
    /// A file that exists as long as the pod may use the mount: the pod's lock file, or the record of its volume.
    pub claim: &'a Path,
}

/// A global mount whose lock this process holds. No other process enters or leaves the mount meanwhile.
#[derive(Debug)]
pub struct LockedGlobalMount<'a> {
    mount: &'a GlobalMount,
    lock: File,
}

/// The content of a user's file.
#[derive(Serialize, Deserialize)]
struct UserRecord {
    /// The id of the boot in which the file was written.
    boot: String,
    claim: PathBuf,
}

impl GlobalMount {
    /// The mount of `name` at `mount_point`, with its records below the root directory `root`. `plugin` and `name` are safe as path
    /// elements. No other mount has the same `plugin` and `name`.
    pub fn new(root: &Path, plugin: &str, name: &str, mount_point: PathBuf) -> GlobalMount {
        let removed = RECORDS.split('/').count() + 2;
        GlobalMount { records: root.join(RECORDS).join(plugin).join(name), mount_point, removed }
    }

    /// The mount at `mount_point`, with its records in the directory `records`, which podfs removes after the last user.
    pub fn with_records(records: PathBuf, mount_point: PathBuf) -> GlobalMount {
        GlobalMount { records, mount_point, removed: 1 }
    }

    /// The names of a plugin's global mounts that have records. With a `uid`, only the mounts that this pod uses.
    pub fn names(root: &Path, plugin: &str, uid: Option<&str>) -> Vec<String> {
        let entries = fs::read_dir(root.join(RECORDS).join(plugin)).into_iter().flatten().flatten();
        let used = |path: PathBuf| uid.is_none_or(|uid| user_files(&path, uid).iter().any(|file| file.exists()));
        entries.filter(|entry| used(entry.path())).filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }

    /// Removes the empty directories above the records of a plugin's mounts. A process that was killed while it removed records may
    /// have left them.
    pub fn remove_empty(root: &Path, plugin: &str) {
        remove_upwards(&root.join(RECORDS).join(plugin), RECORDS.split('/').count() + 1);
    }

    /// The mount point.
    pub fn mount_point(&self) -> &Path {
        &self.mount_point
    }

    /// Whether the pod is a recorded user.
    pub fn has_user(&self, uid: &str) -> bool {
        user_files(&self.records, uid).iter().any(|file| file.exists())
    }

    /// Whether there is no recorded user.
    pub fn has_no_user(&self) -> bool {
        fs::read_dir(self.records.join(USERS)).map_or(true, |mut users| users.next().is_none())
    }

    /// Makes the pod a user, and then calls `mount`, which mounts, or does nothing if the mount exists already. Waits while
    /// another process works on the mount.
    ///
    /// # Errors
    /// Those of `mount`. If nothing is mounted then, the pod does not become a user. Or the records cannot be written.
    pub fn enter<T>(
        &self,
        user: GlobalMountUser<'_>,
        mount: impl FnOnce(&LockedGlobalMount<'_>) -> Result<T, HostError>,
    ) -> Result<T, HostError> {
        let held = self.hold()?;
        let is_new = !self.has_user(user.uid);
        held.add(user)?;
        let mounted = mount(&held);
        if mounted.is_err() && is_new && !held.is_mounted().unwrap_or(true) {
            held.forget(user.uid);
            held.remove_records();
        }
        mounted
    }

    /// Ends the pod's use of the mount. If no other user counts, calls `unmount` first, which unmounts, or does nothing if nothing
    /// is mounted. The pod need not be a user.
    ///
    /// # Errors
    /// Those of `unmount`; then the pod is still a user, and can leave again. Or the records cannot be read or written.
    pub fn leave(
        &self,
        uid: &str,
        unmount: impl FnOnce(&LockedGlobalMount<'_>) -> Result<(), HostError>,
    ) -> Result<(), HostError> {
        self.hold()?.leave(uid, unmount)
    }

    /// As [`Self::leave`], but does not wait while another process works on the mount.
    ///
    /// # Errors
    /// As [`Self::leave`], or when another process works on the mount.
    pub fn leave_at_once(
        &self,
        uid: &str,
        unmount: impl FnOnce(&LockedGlobalMount<'_>) -> Result<(), HostError>,
    ) -> Result<(), HostError> {
        self.try_hold()?.ok_or_else(|| self.in_use())?.leave(uid, unmount)
    }

    /// Calls `unmount` if no user counts any more. Returns `false`, and calls nothing, if another process works on the mount. A
    /// program such as fsck may do that for hours.
    ///
    /// # Errors
    /// As [`Self::leave`].
    pub fn sweep(
        &self,
        unmount: impl FnOnce(&LockedGlobalMount<'_>) -> Result<(), HostError>,
    ) -> Result<bool, HostError> {
        let Some(held) = self.try_hold()? else { return Ok(false) };
        if held.other_users("")?.is_empty() {
            unmount(&held)?;
            held.remove_records();
        }
        Ok(true)
    }

    /// The error that another process works on the mount, with the names of the recorded users.
    pub fn in_use(&self) -> HostError {
        let entries = fs::read_dir(self.records.join(USERS)).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let mut users: Vec<_> = names.filter(|name| !is_unfinished(name)).collect();
        users.sort();
        let users = match &users[..] {
            [] => "another podfs".to_owned(),
            [user] => format!("pod {user}"),
            users => format!("pods {}", users.join(", ")),
        };
        HostError::Refused(format!(
            "it is in use by {users}: podfs, or a program such as mkfs or fsck, works on it now; podfs leaves it until that has ended"
        ))
    }

    /// Takes the lock. Waits while another process has it.
    ///
    /// # Errors
    /// When the records cannot be made.
    pub fn hold(&self) -> Result<LockedGlobalMount<'_>, HostError> {
        Ok(self.lock(FlockOperation::LockExclusive)?.expect("flock(2) waits"))
    }

    /// Takes the lock, unless another process has it.
    ///
    /// # Errors
    /// When the records cannot be made.
    fn try_hold(&self) -> Result<Option<LockedGlobalMount<'_>>, HostError> {
        self.lock(FlockOperation::NonBlockingLockExclusive)
    }

    fn lock(&self, operation: FlockOperation) -> Result<Option<LockedGlobalMount<'_>>, HostError> {
        let failed = |cause: io::Error| HostError::system("lock", &self.records, cause);
        let path = self.records.join(LOCK);
        loop {
            if !self.make_records().map_err(failed)? {
                continue;
            }
            let lock =
                match OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path) {
                    // Another process has removed the directory at this moment, for the last user.
                    Err(cause) if cause.kind() == ErrorKind::NotFound => continue,
                    opened => opened.map_err(failed)?,
                };
            while let Err(errno) = flock(&lock, operation) {
                match errno {
                    Errno::INTR => {}
                    Errno::WOULDBLOCK => return Ok(None),
                    errno => return Err(failed(errno.into())),
                }
            }
            let locked = lock.metadata().map_err(failed)?;
            let is_current = fs::metadata(&path).is_ok_and(|found| found.ino() == locked.ino());
            if is_current && self.make_records().map_err(failed)? {
                return Ok(Some(LockedGlobalMount { mount: self, lock }));
            }
        }
    }

    /// Makes the directories of the records. Returns `false` if another process has removed one of them at this moment.
    fn make_records(&self) -> io::Result<bool> {
        let users = self.records.join(USERS);
        let made = DirBuilder::new().recursive(true).mode(0o750).create(&users);
        let Err(cause) = made else { return Ok(true) };
        match cause.kind() {
            ErrorKind::NotFound => Ok(false),
            ErrorKind::AlreadyExists => match users.ancestors().find(|path| is_no_directory(path)) {
                Some(path) => Err(io::Error::other(format!("{} leads to no directory", path.display()))),
                // mkdir(2) found the directory, and another process removed it before the standard library's stat(2).
                None => Ok(false),
            },
            _ => Err(cause),
        }
    }
}

impl LockedGlobalMount<'_> {
    /// The mount point.
    pub fn mount_point(&self) -> &Path {
        &self.mount.mount_point
    }

    /// Whether anything is mounted at the mount point.
    ///
    /// # Errors
    /// When the mount table cannot be read.
    pub fn is_mounted(&self) -> io::Result<bool> {
        let Ok(mount_point) = self.mount.mount_point.canonicalize() else { return Ok(false) };
        Ok(!mounts_at(&mount_point)?.is_empty())
    }

    /// Ends the pod's use of the mount, as [`GlobalMount::leave`] describes.
    fn leave(
        self,
        uid: &str,
        unmount: impl FnOnce(&LockedGlobalMount<'_>) -> Result<(), HostError>,
    ) -> Result<(), HostError> {
        if self.other_users(uid)?.is_empty() {
            unmount(&self)?;
            self.forget(uid);
            self.remove_records();
        } else {
            self.forget(uid);
        }
        Ok(())
    }

    /// A descriptor of the lock file, for the standard input of a program that works on the mount. The lock lasts at least as long
    /// as the program. The file is empty.
    ///
    /// # Errors
    /// When this process has too many open files.
    pub fn program_input(&self) -> Result<OwnedFd, HostError> {
        let input = self.lock.try_clone().map_err(|cause| HostError::system("lock", &self.mount.records, cause))?;
        Ok(input.into())
    }

    /// The users that count, without `uid`. Removes the files of users that do not count any more. Also removes files that a killed
    /// process had not renamed yet: it had not mounted anything for its pod.
    ///
    /// # Errors
    /// When the records cannot be read, or only by another version of podfs.
    pub fn other_users(&self, uid: &str) -> Result<Vec<String>, HostError> {
        let users = self.mount.records.join(USERS);
        let failed = |cause: io::Error| HostError::system("read", &users, cause);
        let boot = boot_id().map_err(failed)?;
        let mut others = Vec::new();
        let own = user_files(&self.mount.records, uid);
        for entry in fs::read_dir(&users).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()).filter(|_| !own.contains(&path)) else {
                continue;
            };
            let counts = !is_unfinished(name) && counts(&path, &boot)?;
            if counts {
                others.push(name.to_owned());
            } else {
                fs::remove_file(&path).map_err(failed)?;
            }
        }
        Ok(others)
    }

    /// Makes a pod a user.
    ///
    /// # Errors
    /// When the user's file cannot be written.
    pub fn add(&self, user: GlobalMountUser<'_>) -> Result<(), HostError> {
        let users = self.mount.records.join(USERS);
        let path = users.join(user.uid);
        let write = || -> io::Result<()> {
            let record = UserRecord { boot: boot_id()?, claim: std::path::absolute(user.claim)? };
            write_whole(&path, &serde_json::to_vec(&record)?)
        };
        write().map_err(|cause| HostError::system("write", &path, cause))
    }

    /// Removes the user's file.
    pub fn forget(&self, uid: &str) {
        // If the file stays, the user still does not count once the pod's claim is gone.
        let _ = remove_whole(&self.mount.records.join(USERS).join(uid));
    }

    /// Removes the records if no user is recorded, and then the empty directories above them.
    pub fn remove_records(&self) {
        let records = &self.mount.records;
        if fs::remove_dir(records.join(USERS)).is_err() {
            return;
        }
        let _ = fs::remove_file(records.join(LOCK));
        remove_upwards(records, self.mount.removed);
    }
}

/// Whether the user with this file counts in this boot.
///
/// # Errors
/// When this version of podfs cannot read the file: the user may use the mount.
fn counts(path: &Path, boot: &str) -> Result<bool, HostError> {
    let bytes = match fs::read(path) {
        Err(cause) if cause.kind() == ErrorKind::NotFound => return Ok(false),
        read => read.map_err(|cause| HostError::system("read", path, cause))?,
    };
    // A file without content was not written to the disk when the machine stopped.
    if is_blank(&bytes) {
        return Ok(false);
    }
    let record: UserRecord = parse_record(&bytes).map_err(|error| {
        HostError::Refused(format!(
            "podfs cannot use the record {} of a pod that may use the mount: {error}; if the pod has gone, remove the file",
            path.display()
        ))
    })?;
    Ok(record.boot == boot && record.claim.exists())
}

/// Whether there is something at this path that is no directory, such as a symbolic link to a disk that is not mounted.
fn is_no_directory(path: &Path) -> bool {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => !path.is_dir(),
        Ok(found) => !found.is_dir(),
        Err(_) => false,
    }
}

/// The file of a user in these records, and the file that podfs writes first and renames to it. A process that is killed before
/// the rename leaves the second file.
fn user_files(records: &Path, uid: &str) -> [PathBuf; 2] {
    let file = records.join(USERS).join(uid);
    let unfinished = unfinished(&file);
    [file, unfinished]
}

/// Removes a directory and its parents, `count` in all, up to the first directory that is not empty. Ignores missing directories.
fn remove_upwards(directory: &Path, count: usize) {
    for directory in directory.ancestors().take(count) {
        match fs::remove_dir(directory) {
            Err(cause) if cause.kind() != ErrorKind::NotFound => return,
            _ => {}
        }
    }
}

/// Writes a file under another name, and renames it to `path`. So the file at `path` is complete, however this process ends.
///
/// # Errors
/// When it cannot be written.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace(path, bytes, false)
}

/// Removes a file that `write_whole` or [`write_synced`] has written, and the file of a process that was killed before the rename.
/// A missing file is no error.
///
/// # Errors
/// When one of these files cannot be removed.
pub fn remove_whole(path: &Path) -> io::Result<()> {
    for file in [path, &unfinished(path)] {
        match fs::remove_file(file) {
            Err(cause) if cause.kind() != ErrorKind::NotFound => return Err(cause),
            _ => {}
        }
    }
    Ok(())
}

/// Writes a file under another name, and renames it to `path`. Waits until both are on the disk. So the file at `path` is complete,
/// however the machine stops.
///
/// # Errors
/// When the file cannot be written.
pub fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace(path, bytes, true)
}

fn replace(path: &Path, bytes: &[u8], is_synced: bool) -> io::Result<()> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    let new = unfinished(path);
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(bytes)?;
    if is_synced {
        file.sync_all()?;
    }
    fs::rename(&new, path)?;
    if is_synced { File::open(parent)?.sync_all() } else { Ok(()) }
}

/// The path of the file that [`write_whole`] and [`write_synced`] write, and then rename to `path`.
pub fn unfinished(path: &Path) -> PathBuf {
    path.with_file_name(format!(".{}.new", path.file_name().unwrap_or_default().to_string_lossy()))
}

/// Whether a file has a name as [`unfinished`] makes it.
fn is_unfinished(name: &str) -> bool {
    name.starts_with('.') && name.ends_with(".new")
}

/// The kernel's id of the current boot.
///
/// # Errors
/// When the id cannot be read from `/proc`.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string(BOOT_ID)?.trim().to_owned())
}

#[cfg(test)]
mod tests;
