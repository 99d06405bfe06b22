//! The mounts of the source that requests have reached, and which file on which of them a descriptor or a name leads to.

use std::collections::HashMap;
use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, Weak};

use rustix::fs::{AtFlags, StatVfsMountFlags, Statx, StatxFlags, fstatvfs, statx};
use rustix::io::Errno;

use super::attributes::attributes_of_name;
use super::devices::{device_of, next_index};
use super::handle::FileHandle;
use super::lasting_handles;
use super::node::{FileIdentity, Node};
use super::source_mount::{SourceMount, anchor};
use super::state::{MountCell, no_memory};
use crate::mount::private::PASSTHROUGH_SOURCE;
use crate::mount::table::{FS_TYPE, MountTable, MountTableEntry, Restrictions, mount_id};
use crate::region::Region;
use crate::region::cells::OwnedCell;

/// The mounts of the source that requests have reached.
pub struct SourceMounts {
    region: Arc<Region>,
    table: Arc<MountTable>,
    known: Mutex<HashMap<u64, Weak<SourceMount>>>,
}

impl SourceMounts {
    /// Starts with the mounts `known`, which a dead server may have left. `table` is the mount table that lists them.
    pub fn new<'a>(
        region: Arc<Region>,
        table: Arc<MountTable>,
        known: impl Iterator<Item = &'a Arc<SourceMount>>,
    ) -> Self {
        let known = known.map(|mount| (mount.id(), Arc::downgrade(mount))).collect();
        Self { region, table, known: Mutex::new(known) }
    }

    /// Returns the identity and the mount of the file that `file` is open on. `parent` is the directory in which podfs found the
    /// file, if any.
    ///
    /// # Errors
    /// `ELOOP` for a passthrough volume below the source: what it shows could lead back here, and the request would
    /// wait for itself.
    pub fn identify(
        &self,
        file: BorrowedFd<'_>,
        parent: Option<&Node>,
    ) -> Result<(FileIdentity, Arc<SourceMount>), Errno> {
        let (handle, id) = match FileHandle::of(file) {
            Ok((handle, id)) => (Some(handle), id),
            Err(Errno::OPNOTSUPP | Errno::OVERFLOW) => (None, mount_id(file)?),
            Err(errno) => return Err(errno),
        };
        let mount = match parent {
            Some(parent) if parent.mount.id() == id => Arc::clone(&parent.mount),
            _ => self.enter(file, id, handle.as_ref(), parent)?,
        };
        let identity = match handle {
            Some(handle) if mount.has_handles() => FileIdentity::Handle { mount: mount.index(), handle },
            _ => {
                let found = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::INO)?;
                FileIdentity::Number { mount: mount.index(), device: device_of(&found), ino: found.stx_ino }
            }
        };
        Ok((identity, mount))
    }

    /// Returns the identity and the attributes of the file that `name` leads to, by two system calls on the name. `None` if the
    /// file is not on the mount of `parent`, or if the two calls found different files: then the file must be opened.
    ///
    /// Both calls found the same file if its number and its mount are the same. There is one exception: between the two calls, the
    /// name leads to a new file with the number of one that was just deleted. The handle is that of the deleted file then. The next
    /// call with it answers `ESTALE`, and the kernel looks the name up again.
    ///
    /// # Errors
    /// `ENOENT` when there is no such name.
    pub fn identify_name(
        parent: &Node,
        directory: BorrowedFd<'_>,
        name: &CStr,
    ) -> Result<Option<(FileIdentity, Statx)>, Errno> {
        Self::identify_name_while(parent, directory, name, || {})
    }

    /// As [`Self::identify_name`]. `meanwhile` runs between the two system calls: a test changes the name there.
    fn identify_name_while(
        parent: &Node,
        directory: BorrowedFd<'_>,
        name: &CStr,
        meanwhile: impl FnOnce(),
    ) -> Result<Option<(FileIdentity, Statx)>, Errno> {
        if parent.handle().and_then(FileHandle::ino).is_none() {
            return Ok(None);
        }
        let Some(handle) = Self::handle_of_name(parent, directory, name)? else { return Ok(None) };
        meanwhile();
        let Ok(found) = attributes_of_name(directory, name) else { return Ok(None) };
        let is_same = handle.ino().map(u64::from) == Some(found.stx_ino)
            && found.stx_mask & StatxFlags::MNT_ID.bits() != 0
            && found.stx_mnt_id == parent.mount.id();
        Ok(is_same.then_some((FileIdentity::Handle { mount: parent.mount.index(), handle }, found)))
    }

    /// Returns the identity of the file that `name` leads to, by one system call. `None` if it is not on the mount of `parent`.
    pub fn identity_of_name(parent: &Node, directory: BorrowedFd<'_>, name: &CStr) -> Option<FileIdentity> {
        parent.handle()?;
        let handle = Self::handle_of_name(parent, directory, name).ok()??;
        Some(FileIdentity::Handle { mount: parent.mount.index(), handle })
    }

    /// The handle of the file that `name` leads to, if the file is on the mount of `parent`.
    fn handle_of_name(parent: &Node, directory: BorrowedFd<'_>, name: &CStr) -> Result<Option<FileHandle>, Errno> {
        match FileHandle::of_name(directory, name) {
            Ok((handle, id)) => Ok((id == parent.mount.id()).then_some(handle)),
            Err(Errno::NOENT) => Err(Errno::NOENT),
            Err(_) => Ok(None),
        }
    }

    fn enter(
        &self,
        file: BorrowedFd<'_>,
        id: u64,
        handle: Option<&FileHandle>,
        parent: Option<&Node>,
    ) -> Result<Arc<SourceMount>, Errno> {
        let known = self.lock().get(&id).and_then(Weak::upgrade);
        if let Some(mount) = known {
            if let Some(handle) = handle {
                mount.restore_anchor(file, handle);
            }
            return Ok(mount);
        }
        let mounted = self.table.mount_with_id(id).ok().flatten();
        if mounted.as_ref().is_some_and(is_passthrough) {
            return Err(Errno::LOOP);
        }
        let restrictions = match &mounted {
            Some(mounted) => mounted.restrictions,
            None => restrictions_of(file)?,
        };
        // Done without the lock, so that a file system that hangs delays no other request.
        let name = mounted.as_ref().map(|mounted| mounted.fs_type.as_str());
        let anchor = handle.filter(|_| lasting_handles::lasts(name, file)).and_then(|handle| anchor(file, handle));
        self.add(id, anchor, restrictions, parent)
    }

    /// Adds a mount, unless another request has added it meanwhile. Returns the mount.
    fn add(
        &self,
        id: u64,
        anchor: Option<OwnedFd>,
        restrictions: Restrictions,
        parent: Option<&Node>,
    ) -> Result<Arc<SourceMount>, Errno> {
        let mut known = self.lock();
        if let Some(mount) = known.get(&id).and_then(Weak::upgrade) {
            return Ok(mount);
        }
        known.retain(|_, mount| mount.strong_count() > 0);
        let index = next_index(&self.region);
        let record = OwnedCell::new(&self.region, |cell: &MountCell| {
            cell.id.store(id, Relaxed);
            cell.index.store(index, Relaxed);
            cell.anchor.store(anchor.as_ref().map_or(0, |anchor| anchor.as_raw_fd().cast_unsigned()), Relaxed);
            let directory = parent.and_then(|parent| Some((parent.mount.index(), parent.handle()?)));
            cell.length.store(directory.map_or(0, |(_, handle)| handle.length()), Relaxed);
            if let Some((mount, handle)) = directory {
                cell.parent.store(mount, Relaxed);
                handle.write(&cell.handle_kind, &cell.handle);
            }
        });
        let mount = Arc::new(SourceMount::new(record.map_err(no_memory)?, anchor, restrictions));
        known.insert(id, Arc::downgrade(&mount));
        Ok(mount)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Weak<SourceMount>>> {
        self.known.lock().expect("a thread that panics ends the process")
    }
}

fn is_passthrough(mount: &MountTableEntry) -> bool {
    mount.fs_type == FS_TYPE && mount.source == PASSTHROUGH_SOURCE
}

/// The restrictions of a mount that is attached nowhere, or in another mount namespace.
fn restrictions_of(file: BorrowedFd<'_>) -> Result<Restrictions, Errno> {
    let flags = fstatvfs(file)?.f_flag;
    Ok(Restrictions {
        nosuid: flags.contains(StatVfsMountFlags::NOSUID),
        nodev: flags.contains(StatVfsMountFlags::NODEV),
        noexec: flags.contains(StatVfsMountFlags::NOEXEC),
    })
}

#[cfg(test)]
mod tests;
