//! Directories, opened by OPENDIR or by the kernel alone.

use std::cell::OnceCell;
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use rustix::fs::{AtFlags, Mode, OFlags, Statx, StatxFlags, fdatasync, fsync, openat, statx};
use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::super::attributes::attributes_of;
use super::super::cached_listings::{CachedListings, Change};
use super::super::devices::device_of;
use super::super::listing::{DirectoryEntry, SourceListing};
use super::super::node::Node;
use super::super::options::CacheMode;
use super::super::state::recordable;
use super::super::unopened::UnopenedListing;
use super::PassthroughFilesystem;
use crate::session::abi::{Attr, EntryOut, FSYNC_FDATASYNC, FsyncIn, OpenOut, ReadIn, fopen};
use crate::session::{Answer, Exchange, HandleId, NodeId, ReaddirEntry, Request};

impl PassthroughFilesystem {
    pub(super) fn open_directory(
        &self,
        node: &Arc<Node>,
        request: &Request<'_>,
        exchange: &Exchange<'_>,
    ) -> Result<Answer, Errno> {
        if self.lists_unopened {
            // From now on the kernel opens directories by itself, and caches their listings.
            return Err(Errno::NOSYS);
        }
        let (fh, may_cache) = match self.opened_earlier(exchange) {
            Some(handle) if self.files.directory(handle).is_ok() => (handle, 0),
            _ => self.new_directory(node, request, exchange)?,
        };
        let always = if self.options.cache == CacheMode::Always { fopen::CACHE_DIR | fopen::KEEP_CACHE } else { 0 };
        Ok(Answer::Open(OpenOut { fh, open_flags: always | may_cache, backing_id: 0 }))
    }

    /// Opens a directory. Returns its handle, and the `FOPEN_*` flags for the kernel's cache of its listing.
    fn new_directory(
        &self,
        node: &Arc<Node>,
        request: &Request<'_>,
        exchange: &Exchange<'_>,
    ) -> Result<(HandleId, u32), Errno> {
        let taken = self.descriptor_permit(exchange)?;
        let directory = self.open_to_read(node)?;
        let found = attributes_of(directory.as_fd())?;
        if found.stx_nlink == 0 && self.is_directory_replaced(node, request) {
            return Err(Errno::STALE);
        }
        let cached = self.cached_listings(node).map(|listings| (listings, Change::of(&found)));
        let with_attributes = self.readdirplus.directory_opened();
        let listing = SourceListing::new(recordable(directory));
        let handle = self.files.add_directory(exchange.number(), Arc::clone(node), listing, with_attributes, taken)?;
        let Some((listings, change)) = cached else { return Ok((handle, 0)) };
        let Some(names) = listings.opened(node.id, change, with_attributes) else {
            return Ok((handle, fopen::CACHE_DIR));
        };
        self.readdirplus.listed_again(names);
        Ok((handle, fopen::CACHE_DIR | fopen::KEEP_CACHE))
    }

    /// Returns the record of cached listings, if the kernel may cache the listing of `node`.
    fn cached_listings(&self, node: &Node) -> Option<&CachedListings> {
        self.cached_listings.as_ref().filter(|_| node.mount.is_of_source())
    }

    /// A descriptor through which the entries of `node` can be read, and synced.
    fn open_to_read(&self, node: &Arc<Node>) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        openat(&*self.directory(node)?, c".", flags, Mode::empty())
    }

    pub(super) fn read_directory(
        &self,
        node: &Arc<Node>,
        arguments: &ReadIn,
        buffer: &mut Vec<u8>,
    ) -> Result<Answer, Errno> {
        let capacity = arguments.size as usize;
        let numbers = ShownNumbers::of(node);
        self.continue_listing(node, arguments, |listing, _| {
            listing.read_some(arguments.offset, |directory, entry| {
                if buffer.len() + listed(entry, 0).length() > capacity {
                    return Ok(false);
                }
                let ino = numbers.shown(directory, entry);
                listed(entry, ino).push(buffer);
                Ok(true)
            })?;
            Ok(!buffer.is_empty())
        })?;
        Ok(Answer::Buffer)
    }

    pub(super) fn read_directory_plus(
        &self,
        node: &Arc<Node>,
        arguments: &ReadIn,
        buffer: &mut Vec<u8>,
    ) -> Result<Answer, Errno> {
        let capacity = arguments.size as usize;
        let numbers = ShownNumbers::of(node);
        let mut names = 0;
        self.continue_listing(node, arguments, |listing, with_attributes| {
            listing.read_some(arguments.offset, |directory, entry| {
                if buffer.len() + size_of::<EntryOut>() + listed(entry, 0).length() > capacity {
                    return Ok(false);
                }
                // An entry that cannot be looked up is listed all the same: a lookup of it returns the error.
                let looked_up = match is_dot(entry) {
                    false if with_attributes => self.look_up_listed(node, directory, entry),
                    dot => {
                        if !dot {
                            self.readdirplus.listed(entry.kind == libc::DT_DIR);
                            names += u32::from(entry.kind != libc::DT_DIR);
                        }
                        None
                    }
                };
                let ino = match &looked_up {
                    Some(found) => found.attr.ino,
                    None => numbers.shown(directory, entry),
                };
                let unknown = || EntryOut {
                    attr: Attr { ino, mode: u32::from(entry.kind) << 12, ..Default::default() },
                    ..Default::default()
                };
                buffer.extend_from_slice(looked_up.unwrap_or_else(unknown).as_bytes());
                listed(entry, ino).push(buffer);
                Ok(true)
            })?;
            Ok(!buffer.is_empty())
        })?;
        if names > 0
            && let Some(listings) = self.cached_listings(node)
        {
            listings.listed(node.id, names);
        }
        Ok(Answer::Buffer)
    }

    /// Lets `read` continue the listing that a request names. `read` gets whether the entries come with their attributes, and
    /// returns whether it found any.
    fn continue_listing(
        &self,
        node: &Arc<Node>,
        arguments: &ReadIn,
        read: impl FnOnce(&mut SourceListing, bool) -> Result<bool, Errno>,
    ) -> Result<(), Errno> {
        if arguments.fh != HandleId::UNOPENED {
            let open = self.files.directory(arguments.fh)?;
            return open.read(|listing| {
                read(listing, open.with_attributes)?;
                self.drop_read_ahead_if_needed(listing);
                Ok(())
            });
        }
        let mut unopened = match (arguments.offset, self.unopened.take(node.id)) {
            (0, _) => UnopenedListing {
                listing: SourceListing::new(self.open_to_read(node)?),
                with_attributes: self.readdirplus.directory_opened(),
            },
            (_, Some(kept)) => kept,
            (_, None) => {
                UnopenedListing { listing: SourceListing::new(self.open_to_read(node)?), with_attributes: false }
            }
        };
        if read(&mut unopened.listing, unopened.with_attributes)? {
            self.unopened.keep(node.id, unopened);
        }
        Ok(())
    }

    /// Drops the entries read ahead if too many directories are open.
    fn drop_read_ahead_if_needed(&self, listing: &mut SourceListing) {
        if self.files.has_many_directories() {
            listing.drop_chunk();
        }
    }

    pub(super) fn release_directory(&self, handle: HandleId) -> Result<Answer, Errno> {
        if let Some(open) = self.files.remove_directory(handle)
            && let Some(listings) = self.cached_listings(&open.node)
        {
            listings.closed(open.node.id);
        }
        Ok(Answer::Done)
    }

    pub(super) fn sync_directory(&self, node: &Arc<Node>, arguments: &FsyncIn) -> Result<Answer, Errno> {
        let data_only = arguments.fsync_flags & FSYNC_FDATASYNC != 0;
        let sync = |directory: BorrowedFd<'_>| if data_only { fdatasync(directory) } else { fsync(directory) };
        if arguments.fh == HandleId::UNOPENED {
            sync(self.open_to_read(node)?.as_fd())?;
        } else {
            self.files.directory(arguments.fh)?.read(|listing| sync(listing.directory()))?;
        }
        Ok(Answer::Done)
    }

    fn look_up_listed(
        &self,
        parent: &Arc<Node>,
        directory: BorrowedFd<'_>,
        entry: DirectoryEntry<'_>,
    ) -> Option<EntryOut> {
        let (node, found) = self.find_in(directory, parent, entry.name, false).ok()?;
        self.warn_of_socket(&node, parent, entry.name);
        Some(found)
    }
}

/// The inode numbers of the entries in the answer to one request.
struct ShownNumbers<'a> {
    node: &'a Node,
    /// The listed directory, which is looked up at most once; `None` if that fails.
    itself: OnceCell<Option<Statx>>,
}

impl<'a> ShownNumbers<'a> {
    fn of(node: &'a Node) -> Self {
        Self { node, itself: OnceCell::new() }
    }

    /// The inode number of a listed file. `..` of the root has the root's number, because the volume hides the directory above.
    fn shown(&self, directory: BorrowedFd<'_>, entry: DirectoryEntry<'_>) -> u64 {
        let mount = &self.node.mount;
        let by_name = || self.look(directory, entry.name, AtFlags::empty());
        let itself = || *self.itself.get_or_init(|| self.look(directory, OsStr::new(""), AtFlags::EMPTY_PATH));
        let shown = match entry.name.as_bytes() {
            b".." if self.node.id == NodeId::ROOT => itself(),
            b".." if mount.has_several_devices() => by_name(),
            _ if entry.kind != libc::DT_DIR && mount.has_devices_by_file() => by_name(),
            _ => None,
        };
        if let Some(found) = shown {
            return mount.ino(device_of(&found), found.stx_ino);
        }
        // Where files have handles, all files of a directory have the directory's device, except for subvolumes: a listing has another
        // number of these than their attributes, as on the source.
        let device = if mount.has_several_devices() { itself().map(|found| device_of(&found)) } else { None };
        mount.listed_ino(device, entry.ino)
    }

    /// Looks up a file, if it is on the mount of the node.
    fn look(&self, directory: BorrowedFd<'_>, name: &OsStr, flags: AtFlags) -> Option<Statx> {
        let flags = flags | AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
        let found = statx(directory, name, flags, StatxFlags::INO | StatxFlags::MNT_ID).ok()?;
        (found.stx_mnt_id == self.node.mount.id()).then_some(found)
    }
}

fn is_dot(entry: DirectoryEntry<'_>) -> bool {
    entry.name == "." || entry.name == ".."
}

fn listed(entry: DirectoryEntry<'_>, ino: u64) -> ReaddirEntry<'_> {
    let DirectoryEntry { next, kind, name, .. } = entry;
    ReaddirEntry { ino, next, kind, name }
}
