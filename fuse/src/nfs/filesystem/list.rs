//! Open directories.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::rc::Rc;
use std::time::Instant;

use podfs_nfs::error::Error;
use podfs_nfs::export::CallOptions;
use podfs_nfs::v3::{self, NfsStatus};
use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::attributes::entry;
use super::nfs_request::NfsRequest;
use super::{NfsAnswer, NfsFilesystem, new_node};
use crate::nfs::client_state::freshness::AttributeChange;
use crate::nfs::client_state::inherit::is_name;
use crate::nfs::client_state::listing::NfsListing;
use crate::nfs::client_state::node::NfsNode;
use crate::nfs::client_state::open_files::NfsOpenFile;
use crate::nfs::file_type::file_type;
use crate::session::abi::{Attr, EntryOut, OpenOut, ReadIn};
use crate::session::{Answer, NodeId, ReaddirEntry};

impl NfsFilesystem {
    pub(super) async fn open_directory(
        &self,
        node: &Rc<NfsNode>,
        nfs_request: &NfsRequest,
    ) -> Result<NfsAnswer, Errno> {
        let credential = self.credential(nfs_request);
        if self.rights(node, v3::access::READ, &credential).await? & v3::access::READ == 0 {
            return Err(Errno::ACCESS);
        }
        let open = self.state.files.add(nfs_request.unique, node, credential, true)?;
        nfs_request.set_opened(&open);
        Ok(Answer::Open(OpenOut { fh: open.handle, open_flags: 0, backing_id: 0 }).into())
    }

    pub(super) async fn read_directory(&self, arguments: &ReadIn, plus: bool) -> Result<NfsAnswer, Errno> {
        let open = self.state.files.get(arguments.fh)?;
        let listing = open.listing.as_ref().ok_or(Errno::NOTDIR)?;
        let (mut offset, capacity) = (arguments.offset, arguments.size as usize);
        if offset == 0 {
            listing.borrow_mut().rewind();
        }
        let mut buffer = Vec::new();
        loop {
            if !listing.borrow().has(offset) {
                self.read_page(&open, listing, offset, plus).await?;
            }
            let page = listing.borrow().page.clone();
            let (begin, page) = page.ok_or(Errno::IO)?;
            let query = self.order.next();
            let mut is_behind = begin == offset;
            let mut is_full = false;
            for one in page.entries() {
                if !is_behind {
                    is_behind = one.cookie == offset;
                    continue;
                }
                let mut state = listing.borrow_mut();
                if state.skip > 0 {
                    state.skip -= 1;
                } else if self.is_shown(&open.node, &one) {
                    drop(state);
                    if !self.push(&open.node, &one, plus, capacity, query, &mut buffer) {
                        is_full = true;
                        break;
                    }
                    state = listing.borrow_mut();
                }
                offset = one.cookie;
                (state.given, state.at) = (state.given + 1, offset);
            }
            // An answer has entries of one page. If podfs hides all entries of the page, it reads the next one.
            if is_full || page.is_last || !buffer.is_empty() {
                return Ok(NfsAnswer::Bytes(buffer));
            }
        }
    }

    /// Reads the page behind `offset`.
    async fn read_page(
        &self,
        open: &Rc<NfsOpenFile>,
        listing: &std::cell::RefCell<NfsListing>,
        offset: u64,
        plus: bool,
    ) -> Result<(), Errno> {
        let verifier = if offset == 0 { [0; 8] } else { open.verifier() };
        let query = self.order.next();
        let page = match self.fetch_page(open, offset, verifier, plus).await {
            Err(error) if error.status() == Some(NfsStatus::BAD_COOKIE) && offset != 0 => {
                // The directory was rearranged. podfs reads it from the start, and skips as many entries as the kernel got.
                let (at, given, restarted_after) = {
                    let state = listing.borrow();
                    (state.at, state.given, state.restarted_after)
                };
                if at != offset {
                    // podfs does not know how many entries were before this offset.
                    return Err(Errno::IO);
                }
                if given <= restarted_after {
                    // Since podfs began from the start, it has got no entry that the kernel does not have.
                    self.warn_of_loop(&open.node);
                    return Err(Errno::IO);
                }
                let page = self.fetch_page(open, 0, [0; 8], plus).await.map_err(|error| error.errno())?;
                let mut state = listing.borrow_mut();
                (state.restarted_after, state.skip, state.given) = (given, given, 0);
                open.set_verifier(page.verifier);
                // For the kernel, the page still begins at `offset`.
                state.page = Some((offset, page));
                return Ok(());
            }
            page => page.map_err(|error| error.errno())?,
        };
        if let Some(directory) = &page.directory {
            self.learn(&open.node, directory, query);
        }
        let last = page.entries().last().map(|last| last.cookie);
        if !page.is_last && last.is_none_or(|last| last == offset) {
            self.warn_of_loop(&open.node);
            return Err(Errno::IO);
        }
        open.set_verifier(page.verifier);
        listing.borrow_mut().page = Some((offset, page));
        Ok(())
    }

    async fn fetch_page(
        &self,
        open: &Rc<NfsOpenFile>,
        offset: u64,
        verifier: [u8; 8],
        plus: bool,
    ) -> Result<v3::DirectoryPage, Error> {
        let options = CallOptions::new(&open.credential);
        if plus && self.has_readdirplus.get() {
            let ask = async |handle| self.export.readdirplus(options, &handle, offset, verifier).await;
            match self.with_handle(&open.node, &open.credential, ask).await {
                Err(error) if error.status() == Some(NfsStatus::NOTSUPP) => self.has_readdirplus.set(false),
                page => return page,
            }
        }
        let ask = async |handle| self.export.readdir(options, &handle, offset, verifier).await;
        self.with_handle(&open.node, &open.credential, ask).await
    }

    /// Adds an entry, if there is room.
    fn push(
        &self,
        directory: &NfsNode,
        one: &v3::ListedEntry<'_>,
        plus: bool,
        capacity: usize,
        query: u64,
        buffer: &mut Vec<u8>,
    ) -> bool {
        let kind = one.attributes.map_or(0, |found| file_type(found.kind) >> 12);
        let is_dot = one.name == b"." || one.name == b"..";
        let ino = match (&one.attributes, one.name) {
            // `..` of the root has the root's own inode number: podfs hides the directory above the export.
            (_, b"..") if directory.id == NodeId::ROOT => directory.fileid,
            (Some(found), _) => self.converter.ino(found),
            (None, _) => one.fileid,
        };
        let kind = if is_dot { libc::DT_DIR } else { kind as u8 };
        let listed = ReaddirEntry { ino, next: one.cookie, kind, name: OsStr::from_bytes(one.name) };
        let header = if plus { size_of::<EntryOut>() } else { 0 };
        if buffer.len() + header + listed.length() > capacity {
            return false;
        }
        if plus {
            let looked_up = if is_dot { None } else { self.enter_listed(directory, one, query) };
            let unknown = || EntryOut {
                attr: Attr { ino, mode: u32::from(kind) << 12, ..Default::default() },
                ..Default::default()
            };
            buffer.extend_from_slice(looked_up.unwrap_or_else(unknown).as_bytes());
        }
        listed.push(buffer);
        true
    }

    /// Enters the node of a listed file for the kernel. None for a file with data that is on its way to the server: the listed
    /// attributes do not include the data, so the kernel has to look the file up.
    fn enter_listed(&self, directory: &NfsNode, one: &v3::ListedEntry<'_>, query: u64) -> Option<EntryOut> {
        let (attributes, handle) = (one.attributes?, one.handle?);
        if self.state.nodes.find(&handle).is_some_and(|node| self.writeback().has_data(node.id)) {
            return None;
        }
        let node = self.state.nodes.enter(new_node(handle, &attributes), Some((directory.id, one.name))).ok()?;
        if self.learn(&node, &attributes, query) == AttributeChange::Outdated {
            self.forget(node.id, 1);
            return None;
        }
        let holds = node.freshness.borrow().remaining(Instant::now());
        Some(entry(node.id, self.converter.attr(&attributes, node.is_silly()), self.name_holds(directory), holds))
    }

    /// Whether an entry is shown to the kernel.
    fn is_shown(&self, directory: &NfsNode, one: &v3::ListedEntry<'_>) -> bool {
        let is_dot = one.name == b"." || one.name == b"..";
        is_dot || (is_name(one.name) && !self.is_silly_name(directory, one.name))
    }

    /// Logs once that the listing of a directory does not end.
    fn warn_of_loop(&self, directory: &NfsNode) {
        if !self.is_loop_logged.replace(true) {
            let (volume, server, path) =
                (self.options.name.as_str(), &self.options.export.server, self.path(directory.id, None));
            tracing::warn!(
                volume,
                "volume {volume:?}: NFS server {server} lists the directory {path} without coming to an end; reading it \
                 fails with EIO"
            );
        }
    }
}
