//! The content of emptyDirs. podfs makes it once, finds it again after a crash, and deletes it at the end of the pod.
//!
//! An emptyDir has a home, a directory with two entries: the directory `content`, and the file `ready`, which names the storage of
//! the content. podfs writes `ready` after it has made the content, and removes `ready` before it deletes the content. So content
//! without `ready` is incomplete, and podfs never deletes complete content by mistake. `ready` gets its name once it is written, so
//! a full disk leaves no part of it. If the content is on a disk, podfs also waits until `content` and `ready` are on the disk, before
//! a container can write to `content`. So podfs finds the content after a power loss. A third file, `agent`, marks content that stays
//! when a supervisor ends, and that `podfs node` deletes when the pod is gone.
//!
//! If `ready` has a word that only another version of podfs knows, or lost its word in a crash, the content may be complete. podfs
//! then refuses the volume until an operator has repaired `ready`, and deletes the content only at the end of the pod.

mod plan;

use std::ffi::CStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, Gid, Mode, OFlags, ResolveFlags, Uid, chmod, chownat, mkdirat, openat2};
use rustix::io::Errno;
use tracing::warn;

use super::delete::{UndeletedEntries, delete};
use super::{HostError, HostSource, memory};
use crate::types::is_blank;

pub use plan::{EmptyDirBacking, EmptyDirPlan, PlanError};

/// The names of the entries in a home.
const CONTENT: &CStr = c"content";
const READY: &str = "ready";
const NEXT_READY: &str = "ready.new";
const AGENT: &str = "agent";

/// The content of an emptyDir.
#[derive(Debug)]
pub struct EmptyDirContent {
    /// `None` for content that no later podfs finds, because it goes with the processes that have it open.
    home: Option<PathBuf>,
    source: HostSource,
    is_new: bool,
}

impl EmptyDirContent {
    /// Finds the content in the directory `home` if it is complete (ED-05). Otherwise makes it anew.
    ///
    /// # Errors
    /// When the content cannot be made, or incomplete content cannot be deleted.
    pub fn set_up(home: &Path, plan: &EmptyDirPlan) -> Result<EmptyDirContent, HostError> {
        let directory = File::open(home).map_err(|cause| HostError::system("open", home, cause))?;
        match ReadyMark::read(home).map_err(|cause| HostError::system("read", &home.join(READY), cause))? {
            ReadyMark::Storage(backing) if backing == plan.backing.to_string() => {
                match find(home, &directory, plan.backing)? {
                    Some(source) => return Ok(EmptyDirContent { home: Some(home.to_owned()), source, is_new: false }),
                    None => warn!("the content of {} is gone; podfs makes it anew", home.display()),
                }
            }
            ReadyMark::Storage(backing) => {
                warn!("the content of {} was on {backing}; podfs makes it anew", home.display());
            }
            ReadyMark::Missing => {}
            ReadyMark::Blank if is_without_files(&directory) => {}
            ReadyMark::Blank => return Err(unknown(home, "is empty, as after a crash of the node")),
            ReadyMark::Unknown(word) => {
                return Err(unknown(home, &format!("says {word:?}, which another version of podfs wrote")));
            }
        }
        let undeleted = clear(home, &directory)?;
        if !undeleted.is_empty() {
            let path = content_path(home);
            return Err(HostError::Refused(format!("{} has to be made anew, but {undeleted}", path.display())));
        }
        let made = make(home, &directory, plan).and_then(|source| mark_ready(home, &directory, plan).map(|()| source));
        let source = made.inspect_err(|_| match clear(home, &directory) {
            Ok(undeleted) if undeleted.is_empty() => {}
            Ok(undeleted) => warn!("podfs leaves in {} {undeleted}", home.display()),
            Err(error) => warn!("{error}"),
        })?;
        Ok(EmptyDirContent { home: Some(home.to_owned()), source, is_new: true })
    }

    /// Makes content of `bytes` bytes in memory without a home. It goes with the last process that has it open, however that ends.
    ///
    /// # Errors
    /// When the content cannot be made.
    pub fn of_processes(plan: &EmptyDirPlan, bytes: u64) -> Result<EmptyDirContent, HostError> {
        let made = memory::make_tmpfs(bytes).and_then(|root| set_owner(root, plan));
        let source = made.map_err(|errno| HostError::system("make", Path::new("a tmpfs"), errno))?;
        Ok(EmptyDirContent { home: None, source, is_new: true })
    }

    /// Records that an agent deletes the content after the end of the pod.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn leave_to_agent(&self) -> Result<(), HostError> {
        let Some(home) = &self.home else { return Ok(()) };
        let path = home.join(AGENT);
        if path.symlink_metadata().is_ok() {
            return Ok(());
        }
        // Like the content, the file survives a power loss.
        let written = File::create(&path).and_then(|_| File::open(home)?.sync_all());
        written.map_err(|cause| HostError::system("write", &path, cause))
    }

    /// The directory with the files, open.
    pub fn source(&self) -> &HostSource {
        &self.source
    }

    /// Whether [`EmptyDirContent::set_up`] made the content, and did not find it.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// Gives a tmpfs the size of the plan.
    ///
    /// # Errors
    /// When the files in the tmpfs take more.
    pub fn resize(&self, plan: &EmptyDirPlan) -> Result<(), HostError> {
        match plan.backing {
            EmptyDirBacking::Memory { bytes } => {
                let at = self.home.as_deref().map_or_else(PathBuf::new, content_path);
                memory::resize_tmpfs(&self.source, bytes, &at)
            }
            EmptyDirBacking::Disk | EmptyDirBacking::HugePages { .. } => Ok(()),
        }
    }

    /// Deletes the content. The home stays, and is empty if podfs could delete everything.
    ///
    /// # Errors
    /// When the home cannot be read.
    pub fn delete(self) -> Result<UndeletedEntries, HostError> {
        let EmptyDirContent { home, source, .. } = self;
        // A tmpfs cannot be unmounted while this descriptor is open.
        drop(source);
        let Some(home) = home else { return Ok(UndeletedEntries::default()) };
        let directory = File::open(&home).map_err(|cause| HostError::system("open", &home, cause))?;
        clear(&home, &directory)
    }
}

/// Deletes the content in `home`, and `home` itself if it is empty then. The caller has unmounted the volume.
///
/// # Errors
/// When the home cannot be read.
pub fn remove(home: &Path) -> Result<UndeletedEntries, HostError> {
    let directory = File::open(home).map_err(|cause| HostError::system("open", home, cause))?;
    let undeleted = clear(home, &directory)?;
    drop(directory);
    // Another process may have put a file beside the content.
    let _in_use = fs::remove_dir(home);
    Ok(undeleted)
}

/// Deletes the content in `home` if it is incomplete. The caller has unmounted the volume.
///
/// # Errors
/// When the home cannot be read.
pub fn remove_incomplete(home: &Path) -> Result<UndeletedEntries, HostError> {
    if has_content(home) { Ok(UndeletedEntries::default()) } else { remove(home) }
}

/// Whether `home` has complete content, or may have it.
pub fn has_content(home: &Path) -> bool {
    match ReadyMark::read(home) {
        Ok(ReadyMark::Missing) => false,
        Ok(ReadyMark::Blank) => !File::open(home).is_ok_and(|directory| is_without_files(&directory)),
        Ok(ReadyMark::Storage(_) | ReadyMark::Unknown(_)) | Err(_) => true,
    }
}

/// The content of the file `ready`.
enum ReadyMark {
    /// There is no file: the content is incomplete.
    Missing,
    /// The file has no word.
    Blank,
    /// The word for a storage that podfs knows.
    Storage(String),
    /// A word that this version of podfs does not know.
    Unknown(String),
}

impl ReadyMark {
    fn read(home: &Path) -> io::Result<ReadyMark> {
        let bytes = match fs::read(home.join(READY)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(ReadyMark::Missing),
            read => read?,
        };
        if is_blank(&bytes) {
            return Ok(ReadyMark::Blank);
        }
        // An operator's editor ends the line.
        let word = String::from_utf8_lossy(&bytes).trim_end().to_owned();
        Ok(if EmptyDirBacking::is_known(&word) { ReadyMark::Storage(word) } else { ReadyMark::Unknown(word) })
    }
}

/// The error about content that podfs must neither use nor delete, because of what `ready` says.
fn unknown(home: &Path, reason: &str) -> HostError {
    let ready = home.join(READY);
    HostError::Refused(format!(
        "podfs does not touch the content of {}, because {} {reason}; use the podfs that wrote it, or write the storage of the content \
         into that file, \"disk\" or \"memory\", or remove the file if the content may be deleted",
        home.display(),
        ready.display()
    ))
}

/// Whether an agent has to delete the content in `home` after the end of the pod.
pub fn is_left_to_agent(home: &Path) -> bool {
    home.join(AGENT).symlink_metadata().is_ok_and(|found| found.is_file())
}

/// Deletes the content in `home`, complete or not. Unmounts a tmpfs or hugetlbfs that is mounted on `content`, unless the content is
/// on a disk, or on a storage that only another version of podfs knows. Does not touch any other mount, nor the content below it
/// (ED-08).
fn clear(home: &Path, directory: &File) -> Result<UndeletedEntries, HostError> {
    let failed = |cause: io::Error| HostError::system("delete", &content_path(home), cause);
    let may_unmount = match ReadyMark::read(home) {
        Ok(ReadyMark::Storage(backing)) => backing != EmptyDirBacking::Disk.to_string(),
        Ok(ReadyMark::Unknown(_)) => false,
        Ok(ReadyMark::Missing | ReadyMark::Blank) | Err(_) => true,
    };
    loop {
        match mounted(directory) {
            Some(mounted) if memory::is_memory(&mounted) && may_unmount => {}
            Some(_) => return delete(directory.as_fd(), CONTENT).map_err(failed),
            None => break,
        }
        memory::take_off(&content_path(home)).map_err(failed)?;
    }
    for name in [READY, NEXT_READY] {
        match fs::remove_file(home.join(name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
    }
    let undeleted = delete(directory.as_fd(), CONTENT).map_err(failed)?;
    if undeleted.is_empty() {
        let _missing = fs::remove_file(home.join(AGENT));
    }
    Ok(undeleted)
}

/// The content, if it exists on this storage. An error says nothing about the content.
///
/// # Errors
/// When the content cannot be opened, for example because the process has no descriptors, and when another file system is mounted
/// on it.
fn find(home: &Path, directory: &File, backing: EmptyDirBacking) -> Result<Option<HostSource>, HostError> {
    let path = content_path(home);
    let failed = |errno: Errno| HostError::system("open", &path, errno);
    let found = match (open(directory, ResolveFlags::NO_XDEV), backing) {
        (Ok(found), EmptyDirBacking::Disk) => Some(found),
        (Err(Errno::XDEV), EmptyDirBacking::Memory { .. } | EmptyDirBacking::HugePages { .. }) => {
            Some(open(directory, ResolveFlags::empty()).map_err(failed)?).filter(|found| memory::is_memory(found))
        }
        (Err(Errno::XDEV), EmptyDirBacking::Disk) => None,
        // A tmpfs ends with the machine.
        (Ok(_), _) | (Err(Errno::NOENT), _) => return Ok(None),
        (Err(errno), _) => return Err(failed(errno)),
    };
    let Some(found) = found else {
        return Err(HostError::Refused(format!("another file system is mounted on {}; unmount it", path.display())));
    };
    HostSource::of(found).map(Some).map_err(failed)
}

/// Whether the content is certainly empty, or missing, and nothing is mounted on it.
fn is_without_files(directory: &File) -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS;
    match openat2(directory, CONTENT, flags, Mode::empty(), resolve).and_then(Dir::new) {
        Ok(mut entries) => {
            entries.all(|entry| entry.is_ok_and(|entry| matches!(entry.file_name().to_bytes(), b"." | b"..")))
        }
        Err(errno) => errno == Errno::NOENT,
    }
}

/// The mount on the content, if there is one.
fn mounted(directory: &File) -> Option<OwnedFd> {
    match open(directory, ResolveFlags::NO_XDEV) {
        Err(Errno::XDEV) => open(directory, ResolveFlags::empty()).ok(),
        _ => None,
    }
}

/// Opens `content` in a home (`O_PATH`).
fn open(directory: &File, resolve: ResolveFlags) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat2(directory, CONTENT, flags, Mode::empty(), resolve | ResolveFlags::NO_SYMLINKS)
}

/// Makes the content, with the mode and group of the plan.
fn make(home: &Path, directory: &File, plan: &EmptyDirPlan) -> Result<HostSource, HostError> {
    let path = content_path(home);
    let failed = |errno: Errno| HostError::system("make the directory", &path, errno);
    mkdirat(directory, CONTENT, Mode::RWXU).map_err(failed)?;
    match plan.backing {
        EmptyDirBacking::Disk => {}
        EmptyDirBacking::Memory { bytes } => memory::mount_tmpfs(&path, bytes)?,
        EmptyDirBacking::HugePages { page_size, limit } => memory::mount_huge_pages(&path, page_size, limit)?,
    }
    let content = open(directory, ResolveFlags::empty()).map_err(failed)?;
    set_owner(content, plan).map_err(failed)
}

/// Gives the content the mode and group of the plan.
fn set_owner(content: OwnedFd, plan: &EmptyDirPlan) -> Result<HostSource, Errno> {
    // The group first, because chown(2) may take the setgid bit away. The umask does not apply to chmod(2).
    chownat(&content, c"", Some(Uid::ROOT), Some(Gid::from_raw(plan.gid)), AtFlags::EMPTY_PATH)?;
    let by_descriptor = format!("/proc/self/fd/{}", content.as_raw_fd());
    chmod(by_descriptor, Mode::from_raw_mode(plan.mode.into()))?;
    HostSource::of(content)
}

/// Records that the content is complete. On a disk, `content` with its mode and group, and `ready` survive a power loss after that.
fn mark_ready(home: &Path, directory: &File, plan: &EmptyDirPlan) -> Result<(), HostError> {
    let next = home.join(NEXT_READY);
    let is_synced = matches!(plan.backing, EmptyDirBacking::Disk);
    let sync = |file: &File| if is_synced { file.sync_all() } else { Ok(()) };
    let write = || {
        if is_synced {
            File::open(content_path(home))?.sync_all()?;
        }
        let mut ready = File::create(&next)?;
        ready.write_all(plan.backing.to_string().as_bytes())?;
        sync(&ready)?;
        fs::rename(&next, home.join(READY))?;
        sync(directory)
    };
    write().map_err(|cause| HostError::system("write", &home.join(READY), cause))
}

fn content_path(home: &Path) -> PathBuf {
    home.join(std::ffi::OsStr::from_bytes(CONTENT.to_bytes()))
}

#[cfg(test)]
mod tests;
