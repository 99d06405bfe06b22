//! Open files and what is in them.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{
    FallocateFlags, FileType, MemfdFlags, Mode, OFlags, SeekFrom, copy_file_range, fallocate, fdatasync, fsync,
    memfd_create, openat, seek,
};
use rustix::io::{Errno, pread, pwrite};

use super::super::attributes::{attr, kind};
use super::super::caller::acting_for;
use super::super::mounted::{Cache, DataPath};
use super::super::mounts::reopen;
use super::super::node::Node;
use super::super::open_node::{BackingId, OpenNode};
use super::super::usage::Usage;
use super::change::take_privileges;
use super::{PassthroughFilesystem, component};
use crate::session::abi::{
    CopyFileRangeIn, CreateIn, FSYNC_FDATASYNC, FallocateIn, FsyncIn, LseekIn, OpenOut, ReadIn, WRITE_CACHE,
    WRITE_KILL_SUIDGID, WriteIn, fopen, init,
};
use crate::session::{Answer, Caller, Session};

/// Whether the kernel lets this process hand it files to read and write by itself.
pub fn probe(session: &Session) -> DataPath {
    if session.accepted() & init::PASSTHROUGH == 0 {
        return DataPath::Server;
    }
    let backed = memfd_create(c"probe", MemfdFlags::CLOEXEC).and_then(|file| {
        // Given back at once.
        BackingId::open(&session.device(), file.as_fd()).map(drop)
    });
    if backed.is_ok() { DataPath::Kernel } else { DataPath::Server }
}

impl PassthroughFilesystem {
    pub(super) fn open(&self, node: &Arc<Node>, flags: u32) -> Result<Answer, Errno> {
        if node.kind != FileType::RegularFile {
            return Err(Errno::NXIO);
        }
        let file = Self::open_file_again(node, self.open_flags(flags))?;
        Ok(Answer::Open(self.opened(node, file, flags)))
    }

    pub(super) fn create(
        &self,
        parent: &Node,
        name: &OsStr,
        arguments: &CreateIn,
        caller: Caller,
    ) -> Result<Answer, Errno> {
        let directory = self.directory(parent)?;
        let name = component(name)?;
        let given = OFlags::from_bits_retain(arguments.flags);
        let flags = self.open_flags(arguments.flags) | (given & (OFlags::EXCL | OFlags::TRUNC));
        let mode = Mode::from_raw_mode(arguments.mode & 0o7777);
        let make = || openat(&*directory, name, flags | OFlags::CREATE, mode);
        let made = acting_for(caller, arguments.umask, make);
        // Something else got the name meanwhile; the kernel looks again.
        let file = made.map_err(|errno| if errno == Errno::LOOP { Errno::STALE } else { errno })?;
        self.settle(parent, directory.as_fd());
        self.created(parent, file, arguments.flags).map(|(_, answer)| answer)
    }

    pub(super) fn create_unnamed(&self, parent: &Node, arguments: &CreateIn, caller: Caller) -> Result<Answer, Errno> {
        let directory = self.directory(parent)?;
        let given = OFlags::from_bits_retain(arguments.flags);
        let flags = self.open_flags(arguments.flags).difference(OFlags::NOFOLLOW);
        let flags = flags | (given & OFlags::EXCL) | OFlags::TMPFILE;
        let mode = Mode::from_raw_mode(arguments.mode & 0o7777);
        let file = acting_for(caller, arguments.umask, || openat(&*directory, c".", flags, mode))?;
        let (node, answer) = self.created(parent, file, arguments.flags)?;
        if let Some(open) = &mut *node.open() {
            open.nameless = true;
        }
        Ok(answer)
    }

    fn created(&self, parent: &Node, file: OwnedFd, flags: u32) -> Result<(Arc<Node>, Answer), Errno> {
        let (node, found) = self.enter_open(&file, &parent.mount)?;
        if kind(&found) != FileType::RegularFile {
            self.forget(node.id, 1);
            return Err(Errno::STALE);
        }
        if node.handle().is_none() && node.held().is_none() {
            node.hold(Arc::new(reopen(file.as_fd(), OFlags::PATH)?));
        }
        let entry = self.validity.entry(node.id, attr(&found, &node.mount));
        let open = self.opened(&node, file, flags);
        Ok((node, Answer::Created(entry, open)))
    }

    /// How the source is opened for a caller. What the kernel does by itself is left out: there is nothing to wait
    /// for in a regular file, and no terminal to get.
    fn open_flags(&self, flags: u32) -> OFlags {
        let kept = OFlags::RWMODE | OFlags::APPEND | OFlags::SYNC | OFlags::DSYNC | OFlags::NOATIME;
        let given = OFlags::from_bits_retain(flags);
        // The kernel reads and writes as the caller opened it; then the source has to be able to.
        let direct = if self.data_path == DataPath::Kernel { given & OFlags::DIRECT } else { OFlags::empty() };
        (given & kept) | direct | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC
    }

    fn opened(&self, node: &Arc<Node>, file: OwnedFd, flags: u32) -> OpenOut {
        let append = OFlags::from_bits_retain(flags).contains(OFlags::APPEND);
        let open = self.files.add(Arc::clone(node), file, append);
        let fh = open.handle;
        let mut shared = node.open();
        let shared = match &mut *shared {
            Some(shared) => {
                shared.files.push(open);
                shared
            }
            shared => {
                let kernel = self.data_path == DataPath::Kernel;
                let backing = if kernel { BackingId::open(&self.device, open.file.as_fd()).ok() } else { None };
                shared.insert(Box::new(OpenNode {
                    files: vec![open],
                    nameless: false,
                    backing,
                    locks: Default::default(),
                }))
            }
        };
        // A message less for each close; `locks` says what it means for locks.
        let only_reads = flags & OFlags::RWMODE.bits() == OFlags::RDONLY.bits();
        let flush = if only_reads && shared.locks.is_empty() { fopen::NOFLUSH } else { 0 };
        match &shared.backing {
            Some(backing) => OpenOut { fh, open_flags: fopen::PASSTHROUGH | flush, backing_id: backing.number() },
            None => OpenOut { fh, open_flags: self.cached_or_direct() | flush, backing_id: 0 },
        }
    }

    /// How the kernel treats the bytes of a file that it asks the server for.
    fn cached_or_direct(&self) -> u32 {
        if self.options.exclusive || self.options.cache == Cache::Always {
            fopen::KEEP_CACHE
        } else {
            // Not cached, so never old. Shared mappings are refused (`ENODEV`): each mount would have pages of its own,
            // and programs that share memory through them would lose what they write.
            fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES
        }
    }

    pub(super) fn read(&self, arguments: &ReadIn, buffer: &mut Vec<u8>) -> Result<Answer, Errno> {
        let open = self.files.get(arguments.fh)?;
        let size = arguments.size as usize;
        buffer.reserve(size);
        // Not more than was asked for, whatever the buffer has room for.
        let room = &mut buffer.spare_capacity_mut()[..size];
        let read = pread(&*open.file, room, arguments.offset)?.0.len();
        // SAFETY: the call has filled as many bytes.
        unsafe { buffer.set_len(read) };
        Ok(Answer::Buffer)
    }

    pub(super) fn write(&self, arguments: &WriteIn, data: &[u8]) -> Result<Answer, Errno> {
        let open = self.files.get(arguments.fh)?;
        let mut data = data.get(..arguments.size as usize).ok_or(Errno::INVAL)?;
        // What comes from the page cache belongs where it was written, not at the end.
        let cached = arguments.write_flags & WRITE_CACHE != 0;
        let other;
        let file = if cached && open.append {
            other = Self::open_file_again(&open.node, OFlags::WRONLY | OFlags::NONBLOCK)?;
            other.as_fd()
        } else {
            open.file.as_fd()
        };
        let mut account = self.usage.as_ref().map(Usage::lock);
        if let Some(account) = &account {
            let most = account.room_for(file, arguments.offset, data.len() as u64)?;
            data = &data[..data.len().min(usize::try_from(most).unwrap_or(usize::MAX))];
        }
        if arguments.write_flags & WRITE_KILL_SUIDGID != 0 {
            take_privileges(file)?;
        }
        let written = pwrite(file, data, arguments.offset)?;
        if let Some(account) = &mut account {
            account.settle(&open.node, file);
        }
        Ok(Answer::Written(u32::try_from(written).map_err(|_| Errno::IO)?))
    }

    pub(super) fn release(&self, handle: u64) -> Result<Answer, Errno> {
        let open = self.files.remove(handle).ok_or(Errno::BADF)?;
        let mut shared = open.node.open();
        if let Some(node) = &mut *shared {
            node.files.retain(|file| file.handle != handle);
            node.locks.release(handle);
            if node.files.is_empty() {
                if let (true, Some(usage)) = (node.nameless, &self.usage) {
                    usage.lock().discharge(&open.node);
                }
                *shared = None;
            }
        }
        Ok(Answer::Done)
    }

    pub(super) fn sync(&self, arguments: &FsyncIn) -> Result<Answer, Errno> {
        let open = self.files.get(arguments.fh)?;
        let data_only = arguments.fsync_flags & FSYNC_FDATASYNC != 0;
        if data_only { fdatasync(&*open.file) } else { fsync(&*open.file) }?;
        Ok(Answer::Done)
    }

    pub(super) fn allocate(&self, arguments: &FallocateIn) -> Result<Answer, Errno> {
        let open = self.files.get(arguments.fh)?;
        let flags = FallocateFlags::from_bits_retain(arguments.mode);
        let frees = FallocateFlags::PUNCH_HOLE | FallocateFlags::COLLAPSE_RANGE | FallocateFlags::INSERT_RANGE;
        let mut account = self.usage.as_ref().map(Usage::lock);
        if let Some(account) = account.as_ref().filter(|_| !flags.intersects(frees))
            // All or nothing.
            && account.room_for(open.file.as_fd(), arguments.offset, arguments.length)? < arguments.length
        {
            return Err(Errno::NOSPC);
        }
        fallocate(&*open.file, flags, arguments.offset, arguments.length)?;
        if let Some(account) = &mut account {
            account.settle(&open.node, open.file.as_fd());
        }
        Ok(Answer::Done)
    }

    pub(super) fn seek(&self, arguments: &LseekIn) -> Result<Answer, Errno> {
        let open = self.files.get(arguments.fh)?;
        let to = match arguments.whence.cast_signed() {
            libc::SEEK_DATA => SeekFrom::Data(arguments.offset),
            libc::SEEK_HOLE => SeekFrom::Hole(arguments.offset),
            _ => return Err(Errno::INVAL),
        };
        Ok(Answer::Offset(seek(&*open.file, to)?))
    }

    pub(super) fn copy(&self, arguments: &CopyFileRangeIn, wide: bool) -> Result<Answer, Errno> {
        /// What fits in the narrow answer, in whole pages.
        const NARROW: u64 = 0xffff_f000;
        let (from, to) = (self.files.get(arguments.fh_in)?, self.files.get(arguments.fh_out)?);
        let mut length = if wide { arguments.len } else { arguments.len.min(NARROW) };
        let mut account = self.usage.as_ref().map(Usage::lock);
        if let Some(account) = &account {
            length = account.room_for(to.file.as_fd(), arguments.off_out, length)?;
        }
        let (mut off_in, mut off_out) = (arguments.off_in, arguments.off_out);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let copied = copy_file_range(&*from.file, Some(&mut off_in), &*to.file, Some(&mut off_out), length)?;
        if let Some(account) = &mut account {
            account.settle(&to.node, to.file.as_fd());
        }
        let copied = copied as u64;
        Ok(if wide { Answer::Copied(copied) } else { Answer::Written(u32::try_from(copied).map_err(|_| Errno::IO)?) })
    }
}
