//! Requests that make, remove or rename a file, or set its attributes.

use std::rc::Rc;

use podfs_nfs::error::Error;
use podfs_nfs::export::CallOptions;
use podfs_nfs::rpc::Credential;
use podfs_nfs::v3::{
    AttributeChanges, Attributes, CreateReply, Creation, FileType, NfsFileHandle, NfsStatus, SpecialFile, TimeChange,
    WccData,
};
use rustix::io::Errno;

use super::attributes::{changes, device_of};
use super::call_effects::WantedFile;
use super::nfs_request::NfsRequest;
use super::silly::{MAIN_STEP, SILLY_STEP};
use super::{NfsAnswer, NfsFilesystem};
use crate::nfs::client_state::node::NfsNode;
use crate::session::Answer;
use crate::session::abi::{EntryOut, MknodIn, SetattrIn, fattr};

/// The step of the guarded CREATE, which follows if the server has no exclusive CREATE.
const GUARDED_STEP: u32 = 2;
/// The step of the second RMDIR, after podfs has removed its own files from the directory.
const SECOND_STEP: u32 = 2;

impl NfsFilesystem {
    pub(super) async fn set_attributes(
        &self,
        node: &Rc<NfsNode>,
        arguments: &SetattrIn,
        nfs_request: &NfsRequest,
    ) -> Result<NfsAnswer, Errno> {
        self.refuse_if_read_only()?;
        let open = if arguments.valid & fattr::FH != 0 { self.state.files.get(arguments.fh).ok() } else { None };
        // A process that may write through an open file may truncate it, whatever the mode of the file is now.
        let credential = match open.filter(|_| arguments.valid & fattr::SIZE != 0) {
            Some(open) => open.credential.clone(),
            None => self.credential(nfs_request),
        };
        let found = self.set(node, &changes(arguments), &credential).await?;
        let holds = node.freshness.borrow().remaining(std::time::Instant::now());
        let attr = self.converter.attr(&found, node.is_silly());
        Ok(Answer::Attributes(super::attributes::attributes(attr, holds)).into())
    }

    /// Sets attributes. Returns the attributes after the change.
    pub(super) async fn set(
        &self,
        node: &Rc<NfsNode>,
        wanted: &AttributeChanges,
        credential: &Credential,
    ) -> Result<Attributes, Errno> {
        if node.kind == FileType::File {
            if wanted.size.is_some() {
                // The data has to be on disk: data that podfs sends again after a restart of the server would make the file longer.
                self.writeback().settle_on_disk(node.id).await;
            } else {
                // A WRITE that the server executes after SETATTR would change the times again.
                self.settle(node).await;
            }
        }
        let set = async |handle| self.export.setattr(CallOptions::new(credential), &handle, wanted, None).await;
        let around = self.with_handle(node, credential, set).await.map_err(|error| error.errno())?;
        self.changed(node, &around);
        match around.after {
            Some(found) => Ok(found),
            None => self.fetch_attributes(node).await,
        }
    }

    pub(super) async fn make_directory(
        &self,
        parent: &Rc<NfsNode>,
        name: &[u8],
        mode: u32,
        nfs_request: &NfsRequest,
    ) -> Result<NfsAnswer, Errno> {
        self.refuse_if_read_only()?;
        let (credential, query) = (self.credential(nfs_request), self.order.next());
        let wanted = AttributeChanges { mode: Some(mode & 0o7777), ..AttributeChanges::default() };
        let handle = parent.handle();
        let make = async |options: CallOptions<'_>| self.export.mkdir(options, &handle, name, &wanted).await;
        let once = nfs_request.once(&self.state.calls, MAIN_STEP, &credential, make).await?;
        let wanted_file = WantedFile { kind: FileType::Directory, target: None, device: None };
        let made = self.made(once, parent, name, wanted_file, &credential).await?;
        self.answer_created(parent, name, made, query, &credential).await
    }

    pub(super) async fn make_link(
        &self,
        parent: &Rc<NfsNode>,
        name: &[u8],
        target: &[u8],
        nfs_request: &NfsRequest,
    ) -> Result<NfsAnswer, Errno> {
        self.refuse_if_read_only()?;
        let (credential, query) = (self.credential(nfs_request), self.order.next());
        let wanted = AttributeChanges { mode: Some(0o777), ..AttributeChanges::default() };
        let handle = parent.handle();
        let make = async |options: CallOptions<'_>| self.export.symlink(options, &handle, name, target, &wanted).await;
        let once = nfs_request.once(&self.state.calls, MAIN_STEP, &credential, make).await?;
        let wanted_file = WantedFile { kind: FileType::Symlink, target: Some(target), device: None };
        let made = self.made(once, parent, name, wanted_file, &credential).await?;
        self.answer_created(parent, name, made, query, &credential).await
    }

    pub(super) async fn make_node(
        &self,
        parent: &Rc<NfsNode>,
        name: &[u8],
        arguments: &MknodIn,
        nfs_request: &NfsRequest,
    ) -> Result<NfsAnswer, Errno> {
        self.refuse_if_read_only()?;
        let (credential, query) = (self.credential(nfs_request), self.order.next());
        let mode = arguments.mode & 0o7777;
        let (major, minor) = device_of(arguments.rdev);
        let (kind, device, numbers) = match arguments.mode & libc::S_IFMT {
            libc::S_IFREG | 0 => {
                let (_, entry) = self.make_file(parent, name, mode, true, &credential, nfs_request).await?;
                return Ok(Answer::Entry(entry).into());
            }
            libc::S_IFCHR => (FileType::Character, SpecialFile::Character(major, minor), Some((major, minor))),
            libc::S_IFBLK => (FileType::Block, SpecialFile::Block(major, minor), Some((major, minor))),
            libc::S_IFIFO => (FileType::Pipe, SpecialFile::Pipe, None),
            libc::S_IFSOCK => (FileType::Socket, SpecialFile::Socket, None),
            _ => return Err(Errno::INVAL),
        };
        let wanted = AttributeChanges { mode: Some(mode), ..AttributeChanges::default() };
        let handle = parent.handle();
        let make = async |options: CallOptions<'_>| self.export.mknod(options, &handle, name, device, &wanted).await;
        let once = nfs_request.once(&self.state.calls, MAIN_STEP, &credential, make).await?;
        let wanted_file = WantedFile { kind, target: None, device: numbers };
        let made = self.made(once, parent, name, wanted_file, &credential).await?;
        self.answer_created(parent, name, made, query, &credential).await
    }

    /// Makes a regular file. With `exclusive`, an existing file is an error.
    pub(super) async fn make_file(
        &self,
        parent: &Rc<NfsNode>,
        name: &[u8],
        mode: u32,
        exclusive: bool,
        credential: &Credential,
        nfs_request: &NfsRequest,
    ) -> Result<(Rc<NfsNode>, EntryOut), Errno> {
        let query = self.order.next();
        let wanted = AttributeChanges { mode: Some(mode & 0o7777), ..AttributeChanges::default() };
        let verifier = self.verifier(nfs_request);
        let creation = if exclusive { Creation::Exclusive(verifier) } else { Creation::Unchecked(wanted) };
        let handle = parent.handle();
        let make = async |options: CallOptions<'_>| self.export.create(options, &handle, name, &creation).await;
        let once = nfs_request.once(&self.state.calls, MAIN_STEP, credential, make).await?;
        let half_made = match exclusive {
            true => self.half_made(&once, parent, name, &creation, credential).await?,
            false => None,
        };
        let lacks_exclusive = |error: &Error| error.status() == Some(NfsStatus::NOTSUPP);
        let mut made = match once.outcome {
            Err(error) if exclusive && lacks_exclusive(&error) => {
                let creation = Creation::Guarded(wanted);
                let make = async |options: CallOptions<'_>| self.export.create(options, &handle, name, &creation).await;
                let once = nfs_request.once(&self.state.calls, GUARDED_STEP, credential, make).await?;
                let wanted_file = WantedFile { kind: FileType::File, target: None, device: None };
                let made = self.made(once, parent, name, wanted_file, credential).await?;
                return self.enter_made(parent, name, made, query, credential).await;
            }
            Err(_) if half_made.is_some() => {
                CreateReply { handle: half_made, attributes: None, directory: WccData::default() }
            }
            outcome => outcome.map_err(|error| error.errno())?,
        };
        if exclusive {
            // The server may have kept the verifier in the file's times, and does not know the mode yet.
            let file = self.handle_of(&made, parent, name, credential).await?;
            let times = AttributeChanges { atime: TimeChange::ServerTime, mtime: TimeChange::ServerTime, ..wanted };
            let set = self.export.setattr(CallOptions::new(credential), &file, &times, None).await;
            made.attributes = set.map_err(|error| error.errno())?.after;
            made.handle = Some(file);
        }
        self.enter_made(parent, name, Ok(made), query, credential).await
    }

    /// The verifier of an exclusive CREATE, which the server keeps with the file: no other request has the same.
    fn verifier(&self, nfs_request: &NfsRequest) -> [u8; 8] {
        // Neighbouring numbers come out far from each other (the finalizer of SplitMix64).
        let mut word = self.seed.wrapping_add(nfs_request.unique.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        // Some servers keep the verifier in the file's times, and lose the first bits of each.
        ((word ^ (word >> 31)) & 0x7fff_ffff_3fff_ffff).to_be_bytes()
    }

    async fn handle_of(
        &self,
        made: &CreateReply,
        parent: &NfsNode,
        name: &[u8],
        credential: &Credential,
    ) -> Result<NfsFileHandle, Errno> {
        match made.handle {
            Some(handle) => Ok(handle),
            None => Ok(self.examine_name(parent, name, credential).await?.ok_or(Errno::NOENT)?.0),
        }
    }

    async fn answer_created(
        &self,
        parent: &Rc<NfsNode>,
        name: &[u8],
        made: Result<CreateReply, (NfsFileHandle, Attributes)>,
        query: u64,
        credential: &Credential,
    ) -> Result<NfsAnswer, Errno> {
        let (_, entry) = self.enter_made(parent, name, made, query, credential).await?;
        Ok(Answer::Entry(entry).into())
    }

    /// The node of a new file.
    async fn enter_made(
        &self,
        parent: &Rc<NfsNode>,
        name: &[u8],
        made: Result<CreateReply, (NfsFileHandle, Attributes)>,
        query: u64,
        credential: &Credential,
    ) -> Result<(Rc<NfsNode>, EntryOut), Errno> {
        match made {
            Ok(made) => {
                self.changed(parent, &made.directory);
                match made.handle {
                    Some(handle) => self.enter(parent, name, handle, made.attributes, query).await,
                    None => self.find(parent, name, credential).await,
                }
            }
            Err((handle, found)) => {
                parent.freshness.borrow_mut().expire();
                self.enter(parent, name, handle, Some(found), query).await
            }
        }
    }

    pub(super) async fn unlink(
        self: &Rc<Self>,
        parent: &Rc<NfsNode>,
        name: &[u8],
        nfs_request: &Rc<NfsRequest>,
    ) -> Result<NfsAnswer, Errno> {
        self.refuse_if_read_only()?;
        let credential = self.credential(nfs_request);
        if let Some(open) = self.file_to_keep(parent, name, &credential, nfs_request).await? {
            let (filesystem, parent, name) = (Rc::clone(self), Rc::clone(parent), name.to_vec());
            let nfs_request = Rc::clone(nfs_request);
            let rename =
                async move { filesystem.rename_to_silly(&open, &parent, &name, &credential, &nfs_request).await };
            self.make_to_the_end(rename).await?;
            return Ok(Answer::Done.into());
        }
        let _removal = self.begin_removal(parent, name);
        let handle = parent.handle();
        // A dead server may have renamed the file because it was open, and the file may have been closed meanwhile.
        let was_renamed = nfs_request.resent && self.state.calls.was_begun(nfs_request.unique, SILLY_STEP);
        let remove = async |options: CallOptions<'_>| self.export.remove(options, &handle, name).await;
        let mut once = nfs_request.once(&self.state.calls, MAIN_STEP, &credential, remove).await?;
        once.doubtful |= was_renamed;
        if let Some(around) = self.removed(once, parent, name, &credential).await? {
            self.changed(parent, &around);
        }
        self.lost_name(parent, name);
        Ok(Answer::Done.into())
    }

    pub(super) async fn remove_directory(
        &self,
        parent: &Rc<NfsNode>,
        name: &[u8],
        nfs_request: &NfsRequest,
    ) -> Result<NfsAnswer, Errno> {
        self.refuse_if_read_only()?;
        let (credential, handle) = (self.credential(nfs_request), parent.handle());
        let remove = async |options: CallOptions<'_>| self.export.rmdir(options, &handle, name).await;
        let remove_in_step = async |step| {
            let once = nfs_request.once(&self.state.calls, step, &credential, &remove).await?;
            self.removed(once, parent, name, &credential).await
        };
        // Some servers answer `EXIST` for a directory that is not empty.
        let is_not_empty = |errno: &Errno| matches!(*errno, Errno::EXIST | Errno::NOTEMPTY);
        let mut removed = remove_in_step(MAIN_STEP).await;
        if removed.as_ref().is_err_and(is_not_empty)
            && let Some(directory) = self.state.nodes.at(parent.id, name)
            && self.remove_unused_in(&directory).await
        {
            // The directory had only files that were closed just now.
            removed = remove_in_step(SECOND_STEP).await;
        }
        let around = removed.map_err(|errno| if is_not_empty(&errno) { Errno::NOTEMPTY } else { errno })?;
        if let Some(around) = around {
            self.changed(parent, &around);
        }
        self.lost_name(parent, name);
        Ok(Answer::Done.into())
    }

    /// Records that a name does not exist any more, and that its file has one name less.
    fn lost_name(&self, parent: &NfsNode, name: &[u8]) {
        if let Some(node) = self.state.nodes.at(parent.id, name) {
            self.state.nodes.unname(&node);
            node.freshness.borrow_mut().expire();
        }
    }

    pub(super) async fn rename(
        self: &Rc<Self>,
        from: (&Rc<NfsNode>, &[u8]),
        to: (&Rc<NfsNode>, &[u8]),
        flags: u32,
        nfs_request: &Rc<NfsRequest>,
    ) -> Result<NfsAnswer, Errno> {
        self.refuse_if_read_only()?;
        if flags != 0 {
            // NFSv3 has no such operation.
            return Err(Errno::INVAL);
        }
        let credential = self.credential(nfs_request);
        let moved = self.state.nodes.at(from.0.id, from.1);
        let is_other = |node: &Rc<NfsNode>| moved.as_ref().is_none_or(|moved| moved.id != node.id);
        let file_to_keep = self.file_to_keep(to.0, to.1, &credential, nfs_request).await?.filter(is_other);
        if file_to_keep.is_none() {
            let _removal = self.begin_removal(to.0, to.1);
            self.replace(from, to, moved, None, &credential, nfs_request).await?;
            return Ok(Answer::Done.into());
        }
        let own = |(directory, name): (&Rc<NfsNode>, &[u8])| (Rc::clone(directory), name.to_vec());
        let (filesystem, from, to, nfs_request) = (Rc::clone(self), own(from), own(to), Rc::clone(nfs_request));
        let replace = async move {
            let (from, to) = ((&from.0, &*from.1), (&to.0, &*to.1));
            filesystem.replace(from, to, moved, file_to_keep, &credential, &nfs_request).await
        };
        self.make_to_the_end(replace).await?;
        Ok(Answer::Done.into())
    }

    /// Renames the file `moved`. An open file `file_to_keep`, which would lose its last name, gets a silly name first.
    async fn replace(
        &self,
        from: (&Rc<NfsNode>, &[u8]),
        to: (&Rc<NfsNode>, &[u8]),
        moved: Option<Rc<NfsNode>>,
        file_to_keep: Option<Rc<NfsNode>>,
        credential: &Credential,
        nfs_request: &NfsRequest,
    ) -> Result<(), Errno> {
        if let Some(open) = &file_to_keep {
            self.link_silly(open, to.0, credential, nfs_request).await?;
        }
        let (old, new) = (from.0.handle(), to.0.handle());
        let rename = async |options: CallOptions<'_>| self.export.rename(options, (&old, from.1), (&new, to.1)).await;
        let once = nfs_request.once(&self.state.calls, MAIN_STEP, credential, rename).await?;
        let renamed = moved.clone().or_else(|| self.state.nodes.at(to.0.id, to.1).filter(|_| nfs_request.resent));
        let named = self.named(once, NfsStatus::NOENT, renamed.as_deref(), (to.0, to.1), credential).await;
        match named {
            Ok(Some((old_around, new_around))) => {
                self.changed(from.0, &old_around);
                self.changed(to.0, &new_around);
            }
            Ok(None) => [from.0, to.0].into_iter().for_each(|directory| directory.freshness.borrow_mut().expire()),
            Err(error) => {
                if let Some(open) = &file_to_keep {
                    self.remove_silly_link(open, to.0, credential, nfs_request).await;
                }
                return Err(match error.errno() {
                    Errno::EXIST => Errno::NOTEMPTY,
                    errno => errno,
                });
            }
        }
        match &file_to_keep {
            Some(open) => self.record_silly(open, to.0, nfs_request, credential)?,
            None => self.replaced(to, moved.as_deref()),
        }
        if let Some(moved) = &moved {
            self.state.nodes.rename(moved, to.0.id, to.1)?;
            moved.freshness.borrow_mut().expire();
        }
        if let Some(open) = &file_to_keep {
            // Its last close may have come meanwhile.
            self.remove_if_unused(open).await;
        }
        Ok(())
    }

    /// Records that a file has lost its name to the renamed file, unless both are the same file.
    fn replaced(&self, to: (&Rc<NfsNode>, &[u8]), moved: Option<&NfsNode>) {
        let earlier = self.state.nodes.at(to.0.id, to.1);
        if earlier.is_some_and(|earlier| moved.is_none_or(|moved| moved.id != earlier.id)) {
            self.lost_name(to.0, to.1);
        }
    }

    pub(super) async fn link(
        &self,
        node: &Rc<NfsNode>,
        parent: &Rc<NfsNode>,
        name: &[u8],
        nfs_request: &NfsRequest,
    ) -> Result<NfsAnswer, Errno> {
        self.refuse_if_read_only()?;
        let (credential, query) = (self.credential(nfs_request), self.order.next());
        let (file, directory) = (node.handle(), parent.handle());
        let link = async |options: CallOptions<'_>| self.export.link(options, &file, &directory, name).await;
        // A LINK makes one call only, which podfs records under this number.
        let once = nfs_request.once(&self.state.calls, SILLY_STEP, &credential, link).await?;
        let named = self.named(once, NfsStatus::EXIST, Some(node), (parent, name), &credential).await;
        let linked = named.map_err(|error| error.errno())?;
        let attributes = match linked {
            Some(linked) => {
                self.changed(parent, &linked.directory);
                linked.attributes
            }
            None => None,
        };
        let (_, entry) = self.enter(parent, name, node.handle(), attributes, query).await?;
        Ok(Answer::Entry(entry).into())
    }
}
