//! Open files and their data.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Release;

use rustix::fs::{
    FallocateFlags, FileType, Mode, OFlags, SeekFrom, copy_file_range, fallocate, fdatasync, fsync, openat, seek,
};
use rustix::io::{Errno, pread, pwrite};

use super::super::acting::{acting_for, without_reserved_blocks};
use super::super::attributes::{attr, attributes_of, kind};
use super::super::data_path::DataPath;
use super::super::descriptor::reopen;
use super::super::node::Node;
use super::super::open_files::OpenFile;
use super::super::open_node::{BackingId, OpenNode};
use super::super::options::CacheMode;
use super::super::share::DescriptorPermit;
use super::super::usage::{QuotaLock, QuotaUsage};
use super::setid::take_privileges;
use super::{PassthroughFilesystem, component, outcome};
use crate::session::abi::{
    CopyFileRangeIn, CreateIn, FSYNC_FDATASYNC, FallocateIn, FsyncIn, LseekIn, OpenOut, ReadIn, WRITE_CACHE,
    WRITE_KILL_SUIDGID, WriteIn, fopen,
};
use crate::session::{Answer, Caller, Exchange, HandleId};

/// How often the server tries to make or open a file whose name comes and goes.
const ATTEMPTS: usize = 16;

impl PassthroughFilesystem {
    pub(super) fn open(
        &self,
        node: &Arc<Node>,
        flags: u32,
        caller: Caller,
        exchange: &Exchange<'_>,
    ) -> Result<Answer, Errno> {
        if let Some(open) = self.file_opened_earlier(exchange) {
            return Ok(Answer::Open(self.share(&open, flags, true)));
        }
        if node.kind != FileType::RegularFile {
            return Err(Errno::NXIO);
        }
        let taken = self.descriptor_permit(exchange)?;
        let opened = self.open_flags(flags);
        let file = self.open_file_again(node, opened)?;
        // The kernel does not see these bits, so it does not ask for their removal when the file is written to.
        if node.mount.restrictions().nosuid && flags & OFlags::RWMODE.bits() != OFlags::RDONLY.bits() {
            take_privileges(file.as_fd(), caller)?;
        }
        let open = self.files.add(exchange.number(), Arc::clone(node), file, opened, taken)?;
        Ok(Answer::Open(self.share(&open, flags, false)))
    }

    pub(super) fn create(
        &self,
        parent: &Arc<Node>,
        name: &OsStr,
        arguments: &CreateIn,
        caller: Caller,
        exchange: &Exchange<'_>,
    ) -> Result<Answer, Errno> {
        if let Some(open) = self.file_opened_earlier(exchange) {
            return self.created_earlier(&open, arguments.flags);
        }
        let directory = self.directory(parent)?;
        let taken = self.descriptor_permit(exchange)?;
        let name = component(name)?;
        let given = OFlags::from_bits_retain(arguments.flags);
        let flags = self.open_flags(arguments.flags) | (given & (OFlags::EXCL | OFlags::TRUNC));
        let mode = Mode::from_raw_mode(arguments.mode & 0o7777);
        self.check_space(exchange, |account| account.check_space_for_name(parent, directory.as_fd(), 0))?;
        // With `O_EXCL`, the server never opens a special file that got the name meanwhile.
        let make = || openat(&*directory, name, flags | OFlags::CREATE | OFlags::EXCL, mode);
        exchange.begin(0);
        let is_made = |begun| outcome::made_by(self.maker(caller), &directory, name, begun).is_some();
        let opened = flags.difference(OFlags::EXCL);
        let make_or_open = || {
            acting_for(caller, arguments.umask, make).map(Some).or_else(|errno| match errno {
                // The process that makes a file may open it in ways that its mode forbids.
                Errno::EXIST if exchange.earlier().is_some_and(is_made) => open_regular(&directory, name, opened),
                Errno::EXIST if !given.contains(OFlags::EXCL) => {
                    acting_for(caller, arguments.umask, || open_made_meanwhile(&directory, name, opened))
                }
                errno => Err(errno),
            })
        };
        // A process of the host may make and remove the name all the time.
        let file = (0..ATTEMPTS).find_map(|_| make_or_open().transpose()).unwrap_or(Err(Errno::STALE))?;
        self.settle(parent, directory.as_fd());
        let (node, answer) = self.created(parent, file, taken, arguments.flags, exchange)?;
        self.record_name(&node, parent, name);
        Ok(answer)
    }

    pub(super) fn create_unnamed(
        &self,
        parent: &Arc<Node>,
        arguments: &CreateIn,
        caller: Caller,
        exchange: &Exchange<'_>,
    ) -> Result<Answer, Errno> {
        if let Some(open) = self.file_opened_earlier(exchange) {
            open.node.set_nameless(true);
            return self.created_earlier(&open, arguments.flags);
        }
        let directory = self.directory(parent)?;
        let taken = self.descriptor_permit(exchange)?;
        let given = OFlags::from_bits_retain(arguments.flags);
        let flags = self.open_flags(arguments.flags).difference(OFlags::NOFOLLOW);
        let flags = flags | (given & OFlags::EXCL) | OFlags::TMPFILE;
        let mode = Mode::from_raw_mode(arguments.mode & 0o7777);
        self.check_space(exchange, |account| account.check_space_for_name(parent, directory.as_fd(), 0))?;
        let file = acting_for(caller, arguments.umask, || openat(&*directory, c".", flags, mode))?;
        let (node, answer) = self.created(parent, file, taken, arguments.flags, exchange)?;
        node.set_nameless(true);
        Ok(answer)
    }

    fn created(
        &self,
        parent: &Arc<Node>,
        file: OwnedFd,
        taken: DescriptorPermit,
        flags: u32,
        exchange: &Exchange<'_>,
    ) -> Result<(Arc<Node>, Answer), Errno> {
        let (node, found) = self.enter_open(&file, parent, true)?;
        if kind(&found) != FileType::RegularFile {
            self.forget(node.id, 1);
            return Err(Errno::STALE);
        }
        self.keep_open(&node, || reopen(file.as_fd(), OFlags::PATH))?;
        let open = self.files.add(exchange.number(), Arc::clone(&node), file, self.open_flags(flags), taken);
        let open = open.inspect_err(|_| self.forget(node.id, 1))?;
        // An ACL that the file inherits may take a block.
        self.settle(&node, open.file()?.as_fd());
        let shared = self.share(&open, flags, false);
        let entry = self.validity.for_node(&node, &found).entry(node.id, attr(&found, &node.mount));
        Ok((node, Answer::Created(entry, shared)))
    }

    /// The answer for a dead server that created a file and did not answer. That server has counted this answer in the node.
    fn created_earlier(&self, open: &Arc<OpenFile>, flags: u32) -> Result<Answer, Errno> {
        let found = attributes_of(open.file()?.as_fd())?;
        let shared = self.share(open, flags, true);
        let entry = self.validity.for_node(&open.node, &found).entry(open.node.id, attr(&found, &open.node.mount));
        Ok(Answer::Created(entry, shared))
    }

    /// The handle that a dead server has opened for this very request, without an answer.
    pub(super) fn opened_earlier(&self, exchange: &Exchange<'_>) -> Option<HandleId> {
        if exchange.is_resent() { self.files.opened_for(exchange.number()) } else { None }
    }

    fn file_opened_earlier(&self, exchange: &Exchange<'_>) -> Option<Arc<OpenFile>> {
        let open = self.files.get(self.opened_earlier(exchange)?).ok()?;
        if open.file().is_err_and(|errno| errno == Errno::STALE) {
            // The open file is gone with the dead server, and the caller never had it: this request opens the file anew.
            let _open = self.release(open.handle);
            return None;
        }
        Some(open)
    }

    /// Returns the flags with which to open the source for a caller. The kernel itself handles the other flags of the caller.
    /// `O_NONBLOCK` and `O_NOCTTY` change nothing for a regular file.
    fn open_flags(&self, flags: u32) -> OFlags {
        let kept = OFlags::RWMODE | OFlags::APPEND | OFlags::SYNC | OFlags::DSYNC | OFlags::NOATIME;
        let given = OFlags::from_bits_retain(flags);
        // The kernel reads and writes the source with the caller's flags, so the open has to fail if the source cannot do that.
        let direct = if self.data_path == DataPath::Kernel { given & OFlags::DIRECT } else { OFlags::empty() };
        (given & kept) | direct | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC
    }

    /// Adds `open` to the open files of its node, unless it is there already (`known`). Returns the answer to OPEN.
    fn share(&self, open: &Arc<OpenFile>, flags: u32, known: bool) -> OpenOut {
        let fh = open.handle;
        let mut shared = open.node.open();
        let shared = shared.get_or_insert_with(Box::default);
        if !known {
            shared.files.push(Arc::clone(open));
        }
        // The first answer decides the data path for all files that are opened while the node is open. A dead server may have opened
        // files without an answer.
        let is_first = |shared: &OpenNode| {
            shared.files.iter().all(|other| other.handle == fh || self.files.is_unanswered(other.handle))
        };
        if self.data_path == DataPath::Kernel && shared.backing.is_none() && !shared.is_unbacked {
            if is_first(shared) {
                let _reserved = self.leaving_reserved_blocks();
                let backing =
                    |file: Arc<OwnedFd>| BackingId::open_for(&self.device, file.as_fd(), &open.node, &self.region);
                shared.backing = open.file().ok().and_then(backing);
            }
            shared.is_unbacked = shared.backing.is_none();
            if shared.is_unbacked {
                BackingId::record_none(&open.node.record);
            }
        }
        let access = flags & OFlags::RWMODE.bits();
        // From now on the kernel must not use cached attributes. It drops them under the lock, before any other open is answered.
        if shared.backing.is_some() && access == OFlags::RDWR.bits() && open.node.set_mappable() {
            // The kernel may not know the node yet.
            let _ = self.notifier.drop_attributes(open.node.id);
        }
        // This saves a message for each close.
        let flush = if self.closes_silently(access, shared) { fopen::NOFLUSH } else { 0 };
        match &shared.backing {
            Some(backing) => OpenOut { fh, open_flags: fopen::PASSTHROUGH | flush, backing_id: backing.number() },
            None => OpenOut { fh, open_flags: self.cached_or_direct() | flush, backing_id: 0 },
        }
    }

    /// Lets the calling thread use no blocks that the source reserves for root. A source on another machine knows the caller itself.
    fn leaving_reserved_blocks(&self) -> Option<impl Drop + use<>> {
        self.identities.is_none().then(without_reserved_blocks)
    }

    /// Whether the kernel need not send each close of a file that is opened for this access.
    fn closes_silently(&self, access: u32, shared: &OpenNode) -> bool {
        if self.kernel_keeps_locks {
            // Before FLUSH the kernel writes back what callers stored through a mapping, and reports errors of that.
            return shared.backing.is_some() || access != OFlags::RDWR.bits();
        }
        // `locks` says what this means for locks.
        access == OFlags::RDONLY.bits() && shared.locks.is_empty()
    }

    /// Returns the `FOPEN_*` flags for a file whose bytes go through the server.
    pub(super) fn cached_or_direct(&self) -> u32 {
        if self.options.exclusive || self.options.cache == CacheMode::Always {
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
        // Limits the read to the requested size: the buffer may have more room.
        let spare = &mut buffer.spare_capacity_mut()[..size];
        let read = pread(&*open.data()?, spare, arguments.offset)?.0.len();
        // SAFETY: the call has filled as many bytes.
        unsafe { buffer.set_len(read) };
        Ok(Answer::Buffer)
    }

    pub(super) fn write(
        &self,
        arguments: &WriteIn,
        data: &[u8],
        caller: Caller,
        exchange: &Exchange<'_>,
    ) -> Result<Answer, Errno> {
        let _reserved = self.leaving_reserved_blocks();
        let open = self.files.get(arguments.fh)?;
        let mut data = data.get(..arguments.size as usize).ok_or(Errno::INVAL)?;
        // Data from the page cache belongs at its own offset, not at the end of the file.
        let cached = arguments.write_flags & WRITE_CACHE != 0;
        let opened = open.data()?;
        let reopened;
        let file = if cached && open.append {
            reopened = self.open_file_again(&open.node, OFlags::WRONLY | OFlags::NONBLOCK)?;
            reopened.as_fd()
        } else {
            opened.as_fd()
        };
        let mut account = self.usage.as_ref().map(QuotaUsage::lock);
        if let Some(account) = &mut account {
            let most =
                self.ask(account, |account| account.free_space_for(file, arguments.offset, data.len() as u64))?;
            data = &data[..data.len().min(usize::try_from(most).unwrap_or(usize::MAX))];
        }
        if arguments.write_flags & WRITE_KILL_SUIDGID != 0 {
            take_privileges(file, caller)?;
        }
        let written =
            if open.append && !cached { append(file, data, exchange)? } else { pwrite(file, data, arguments.offset)? };
        if let Some(account) = &mut account {
            account.settle(&open.node, file);
        }
        Ok(Answer::Written(u32::try_from(written).map_err(|_| Errno::IO)?))
    }

    pub(super) fn release(&self, handle: HandleId) -> Result<Answer, Errno> {
        let open = self.files.get(handle)?;
        let mut shared = open.node.open();
        if let Some(node) = &mut *shared {
            node.files.retain(|file| file.handle != handle);
            node.locks.release(handle);
            if node.files.is_empty() {
                if let (true, Some(usage)) = (open.node.is_nameless(), &self.usage) {
                    usage.discharge_closed(&open.node);
                }
                match node.backing {
                    Some(backing) => backing.close_for(&self.device, &open.node),
                    None => open.node.record.backing.store(0, Release),
                }
                *shared = None;
                drop(shared);
                self.prune(&open.node);
            }
        }
        // Last, because a request that finds no room waits for the files without a name in the table.
        self.files.remove(handle);
        Ok(Answer::Done)
    }

    /// Makes the kernel forget a node that is not open any more, once it has no mapping either. The kernel may cache the attributes
    /// that come with the node's next lookup again.
    pub(super) fn prune(&self, node: &Arc<Node>) {
        if node.is_mappable() && node.open().is_none() {
            self.pruner.prune_soon(node.id);
        }
    }

    pub(super) fn sync(&self, arguments: &FsyncIn) -> Result<Answer, Errno> {
        let open = self.files.get(arguments.fh)?;
        let data_only = arguments.fsync_flags & FSYNC_FDATASYNC != 0;
        let file = open.data()?;
        if data_only { fdatasync(&*file) } else { fsync(&*file) }?;
        Ok(Answer::Done)
    }

    pub(super) fn allocate(&self, arguments: &FallocateIn) -> Result<Answer, Errno> {
        let _reserved = self.leaving_reserved_blocks();
        let open = self.files.get(arguments.fh)?;
        let file = open.data()?;
        let flags = FallocateFlags::from_bits_retain(arguments.mode);
        let frees = FallocateFlags::PUNCH_HOLE | FallocateFlags::COLLAPSE_RANGE | FallocateFlags::INSERT_RANGE;
        let mut account = self.usage.as_ref().map(QuotaUsage::lock);
        if let Some(account) = account.as_mut().filter(|_| !flags.intersects(frees)) {
            // fallocate(2) allocates the whole range or nothing.
            let (target, offset, length) = (file.as_fd(), arguments.offset, arguments.length);
            let all = |account: &QuotaLock<'_>| match account.free_space_for(target, offset, length)? {
                most if most < length => Err(Errno::NOSPC),
                most => Ok(most),
            };
            self.ask(account, all)?;
        }
        fallocate(&*file, flags, arguments.offset, arguments.length)?;
        if let Some(account) = &mut account {
            account.settle(&open.node, file.as_fd());
        }
        Ok(Answer::Done)
    }

    pub(super) fn seek(&self, arguments: &LseekIn) -> Result<Answer, Errno> {
        let open = self.files.get(arguments.fh)?;
        let (file, offset) = (open.data()?, arguments.offset);
        let is_data = match arguments.whence.cast_signed() {
            libc::SEEK_DATA => true,
            libc::SEEK_HOLE => false,
            _ => return Err(Errno::INVAL),
        };
        if self.may_have_unwritten_data(&open) {
            // As a file system without holes answers: all of the file is data.
            let size = attributes_of(file.as_fd())?.stx_size;
            return if offset >= size {
                Err(Errno::NXIO)
            } else {
                Ok(Answer::Offset(if is_data { offset } else { size }))
            };
        }
        Ok(Answer::Offset(seek(&*file, if is_data { SeekFrom::Data(offset) } else { SeekFrom::Hole(offset) })?))
    }

    /// Whether the kernel's cache may have data in what is a hole of the source: the kernel caches the file's data itself, and
    /// another process that has the file open may have stored something through a mapping. The kernel writes that when the
    /// process unmaps the file. A process that seeks in its own open file has to call msync(2) before.
    fn may_have_unwritten_data(&self, open: &OpenFile) -> bool {
        let can_be_mapped = |file: &Arc<OpenFile>| file.handle != open.handle && file.access() == OFlags::RDWR;
        let is_unwritten = |node: &OpenNode| node.backing.is_none() && node.files.iter().any(can_be_mapped);
        self.cached_or_direct() == fopen::KEEP_CACHE && open.node.open().as_deref().is_some_and(is_unwritten)
    }

    pub(super) fn copy(&self, arguments: &CopyFileRangeIn, wide: bool) -> Result<Answer, Errno> {
        /// The largest value of the narrow answer, in whole pages.
        const NARROW: u64 = 0xffff_f000;
        let _reserved = self.leaving_reserved_blocks();
        let (from, to) = (self.files.get(arguments.fh_in)?, self.files.get(arguments.fh_out)?);
        let (source, target) = (from.data()?, to.data()?);
        let mut length = if wide { arguments.len } else { arguments.len.min(NARROW) };
        let mut account = self.usage.as_ref().map(QuotaUsage::lock);
        if let Some(account) = &mut account {
            length = self.ask(account, |account| account.free_space_for(target.as_fd(), arguments.off_out, length))?;
        }
        let (mut off_in, mut off_out) = (arguments.off_in, arguments.off_out);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let copied = copy_file_range(&*source, Some(&mut off_in), &*target, Some(&mut off_out), length)?;
        if let Some(account) = &mut account {
            account.settle(&to.node, target.as_fd());
        }
        let copied = copied as u64;
        Ok(if wide { Answer::Copied(copied) } else { Answer::Written(u32::try_from(copied).map_err(|_| Errno::IO)?) })
    }
}

/// Writes at the end of `file`, which is open with `O_APPEND`, unless a dead server has done that.
fn append(file: BorrowedFd<'_>, data: &[u8], exchange: &Exchange<'_>) -> Result<usize, Errno> {
    if let Some(written) = exchange.earlier().and_then(|begun| outcome::appended(file, data, begun.note)) {
        return Ok(written);
    }
    let end = attributes_of(file)?.stx_size;
    exchange.begin_anew(end);
    pwrite(file, data, end)
}

/// Opens the file that another process has made at `name` meanwhile, for a caller that wants it made or opened.
///
/// # Errors
/// `ESTALE` if it may be opened only after checks that the kernel makes (`fs.protected_regular`), and those of [`open_regular`].
fn open_made_meanwhile(directory: &OwnedFd, name: &OsStr, flags: OFlags) -> Result<Option<OwnedFd>, Errno> {
    const STICKY: u16 = 0o1000;
    if attributes_of(directory.as_fd())?.stx_mode & STICKY != 0 {
        Err(Errno::STALE)
    } else {
        open_regular(directory, name, flags)
    }
}

/// Opens the regular file `name`; `None` if there is no such name any more. To open a device has effects of its own, so the server
/// looks at the type first.
///
/// # Errors
/// `ESTALE` if the name leads to no regular file: the kernel then looks it up again.
fn open_regular(directory: &OwnedFd, name: &OsStr, flags: OFlags) -> Result<Option<OwnedFd>, Errno> {
    let path = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = match openat(directory, name, path, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        found => found?,
    };
    if kind(&attributes_of(found.as_fd())?) == FileType::RegularFile {
        reopen(found.as_fd(), flags).map(Some)
    } else {
        Err(Errno::STALE)
    }
}
