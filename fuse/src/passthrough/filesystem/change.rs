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
use super::super::attributes::{attr, attributes_of, check_not_mounted, kind};
use super::super::descriptor::{proc_path, reopen};
use super::super::mounts::SourceMounts;
use super::super::node::{Node, is_special};
use super::super::usage::QuotaUsage;
use super::account::LastNameRemoval;
use super::look::attribute_name;
use super::outcome::Maker;
use super::setid::{
    SETGID, check_changes_nothing, is_left_to_setattr, is_written, is_written_by_privileged, take_capabilities,
    take_privileges, take_setgid_of_group,
};
use super::{PassthroughFilesystem, component, outcome, silly};
use crate::session::abi::{MkdirIn, MknodIn, SETXATTR_ACL_KILL_SGID, SetattrIn, SetxattrIn, fattr};
use crate::session::{Answer, Caller, Exchange, Filesystem};

/// The bits of SETATTR that ask for a change.
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
        self.check_space(exchange, |account| account.check_space_for_name(parent, directory.as_fd(), 0))?;
        exchange.begin(0);
        let linked = linkat(&*file, c"", &*directory, component(name)?, AtFlags::EMPTY_PATH);
        outcome::success_if_done(linked, Errno::EXIST, exchange, |_| outcome::leads_to(&directory, name, &file))?;
        old.set_nameless(false);
        self.settle(parent, directory.as_fd());
        // The name may lead elsewhere by now.
        self.enter(reopen(file.as_fd(), OFlags::PATH)?, parent, false).map(|(_, entry)| Answer::Entry(entry))
    }

    pub(super) fn unlink(&self, parent: &Arc<Node>, name: &OsStr, exchange: &Exchange<'_>) -> Result<Answer, Errno> {
        let directory = self.directory(parent)?;
        let name = component(name)?;
        let found = check_not_mounted(&*directory, name)?;
        if outcome::is_another_file(exchange, found) {
            return Ok(self.removed(None, exchange));
        }
        self.reopen_before_removal(&directory, parent, name);
        let removal = self.last_name_removal(&directory, parent, name);
        // Volumes without special files are spared a system call for each file.
        let has_special = self.nodes.has_special_files();
        let held = has_special.then(|| self.hold_before_removal(&directory, parent, name)).flatten();
        outcome::begin_removal(exchange, removal.as_ref().map_or(0, LastNameRemoval::note), found);
        let unlinked = unlinkat(&*directory, name, AtFlags::empty());
        outcome::success_if_done(unlinked, Errno::NOENT, exchange, |_| true)
            .inspect_err(|_| held.iter().for_each(|node| node.let_go()))?;
        Ok(self.removed(removal, exchange))
    }

    pub(super) fn remove_directory(
        &self,
        parent: &Arc<Node>,
        name: &OsStr,
        exchange: &Exchange<'_>,
    ) -> Result<Answer, Errno> {
        let directory = self.directory(parent)?;
        let name = component(name)?;
        let found = check_not_mounted(&*directory, name)?;
        if outcome::is_another_file(exchange, found) {
            return Ok(self.removed(None, exchange));
        }
        let removal = self.last_name_removal(&directory, parent, name);
        // The directory may be the working directory of a process, which still gets its attributes, also from a successor.
        let held = self.hold_before_removal(&directory, parent, name);
        outcome::begin_removal(exchange, removal.as_ref().map_or(0, LastNameRemoval::note), found);
        let removed = match self.options.remote {
            Some(_) => silly::remove_directory(&*directory, name, sleep),
            None => unlinkat(&*directory, name, AtFlags::REMOVEDIR),
        };
        outcome::success_if_done(removed, Errno::NOENT, exchange, |_| true)
            .inspect_err(|_| held.iter().for_each(|node| node.let_go()))?;
        Ok(self.removed(removal, exchange))
    }

    /// Keeps a descriptor of the file or directory `name`, which is about to be removed, until the kernel forgets it. Returns its
    /// node.
    ///
    /// Does so for directories, and for special files that lose their last name: the kernel opens these without the server, and
    /// asks for their attributes while a process has them open.
    fn hold_before_removal(&self, directory: &OwnedFd, parent: &Arc<Node>, name: &OsStr) -> Option<Arc<Node>> {
        let needs_descriptor = |node: &Arc<Node>| node.kind == FileType::Directory || is_special(node.kind);
        let known = || {
            let name = CString::new(name.as_bytes()).ok()?;
            let node = self.nodes.find(&SourceMounts::identity_of_name(parent, directory.as_fd(), &name)?)?;
            needs_descriptor(&node).then_some(node)
        };
        let named = || {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let removed = openat(directory, name, flags, Mode::empty()).ok()?;
            let (identity, _) = self.mounts.identify(removed.as_fd(), Some(parent)).ok()?;
            Some((self.nodes.find(&identity)?, removed))
        };
        let opened = |node: Arc<Node>| {
            let opened = self.open_directories().pop(&node.id)?;
            Some((node, Arc::into_inner(opened.file)?))
        };
        let is_identified = !self.is_remote() && parent.handle().is_some();
        let (node, removed) = if is_identified { opened(known()?).or_else(named) } else { named() }?;
        if node.handle().is_none() && needs_descriptor(&node) {
            // The descriptor that the node keeps stays until the kernel forgets the node.
            node.forget_name();
        }
        let has_other_name = || {
            node.handle().is_some()
                && is_special(node.kind)
                && attributes_of(removed.as_fd()).is_ok_and(|found| found.stx_nlink > 1)
        };
        if !needs_descriptor(&node) || node.held().is_some() || has_other_name() {
            return None;
        }
        let taken = match node.handle() {
            Some(_) => self.descriptors.take().ok()?,
            // The node has lost its name, so only this descriptor leads to it.
            None => self.descriptors.take_anyway(),
        };
        node.hold(removed, taken);
        // Without a handle, the node needs the descriptor also if its name stays.
        node.handle().is_some().then_some(node)
    }

    pub(super) fn rename(
        &self,
        (parent, name): (&Arc<Node>, &OsStr),
        (new_parent, new_name): (&Arc<Node>, &OsStr),
        flags: u32,
        caller: Caller,
        exchange: &Exchange<'_>,
    ) -> Result<Answer, Errno> {
        let (from, to) = (self.directory(parent)?, self.directory(new_parent)?);
        let flags = RenameFlags::from_bits(flags).ok_or(Errno::INVAL)?;
        let (name, new_name) = (component(name)?, component(new_name)?);
        let found = check_not_mounted(&*from, name)?;
        check_not_mounted(&*to, new_name)?;
        if outcome::is_another_file(exchange, found) {
            self.settle(new_parent, to.as_fd());
            return Ok(self.removed(None, exchange));
        }
        let replaces = !flags.intersects(RenameFlags::EXCHANGE | RenameFlags::NOREPLACE);
        if replaces {
            self.reopen_before_removal(&to, new_parent, new_name);
        }
        let removal = if replaces { self.last_name_removal(&to, new_parent, new_name) } else { None };
        // If a dead server has executed the request, the new name leads to the moved file, which keeps its name.
        let removal = removal.filter(|found| exchange.earlier().is_none_or(|begun| begun.note == found.note()));
        if removal.is_none() && parent.id != new_parent.id {
            self.check_space(exchange, |account| account.check_not_exceeded())?;
        }
        // The dead server of a request that was begun has kept the descriptor already.
        let may_hold = replaces && !self.is_remote() && exchange.earlier().is_none();
        let held = may_hold.then(|| self.hold_before_removal(&to, new_parent, new_name)).flatten();
        // With these flags there is a file under the old name afterwards, too. Its inode number shows whether a dead server has
        // executed the request.
        if flags.intersects(RenameFlags::EXCHANGE | RenameFlags::WHITEOUT) {
            let number = outcome::number_of(&from, name).unwrap_or(0);
            exchange.begin(number);
            if exchange.earlier().is_some_and(|begun| begun.note != number) {
                return Ok(Answer::Done);
            }
        } else {
            outcome::begin_removal(exchange, removal.as_ref().map_or(0, LastNameRemoval::note), found);
        }
        self.forget_found_by(parent.id, name);
        self.forget_found_by(new_parent.id, new_name);
        let rename = || renameat_with(&*from, name, &*to, new_name, flags);
        // A whiteout belongs to the caller.
        let renamed = if flags.contains(RenameFlags::WHITEOUT) { acting_for(caller, 0, rename) } else { rename() };
        let is_moved = |_| outcome::number_of(&from, name).is_none() && outcome::number_of(&to, new_name).is_some();
        let renamed = outcome::success_if_done(renamed, Errno::NOENT, exchange, is_moved);
        outcome::success_if_done(renamed, Errno::EXIST, exchange, is_moved)
            .inspect_err(|_| held.iter().for_each(|node| node.let_go()))?;
        self.record_move(to.as_fd(), new_parent, new_name);
        if flags.contains(RenameFlags::EXCHANGE) {
            self.record_move(from.as_fd(), parent, name);
        }
        self.settle(new_parent, to.as_fd());
        Ok(self.removed(removal, exchange))
    }

    pub(super) fn set_attributes(
        &self,
        node: &Arc<Node>,
        arguments: &SetattrIn,
        caller: Caller,
    ) -> Result<Answer, Errno> {
        let valid = arguments.valid;
        let file = self.descriptor(node)?;
        // The kernel sends a SETATTR that changes nothing before it writes by itself, and for chown(2) without ids. When the owner
        // changes, the source removes setuid and setgid by itself.
        let changes_nothing = valid & CHANGES == 0;
        if changes_nothing && !is_written(node) {
            check_changes_nothing(file.as_fd(), caller)?;
        }
        let hidden = node.mount.restrictions().nosuid && valid & fattr::SIZE != 0;
        let killed = valid & (fattr::KILL_SUIDGID | fattr::SIZE) == fattr::KILL_SUIDGID | fattr::SIZE;
        let keeps_bits = changes_nothing && is_written_by_privileged(node, caller);
        if (changes_nothing || killed || hidden) && !keeps_bits {
            take_privileges(file.as_fd(), caller)?;
        }
        if changes_nothing {
            take_capabilities(file.as_fd())?;
        }
        if valid & fattr::MODE != 0 {
            // The kernel has checked that the caller may set this mode.
            let mode = Mode::from_raw_mode(arguments.mode & 0o7777);
            match self.open_descriptor(node) {
                Some(file) => fchmod(file, mode)?,
                None => chmod(proc_path(file.as_fd()), mode)?,
            }
        }
        if valid & (fattr::UID | fattr::GID) != 0 {
            let uid = (valid & fattr::UID != 0).then(|| Uid::from_raw(arguments.uid));
            let gid = (valid & fattr::GID != 0).then(|| Gid::from_raw(arguments.gid));
            take_setgid_of_group(file.as_fd(), caller)?;
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
            self.open_file_again(node, OFlags::WRONLY | OFlags::NONBLOCK)
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
        if flags.contains(XattrFlags::CREATE) && getxattr_query(&path, &name).is_err() {
            exchange.begin(0);
        }
        // The lock keeps other requests from taking the room until this one is charged.
        let mut account = self.usage.as_ref().map(QuotaUsage::lock);
        if let Some(account) = account.as_mut().filter(|_| exchange.earlier().is_none()) {
            let grows = getxattr_query(&path, &name).map_or(true, |before| value.len() > before);
            if grows {
                self.ask(account, |account| account.check_space_for_attribute(value.len()))?;
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
        caller: Caller,
        exchange: &Exchange<'_>,
    ) -> Result<Answer, Errno> {
        let file = self.descriptor(node)?;
        let (path, name) = (proc_path(file.as_fd()), attribute_name(name)?);
        if is_left_to_setattr(&name, caller) {
            return Ok(Answer::Done);
        }
        if getxattr_query(&path, &name) != Err(Errno::NODATA) {
            exchange.begin(0);
        }
        let removed = removexattr(&path, &name);
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
            self.ask(account, |account| account.check_space_for_name(parent, directory.as_fd(), 1))?;
        }
        exchange.begin(0);
        let made = acting_for(caller, umask, || make(directory.as_fd()));
        outcome::success_if_done(made, Errno::EXIST, exchange, |begun| {
            outcome::made_by(self.maker(caller), &directory, name, begun)
                .is_some_and(|found| same(directory.as_fd(), &found))
        })?;
        // If the host has taken the name away already, the kernel looks again.
        let (node, entry) = self.find(parent, name, true).map_err(gone_again)?;
        if let Some(account) = &mut account {
            account.charge(&node, entry.attr.blocks.saturating_mul(512));
            account.settle(parent, directory.as_fd());
        }
        Ok(Answer::Entry(entry))
    }

    /// The process that sets owner and times of a file that this volume makes for a caller.
    pub(super) fn maker(&self, caller: Caller) -> Maker {
        if self.options.remote.is_some() { Maker::NfsServer } else { Maker::Kernel(caller) }
    }
}

/// The errno of a request that has made a name which is gone again.
fn gone_again(errno: Errno) -> Errno {
    if errno == Errno::NOENT { Errno::STALE } else { errno }
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
