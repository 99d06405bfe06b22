//! Requests that make, remove or change names and attributes.

use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::thread::sleep;

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, RenameFlags, Statx, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid,
    XattrFlags, chmod, chownat, fchmod, ftruncate, getxattr_query, linkat, mkdirat, mknodat, openat, readlinkat,
    removexattr, renameat_with, setxattr, symlinkat, unlinkat, utimensat,
};
use rustix::io::Errno;

use super::super::acting::acting_for;
use super::super::attributes::{attr, attributes_of, bytes_taken, kind};
use super::super::descriptor::{proc_path, reopen};
use super::super::mounts::SourceMounts;
use super::super::node::Node;
use super::super::usage::{QuotaLock, QuotaUsage};
use super::look::attribute_name;
use super::{PassthroughFilesystem, component, outcome, silly};
use crate::caller::privileges::is_in_group;
use crate::session::abi::{MkdirIn, MknodIn, SETXATTR_ACL_KILL_SGID, SetattrIn, SetxattrIn, fattr};
use crate::session::{Answer, Caller, Exchange, Filesystem, NodeId};

const SETUID: u32 = 0o4000;
const SETGID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o010;
/// The bits of SETATTR that stand for a change.
const CHANGES: u32 = fattr::MODE | fattr::UID | fattr::GID | fattr::SIZE | fattr::ATIME | fattr::MTIME;

impl PassthroughFilesystem {
    pub(super) fn make_directory(
        &self,
        parent: &Arc<Node>,
        name: &OsStr,
        arguments: &MkdirIn,
        caller: Caller,
        exchange: &Exchange<'_>,
    ) -> Result<Answer, Errno> {
        let mode = Mode::from_raw_mode(arguments.mode & 0o7777);
        let make = |directory: BorrowedFd<'_>| mkdirat(directory, name, mode);
        let same = |_: BorrowedFd<'_>, found: &Statx| kind(found) == FileType::Directory;
        self.make(parent, name, (caller, arguments.umask), exchange, make, same)
    }

    pub(super) fn make_node(
        &self,
        parent: &Arc<Node>,
        name: &OsStr,
        arguments: &MknodIn,
        caller: Caller,
        exchange: &Exchange<'_>,
    ) -> Result<Answer, Errno> {
        let (wanted, mode) = (FileType::from_raw_mode(arguments.mode), Mode::from_raw_mode(arguments.mode & 0o7777));
        let device = decode_device(arguments.rdev);
        let make = |directory: BorrowedFd<'_>| mknodat(directory, name, wanted, mode, device);
        let same = |_: BorrowedFd<'_>, found: &Statx| kind(found) == wanted;
        self.make(parent, name, (caller, arguments.umask), exchange, make, same)
    }

    pub(super) fn make_link(
        &self,
        parent: &Arc<Node>,
        name: &OsStr,
        target: &OsStr,
        caller: Caller,
        exchange: &Exchange<'_>,
    ) -> Result<Answer, Errno> {
        let make = |directory: BorrowedFd<'_>| symlinkat(target, directory, name);
        let same = |directory: BorrowedFd<'_>, _: &Statx| {
            readlinkat(directory, name, Vec::new()).is_ok_and(|found| found.to_bytes() == target.as_encoded_bytes())
        };
        self.make(parent, name, (caller, 0), exchange, make, same)
    }

    pub(super) fn link(
        &self,
        old: &Arc<Node>,
        parent: &Arc<Node>,
        name: &OsStr,
        exchange: &Exchange<'_>,
    ) -> Result<Answer, Errno> {
        let directory = self.directory(parent)?;
        let file = self.descriptor(old)?;
        self.check_room(exchange, |account| account.check_room_for_name(parent, directory.as_fd(), 0))?;
        exchange.begin(0);
        let linked = linkat(&*file, c"", &*directory, component(name)?, AtFlags::EMPTY_PATH);
        outcome::success_if_done(linked, Errno::EXIST, exchange, |_| outcome::leads_to(&directory, name, &file))?;
        old.set_nameless(false);
        self.settle(parent, directory.as_fd());
        self.find(parent, name, false).map(|(_, entry)| Answer::Entry(entry))
    }

    pub(super) fn unlink(&self, parent: &Arc<Node>, name: &OsStr, exchange: &Exchange<'_>) -> Result<Answer, Errno> {
        let directory = self.directory(parent)?;
        let name = component(name)?;
        self.reopen_before_removal(&directory, parent, name);
        let going = self.going(&directory, parent, name);
        exchange.begin(going.as_ref().map_or(0, LastNameRemoval::note));
        let unlinked = unlinkat(&*directory, name, AtFlags::empty());
        outcome::success_if_done(unlinked, Errno::NOENT, exchange, |_| true)?;
        self.discharge(going, exchange);
        self.name_removed();
        Ok(Answer::Done)
    }

    pub(super) fn remove_directory(
        &self,
        parent: &Arc<Node>,
        name: &OsStr,
        exchange: &Exchange<'_>,
    ) -> Result<Answer, Errno> {
        let directory = self.directory(parent)?;
        let name = component(name)?;
        let going = self.going(&directory, parent, name);
        // It may be the working directory of a process, which still gets its attributes, from a successor too.
        let held = self.hold_directory(&directory, parent, name);
        exchange.begin(going.as_ref().map_or(0, LastNameRemoval::note));
        let removed = match self.options.remote {
            Some(_) => silly::remove_directory(&*directory, name, sleep),
            None => unlinkat(&*directory, name, AtFlags::REMOVEDIR),
        };
        outcome::success_if_done(removed, Errno::NOENT, exchange, |_| true)
            .inspect_err(|_| held.iter().for_each(|node| node.let_go()))?;
        self.discharge(going, exchange);
        self.name_removed();
        Ok(Answer::Done)
    }

    /// Keeps a descriptor of a directory whose name is about to go; returns its node, if the node had none before.
    fn hold_directory(&self, directory: &OwnedFd, parent: &Arc<Node>, name: &OsStr) -> Option<Arc<Node>> {
        let known = || {
            let name = CString::new(name.as_bytes()).ok()?;
            let node = self.nodes.find(&SourceMounts::identity_of_name(parent, directory.as_fd(), &name)?)?;
            let opened = self.open_directories().pop(&node.id)?;
            Some((node, Arc::into_inner(opened.file)?))
        };
        let named = || {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let removed = openat(directory, name, flags, Mode::empty()).ok()?;
            let (identity, _) = self.mounts.identify(removed.as_fd(), Some(parent)).ok()?;
            Some((self.nodes.find(&identity)?, removed))
        };
        let (node, removed) = if self.is_remote() { named() } else { known().or_else(named) }?;
        if node.kind != FileType::Directory || node.held().is_some() {
            return None;
        }
        node.hold(removed, self.descriptors.take().ok()?);
        Some(node)
    }

    pub(super) fn rename(
        &self,
        (parent, name): (&Arc<Node>, &OsStr),
        (new_parent, new_name): (&Arc<Node>, &OsStr),
        flags: u32,
        exchange: &Exchange<'_>,
    ) -> Result<Answer, Errno> {
        let (from, to) = (self.directory(parent)?, self.directory(new_parent)?);
        let flags = RenameFlags::from_bits(flags).ok_or(Errno::INVAL)?;
        let (name, new_name) = (component(name)?, component(new_name)?);
        let replaces = !flags.intersects(RenameFlags::EXCHANGE | RenameFlags::NOREPLACE);
        if replaces {
            self.reopen_before_removal(&to, new_parent, new_name);
        }
        let going = if replaces { self.going(&to, new_parent, new_name) } else { None };
        if going.is_none() && parent.id != new_parent.id {
            self.check_room(exchange, |account| account.check_not_exceeded())?;
        }
        // These leave something under the old name, so that alone does not tell whether it was done.
        if flags.intersects(RenameFlags::EXCHANGE | RenameFlags::WHITEOUT) {
            let there = outcome::number_of(&from, name).unwrap_or(0);
            exchange.begin(there);
            if exchange.earlier().is_some_and(|begun| begun.note != there) {
                return Ok(Answer::Done);
            }
        } else {
            exchange.begin(going.as_ref().map_or(0, LastNameRemoval::note));
        }
        let renamed = renameat_with(&*from, name, &*to, new_name, flags);
        let done = |_| outcome::number_of(&from, name).is_none() && outcome::number_of(&to, new_name).is_some();
        let renamed = outcome::success_if_done(renamed, Errno::NOENT, exchange, done);
        outcome::success_if_done(renamed, Errno::EXIST, exchange, done)?;
        self.discharge(going, exchange);
        self.name_removed();
        self.settle(new_parent, to.as_fd());
        Ok(Answer::Done)
    }

    pub(super) fn set_attributes(
        &self,
        node: &Arc<Node>,
        arguments: &SetattrIn,
        caller: Caller,
    ) -> Result<Answer, Errno> {
        let valid = arguments.valid;
        let file = self.descriptor(node)?;
        // A SETATTR that changes nothing comes before a write that the kernel does by itself.
        // For a change of owner the source does it by itself.
        let hidden = node.mount.restrictions().nosuid && valid & fattr::SIZE != 0;
        let killed = valid & (fattr::KILL_SUIDGID | fattr::SIZE) == fattr::KILL_SUIDGID | fattr::SIZE;
        if valid & CHANGES == 0 || killed || hidden {
            take_privileges(file.as_fd(), caller)?;
        }
        if valid & fattr::MODE != 0 {
            // The kernel has checked that the caller may set it.
            let mode = Mode::from_raw_mode(arguments.mode & 0o7777);
            match self.open_descriptor(node) {
                Some(file) => fchmod(file, mode)?,
                None => chmod(proc_path(file.as_fd()), mode)?,
            }
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
        Ok(Answer::Attributes(self.validity.for_node(node, &found).attributes(attr(&found, &node.mount))))
    }

    fn truncate(&self, node: &Arc<Node>, file: &OwnedFd, arguments: &SetattrIn) -> Result<(), Errno> {
        let open = if arguments.valid & fattr::FH != 0 { self.files.get(arguments.fh).ok() } else { None };
        let own = || {
            Self::open_file_again(node, OFlags::WRONLY | OFlags::NONBLOCK)
                .or_else(|_| reopen(file.as_fd(), OFlags::WRONLY | OFlags::NONBLOCK))
        };
        let file = match &open {
            Some(open) => open.data()?,
            None => Arc::new(own()?),
        };
        ftruncate(file, arguments.size)
    }

    pub(super) fn set_xattr(
        &self,
        node: &Arc<Node>,
        name: &OsStr,
        value: &[u8],
        arguments: &SetxattrIn,
        exchange: &Exchange<'_>,
    ) -> Result<Answer, Errno> {
        let value = value.get(..arguments.size as usize).ok_or(Errno::INVAL)?;
        let file = self.descriptor(node)?;
        let path = proc_path(file.as_fd());
        let name = attribute_name(name)?;
        let flags = XattrFlags::from_bits(arguments.flags).ok_or(Errno::INVAL)?;
        if flags.contains(XattrFlags::CREATE) {
            exchange.begin(0);
        }
        // From here to the charge no other request takes the room.
        let mut account = self.usage.as_ref().map(QuotaUsage::lock);
        if let Some(account) = account.as_mut().filter(|_| exchange.earlier().is_none()) {
            let grows = getxattr_query(&path, &name).map_or(true, |there| value.len() > there);
            if grows {
                self.ask(account, |account| account.check_room_for_attribute(value.len()))?;
            }
        }
        let set = setxattr(&path, &name, value, flags);
        outcome::success_if_done(set, Errno::EXIST, exchange, |_| outcome::has_value(&path, &name, value))?;
        if arguments.setxattr_flags & SETXATTR_ACL_KILL_SGID != 0 {
            let mode = u32::from(attributes_of(file.as_fd())?.stx_mode) & 0o7777;
            chmod(&path, Mode::from_raw_mode(mode & !SETGID))?;
        }
        if let Some(account) = &mut account {
            account.settle(node, file.as_fd());
        }
        Ok(Answer::Done)
    }

    pub(super) fn remove_xattr(
        &self,
        node: &Arc<Node>,
        name: &OsStr,
        exchange: &Exchange<'_>,
    ) -> Result<Answer, Errno> {
        let file = self.descriptor(node)?;
        exchange.begin(0);
        let removed = removexattr(proc_path(file.as_fd()), attribute_name(name)?);
        outcome::success_if_done(removed, Errno::NODATA, exchange, |_| true)?;
        self.settle(node, file.as_fd());
        Ok(Answer::Done)
    }

    /// Creates a file, directory or node for a caller, and answers with its node. `same` returns whether an existing file is the
    /// one that this request would create.
    fn make(
        &self,
        parent: &Arc<Node>,
        name: &OsStr,
        (caller, umask): (Caller, u32),
        exchange: &Exchange<'_>,
        make: impl FnOnce(BorrowedFd<'_>) -> Result<(), Errno>,
        same: impl Fn(BorrowedFd<'_>, &Statx) -> bool,
    ) -> Result<Answer, Errno> {
        component(name)?;
        let directory = self.directory(parent)?;
        let mut account = self.usage.as_ref().map(QuotaUsage::lock);
        if let Some(account) = account.as_mut().filter(|_| exchange.earlier().is_none()) {
            self.ask(account, |account| account.check_room_for_name(parent, directory.as_fd(), 1))?;
        }
        exchange.begin(0);
        let made = acting_for(caller, umask, || make(directory.as_fd()));
        outcome::success_if_done(made, Errno::EXIST, exchange, |begun| {
            outcome::made_for(&directory, name, begun, caller).is_some_and(|found| same(directory.as_fd(), &found))
        })?;
        let (node, entry) = self.find(parent, name, true)?;
        if let Some(account) = &mut account {
            account.charge(&node, entry.attr.blocks.saturating_mul(512));
            account.settle(parent, directory.as_fd());
        }
        Ok(Answer::Entry(entry))
    }

    /// Charges a node of a limited volume with the space that it takes now.
    pub(super) fn settle(&self, node: &Arc<Node>, file: BorrowedFd<'_>) {
        if let Some(usage) = &self.usage {
            usage.lock().settle(node, file);
        }
    }

    /// Fails a request that makes something grow for which there is no room. A request that a dead server may have executed
    /// already is let through.
    pub(super) fn check_room(
        &self,
        exchange: &Exchange<'_>,
        check: impl Fn(&QuotaLock<'_>) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        match &self.usage {
            Some(usage) if exchange.earlier().is_none() => self.ask(&mut usage.lock(), check),
            _ => Ok(()),
        }
    }

    /// Asks the account for room, and once more if the root directory has kept blocks that nothing uses.
    pub(super) fn ask<T>(
        &self,
        account: &mut QuotaLock<'_>,
        ask: impl Fn(&QuotaLock<'_>) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let asked = ask(account);
        let root = if matches!(asked, Err(Errno::NOSPC)) { self.nodes.get(NodeId::ROOT) } else { None };
        let freed = root.is_some_and(|root| {
            root.held().is_some_and(|directory| account.free_blocks_of_root(&root, directory.as_fd()))
        });
        if freed { ask(account) } else { asked }
    }

    fn name_removed(&self) {
        if let Some(usage) = &self.usage {
            usage.name_removed();
        }
    }

    /// The space that becomes free when `name` is removed, where the server counts.
    fn going(&self, directory: &OwnedFd, parent: &Arc<Node>, name: &OsStr) -> Option<LastNameRemoval> {
        self.usage.as_ref()?;
        let found = self.last_name_of(directory, name)?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(directory, name, flags, Mode::empty()).ok()?;
        let (identity, _) = self.mounts.identify(file.as_fd(), Some(parent)).ok()?;
        Some(LastNameRemoval { node: self.nodes.find(&identity), bytes: bytes_taken(&found) })
    }

    /// The name is gone. What was going is not known any more where a dead server has done it; then its note is.
    fn discharge(&self, going: Option<LastNameRemoval>, exchange: &Exchange<'_>) {
        let Some(usage) = &self.usage else { return };
        let earlier = || {
            let node = self.nodes.get(NodeId(exchange.earlier()?.note))?;
            // A file that has no name and is not open is no file any more.
            let gone = match self.descriptor(&node).and_then(|file| attributes_of(file.as_fd())) {
                Ok(found) => found.stx_nlink == 0,
                Err(errno) => errno == Errno::STALE,
            };
            gone.then_some(LastNameRemoval { node: Some(node), bytes: 0 })
        };
        let Some(going) = going.or_else(earlier) else { return };
        let Some(node) = going.node else { return usage.lock().give_back(going.bytes) };
        match &*node.open() {
            // Its bytes stay until its last open file is closed.
            Some(_) => node.set_nameless(true),
            None => usage.lock().discharge(&node),
        }
    }
}

/// Takes setuid and setgid off a file, because a caller without `CAP_FSETID` changes its content; the kernel decides that.
/// Without group execute, setgid gives a program nothing: a caller of the file's group leaves it
/// (`setattr_should_drop_sgid` of the kernel).
pub(super) fn take_privileges(file: BorrowedFd<'_>, caller: Caller) -> Result<(), Errno> {
    let found = attributes_of(file)?;
    let mode = u32::from(found.stx_mode) & 0o7777;
    let setgid_stays = || mode & GROUP_EXECUTE == 0 && is_in_group(caller, found.stx_gid);
    let taken = if mode & SETGID != 0 && setgid_stays() { SETUID } else { SETUID | SETGID };
    let left = mode & !taken;
    if left == mode { Ok(()) } else { chmod(proc_path(file), Mode::from_raw_mode(left)) }
}

/// A file that loses its last name.
struct LastNameRemoval {
    node: Option<Arc<Node>>,
    bytes: u64,
}

impl LastNameRemoval {
    /// The node's number.
    fn note(&self) -> u64 {
        self.node.as_ref().map_or(0, |node| node.id.0)
    }
}

/// A device number from the kernel's encoding (`new_encode_dev`).
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
