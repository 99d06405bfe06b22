//! Requests that read names, attributes, links, extended attributes and figures of the file system.

use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, MutexGuard};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, StatxFlags, fgetxattr, fgetxattr_query, getxattr, getxattr_query, listxattr,
    openat, readlinkat, statx,
};
use rustix::io::Errno;
use rustix::thread::CapabilitySet;

use super::super::attributes::{attr, attributes_of, statx_attr};
use super::super::descriptor::proc_path;
use super::super::mounts::SourceMounts;
use super::super::node::Node;
use super::super::space::file_system_usage;
use super::{PassthroughFilesystem, component};
use crate::caller::privileges::has_capability;
use crate::session::abi::{EntryOut, Kstatfs, XATTR_SIZE_MAX};
use crate::session::{Answer, Caller, Filesystem, HandleId, NodeId, RootQuestion};

/// The attribute that gives a program capabilities.
pub(super) const CAPABILITY: &CStr = c"security.capability";

impl PassthroughFilesystem {
    pub(super) fn lookup(&self, parent: &Arc<Node>, name: &OsStr) -> Result<Answer, Errno> {
        let (node, entry) = self.find(parent, name, false)?;
        self.readdirplus.looked_up(node.kind == FileType::Directory);
        self.warn_of_socket(&node, parent, name);
        Ok(Answer::Entry(entry))
    }

    /// Finds a name, and answers with its node. A file that the request has just `made` is not charged yet.
    pub(super) fn find(&self, parent: &Arc<Node>, name: &OsStr, made: bool) -> Result<(Arc<Node>, EntryOut), Errno> {
        self.find_in(self.directory(parent)?.as_fd(), parent, component(name)?, made)
    }

    /// As [`Self::find`], in `directory`, which is open on `parent`.
    pub(super) fn find_in(
        &self,
        directory: BorrowedFd<'_>,
        parent: &Arc<Node>,
        name: &OsStr,
        made: bool,
    ) -> Result<(Arc<Node>, EntryOut), Errno> {
        let (node, entry) = self.enter_found(directory, parent, name, made)?;
        if node.kind == FileType::Directory {
            self.note_found_by(&node, parent, name);
        }
        self.record_name(&node, parent, name);
        Ok((node, entry))
    }

    fn enter_found(
        &self,
        directory: BorrowedFd<'_>,
        parent: &Arc<Node>,
        name: &OsStr,
        made: bool,
    ) -> Result<(Arc<Node>, EntryOut), Errno> {
        // For a source on another machine, each of these calls may be a message to it. After files were replaced, the server needs
        // the descriptor.
        if !self.is_remote() && !self.replaced.is_active() {
            let name = CString::new(name.as_bytes()).map_err(|_| Errno::INVAL)?;
            if let Some((identity, found)) = SourceMounts::identify_name(parent, directory, &name)? {
                return self.enter_identified(identity, &found, parent, made);
            }
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        self.enter(openat(directory, name, flags, Mode::empty())?, parent, made)
    }

    pub(super) fn attributes(&self, node: &Arc<Node>, handle: Option<HandleId>) -> Result<Answer, Errno> {
        let found = self.stat(node, handle)?;
        Ok(Answer::Attributes(self.validity.for_node(node, &found).attributes(attr(&found, &node.mount))))
    }

    pub(super) fn statx(&self, node: &Arc<Node>, handle: Option<HandleId>) -> Result<Answer, Errno> {
        let found = self.stat(node, handle)?;
        Ok(Answer::Statx(Box::new(self.validity.for_node(node, &found).statx(statx_attr(&found, &node.mount)))))
    }

    fn stat(&self, node: &Arc<Node>, handle: Option<HandleId>) -> Result<rustix::fs::Statx, Errno> {
        let file = match handle.and_then(|handle| self.files.get(handle).ok()) {
            Some(open) => open.file()?,
            None => self.descriptor(node)?,
        };
        let found = attributes_of(file.as_fd())?;
        self.prune(node);
        // A file without a name is charged until it is closed.
        if found.stx_nlink > 0 {
            self.settle(node, file.as_fd());
        }
        Ok(found)
    }

    pub(super) fn read_link(&self, node: &Arc<Node>, buffer: &mut Vec<u8>) -> Result<Answer, Errno> {
        let target = readlinkat(&*self.descriptor(node)?, c"", Vec::new())?;
        buffer.extend_from_slice(target.to_bytes());
        Ok(Answer::Buffer)
    }

    pub(super) fn status(&self, node: &Arc<Node>) -> Result<Answer, Errno> {
        let whole = file_system_usage(self.descriptor(node)?.as_fd())?;
        *self.last_status() = whole;
        Ok(Answer::FileSystem(match &self.usage {
            Some(usage) => usage.narrow(whole),
            None => whole,
        }))
    }

    /// Answers about the root from memory, for as long as its source is unreachable.
    pub(super) fn remembered(&self, question: RootQuestion) -> Option<Answer> {
        let root = self.nodes.get(NodeId::ROOT)?;
        let found = || {
            let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
            statx(&*root.held()?, c"", flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME).ok()
        };
        Some(match question {
            RootQuestion::Attributes => Answer::Attributes(self.validity.attributes(attr(&found()?, &root.mount))),
            RootQuestion::Statx => Answer::Statx(Box::new(self.validity.statx(statx_attr(&found()?, &root.mount)))),
            RootQuestion::FileSystem => Answer::FileSystem(*self.last_status()),
        })
    }

    fn last_status(&self) -> MutexGuard<'_, Kstatfs> {
        self.status.lock().expect("a thread that panics ends the process")
    }

    pub(super) fn xattr(
        &self,
        node: &Arc<Node>,
        name: &OsStr,
        size: u32,
        buffer: &mut Vec<u8>,
    ) -> Result<Answer, Errno> {
        let name = attribute_name(name)?;
        if node.mount.restrictions().nosuid && name.as_c_str() == CAPABILITY {
            return Err(Errno::NODATA);
        }
        let open = self.open_descriptor(node);
        if size == 0 {
            let length = match open {
                Some(file) => fgetxattr_query(file, &name),
                None => getxattr_query(proc_path(self.descriptor(node)?.as_fd()), &name),
            };
            return size_alone(length.map_err(|errno| no_acl(&name, errno))?);
        }
        buffer.resize(size.min(XATTR_SIZE_MAX) as usize, 0);
        let length = match open {
            Some(file) => fgetxattr(file, &name, &mut buffer[..]),
            None => getxattr(proc_path(self.descriptor(node)?.as_fd()), &name, &mut buffer[..]),
        };
        let length = length.map_err(|errno| no_acl(&name, errno))?;
        buffer.truncate(length);
        Ok(Answer::Buffer)
    }

    pub(super) fn xattr_names(
        &self,
        node: &Arc<Node>,
        size: u32,
        caller: Caller,
        buffer: &mut Vec<u8>,
    ) -> Result<Answer, Errno> {
        let file = self.descriptor(node)?;
        let mut all = vec![0; XATTR_SIZE_MAX as usize];
        let length = listxattr(proc_path(file.as_fd()), &mut all[..])?;
        // The source shows all attributes to podfs, but `trusted.` ones only to processes with CAP_SYS_ADMIN.
        let mut administers = None;
        let nosuid = node.mount.restrictions().nosuid;
        let mut shown = |name: &&[u8]| {
            if nosuid && *name == CAPABILITY.to_bytes_with_nul() {
                return false;
            }
            !name.starts_with(b"trusted.")
                || *administers.get_or_insert_with(|| has_capability(caller, CapabilitySet::SYS_ADMIN))
        };
        buffer.extend(all[..length].split_inclusive(|byte| *byte == 0).filter(|name| shown(name)).flatten());
        match size as usize {
            0 => size_alone(buffer.len()),
            room if room < buffer.len() => Err(Errno::RANGE),
            _ => Ok(Answer::Buffer),
        }
    }

    /// The attributes of the file `name` in `directory`, if that is the file's last name: the file goes with the name.
    pub(super) fn last_name_of(&self, directory: impl AsFd, name: &OsStr) -> Option<rustix::fs::Statx> {
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        let found = statx(directory, name, flags, rustix::fs::StatxFlags::BASIC_STATS).ok()?;
        (found.stx_nlink <= 1 || found.stx_mode & 0o170_000 == 0o040_000).then_some(found)
    }
}

/// The kernel asks for ACLs to check permissions. A source that does not support them, as NFS 4, has none: with any error but
/// `ENODATA` the kernel would refuse everything that an ACL could allow.
fn no_acl(name: &CStr, errno: Errno) -> Errno {
    if errno == Errno::OPNOTSUPP && name.to_bytes().starts_with(b"system.posix_acl_") { Errno::NODATA } else { errno }
}

/// The name of an extended attribute.
pub(super) fn attribute_name(name: &OsStr) -> Result<CString, Errno> {
    CString::new(name.as_bytes()).map_err(|_| Errno::INVAL)
}

/// The answer to a caller that gives no room, because it asks for the size.
fn size_alone(length: usize) -> Result<Answer, Errno> {
    Ok(Answer::XattrSize(u32::try_from(length).map_err(|_| Errno::TOOBIG)?))
}
