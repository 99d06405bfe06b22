//! Changing: what makes, removes or changes names and attributes.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, RenameFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid, XattrFlags,
    chmod, chownat, ftruncate, linkat, mkdirat, mknodat, openat, removexattr, renameat_with, setxattr, symlinkat,
    unlinkat, utimensat,
};
use rustix::io::Errno;

use super::super::attributes::{attr, attributes_of, bytes_taken};
use super::super::caller::acting_for;
use super::super::mounts::{proc_path, reopen};
use super::super::node::Node;
use super::super::usage::{Account, Usage};
use super::look::attribute_name;
use super::{PassthroughFilesystem, component};
use crate::session::abi::{MkdirIn, MknodIn, SETXATTR_ACL_KILL_SGID, SetattrIn, SetxattrIn, fattr};
use crate::session::{Answer, Caller};

const SETUID: u32 = 0o4000;
const SETGID: u32 = 0o2000;
/// The bits of SETATTR that stand for a change.
const CHANGES: u32 = fattr::MODE | fattr::UID | fattr::GID | fattr::SIZE | fattr::ATIME | fattr::MTIME;

impl PassthroughFilesystem {
    pub(super) fn make_directory(
        &self,
        parent: &Node,
        name: &OsStr,
        arguments: &MkdirIn,
        caller: Caller,
    ) -> Result<Answer, Errno> {
        let mode = arguments.mode & 0o7777;
        self.make(parent, name, arguments.umask, caller, |directory| {
            mkdirat(directory, name, Mode::from_raw_mode(mode))
        })
    }

    pub(super) fn make_node(
        &self,
        parent: &Node,
        name: &OsStr,
        arguments: &MknodIn,
        caller: Caller,
    ) -> Result<Answer, Errno> {
        let kind = FileType::from_raw_mode(arguments.mode);
        let mode = arguments.mode & 0o7777;
        self.make(parent, name, arguments.umask, caller, |directory| {
            mknodat(directory, name, kind, Mode::from_raw_mode(mode), decode_device(arguments.rdev))
        })
    }

    pub(super) fn make_link(
        &self,
        parent: &Node,
        name: &OsStr,
        target: &OsStr,
        caller: Caller,
    ) -> Result<Answer, Errno> {
        self.make(parent, name, 0, caller, |directory| symlinkat(target, directory, name))
    }

    pub(super) fn link(&self, old: &Node, parent: &Node, name: &OsStr) -> Result<Answer, Errno> {
        let directory = self.directory(parent)?;
        let file = self.descriptor(old)?;
        linkat(&*file, c"", &*directory, component(name)?, AtFlags::EMPTY_PATH)?;
        if let Some(open) = &mut *old.open() {
            open.nameless = false;
        }
        self.settle(parent, directory.as_fd());
        self.find(parent, name).map(|(_, entry)| Answer::Entry(entry))
    }

    pub(super) fn unlink(&self, parent: &Node, name: &OsStr) -> Result<Answer, Errno> {
        let directory = self.directory(parent)?;
        let name = component(name)?;
        let discharge = self.going(&directory, parent, name);
        unlinkat(&*directory, name, AtFlags::empty())?;
        self.discharge(discharge);
        Ok(Answer::Done)
    }

    pub(super) fn remove_directory(&self, parent: &Node, name: &OsStr) -> Result<Answer, Errno> {
        let directory = self.directory(parent)?;
        let name = component(name)?;
        let discharge = self.going(&directory, parent, name);
        // A process may stand in it, and goes on being told of it.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let removed = openat(&*directory, name, flags, Mode::empty())?;
        unlinkat(&*directory, name, AtFlags::REMOVEDIR)?;
        if let Ok((identity, _)) = self.mounts.identify(removed.as_fd(), Some(&parent.mount))
            && let Some(node) = self.nodes.find(&identity)
        {
            node.hold(Arc::new(removed));
        }
        self.discharge(discharge);
        Ok(Answer::Done)
    }

    pub(super) fn rename(
        &self,
        (parent, name): (&Node, &OsStr),
        (new_parent, new_name): (&Node, &OsStr),
        flags: u32,
    ) -> Result<Answer, Errno> {
        let (from, to) = (self.directory(parent)?, self.directory(new_parent)?);
        let flags = RenameFlags::from_bits(flags).ok_or(Errno::INVAL)?;
        let (name, new_name) = (component(name)?, component(new_name)?);
        let replaces = !flags.intersects(RenameFlags::EXCHANGE | RenameFlags::NOREPLACE);
        let discharge = if replaces { self.going(&to, new_parent, new_name) } else { None };
        renameat_with(&*from, name, &*to, new_name, flags)?;
        self.discharge(discharge);
        self.settle(new_parent, to.as_fd());
        Ok(Answer::Done)
    }

    pub(super) fn set_attributes(&self, node: &Node, arguments: &SetattrIn) -> Result<Answer, Errno> {
        let valid = arguments.valid;
        let file = self.descriptor(node)?;
        // A SETATTR that changes nothing comes before a write that the kernel does by itself.
        // For a change of owner the source does it by itself.
        if valid & CHANGES == 0 || valid & (fattr::KILL_SUIDGID | fattr::SIZE) == fattr::KILL_SUIDGID | fattr::SIZE {
            take_privileges(file.as_fd())?;
        }
        if valid & fattr::MODE != 0 {
            // The kernel has checked that the caller may set it.
            chmod(proc_path(file.as_fd()), Mode::from_raw_mode(arguments.mode & 0o7777))?;
        }
        if valid & (fattr::UID | fattr::GID) != 0 {
            let uid = (valid & fattr::UID != 0).then(|| Uid::from_raw(arguments.uid));
            let gid = (valid & fattr::GID != 0).then(|| Gid::from_raw(arguments.gid));
            chownat(&*file, c"", uid, gid, AtFlags::EMPTY_PATH)?;
        }
        if valid & fattr::SIZE != 0 {
            self.truncate(node, &file, arguments)?;
        }
        if valid & (fattr::ATIME | fattr::MTIME) != 0 {
            utimensat(&*file, c"", &times(arguments), AtFlags::EMPTY_PATH)?;
        }
        self.settle(node, file.as_fd());
        let found = attributes_of(file.as_fd())?;
        Ok(Answer::Attributes(self.validity.attributes(attr(&found, &node.mount))))
    }

    fn truncate(&self, node: &Node, file: &OwnedFd, arguments: &SetattrIn) -> Result<(), Errno> {
        let open = if arguments.valid & fattr::FH != 0 { self.files.get(arguments.fh).ok() } else { None };
        let own;
        let file = match &open {
            Some(open) => open.file.as_fd(),
            None => {
                own = Self::open_file_again(node, OFlags::WRONLY | OFlags::NONBLOCK)
                    .or_else(|_| reopen(file.as_fd(), OFlags::WRONLY | OFlags::NONBLOCK))?;
                own.as_fd()
            }
        };
        ftruncate(file, arguments.size)
    }

    pub(super) fn set_xattr(
        &self,
        node: &Node,
        name: &OsStr,
        value: &[u8],
        arguments: &SetxattrIn,
    ) -> Result<Answer, Errno> {
        let value = value.get(..arguments.size as usize).ok_or(Errno::INVAL)?;
        let file = self.descriptor(node)?;
        let path = proc_path(file.as_fd());
        let name = attribute_name(name)?;
        let flags = XattrFlags::from_bits(arguments.flags).ok_or(Errno::INVAL)?;
        setxattr(&path, &name, value, flags)?;
        if arguments.setxattr_flags & SETXATTR_ACL_KILL_SGID != 0 {
            let mode = u32::from(attributes_of(file.as_fd())?.stx_mode) & 0o7777;
            chmod(&path, Mode::from_raw_mode(mode & !SETGID))?;
        }
        self.settle(node, file.as_fd());
        Ok(Answer::Done)
    }

    pub(super) fn remove_xattr(&self, node: &Node, name: &OsStr) -> Result<Answer, Errno> {
        let file = self.descriptor(node)?;
        removexattr(proc_path(file.as_fd()), attribute_name(name)?)?;
        self.settle(node, file.as_fd());
        Ok(Answer::Done)
    }

    /// Makes something in a directory for a caller, and tells of it.
    fn make(
        &self,
        parent: &Node,
        name: &OsStr,
        umask: u32,
        caller: Caller,
        make: impl FnOnce(BorrowedFd<'_>) -> Result<(), Errno>,
    ) -> Result<Answer, Errno> {
        component(name)?;
        let directory = self.directory(parent)?;
        let mut account = self.usage.as_ref().map(Usage::lock);
        account.as_ref().map_or(Ok(()), Account::check_room_for_node)?;
        acting_for(caller, umask, || make(directory.as_fd()))?;
        let (_, entry) = self.find(parent, name)?;
        if let Some(account) = &mut account {
            account.take(entry.attr.blocks);
            account.settle(parent, directory.as_fd());
        }
        Ok(Answer::Entry(entry))
    }

    /// Charges a node with what it takes now, where that is counted.
    pub(super) fn settle(&self, node: &Node, file: BorrowedFd<'_>) {
        if let Some(usage) = &self.usage {
            usage.lock().settle(node, file);
        }
    }

    /// What is no longer taken once `name` is gone, where that is counted.
    fn going(&self, directory: &OwnedFd, parent: &Node, name: &OsStr) -> Option<Going> {
        self.usage.as_ref()?;
        let found = self.last_name_of(directory, name)?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(directory, name, flags, Mode::empty()).ok()?;
        let (identity, _) = self.mounts.identify(file.as_fd(), Some(&parent.mount)).ok()?;
        Some(Going { node: self.nodes.find(&identity), bytes: bytes_taken(&found) })
    }

    fn discharge(&self, going: Option<Going>) {
        let (Some(usage), Some(going)) = (&self.usage, going) else { return };
        let Some(node) = going.node else { return usage.lock().give_back(going.bytes) };
        match &mut *node.open() {
            // Its bytes stay until its last open file is closed.
            Some(open) => open.nameless = true,
            None => usage.lock().discharge(&node),
        }
    }
}

/// Takes setuid and setgid off a file, because somebody changes what is in it who may not keep them (without
/// `CAP_FSETID`). That is decided by the kernel, which knows who it is.
pub(super) fn take_privileges(file: BorrowedFd<'_>) -> Result<(), Errno> {
    let mode = u32::from(attributes_of(file)?.stx_mode) & 0o7777;
    let left = mode & !(SETUID | SETGID);
    if left == mode { Ok(()) } else { chmod(proc_path(file), Mode::from_raw_mode(left)) }
}

/// A file whose last name goes.
struct Going {
    node: Option<Arc<Node>>,
    bytes: u64,
}

/// What the kernel writes as one number (`new_encode_dev`).
fn decode_device(device: u32) -> u64 {
    let (major, minor) = ((device >> 8) & 0xfff, (device & 0xff) | ((device >> 12) & 0xfff00));
    rustix::fs::makedev(major, minor)
}

fn times(arguments: &SetattrIn) -> Timestamps {
    let time = |given: u32, now: u32, seconds: u64, nanoseconds: u32| match arguments.valid {
        valid if valid & now != 0 => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        valid if valid & given != 0 => Timespec { tv_sec: seconds.cast_signed(), tv_nsec: nanoseconds.into() },
        _ => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
    };
    Timestamps {
        last_access: time(fattr::ATIME, fattr::ATIME_NOW, arguments.atime, arguments.atimensec),
        last_modification: time(fattr::MTIME, fattr::MTIME_NOW, arguments.mtime, arguments.mtimensec),
    }
}
